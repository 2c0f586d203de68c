"""What is said to an etcd member: the methods by their public names, and the wire as the store sees it.

`Wire` is the seam below the store: `etcd_client.GrpcWire` speaks gRPC, the simulation a fake etcd, message for message.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from virialpb.etcd.v1 import etcd_pb2 as pb

Req = TypeVar("Req", bound=Message)
Res = TypeVar("Res", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[Req, Res]):
    """A call with one answer. `needs_leader`: refused at once by a member that has lost its majority, where it would
    else be held until the time-out. Calls that ask how a member is must work without one.
    """

    path: str
    request: type[Req]
    response: type[Res]
    needs_leader: bool = True


RANGE: Final = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse)
LOCAL_RANGE: Final = Method("/etcdserverpb.KV/Range", pb.RangeRequest, pb.RangeResponse, needs_leader=False)
TXN: Final = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse)
LOCAL_TXN: Final = Method("/etcdserverpb.KV/Txn", pb.TxnRequest, pb.TxnResponse, needs_leader=False)
COMPACT: Final = Method("/etcdserverpb.KV/Compact", pb.CompactionRequest, pb.CompactionResponse)
LEASE_GRANT: Final = Method("/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
LEASE_REVOKE: Final = Method("/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
STATUS: Final = Method("/etcdserverpb.Maintenance/Status", pb.StatusRequest, pb.StatusResponse, needs_leader=False)
ALARM: Final = Method("/etcdserverpb.Maintenance/Alarm", pb.AlarmRequest, pb.AlarmResponse, needs_leader=False)
HASH_KV: Final = Method("/etcdserverpb.Maintenance/HashKV", pb.HashKVRequest, pb.HashKVResponse, needs_leader=False)
DEFRAGMENT: Final = Method(
    "/etcdserverpb.Maintenance/Defragment", pb.DefragmentRequest, pb.DefragmentResponse, needs_leader=False
)
MOVE_LEADER: Final = Method(
    "/etcdserverpb.Maintenance/MoveLeader", pb.MoveLeaderRequest, pb.MoveLeaderResponse, needs_leader=False
)
MEMBER_LIST: Final = Method(
    "/etcdserverpb.Cluster/MemberList", pb.MemberListRequest, pb.MemberListResponse, needs_leader=False
)
MEMBER_ADD: Final = Method("/etcdserverpb.Cluster/MemberAdd", pb.MemberAddRequest, pb.MemberAddResponse)
MEMBER_REMOVE: Final = Method("/etcdserverpb.Cluster/MemberRemove", pb.MemberRemoveRequest, pb.MemberRemoveResponse)
MEMBER_PROMOTE: Final = Method("/etcdserverpb.Cluster/MemberPromote", pb.MemberPromoteRequest, pb.MemberPromoteResponse)
WATCH_PATH: Final = "/etcdserverpb.Watch/Watch"
KEEP_ALIVE_PATH: Final = "/etcdserverpb.Lease/LeaseKeepAlive"
NEEDS_LEADER: Final = (("hasleader", "true"),)


class WireError(Exception):
    """A call or a stream failed. Whether it had an effect is not known, but for what `meaning` tells."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(f"etcd: {text or code.name.lower()}" if not text.startswith("etcd") else text)
        self.code = code
        self.text = text


class Meaning(Enum):
    """What an answer of etcd tells for certain. Everything else leaves a write in doubt."""

    FULL = auto()
    TOO_LARGE = auto()
    COMPACTED = auto()
    FUTURE = auto()
    NO_LEASE = auto()
    REFUSED = auto()
    DOUBT = auto()


# etcd's own texts (api/v3rpc/rpctypes/error.go), the same in 3.4 to 3.6, and those of gRPC for a message too long and
# for an address where nobody listens.
_TEXTS: Final = (
    ("mvcc: database space exceeded", Meaning.FULL),
    ("request is too large", Meaning.TOO_LARGE),
    ("too many operations in txn request", Meaning.TOO_LARGE),
    ("message larger than max", Meaning.TOO_LARGE),
    ("required revision has been compacted", Meaning.COMPACTED),
    ("required revision is a future revision", Meaning.FUTURE),
    ("requested lease not found", Meaning.NO_LEASE),
    ("failed to connect to all addresses", Meaning.REFUSED),
)


def meaning(error: WireError) -> Meaning:
    return next((found for text, found in _TEXTS if text in error.text), Meaning.DOUBT)


class WatchStream(Protocol):
    """The answers of one watch, as etcd sends them."""

    async def read(self) -> pb.WatchResponse:
        """Raises WireError at its end, whatever ended it."""
        ...

    def cancel(self) -> None: ...


class Wire(Protocol):
    """A connection to ONE member at a time: never a balancer that picks another for each call."""

    async def call(self, method: Method[Req, Res], request: Req, timeout_seconds: float) -> Res:
        """Raises WireError; never waits longer than the time-out."""
        ...

    async def watch(self, create: pb.WatchCreateRequest, *, needs_leader: bool = True) -> WatchStream:
        """Raises WireError."""
        ...

    async def keep_alive(self, lease: int, timeout_seconds: float) -> int:
        """Renew a lease; the seconds it has now, 0 when it is gone. Raises WireError."""
        ...

    async def close(self) -> None: ...
