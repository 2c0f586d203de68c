"""Settings of a leader. Every queue, batch, window and wait has a bound here."""

from __future__ import annotations

from dataclasses import dataclass, field

from controld.reconcile.limits import Limits


@dataclass(frozen=True, slots=True)
class LeaderSettings:
    """Defaults are measured or derived in docs/design; sizes in bytes, times as their names say.

    `batch_operations_max` and `batch_bytes_max` stay below what an etcd with its default limits takes in one
    transaction (1.5 MiB; 512 operations of the member we configure).
    """

    limits: Limits = field(default_factory=Limits)
    renew_interval_ms: int = 1_000

    queue_commands_max: int = 4_096
    queue_own_commands_max: int = 65_536
    batch_commands_max: int = 1_024
    batch_operations_max: int = 512
    batch_bytes_max: int = 1 << 20
    # A record of a large gang is written whole for every commit that changes a part of it: parts of a checkpoint, and
    # ranks that have ended, wait so long for others like them. 4,096 of them are half a megabyte.
    gather_seconds: float = 0.2
    gather_ranks_min: int = 256
    # Deciding and encoding so many takes some 5 ms: then everyone else has a turn, and the store has work.
    slice_commands: int = 128
    # Where they take longer, as with gangs of thousands; on a busy machine the time also passes by itself.
    slice_seconds: float = 0.03
    # Fewer are not worth deciding while a commit is under way: they are done in a fraction of it afterwards.
    ahead_commands_min: int = 16
    commit_attempts_max: int = 3
    commit_retry_seconds: float = 0.05

    barrier_interval_seconds: float = 0.25
    barrier_retry_seconds: float = 0.05

    tick_interval_seconds: float = 1.0
    # Wake-ups closer than this share a tick.
    tick_gap_seconds: float = 0.005
    pulse_interval_seconds: float = 0.1

    plan_retry_seconds: float = 0.5
    grant_backoff_seconds: float = 1.0
    grant_backoff_max_seconds: float = 60.0

    session_orders_max: int = 512
    session_replies_max: int = 512
    session_calls_max: int = 256
    duplicate_event_interval_seconds: float = 60.0
    # A session whose last beat is older than so many renew intervals does not defend its place.
    duplicate_beats_missed: int = 3

    watch_commits_max: int = 10_000
    watch_bytes_max: int = 64 << 20

    prune_interval_seconds: float = 60.0
    request_keep_seconds: int = 24 * 3_600
    events_max: int = 10_000
    ended_jobs_max: int = 1_000

    # Of one replica of several: after its stream of commits broke; until its copy has its own takeover, else it loads;
    # for a successor to take its place, each and all of them.
    follow_retry_seconds: float = 0.05
    reach_seconds: float = 1.0
    hand_over_seconds: float = 1.0
    hand_overs_seconds: float = 2.0
    # A call that comes while it is not clear who leads waits so long for that, rather than be refused at once.
    doubt_seconds: float = 1.0

    cursor_window_seconds: float = 600.0
    compact_interval_seconds: float = 60.0

    stop_timeout_seconds: float = 5.0
