"""The wire between a controller and the member beside it: the seam below `controld.store.etcd`, without gRPC.

Requests and answers are lost, late or slow as `Trouble` says; a request whose caller has given up arrives all the same.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from controld.store.etcd_wire import Method, Req, Res, WireError
from tests.sim.etcd import kv
from tests.sim.etcd.member import FILE_BYTES, Member, unavailable
from tests.sim.etcd.raft import Raft, Result
from tests.sim.etcd.watch import Watch
from tests.sim.loop import Process
from virialpb.etcd.v1 import etcd_pb2 as pb

T = TypeVar("T")
SOCKET_S = (0.00005, 0.0005)
DEFRAGMENT_S = (0.01, 0.5)
VERSION = "3.5.30"


@dataclass(slots=True)
class Trouble:
    """Chances of each; `slow_s`: at most, each way. `mute`, `deaf`: nothing comes from, or gets to, the member until it
    is over. `late_s`: how late a late request is, at most."""

    lost_request: float = 0.0
    lost_answer: float = 0.0
    late: float = 0.0
    late_s: float = 5.0
    slow_s: float = 0.0
    mute: bool = False
    deaf: bool = False

    def clear(self) -> None:
        self.lost_request = self.lost_answer = self.late = self.slow_s = 0.0
        self.mute = self.deaf = False


class Socket:
    """Both ends outlive each other. `held`: what waits for the link to pass it on."""

    def __init__(self, raft: Raft, member: Member, rng: Random) -> None:
        self.raft = raft
        self.member = member
        self.rng = rng
        self.trouble = Trouble()
        self._held: list[Callable[[], None]] = []

    def up(self, arrive: Callable[[], object], *, lossy: bool = True) -> None:
        trouble, rng = self.trouble, self.rng
        delay_s = rng.uniform(*SOCKET_S) + trouble.slow_s * rng.random()
        if lossy and trouble.lost_request and rng.random() < trouble.lost_request:
            return
        if lossy and trouble.late and rng.random() < trouble.late:
            delay_s += trouble.late_s * rng.random()
        self.raft.loop.after(delay_s, self._arrive, arrive, True)

    def down(self, arrive: Callable[[], object], *, lossy: bool = True) -> None:
        trouble, rng = self.trouble, self.rng
        if lossy and trouble.lost_answer and rng.random() < trouble.lost_answer:
            return
        self.raft.loop.after(rng.uniform(*SOCKET_S) + trouble.slow_s * rng.random(), self._arrive, arrive, False)

    def _arrive(self, arrive: Callable[[], object], up: bool) -> None:
        if self.trouble.deaf if up else self.trouble.mute:
            self._held.append(lambda: self._arrive(arrive, up))
        else:
            arrive()

    def heal(self) -> None:
        """Half of what waited comes now, the rest was given up."""
        self.trouble.clear()
        held, self._held = self._held, []
        for passed in held:
            if self.rng.random() < 0.5:
                self.raft.loop.after(self.rng.uniform(0.0, 0.2), passed)


class SimWire:
    """A `controld.store.etcd_wire.Wire`, of one life of a controller."""

    def __init__(self, socket: Socket, process: Process, origin: str) -> None:
        self._socket = socket
        self._process = process
        self._origin = origin
        self._member = socket.member
        self._waiting: dict[asyncio.Future[Any], None] = {}
        self._streams: dict[SimStream, None] = {}
        self._member.on_crash.append(self._member_crashed)
        process.on_death.append(self._forget)

    async def call(self, method: Method[Req, Res], request: Req, timeout_seconds: float) -> Res:
        return cast("Res", await self._ask(lambda answer: self._serve(method, request, answer), timeout_seconds))

    async def keep_alive(self, lease: int, timeout_seconds: float) -> int:
        return cast("int", await self._ask(lambda answer: self._serve_renewal(lease, answer), timeout_seconds))

    async def watch(self, create: pb.WatchCreateRequest, *, needs_leader: bool = True) -> SimStream:
        if not self._member.alive:
            raise unavailable("connection refused")
        stream = SimStream(self, create, needs_leader)
        self._streams[stream] = None
        self._socket.up(lambda: self._member.hear(stream.begin), lossy=False)
        return stream

    async def close(self) -> None:
        self._forget()
        for answer in tuple(self._waiting):
            if not answer.done():
                answer.set_exception(WireError(grpc.StatusCode.CANCELLED, "the connection was closed"))
        for stream in tuple(self._streams):
            stream.cancel()

    def _forget(self) -> None:
        if self._member_crashed in self._member.on_crash:
            self._member.on_crash.remove(self._member_crashed)

    async def _ask(self, serve: Callable[[Callable[[object], None]], None], timeout_seconds: float) -> object:
        if not self._member.alive:
            await asyncio.sleep(0.001)
            raise unavailable("connection refused")
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting[answer] = None

        def told(result: object) -> None:
            self._socket.down(lambda: self._process.post(0.0, _settle, answer, result))

        self._socket.up(lambda: self._member.hear(lambda: serve(told)))
        timer = asyncio.get_running_loop().call_later(timeout_seconds, _time_out, answer)
        try:
            return await answer
        finally:
            timer.cancel()
            del self._waiting[answer]

    def _member_crashed(self) -> None:
        broken = unavailable("the connection broke")
        for answer in tuple(self._waiting):
            self._process.post(self._socket.rng.uniform(*SOCKET_S), _settle, answer, broken)
        for stream in tuple(self._streams):
            self.tell(stream, broken)

    def ended(self, stream: SimStream) -> None:
        self._streams.pop(stream, None)

    # -- at the member

    def _serve(self, method: Method[Any, Any], request: Message, answer: Callable[[object], None]) -> None:
        member, raft = self._member, self._socket.raft
        if method.needs_leader and member.leader is None:
            answer(unavailable("etcdserver: no leader"))
            return
        try:
            match request:
                case pb.TxnRequest():
                    self._serve_txn(request, answer)
                case pb.RangeRequest() if request.serializable:
                    answer(self._range(request))
                case pb.RangeRequest():
                    raft.confirm(member, lambda error: answer(error or _result(lambda: self._range(request))))
                case pb.CompactionRequest() | pb.LeaseRevokeRequest():
                    raft.propose(member, request, self._origin, answer)
                case pb.LeaseGrantRequest():
                    raft.require_space()
                    lease = pb.LeaseGrantRequest(ID=self._socket.rng.getrandbits(62) + 1, TTL=request.TTL)
                    raft.propose(member, lease, self._origin, answer)
                case pb.StatusRequest():
                    answer(self._status())
                case pb.MemberListRequest():
                    answer(self._list())
                case pb.AlarmRequest():
                    self._serve_alarm(request, answer)
                case pb.DefragmentRequest():
                    member.file_bytes = FILE_BYTES
                    raft.loop.after(self._socket.rng.uniform(*DEFRAGMENT_S), answer, pb.DefragmentResponse())
                case _:
                    answer(WireError(grpc.StatusCode.UNIMPLEMENTED, method.path))
        except WireError as error:
            answer(error)

    def _serve_txn(self, request: pb.TxnRequest, answer: Callable[[object], None]) -> None:
        member, raft = self._member, self._socket.raft
        kv.require_size(request)

        def read() -> Result:
            return _result(lambda: raft.mvcc.read_txn(request, member.revision, member.compacted))

        if kv.writes(request):
            raft.propose(member, request, self._origin, answer)
        elif kv.is_local(request):
            answer(read())
        else:
            raft.confirm(member, lambda error: answer(error or read()))

    def _range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        member = self._member
        response = self._socket.raft.mvcc.range(request, member.revision, member.compacted)
        response.header.revision = member.revision
        return response

    def _status(self) -> pb.StatusResponse:
        member, raft = self._member, self._socket.raft
        leader = 0 if member.leader is None else member.leader.id
        errors = [f"memberID:{number} alarm:NOSPACE " for number in sorted(raft.full)]
        size = member.file_bytes
        response = pb.StatusResponse(version=VERSION, db_size=size, leader=leader, errors=errors)
        response.db_size_in_use = FILE_BYTES // 2
        response.raft_applied_index = member.applied
        response.raft_term = raft.term
        response.header.revision = member.revision
        response.header.member_id = member.id
        return response

    def _list(self) -> pb.MemberListResponse:
        response = pb.MemberListResponse()
        for member in self._socket.raft.members:
            response.members.add(ID=member.id, name=member.name, peer_urls=[f"https://{member.name}:2380"])
        return response

    def _serve_alarm(self, request: pb.AlarmRequest, answer: Callable[[object], None]) -> None:
        raft = self._socket.raft
        if request.action == pb.AlarmRequest.GET:
            found = [pb.AlarmMember(member_id=number, alarm=pb.NOSPACE) for number in sorted(raft.full)]
            answer(pb.AlarmResponse(alarms=found))
        elif self._member.leader is not None:
            raft.propose(self._member, request, self._origin, answer)

    def _serve_renewal(self, lease: int, answer: Callable[[object], None]) -> None:
        member, raft = self._member, self._socket.raft
        if member.leader is None:
            answer(unavailable("etcdserver: no leader"))
            return

        def asked() -> None:
            left_seconds = raft.renew(member, lease)
            if left_seconds is not None:
                answer(left_seconds)

        raft.loop.after(self._socket.rng.uniform(0.0005, 0.004), asked)

    def open_watch(self, stream: SimStream, create: pb.WatchCreateRequest, needs_leader: bool) -> Watch | None:
        member = self._member
        if needs_leader and member.leader is None:
            self.tell(stream, unavailable("etcdserver: no leader"))
            return None
        watch = Watch(create, lambda said: self.tell(stream, said), create.start_revision, needs_leader)
        member.watches.open(watch)
        return watch

    def close_watch(self, watch: Watch) -> None:
        self._member.watches.close(watch)

    def tell(self, stream: SimStream, said: pb.WatchResponse | WireError) -> None:
        """In order."""
        loop, socket = self._socket.raft.loop, self._socket
        at_s = max(
            stream.last_s, loop.time() + socket.rng.uniform(*SOCKET_S) + socket.trouble.slow_s * socket.rng.random()
        )
        stream.last_s = at_s
        loop.after(at_s - loop.time(), self._deliver, stream, said)

    def _deliver(self, stream: SimStream, said: pb.WatchResponse | WireError) -> None:
        if self._socket.trouble.mute and not isinstance(said, WireError):
            # Nothing is lost on a stream: it waits, or the stream is over.
            stream.held.append(said)
            self._socket.raft.loop.after(0.25, self._flush, stream)
        elif stream.held:
            stream.held.append(said)
        else:
            self._process.post(0.0, stream.put, said)

    def _flush(self, stream: SimStream) -> None:
        if self._socket.trouble.mute:
            if stream.held:
                self._socket.raft.loop.after(0.25, self._flush, stream)
            return
        while stream.held:
            self._process.post(0.0, stream.put, stream.held.popleft())


class SimStream:
    """A `controld.store.etcd_wire.WatchStream`."""

    def __init__(self, wire: SimWire, create: pb.WatchCreateRequest, needs_leader: bool) -> None:
        self._wire = wire
        self._create = create
        self._needs_leader = needs_leader
        self._watch: Watch | None = None
        self._over = False
        self._came: deque[pb.WatchResponse | WireError] = deque()
        self._arrived = asyncio.Event()
        self.last_s = 0.0
        self.held: deque[pb.WatchResponse | WireError] = deque()

    def begin(self) -> None:
        if not self._over:
            self._watch = self._wire.open_watch(self, self._create, self._needs_leader)

    def put(self, said: pb.WatchResponse | WireError) -> None:
        self._came.append(said)
        self._arrived.set()

    async def read(self) -> pb.WatchResponse:
        while not self._came:
            self._arrived.clear()
            await self._arrived.wait()
        said = self._came[0]
        if isinstance(said, WireError):
            raise said
        self._came.popleft()
        return said

    def cancel(self) -> None:
        if not self._over:
            self._over = True
            if self._watch is not None:
                self._wire.close_watch(self._watch)
            self._wire.ended(self)


def _result(read: Callable[[], Message]) -> Result:
    try:
        return read()
    except WireError as error:
        return error


def _settle(answer: asyncio.Future[object], result: object) -> None:
    if answer.done():
        return
    if isinstance(result, WireError):
        # A new one: several may wait for what befell their member.
        answer.set_exception(WireError(result.code, result.text))
    else:
        answer.set_result(result)


def _time_out(answer: asyncio.Future[object]) -> None:
    _settle(answer, WireError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time"))
