"""A member whose data is damaged or gone is not started, nor begun anew in its place."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from controld.store.member import MemberError, MemberProcess, MemberQuarantinedError, ready, supervise
from controld.store.member_policy import Damaged, Ended, MemberEvent, Started
from tests import support_etcd
from tests.support_store import contents, put

HANG_SECONDS = 60.0


@pytest.fixture
def member() -> Iterator[MemberProcess]:
    support_etcd.require_etcd()
    with ExitStack() as stack:
        (config,) = support_etcd.configs(support_etcd.short_directory(stack))
        process = MemberProcess(config)
        stack.callback(process.kill)
        yield process


async def used(member: MemberProcess) -> None:
    """Started, written to, and ended."""
    member.start()
    await ready(member, HANG_SECONDS)
    store = support_etcd.make_store(member)
    await store.open()
    leader = await store.campaign("a")
    for seq in range(1, 50):
        await store.commit(leader, seq, [put("x", b"damage me" * 99), put("last", b"%d" % seq)])
    await store.close()
    member.stop()


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)


async def test_damage_is_quarantined_and_left_as_it_is(member: MemberProcess) -> None:
    await used(member)
    (log,) = sorted((member.config.directory / "data" / "member" / "wal").glob("0000000000000000-*.wal"))
    flip(log, log.read_bytes().index(b"damage me"))
    damaged = log.read_bytes()
    events: list[MemberEvent] = []
    with pytest.raises(MemberQuarantinedError, match=r"crc mismatch.*virial admin members replace m0"):
        async with asyncio.timeout(HANG_SECONDS):
            await supervise(member, events.append)
    assert [type(event) for event in events] == [Started, Damaged]
    assert log.read_bytes() == damaged
    with pytest.raises(MemberQuarantinedError):  # nor the next time it is asked
        member.start()


async def test_one_whose_data_is_gone_is_not_begun_anew(member: MemberProcess) -> None:
    """etcd itself would begin a single member as a new, empty cluster."""
    await used(member)
    (member.config.directory / "data").rename(member.config.directory / "elsewhere")
    with pytest.raises(MemberQuarantinedError, match="is gone, and this member had started before"):
        member.start()
    (member.config.directory / "elsewhere").rename(member.config.directory / "data")
    member.start()
    await ready(member, HANG_SECONDS)
    store = support_etcd.make_store(member)
    await store.open()
    assert (await contents(store))["last"] == b"49"
    await store.close()


async def test_one_that_is_killed_is_started_again_and_one_that_cannot_come_up_is_given_up(
    member: MemberProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: asyncio.Queue[MemberEvent] = asyncio.Queue()
    task = asyncio.ensure_future(supervise(member, events.put_nowait))
    async with asyncio.timeout(HANG_SECONDS):
        assert isinstance(await events.get(), Started)
        await ready(member, HANG_SECONDS)
        member.signal(signal.SIGKILL)
        ended = await events.get()
        assert isinstance(ended, Ended)
        assert ended.status == -signal.SIGKILL
        assert isinstance(await events.get(), Started)
        await ready(member, HANG_SECONDS)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert member.poll() is not None, "it does not outlive its supervisor"
    monkeypatch.setattr("controld.store.member_policy.FAST_ENDS_MAX", 2)
    monkeypatch.setattr("controld.store.member_policy.DELAY_SECONDS", 0.01)
    member.config = replace(member.config, extra={"heartbeat-interval": -1})
    with pytest.raises(MemberError, match="does not come up"):
        async with asyncio.timeout(HANG_SECONDS):
            await supervise(member, events.put_nowait)


async def test_why_it_ended_is_told_in_its_own_words(member: MemberProcess) -> None:
    events: asyncio.Queue[MemberEvent] = asyncio.Queue()
    port = int(member.config.peers[member.config.name].rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        task = asyncio.ensure_future(supervise(member, events.put_nowait))
        async with asyncio.timeout(HANG_SECONDS):
            while not isinstance(ended := await events.get(), Ended):
                pass
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert ended.said.endswith("address already in use")
    assert "{" not in ended.said


def test_a_directory_that_cannot_be_used_is_named(member: MemberProcess) -> None:
    other = MemberProcess(replace(member.config, directory=Path("/proc/no-such")))
    with pytest.raises(OSError, match=r"cannot use the data directory /proc/no-such: .*or name another one"):
        other.start()
