"""Who is let in: every method has its roles, and a certificate that says anything odd lets nobody in."""

from __future__ import annotations

import importlib
import pkgutil
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from google.protobuf.descriptor import FileDescriptor

import virialpb.v1
from controld.service import gate, roles
from controld.service.failures import CallError
from controld.service.gate import CALLER, Caller, CertificateGate, OpenGate
from virialpb import certificates as c
from virialpb.identity import Role, make_identity
from virialpb.reasons import Reason

NOW = datetime(2031, 5, 17, 12, tzinfo=UTC)
ROOT = c.new_authority("rack-7 authority 1", NOW, 100)
SUBMIT = "/virialpb.v1.JobService/SubmitJob"
CONTROL = "/virialpb.v1.NodeService/Control"


def every_method() -> set[str]:
    """Of every service in the contract, whether it is served yet or not."""
    found: set[str] = set()
    for module in pkgutil.iter_modules(virialpb.v1.__path__, "virialpb.v1."):
        if module.name.endswith("_pb2"):
            file: FileDescriptor = importlib.import_module(module.name).DESCRIPTOR
            for service in file.services_by_name.values():
                found |= {f"/{service.full_name}/{method.name}" for method in service.methods}
    return found


def methods_without_roles() -> set[str]:
    return {method for method in every_method() - JOINING if not roles.ROLES.get(method)}


@pytest.mark.row("H12")
def test_every_method_of_every_service_has_its_roles() -> None:
    assert len(every_method()) > 20
    assert methods_without_roles() == set()
    served_by_others = {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"}
    assert set(roles.ROLES) - every_method() - served_by_others == set()


# Served at an address of its own, where nobody has a certificate yet.
JOINING = {roles.JOIN}


@pytest.mark.row("H12", defect="method_without_roles")
def test_a_method_that_was_forgotten_is_found_and_refused_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "ROLES", {name: who for name, who in roles.ROLES.items() if name != SUBMIT})
    assert methods_without_roles() == {SUBMIT}
    assert not any(roles.may(role, SUBMIT) for role in Role)


def test_who_may_what() -> None:
    """The decisions themselves, written once more: the table cannot be wrong in both places by one slip."""

    def allowed(role: Role) -> set[str]:
        return {name.rpartition("/")[2] for name, who in roles.ROLES.items() if role in who}

    assert allowed(Role.NODE) == {"Control", "Bulk", "RenewCertificate"}
    assert allowed(Role.CONTROLLER) == {"Ping", "AskAgreement", "HandOver", "Look", "Defragment"}
    for_users = allowed(Role.USER)
    assert {"SubmitJob", "CancelJob", "GetStatus", "ListNodes", "ReadLogs"} <= for_users
    assert not {"PlaceHold", "ReleaseHold", "DrainNode", "RemoveMember", "MoveLeader", "Backup"} & for_users
    assert for_users < allowed(Role.ADMIN)
    assert not (allowed(Role.NODE) | allowed(Role.CONTROLLER)) & allowed(Role.ADMIN)


def make_gate(*authorities: c.Authority, now: datetime = NOW) -> CertificateGate:
    trusted = tuple(one.certificate for one in authorities or (ROOT,))
    return CertificateGate("rack-7", lambda: trusted, lambda: now)


def shown(role: Role = Role.USER, name: str = "alice", cluster: str = "rack-7", by: c.Authority = ROOT) -> bytes:
    identity = make_identity(cluster, role, name)
    return c.issue(by, c.new_key().public_key(), name, NOW, 10, identity=identity)


def refusal(found: CertificateGate, method: str, *pems: bytes) -> Reason | None:
    with pytest.raises(CallError) as caught:
        found.admit(method, {"x509_pem_cert": pems} if pems else {})
    return caught.value.details.reason


def test_a_user_is_known_by_name_and_until_when() -> None:
    caller = make_gate().admit(SUBMIT, {"x509_pem_cert": [shown()]})
    assert caller == Caller(make_identity("rack-7", Role.USER, "alice"), NOW + timedelta(days=10))
    assert caller.only_own


def test_a_role_may_not_do_what_another_may() -> None:
    assert refusal(make_gate(), CONTROL, shown()) is Reason.PERMISSION_DENIED
    assert refusal(make_gate(), SUBMIT, shown(Role.NODE, "n1")) is Reason.PERMISSION_DENIED
    assert refusal(make_gate(), SUBMIT, shown(Role.CONTROLLER, "c1")) is Reason.PERMISSION_DENIED
    assert refusal(make_gate(), "/virialpb.v1.JobService/Unheard", shown(Role.ADMIN)) is Reason.PERMISSION_DENIED


def test_who_is_in_doubt_is_not_known() -> None:
    found = make_gate()
    assert refusal(found, SUBMIT) is Reason.UNAUTHENTICATED
    assert refusal(found, SUBMIT, b"") is Reason.UNAUTHENTICATED
    assert refusal(found, SUBMIT, b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n") is (
        Reason.UNAUTHENTICATED
    )
    assert refusal(found, SUBMIT, shown(), shown(Role.ADMIN)) is Reason.UNAUTHENTICATED
    assert refusal(found, SUBMIT, shown(cluster="rack-8")) is Reason.UNAUTHENTICATED
    nameless = c.issue(ROOT, c.new_key().public_key(), "spiffe://rack-7/admin/root", NOW, 10)
    assert refusal(found, SUBMIT, nameless) is Reason.UNAUTHENTICATED


