"""Stored fingerprints must stay comparable: as they were made at first, however fast they are made."""

from __future__ import annotations

import hashlib
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import cast

import pytest

from controld.core.commands import CancelJob, DrainNode, PlaceHold, ReleaseHold, RemoveNode, SubmitJob
from controld.core.ids import JobId, NodeUid
from controld.core.model import Hold
from controld.core.transitions import requests
from tests.support_core import spec

COMMANDS: tuple[requests.FromOutside, ...] = (
    SubmitJob("r1", spec()),
    SubmitJob("r1", replace(spec(4), name="other"), job_id="j", owner="o'neill\n"),
    CancelJob("r2", JobId("j")),
    PlaceHold("r3", NodeUid("n"), Hold("me", "why"), 7),
    PlaceHold("r3", NodeUid("n"), Hold("me", "", 9, "gpu/0")),
    ReleaseHold("r4", NodeUid("n"), "me", "gpu/0"),
    DrainNode("r5", NodeUid("n"), ""),
    RemoveNode("r6", "n"),
)


def plainly(value: object) -> str:
    """As it was written down at first."""
    if isinstance(value, tuple):
        return f"({','.join(plainly(item) for item in cast('tuple[object, ...]', value))})"
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    told = [
        f"{f.name}={plainly(content)}"
        for f in fields(value)
        if (content := getattr(value, f.name))
        != (f.default_factory() if f.default_factory is not MISSING else f.default)
    ]
    return f"{type(value).__name__}({','.join(told)})"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: type(c).__name__)
def test_a_fingerprint_is_what_it_was(command: requests.FromOutside) -> None:
    text = plainly(replace(command, request_id=""))
    assert requests.fingerprint(command) == hashlib.sha256(text.encode()).hexdigest()


def test_one_is_pinned() -> None:
    command = PlaceHold("r", NodeUid("n"), Hold("me", "why", device_key="gpu/0"), 7)
    text = "PlaceHold(request_id='',node='n',hold=Hold(owner='me',reason='why',device_key='gpu/0'),expire_after_ns=7)"
    assert requests.fingerprint(command) == hashlib.sha256(text.encode()).hexdigest()


def test_different_requests_have_different_ones() -> None:
    assert len({requests.fingerprint(command) for command in COMMANDS}) == len(COMMANDS)
