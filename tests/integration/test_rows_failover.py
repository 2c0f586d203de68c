"""Row F7: fail-over back and forth, each time with other settings; in virtual time, and with real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import grpc
import pytest
from grpc import aio

from controld.core.commands import SubmitJob
from controld.core.ids import Epoch
from controld.core.model import JobState, Liveness
from controld.core.spec import SECOND_NS
from controld.replica.election import MS_NS, Knowledge, Timings
from controld.replica.leader import Leader, Term
from controld.replica.replica import Replica
from controld.store import guard
from tests import support_etcd
from tests.support_agents import SUSPECT_S, cluster_with, end, events, job_generation, job_state, liveness
from tests.support_core import spec
from tests.support_election import Cluster, submit
from tests.support_replica import run
from tests.support_rows import Defect, Rows, each_defect, each_row
from tests.support_service import job_spec
from virial import Client
from virialpb.ids import parse_epoch
from virialpb.v1 import job_pb2, job_pb2_grpc

Patch = pytest.MonkeyPatch
ROOT = Path(__file__).resolve().parents[2]
HANG_SECONDS = 60.0
JOB = "train"

# F7: a backup that was told to take a new configuration led beside the leader, and a second takeover failed.


def fail_over_back_and_forth() -> None:
    """Whoever restarts does so with other settings than the rest; none of it is felt by an agent or a gang."""

    async def main() -> None:
        cluster, agents = await cluster_with("n0", "n1")
        leader = await cluster.leader()
        await submit(leader, SubmitJob("r1", spec(2)))
        await cluster.until(lambda: job_state(leader) is JobState.RUNNING or None)
        epochs = [Epoch(0, 0)]
        for turn in range(6):
            reconfigure(cluster, turn)
            standby = cluster.followers()[turn % 2]
            await standby.stop()
            await standby.start()
            await cluster.settled()
            assert cluster.takeovers() == 1 + turn, "no standby takes over because it was started"
            leader = await cluster.leader()
            if turn % 3 == 0:
                await leader.stop()
            elif turn % 3 == 1:
                await leader.kill()
            else:  # it goes on, as a standby
                assert leader.replica is not None
                assert await leader.replica.hand_over()
            successor = await cluster.leader(but=leader)
            if leader.replica is None:
                await leader.start()
            await cluster.settled()
            await asyncio.sleep(SUSPECT_S)
            assert [m.leads for m in cluster.members].count(True) == 1
            assert cluster.takeovers() == 2 + turn
            assert successor.replica is not None
            epochs.append(successor.replica.epoch)
            assert epochs[-1] > epochs[-2]
            await submit(successor, SubmitJob(f"more-{turn}", spec(9)))
            assert {liveness(successor, agent) for agent in agents} == {Liveness.LIVE}
            assert (job_state(successor), job_generation(successor)) == (JobState.RUNNING, 1)
            assert not {"node.suspect", "node.expired"} & set(events(successor))
        await end(cluster, agents)

    run(main)


def reconfigure(cluster: Cluster, turn: int) -> None:
    """For those that start from here on."""
    base = cluster.settings
    limits = replace(base.limits, grace_ns=(1 + turn % 3) * SECOND_NS, resend_ns=base.limits.resend_ns + turn)
    cluster.settings = replace(base, limits=limits, renew_interval_ms=1000 + 100 * turn, events_max=9000 + turn)
    cluster.timings = Timings(ping_interval_ns=(100 + 10 * turn) * MS_NS, takeover_ns=(400 + 40 * turn) * MS_NS)


def takes_itself_for_the_leader_at_its_start(patch: Patch) -> None:
    patch.setattr(Knowledge, "own", property(lambda known: known.incumbent is not None and known.heard_ns is None))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType, reportUnknownMemberType]


def one_that_led_never_follows_again(patch: Patch) -> None:
    real = Replica._lead

    async def lead(replica: Replica, term: Term) -> None:
        await real(replica, term)
        await asyncio.Event().wait()

    patch.setattr(Replica, "_lead", lead)


def keeps_what_it_handed_over(patch: Patch) -> None:
    patch.setattr(Leader, "step_down", lambda leader, error: leader.release())  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType, reportUnknownMemberType]
    patch.setattr(guard, "require_leadership", lambda head, leadership: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    patch.setattr(guard, "already_applied", lambda head, leadership, seq: False)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


ROWS: Rows = {
    "F7": (
        fail_over_back_and_forth,
        (
            Defect("takes_itself_for_the_leader_at_its_start", takes_itself_for_the_leader_at_its_start),
            Defect("one_that_led_never_follows_again", one_that_led_never_follows_again),
            Defect("keeps_what_it_handed_over", keeps_what_it_handed_over),
        ),
    ),
}


@each_row(ROWS)
def test_the_row_holds(row: str) -> None:
    ROWS[row][0]()


@each_defect(ROWS)
def test_the_row_catches(row: str, defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    defect.seed(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)):
        ROWS[row][0]()


# -- with processes


@dataclass
class Ack:
    """`number`: of the job that was made, in order of commits. `by`: the controller that said so."""

    number: int
    by: str


class Controllers:
    """Three `controld` on one etcd, and a writer to each that is never sent on to another.

    `program` is what each runs, `controld` itself or one with a defect.
    """

    def __init__(self, directory: Path, endpoint: str, program: str) -> None:
        self._directory = directory
        self._store = ["--store-kind", "etcd", "--store-endpoints", endpoint]
        self._store += ["--store-prefix", support_etcd.fresh_prefix()]
        self._program = program
        self.names = ("c0", "c1", "c2")
        ports = support_etcd.free_ports(3)
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in zip(self.names, ports, strict=True)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.acks: list[Ack] = []
        self.writing: list[asyncio.Task[None]] = []

    def start(self, name: str, *flags: str) -> None:
        argv = [sys.executable, "-c", self._program, "--identity", name, "--metrics-listen", "off", *self._store]
        argv += ["--data-dir", str(self._directory / name), "--listen", self.addresses[name], *flags]
        if "--peers" not in flags:
            argv += ["--peers", ",".join(self.addresses.values())]
        with self.log_file(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)

    def serves(self, name: str) -> bool:
        return (self._directory / name / "ports.json").exists()

    def log_file(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    async def write(self, name: str) -> None:
        """Until cancelled. A request whose answer is unknown is given up: what it did is nobody's."""
        number = 0
        while True:
            async with aio.insecure_channel(self.addresses[name]) as channel:
                jobs = job_pb2_grpc.JobServiceStub(channel)
                with suppress(grpc.RpcError):
                    while True:
                        number += 1
                        request = job_pb2.SubmitJobRequest(request_id=f"{name}-{number}", spec=job_spec(name=JOB))
                        answer = await jobs.SubmitJob(request, timeout=10)
                        self.acks.append(Ack(int(answer.name.rpartition("-")[2]), name))
                        await asyncio.sleep(0.05)
            await asyncio.sleep(0.05)

    async def acked_by(self, *names: str) -> str:
        """Who of them it is that acknowledges something from now on."""
        seen = len(self.acks)
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                for task in self.writing:
                    if task.done():
                        task.result()
                found = [ack.by for ack in self.acks[seen:] if ack.by in names]
                if found:
                    return found[0]
                await asyncio.sleep(0.02)

    def leaderships(self) -> list[tuple[Epoch, str]]:
        """As the controllers told of them: (epoch, by whom)."""
        entries = [
            (json.loads(line), name)
            for name in self.names
            for line in self.log_file(name).read_text().splitlines()
            if '"leader.started"' in line
        ]
        return [(parse_epoch(entry["epoch"]), name) for entry, name in entries]

    def leaders(self) -> list[str]:
        """By whom commits were made, in their order: once each leadership, unless two led at a time."""
        return [by for by, _ in groupby(ack.by for ack in sorted(self.acks, key=lambda ack: ack.number))]


