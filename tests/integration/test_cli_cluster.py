"""The command line as a user types it, on a cluster of `virial up`: processes, pipes, exit codes, Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 90.0
# A shell's background job ignores Ctrl-C, and so would everything that the tests start from one.
VIRIAL = ["env", "--default-signal=INT", sys.executable, "-m", "virial.cli"]


@dataclass
class Up:
    """A cluster of `virial up`, and the environment in which other commands find it by themselves."""

    process: subprocess.Popen[str]
    environment: dict[str, str]
    directory: Path
    jobs: Path

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*VIRIAL, *arguments],
            env=self.environment,
            cwd=self.jobs,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*VIRIAL, *arguments],
            env=self.environment,
            cwd=self.jobs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def spec(self, name: str, code: str, *, ranks: int = 1, restarts: int = 0) -> str:
        """A job file whose ranks run some Python."""
        document = {
            "name": name,
            "gang": {"ranks": ranks},
            "resources": {"cpu": "100m", "memory": "64MiB"},
            "task": {"command": [sys.executable, "-c", code], "working_directory": str(self.jobs), "grace": "0s"},
            "restart": {"max": restarts},
        }
        path = self.jobs / f"{name}.yaml"
        path.write_text(json.dumps(document))
        return str(path)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    base = tmp_path_factory.mktemp("up")
    python_path = os.pathsep.join(str(ROOT / part) for part in ("", "client", "protos"))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VIRIAL_")}
    environment |= {"XDG_RUNTIME_DIR": str(base), "PYTHONPATH": python_path, "TERM": "xterm"}
    process = subprocess.Popen(
        [*VIRIAL, "up", "--nodes", "2", "--directory", str(base / "cluster"), "-o", "json"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr.read() if process.stderr is not None else ""
    assert json.loads(line)["nodes"] == 2
    (base / "jobs").mkdir()
    cluster = Up(process, environment, base / "cluster", base / "jobs")
    yield cluster
    if process.poll() is None:
        process.terminate()
        process.wait(HANG_S)


def processes_of(directory: Path) -> list[str]:
    """Command lines that name a directory: whatever a cluster in it has left behind."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(directory) in command:
                found.append(command)
    return found


def test_nodes_are_there_as_soon_as_the_cluster_says_so(up: Up) -> None:
    nodes = up.json("nodes")
    assert [(n["name"], n["liveness"], n["schedulable"]) for n in nodes] == [
        ("node-0", "LIVE", True),
        ("node-1", "LIVE", True),
    ]
    node = up.json("node", "node-0")
    assert node["devices"]
    assert all(r["value"] is None or r["quality"] in ("ok", "saturated") for r in node["readings"])
    assert up.json("status")["nodes_live"] == 2


def test_a_job_is_submitted_waited_for_and_its_output_read(up: Up) -> None:
    file = up.spec("hello", "import sys; print('out'); print('err', file=sys.stderr)", ranks=2)
    done = up.run("submit", file, "--id", "hello", "--wait")
    assert (done.returncode, done.stdout) == (0, "hello\nhello SUCCEEDED\n"), done.stderr
    assert "job hello: submitted, 2 ranks" in done.stderr
    assert "job hello: succeeded" in done.stderr
    assert "\x1b" not in done.stderr
    for rank in ("0", "1"):
        assert up.run("logs", "hello", "--rank", rank).stdout == "out\n"
    assert up.run("logs", "hello", "--stderr").stdout == "err\n"
    assert up.run("logs", "hello", "--tail", "3").stdout == "ut\n"
    assert up.json("job", "hello")["state"] == "SUCCEEDED"
    kinds = [event["kind"] for event in up.json("events", "--job", "hello")]
    assert kinds[0] == "job.submitted"
    assert kinds[-1] == "job.succeeded"


def test_a_job_that_fails_is_exit_code_1_and_its_first_error_is_told(up: Up) -> None:
    file = up.spec("fails", "import sys; print('why', file=sys.stderr); sys.exit(7)")
    done = up.run("submit", file, "--id", "fails", "--wait")
    assert done.returncode == 1
    assert done.stdout.endswith("fails FAILED\n")
    assert "first error: generation 1, rank 0 on node-" in done.stderr
    assert "exited with code 7" in done.stderr
    assert "| why" in up.run("job", "fails").stdout
    assert [job["id"] for job in up.json("jobs", "--state", "failed")] == ["fails"]


