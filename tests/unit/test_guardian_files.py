"""Rotation, bounds and loss of logs; states of slots; what a full or dead disk costs."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from noded.run.logs import PATIENCE_NS, Output, RotatingFile
from noded.run.protocol import STDERR_TAIL_BYTES
from noded.run.scribe import QUEUE_BYTES_MAX, RELEASED_KEPT, RESPAWN_NS, Desk, Scribe, serve


def read_back(path: Path, files_max: int) -> bytes:
    parts = [path.with_name(f"{path.name}.{index}") for index in range(files_max - 1, 0, -1)] + [path]
    return b"".join(part.read_bytes() for part in parts if part.exists())


@pytest.mark.parametrize("files_max", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 7, 100, 5000])
def test_rotation_keeps_the_newest_whole_lines(tmp_path: Path, files_max: int, chunk: int) -> None:
    path = tmp_path / "x.log"
    lines = [f"line {number:04d}\n".encode() for number in range(400)]
    stream = b"".join(lines)
    file = RotatingFile(path, 512, files_max)
    for start in range(0, len(stream), chunk):
        file.write(stream[start : start + chunk])
    file.close()
    kept = read_back(path, files_max)
    assert stream.endswith(kept)
    assert len(kept) <= 512 * files_max
    assert len(list(tmp_path.iterdir())) <= files_max
    assert all(part.stat().st_size <= 512 for part in tmp_path.iterdir())
    assert path.read_bytes().endswith(b"line 0399\n")


def test_a_line_longer_than_a_file_is_cut(tmp_path: Path) -> None:
    file = RotatingFile(tmp_path / "x.log", 100, 3)
    file.write(b"y" * 250)
    file.close()
    assert read_back(tmp_path / "x.log", 3) == b"y" * 250


def test_rotation_goes_on_in_an_existing_file(tmp_path: Path) -> None:
    for _ in range(3):
        file = RotatingFile(tmp_path / "x.log", 100, 2)
        file.write(b"z" * 39 + b"\n")
        file.close()
    assert (tmp_path / "x.log").stat().st_size == 40
    assert (tmp_path / "x.log.1").stat().st_size == 80


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Pipes:
    """Instead of a scribe process: a pipe whose reading end the test holds."""

    def __init__(self) -> None:
        self.readers: list[int] = []

    def __call__(self) -> tuple[int, int]:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self.readers.append(reader)
        return 1000 + len(self.readers), writer


def test_a_slow_disk_holds_the_task_back_and_a_dead_one_costs_its_output() -> None:
    clock, pipes = Clock(), Pipes()
    scribe = Scribe(clock, pipes)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    output = Output(reader, "tasks/j/stdout.log", 1 << 20, 2)
    moved = 0
    while not scribe.full:
        moved += os.write(writer, b"a" * 4096)
        assert output.pump(scribe, clock.now_ns)
    assert moved < QUEUE_BYTES_MAX + (4 << 20)
    os.write(writer, b"held back\n")
    assert not output.pump(scribe, clock.now_ns), "for a while the task waits"
    clock.now_ns += PATIENCE_NS
    assert output.pump(scribe, clock.now_ns), "then it goes on, and its output is lost"
    assert output.tail.endswith("held back\n"), "but for the tail"
    seen = b""
    while not scribe.idle:
        seen += os.read(pipes.readers[0], 1 << 20)
        scribe.flush()
    os.write(writer, b"after\n")
    assert output.pump(scribe, clock.now_ns)
    seen += os.read(pipes.readers[0], 1 << 20)
    assert seen.endswith(b"\n[virial: 10 bytes lost, the disk did not take them]\nafter\n")
    output.close()
    scribe.close()


def test_a_dead_scribe_is_started_again_not_too_often() -> None:
    clock, pipes = Clock(), Pipes()
    scribe = Scribe(clock, pipes)
    os.close(pipes.readers[0])
    scribe.status("j.1.0", b"{}", durable=True, released=False)
    assert scribe.full
    scribe.lost()
    assert not scribe.alive
    assert not scribe.revive()
    clock.now_ns += RESPAWN_NS
    assert scribe.revive()
    scribe.status("j.1.0", b"{}", durable=True, released=False)
    assert b"j.1.0" in os.read(pipes.readers[1], 4096)
    scribe.close()


@pytest.mark.parametrize("tail", [b"x" * 10_000, "ü".encode() * 5000, b"\xff" * 9000, b"short"])
def test_the_tail_is_short_and_valid(tail: bytes) -> None:
    scribe = Scribe(Clock(), Pipes())
    reader, writer = os.pipe()
    output = Output(reader, "x", 1 << 20, 2)
    os.write(writer, tail)
    assert output.pump(scribe, 0)
    text = output.tail
    assert len(text.encode()) <= STDERR_TAIL_BYTES
    assert tail.decode("utf-8", "replace").endswith(text[1:] if len(tail) > STDERR_TAIL_BYTES else text)
    os.close(writer)
    assert not output.pump(scribe, 0)
    assert not output.open
    scribe.close()


def test_a_disk_that_refuses_is_told_in_the_log_once_it_takes_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    folder = tmp_path / "tasks" / "j.1.0"
    folder.mkdir(parents=True)
    path = folder / "stdout.log"
    path.symlink_to("/dev/full")
    desk.log("tasks/j.1.0/stdout.log", b"lost bytes", 1 << 20, 2)
    desk.log("tasks/j.1.0/stdout.log", b"more", 1 << 20, 2)
    path.unlink()
    desk.log("tasks/j.1.0/stdout.log", b"kept\n", 1 << 20, 2)
    assert path.read_bytes() == b"\n[virial: 14 bytes lost, the disk refused them]\nkept\n"


def test_the_newest_released_slots_are_kept(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.status("live.1.0", json.dumps({"state": "RUNNING"}).encode(), durable=False, released=False)
    for number in range(RELEASED_KEPT + 5):
        slot = f"j{number:03d}.1.0"
        desk.log(f"tasks/{slot}/stdout.log", b"x", 4096, 2)
        body = json.dumps({"state": "RELEASED"}).encode()
        desk.status(slot, body, durable=False, released=True)
        os.utime(tmp_path / "tasks" / slot / "status.json", ns=(number, number))
    desk.status("last.1.0", json.dumps({"state": "RELEASED"}).encode(), durable=True, released=True)
    names = {path.name for path in (tmp_path / "tasks").iterdir()}
    assert "live.1.0" in names
    assert "last.1.0" in names
    assert len(names) == RELEASED_KEPT + 1
    assert "j000.1.0" not in names
    assert f"j{RELEASED_KEPT + 4:03d}.1.0" in names


def test_the_scribe_reads_frames_and_drops_a_torn_one(tmp_path: Path) -> None:
    clock, pipes = Clock(), Pipes()
    scribe = Scribe(clock, pipes)
    scribe.log("guardian.log", b"a\nb\n", 4096, 2)
    scribe.status("j.1.0", b'{"state": "RUNNING"}', durable=True, released=False)
    frames = os.read(pipes.readers[0], 1 << 16)
    serve(
        io.BytesIO(frames + b'{"path": "guardian.log", "bytes_max": 1, "files_max": 1, "size": 9}\nto'), Desk(tmp_path)
    )
    assert (tmp_path / "guardian.log").read_bytes() == b"a\nb\n"
    assert json.loads((tmp_path / "tasks/j.1.0/status.json").read_bytes()) == {"state": "RUNNING"}
    scribe.close()