CONTROLD = "import sys; from controld.__main__ import main; sys.exit(main(sys.argv[1:]))"
TAKES_ITSELF_FOR_THE_LEADER = f"""
from controld.replica.election import Knowledge
Knowledge.own = property(lambda known: known.incumbent is not None and known.heard_ns is None)
{CONTROLD}"""
# A busy machine is no silence here.
PATIENT = ("--election-takeover", "3s")


async def back_and_forth(controllers: Controllers) -> None:
    names = controllers.names
    for name in names:
        controllers.start(name, *PATIENT)
    await listened_to(controllers)
    leader = await controllers.acked_by(*names)
    before = sorted(controllers.leaderships())
    # A standby first: nothing of what it is told may make it lead.
    standby = next(name for name in names if name != leader)
    await restart(controllers, standby, *PATIENT, "--election-ping-interval", "150ms", "--keep-events", "500")
    await listened_to(controllers)
    assert sorted(controllers.leaderships()) == before, "a standby took over because it was started"
    for flags in (
        (*PATIENT, "--lease-fence-after", "30s", "--lease-grace", "3s"),
        ("--election-takeover", "2s", "--lease-renew-interval", "2s"),
        (*PATIENT, "--peers", ",".join(reversed(controllers.addresses.values()))),
        (*PATIENT, "--keep-requests", "2d"),
    ):
        await listened_to(controllers)
        leader = await controllers.acked_by(*names)
        await restart(controllers, leader, *flags)
        successor = await controllers.acked_by(*(name for name in names if name != leader))
        assert successor != leader
        one_at_a_time(controllers)


