"""`virial admin certs`: what lies in the directory, what is refused, and the three steps of a new authority."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from virial.cli import _authority
from virial.cli.app import app
from virialpb import certificates as c
from virialpb.identity import Role, make_identity


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    directory = tmp_path / "certs"
    assert virial(directory, "init", "rack-7")[0] == 0
    return directory


def virial(directory: Path, *words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["admin", "certs", *words, "--directory", str(directory)], prog_name="virial")
    return result.exit_code, result.stdout, result.stderr


def read(path: Path) -> c.Facts:
    return c.facts_of(c.read_certificates(path.read_bytes())[0])


def roots(path: Path) -> list[bytes]:
    return [c.pem_of(one) for one in c.read_certificates(path.read_bytes())]


def test_a_key_of_another_directory_is_told_before_anybody_is_called(certs: Path) -> None:
    for name in ("ann", "bob"):
        virial(certs, "issue", "admin", name)
    own, other = certs / "admin-ann", certs / "admin-bob"
    words = ["--ca", str(own / "ca.pem"), "--cert", str(own / "certificate.pem"), "--key", str(other / "key.pem")]
    done = CliRunner().invoke(app, ["jobs", "--address", "127.0.0.1:9", *words], prog_name="virial")
    text = f"virial: {own / 'certificate.pem'} and {other / 'key.pem'} do not fit together as certificate and key\n"
    assert (done.exit_code, done.stderr) == (2, text)


def test_a_controller_gets_what_it_serves_with_and_what_its_member_shows(certs: Path) -> None:
    code, out, err = virial(certs, "issue", "controller", "c1", "--host", "ctl-1", "--host", "10.0.0.1")
    assert (code, err) == (0, "")
    assert "controller c1" in out
    own = read(certs / "controller-c1" / "certificate.pem")
    assert own.identity == make_identity("rack-7", Role.CONTROLLER, "c1")
    assert (own.dns, own.ips) == (("ctl-1",), ("10.0.0.1",))
    member = c.read_certificates((certs / "controller-c1" / "member.pem").read_bytes())[0]
    assert c.facts_of(member).identity is None
    assert c.signed_by(member, c.read_certificates((certs / "members-ca.pem").read_bytes()))
    assert not c.signed_by(member, c.read_certificates((certs / "ca.pem").read_bytes()))


def test_a_controller_that_is_renewed_is_reached_as_before(certs: Path) -> None:
    virial(certs, "issue", "controller", "c1", "--host", "ctl-1", "--host", "10.0.0.1")
    for hosts, expected in (((), (("ctl-1",), ("10.0.0.1",))), (("--host", "10.0.0.9"), ((), ("10.0.0.9",)))):
        assert virial(certs, "issue", "controller", "c1", "--renew", *hosts)[0] == 0
        for name in ("certificate.pem", "member.pem"):
            own = read(certs / "controller-c1" / name)
            assert (own.dns, own.ips) == expected


def test_keys_are_for_their_owner_only_and_are_never_printed(certs: Path) -> None:
    printed = ""
    for words in (
        ("issue", "node", "n1"),
        ("issue", "node", "n1", "--renew"),
        ("list", "-o", "json"),
        ("rotate", "begin"),
    ):
        code, out, err = virial(certs, *words)
        assert code == 0, err
        printed += out + err
    keys = list(certs.rglob("*key.pem"))
    assert len(keys) == 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}
    assert stat.S_IMODE(certs.stat().st_mode) == 0o700
    assert "PRIVATE" not in printed
    body = [line for path in keys for line in path.read_text().splitlines() if "-----" not in line]
    assert not [line for line in body if line in printed]


def test_nothing_is_overwritten_unless_that_was_asked_for(certs: Path) -> None:
    before = (certs / "ca.pem").read_bytes()
    code, _, err = virial(certs, "init", "rack-8")
    assert code == 5
    assert "exists" in err
    assert "--directory" in err
    assert (certs / "ca.pem").read_bytes() == before
    virial(certs, "issue", "user", "alice")
    first = (certs / "user-alice" / "certificate.pem").read_bytes()
    code, _, err = virial(certs, "issue", "user", "alice")
    assert code == 5
    assert "--renew" in err
    assert (certs / "user-alice" / "certificate.pem").read_bytes() == first
    assert virial(certs, "issue", "user", "alice", "--renew")[0] == 0
    assert (certs / "user-alice" / "certificate.pem").read_bytes() != first
    assert not list(certs.rglob(".*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("issue", "controller", "c1"), "give each name and address with --host"),
        (("issue", "node", "n1", "--host", "h"), "--host is for controllers"),
        (("issue", "node", "../n1"), "must be 1 to 253 letters"),
        (("issue", "controller", "c1", "--host", "a b"), "neither an IP address nor a DNS name"),
        (("issue", "root", "n1"), "'root' is not one of"),
        (("issue", "node", "n1", "--renew"), "nothing to renew"),
        (("issue", "node", "n1", "--days", "0"), "--days"),
        (("rotate", "switch"), "`virial admin certs rotate begin"),
        (("rotate", "finish"), "`virial admin certs rotate begin"),
    ],
)
def test_a_mistake_is_one_message(certs: Path, words: tuple[str, ...], message: str) -> None:
    code, out, err = virial(certs, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert sorted(path.name for path in certs.iterdir()) == [
        "authorities",
        "authority.json",
        "ca.pem",
        "members-ca.pem",
    ]


def test_without_an_authority_it_says_how_to_make_one(tmp_path: Path) -> None:
    code, _, err = virial(tmp_path / "none", "issue", "node", "n1")
    assert code == 2
    assert "virial admin certs init" in err


def test_an_authority_is_replaced_in_three_steps(certs: Path) -> None:
    virial(certs, "issue", "controller", "c1", "--host", "ctl-1")
    virial(certs, "issue", "node", "n1")
    node, ca = certs / "node-n1", certs / "ca.pem"
    old = roots(ca)
    assert virial(certs, "rotate", "begin")[0] == 0
    both = roots(ca)
    assert both[0] == old[0]
    assert len(both) == 2
    assert roots(node / "ca.pem") == both
    assert len(roots(certs / "controller-c1" / "members-ca.pem")) == 2
    certificate = c.read_certificates((node / "certificate.pem").read_bytes())[0]
    assert c.signed_by(certificate, c.read_certificates(old[0]))
    code, _, err = virial(certs, "rotate", "finish")
    assert code == 2
    assert "rotate switch" in err

    assert virial(certs, "rotate", "switch")[0] == 0
    assert roots(ca) == both
    for directory in (node, certs / "controller-c1"):
        renewed = c.read_certificates((directory / "certificate.pem").read_bytes())[0]
        assert c.signed_by(renewed, c.read_certificates(both[1]))
    assert read(certs / "controller-c1" / "certificate.pem").dns == ("ctl-1",)

    assert virial(certs, "rotate", "finish")[0] == 0
    assert roots(ca) == roots(node / "ca.pem") == [both[1]]
    assert sorted(path.name for path in (certs / "authorities").glob("*-key.pem")) == ["2-key.pem", "members-2-key.pem"]
    assert virial(certs, "rotate", "finish")[0] == 2
    assert virial(certs, "issue", "user", "alice")[0] == 0


def test_a_switch_that_broke_off_is_gone_on_with(certs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("n1", "n2"):
        virial(certs, "issue", "node", name)
    virial(certs, "rotate", "begin")
    write = _authority._write

    def breaks(path: Path, content: bytes) -> None:
        if path.parent.name == "node-n2":
            raise OSError(28, "No space left on device", str(path))
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(_authority, "_write", breaks)
        code, _, err = virial(certs, "rotate", "switch")
        assert code == 1
        assert "No space left on device" in err
    code, _, err = virial(certs, "rotate", "finish")
    assert code == 2
    assert "still the old authority's" in err
    assert virial(certs, "rotate", "switch")[0] == 0
    assert virial(certs, "rotate", "finish")[0] == 0


def test_what_was_issued_is_listed_for_scripts(certs: Path) -> None:
    virial(certs, "issue", "admin", "alice", "--days", "3")
    virial(certs, "issue", "issuer", "c1")
    _, out, _ = virial(certs, "list", "-o", "json")
    found = json.loads(out)
    assert [(one["role"], one["name"]) for one in found] == [("admin", "alice"), ("issuer", "c1")]
    assert datetime.fromisoformat(found[0]["not_after"]) > datetime.now(UTC)
