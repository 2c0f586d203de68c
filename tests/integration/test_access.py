"""Who may do what, over real TLS: each role against each method, nodes as themselves, users with their own jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from controld.core.agent import Hello
from controld.core.commands import CancelJob, Now
from controld.core.outcome import Outcome
from controld.core.state import State
from controld.core.transitions import jobs
from controld.service import gate, interceptor, node
from controld.service import job as service_job
from controld.service.gate import ANYONE
from controld.service.roles import ROLES
from tests.support_secure import Secure, serve_securely
from tests.support_service import HANG_SECONDS, FakeAgent, failure, job_spec
from tests.support_tls import Files, Operator
from virialpb.errors import details_from
from virialpb.identity import Role, make_identity
from virialpb.reasons import Reason
from virialpb.v1 import cluster_pb2, job_pb2, node_pb2

Patch = pytest.MonkeyPatch
NODE = "/virialpb.v1.NodeService"


@pytest.fixture
async def secure(tmp_path: Path) -> AsyncIterator[Secure]:
    async with serve_securely(tmp_path) as found:
        yield found


async def reason_of(channel: grpc.aio.Channel, method: str, *messages: bytes) -> Reason | None:
    """Why a call with such messages is refused; None where it is let in, whatever becomes of it."""
    while True:
        call: grpc.aio.StreamStreamCall[Any, Any] = cast("Any", channel.stream_stream(method))(iter(messages or [b""]))
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await call.read()
            return None
        except grpc.aio.AioRpcError as error:
            details = details_from(error)
            if details.message == "Internal error from Core":
                continue  # gRPC's own words, where the refusal came while the second message was being sent
            assert details.reason is not None or details.code is not grpc.StatusCode.UNAVAILABLE, details
            return details.reason
        finally:
            call.cancel()


DENIED = (Reason.PERMISSION_DENIED, Reason.UNAUTHENTICATED)


async def wrongly_let_in(secure: Secure) -> str:
    """The first mistake, if any: every method as every role, also as roles that there are not."""
    operator = secure.operator
    someone = [(role.value, role, operator.issue(role, f"x-{role}")) for role in Role]
    strangers = [
        ("no identity", None, operator.odd("none")),
        ("two", None, operator.odd("two", uris=["spiffe://rack-7/user/a", "spiffe://rack-7/admin/a"])),
        ("no role", None, operator.odd("root", uris=["spiffe://rack-7/root/a"])),
        ("elsewhere", None, operator.odd("elsewhere", identity=make_identity("rack-8", Role.ADMIN, "a"))),
    ]
    for name, role, files in [*someone, *strangers]:
        async with secure.dial(files) as served:
            for method, allowed in ROLES.items():
                if method.startswith("/virialpb.v1.ReplicaService/"):
                    continue  # not served by one that is alone
                if role in allowed and method.endswith(("/WatchEvents", "/Control", "/Bulk")):
                    continue  # they say nothing until something happens
                reason = await reason_of(served.channel, method)
                if (reason in DENIED) is (role in allowed):
                    return f"{name} {method}: {reason}"
    return ""


@pytest.mark.row("H12")
async def test_case_h12_every_call_is_allowed_to_its_roles_and_denied_to_all_others(secure: Secure) -> None:
    assert await wrongly_let_in(secure) == ""


def lets_all_in(patch: Patch) -> None:
    def admit(self: gate.CertificateGate, method: str, peer: gate.Peer) -> gate.Caller:
        return ANYONE

    patch.setattr(gate.CertificateGate, "admit", admit)


def looks_at_streams_only(patch: Patch) -> None:
    def admit(self: interceptor.CallInterceptor, method: str, context: object) -> None: ...

    patch.setattr(interceptor.CallInterceptor, "_admit", admit)


def lets_unknown_in(patch: Patch) -> None:
    def admit(self: gate.CertificateGate, method: str, peer: gate.Peer) -> gate.Caller:
        read = self._read(peer["x509_pem_cert"][0], b"")
        assert read is not None
        if read.identity is None or gate.may(read.identity.role, method):
            return ANYONE
        raise gate._denied(method, "")

    patch.setattr(gate.CertificateGate, "admit", admit)


def forgets_the_cluster(patch: Patch) -> None:
    make = gate.CertificateGate.__init__

    def init(self: gate.CertificateGate, cluster: str, *rest: object) -> None:
        make(self, "rack-8", *rest)  # pyright: ignore[reportArgumentType]

    patch.setattr(gate.CertificateGate, "__init__", init)


@pytest.mark.row("H12")
@pytest.mark.parametrize("defect", [lets_all_in, looks_at_streams_only, lets_unknown_in, forgets_the_cluster])
async def test_case_h12_is_seen_to_fail(defect: object, tmp_path: Path, monkeypatch: Patch) -> None:
    assert callable(defect)
    defect(monkeypatch)
    async with serve_securely(tmp_path) as secure:
        assert await wrongly_let_in(secure)


async def test_health_is_open_to_any_certificate_of_the_authority(secure: Secure) -> None:
    async with secure.dial(secure.operator.odd("probe")) as served:
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = served.channel.unary_unary(
            "/grpc.health.v1.Health/Check"
        )
        answer = health_pb2.HealthCheckResponse.FromString(await check(b""))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_without_a_certificate_of_the_authority_nobody_connects(secure: Secure, tmp_path: Path) -> None:
    stranger = Operator(tmp_path / "others").issue("admin", "a")
    stranger.ca.write_bytes(secure.operator.ca.read_bytes())
    async with secure.dial(stranger) as served:
        details = await failure(served.cluster.GetStatus(cluster_pb2.GetStatusRequest()))
        assert (details.reason, details.code) == (None, grpc.StatusCode.UNAVAILABLE)


async def refused(call: grpc.aio.UnaryUnaryCall[Any, Any] | grpc.aio.UnaryStreamCall[Any, Any]) -> bool:
    return (await failure(call)).reason is Reason.PERMISSION_DENIED


async def done_to_others(secure: Secure) -> str:
    """The first thing that a user may do to another user's job, or to the hosts as another user."""
    alice, bob, root = (secure.operator.issue(*who) for who in (("user", "alice"), ("user", "bob"), ("admin", "root")))

    def run_as(user: str) -> job_pb2.SubmitJobRequest:
        spec = job_spec()
        spec.task.user = user
        # Checked like any other, and changes nothing where it should have been refused.
        return job_pb2.SubmitJobRequest(spec=spec, validate_only=True)

    async with secure.dial(alice) as a, secure.dial(bob) as b, secure.dial(root) as r:
        for name in ("one", "two"):
            job = await a.jobs.SubmitJob(job_pb2.SubmitJobRequest(job_id=name, spec=job_spec()))
            assert job.owner == "alice"
        assert (await b.jobs.GetJob(job_pb2.GetJobRequest(name="jobs/one"))).owner == "alice"
        if not await refused(b.jobs.ReadLogs(job_pb2.ReadLogsRequest(name="jobs/one"))):
            return "bob reads what alice's job wrote"
        for user in ("root", "0", "alice", "Bob"):
            try:
                await b.jobs.SubmitJob(run_as(user))
            except grpc.aio.AioRpcError as error:
                if details_from(error).reason is not Reason.PERMISSION_DENIED:
                    raise
                continue
            return f"bob runs tasks as {user}"
        await b.jobs.SubmitJob(run_as("bob"))
        await r.jobs.SubmitJob(run_as("bob"))
        try:
            await b.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/one"))
        except grpc.aio.AioRpcError as error:
            if details_from(error).reason is not Reason.PERMISSION_DENIED or "alice" not in str(error):
                raise
        else:
            return "bob cancels alice's job"
        await a.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/one"))
        await r.jobs.CancelJob(job_pb2.CancelJobRequest(name="jobs/two"))
    return ""


