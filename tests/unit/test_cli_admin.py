"""`virial admin members`, `move-leader`, `backup` and `grow`: what they print and ask, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from virial import SyncClient
from virial.cli import admin_copies, admin_members
from virial.cli.exits import CliError, ExitCode
from virial.cli.frame import Session
from virial.cli.printer import Output, Printer
from virial.errors import UnavailableError
from virial.models import Controller, Controllers, MembersChange, StoreMember

LEADER = StoreMember("a1", "c1", "https://h1:2380", "LEADS", "h1:7700", "3.5.30", 0, 1 << 20, 1 << 19)
DEAD = StoreMember("b2", "c2", "https://h2:2380", "SILENT", "", "", 0, 0, 0)
PEERS = ("c1=https://h1:2380", "c2=https://h2:2380")
FOUND = Controllers(
    (
        Controller("h1:7700", "c1", "LEADS", "0.1.0", "a1"),
        Controller("h2:7700", "", "SILENT", "", ""),
    ),
    (LEADER, DEAD),
    ("store member c2 does not answer: start it",),
    "etcd",
)


@dataclass
class Canned:
    """Answers as a cluster would whose member c2 is dead; the new one gets its vote at the third look."""

    asked: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    looks: int = 0
    parts: tuple[bytes, ...] = (b"SQL", b"ite")
    broken: bool = False

    def __enter__(self) -> Canned:
        return self

    def __exit__(self, *_: object) -> None: ...

    def list_controllers(self) -> Controllers:
        self.looks += 1
        role = "VOTES" if self.looks > 2 else "LEARNS"
        return replace(FOUND, members=(*FOUND.members, replace(DEAD, id="c3", role=role)))

    def replace_member(self, member_id: str, name: str, peer_url: str) -> MembersChange:
        self.asked.append(("replace", member_id, name, peer_url))
        return MembersChange((LEADER,), PEERS, "c3")

    def add_member(self, name: str, peer_url: str) -> MembersChange:
        self.asked.append(("add", name, peer_url))
        return MembersChange((LEADER,), PEERS, "c3")

    def move_leader(self, controller: str) -> str:
        self.asked.append(("move", controller))
        return "h2:7700"

    def backup(self) -> Iterator[bytes]:
        yield from self.parts
        if self.broken:
            raise UnavailableError("it ended")


@dataclass(frozen=True)
class Fake(Session):
    canned: Canned = field(default_factory=Canned, kw_only=True)

    def client(self, timeout_s: float = 1.0) -> SyncClient:
        return cast("SyncClient", self.canned)


@pytest.fixture
def canned() -> Canned:
    return Canned()


def session(canned: Canned, output: Output = Output.TABLE) -> Session:
    return Fake(canned=canned, printer=Printer(output))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_members, "POLL_S", 0.0)


def test_the_list_shows_who_leads_who_is_silent_and_what_is_wrong(
    canned: Canned, capsys: pytest.CaptureFixture[str]
) -> None:
    admin_members.show(Printer(Output.TABLE), FOUND)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[1] == ["c1", "h1:7700", "LEADS", "0.1.0"]
    assert shown[2] == ["unknown", "h2:7700", "SILENT", "unknown"]
    assert shown[5] == ["c1", "a1", "https://h1:2380", "LEADS", "0", "1MiB", "3.5.30"]
    assert shown[6][:4] == ["c2", "b2", "https://h2:2380", "SILENT"]
    assert shown[7][:3] == ["-", "store", "member"]


def test_its_json_has_these_keys(canned: Canned, capsys: pytest.CaptureFixture[str]) -> None:
    admin_members.list_(session(canned, Output.JSON))
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(found) == {"controllers", "members", "problems", "store_kind"}
    assert set(found["controllers"][0]) == {"address", "identity", "role", "version", "member_id"}
    member = {"id", "name", "peer_url", "role", "controller", "version", "lag_entries", "size_bytes", "used_bytes"}
    assert set(found["members"][0]) == member


def test_a_replacement_says_how_to_start_the_new_one_and_waits_for_its_vote(
    canned: Canned, capsys: pytest.CaptureFixture[str]
) -> None:
    admin_members.replace(session(canned), "c2")
    assert canned.asked == [("replace", "b2", "c2", "https://h2:2380")]
    printed = capsys.readouterr()
    assert "controld member --joins --name c2 --peer c1=https://h1:2380 --peer c2=https://h2:2380" in printed.out
    assert printed.out.rstrip().endswith("c2 votes")
    assert "Ctrl-C stops the waiting" in printed.err
    assert canned.looks >= 3


def test_a_replacement_that_was_interrupted_goes_on(canned: Canned) -> None:
    with pytest.raises(CliError, match="virial admin members add c9 URL") as caught:
        admin_members.replace(session(canned), "gone", name="c9", wait=False)
    assert caught.value.code == ExitCode.NOT_FOUND
    admin_members.replace(session(canned), "gone", url="https://h9:2380", name="c9", wait=False)
    assert canned.asked == [("add", "c9", "https://h9:2380")]


def test_the_one_who_leads_now_is_named(canned: Canned, capsys: pytest.CaptureFixture[str]) -> None:
    admin_members.move_leader(session(canned), "c2")
    admin_members.move_leader(session(canned, Output.JSON), "c2")
    said, _, as_json = capsys.readouterr().out.partition("\n")
    assert said == "c2 leads (h2:7700)"
    assert json.loads(as_json) == {"leader": "h2:7700"}


def test_a_backup_is_whole_or_not_there(canned: Canned, tmp_path: Path) -> None:
    file = tmp_path / "saved.db"
    admin_copies.backup(session(canned), str(file))
    assert file.read_bytes() == b"SQLite"
    with pytest.raises(CliError, match="exists already"):
        admin_copies.backup(session(canned), str(file))
    canned.broken = True
    with pytest.raises(UnavailableError):
        admin_copies.backup(session(canned), str(tmp_path / "other.db"))
    assert [path.name for path in tmp_path.iterdir()] == ["saved.db"]


def test_growing_is_said_host_by_host_in_order(canned: Canned, capsys: pytest.CaptureFixture[str]) -> None:
    admin_copies.grow(session(canned, Output.JSON), ["c1=10.0.0.1", "c2=10.0.0.2", "c3=10.0.0.3"])
    steps: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    firsts = [step["commands"][0].split()[:3] for step in steps]
    members = [["controld", "member", "--name"]] * 3
    controllers = [["controld", "--identity", name] for name in ("c1", "c2", "c3")]
    assert firsts[1:8] == [*members, ["virial", "admin", "backup"], *controllers]
    assert steps[4]["commands"][2].startswith("virial admin grow --import")


@pytest.mark.parametrize(
    "hosts", [[], ["c1"], ["c1=h1", "c2=h2"], ["c1=h1", "c1=h2", "c3=h3"], ["c1=h1:7700", "c2=h2", "c3=h3"]]
)
def test_what_is_no_three_controllers_is_refused(hosts: list[str], canned: Canned) -> None:
    with pytest.raises(CliError):
        admin_copies.grow(session(canned), hosts)
