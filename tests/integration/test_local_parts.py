"""What a local cluster is made of: its ports, its directory, and when a dead part is started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from virial.errors import VirialError
from virial.local import LocalCluster, Supervision, scratch_directory
from virial.local.part import Part
from virial.local.ports import LOOPBACK, ReservedPorts
from virial.local.supervision import DELAY_MAX_S, SETTLED_S


def listen(port: int) -> socket.socket:
    """As servers do."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((LOOPBACK, port))
    made.listen()
    return made


class TestPorts:
    def test_a_reserved_port_is_for_its_part_alone_also_while_that_is_down(self, tmp_path: Path) -> None:
        with closing(ReservedPorts(tmp_path, ["a", "b"])) as ports:
            assert len(set(ports.ports.values())) == 2
            for _life in range(2):
                listen(ports.ports["a"]).close()
                with socket.socket() as other, pytest.raises(OSError, match="in use"):
                    other.bind((LOOPBACK, ports.ports["a"]))

    def test_they_are_the_same_the_next_time(self, tmp_path: Path) -> None:
        with closing(ReservedPorts(tmp_path, ["a", "b"])) as ports:
            before = dict(ports.ports)
        with closing(ReservedPorts(tmp_path, ["a", "b"])) as ports:
            assert ports.ports == before
        with closing(listen(before["b"])), pytest.raises(VirialError, match=f"port {before['b']} of b cannot be used"):
            ReservedPorts(tmp_path, ["a", "b"])
        with pytest.raises(VirialError, match="of a cluster of other parts"):
            ReservedPorts(tmp_path, ["a"])

    @pytest.mark.parametrize("content", ["{", "[]", "{}", '{"a": "7"}'])
    def test_a_damaged_file_of_them_is_named(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "cluster.json").write_text(content)
        with pytest.raises(VirialError, match=r"cluster\.json is damaged"):
            ReservedPorts(tmp_path, ["a"])


class TestScratch:
    def test_it_is_removed_at_the_end_and_not_by_another_meanwhile(self, tmp_path: Path) -> None:
        with scratch_directory(tmp_path) as one:
            (one / "sub").mkdir()
            (one / "sub" / "file").touch()
            with scratch_directory(tmp_path) as other:
                assert one.exists()
                assert other != one
            assert not other.exists()
        assert list(tmp_path.iterdir()) == []

    def test_the_next_one_removes_what_a_killed_one_left_and_nothing_else(self, tmp_path: Path) -> None:
        (tmp_path / "virial-mine").mkdir()
        code = (
            "import pathlib, sys, time\nfrom virial.local import scratch_directory\n"
            f"with scratch_directory(pathlib.Path({str(tmp_path)!r})) as made:\n"
            "    print(made, flush=True)\n    time.sleep(600)\n"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            left = Path(process.stdout.readline().strip())
            process.kill()
        assert left.exists()
        with scratch_directory(tmp_path):
            assert not left.exists()
        assert [entry.name for entry in tmp_path.iterdir()] == ["virial-mine"]


class TestSupervision:
    def make(self, directory: Path, code: str) -> tuple[LocalCluster, Part]:
        cluster = LocalCluster(directory, nodes=0)
        part = cluster.controller
        part.argv = ["-c", code]
        part.spawn()
        return cluster, part

    @staticmethod
    def end(part: Part) -> None:
        assert part.process is not None
        part.process.wait(60)

    def test_one_that_keeps_ending_is_started_ever_later(self, tmp_path: Path) -> None:
        cluster, part = self.make(tmp_path, "pass")
        supervision, now_s, waits = Supervision(cluster, 0.0), 0.0, list[float]()
        for _ in range(8):
            self.end(part)
            began_s = now_s
            while not supervision.step(now_s):
                now_s += 0.5
            waits.append(now_s - began_s)
        self.end(part)
        assert waits[0] == 0.0
        assert waits[1:] == sorted(waits[1:])
        assert waits[-1] == DELAY_MAX_S

    def test_one_that_ran_well_is_started_at_once(self, tmp_path: Path) -> None:
        cluster, part = self.make(tmp_path, "import time; time.sleep(600)")
        supervision = Supervision(cluster, 0.0)
        now_s = 0.0
        try:
            for _ in range(4):
                now_s += SETTLED_S
                assert supervision.step(now_s) == []
                os.kill(part.pid, signal.SIGKILL)
                self.end(part)
                assert len(supervision.step(now_s)) == 1
                assert part.alive
        finally:
            part.kill()

    def test_one_whose_state_is_gone_is_not_started_and_that_is_said_once(self, tmp_path: Path) -> None:
        state = tmp_path / "controld" / "state.sqlite3"
        cluster, part = self.make(tmp_path, f"import pathlib; pathlib.Path({str(state)!r}).touch()")
        self.end(part)
        supervision = Supervision(cluster, 0.0)
        assert len(supervision.step(0.0)) == 1
        self.end(part)
        state.unlink()
        said = [sentence for now_s in range(1, 60) for sentence in supervision.step(float(now_s))]
        assert said == [f"controld is not started again: {state}, which it had before, is gone"]
