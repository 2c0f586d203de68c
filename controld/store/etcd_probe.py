"""What an etcd allows in one transaction, and what is wrong with a member, in words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from controld.store.etcd_session import Session
from controld.store.etcd_wire import LOCAL_TXN, TXN, Meaning, WireError, meaning
from controld.store.members import old_version
from controld.store.port import CommitTooLargeError
from virialpb.etcd.v1 import etcd_pb2 as pb

# Tried from the largest; etcd's own defaults are 128 operations and 1.5 MiB, a member of ours takes 1,024 and 2 MiB.
_OPERATIONS: Final = (1_024, 512, 256, 128, 64, 32, 16)
_KIB: Final = 1 << 10
_BYTES: Final = (2_000 * _KIB, 1_480 * _KIB, 1_000 * _KIB, 500 * _KIB, 250 * _KIB, 100 * _KIB)
_OVERHEAD_BYTES: Final = 4 * _KIB  # of the guards and of what etcd wraps around a request before it measures it
_OPERATION_BYTES: Final = 32
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one commit: changes, and bytes of their keys and values. The guards are already taken off."""

    operations_max: int
    bytes_max: int

    def require(self, request: pb.TxnRequest) -> None:
        """Raises CommitTooLargeError."""
        operations = len(request.success) - 1
        if operations > self.operations_max:
            raise CommitTooLargeError(
                f"{operations} changes in one commit, and this etcd takes {self.operations_max}; "
                "raise its --max-txn-ops"
            )
        if request.ByteSize() > self.bytes_max + operations * _OPERATION_BYTES + _OVERHEAD_BYTES:
            raise CommitTooLargeError(
                f"{request.ByteSize()} bytes in one commit, and this etcd takes {self.bytes_max}; "
                "raise its --max-request-bytes"
            )


async def probe(session: Session) -> Limits:
    """Ask with transactions that change nothing whatever etcd thinks of them. Raises WireError."""
    return Limits(await _operations_max(session) - 1, await _bytes_max(session))


async def _operations_max(session: Session) -> int:
    key = session.keys.prefix.encode() + b"/none"
    nothing = pb.RequestOp(request_range=pb.RangeRequest(key=key, serializable=True, count_only=True))
    for operations in _OPERATIONS:
        request = pb.TxnRequest(compare=[_never(key)], success=[nothing] * operations)
        if await _taken(session, request, local=True):
            return operations
    return _OPERATIONS[-1]


async def _bytes_max(session: Session) -> int:
    """With deletions: a put of that size could set off the space alarm of a store that is nearly full.

    Never of zeros: etcd takes a damaged record with a sector of zeros in it for a write that was cut short, and drops
    it and all that follows from its log without a word.
    """
    key = session.keys.prefix.encode() + b"/none"
    for size_bytes in _BYTES:
        spare = max(_OPERATIONS) * _OPERATION_BYTES + 2 * _OVERHEAD_BYTES
        large = pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key + b"x" * (size_bytes + spare)))
        if await _taken(session, pb.TxnRequest(compare=[_never(key)], success=[large]), local=False):
            return size_bytes
    return _BYTES[-1]


def _never(key: bytes) -> pb.Compare:
    return pb.Compare(key=key, target=pb.Compare.VERSION, result=pb.Compare.EQUAL, version=1 << 62)


async def _taken(session: Session, request: pb.TxnRequest, *, local: bool) -> bool:
    try:
        await session.call(LOCAL_TXN if local else TXN, request, session.times.read)
    except WireError as error:
        if meaning(error) is Meaning.TOO_LARGE:
            return False
        raise
    return True


def problems(status: pb.StatusResponse) -> tuple[str, ...]:
    """What an operator should know of this member; empty where all is well."""
    found: list[str] = []
    if not status.leader:
        found.append("the etcd member knows no leader: a majority of the members cannot be reached")
    if status.is_learner:
        found.append("the etcd member is a learner: it has no vote until it is promoted")
    for text in status.errors:
        if "NOSPACE" in text:
            found.append("etcd has set its space alarm and takes no writes; it is compacted and defragmented by itself")
        elif "CORRUPT" in text:
            found.append(f"etcd reports a corrupt member ({text}); replace it with `virial admin members replace`")
        elif "no leader" not in text:
            found.append(f"etcd reports: {text}")
    if (warning := version_warning(status.version)) is not None:
        found.append(warning)
    return tuple(found)


def version_warning(version: str) -> str | None:
    if _VERSION.match(version) is None:
        return f"etcd says it is version {version!r}, which is not known"
    if old_version(version):
        return f"etcd {version} has known faults in watches and snapshots; production asks for 3.4.38 or 3.5.23 and up"
    return None
