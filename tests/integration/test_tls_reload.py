"""New certificates and a new authority without a restart and without a gap: controllers, agents, callers."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import grpc
import grpc.aio
import pytest

from controld.config import Config
from controld.core.spec import SECOND_NS
from controld.replica.peers import PeerLostError, Ping
from controld.service import tls as server_tls
from controld.service.peers import GrpcPeers
from tests.integration.noded_support import FakeController, noded
from tests.support_apps import Controllers, controllers
from tests.support_secure import Secure, secure_config, serve_securely
from tests.support_service import HANG_SECONDS, failure, job_spec
from tests.support_tls import Files, Operator
from virial import Client, Tls
from virial.cli import _authority
from virial.errors import VirialError
from virialpb.v1 import cluster_pb2, job_pb2

STATUS = cluster_pb2.GetStatusRequest()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_tls, "LOOK_SECONDS", 0.05)


def rotate(operator: Operator, step: str) -> None:
    """One step, as the operator does it; here the directories are where the daemons read them."""
    match step:
        case "begin":
            _authority.begin(operator.directory, datetime.now(UTC))
        case "switch":
            _authority.switch(operator.directory, datetime.now(UTC), 2)
        case _:
            _authority.finish(operator.directory)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():  # noqa: ASYNC110 - there is no one event for what tests wait for
            await asyncio.sleep(0.02)


def loaded(text: str) -> int:
    return sum(json.loads(line)["event"] == "tls.loaded" for line in text.splitlines())


async def reads(secure: Secure, files: Files) -> bool:
    """Whether a new connection with these is let in."""
    async with secure.dial(files) as served:
        try:
            await served.cluster.GetStatus(STATUS, timeout=HANG_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED):
                raise
            return False
        return True


def copy_of(files: Files, directory: Path) -> Files:
    """What somebody has who did not get the new ones."""
    directory.mkdir()
    for name in ("ca.pem", "certificate.pem", "key.pem"):
        (directory / name).write_bytes((files.directory / name).read_bytes())
    return Files(directory)


async def test_an_authority_is_replaced_under_an_open_stream(tmp_path: Path) -> None:
    async with serve_securely(tmp_path) as secure:
        operator, log = secure.operator, secure.served.log
        alice = operator.issue("user", "alice")
        old = copy_of(alice, tmp_path / "old")
        async with secure.dial(alice) as served:
            watch = served.jobs.WatchJobs(job_pb2.WatchJobsRequest())
            assert cast("job_pb2.WatchJobsResponse", await watch.read()).synced
            halfway = old
            for number, step in enumerate(("begin", "switch"), start=1):
                before = loaded(log.getvalue())
                rotate(operator, step)
                await until(lambda b=before: loaded(log.getvalue()) > b)
                both = copy_of(alice, tmp_path / f"alice-{step}")
                assert await reads(secure, both)
                halfway = copy_of(old, tmp_path / f"old-{step}")
                halfway.ca.write_bytes(alice.ca.read_bytes())  # has done the step before, not this one
                assert await reads(secure, halfway)
                await served.jobs.SubmitJob(job_pb2.SubmitJobRequest(job_id=f"j{number}", spec=job_spec()))
                message = await watch.read()
                assert isinstance(message, job_pb2.WatchJobsResponse)
                assert message.job.name == f"jobs/j{number}"  # the same stream, unbroken
            before = loaded(log.getvalue())
            rotate(operator, "finish")
            await until(lambda: loaded(log.getvalue()) > before)
        assert await reads(secure, alice)
        assert not await reads(secure, halfway)


async def test_files_that_do_not_fit_leave_what_was_there_in_use(tmp_path: Path) -> None:
    async with serve_securely(tmp_path) as secure:
        alice = secure.operator.issue("user", "alice")
        key = secure.files.key.read_bytes()
        secure.files.key.write_bytes(alice.key.read_bytes())
        await until(lambda: "tls.refused" in secure.served.log.getvalue())
        assert await reads(secure, alice)
        assert loaded(secure.served.log.getvalue()) == 0
        secure.files.key.write_bytes(key)
        await until(lambda: loaded(secure.served.log.getvalue()))
        assert await reads(secure, alice)
        assert b"PRIVATE" not in secure.served.log.getvalue().encode()


async def test_a_certificate_that_ends_soon_is_told_in_the_status_and_the_metrics(tmp_path: Path) -> None:
    async with serve_securely(tmp_path) as secure:
        (problem,) = await problems_of(secure)  # the tests' live for two days
        assert "this controller's certificate ends on" in problem
        assert "--renew" in problem
        text = await asyncio.to_thread(fetch, f"http://{secure.served.ports.metrics_address}/metrics")
        (line,) = [one for one in text.splitlines() if one.startswith("virial_controld_certificate_not_after_seconds")]
        assert 0 < float(line.split()[1]) - datetime.now(UTC).timestamp() < 3 * 86_400
        _authority.issue(
            secure.operator.directory, "controller", "c1", ["127.0.0.1"], datetime.now(UTC), 90, renew=True
        )
        await until(lambda: loaded(secure.served.log.getvalue()))
        assert await problems_of(secure) == []


async def problems_of(secure: Secure) -> list[str]:
    async with secure.dial(secure.operator.get("user", "eve")) as served:
        return list((await served.cluster.GetStatus(STATUS)).problems)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=HANG_SECONDS) as reply:
        return str(reply.read(), "ascii")


async def test_one_whose_authority_went_is_shown_out_of_what_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controld.service.tenure.LOOK_SECONDS_MAX", 0.1)
    async with serve_securely(tmp_path) as secure:
        alice = secure.operator.issue("user", "alice")
        async with secure.dial(copy_of(alice, tmp_path / "old")) as served:
            await served.cluster.GetStatus(STATUS)
            watch = asyncio.create_task(failure(served.jobs.WatchJobs(job_pb2.WatchJobsRequest())))
            for step in ("begin", "switch", "finish"):
                before = loaded(secure.served.log.getvalue())
                rotate(secure.operator, step)
                await until(lambda b=before: loaded(secure.served.log.getvalue()) > b)
            assert (await watch).code is grpc.StatusCode.UNAUTHENTICATED


async def test_a_client_that_lives_on_takes_up_its_new_certificate(tmp_path: Path) -> None:
    async with serve_securely(tmp_path) as secure:
        alice = secure.operator.issue("user", "alice")
        tls = Tls(str(alice.ca), str(alice.certificate), str(alice.key))
        async with Client(secure.served.ports.grpc_address, tls=tls) as client:
            assert await client.list_jobs() == []
            for step in ("begin", "switch", "finish"):
                before = loaded(secure.served.log.getvalue())
                rotate(secure.operator, step)
                await until(lambda b=before: loaded(secure.served.log.getvalue()) > b)
            assert await client.list_jobs() == []
            # Nobody asks for ever: one that is refused, and is not replaced, is said to be refused.
            odd = secure.operator.odd("none")
            for name in ("certificate.pem", "key.pem"):
                (alice.directory / name).write_bytes((odd.directory / name).read_bytes())
        async with Client(secure.served.ports.grpc_address, tls=tls) as client:
            with pytest.raises(VirialError, match="names no identity"):
                await client.list_jobs()


async def test_an_agent_makes_its_new_connection_before_it_breaks_the_old_one(tmp_path: Path) -> None:
    operator = Operator(tmp_path / "certs")
    server, node = operator.issue("controller", "c1"), operator.issue("node", "n1")
    fake = FakeController()
    await fake.start(tls=(server.key, server.certificate), ca=operator.ca)
    flags = ("--tls-ca", str(node.ca), "--tls-certificate", str(node.certificate), "--tls-key", str(node.key))
    try:
        async with noded(tmp_path / "n1", [fake.address], *flags):
            await fake.until(lambda: fake.sessions and fake.session.beats, "a beat")
            first = fake.session
            operator.issue("node", "n1", renew=True)
            await fake.until(lambda: len(fake.sessions) == 2, "a second session")
            # The fake takes both: the first ends because the agent has the second.
            assert not first.ended or fake.session is not first
            await fake.until(lambda: fake.session.beats, "a beat on the new connection")
            await fake.until(lambda: first.ended, "the end of the old connection")
            assert first.beats
            assert fake.session.hello.incarnation == first.hello.incarnation
    finally:
        await fake.stop()


async def test_controllers_renew_without_breaking_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator(tmp_path / "certs")
    lost: list[PeerLostError] = []
    listen = GrpcPeers.pings

    async def pings(self: GrpcPeers, address: str) -> AsyncGenerator[Ping]:
        try:
            async with aclosing(listen(self, address)) as found:
                async for ping in found:
                    yield ping
        except PeerLostError as error:
            lost.append(error)
            raise

    monkeypatch.setattr(GrpcPeers, "pings", pings)

    def configure(config: Config) -> Config:
        # A machine that stands still for a moment is no silence here: only what breaks would be.
        patient = replace(config, election=replace(config.election, takeover_ns=15 * SECOND_NS))
        return secure_config(patient, operator.issue("controller", config.identity))

    async with controllers(tmp_path, configure=configure) as running:
        leader = await running.settled()
        epoch = leader.replica.epoch
        lost.clear()
        for step in ("begin", "switch", "finish"):
            before = [loaded(one.log.getvalue()) for one in running.all]
            await asyncio.to_thread(rotate, operator, step)
            await until(lambda b=before: all(loaded(o.log.getvalue()) > n for o, n in zip(running.all, b, strict=True)))
            await until(lambda: all(at == now for at, now in versions(running)))
            assert await running.settled() is leader
        assert lost == []
        assert leader.replica.epoch == epoch
        await leader.stop()  # hands over, with the new certificates
        assert (await running.leader(but=leader)).replica.epoch > epoch


def versions(running: Controllers) -> list[tuple[int, int]]:
    """(version of the certificate that its pings come over, the newest) of each follower."""
    found: list[tuple[int, int]] = []
    for one in running.followers():
        assert one.app is not None
        peers = one.app._peers
        assert peers is not None
        found.append((peers.listens_with, peers._version))
    return found


def test_config_asks_for_the_callers_authority_where_others_can_reach_it(tmp_path: Path) -> None:
    from controld.config import TlsConfig, validate

    files = Operator(tmp_path / "certs").issue("controller", "c1")
    tls = TlsConfig(str(files.certificate), str(files.key))
    assert [name for name, _ in validate(Config(listen="10.0.0.1:7700", tls=tls))] == ["tls.client_ca"]
    assert validate(Config(listen="10.0.0.1:7700", tls=replace(tls, client_ca=str(files.ca)))) == []
    assert validate(Config(tls=tls)) == []
    issuer = replace(tls, client_ca=str(files.ca), issuer_certificate=str(files.ca))
    assert [name for name, _ in validate(Config(tls=issuer))] == ["tls.issuer_key"]
    joins = replace(tls, client_ca=str(files.ca), join_listen="10.0.0.1:7702")
    assert [name for name, _ in validate(Config(tls=joins))] == ["tls.join_listen"]
    unasked = replace(tls, issuer_certificate=str(files.ca), issuer_key=str(files.key))
    assert [name for name, _ in validate(Config(tls=unasked))] == ["tls.client_ca"]
