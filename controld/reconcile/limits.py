"""Times and bounds of the control loop. Defaults as in the design: renew 1 s, grace 1 s, fence_after 60 s."""

from __future__ import annotations

from dataclasses import dataclass

from controld.core.spec import SECOND_NS


@dataclass(frozen=True, slots=True)
class Limits:
    grace_ns: int = SECOND_NS
    session_fence_after_ns: int = 60 * SECOND_NS
    # A node that this leader has never heard: agents need this long to find a new leader.
    reconnect_ns: int = 10 * SECOND_NS
    # Until every rank is ready; and this much longer for each byte of the largest shard, which is read to be verified.
    prepare_timeout_ns: int = 60 * SECOND_NS
    restore_bytes_per_second_min: int = 10_000_000
    # An agent that tells how far it has read its shard, and reads no further. A shared file system that fails over to
    # its other server is silent for longer than the 10 s that a design for local disks would give it.
    prepare_stall_ns: int = 30 * SECOND_NS
    # From GO until every rank runs: the agent has everything ready, and starts a process.
    go_timeout_ns: int = 60 * SECOND_NS
    # The node beats, but not one beat knows the slot: it does not hear its orders. Another may be free.
    unheard_ns: int = 10 * SECOND_NS
    resend_ns: int = SECOND_NS
    # How long a gang on a draining node may take to save before it is stopped all the same.
    drain_save_ns: int = 30 * SECOND_NS
    # A node that could not get a job ready is left out of that job's plans: first so long, then doubled.
    refusal_back_off_ns: int = 5 * SECOND_NS
    refusal_back_off_max_ns: int = 300 * SECOND_NS
    # Between generations that made no progress: first so long, then doubled.
    restart_back_off_ns: int = SECOND_NS
    restart_back_off_max_ns: int = 60 * SECOND_NS
    # A node that has not deleted a shared checkpoint's files in this time: another is asked.
    drop_patience_ns: int = 60 * SECOND_NS
    expiries_per_tick_max: int = 50
    collects_per_tick_max: int = 20
