"""Backups of a running cluster, brought back; a SQLite store taken into etcd, once, whatever interrupts it."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from controld.__main__ import main
from controld.app import App
from controld.config import StoreConfig, StoreKind
from controld.core import keys
from controld.core.model import Cluster
from controld.matching.engine import plan
from controld.replica.planner import InlinePlanner
from controld.service.telemetry import make_log
from controld.store import codec, sqlite_backup, sqlite_file
from controld.store.port import StoredChange
from controld.store.sqlite import SqliteStore
from tests import support_etcd
from tests.support_rack import JOB, rack, run
from tests.support_service import quick_config
from tests.support_store import contents, put
from virial import Client
from virial.errors import ConflictError


async def test_a_backup_of_three_comes_back_and_what_came_after_it_is_given_up(tmp_path: Path) -> None:
    file = tmp_path / "saved.db"
    async with rack() as made, made.client() as client:
        await made.write(client)
        address = ("--address", ",".join(made.addresses))
        status, said = await run("virial.cli", "admin", "backup", str(file), *address)
        assert (status, "wrote" in said) == (0, True), said
        assert file.stat().st_mode & 0o777 == 0o600
        status, said = await run("virial.cli", "admin", "backup", str(file), *address)
        assert (status, "exists already" in said) == (5, True)
        after = (await client.submit_job(JOB, request_id="after")).id
        before = await client.get_status()
        first = made.posts[0]
        where = ("--data-dir", first.config.data_dir, "--member-dir", str(first.member.config.directory))
        status, said = await run("virial.cli", "admin", "restore", str(file), *where)
        assert (status, "in use by another controld" in said) == (1, True), "it runs"
        await first.stop()
        leader = await made.settled()
        status, said = await run("virial.cli", "admin", "restore", str(file), *where)
        assert (status, f"{leader.config.identity} ({leader.config.listen}) leads" in said) == (1, True), said
        assert after in [job.id for job in await client.list_jobs()], "nothing was changed"
        for post in made.posts:
            await post.stop()
        status, said = await run("virial.cli", "admin", "restore", str(file), *where)
        assert status == 0, said
        for post in made.posts:
            await post.start()
        await made.settled()
        found = await client.get_status()
        assert (found.cluster_uid, found.cursor.history) == (before.cluster_uid, before.cursor.history + 1)
        assert found.leader_epoch > before.leader_epoch, "no token from before is as good as a new one"
        await made.require_acked(client)
        jobs = [job.id for job in await client.list_jobs()]
        assert sorted(jobs) == sorted(made.acked.values())
        assert (await client.submit_job(JOB, request_id="after")).id == after, "its number is free again"


async def test_a_backup_of_one_that_runs_on_sqlite_comes_through_the_same_command(tmp_path: Path) -> None:
    base = quick_config(tmp_path / "data")
    app = App(replace(base, store=StoreConfig(StoreKind.SQLITE)), log=make_log(sys.stderr), planner=InlinePlanner(plan))
    ports = await app.start()
    async with Client(ports.grpc_address) as client:
        job = (await client.submit_job(JOB)).id
        parts = [part async for part in client.backup()]
        assert [c.role for c in (await client.list_controllers()).controllers] == ["LEADS"]
        with pytest.raises(ConflictError, match="is alone"):
            await client.move_leader("other")
        with pytest.raises(ConflictError, match="has no members that these controllers run"):
            await client.add_member("c9", "https://h:2380")
    await app.stop()
    (tmp_path / "saved").write_bytes(b"".join(parts))
    assert not list((tmp_path / "data").glob("backup-*"))
    other = SqliteStore(tmp_path / "other")
    await other.restore(str(tmp_path / "saved"))
    await other.open()
    assert f"jobs/{job}" in await contents(other)
    await other.close()


async def sqlite_with(directory: Path, uid: str) -> None:
    store = SqliteStore(directory)
    await store.open()
    cluster = StoredChange(keys.CLUSTER, codec.encode(Cluster(uid, 3, 9)))
    await store.commit(await store.campaign("one"), 1, [cluster])
    await store.close()


def words(directory: Path, prefix: str) -> list[str]:
    endpoint = support_etcd.shared().processes[0].config.endpoint
    store = ["--store-kind", "etcd", "--store-endpoints", endpoint, "--store-prefix", prefix]
    return ["import", "--data-dir", str(directory), *store]


class TestImport:
    async def test_it_goes_on_wherever_it_was_cut_short(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        support_etcd.require_etcd()
        for step in ("staged", "written"):
            prefix = support_etcd.fresh_prefix()
            directory = tmp_path / step
            directory.mkdir()
            await sqlite_with(directory, "c-one")
            staged = sqlite_backup.stage_import(directory / sqlite_file.DATABASE)
            target = support_etcd.shared().store(prefix=prefix)
            await target.open()
            if step == "written":
                await target.restore(str(staged))
            assert await asyncio.to_thread(main, words(directory, prefix)) == 0, capsys.readouterr().err
            assert "c-one" in capsys.readouterr().out
            assert set(await contents(target)) == {keys.CLUSTER}
            assert (await target.load()).history > 1
            await target.close()
            assert {p.name for p in directory.glob("state*")} >= {"state.sqlite3.imported", "state.sqlite3.replaced"}
            assert await asyncio.to_thread(main, words(directory, prefix)) == 4, "it is done"
            assert "there is no SQLite store" in capsys.readouterr().err

    async def test_another_cluster_is_never_written_over(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        support_etcd.require_etcd()
        prefix = support_etcd.fresh_prefix()
        await sqlite_with(tmp_path, "c-one")
        target = support_etcd.shared().store(prefix=prefix)
        await target.open()
        other = put(keys.CLUSTER, codec.encode(Cluster("c-other", 0, 0)))
        await target.commit(await target.campaign("x"), 1, [other])
        assert await asyncio.to_thread(main, words(tmp_path, prefix)) == 4
        assert "holds the cluster c-other already; nothing was changed" in capsys.readouterr().err
        assert (await contents(target))[keys.CLUSTER] == other.value
        await target.close()
        store = SqliteStore(tmp_path)
        await store.open()
        assert keys.CLUSTER in await contents(store)
        await store.close()
