"""Addresses, and errors as exceptions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from virial import errors
from virial._connect import Tls, addresses_from, next_after
from virial._published import address_file, default_address, publish_address, withdraw_address
from virial.errors import InvalidRequestError, VirialError, error_for
from virialpb.errors import Violation, details_for
from virialpb.reasons import Reason


def test_addresses_come_from_a_text_a_list_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert addresses_from("a:1, b:2,") == ("a:1", "b:2")
    assert addresses_from(["a:1"]) == ("a:1",)
    assert addresses_from("[::1]:7600") == ("[::1]:7600",)
    assert addresses_from("unix:/run/virial.sock") == ("unix:/run/virial.sock",)
    monkeypatch.setenv("VIRIAL_ADDRESS", "c:3")
    assert addresses_from(None) == ("c:3",)


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:0", "host:65536", "host:http", "host:-1"])
def test_a_malformed_address_is_named(address: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not host:port") as caught:
        addresses_from(address)
    assert address in str(caught.value)


def test_the_next_to_be_asked_is_another_where_there_is_one() -> None:
    assert next_after("a:1", ("a:1", "b:2", "c:3"), 0) == 1
    assert next_after("b:2", ("a:1", "b:2", "c:3"), 0) == 2, "it was named by another, and failed a moment ago"
    assert next_after("d:4", ("a:1", "b:2", "c:3"), 2) == 3
    assert next_after("a:1", ("a:1",), 0) > 0


def test_no_address_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VIRIAL_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(InvalidRequestError, match="set VIRIAL_ADDRESS"):
        addresses_from(None)


def test_the_newest_local_cluster_is_found_until_it_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VIRIAL_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_address() is None
    assert publish_address("127.0.0.1:1") is None
    assert addresses_from(None) == ("127.0.0.1:1",)
    assert publish_address("127.0.0.1:2") == "127.0.0.1:1"
    assert addresses_from(None) == ("127.0.0.1:2",)
    monkeypatch.setenv("VIRIAL_ADDRESS", "c:3")
    assert addresses_from(None) == ("c:3",)
    withdraw_address("127.0.0.1:2")
    assert default_address() == "127.0.0.1:1"
    withdraw_address("127.0.0.1:1")
    withdraw_address("127.0.0.1:1")
    assert default_address() is None


def test_what_a_killed_process_published_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    publish_address("127.0.0.1:1")
    code = "import os; from virial._published import publish_address as p; p('127.0.0.1:2'); os._exit(9)"
    subprocess.run([sys.executable, "-c", code], check=False)
    assert "127.0.0.1:2" in address_file().read_text()
    assert default_address() == "127.0.0.1:1"


def test_an_address_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    publish_address("127.0.0.1:1")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.symlink(address_file(), elsewhere / "virial-address")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(elsewhere))
    assert default_address() is None
    with pytest.raises(OSError, match="symbolic link"):
        publish_address("127.0.0.1:2")
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert address_file().parent != tmp_path
    assert default_address() is None


def test_a_file_that_is_not_pem_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(InvalidRequestError, match=r"ca\.pem: there is no CERTIFICATE in PEM form in it"):
        Tls(str(tmp_path / "ca.pem")).credentials()
    with pytest.raises(FileNotFoundError, match=r"missing\.pem"):
        Tls(str(tmp_path / "missing.pem")).credentials()


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_an_exception_with_its_details(reason: Reason) -> None:
    error = error_for(details_for(reason, subject="jobs/a", violations=(Violation("f", "is wrong"),)))
    assert type(error) is not VirialError
    assert isinstance(error, VirialError)
    assert error.reason is reason
    assert error.violations == (Violation("f", "is wrong"),)


def test_every_exception_is_public() -> None:
    import virial

    found = {n for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, VirialError)}
    assert found <= set(virial.__all__)
    for name in virial.__all__:
        assert getattr(virial, name).__name__ == name
