"""The leader's evidence in the store: a key under a short lease, which completed barriers keep alive.

A lone standby whose own link is bad must not depose a healthy leader because it hears no pings. What it may go by is
this key: gone means that the leader has completed no barrier for the time of the lease, whoever hears what.
"""

from __future__ import annotations

import asyncio
from typing import Final

from controld.store import etcd_txn
from controld.store.etcd_session import Session
from controld.store.etcd_wire import LEASE_GRANT, TXN, Meaning, WireError, meaning
from controld.store.port import EVIDENCE_SECONDS, StoreClosedError
from virialpb.etcd.v1 import etcd_pb2 as pb

_INTERVAL_SECONDS: Final = EVIDENCE_SECONDS / 4


async def grant(session: Session, timeout_seconds: float) -> int:
    """A lease of EVIDENCE_SECONDS. Raises WireError."""
    response = await session.call(LEASE_GRANT, pb.LeaseGrantRequest(TTL=int(EVIDENCE_SECONDS)), timeout_seconds)
    return response.ID


class Evidence:
    """That of one leadership, which put the key under `lease` as it took over."""

    def __init__(self, session: Session, token: int, nonce: str, lease: int) -> None:
        self._session = session
        self._token = token
        self._nonce = nonce
        self._lease = lease
        self._proved = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="evidence")

    def proved(self, token: int) -> None:
        """A barrier of the leadership `token` has completed."""
        if token == self._token:
            self._proved.set()

    def stop(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await self._proved.wait()
            self._proved.clear()
            try:
                if not await self._renew():
                    return
                await self._session.sleep(_INTERVAL_SECONDS)
            except WireError:
                continue  # the next barrier tries again
            except StoreClosedError:
                return

    async def _renew(self) -> bool:
        """False: another one leads."""
        seconds = self._session.times.status
        try:
            left_seconds = await self._session.keep_alive(self._lease, seconds)
        except WireError as error:
            if meaning(error) is not Meaning.NO_LEASE:
                raise
            left_seconds = 0
        if left_seconds > 0:
            return True
        self._lease = await grant(self._session, seconds)
        request = etcd_txn.attest(self._session.keys, self._token, self._nonce, self._lease)
        return (await self._session.call(TXN, request, seconds)).succeeded