async def restart(controllers: Controllers, name: str, *flags: str) -> None:
    """As an operator does to have it read its configuration."""
    process = controllers.processes[name]
    async with asyncio.timeout(HANG_SECONDS):
        while not controllers.serves(name):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, HANG_SECONDS) == 0
    controllers.start(name, *flags)


async def listened_to(controllers: Controllers) -> None:
    """Until both others listen to the leader, so that either may take its place at once."""
    async with asyncio.timeout(HANG_SECONDS), Client([*controllers.addresses.values()], timeout_s=HANG_SECONDS) as ask:
        while any("does not listen" in problem for problem in (await ask.get_status()).problems):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def one_at_a_time(controllers: Controllers) -> None:
    """Commits are in the order of their leaderships: none comes between two of another's."""
    left = iter(leader for _, leader in sorted(controllers.leaderships()))
    for leader in controllers.leaders():
        assert leader in left, "two led at a time"


async def play(directory: Path, program: str) -> Controllers:
    member = support_etcd.shared()
    await member.ready()
    controllers = Controllers(directory, member.processes[0].config.endpoint, program)
    controllers.writing = [asyncio.create_task(controllers.write(name)) for name in controllers.names]
    try:
        await back_and_forth(controllers)
        async with Client([*controllers.addresses.values()], timeout_s=HANG_SECONDS) as client:
            there = {job.id for job in await client.list_jobs()}
        assert {f"{JOB}-{ack.number}" for ack in controllers.acks} <= there, "nothing acknowledged is lost"
        assert len({ack.number for ack in controllers.acks}) == len(controllers.acks), "and each made a job of its own"
    finally:
        for task in controllers.writing:
            task.cancel()
        controllers.end()
    return controllers


@pytest.mark.row("F7")
async def test_processes_fail_over_back_and_forth_with_other_settings_each_time(tmp_path: Path) -> None:
    support_etcd.require_etcd()
    controllers = await play(tmp_path, CONTROLD)
    assert len(controllers.leaderships()) >= 5
    for name in controllers.names:
        assert "Traceback" not in controllers.log_file(name).read_text()


@pytest.mark.row("F7", defect="takes_itself_for_the_leader_at_its_start")
async def test_the_processes_catch_one_that_takes_itself_for_the_leader(tmp_path: Path) -> None:
    support_etcd.require_etcd()
    with pytest.raises(AssertionError, match="because it was started"):
        await play(tmp_path, TAKES_ITSELF_FOR_THE_LEADER)
