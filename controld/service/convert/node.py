"""Nodes and the cluster as callers see them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from controld.core import keys
from controld.core.commands import Now
from controld.core.ids import Epoch
from controld.core.model import Generation, Hold, Liveness, Member, Node
from controld.core.state import State
from controld.health.view import View
from controld.service.convert.common import NODES, cursor_to_proto, epoch_to_proto, incarnation_to_proto
from controld.service.convert.inventory import inventory_to_proto, sample_to_proto
from controld.service.problems import Problems
from virialpb.v1 import cluster_pb2

MS_NS = 1_000_000


def node_to_proto(
    node: Node, held: list[tuple[Generation, Member]], state: State, view: View, now: Now, *, brief: bool = False
) -> cluster_pb2.Node:
    """`held`: the leases on it (`capacity.holding`). `brief` leaves out inventory and readings."""
    session = view.sessions.get(node.uid)
    if session is not None and session.incarnation != node.incarnation:
        session = None
    holds = [hold for hold in node.holds if not hold.expire_time_unix_ns or hold.expire_time_unix_ns > now.unix_ns]
    message = cluster_pb2.Node(
        name=f"{NODES}{node.name}",
        uid=node.uid,
        incarnation=incarnation_to_proto(node.incarnation),
        liveness=node.liveness.value,
        connected=session is not None and session.connected,
        schedulable=(
            node.liveness is Liveness.LIVE
            and session is not None
            and session.connected
            and session.reported
            and session.guardian_ok
            and not node.draining
            and all(hold.device_key for hold in holds)
        ),
        draining=node.draining,
        holds=[_hold(hold) for hold in holds],
        advertise_address=node.advertise_address,
        fencing=node.fencing,
        cpu_millis=node.cpu_millis,
        memory_bytes=node.memory_bytes,
        # A smaller report than what is leased out leaves nothing free, not less.
        cpu_free_millis=max(0, node.cpu_millis - sum(member.cpu_millis for _, member in held)),
        memory_free_bytes=max(0, node.memory_bytes - sum(member.memory_bytes for _, member in held)),
        labels=dict(node.labels),
        slots=sorted(member.slot for _, member in held),
        revision=state.modified.get(keys.node(node.uid), 0),
        beat_age_ms=-1,
        version=node.version,
    )
    if session is not None and session.last_receipt_ns is not None:
        message.beat_age_ms = max(0, now.boottime_ns - session.last_receipt_ns) // MS_NS
    if not brief:
        message.inventory.CopyFrom(inventory_to_proto(node.inventory))
        if session is not None:
            since_ms = max(0, now.boottime_ns - session.readings_ns) // MS_NS
            message.readings.extend(
                sample_to_proto(replace(sample, age_ms=sample.age_ms + since_ms)) for sample in session.readings
            )
    return message


def _hold(hold: Hold) -> cluster_pb2.Hold:
    return cluster_pb2.Hold(
        owner=hold.owner,
        reason=hold.reason,
        expire_time_unix_ns=hold.expire_time_unix_ns,
        device_key=hold.device_key,
    )


def status_to_proto(
    state: State,
    problems: Problems,
    *,
    leader: str,
    leader_epoch: Epoch,
    store_kind: str,
    version: str,
) -> cluster_pb2.ClusterStatus:
    live = [node.liveness for node in state.nodes.values()]
    jobs: defaultdict[str, int] = defaultdict(int)
    for job in state.jobs.values():
        jobs[job.state.value] += 1
    return cluster_pb2.ClusterStatus(
        cluster_uid=state.cluster.uid if state.cluster is not None else "",
        cursor=cursor_to_proto(state.history, state.revision),
        leader_epoch=epoch_to_proto(leader_epoch),
        leader=leader,
        nodes_live=live.count(Liveness.LIVE),
        nodes_suspect=live.count(Liveness.SUSPECT),
        nodes_expired=live.count(Liveness.EXPIRED),
        jobs_by_state=jobs,
        store_kind=store_kind,
        version=version,
        problems=problems,
    )