@pytest.mark.row("H12")
async def test_case_h12_users_do_nothing_to_others(secure: Secure) -> None:
    assert await done_to_others(secure) == ""


def forgets_the_owner(patch: Patch) -> None:
    def check_owner(owner: str, what: str) -> None: ...

    patch.setattr(service_job, "check_owner", check_owner)


def runs_as_anyone(patch: Patch) -> None:
    def check_user(user: str) -> None: ...

    patch.setattr(service_job, "check_user", check_user)


def cancels_anything(patch: Patch) -> None:
    real = jobs.cancel

    def cancel(state: State, command: CancelJob, now: Now) -> Outcome:
        return real(state, replace(command, only_of=None), now)

    patch.setattr(jobs, "cancel", cancel)


@pytest.mark.row("H12")
@pytest.mark.parametrize("defect", [forgets_the_owner, runs_as_anyone, cancels_anything])
async def test_case_h12_what_is_done_to_others_is_seen(defect: object, tmp_path: Path, monkeypatch: Patch) -> None:
    assert callable(defect)
    defect(monkeypatch)
    async with serve_securely(tmp_path) as secure:
        assert await done_to_others(secure)


async def hello_refused(secure: Secure, files: Files, name: str, uid: str) -> tuple[Reason | None, str]:
    """Why a hello is refused: the call's reason, or what the session is told. None where it is welcome."""
    async with secure.dial(files) as served:
        agent = FakeAgent(served, name, uid=uid)
        agent.send(agent.hello())
        try:
            async with asyncio.timeout(HANG_SECONDS):
                message = await agent.control.read()
        except grpc.aio.AioRpcError as error:
            details = details_from(error)
            return details.reason, details.message
        finally:
            agent.control.cancel()
        assert isinstance(message, node_pb2.ControlDown)
        if message.WhichOneof("message") == "session_refused":
            return Reason(message.session_refused.reason), message.session_refused.message
        return None, ""


