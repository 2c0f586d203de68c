"""The simulation's etcd says what a real one says: the same random requests to both, answer for answer."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from typing import Any

from google.protobuf.message import Message

from controld.store.etcd_client import GrpcWire
from controld.store.etcd_endpoint import parse_endpoint
from controld.store.etcd_wire import COMPACT, LEASE_GRANT, LEASE_REVOKE, RANGE, TXN, Method, WireError
from tests import support_etcd
from tests.sim.etcd.kv import Mvcc
from virialpb.etcd.v1 import etcd_pb2 as pb

REQUESTS = 400
KEYS = tuple(f"k/{number}".encode() for number in range(6))
END = b"k0"
SECONDS = 20.0


class _Fake:
    """One member alone: it has applied whatever is committed."""

    def __init__(self) -> None:
        self.mvcc = Mvcc()

    def call(self, request: Message) -> Message:
        """Raises WireError."""
        mvcc = self.mvcc
        match request:
            case pb.TxnRequest():
                return mvcc.apply_txn(request, full=False)
            case pb.RangeRequest():
                response = mvcc.range(request, mvcc.revision, mvcc.compacted)
                response.header.revision = mvcc.revision
                return response
            case pb.CompactionRequest():
                mvcc.apply_compaction(request.revision)
                return pb.CompactionResponse()
            case pb.LeaseGrantRequest():
                mvcc.apply_grant(request.ID, full=False)
                return pb.LeaseGrantResponse(ID=request.ID, TTL=request.TTL)
            case pb.LeaseRevokeRequest():
                mvcc.apply_revoke(request.ID)
                return pb.LeaseRevokeResponse()
            case _:
                raise AssertionError(request)


class _Requests:
    """`revision`: the newest, for questions about the past."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._leases = [0, 0]
        self.revision = 1

    def next(self) -> Message:
        rng = self._rng
        match rng.choices(("txn", "range", "compact", "grant", "revoke"), (20, 8, 1, 1, 1))[0]:
            case "txn":
                return self._txn()
            case "range":
                return self._range(rng.choice((0, 0, rng.randint(1, self.revision + 2))))
            case "compact":
                return pb.CompactionRequest(revision=rng.randint(1, self.revision + 1))
            case "grant":
                self._leases.append(1_000 + len(self._leases))
                return pb.LeaseGrantRequest(ID=self._leases[-1], TTL=3_000)
            case _:
                lease = rng.choice(self._leases[2:] or [0])
                return pb.LeaseRevokeRequest(ID=lease) if lease else self._txn()

    def _range(self, revision: int) -> pb.RangeRequest:
        rng = self._rng
        whole = rng.random() < 0.5
        key = KEYS[0] if whole else rng.choice(KEYS)
        end, limit = (END, rng.choice((0, 2))) if whole else (b"", 0)
        return pb.RangeRequest(key=key, range_end=end, limit=limit, revision=revision, count_only=rng.random() < 0.1)

    def _txn(self) -> pb.TxnRequest:
        rng = self._rng
        compare = [self._compare() for _ in range(rng.choice((0, 1, 1, 2)))]
        success, failure = self._operations(), self._operations()
        return pb.TxnRequest(compare=compare, success=success, failure=failure)

    def _compare(self) -> pb.Compare:
        rng = self._rng
        key, number = rng.choice(KEYS), rng.randint(0, 3)
        result = rng.choice((pb.Compare.EQUAL, pb.Compare.NOT_EQUAL, pb.Compare.GREATER, pb.Compare.LESS))
        match rng.randrange(4):
            case 0:
                return pb.Compare(key=key, result=result, target=pb.Compare.VERSION, version=number)
            case 1:
                revision = rng.choice((0, self.revision, rng.randint(1, self.revision)))
                return pb.Compare(key=key, result=result, target=pb.Compare.MOD, mod_revision=revision)
            case 2:
                revision = rng.choice((0, rng.randint(1, self.revision)))
                return pb.Compare(key=key, result=result, target=pb.Compare.CREATE, create_revision=revision)
            case _:
                return pb.Compare(key=key, result=result, target=pb.Compare.VALUE, value=b"v%d" % number)

    def _operations(self) -> list[pb.RequestOp]:
        rng = self._rng
        found: list[pb.RequestOp] = []
        for key in rng.sample(KEYS, rng.choice((0, 1, 1, 2, 3))):
            match rng.randrange(5):
                case 0 | 1:
                    put = pb.PutRequest(key=key, value=b"v%d" % rng.randint(0, 3), lease=rng.choice(self._leases))
                    found.append(pb.RequestOp(request_put=put))
                case 2:
                    found.append(pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key)))
                case _:
                    found.append(pb.RequestOp(request_range=self._range(0)))
        if not found and rng.random() < 0.3:
            found.append(pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=KEYS[0], range_end=END)))
        return found


def _told(answer: Message | WireError) -> object:
    """What of an answer is to be the same: no ids of members or clusters, no terms."""
    if isinstance(answer, WireError):
        return answer.code, answer.text
    kept = type(answer)()
    kept.CopyFrom(answer)
    for part in (kept, *_parts(kept)):
        part.ClearField("header")
    return kept


def _parts(answer: Message) -> list[Message]:
    if not isinstance(answer, pb.TxnResponse):
        return []
    return [getattr(one, one.WhichOneof("response") or "") for one in answer.responses]


def _revision(answer: Message) -> int:
    return answer.header.revision if isinstance(answer, pb.TxnResponse | pb.RangeResponse) else 0


def _place(event: pb.Event) -> tuple[int, bytes]:
    return event.kv.mod_revision, event.kv.key


_METHODS: dict[type[Message], Method[Any, Any]] = {
    pb.TxnRequest: TXN,
    pb.RangeRequest: RANGE,
    pb.CompactionRequest: COMPACT,
    pb.LeaseGrantRequest: LEASE_GRANT,
    pb.LeaseRevokeRequest: LEASE_REVOKE,
}


async def _events(wire: GrpcWire, first: int, last: int) -> list[pb.Event]:
    stream = await wire.watch(pb.WatchCreateRequest(key=KEYS[0], range_end=END, start_revision=first))
    found: list[pb.Event] = []
    async with asyncio.timeout(SECONDS):
        while not found or found[-1].kv.mod_revision < last:
            found += (await stream.read()).events
    stream.cancel()
    return found


async def test_a_fake_etcd_answers_as_a_real_one() -> None:
    rng = random.Random(7)
    requests, fake = _Requests(rng), _Fake()
    with ExitStack() as stack:
        members = support_etcd.start(stack)
        await members.ready()
        wire = GrpcWire([parse_endpoint(members.processes[0].config.endpoint)])
        try:
            for number in range(REQUESTS):
                request = requests.next()
                try:
                    real: Message | WireError = await wire.call(_METHODS[type(request)], request, SECONDS)
                except WireError as error:
                    real = error
                try:
                    said: Message | WireError = fake.call(request)
                except WireError as error:
                    said = error
                assert _told(said) == _told(real), f"request {number}: {request}"
                if isinstance(real, Message) and _revision(real):
                    assert _revision(said) == _revision(real), f"request {number}: {request}"  # type: ignore[arg-type]
                requests.revision = fake.mvcc.revision
            first = max(1, fake.mvcc.compacted + 1)
            real_events = await _events(wire, first, max(fake.mvcc.events))
            ours = [e for r in sorted(fake.mvcc.events) if r >= first for e in fake.mvcc.events[r]]
            assert sorted(ours, key=_place) == sorted(real_events, key=_place)
        finally:
            await wire.close()
