"""`./run test`: every check and test, quick stages first, each with its time; `./run test NAME...` runs those stages.

A failed stage does not stop the later ones: one run tells everything that is wrong. The last line counts tests over all
stages. Stages get no standard input and a process group of their own, so that Ctrl-C and the hang guard end all of it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A hang guard, not a measure: the slowest stage takes a few minutes on two noisy cores.
STAGE_TIMEOUT_S = 30 * 60
SIM_SEEDS = 25
# Stands in a command for the JUnit reports of the stages before it; where there are none, for nothing.
REPORTS = "{reports}"


@dataclass(frozen=True)
class Stage:
    """One thing that can fail, under a name that `./run` knows."""

    name: str
    commands: tuple[tuple[str, ...], ...] = ()  # modules with their arguments, for this Python's -m
    tests: tuple[str, ...] = ()  # folders under tests/, run by pytest
    workers: int = 0  # pytest-xdist processes, each with whole files, which share fixtures such as an etcd


STAGES = (
    Stage("lint", (("ruff", "check", "."), ("ruff", "format", "--check", "."))),
    Stage("types", (("pyright",),)),
    Stage("arch", tests=("architecture",)),  # import-linter among them
    Stage("protos-check", (("tools.protos", "--check"), ("tools.unasync_client", "--check"))),
    Stage("unit", tests=("unit", "property", "golden", "typing"), workers=2),
    Stage("sim", (("tests.sim", "--seeds", str(SIM_SEEDS)),), tests=("sim",)),
    # Its tests wait more than they work.
    Stage("integration", tests=("integration", "chaos", "demo", "acceptance", "compose"), workers=2),
    Stage("rows", (("tests.rows", REPORTS),)),
)


@dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add_report(self, path: Path) -> None:
        """Add the figures of one JUnit report; a report that is not there (pytest did not get so far) adds none."""
        if not path.exists():
            return
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):  # noqa: S314 - our own pytest wrote it
            total, skipped = int(suite.get("tests", "0")), int(suite.get("skipped", "0"))
            failed = int(suite.get("failures", "0")) + int(suite.get("errors", "0"))
            self.failed += failed
            self.skipped += skipped
            self.passed += max(0, total - failed - skipped)


def commands_of(stage: Stage, report: Path) -> list[list[str]]:
    reports = [f"--reports={report.parent}"] if any(report.parent.glob("*.xml")) else []
    commands = [
        [sys.executable, "-m", *(word for part in command for word in (reports if part == REPORTS else [part]))]
        for command in stage.commands
    ]
    if folders := [f"tests/{folder}" for folder in stage.tests if any((ROOT / "tests" / folder).rglob("test_*.py"))]:
        workers = ["-n", str(stage.workers), "--dist", "loadfile"] if stage.workers else []
        commands.append([sys.executable, "-m", "pytest", "-q", *workers, f"--junitxml={report}", *folders])
    return commands


def run_command(command: list[str]) -> bool:
    """Run one command in its own process group; false where it fails or outlives the hang guard."""
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, process_group=0)
    try:
        return process.wait(STAGE_TIMEOUT_S) == 0
    except subprocess.TimeoutExpired:
        print(f"still running after {STAGE_TIMEOUT_S} s, killed: {' '.join(command)}", flush=True)
        return False
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            print("killed", flush=True)
        raise
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_stages(stages: list[Stage]) -> bool:
    counts = Counts()
    failed: list[str] = []
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for stage in stages:
            print(f"\n=== {stage.name}", flush=True)
            began = time.monotonic()
            report = Path(folder) / f"{stage.name}.xml"
            results = [run_command(command) for command in commands_of(stage, report)]
            ok = all(results)
            counts.add_report(report)
            if not ok:
                failed.append(stage.name)
            lines.append(f"{stage.name:<14}{time.monotonic() - began:8.1f} s  {'ok' if ok else 'FAILED'}")
            print(f"=== {lines[-1]}", flush=True)
    print("\n" + "\n".join(lines))
    if failed:
        print(f"failed stages: {', '.join(failed)}")
    print(f"{counts.passed} passed, {counts.failed} failed, {counts.skipped} skipped", flush=True)
    return not failed


def main() -> None:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(prog="./run test", description="Run every check and test, or the named stages.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"one of {', '.join(names)}")
    chosen: list[str] = parser.parse_args().stages
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"no stage {', '.join(unknown)}; there are {', '.join(names)} (one test: ./run pytest PATH)")
    try:
        ok = run_stages([stage for stage in STAGES if not chosen or stage.name in chosen])
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
