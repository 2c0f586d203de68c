"""Rules of the store that were each seen to matter, with the defect that each keeps out shown on a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest

from controld.store import etcd_txn
from controld.store.etcd import EtcdStore
from controld.store.etcd_client import GrpcWire
from controld.store.etcd_endpoint import parse_endpoint
from controld.store.etcd_keys import Keys, end_of
from controld.store.etcd_session import EtcdTimes
from controld.store.etcd_wire import TXN, Wire
from controld.store.member_config import PeerTls
from controld.store.port import DeposedError, OutcomeUnknownError
from tests import support_etcd
from tests.support_etcd import Members
from tests.support_store import contents, put
from tests.support_tls import authority
from virialpb.etcd.v1 import etcd_pb2 as pb


@pytest.fixture
def keys() -> Keys:
    support_etcd.require_etcd()
    return Keys(support_etcd.fresh_prefix())


@pytest.fixture
async def store(keys: Keys) -> AsyncIterator[EtcdStore]:
    store = support_etcd.shared().store(prefix=keys.prefix)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def wire(keys: Keys) -> AsyncIterator[Wire]:
    del keys
    wire = GrpcWire([parse_endpoint(support_etcd.shared().processes[0].config.endpoint)])
    yield wire
    await wire.close()


class TestGuards:
    """Rule 1."""

    async def test_a_guard_on_create_revision_would_let_a_deposed_leader_write(
        self, store: EtcdStore, wire: Wire, keys: Keys
    ) -> None:
        old = await store.campaign("a")
        request = etcd_txn.commit(keys, old, 1, [put("x", b"late")])
        await store.campaign("b")
        assert not (await wire.call(TXN, request, 5.0)).succeeded
        seeded = pb.TxnRequest(success=request.success)  # without the head: that is the second guard
        seeded.compare.add(key=keys.leader, target=pb.Compare.CREATE, create_revision=old.token)
        assert (await wire.call(TXN, seeded, 5.0)).succeeded, "a takeover of one transaction keeps create_revision"

    async def test_without_the_head_a_late_attempt_would_undo_what_followed_it(
        self, store: EtcdStore, wire: Wire, keys: Keys
    ) -> None:
        leader = await store.campaign("a")
        first = etcd_txn.commit(keys, leader, 1, [put("x", b"1")])
        await store.commit(leader, 1, [put("x", b"1")])
        await store.commit(leader, 2, [put("x", b"2")])
        assert not (await wire.call(TXN, first, 5.0)).succeeded
        assert await contents(store) == {"x": b"2"}
        seeded = pb.TxnRequest(compare=first.compare[:1], success=first.success[1:])
        assert (await wire.call(TXN, seeded, 5.0)).succeeded
        assert await contents(store) == {"x": b"1"}

    async def test_what_a_commit_writes_beside_the_records_is_the_head_and_nothing_else(
        self, store: EtcdStore, wire: Wire, keys: Keys
    ) -> None:
        leader = await store.campaign("a")
        everything = pb.RangeRequest(key=keys.prefix.encode() + b"/", range_end=end_of(keys.prefix.encode() + b"/"))
        asked = pb.TxnRequest(success=[pb.RequestOp(request_range=everything)])
        before = {kv.key: kv.mod_revision for kv in etcd_txn.kvs(await wire.call(TXN, asked, 5.0), 0)}
        revision = await store.commit(leader, 1, [put("x")])
        after = {kv.key: kv.mod_revision for kv in etcd_txn.kvs(await wire.call(TXN, asked, 5.0), 0)}
        changed = {key for key, at in after.items() if before.get(key) != at}
        assert changed == {keys.head, keys.record("x")}
        assert after[keys.head] == after[keys.record("x")] == revision


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    support_etcd.require_etcd()
    with ExitStack() as stack:
        yield stack


class TestSilence:
    """Rule 3."""

    async def test_a_watch_that_needs_no_leader_would_be_silent_when_the_majority_is_gone(
        self, stack: ExitStack
    ) -> None:
        members = support_etcd.start(stack, 3)
        await members.ready()
        store = members.store(times=EtcdTimes(follow=1.0, read=2.0))
        await store.open()
        revision = (await store.load()).revision
        wire = GrpcWire([parse_endpoint(members.processes[0].config.endpoint)])
        live = Keys("virial").live
        seeded = await wire.watch(
            pb.WatchCreateRequest(key=live, range_end=end_of(live), start_revision=revision + 1), needs_leader=False
        )
        follow = store.follow(revision)
        waiting = asyncio.ensure_future(anext(follow))
        assert (await seeded.read()).created
        for index in (1, 2):
            members.processes[index].kill()
        silent = asyncio.ensure_future(seeded.read())
        with pytest.raises(OutcomeUnknownError):
            await waiting
        assert not silent.done()
        seeded.cancel()
        await asyncio.gather(silent, return_exceptions=True)
        await wire.close()
        await store.close()


class TestBootstrap:
    async def _survives_two(self, members: Members) -> None:
        await members.ready()
        store = members.store(2, times=EtcdTimes(commit=20.0))
        await store.open()
        leader = await store.campaign("a")
        await store.commit(leader, 1, [put("x", b"1")])
        for index in (0, 1):
            members.processes[index].kill()
        await store.commit(leader, 2, [put("x", b"2")])
        assert await contents(store) == {"x": b"2"}
        await store.close()

    async def test_five_survive_the_loss_of_two(self, stack: ExitStack) -> None:
        await self._survives_two(support_etcd.start(stack, 5))

    async def test_peers_talk_over_mutual_tls_and_to_nobody_else(self, stack: ExitStack) -> None:
        directory = support_etcd.short_directory(stack)
        ca, certificate, key = authority(directory / "tls")
        tls = PeerTls(ca, certificate, key)
        members = support_etcd.start(stack, 3, scheme="https", tls=tls)
        await members.ready()
        store = members.store(1)
        await store.open()
        leader = await store.campaign("a")
        await store.commit(leader, 1, [put("x")])
        members.processes[0].kill()
        await store.commit(leader, 2, [put("x", b"2")])
        with pytest.raises(DeposedError):
            await store.take_over("b", "h:1", 0)
        stranger = authority(directory / "other")
        members.processes[0].config = support_etcd.with_tls(members.processes[0].config, PeerTls(*stranger))
        members.processes[0].start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await members.ready(0)
        await store.close()
