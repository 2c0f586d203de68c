"""Nodes: admission, liveness, holds, drain, inventory."""

from __future__ import annotations

from dataclasses import replace

from controld.core import events, keys
from controld.core.commands import (
    AdmitNode,
    DrainNode,
    MarkLive,
    MarkSuspect,
    Now,
    PlaceHold,
    ReleaseHold,
    RemoveNode,
    ReportInventory,
)
from controld.core.draft import Draft
from controld.core.ids import JobId
from controld.core.model import CheckpointState, Hold, LeaseState, Liveness, Node, TaskExit, Tier
from controld.core.outcome import Outcome, Refused, Reply, Transition
from controld.core.state import State
from controld.core.transitions import requests
from virialpb.reasons import ExitReason, Reason

# The owner of the hold that a drain places; nobody else may use it.
DRAIN_OWNER = "drain"


def admit(state: State, command: AdmitNode, now: Now) -> Outcome:
    draft = Draft(state)
    uid = command.incarnation.node_uid
    known = state.nodes.get(uid)
    if command.certified and known is not None and known.name != command.name:
        # A uid is no secret: with it, another node's certificate would take this node's place and its leases.
        return Refused(Reason.PERMISSION_DENIED, f"nodes/{known.name}", detail=uid)
    namesake = state.node_named(command.name)
    if namesake is not None and namesake.uid != uid:
        # A re-imaged host comes back with another identity. Its old one may go only when it can hold nothing.
        if namesake.liveness is not Liveness.EXPIRED or draft.held_on(namesake.uid):
            return Refused(Reason.ALREADY_EXISTS, f"nodes/{command.name}", detail=namesake.uid)
        draft.delete(keys.node(namesake.uid))
        draft.tell(events.of_node("node.replaced", namesake))
    if known is None:
        node = Node(
            uid=uid,
            name=command.name,
            incarnation=command.incarnation,
            liveness=Liveness.LIVE,
            advertise_address=command.advertise_address,
            fencing=command.fencing,
            cpu_millis=command.cpu_millis,
            memory_bytes=command.memory_bytes,
            labels=command.labels,
            version=command.version,
            # Said of the host, not of its disk: a new system does not mend what an operator held it back for.
            holds=() if namesake is None else namesake.holds,
            draining=namesake is not None and namesake.draining,
        )
        draft.put(node)
        draft.tell(events.of_node("node.admitted", node, details={"fencing": node.fencing}))
        return draft.done(Reply(uid))
    node = replace(
        known,
        name=command.name,
        incarnation=command.incarnation,
        liveness=Liveness.LIVE,
        advertise_address=command.advertise_address,
        fencing=command.fencing,
        cpu_millis=command.cpu_millis,
        memory_bytes=command.memory_bytes,
        labels=command.labels,
        version=command.version,
    )
    if node == known:
        return Transition(reply=Reply(uid))
    draft.put(node)
    if command.incarnation != known.incarnation:
        _release_gone(draft, command)
        draft.tell(events.of_node("node.returned", node, reason="NEW_INCARNATION"))
    elif known.liveness is not Liveness.LIVE:
        draft.tell(events.of_node("node.live", node))
    return draft.done(Reply(uid))


def _release_gone(draft: Draft, command: AdmitNode) -> None:
    """Leases of slots whose processes the new guardian saw gone are free at once.

    Only on the same boot: another boot id may as well be a clone of the data directory on another host while the
    first still runs, so those leases stay locked until their own deadline.
    """
    gone = set(command.gone_slots)
    for generation, member in draft.held_on(command.incarnation.node_uid):
        if member.slot in gone and member.incarnation.boot_id == command.incarnation.boot_id:
            current = draft.generation(generation.job, generation.number) or generation
            draft.change_member(
                current, replace(member, lease=LeaseState.RELEASED, exit=TaskExit(ExitReason.GUARDIAN_LOST))
            )
            numbers = {} if member.rank is None else {"rank": member.rank}
            draft.tell(
                events.of_generation(
                    "lease.released", current, node=command.name, reason="GUARDIAN_LOST", numbers=numbers
                )
            )


def _same_life(state: State, command: MarkSuspect | MarkLive | ReportInventory) -> Node | Refused:
    node = state.nodes.get(command.incarnation.node_uid)
    if node is None:
        return Refused(Reason.NOT_FOUND, f"nodes/{command.incarnation.node_uid}")
    if node.incarnation != command.incarnation:
        return Refused(Reason.STALE, f"nodes/{node.name}", detail="incarnation")
    return node


def mark_suspect(state: State, command: MarkSuspect) -> Outcome:
    node = _same_life(state, command)
    if isinstance(node, Refused):
        return node
    if node.liveness is not Liveness.LIVE:
        return Transition()
    draft = Draft(state)
    draft.put(replace(node, liveness=Liveness.SUSPECT))
    draft.tell(events.of_node("node.suspect", node, reason="BEATS_MISSING"))
    return draft.done()