def test_a_running_job_is_followed_and_cancelled(up: Up) -> None:
    file = up.spec("long", "import time\nfor i in range(10**6): print(i, flush=True); time.sleep(0.05)")
    assert up.run("submit", file, "--id", "long").stdout == "long\n"
    deadline_s = time.monotonic() + HANG_S
    while up.json("job", "long")["state"] != "RUNNING":
        assert time.monotonic() < deadline_s
    with up.start("logs", "long", "-f") as following:
        assert following.stdout is not None
        assert [following.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
        done = up.run("cancel", "long", "--wait")
        assert (done.returncode, done.stdout) == (0, "long CANCELLED\n"), done.stderr
        assert "job long: being cancelled" in done.stderr
        assert "submitted" not in done.stderr
        rest = following.stdout.read().split()  # ends with the task
        assert rest == [str(i) for i in range(3, 3 + len(rest))]
        assert following.wait(HANG_S) == 0


def test_what_goes_wrong_has_its_exit_code(up: Up) -> None:
    file = up.spec("once", "pass")
    assert up.run("submit", file, "--id", "once").returncode == 0
    again = up.run("submit", file, "--id", "once")
    assert (again.returncode, again.stdout) == (5, "")
    assert "jobs/once already exists" in again.stderr
    with open("/dev/full", "w") as full:
        unwritten = subprocess.run([*VIRIAL, "nodes"], env=up.environment, stdout=full, stderr=subprocess.PIPE)
    told = b"virial: cannot write the output: No space left on device\n"
    assert (unwritten.returncode, unwritten.stderr) == (1, told)
    missing = up.run("job", "nope")
    assert (missing.returncode, missing.stderr.count("\n")) == (3, 1)
    assert up.run("logs", "nope").returncode == 3
    assert up.run("node", "nope").returncode == 3
    assert up.run("release", "node-0", "--owner", "nobody").returncode == 3
    bad = up.run("submit", file, "--set", "gang.spares=5000")
    assert bad.returncode == 2
    assert "gang.spares: 5000 is outside 0 to 4096" in bad.stderr
    refused = up.run("submit", file, "--set", "checkpoint.keep=5000", "--set", "task.log_bytes_max=1B")
    assert refused.returncode == 2
    assert "spec.checkpoint.keep" in refused.stderr
    assert "spec.task.log_bytes_max" in refused.stderr


def test_an_impossible_gang_waits_and_is_explained(up: Up) -> None:
    file = up.spec("big", "pass", ranks=3)
    up.run("submit", file, "--id", "big")
    deadline_s = time.monotonic() + HANG_S
    while "ranks needed 3" not in (done := up.run("explain", "big")).stdout:
        assert time.monotonic() < deadline_s, done.stdout
    assert "it would fit with gang.ranks: 2" in done.stdout
    assert up.run("cancel", "big").returncode == 0


def test_a_hold_keeps_work_away_until_it_is_released(up: Up) -> None:
    done = up.run("hold", "node-1", "--owner", "me", "--reason", "new fan", "--for", "2h")
    assert done.stdout == "node-1 is held by me for 2h\n"
    assert {n["name"]: n["schedulable"] for n in up.json("nodes")} == {"node-0": True, "node-1": False}
    assert "by me: new fan" in up.run("node", "node-1").stdout
    assert up.run("release", "node-1", "--owner", "me").returncode == 0
    assert all(n["schedulable"] for n in up.json("nodes"))


def test_a_spec_comes_from_standard_input_and_a_dry_run_submits_nothing(up: Up) -> None:
    text = Path(up.spec("stdin", "pass")).read_text()
    done = up.run("submit", "-", "--id", "from-stdin", "--dry-run", stdin=text)
    assert (done.returncode, done.stdout) == (0, "standard input: valid; nothing was submitted\n")
    assert up.run("job", "from-stdin").returncode == 3
    assert up.run("submit", "-", "--id", "from-stdin", stdin=text).stdout == "from-stdin\n"


def test_ctrl_c_ends_a_wait_and_not_the_job(up: Up) -> None:
    file = up.spec("stays", "import time; time.sleep(600)")
    with up.start("submit", file, "--id", "stays", "--wait") as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "stays\n"
        assert waiting.stderr is not None
        assert "submitted" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        _, err = waiting.communicate(timeout=HANG_S)
    assert waiting.returncode == 130
    assert "the job goes on (end it with: virial cancel stays)" in err
    assert "Traceback" not in err
    assert up.json("job", "stays")["state"] in ("PENDING", "STARTING", "RUNNING")
    assert up.run("cancel", "stays", "--wait").returncode == 0


def test_followed_events_end_quietly_with_ctrl_c(up: Up) -> None:
    with up.start("events", "-f", "-o", "json") as following:
        assert following.stdout is not None
        assert json.loads(following.stdout.readline())["sequence"] == 1
        following.send_signal(signal.SIGINT)
        _, err = following.communicate(timeout=HANG_S)
    assert (following.returncode, err) == (130, "")


def test_a_second_cluster_leaves_the_first_one_alone(up: Up) -> None:
    address = (up.directory.parent / "virial-address").read_text().split()[0]
    same = up.run("up", "--nodes", "1", "--directory", str(up.directory))
    assert same.returncode == 1
    assert f"is in use by another local cluster (pid {up.process.pid})" in same.stderr
    with up.start("up", "--nodes", "1", "-o", "json") as other:
        assert other.stdout is not None
        assert json.loads(other.stdout.readline())["address"] != address
        assert len(up.json("nodes")) == 1
        other.send_signal(signal.SIGINT)
        _, err = other.communicate(timeout=HANG_S)
    assert f"your cluster at {address} runs on" in err
    assert len(up.json("nodes")) == 2


def test_colours_and_a_live_view_on_a_terminal_only(up: Up) -> None:
    def on_terminal(*arguments: str, **extra: str) -> str:
        leader, follower = pty.openpty()
        environment = up.environment | extra
        process = subprocess.Popen([*VIRIAL, *arguments], env=environment, stdin=follower, stdout=follower)
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while block := os.read(leader, 65536):
                shown += block
        os.close(leader)
        assert process.wait(HANG_S) == 0
        return shown.decode()

    assert "\x1b[32m" in on_terminal("nodes")
    assert "\x1b[3" not in on_terminal("nodes", NO_COLOR="1")
    assert "\x1b[" not in up.run("top", "--once").stdout
    assert "node-0" in on_terminal("top", "--once")


def test_the_cluster_ends_with_ctrl_c_and_leaves_nothing(up: Up) -> None:
    """The last of this file: it stops the cluster that the others use."""
    address = up.run("version").stdout
    assert "not reached" not in address
    assert processes_of(up.directory)
    up.process.send_signal(signal.SIGINT)
    _, err = up.process.communicate(timeout=HANG_S)
    assert up.process.returncode == 130
    assert "Traceback" not in err
    assert processes_of(up.directory) == []
    gone = up.run("jobs")
    assert gone.returncode == 4
    assert "`virial up`" in gone.stderr
