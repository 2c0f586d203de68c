"""This node's certificate from a controller: its first for a join token, later ones for the one it has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import grpc
from grpc import aio

from noded.link.backoff import Backoff
from noded.link.control import LinkLog
from noded.link.convert_join import (
    CertificateResponse,
    Certified,
    certified_from_proto,
    join_to_proto,
    renewal_to_proto,
)
from noded.link.stream import why
from virialpb.errors import TABLE
from virialpb.v1.join_pb2_grpc import CertificateServiceStub, JoinServiceStub

CALL_SECONDS: Final = 5.0
_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))


class NotCertified(Exception):
    """No certificate was given. The message is for the node's operator; `lasting`: asking again would not help."""

    def __init__(self, message: str, *, lasting: bool) -> None:
        super().__init__(message)
        self.lasting = lasting


async def join(
    addresses: tuple[str, ...],
    ca: bytes,
    *,
    node: str,
    secret: str,
    request: bytes,
    backoff: Backoff,
    patience_seconds: float,
    log: LinkLog,
) -> Certified:
    """Ask one controller after the other, until one gives a certificate. Raises NotCertified."""
    message = join_to_proto(node, secret, request)
    credentials = grpc.ssl_channel_credentials(root_certificates=ca)

    async def ask(channel: aio.Channel) -> CertificateResponse:
        return await JoinServiceStub(channel).Join(message, timeout=CALL_SECONDS)

    failure = NotCertified("no controller was asked", lasting=False)
    try:
        async with asyncio.timeout(patience_seconds):
            while True:
                for address in addresses:
                    try:
                        return await _asked(address, credentials, ask)
                    except NotCertified as error:
                        if error.lasting:
                            raise
                        failure = error
                        log.info("join.failed", address=address, why=str(error))
                await asyncio.sleep(backoff.next_seconds())
    except TimeoutError:
        raise failure from None


async def renew(addresses: tuple[str, ...], credentials: grpc.ChannelCredentials, request: bytes) -> Certified:
    """Ask each controller once. Raises NotCertified."""
    message = renewal_to_proto(request)

    async def ask(channel: aio.Channel) -> CertificateResponse:
        return await CertificateServiceStub(channel).RenewCertificate(message, timeout=CALL_SECONDS)

    failure = NotCertified("no controller was asked", lasting=False)
    for address in addresses:
        try:
            return await _asked(address, credentials, ask)
        except NotCertified as error:
            failure = error
    raise failure


async def _asked(
    address: str,
    credentials: grpc.ChannelCredentials,
    ask: Callable[[aio.Channel], Awaitable[CertificateResponse]],
) -> Certified:
    """Raises NotCertified."""
    async with aio.secure_channel(address, credentials, options=_OPTIONS) as channel:
        try:
            return certified_from_proto(await ask(channel))
        except aio.AioRpcError as error:
            details = why(error)
            lasting = details.reason is not None and not TABLE[details.reason].retryable
            raise NotCertified(f"{address}: {details.message}", lasting=lasting) from None