def mark_live(state: State, command: MarkLive) -> Outcome:
    node = _same_life(state, command)
    if isinstance(node, Refused):
        return node
    if node.liveness is Liveness.LIVE:
        return Transition()
    draft = Draft(state)
    draft.put(replace(node, liveness=Liveness.LIVE))
    draft.tell(events.of_node("node.live", node))
    return draft.done()


def report_inventory(state: State, command: ReportInventory) -> Outcome:
    node = _same_life(state, command)
    if isinstance(node, Refused):
        return node
    if node.inventory == command.inventory:
        return Transition()
    draft = Draft(state)
    draft.put(replace(node, inventory=command.inventory))
    draft.tell(events.of_node("inventory.changed", node))
    return draft.done()


def place_hold(state: State, command: PlaceHold, now: Now) -> Outcome:
    replayed = requests.replay(state, command)
    if replayed is not None:
        return replayed
    node = state.nodes.get(command.node)
    if node is None:
        return Refused(Reason.NOT_FOUND, f"nodes/{command.node}")
    hold = command.hold
    if command.expire_after_ns:
        hold = replace(hold, expire_time_unix_ns=now.unix_ns + command.expire_after_ns)
    if hold.device_key and all(d.key != hold.device_key for d in node.inventory.devices):
        return Refused(Reason.NOT_FOUND, f"nodes/{node.name}/devices/{hold.device_key}")
    draft = Draft(state)
    # What has run out goes here: it needs no commit to end, but must not pile up.
    others = tuple(
        h for h in node.holds if (h.owner, h.device_key) != (hold.owner, hold.device_key) and h.active(now.unix_ns)
    )
    draft.put(replace(node, holds=(*others, hold)))
    requests.remember(draft, command, command.node, now)
    draft.tell(events.of_node("hold.placed", node, reason=hold.reason, details={"owner": hold.owner}))
    return draft.done(Reply(command.node))


def release_hold(state: State, command: ReleaseHold, now: Now) -> Outcome:
    replayed = requests.replay(state, command)
    if replayed is not None:
        return replayed
    node = state.nodes.get(command.node)
    if node is None:
        return Refused(Reason.NOT_FOUND, f"nodes/{command.node}")
    kept = tuple(h for h in node.holds if (h.owner, h.device_key) != (command.owner, command.device_key))
    if kept == node.holds:
        return Refused(Reason.NOT_FOUND, f"nodes/{node.name}/holds/{command.owner}")
    draft = Draft(state)
    draining = node.draining and any(h.owner == DRAIN_OWNER for h in kept)
    draft.put(replace(node, holds=kept, draining=draining))
    requests.remember(draft, command, command.node, now)
    draft.tell(events.of_node("hold.released", node, details={"owner": command.owner}))
    return draft.done(Reply(command.node))


def drain(state: State, command: DrainNode, now: Now) -> Outcome:
    replayed = requests.replay(state, command)
    if replayed is not None:
        return replayed
    node = state.nodes.get(command.node)
    if node is None:
        return Refused(Reason.NOT_FOUND, f"nodes/{command.node}")
    draft = Draft(state)
    others = tuple(h for h in node.holds if h.owner != DRAIN_OWNER)
    draft.put(replace(node, draining=True, holds=(*others, Hold(DRAIN_OWNER, command.reason))))
    requests.remember(draft, command, command.node, now)
    draft.tell(events.of_node("node.draining", node, reason=command.reason))
    return draft.done(Reply(command.node))


def remove(state: State, command: RemoveNode, now: Now) -> Outcome:
    """Only a lost one that can hold nothing any more. `detail` of a refusal: LIVENESS, or LEASES or CHECKPOINTS and the
    jobs that they belong to: shards of a job that still runs, which are nowhere else."""
    replayed = requests.replay(state, command)
    if replayed is not None:
        return replayed
    node = state.node_named(command.name)
    if node is None:
        return Refused(Reason.NOT_FOUND, f"nodes/{command.name}")
    subject = f"nodes/{node.name}"
    if node.liveness is not Liveness.EXPIRED:
        return Refused(Reason.NOT_NOW, subject, detail=f"LIVENESS {node.liveness}")
    draft = Draft(state)
    leases = sorted({generation.job for generation, _ in draft.held_on(node.uid)})
    if leases:
        return Refused(Reason.NOT_NOW, subject, detail=f"LEASES {', '.join(leases)}")
    kept = sorted(job for job in state.checkpoints if _only_there(state, job, node))
    if kept:
        return Refused(Reason.NOT_NOW, subject, detail=f"CHECKPOINTS {', '.join(kept)}")
    draft.delete(keys.node(node.uid))
    requests.remember(draft, command, node.uid, now)
    draft.tell(events.of_node("node.removed", node))
    return draft.done(Reply(node.uid))


def _only_there(state: State, job: JobId, node: Node) -> bool:
    """Whether a job that has not ended has shards on the node's own disk."""
    record = state.jobs.get(job)
    if record is None or record.state.ended:
        return False
    return any(
        checkpoint.state is CheckpointState.COMMITTED
        and checkpoint.tier is Tier.LOCAL
        and any(part.node == node.uid for part in checkpoint.parts)
        for checkpoint in state.checkpoints[job].values()
    )
