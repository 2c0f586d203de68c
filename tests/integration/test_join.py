"""A new node joins by a token: once, under one name, over changes of leader; and renews what it was given."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import grpc
import grpc.aio
import pytest

from controld.config import Config
from controld.core.commands import Now, UseJoinToken
from controld.core.outcome import Outcome, Reply, Transition
from controld.core.state import State
from controld.core.transitions import joins
from controld.ports import Ports
from noded import certified
from noded.link.backoff import Backoff
from noded.link.convert_join import Certified
from noded.link.join import NotCertified, join, renew
from tests.integration.noded_support import noded, noded_env
from tests.support_apps import Controller, controllers, free_ports
from tests.support_secure import secure_config
from tests.support_service import HANG_SECONDS, Served, quick_config, serve
from tests.support_tls import Files, Operator
from virial import Client, Tls
from virial.cli import _authority
from virialpb import certificates as c
from virialpb.identity import Role, make_identity
from virialpb.joinfile import JoinFile, parse_join_file
from virialpb.v1 import join_pb2, join_pb2_grpc

Patch = pytest.MonkeyPatch


class Quiet:
    """Of no interest here."""

    def info(self, event: str, **fields: object) -> None: ...
    def warning(self, event: str, **fields: object) -> None: ...


@dataclass
class Joining:
    served: Served
    operator: Operator

    @property
    def ports(self) -> Ports:
        return self.served.ports


def joining_config(config: Config, operator: Operator, join_listen: str = "127.0.0.1:0") -> Config:
    issuer = Files(operator.directory / "issuer-join")
    if not issuer.directory.exists():
        operator.issue("issuer", "join")
    found = secure_config(config, operator.issue("controller", config.identity))
    return replace(
        found,
        tls=replace(
            found.tls, issuer_certificate=str(issuer.certificate), issuer_key=str(issuer.key), join_listen=join_listen
        ),
    )


@pytest.fixture
async def joining(tmp_path: Path) -> AsyncIterator[Joining]:
    operator = Operator(tmp_path / "certs")
    config = joining_config(quick_config(tmp_path / "c"), operator)
    async with serve(tmp_path / "c", config) as served:
        yield Joining(served, operator)


def client(address: str, files: Files) -> Client:
    return Client(address, timeout_s=HANG_SECONDS, tls=Tls(str(files.ca), str(files.certificate), str(files.key)))


async def token_for(address: str, admin: Files, node: str = "n1") -> JoinFile:
    async with client(address, admin) as found:
        return parse_join_file((await found.create_join_token(node)).text)


async def use(
    address: str, token: JoinFile, key: c.Key, *, node: str = "", secret: str = "", asks_as: str = "n1"
) -> Certified:
    return await join(
        (address,),
        token.ca.encode(),
        node=node or token.node,
        secret=secret or token.secret,
        request=c.request_pem(key, asks_as),
        backoff=Backoff(Random(1)),
        patience_seconds=HANG_SECONDS,
        log=Quiet(),
    )


async def refusal(asked: object) -> str:
    with pytest.raises(NotCertified) as caught:
        await asked  # type: ignore[misc]
    assert caught.value.lasting
    return str(caught.value)


async def test_a_new_node_joins_by_its_token_and_works_on_without_it(joining: Joining, tmp_path: Path) -> None:
    admin = joining.operator.issue("admin", "ann")
    file = tmp_path / "n1.join"
    command = [sys.executable, "-m", "virial.cli", "admin", "token", "create"]
    as_admin = ["--address", joining.ports.grpc_address, "--ca", str(admin.ca)]
    as_admin += ["--cert", str(admin.certificate), "--key", str(admin.key)]
    done = await asyncio.to_thread(
        subprocess.run,
        [*command, "--node", "n1", "--file", str(file), *as_admin],
        capture_output=True,
        text=True,
        env=noded_env(),
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    secret = parse_join_file(file.read_text()).secret
    assert secret not in done.stdout + done.stderr
    flags = ("--join-token-file", str(file), "--join-controllers", joining.ports.join_address)
    async with client(joining.ports.grpc_address, admin) as found:
        async with noded(tmp_path / "n1", [joining.ports.grpc_address], *flags) as agent:
            await live(found, "n1")
            own = tmp_path / "n1" / "tls"
            assert (own / "key.pem").stat().st_mode & 0o777 == 0o600
            assert secret not in agent.log.read_text() + joining.served.log.getvalue()
        file.unlink()
        async with noded(tmp_path / "n1", [joining.ports.grpc_address], *flags):
            await live(found, "n1")


async def live(found: Client, name: str) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        while not any(node.name == name and node.liveness == "LIVE" for node in await found.list_nodes()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_second_host_with_the_same_token_is_told_so(joining: Joining, tmp_path: Path) -> None:
    admin = joining.operator.issue("admin", "ann")
    token = await token_for(joining.ports.grpc_address, admin)
    await use(joining.ports.join_address, token, c.new_key())
    file = tmp_path / "n1.join"
    file.write_text(token.text)
    words = [sys.executable, "-m", "noded", "--data-dir", str(tmp_path / "other"), "--name", "n1"]
    words += ["--controllers", joining.ports.grpc_address, "--join-token-file", str(file)]
    words += ["--join-controllers", joining.ports.join_address]
    done = await asyncio.to_thread(
        subprocess.run, words, capture_output=True, text=True, env=noded_env(), timeout=60, cwd="/"
    )
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert "the join token was used already" in message
    assert "virial admin token create" in message
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "other" / "tls" / "certificate.pem").exists()


async def test_what_is_signed_is_the_name_of_the_token_whatever_was_asked(joining: Joining) -> None:
    token = await token_for(joining.ports.grpc_address, joining.operator.issue("admin", "ann"))
    found = await use(joining.ports.join_address, token, c.new_key(), asks_as="spiffe://rack-7/admin/root")
    certificate = c.read_certificates(found.certificate)[0]
    assert c.facts_of(certificate).identity == make_identity("rack-7", Role.NODE, "n1")
    assert found.ca == joining.operator.ca.read_bytes()


async def test_a_token_that_is_not_right_is_refused_with_its_reason(joining: Joining) -> None:
    address = joining.ports.join_address
    token = await token_for(joining.ports.grpc_address, joining.operator.issue("admin", "ann"))
    key = c.new_key()
    assert "is not known here" in await refusal(use(address, token, key, secret="x" * 43))
    assert "for the node n1" in await refusal(use(address, token, key, node="n2"))
    first = await use(address, token, key)
    again = await use(address, token, key)  # its answer may have been lost
    assert (
        c.read_certificates(again.certificate)[0].public_key() == c.read_certificates(first.certificate)[0].public_key()
    )
    assert "used already" in await refusal(use(address, token, c.new_key()))


async def test_where_nodes_join_nothing_else_is_done(joining: Joining) -> None:
    credentials = grpc.ssl_channel_credentials(joining.operator.ca.read_bytes())
    async with grpc.aio.secure_channel(joining.ports.join_address, credentials) as channel:
        for method in ("JobService/SubmitJob", "NodeService/Control", "CertificateService/RenewCertificate"):
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/virialpb.v1.{method}")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"", timeout=HANG_SECONDS)
            assert caught.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED)


async def test_a_node_renews_its_own_name_and_nobody_else_renews(joining: Joining) -> None:
    address, key = joining.ports.grpc_address, c.new_key()
    request = c.request_pem(key, "n9")
    node = joining.operator.issue("node", "n1")
    found = await renew((address,), node.credentials(), request)
    assert c.facts_of(c.read_certificates(found.certificate)[0]).identity == make_identity("rack-7", Role.NODE, "n1")
    for role in (Role.USER, Role.ADMIN, Role.CONTROLLER):
        with pytest.raises(NotCertified, match="may not"):
            await renew((address,), joining.operator.issue(role, f"x-{role}").credentials(), request)


async def test_a_joined_node_renews_by_itself_and_so_learns_of_a_new_authority(
    joining: Joining, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(certified, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(certified, "RETRY_SECONDS", 0.05)
    token = await token_for(joining.ports.grpc_address, joining.operator.issue("admin", "ann"))
    file = tmp_path / "n1.join"
    file.write_text(token.text)
    own = certified.OwnCertificate(tmp_path, "n1")
    await own.join(str(file), (joining.ports.join_address,), Random(1), Quiet())
    files = Files(tmp_path / "tls")
    first, key = files.certificate.read_bytes(), files.key.read_bytes()
    keeping = asyncio.create_task(own.keep((joining.ports.grpc_address,), files.credentials, Random(1), Quiet()))
    try:
        async with asyncio.timeout(HANG_SECONDS):
            while files.certificate.read_bytes() == first:  # noqa: ASYNC110 - files tell nobody
                await asyncio.sleep(0.02)
        assert own.there(datetime.now(UTC))
        assert files.key.read_bytes() == key
        _authority.begin(joining.operator.directory, datetime.now(UTC))
        async with asyncio.timeout(HANG_SECONDS):
            while files.ca.read_bytes() != joining.operator.ca.read_bytes():  # noqa: ASYNC110 - files tell nobody
                await asyncio.sleep(0.05)
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def rotated(joining: Joining, step: str) -> None:
    """One step, as the operator does it; the controller has taken it up afterwards."""
    directory, log = joining.operator.directory, joining.served.log
    before = log.getvalue().count("tls.loaded")
    match step:
        case "begin":
            _authority.begin(directory, datetime.now(UTC))
        case "switch":
            _authority.switch(directory, datetime.now(UTC), 2)
        case _:
            _authority.finish(directory)
    async with asyncio.timeout(HANG_SECONDS):
        while log.getvalue().count("tls.loaded") == before:  # noqa: ASYNC110 - files tell nobody
            await asyncio.sleep(0.02)


async def test_a_joined_node_of_an_authority_that_went_is_shut_out_of_the_connection_it_has(
    joining: Joining, monkeypatch: Patch
) -> None:
    """By a renewal it would get a certificate of the new one: whoever had the old key could stay for ever."""
    monkeypatch.setattr("controld.service.tls.LOOK_SECONDS", 0.05)
    token = await token_for(joining.ports.grpc_address, joining.operator.issue("admin", "ann"))
    key = c.new_key()
    own = await use(joining.ports.join_address, token, key)
    credentials = grpc.ssl_channel_credentials(own.ca, c.key_pem(key), own.certificate)
    request = join_pb2.RenewCertificateRequest(certificate_request=c.request_pem(key, "n1"))
    async with grpc.aio.secure_channel(joining.ports.grpc_address, credentials) as channel:
        stub: join_pb2_grpc.CertificateServiceAsyncStub = join_pb2_grpc.CertificateServiceStub(channel)
        for step in ("begin", "switch", "finish"):
            await stub.RenewCertificate(request, timeout=HANG_SECONDS)
            await rotated(joining, step)
        with pytest.raises(grpc.aio.AioRpcError, match="nobody who is trusted") as caught:
            await stub.RenewCertificate(request, timeout=HANG_SECONDS)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_an_issuer_that_was_forgotten_when_its_authority_was_replaced_makes_no_certificates(
    joining: Joining, monkeypatch: Patch
) -> None:
    """A node that took one for its good one would be let in nowhere."""
    monkeypatch.setattr("controld.service.tls.LOOK_SECONDS", 0.05)
    issuer = Files(joining.operator.directory / "issuer-join")
    forgotten = {file: file.read_bytes() for file in (issuer.key, issuer.certificate)}
    for step in ("begin", "switch", "finish"):
        await rotated(joining, step)
    node, request = joining.operator.issue("node", "n1"), c.request_pem(c.new_key(), "n1")
    token = await token_for(joining.ports.grpc_address, joining.operator.issue("admin", "ann"))
    new = {file: file.read_bytes() for file in forgotten}
    for file, content in forgotten.items():
        file.write_bytes(content)
    with pytest.raises(NotCertified, match=r"issuer.*was not signed by tls\.client_ca"):
        await renew((joining.ports.grpc_address,), node.credentials(), request)
    refused = asyncio.create_task(use(joining.ports.join_address, token, c.new_key()))
    async with asyncio.timeout(HANG_SECONDS):
        while joining.served.log.getvalue().count("was not signed by tls.client_ca") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    refused.cancel()
    await asyncio.wait([refused])
    for file, content in new.items():
        file.write_bytes(content)
    await use(joining.ports.join_address, token, c.new_key())  # not used up by the first, whose key was another


async def test_a_certificate_of_another_name_is_not_taken_up(joining: Joining, tmp_path: Path) -> None:
    token = await token_for(joining.ports.grpc_address, joining.operator.issue("admin", "ann"))
    file = tmp_path / "n1.join"
    file.write_text(token.text)
    with pytest.raises(certified.CannotJoin, match="is for the node n1, and this one is n2"):
        await certified.OwnCertificate(tmp_path, "n2").join(str(file), ("127.0.0.1:9",), Random(1), Quiet())
    await certified.OwnCertificate(tmp_path, "n1").join(str(file), (joining.ports.join_address,), Random(1), Quiet())
    with pytest.raises(certified.CannotJoin, match="spiffe://rack-7/node/n1, and this node is n2"):
        certified.OwnCertificate(tmp_path, "n2").there(datetime.now(UTC))
    later = datetime.now(UTC) + timedelta(days=91)
    assert not certified.OwnCertificate(tmp_path, "n1").there(later)


@pytest.mark.parametrize(
    "text", ["", "virial-join-1 a b", "virial-join-2 a b " + "x" * 43, "virial-join-1 a b " + "x" * 43]
)
def test_what_is_no_join_file_is_told_without_its_content(text: str, tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text(text)
    with pytest.raises(certified.CannotJoin, match="is no join file") as caught:
        certified.read_join_file(str(file))
    assert "xxx" not in str(caught.value)


async def test_without_an_issuer_the_call_says_what_to_set(tmp_path: Path) -> None:
    operator = Operator(tmp_path / "certs")
    config = secure_config(quick_config(tmp_path / "c"), operator.issue("controller", "c1"))
    async with serve(tmp_path / "c", config) as served:
        with pytest.raises(Exception, match=r"tls\.issuer_certificate"):
            await token_for(served.ports.grpc_address, operator.issue("admin", "ann"))
        assert served.ports.join_address == ""


async def used_twice(directory: Path) -> bool:
    """Whether a second key gets a certificate for a token that was used, after the leader that saw it was killed."""
    operator = Operator(directory / "certs")
    joins_at = iter(free_ports(3))
    addresses: dict[str, str] = {}

    def configure(config: Config) -> Config:
        addresses[config.listen] = f"127.0.0.1:{next(joins_at)}"
        return joining_config(config, operator, addresses[config.listen])

    def join_at(one: Controller) -> str:
        return addresses[one.address]

    admin, key = operator.issue("admin", "ann"), c.new_key()
    async with controllers(directory, configure=configure) as running:
        leader = await running.settled()
        token = await token_for(leader.address, admin)
        await use(join_at(leader), token, key)
        await leader.kill()
        successor = await running.leader(but=leader)
        await use(join_at(successor), token, key)  # the same key: its answer may have been lost with the leader
        try:
            await use(join_at(successor), token, c.new_key())
        except NotCertified as error:
            if not error.lasting:
                raise
            return False
        return True


async def test_a_token_is_used_once_over_changes_of_leader(tmp_path: Path) -> None:
    assert not await used_twice(tmp_path)


def remembers_nothing(patch: Patch) -> None:
    real = joins.use

    def use_(state: State, command: UseJoinToken, now: Now) -> Outcome:
        found = real(state, command, now)
        return Transition(reply=Reply(command.node)) if isinstance(found, Transition) else found

    patch.setattr(joins, "use", use_)


def asks_nothing(patch: Patch) -> None:
    def use_(state: State, command: UseJoinToken, now: Now) -> Outcome:
        return Transition(reply=Reply(command.node))

    patch.setattr(joins, "use", use_)


@pytest.mark.parametrize("defect", [remembers_nothing, asks_nothing])
async def test_a_second_use_is_seen(defect: Callable[[Patch], None], tmp_path: Path, monkeypatch: Patch) -> None:
    defect(monkeypatch)
    assert await used_twice(tmp_path)
