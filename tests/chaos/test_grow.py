"""One controller with SQLite becomes three on an etcd of their own, while a gang runs: nothing that was acknowledged is
lost, and the gang goes on from its newest checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests import support_etcd
from tests.chaos.rack import HANG_SECONDS, ROOT, Rack, rack, until
from virial import SyncClient

SPEC_RANKS = 2


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, check=False, capture_output=True, text=True, timeout=HANG_SECONDS
    )


@contextmanager
def started(log: Path, *words: str) -> Generator[subprocess.Popen[bytes]]:
    with log.open("ab") as out:
        process = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stdout=out, stderr=out, env={**os.environ})
    try:
        yield process
    finally:
        process.kill()  # a member's etcd dies with it
        process.wait()


def members(stack: ExitStack, base: Path) -> list[Path]:
    """As three hosts start theirs; the directories."""
    ports = support_etcd.free_ports(3)
    peers = [word for i, port in enumerate(ports) for word in ("--peer", f"c{i}=http://127.0.0.1:{port}")]
    made = [base / f"m{i}" for i in range(3)]
    for i, directory in enumerate(made):
        words = ("controld", "member", "--name", f"c{i}", *peers, "--directory", str(directory))
        stack.enter_context(started(base / f"m{i}.log", *words))
    until(lambda: all((directory / "started").exists() for directory in made) or None, "the members came up")
    return made


def grown(made: Rack, stack: ExitStack, directories: list[Path]) -> list[str]:
    """The three controllers; the first where the one was. Their addresses."""
    addresses = [made.cluster.address, *(f"127.0.0.1:{port}" for port in support_etcd.free_ports(2))]
    for i, directory in enumerate(directories):
        data_dir = made.controller.data_dir if i == 0 else made.base / f"c{i}"
        words = ["controld", "--identity", f"c{i}", "--listen", addresses[i], "--peers", ",".join(addresses)]
        words += ["--metrics-listen", "off", "--data-dir", str(data_dir)]
        words += ["--store-kind", "etcd", "--store-member-dir", str(directory)]
        stack.enter_context(started(made.base / f"c{i}.log", *words))
    return addresses


def test_one_grows_to_three_and_the_gang_goes_on() -> None:
    support_etcd.require_etcd()
    with rack(2) as made, ExitStack() as stack:
        client = made.client()
        spec = made.spec("train", ranks=SPEC_RANKS)
        job = client.submit_job(spec, request_id="first").id
        before = made.until_running(job, SPEC_RANKS)
        until(lambda: made.lines("saved") or None, "a checkpoint is committed")
        nodes = {node.name: node.uid for node in client.list_nodes(brief=True)}
        history = client.get_status().cursor.history
        directories = members(stack, made.base)
        data_dir = made.controller.data_dir
        take = ("virial.cli", "admin", "grow", "--import", "--data-dir", str(data_dir))
        refused = run(*take, "--member-dir", str(directories[0]))
        assert refused.returncode == 1
        assert "in use by another controld" in refused.stderr
        assert made.controller.process is not None
        made.controller.process.send_signal(signal.SIGTERM)
        made.controller.process.wait(HANG_SECONDS)
        taken = run(*take, "--member-dir", str(directories[0]))
        assert taken.returncode == 0, taken.stderr
        assert "with 1 job(s) and 2 node(s)" in taken.stdout
        again = run(*take, "--member-dir", str(directories[1]))
        assert again.returncode == 1
        assert "there is no SQLite store" in again.stderr
        old = run("controld", "--data-dir", str(data_dir), "--listen", "127.0.0.1:0", "--metrics-listen", "off")
        assert old.returncode == 4, "the one it was cannot begin again beside the three"
        assert "was taken into etcd" in old.stderr
        addresses = grown(made, stack, directories)
        with SyncClient(addresses, timeout_s=HANG_SECONDS) as three:
            assert three.submit_job(spec, request_id="first").id == job, "it is answered as the first time"
            assert {node.name: node.uid for node in three.list_nodes(brief=True)} == nodes
            assert three.get_status().cursor.history > history
            made.clients.append(three)
            made.cluster.address = addresses[0]
            after = made.until_running(job, SPEC_RANKS, generation=2)
            assert not set(before.values()) & set(after.values())
            current = three.get_job(job).current
            assert current is not None
            assert current.restored_step > 0
            saved = len(made.lines("saved"))
            until(lambda: len(made.lines("saved")) > saved or None, "it saves again")
            three.cancel_job(job)
            made.until_ended(job)
