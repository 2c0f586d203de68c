"""Changes of members, as the leader judges them before it asks the store: never without a majority that is in step."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from controld.replica.admin import Admin
from controld.replica.elector import Place
from controld.replica.observe import silent
from controld.replica.peers import PeerLostError
from controld.replica.survey import Role, Survey, Told
from controld.store import members as judged
from controld.store.members import Listed, Look, MembersRefusedError
from controld.store.memory import MemoryDisk, MemoryStore
from controld.store.port import StoreUnavailableError
from controld.store.sqlite import SqliteStore

URL = "https://h{}:2380"


@dataclass
class Etcd:
    """Members 1 to n; 1 leads, and stands beside the controller that is asked."""

    present: dict[int, Listed]
    lags: dict[int, int] = field(default_factory=dict[int, int])
    silent: set[int] = field(default_factory=set[int])
    removed: list[int] = field(default_factory=list[int])
    limit_bytes: int = 1 << 30
    quota_bytes: int = 2 << 30

    def look_at(self, id_: int) -> Look:
        if id_ in self.silent:
            raise StoreUnavailableError("silent")
        return Look(id_, "3.5.30", 1, 100_000 - self.lags.get(id_, 0), 1 << 20, 1 << 20)

    async def look(self) -> Look:
        return self.look_at(1)

    async def listed(self) -> tuple[Listed, ...]:
        return tuple(self.present.values())

    async def add(self, peer_url: str) -> Listed:
        made = Listed(90 + len(self.present), "", peer_url, learner=True)
        self.present[made.id] = made
        return made

    async def remove(self, id_: int) -> None:
        await asyncio.sleep(0)  # others look meanwhile, as they would
        self.removed.append(id_)
        del self.present[id_]

    async def promote(self, id_: int) -> bool:
        raise NotImplementedError

    async def compact(self) -> None:
        raise NotImplementedError

    async def defragment(self) -> int:
        raise NotImplementedError

    async def disarm(self, ids: Sequence[int]) -> None:
        raise NotImplementedError


@dataclass
class Others:
    """A controller beside each member, at the address h<id>:7700."""

    etcd: Etcd

    async def look(self, address: str) -> Told:
        id_ = int(address[1])
        if id_ in self.etcd.silent:
            raise PeerLostError("silent")
        return Told(f"c{id_}", Role.FOLLOWS, "0.1.0", self.etcd.look_at(id_))

    async def defragment(self, address: str) -> int:
        raise NotImplementedError(address)


def made(number: int) -> tuple[Admin, Etcd]:
    etcd = Etcd({i: Listed(i, f"c{i}", URL.format(i)) for i in range(1, number + 1)})
    place = Place("c1", "h1:7700", tuple(f"h{i}:7700" for i in range(2, number + 1)))
    survey = Survey(place=place, me=lambda: Told("c1", Role.LEADS, "0.1.0"), colleagues=Others(etcd), members=etcd)
    store = MemoryStore(MemoryDisk())
    return Admin(store=store, survey=survey, replica=None, members=etcd, scratch=Path(), log=silent), etcd


async def a_sound_one_stays_while_another_is_down() -> None:
    admin, etcd = made(3)
    etcd.silent.add(3)
    with pytest.raises(MembersRefusedError, match="1 are in step, and that is no majority"):
        await admin.remove("c2")
    assert not etcd.removed
    await admin.remove("c3")
    assert etcd.removed == [3]


async def one_that_lags_counts_as_down() -> None:
    admin, etcd = made(3)
    etcd.lags[3] = 5_000
    with pytest.raises(MembersRefusedError, match="no majority"):
        await admin.remove("c2")


async def two_who_remove_at_once_are_judged_one_after_the_other() -> None:
    """Each removal alone would leave three of four in step; both leave two, and one of the three that lag."""
    admin, etcd = made(5)
    etcd.lags[5] = 5_000
    refused = await asyncio.gather(*(admin.remove(name) for name in ("c2", "c3", "c4")), return_exceptions=True)
    assert etcd.removed == [2, 3]
    (last,) = (one for one in refused if isinstance(one, MembersRefusedError))
    assert "of the 2 that would be left, 1 are in step, and that is no majority" in str(last)


async def test_a_sound_one_stays_while_another_is_down() -> None:
    await a_sound_one_stays_while_another_is_down()


async def test_one_that_lags_counts_as_down() -> None:
    await one_that_lags_counts_as_down()


async def test_two_who_remove_at_once_are_judged_one_after_the_other() -> None:
    await two_who_remove_at_once_are_judged_one_after_the_other()


async def test_five_survive_two_and_one_is_replaced_at_a_time() -> None:
    admin, etcd = made(5)
    etcd.silent |= {4, 5}
    with pytest.raises(MembersRefusedError, match="answers and is in step"):
        await admin.replace(2, "c2", URL.format(2))
    changed = await admin.replace(5, "c9", URL.format(9))
    assert etcd.removed == [5]
    assert changed.peers == tuple(f"c{i}={URL.format(i)}" for i in (1, 2, 3, 4, 9))
    again = await admin.replace(5, "c9", URL.format(9))
    assert (again.added, etcd.removed) == (changed.added, [5]), "the same again changes nothing"


async def test_a_store_without_members_of_ours_has_none_to_change() -> None:
    survey = Survey(
        place=Place("c1", "h1:7700", ()), me=lambda: Told("c1", Role.LEADS, "0.1.0"), colleagues=None, members=None
    )
    store = MemoryStore(MemoryDisk())
    admin = Admin(store=store, survey=survey, replica=None, members=None, scratch=Path(), log=silent)
    with pytest.raises(MembersRefusedError, match="no members that these controllers run"):
        await admin.remove("c4")
    with pytest.raises(MembersRefusedError, match="no members that these controllers run"):
        await admin.add("c4", URL.format(4))


async def test_names_and_urls_are_each_for_one_member() -> None:
    admin, _ = made(3)
    with pytest.raises(MembersRefusedError, match="c2 is a member already"):
        await admin.add("c2", URL.format(8))
    with pytest.raises(MembersRefusedError, match="belongs to the member c2"):
        await admin.add("c8", URL.format(2))
    with pytest.raises(MembersRefusedError, match="there are c1, c2, c3"):
        await admin.remove("c7")
    with pytest.raises(MembersRefusedError, match="beside the controller that leads"):
        await admin.remove("c1")
    lone, _ = made(1)
    with pytest.raises(MembersRefusedError, match="alone"):
        await lone.move_leader("c2")


async def test_a_backup_is_not_begun_that_would_fill_the_disk_of_its_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("c1", "h1:7700", ())
    survey = Survey(place=place, me=lambda: Told("c1", Role.LEADS, "0.1.0"), colleagues=None, members=None)
    store = SqliteStore(tmp_path / "data")
    await store.open()
    admin = Admin(store=store, survey=survey, replica=None, members=None, scratch=tmp_path, log=silent)
    size_bytes = (await store.status()).size_bytes
    for free_bytes, fits in ((2 * size_bytes - 1, False), (2 * size_bytes, True)):

        def usage(path: object, free: int = free_bytes) -> SimpleNamespace:
            del path
            return SimpleNamespace(free=free)

        monkeypatch.setattr(shutil, "disk_usage", usage)
        if fits:
            assert (await admin.backup(tmp_path / "copy")).history == 1
        else:
            with pytest.raises(MembersRefusedError, match="with a FILE on another disk"):
                await admin.backup(tmp_path / "copy")
            assert not (tmp_path / "copy").exists()
    await store.close()


class NoLock:
    async def __aenter__(self) -> None: ...
    async def __aexit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("defect", ["removes_whoever_is_left", "counts_one_that_lags", "removes_side_by_side"])
async def test_the_tests_catch_their_defects(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if defect == "removes_side_by_side":
        monkeypatch.setattr(asyncio, "Lock", NoLock)
        with pytest.raises(AssertionError):
            await two_who_remove_at_once_are_judged_one_after_the_other()
        return
    if defect == "counts_one_that_lags":
        monkeypatch.setattr(judged, "LAG_ENTRIES_MAX", 1 << 60)
        scenario = one_that_lags_counts_as_down
    else:
        monkeypatch.setattr(judged.Seen, "in_step", property(lambda _: True))
        scenario = a_sound_one_stays_while_another_is_down
    with pytest.raises(pytest.fail.Exception):
        await scenario()


async def test_a_picture_of_a_moment_ago_is_shown_again() -> None:
    admin, etcd = made(3)
    first = await admin.survey.recent()
    etcd.silent.add(3)
    assert await admin.survey.recent() is first
    assert (await admin.survey.take()).controllers[2].role is Role.SILENT
    assert (await admin.survey.recent()).controllers[2].role is Role.SILENT
