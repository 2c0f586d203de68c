"""`virial admin members` and `move-leader` on controllers with real etcd members: dead ones replaced, nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from controld.store.member import MemberProcess, MemberQuarantinedError, supervise
from tests.support_rack import HANG_SECONDS, Rack, rack, run, until, wiped
from virial.errors import ConflictError, InvalidRequestError, NotFoundError


@pytest.fixture
async def three() -> AsyncIterator[Rack]:
    async with rack() as made:
        yield made


async def test_a_dead_member_is_replaced_and_nothing_acknowledged_is_lost(three: Rack) -> None:
    await three.settled()
    dead = three.followers()[0]
    async with three.client() as client:
        await three.write(client)
        listed = (await client.list_controllers()).members
        assert [m.name for m in listed] == ["m0", "m1", "m2"]
        gone = next(m for m in listed if m.name == dead.member.config.name)
        with pytest.raises(ConflictError, match="answers and is in step"):
            await client.replace_member(gone.id, gone.name, gone.peer_url)
        await dead.lose()
        await three.write(client)
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                problems = (await client.get_status()).problems
                if any(f"store member {gone.name} does not answer" in problem for problem in problems):
                    break
                await asyncio.sleep(0.1)
        # One whose disk was emptied is not taken by the others as what it was.
        fresh = MemberProcess(wiped(dead.member.config))
        with pytest.raises(MemberQuarantinedError, match=f"virial admin members replace {gone.name}"):
            async with asyncio.timeout(HANG_SECONDS):
                await supervise(fresh, lambda _: None)
        change = await client.replace_member(gone.id, gone.name, gone.peer_url)
        again = await client.replace_member(gone.id, gone.name, gone.peer_url)
        assert again.added_id == change.added_id != gone.id, "the same again changes nothing"
        assert len(again.members) == 3
        peers = dict(peer.split("=", 1) for peer in change.peers)
        joining = replace(wiped(dead.member.config), peers=peers, joins=True)
        dead.member = MemberProcess(joining)
        supervising = asyncio.create_task(supervise(dead.member, lambda _: None))
        try:
            await until(lambda: dead.member.config.directory.joinpath("c:0").exists() or None)
            await dead.start()
            await _votes(three, change.added_id)
            await three.write(client)
            other = next(post for post in three.followers() if post is not dead)
            await other.lose()  # the new one and the leader are a majority by themselves
            await three.write(client)
            await three.require_acked(client)
            assert any("member.promoted" in post.log.getvalue() for post in three.posts), "by whoever led then"
        finally:
            supervising.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await supervising


async def _votes(three: Rack, id_: str) -> None:
    async with three.client() as client, asyncio.timeout(HANG_SECONDS):
        while True:
            found = {m.id: m.role for m in (await client.list_controllers()).members}
            if found.get(id_) in ("VOTES", "LEADS"):
                return
            await asyncio.sleep(0.1)


async def test_without_a_majority_nothing_is_removed_and_every_controller_says_so(three: Rack) -> None:
    await three.settled()
    first, second = three.followers()
    async with three.client() as client:
        await first.lose()
        listed = {m.name: m for m in (await client.list_controllers()).members}
        sound = second.member.config.name
        with pytest.raises(ConflictError, match="no majority"):
            await client.remove_member(sound)
        second.member.kill()
        last = next(post for post in three.posts if post not in (first, second))
        async with three.client(last) as alone, asyncio.timeout(HANG_SECONDS):
            while True:
                found = await alone.list_controllers()
                if any("the store has no majority" in problem for problem in found.problems):
                    break
                await asyncio.sleep(0.1)
        assert {m.name for m in found.members} == set(listed), "as the member has them, without asking the others"
        status, said = await run("virial.cli", "status", "--address", last.config.listen, "--timeout", "2")
        assert status == 4
        assert re.search(r"the store has no majority: [01] of its 3 members answer", said), said
        assert f"controller {first.config.listen} does not answer" in said


async def test_the_leadership_is_moved_to_the_one_that_is_named(three: Rack) -> None:
    leader = await three.settled()
    to = three.followers()[0]
    async with three.client() as client:
        await three.write(client)
        assert await client.move_leader(to.name) == to.config.listen
        await three.write(client)
        assert (await client.get_status()).leader == to.name
        assert await client.move_leader(to.name) == to.config.listen, "it leads already"
        with pytest.raises(NotFoundError, match="the controller c9 does not exist"):
            await client.move_leader("c9")
        with pytest.raises(ConflictError, match="beside the controller that leads"):
            await client.remove_member(to.member.config.name)
        await leader.lose()
        with pytest.raises(ConflictError, match="does not answer"):
            await client.move_leader(leader.config.listen)
        await three.write(client)
        await three.require_acked(client)
        with pytest.raises(InvalidRequestError, match="is no name of a member"):
            await client.add_member("No Name", "https://h:1")
