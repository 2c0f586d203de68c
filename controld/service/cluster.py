"""ClusterService: nodes, holds, drain, status, events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from controld.core import capacity, keys
from controld.core.commands import DrainNode, PlaceHold, ReleaseHold, RemoveNode
from controld.core.ids import NO_EPOCH, NodeUid, valid_id
from controld.core.model import Event, Hold, Node
from controld.core.transitions.nodes import DRAIN_OWNER
from controld.replica.errors import RefusedError
from controld.replica.survey import Picture
from controld.service.backend import CAUSE_ID, Backend, Context
from controld.service.convert import messages as m
from controld.service.convert.common import NODES, event_to_proto, job_id_from_name, node_from_name, request_id_from
from controld.service.convert.node import node_to_proto, status_to_proto
from controld.service.convert.pages import key_from, page, page_size_from, token_for
from controld.service.convert.replies import cursor_from_proto, events_page, nodes_page, removed_node, watched_event
from controld.service.failures import invalid_field, not_found, removal_refused
from controld.service.feeds import NodeFeed, shown_nodes
from controld.service.join import Registrar
from controld.service.problems import problems, problems_of_replicas
from controld.service.store_problems import in_words, memberless_in_words, silent_in_words
from controld.service.watching import watch
from controld.store.port import CompactedError
from virialpb.v1 import cluster_pb2_grpc

MS_NS = 1_000_000
REASON_LENGTH_MAX = 256
HOLD_MS_MAX = 366 * 86_400_000


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    def __init__(self, backend: Backend, registrar: Registrar) -> None:
        self._backend = backend
        self._registrar = registrar
        self._leader = backend.leader
        self._shown = shown_nodes(backend)

    async def GetNode(self, request: m.GetNodeRequest, context: Context) -> m.Node:  # noqa: N802
        name = node_from_name(request.name)
        await self._leader.barrier()
        return self._view(self._node(name).uid)

    async def ListNodes(self, request: m.ListNodesRequest, context: Context) -> m.ListNodesResponse:  # noqa: N802
        scope = "ListNodes"
        after = key_from(request.page_token, scope)
        await self._leader.barrier()
        state, view, cursor, now = self._leader.state, self._leader.view, self._leader.hub.cursor, self._backend.now()
        held = capacity.holding(state)
        found, last = page(
            state.nodes.values(),
            key=lambda node: node.name,
            after=after,
            size=page_size_from(request.page_size),
            convert=lambda node: node_to_proto(node, held.get(node.uid, []), state, view, now, brief=request.brief),
        )
        return nodes_page(found, token_for(scope, last) if last else "", cursor)

    async def PlaceHold(self, request: m.PlaceHoldRequest, context: Context) -> m.Node:  # noqa: N802
        request_id = request_id_from(request.request_id, CAUSE_ID.get())
        name = node_from_name(request.name)
        owner = _owner(request.owner)
        if owner == DRAIN_OWNER:
            raise invalid_field(
                "owner", "'drain' stands for drains; drain the node (DrainNode), or choose another owner"
            )
        reason = _reason(request.reason)
        if request.expire_after_ms > HOLD_MS_MAX:
            raise invalid_field(
                "expire_after_ms", f"{request.expire_after_ms} is over a year; use 0 for a hold until it is released"
            )
        await self._leader.barrier()
        uid = self._node(name).uid
        hold = Hold(owner, reason, device_key=request.device_key)
        await self._leader.submit(PlaceHold(request_id, uid, hold, request.expire_after_ms * MS_NS))
        return self._view(uid)

    async def ReleaseHold(self, request: m.ReleaseHoldRequest, context: Context) -> m.Node:  # noqa: N802
        request_id = request_id_from(request.request_id, CAUSE_ID.get())
        name = node_from_name(request.name)
        owner = _owner(request.owner)
        await self._leader.barrier()
        uid = self._node(name).uid
        await self._leader.submit(ReleaseHold(request_id, uid, owner, request.device_key))
        return self._view(uid)

    async def DrainNode(self, request: m.DrainNodeRequest, context: Context) -> m.Node:  # noqa: N802
        request_id = request_id_from(request.request_id, CAUSE_ID.get())
        name = node_from_name(request.name)
        reason = _reason(request.reason)
        await self._leader.barrier()
        uid = self._node(name).uid
        await self._leader.submit(DrainNode(request_id, uid, reason))
        return self._view(uid)

    async def RemoveNode(  # noqa: N802
        self, request: m.RemoveNodeRequest, context: Context
    ) -> m.RemoveNodeResponse:
        request_id = request_id_from(request.request_id, CAUSE_ID.get())
        name = node_from_name(request.name)
        await self._leader.barrier()
        try:
            reply = await self._leader.submit(RemoveNode(request_id, name))
        except RefusedError as error:
            raise removal_refused(error.refused) from error
        return removed_node(reply.subject)

    async def GetStatus(self, request: m.GetStatusRequest, context: Context) -> m.ClusterStatus:  # noqa: N802
        await self._leader.barrier()
        state, replica = self._leader.state, self._backend.replica
        leader, epoch = self._backend.identity, self._leader.epoch
        found = await self._problems_beneath() + self._registrar.problems()
        if replica is None or replica.leads:
            found += problems(state, self._leader.view)
        else:
            known = replica.leadership
            leader, epoch = ("", NO_EPOCH) if known is None else (known.identity, known.epoch)
        return status_to_proto(
            state,
            found,
            leader=leader,
            leader_epoch=epoch,
            store_kind=self._backend.store_kind,
            version=self._backend.version,
        )

    async def _problems_beneath(self) -> list[str]:
        """Of the other controllers, and of the store."""
        replica, admin = self._backend.replica, self._backend.admin
        picture = Picture(()) if admin is None else await admin.survey.recent()
        found = [] if replica is None else problems_of_replicas(replica)
        told = replica.unheard if replica is not None and replica.leads else ()
        silent = silent_in_words(seen for seen in picture.controllers if seen.address not in told)
        beneath = () if admin is None else await admin.store_problems()
        return [*found, *silent, *memberless_in_words(picture), *in_words(picture.findings), *beneath]

    async def ListEvents(self, request: m.ListEventsRequest, context: Context) -> m.ListEventsResponse:  # noqa: N802
        about = self._about(request.job, request.node)
        scope = f"ListEvents {request.job} {request.node}"
        after = key_from(request.page_token, scope)
        await self._leader.barrier()
        state = self._leader.state
        found, last = page(
            (event for event in state.events.values() if about(event)),
            key=lambda event: keys.event(event.sequence),
            after=after,
            size=page_size_from(request.page_size),
            convert=lambda event: event_to_proto(event, state.event_revision(event.sequence), state),
        )
        return events_page(found, token_for(scope, last) if last else "")

    async def WatchEvents(  # noqa: N802
        self, request: m.WatchEventsRequest, context: Context
    ) -> AsyncIterator[m.WatchEventsResponse]:
        about = self._about(request.job, request.node)
        await self._leader.barrier()
        state = self._leader.state
        subscription = self._leader.hub.subscribe(self._leader.hub.cursor)
        last = request.after_sequence
        oldest = min(state.events, default=0)
        if last and oldest > last + 1:
            raise CompactedError(state.event_revision(oldest))
        for sequence in sorted(sequence for sequence in state.events if sequence > last):
            last = sequence
            event = state.events.get(sequence)  # pruned while the ones before it were sent
            if event is not None and about(event):
                yield watched_event(event_to_proto(event, state.event_revision(event.sequence), state))
        async for batch in subscription:
            for event in batch.events:
                if event.sequence > last and about(event):
                    yield watched_event(event_to_proto(event, batch.revision, self._leader.state))

    async def WatchNodes(  # noqa: N802
        self, request: m.WatchNodesRequest, context: Context
    ) -> AsyncIterator[m.WatchNodesResponse]:
        after = cursor_from_proto(request.cursor) if request.HasField("cursor") else None
        async with aclosing(watch(self._leader, after, NodeFeed(self._backend, self._shown))) as messages:
            async for message in messages:
                yield message

    def _about(self, job: str, node: str) -> Callable[[Event], bool]:
        """A filter by resource names. What is not there any more may still have events, so nothing is looked up."""
        job_id = job_id_from_name(job, "job") if job else ""
        display = node_from_name(node, "node") if node else ""

        def matches(event: Event) -> bool:
            if job_id and event.job != job_id:
                return False
            if not display or event.node == display:
                return True
            record = self._leader.state.nodes.get(NodeUid(event.node))
            return record is not None and record.name == display

        return matches

    def _node(self, name: str) -> Node:
        node = self._leader.state.node_named(name)
        if node is None:
            raise not_found(f"{NODES}{name}")
        return node

    def _view(self, uid: NodeUid) -> m.Node:
        state = self._leader.state
        node = state.nodes.get(uid)
        if node is None:
            raise not_found(f"{NODES}{uid}")
        held = capacity.holding(state).get(uid, [])
        return node_to_proto(node, held, state, self._leader.view, self._backend.now())


def _owner(text: str) -> str:
    if not valid_id(text):
        raise invalid_field(
            "owner", f"'{text[:80]}' is not an owner: 1 to 63 lower-case letters, digits and '-', such as maintenance"
        )
    return text


def _reason(text: str) -> str:
    if not text.strip() or len(text) > REASON_LENGTH_MAX:
        raise invalid_field("reason", f"say why in 1 to {REASON_LENGTH_MAX} characters; others will read it")
    return text
