"""The error table: every Reason and every domain exception is mapped; what is sent is what is read back."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2

import controld
from controld.core.outcome import FieldViolation, Refused
from controld.replica.errors import RefusedError, SessionRefusedError
from controld.service.failures import CallError, details_of, invalid_field
from controld.store.port import CompactedError, DeposedError, StoreCorruptError
from virialpb.errors import (
    STATUS_BYTES_MAX,
    STATUS_METADATA_KEY,
    TABLE,
    Action,
    ErrorDetails,
    Violation,
    describe,
    details_for,
    details_from,
    status_of,
    trailing_metadata,
)
from virialpb.reasons import Reason

# Exceptions that end inside the process: caught by the room that raises them, or shown by `controld` as it exits.
INTERNAL = {
    "controld.app.StartError",
    "controld.service.address.AddressError",
    "controld.replica.outbox.OutboxFullError",
    "controld.replica.peers.PeerLostError",
    "controld.replica.standby._Unfit",
    "controld.matching.wire.WireError",
    "controld.service.issuer.IssuerError",
    "controld.store.codec_values.FieldError",
    "controld.store.etcd_endpoint.EndpointError",
    "controld.store.etcd_wire.WireError",
    "controld.store.member.MemberError",
    "controld.store.member.MemberInUseError",
    "controld.store.member.MemberMissingError",
    "controld.store.member.MemberQuarantinedError",
    "controld.store.member_config.MemberConfigError",
}


class Failed:
    """A failed call as a client sees it."""

    def __init__(self, details: ErrorDetails, metadata: object = None) -> None:
        self._details = details
        self._metadata = trailing_metadata(details) if metadata is None else metadata

    def code(self) -> grpc.StatusCode:
        return self._details.code

    def details(self) -> str | None:
        return self._details.message

    def trailing_metadata(self) -> object:
        return self._metadata


def domain_exceptions() -> Iterator[type[Exception]]:
    seen: set[type[Exception]] = set()
    for module in pkgutil.walk_packages(controld.__path__, "controld."):
        if module.name.endswith(("__main__", ".worker")):
            continue
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(kind, Exception) and kind.__module__.startswith("controld.") and kind not in seen:
                seen.add(kind)
                yield kind


def test_every_reason_has_a_row_and_nothing_else_has() -> None:
    assert set(TABLE) == set(Reason)


def test_every_domain_exception_is_mapped() -> None:
    """One that is neither mapped nor listed as internal would reach a caller as INTERNAL."""
    names = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in domain_exceptions()}
    assert [name for name, kind in names.items() if name not in INTERNAL and details_of(_make(kind)) is None] == []
    assert set(names) >= INTERNAL, "an entry of INTERNAL is gone"


def _make(kind: type[Exception]) -> Exception:
    """An instance, with whatever its constructor asks for."""
    if kind is CallError:
        return invalid_field("f", "x")
    if kind is RefusedError:
        return RefusedError(Refused(Reason.STALE, "jobs/a"))
    if not any("__init__" in vars(base) for base in kind.__mro__ if base.__module__.startswith("controld.")):
        return kind("x")
    values: dict[str, object] = {"reason": Reason.STALE, "revision": 7}
    return kind(**{name: values.get(name, "x") for name in inspect.signature(kind).parameters})


def test_the_walk_finds_the_exceptions_that_matter() -> None:
    found = set(domain_exceptions())
    assert {RefusedError, SessionRefusedError, CompactedError, DeposedError, StoreCorruptError} <= found


@pytest.mark.parametrize("reason", list(Reason))
def test_a_message_says_what_to_do(reason: Reason) -> None:
    message = describe(reason, "jobs/train-1", "detail of it")
    assert message.endswith(TABLE[reason].todo)
    assert "detail of it" in message
    assert "{" not in message


@pytest.mark.parametrize("reason", list(Reason))
def test_what_is_sent_is_read_back(reason: Reason) -> None:
    sent = details_for(
        reason,
        subject="jobs/train-1",
        detail="some facts",
        violations=[Violation("spec.gang.ranks", "0 is outside 1 to 4096")] if reason is Reason.INVALID_SPEC else [],
        metadata={"cause_id": "c-1"},
    )
    assert details_from(Failed(sent)) == sent


@pytest.mark.parametrize("reason", list(Reason))
def test_what_may_be_retried_says_when(reason: Reason) -> None:
    row = TABLE[reason]
    assert row.retryable == (row.retry_after_ms is not None)
    assert row.retryable == (row.action in {Action.REDIAL, Action.RETRY_SAME_REQUEST, Action.BACK_OFF})


def test_codes_are_those_of_the_design() -> None:
    code = grpc.StatusCode
    assert {reason: TABLE[reason].code for reason in Reason} == {
        Reason.INVALID_SPEC: code.INVALID_ARGUMENT,
        Reason.NOT_FOUND: code.NOT_FOUND,
        Reason.ALREADY_EXISTS: code.ALREADY_EXISTS,
        Reason.STALE: code.ABORTED,
        Reason.FENCED: code.FAILED_PRECONDITION,
        Reason.NOT_LEADER: code.UNAVAILABLE,
        Reason.NO_LEADER: code.UNAVAILABLE,
        Reason.OUTCOME_UNKNOWN: code.UNAVAILABLE,
        Reason.COMPACTED: code.OUT_OF_RANGE,
        Reason.QUOTA: code.RESOURCE_EXHAUSTED,
        Reason.OVERLOADED: code.RESOURCE_EXHAUSTED,
        Reason.STORAGE_FULL: code.RESOURCE_EXHAUSTED,
        Reason.UNAUTHENTICATED: code.UNAUTHENTICATED,
        Reason.PERMISSION_DENIED: code.PERMISSION_DENIED,
        Reason.NODE_UNREACHABLE: code.UNAVAILABLE,
        Reason.DUPLICATE_NODE: code.ALREADY_EXISTS,
        Reason.NOT_NOW: code.FAILED_PRECONDITION,
        Reason.INVARIANT_BROKEN: code.INTERNAL,
    }


@pytest.mark.parametrize(
    "text", ["x" * 5_000, "\N{FULL MOON SYMBOL}" * 3_000, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 9]
)
def test_a_status_stays_small_whatever_it_is_about(text: str) -> None:
    """Over 8 KiB of trailing metadata gRPC would replace it by an error of its own."""
    details = details_for(
        Reason.INVALID_SPEC,
        subject=text,
        detail=text,
        violations=[Violation(text, text)] * 100,
        metadata={f"key{index}": text for index in range(50)},
    )
    status = status_of(details)
    assert status.ByteSize() <= STATUS_BYTES_MAX
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("virial", "INVALID_SPEC")


def test_violations_that_do_not_fit_are_counted() -> None:
    violations = [Violation(f"field{index}", "x" * 100) for index in range(100)]
    read = details_from(Failed(details_for(Reason.INVALID_SPEC, violations=violations)))
    assert read.violations[0] == violations[0]
    assert read.violations[-1] == Violation("", f"and {100 - len(read.violations) + 1} more")


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        ((STATUS_METADATA_KEY, b"\xff\xff no status"),),
        ((STATUS_METADATA_KEY, "text"),),
        (("other", b"x"),),
    ],
)
def test_a_foreign_failure_keeps_its_own_words(metadata: object) -> None:
    sent = ErrorDetails(reason=None, message="connection refused", code=grpc.StatusCode.UNAVAILABLE)
    assert details_from(Failed(sent, metadata)) == sent


def test_a_refusal_carries_its_violations() -> None:
    refusal = Refused(Reason.INVALID_SPEC, violations=(FieldViolation("request_id", "was used for another request"),))
    details = details_of(RefusedError(refusal))
    assert details is not None
    assert details.violations == (Violation("request_id", "was used for another request"),)
    assert "request_id: was used for another request" in details.message


def test_an_unexpected_exception_is_not_mapped() -> None:
    assert details_of(KeyError("x")) is None
