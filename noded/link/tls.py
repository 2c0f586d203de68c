"""What this node shows to controllers and whom it believes, as the files are now. A channel cannot change its
certificate, so with new ones new connections are made, and the old ones given up when those stand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import grpc

from virialpb.tlsfiles import LOOK_SECONDS, TlsContent, TlsFiles, TlsFilesError


class TlsLog(Protocol):
    """Where it tells what it does; `noded.logs` gives one."""

    def info(self, event: str, **fields: object) -> object: ...
    def warning(self, event: str, **fields: object) -> object: ...


def read_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Raises TlsFilesError."""
    return _credentials(files.read())


async def watch_credentials(files: TlsFiles, renew: Callable[[grpc.ChannelCredentials], None], log: TlsLog) -> None:
    """Until cancelled: `renew` gets them each time the files have changed. A change that cannot be used is told once,
    and what was there stays in use.
    """
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            content = await asyncio.to_thread(files.changed)
        except TlsFilesError as error:
            log.warning("tls.refused", why=str(error))
            continue
        if content is not None:
            log.info("tls.loaded")
            renew(_credentials(content))


def _credentials(content: TlsContent) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=content.ca,
        private_key=content.key or None,
        certificate_chain=content.certificate or None,
    )