def test_a_certificate_that_ran_out_counts_no_more_on_an_open_connection() -> None:
    pem, times = shown(), [NOW]
    found = CertificateGate("rack-7", lambda: (ROOT.certificate,), lambda: times[0])
    found.admit(SUBMIT, {"x509_pem_cert": [pem]})
    times[0] = NOW + timedelta(days=10)
    assert refusal(found, SUBMIT, pem) is Reason.UNAUTHENTICATED


def test_an_authority_that_is_trusted_no_more_lets_nobody_in() -> None:
    new = c.new_authority("rack-7 authority 2", NOW, 100)
    trusted: list[tuple[x509.Certificate, ...]] = [(ROOT.certificate,)]
    found = CertificateGate("rack-7", lambda: trusted[0], lambda: NOW)
    pem = shown()
    found.admit(SUBMIT, {"x509_pem_cert": [pem]})
    trusted[0] = (ROOT.certificate, new.certificate)
    found.admit(SUBMIT, {"x509_pem_cert": [pem]})
    trusted[0] = (new.certificate,)
    assert refusal(found, SUBMIT, pem) is Reason.UNAUTHENTICATED


def over(issuer: c.Authority, pem: bytes) -> dict[str, list[bytes]]:
    """As gRPC tells of a caller that sent both; its own certificate may be among the second or not."""
    return {"x509_pem_cert": [pem], "x509_pem_cert_chain": [issuer.chain]}


def test_an_issuer_makes_nodes_and_nobody_else() -> None:
    issuer = c.new_issuer(ROOT, "join", NOW, 50)
    node = shown(Role.NODE, "n1", by=issuer)
    assert make_gate().admit(CONTROL, over(issuer, node)).name == "n1"
    with pytest.raises(CallError, match="nodes only"):
        make_gate().admit(SUBMIT, over(issuer, shown(Role.ADMIN, by=issuer)))
    # Between two that may sign there may be another; who may not sign is nothing between.
    below = c.new_issuer(issuer, "rack 7, row 2", NOW, 50)
    assert make_gate().admit(CONTROL, over(below, shown(Role.NODE, "n2", by=below))).name == "n2"
    assert refusal(make_gate(), CONTROL, node) is Reason.UNAUTHENTICATED
    key = c.new_key()
    pem = c.issue(ROOT, key.public_key(), "n1", NOW, 50, identity=make_identity("rack-7", Role.NODE, "n1"))
    no_authority = c.Authority(c.read_certificates(pem)[0], key, pem)
    with pytest.raises(CallError, match="nobody who is trusted"):
        make_gate().admit(CONTROL, over(no_authority, shown(Role.NODE, "n2", by=no_authority)))


def test_an_issuer_goes_with_its_authority() -> None:
    """On a connection that was made before: what it is let do could keep it in for ever, such as a renewal."""
    new = c.new_authority("rack-7 authority 2", NOW, 100)
    issuer = c.new_issuer(ROOT, "join", NOW, 50)
    peer = over(issuer, shown(Role.NODE, "n1", by=issuer))
    trusted: list[tuple[x509.Certificate, ...]] = [(ROOT.certificate, new.certificate)]
    found = CertificateGate("rack-7", lambda: trusted[0], lambda: NOW)
    assert found.admit(CONTROL, peer).name == "n1"
    trusted[0] = (new.certificate,)
    with pytest.raises(CallError, match="nobody who is trusted"):
        found.admit(CONTROL, peer)


def test_health_is_open_and_without_certificates_everything_is() -> None:
    assert make_gate().admit("/grpc.health.v1.Health/Check", {}).identity is None
    assert OpenGate().admit(CONTROL, {}).identity is None


def test_memory_of_callers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "CALLERS_MAX", 2)
    found = make_gate()
    pems = [shown(name=f"u{n}") for n in range(3)]
    for pem in (*pems, *pems):
        found.admit(SUBMIT, {"x509_pem_cert": [pem]})
    assert len(found._known) == 2


def as_caller(role: Role, name: str) -> Caller:
    return Caller(make_identity("rack-7", role, name))


@pytest.mark.parametrize(
    ("caller", "own", "others"),
    [
        (Caller(), True, True),
        (as_caller(Role.ADMIN, "root"), True, True),
        (as_caller(Role.USER, "alice"), True, False),
    ],
)
def test_users_have_what_is_their_own(caller: Caller, own: bool, others: bool) -> None:
    token = CALLER.set(caller)
    try:
        for owner, user, allowed in (("alice", "alice", own), ("alice", "", own), ("bob", "bob", others)):
            assert passes(lambda o=owner: gate.check_owner(o, "it")) is allowed
            assert passes(lambda u=user: gate.check_user(u)) is allowed
        assert passes(lambda: gate.check_owner("", "it")) is others
        assert passes(lambda: gate.check_user("root")) is others
    finally:
        CALLER.reset(token)


def passes(check: object) -> bool:
    assert callable(check)
    try:
        check()
    except CallError as error:
        return error.details.reason is not Reason.PERMISSION_DENIED
    return True
