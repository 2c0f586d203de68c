"""The ground the simulation stands on: time that jumps, processes that freeze and die, a network that cuts silently."""

from __future__ import annotations

import asyncio
import socket
from random import Random
from typing import Any

import pytest

from tests.sim.loop import Deadlock, Livelock, Process, SimLoop
from tests.sim.network import Connection, End, Network, Way


def test_time_jumps_to_the_next_timer() -> None:
    loop = SimLoop()

    async def main() -> None:
        await asyncio.sleep(86_400)

    loop.run_until_complete(main())
    assert 86_400 <= loop.time() < 86_400 * 1.01
    loop.tear_down()


def test_what_waits_for_nothing_is_a_deadlock_and_what_feeds_itself_a_livelock() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    async def spin() -> None:
        while True:  # noqa: ASYNC110 - the very mistake that must be noticed
            await asyncio.sleep(0)

    for work, error in ((wait, Deadlock), (spin, Livelock)):
        loop = SimLoop()
        with pytest.raises(error):
            loop.run_until_complete(work())
        loop.tear_down()


def test_threads_and_sockets_are_refused() -> None:
    loop = SimLoop()

    async def thread() -> None:
        await asyncio.to_thread(print)

    async def dial() -> None:
        await asyncio.open_connection(sock=socket.socket())

    for work in (thread, dial):
        with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
            loop.run_until_complete(work())
    loop.tear_down()


def test_a_frozen_process_goes_on_where_it_was_and_a_dead_one_does_nothing_more() -> None:
    loop = SimLoop()
    seen: list[tuple[str, float]] = []

    async def count(name: str) -> None:
        try:
            while True:
                await asyncio.sleep(1)
                seen.append((name, round(loop.time())))
        finally:
            seen.append((f"{name} ended", 0))

    async def main() -> None:
        frozen, dead = Process(loop, "frozen", None), Process(loop, "dead", None)
        frozen.spawn(count("frozen"))
        dead.spawn(count("dead"))
        await asyncio.sleep(2.5)
        frozen.freeze()
        dead.kill()
        await asyncio.sleep(10)
        frozen.thaw()
        await asyncio.sleep(1.5)

    loop.run_until_complete(main())
    assert [at for name, at in seen if name == "frozen"] == [1, 2, 13, 14]
    assert [at for name, at in seen if name == "dead"] == [1, 2]
    assert all(not name.endswith("ended") for name, _ in seen)
    loop.tear_down()


def _connected(loop: SimLoop) -> tuple[Network, Connection]:
    network = Network(loop, Random(1))
    agent, server = Process(loop, "agent", None), Process(loop, "server", None)
    network.listen("c0", server, lambda _: None)
    return network, loop.run_until_complete(network.dial(agent, "n0", "c0", "Control"))


def test_a_silent_cut_holds_what_was_sent_and_closes_nothing() -> None:
    loop = SimLoop()
    network, connection = _connected(loop)

    async def main() -> list[Any]:
        network.cut("n0", Way.UP)
        for number in range(3):
            connection.up.send(bytes([number]))
        connection.down.send(b"down")
        await asyncio.sleep(10)
        assert not connection.up.inbox
        assert await connection.down.take() == b"down"
        network.heal("n0", Way.UP)
        return [await connection.up.take() for _ in range(3)]

    assert loop.run_until_complete(main()) == [b"\0", b"\1", b"\2"]
    loop.tear_down()


def test_a_cut_that_lasts_is_given_up_by_keepalives_and_a_break_at_once() -> None:
    loop = SimLoop()
    network, connection = _connected(loop)

    async def main() -> None:
        network.cut("n0", Way.UP, Way.DOWN)
        connection.up.send(b"lost")
        assert await connection.down.take() == End(reset=True)
        assert 14 < loop.time() < 17
        assert await connection.up.take() == End(reset=True)
        assert 29 < loop.time() < 32
        network.heal("n0", Way.UP, Way.DOWN)
        await asyncio.sleep(5)
        assert list(connection.up.inbox) == [End(reset=True)]

    loop.run_until_complete(main())
    loop.tear_down()
