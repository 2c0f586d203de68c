"""What `virial status` says of several controllers and the members of their store."""

from __future__ import annotations

from virial.cli.together import rows
from virial.models import Controller, Controllers, StoreMember


def controller(identity: str, role: str) -> Controller:
    return Controller(f"{identity or 'c9'}:7700", identity, role, "1", "")


def member(name: str, role: str) -> StoreMember:
    return StoreMember("ab", name, "https://m9:2380", role, "", "3.5.30", 0, 0, 0)


def test_who_leads_comes_first_and_who_is_missing_last() -> None:
    found = Controllers(
        (controller("", "SILENT"), controller("c2", "FOLLOWS"), controller("c0", "LEADS"), controller("c1", "FOLLOWS")),
        (member("m0", "VOTES"), member("m1", "LEADS"), member("", "SILENT")),
        (),
        "etcd",
    )
    assert rows(found) == [
        ("controllers", "c0 leads; c1, c2 follow; c9:7700 does not answer"),
        ("members", "m1 leads; m0 votes; https://m9:2380 does not answer"),
    ]


def test_one_with_an_embedded_store_has_no_members_to_tell_of() -> None:
    assert rows(Controllers((controller("c0", "LEADS"),), (), (), "sqlite")) == [("controllers", "c0 leads")]


def test_a_role_of_a_newer_controller_is_told_as_it_is() -> None:
    assert rows(Controllers((controller("c0", "JUDGES"),), (), (), "sqlite")) == [("controllers", "c0 JUDGES")]
