"""ReplicaService: what the other controllers of the cluster hear from this one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from controld.replica.admin import Admin
from controld.replica.replica import Replica
from controld.service.backend import Context
from controld.service.convert import messages as m
from controld.service.convert import replica as convert
from controld.store.members import MembersRefusedError
from virialpb.v1 import replica_pb2_grpc


class ReplicaServicer(replica_pb2_grpc.ReplicaServiceServicer):
    """`admin` is for the leader's care of the store; None in a simulation."""

    def __init__(self, replica: Replica, admin: Admin | None) -> None:
        self._replica = replica
        self._admin = admin

    async def Ping(self, request: m.PingRequest, context: Context) -> AsyncIterator[m.PingResponse]:  # noqa: N802
        async with aclosing(self._replica.pings(convert.listener_from_proto(request))) as pings:
            async for ping in pings:
                yield convert.ping_to_proto(ping)

    async def AskAgreement(  # noqa: N802
        self, request: m.AskAgreementRequest, context: Context
    ) -> m.AskAgreementResponse:
        return convert.verdict_to_proto(self._replica.judge(request.token))

    async def HandOver(self, request: m.HandOverRequest, context: Context) -> m.HandOverResponse:  # noqa: N802
        return convert.handed_over_to_proto(await self._replica.take(convert.hand_over_from_proto(request)))

    async def Look(self, request: m.LookRequest, context: Context) -> m.LookResponse:  # noqa: N802
        return convert.told_to_proto(await self._required().survey.own())

    async def Defragment(self, request: m.DefragmentRequest, context: Context) -> m.DefragmentResponse:  # noqa: N802
        members = self._required().members
        if members is None:
            raise MembersRefusedError("there is no member of ours beside this controller")
        return convert.defragmented_to_proto(await members.defragment())

    def _required(self) -> Admin:
        if self._admin is None:
            raise MembersRefusedError("nobody operates this controller")
        return self._admin
