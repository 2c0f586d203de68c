"""How long a write is asked again, and with what patience: on virtual time."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from controld.store.etcd_session import Attempts, EtcdTimes
from controld.store.etcd_wire import WireError
from tests.support_replica import run

REFUSED = WireError(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: connect failed")
LOST = WireError(grpc.StatusCode.DEADLINE_EXCEEDED, "")


async def ask(attempts: Attempts, error: WireError, takes_s: float) -> list[tuple[float, float]]:
    """(when, patience) of each attempt, each of which ends by `error`."""
    loop = asyncio.get_running_loop()
    began_s, made = loop.time(), list[tuple[float, float]]()
    while await attempts.next():
        made.append((loop.time() - began_s, attempts.timeout))
        await asyncio.sleep(min(takes_s, attempts.timeout))
        attempts.failed(error)
    return made


def test_what_an_election_of_etcd_lost_is_asked_again_soon_and_a_slow_disk_ever_later() -> None:
    async def main() -> None:
        made = await ask(Attempts(EtcdTimes(commit=20.0), 20.0), LOST, 60.0)
        assert [patience_s for _, patience_s in made][:10] == [0.2] * 5 + [0.4, 0.8, 1.6, 3.0, 3.0]

    run(main)


def test_where_every_commit_takes_long_none_is_repeated_early() -> None:
    async def main() -> None:
        made = await ask(Attempts(EtcdTimes(), 5.0, usual_seconds=0.4), LOST, 60.0)
        assert made[0] == (0.0, 0.8)

    run(main)


@pytest.mark.parametrize(("refused_s", "least_s", "most_s"), [(0.45, 0.4, 0.8), (5.0, 4.0, 5.5)])
def test_a_member_that_does_not_run_is_waited_for_as_long_as_told(
    refused_s: float, least_s: float, most_s: float
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await ask(Attempts(EtcdTimes(refused=refused_s), 5.0), REFUSED, 0.001)
        assert least_s < loop.time() - began_s < most_s
        began_s = loop.time()
        await ask(Attempts(EtcdTimes(refused=0.1), 5.0), LOST, 0.001)  # who answers, whatever, does run
        assert loop.time() - began_s > 4.0

    run(main)
