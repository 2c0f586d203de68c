"""A store of several members that has no space left: won back by the controllers, one member at a time."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest

from controld.store import member_config
from controld.store.port import StorageFullError
from tests import support_etcd
from tests.support_rack import HANG_SECONDS, Post, Rack, rack
from tests.support_store import KIB, put
from virial import Client

QUOTA_BYTES = 4 << 20


def quota_bytes(size_bytes_max: int) -> int:
    del size_bytes_max
    return QUOTA_BYTES


async def fill(post: Post) -> None:
    """With history, until etcd refuses: by another cluster under a prefix of its own, so that ours only suffers."""
    store = support_etcd.make_store(post.member, prefix="noise")
    await store.open()
    try:
        leader = await store.campaign("noise")
        for seq in range(1, 1_000):
            try:
                await store.commit(leader, seq, [put("x", bytes(64 * KIB))])
            except StorageFullError:
                return
        pytest.fail("it never was full")
    finally:
        await store.close()


async def says(client: Client, words: str) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            found = await client.list_controllers()
            if any(words in problem for problem in found.problems):
                return
            await asyncio.sleep(0.1)


def defragmented(made: Rack) -> list[str]:
    lines = [json.loads(line) for post in made.posts for line in post.log.getvalue().splitlines()]
    return [line["member"] for line in lines if line["event"] == "member.defragmented"]


async def test_space_is_won_back_once_every_member_is_in_step_also_when_nobody_leads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of members and controllers alike: what sets the alarm off is what it is taken off by.
    monkeypatch.setattr(member_config, "quota_bytes", quota_bytes)
    async with rack() as made:
        leader = await made.settled()
        stopped, other = made.followers()
        async with made.client() as client, made.client(other) as looking:
            await made.write(client)
            stopped.member.signal(signal.SIGSTOP)
            await fill(other)
            await says(looking, f"{stopped.member.config.name} is not: bring that back")
            # Nobody can take over either: that would be a write.
            await leader.kill()
            await says(looking, "no controller leads")
            assert not defragmented(made), "a member lags: none is defragmented"
            stopped.member.signal(signal.SIGCONT)
            await leader.start()
            await made.write(client)
            await made.require_acked(client)
            assert defragmented(made)
            assert set(defragmented(made)) <= {"m0", "m1", "m2"}
            found = await looking.list_controllers()
            assert not any("no space left" in problem for problem in found.problems)
            assert all(member.size_bytes < QUOTA_BYTES // 2 for member in found.members if member.role != "SILENT")