async def spoken_for(secure: Secure) -> str:
    """The first thing that a node's certificate lets do in another node's name."""
    one, two = (secure.operator.issue("node", name) for name in ("n1", "n2"))
    async with secure.dial(one) as served, secure.dial(two) as other:
        victim = await FakeAgent(served, "n1").join()
        try:
            hello = node_pb2.BulkUp(hello=node_pb2.BulkHello(incarnation=victim.incarnation))
            empty = node_pb2.BulkUp(inventory=node_pb2.InventoryReport(seq=9))
            sent = (hello.SerializeToString(), empty.SerializeToString())
            if (reason := await reason_of(other.channel, f"{NODE}/Bulk", *sent)) not in DENIED:
                return f"bulk of n1: {reason}"
            for name, uid in (("n1", "uid-n1"), ("n1", "uid-new"), ("n2", "uid-n1")):
                # Of the same life: another one would be refused as a clone.
                reason, _ = await hello_refused(secure, two, name, uid)
                if reason is None:
                    return f"hello as {name} {uid}"
        finally:
            await victim.leave()
    return ""


@pytest.mark.row("H12")
async def test_case_h12_a_node_speaks_for_itself_only(secure: Secure) -> None:
    assert await spoken_for(secure) == ""
    reason, message = await hello_refused(secure, secure.operator.issue("node", "n3"), "n9", "uid-9")
    assert reason is Reason.PERMISSION_DENIED
    assert "n3" in message
    assert "nodes/n9" in message
    assert await hello_refused(secure, secure.operator.issue("node", "n4"), "n4", "uid-4") == (None, "")


def believes_the_hello(patch: Patch) -> None:
    def check_node(caller: gate.Caller, name: str) -> None: ...

    patch.setattr(node, "check_node", check_node)


def forgets_that_it_was_proven(patch: Patch) -> None:
    def certified(hello: Hello) -> Hello:
        node.check_node(gate.CALLER.get(), hello.name)
        return hello

    patch.setattr(node, "_certified", certified)


@pytest.mark.row("H12")
@pytest.mark.parametrize("defect", [believes_the_hello, forgets_that_it_was_proven])
async def test_case_h12_another_nodes_voice_is_seen(defect: object, tmp_path: Path, monkeypatch: Patch) -> None:
    assert callable(defect)
    defect(monkeypatch)
    async with serve_securely(tmp_path) as secure:
        assert await spoken_for(secure)


async def test_a_stream_ends_when_the_certificate_does(secure: Secure) -> None:
    """TLS looks at the handshake only."""
    user = make_identity("rack-7", Role.USER, "short")
    async with secure.dial(secure.operator.odd("short", identity=user, lives=timedelta(seconds=4))) as served:
        details = await failure(served.jobs.WatchJobs(job_pb2.WatchJobsRequest()))
        assert details.reason is Reason.UNAUTHENTICATED
        assert "was valid until" in details.message
        details = await failure(served.cluster.GetStatus(cluster_pb2.GetStatusRequest()))
        assert details.reason is Reason.UNAUTHENTICATED
