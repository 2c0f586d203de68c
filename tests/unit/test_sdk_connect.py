"""Addresses, and errors as exceptions."""

from __future__ import annotations

import pytest

from virial import errors
from virial._connect import addresses_from
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


def test_no_address_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIRIAL_ADDRESS", raising=False)
    with pytest.raises(InvalidRequestError, match="set VIRIAL_ADDRESS"):
        addresses_from(None)


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
