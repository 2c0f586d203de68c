"""ReplicaService: what the other controllers of the cluster hear from this one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from controld.replica.replica import Replica
from controld.service.backend import Context
from controld.service.convert import messages as m
from controld.service.convert import replica as convert
from virialpb.v1 import replica_pb2_grpc


class ReplicaServicer(replica_pb2_grpc.ReplicaServiceServicer):
    def __init__(self, replica: Replica) -> None:
        self._replica = replica

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
