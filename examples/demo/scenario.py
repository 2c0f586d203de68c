"""One run of the training job on a cluster of its own: without a fault, with a node killed, or with one cut off."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from demo.processes import ExitTimes, boottime_s, descendants, kill_all, start_time_s
from demo.relay import Relay
from demo.timeline import Events, Printer, Progress

import virial
from virial.local import LocalCluster, guardian_pid
from virial.models import Job, JobSpec, Writes

HERE = Path(__file__).resolve().parent
NODES = 4
CHECKPOINTS_BEFORE_FAULT = 2
POLL_S = 0.05


class DemoFailed(Exception):
    """What did not happen as promised."""


@dataclass(frozen=True, slots=True)
class Options:
    fault: str
    steps: int
    checkpoint_every: int
    step_ms_min: int
    lose_rank: int
    timeout_s: float
    fence_after_s: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run ended with; the fault's figures are in `figures`."""

    digest: str
    job: Job
    figures: dict[str, object]


@dataclass(slots=True)
class Run:
    """A cluster with the job on it."""

    options: Options
    printer: Printer
    cluster: LocalCluster
    client: virial.SyncClient
    events: Events
    progress: Progress
    relays: dict[str, Relay]
    result_file: Path
    job_id: str = ""

    def job(self) -> Job:
        job = self.client.get_job(self.job_id)
        self.progress.note(job)
        return job

    def poll(self, what: str) -> Iterator[Job]:
        """The job again and again; raises DemoFailed when it ends or `timeout_s` passes first."""
        deadline_s = time.monotonic() + self.options.timeout_s
        while time.monotonic() < deadline_s:
            job = self.job()
            yield job
            if job.state.ended:
                raise DemoFailed(f"the job ended as {job.state} before {what}: {_why(job)}")
            time.sleep(POLL_S)
        raise DemoFailed(f"{what} did not happen within {self.options.timeout_s:g} s")


def _why(job: Job) -> str:
    error = job.first_error
    if error is None:
        return "no error is recorded"
    tail = error.exit.stderr_tail.strip().splitlines()[-1:] if error.exit is not None else []
    return " ".join([f"rank {error.rank} on {error.node}: {error.stop_reason}", error.detail, *tail])


@contextmanager
def cluster_with_job(options: Options, printer: Printer, directory: Path) -> Generator[Run]:
    """Start a cluster, wait for its nodes, submit the job; stop everything at the end."""
    cluster = LocalCluster(directory / "cluster", nodes=NODES)
    relays: dict[str, Relay] = {}

    def controller_for(name: str) -> str:
        relays[name] = Relay(cluster.address)
        relays[name].start()
        return relays[name].address

    try:
        cluster.start(controller_for=controller_for if options.fault == "partition" else None)
        with virial.SyncClient(cluster.address) as client, virial.SyncClient(cluster.address) as follower:
            events = Events(follower, printer)
            events.start()
            _wait_for_nodes(client, printer)
            result_file = directory / "result.txt"
            run = Run(options, printer, cluster, client, events, Progress(printer), relays, result_file)
            run.job_id = client.submit_job(_spec(options, directory, result_file)).id
            try:
                yield run
            finally:
                events.closed = True
    finally:
        cluster.stop()
        for relay in relays.values():
            relay.stop()


def _spec(options: Options, directory: Path, result_file: Path) -> JobSpec:
    """examples/train.yaml, with this run's directories, length and fence."""
    spec = virial.load_spec(HERE.parent / "train.yaml")
    checkpoints = directory / "checkpoints"
    checkpoints.mkdir(parents=True)
    command = (
        sys.executable,
        str(HERE.parent / "train.py"),
        f"--steps={options.steps}",
        f"--checkpoint-every={options.checkpoint_every}",
        f"--step-ms-min={options.step_ms_min}",
        f"--result={result_file}",
    )
    partition = options.fault == "partition"
    return replace(
        spec,
        task=replace(spec.task, command=command, working_directory=str(directory)),
        checkpoint=replace(spec.checkpoint, directory=str(checkpoints)),
        writes=Writes.SHARED if partition else spec.writes,
        fence_after_ns=options.fence_after_s * 1_000_000_000 if partition else spec.fence_after_ns,
    )


def _wait_for_nodes(client: virial.SyncClient, printer: Printer) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        nodes = client.list_nodes()
        if len([n for n in nodes if n.schedulable and n.devices]) == NODES:
            break
        time.sleep(POLL_S)
    else:
        raise DemoFailed(f"{NODES} nodes did not become schedulable within 60 s")
    for node in nodes:
        kinds: dict[str, int] = {}
        for device in node.devices:
            kinds[device.kind] = kinds.get(device.kind, 0) + 1
        devices = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        heat = [r for r in node.readings if r.unit == "millidegrees_celsius" and r.value is not None]
        temperature = f"{max(r.value or 0 for r in heat) / 1000:.1f} degC" if heat else "unknown"
        printer.say(
            f"{node.name}: {node.cpu_millis / 1000:g} cores, {node.memory_bytes >> 20} MiB, {devices};"
            f" temperature {temperature}; fencing {node.fencing}"
        )


def run_without_fault(options: Options, printer: Printer, directory: Path) -> Outcome:
    with cluster_with_job(replace(options, fault="none"), printer, directory) as run:
        return _finish(run, {})


def run_with_fault(options: Options, printer: Printer, directory: Path) -> Outcome:
    with cluster_with_job(options, printer, directory) as run:
        _wait_for_checkpoints(run)
        return _kill(run) if options.fault == "kill" else _partition(run)


def _wait_for_checkpoints(run: Run) -> None:
    for job in run.poll(f"{CHECKPOINTS_BEFORE_FAULT} committed checkpoints"):
        committed = run.events.count("checkpoint.committed")
        if committed >= CHECKPOINTS_BEFORE_FAULT and job.current is not None and job.current.phase == "ACTIVE":
            return


def _placed(run: Run) -> dict[int, str]:
    """Rank -> node of the current generation."""
    generation = run.job().current
    if generation is None:
        raise DemoFailed("the job has no generation")
    return {m.rank: m.node for m in generation.members if m.rank is not None}


def _kill(run: Run) -> Outcome:
    """Kill a node outright: agent, guardian and tasks, and take its data directory away."""
    lost = _placed(run)[run.options.lose_rank]
    part = run.cluster.agents[lost]
    guardian = guardian_pid(part.data_dir)
    if part.process is None or guardian is None:
        raise DemoFailed(f"{lost} has no agent or no guardian to kill")
    victims = [part.process.pid, *descendants(part.process.pid), guardian, *descendants(guardian)]
    run.printer.say(f"--- SIGKILL to all {len(victims)} processes of {lost} (rank {run.options.lose_rank}) ---")
    killed_s = time.monotonic()
    kill_all(victims)
    part.process.wait()
    run.cluster.forget(lost)
    shutil.move(part.data_dir, part.data_dir.with_name(f"lost-{lost}"))
    return _finish(run, _recovery(run, lost, killed_s))


def _recovery(run: Run, lost: str, fault_s: float) -> dict[str, object]:
    """Wait for generation 2's first new step; how long detection and recovery took."""
    for job in run.poll("the first step of generation 2"):
        if job.generation >= 2 and 2 in run.progress.first_new_at_s:
            break
    suspect = run.events.first("node.suspect", node=lost, after_s=fault_s)
    generation = run.job().current
    if suspect is None or generation is None:
        raise DemoFailed(f"{lost} was never suspected")
    return {
        "lost_node": lost,
        "restored_step": generation.restored_step,
        "steps_redone": _highest_step(run, 1) - generation.restored_step,
        "detect_s": round(suspect.at_s - fault_s, 3),
        "recovery_s": round(run.progress.first_new_at_s[2] - fault_s, 3),
    }


def _highest_step(run: Run, generation: int) -> int:
    """The highest step that any rank reported, by what was polled and by the nodes' own files, the lost one's too."""
    highest = run.progress.highest.get(generation, -1)
    for path in run.cluster.directory.glob(f"*/tasks/{run.job_id}.{generation}.*/status.json"):
        progress = json.loads(path.read_bytes())["progress"]
        highest = max(highest, progress["step"] if progress else -1)
    return highest


def _status(run: Run, node: str, rank: int, generation: int) -> dict[str, object]:
    """What a node's own file says of a task."""
    path = run.cluster.directory / node / "tasks" / f"{run.job_id}.{generation}.{rank}" / "status.json"
    return dict(json.loads(path.read_bytes()))


def _task_pids(run: Run, placed: dict[int, str], generation: int) -> dict[int, tuple[int, int]]:
    """Rank -> (pid of the task, pid of its namespace's init, which ends last)."""
    found: dict[int, tuple[int, int]] = {}
    for rank, node in placed.items():
        status = _status(run, node, rank, generation)
        pid, init_pid = status["pid"], status["init_pid"]
        if not isinstance(pid, int) or not isinstance(init_pid, int):
            raise DemoFailed(f"{node} does not say which process rank {rank} is")
        found[rank] = (pid, init_pid)
    return found


def _partition(run: Run) -> Outcome:
    """Cut one agent off: its connection stays open and carries nothing."""
    placed = _placed(run)
    rank = run.options.lose_rank
    cut = placed[rank]
    exits = ExitTimes()
    try:
        first = _task_pids(run, placed, 1)
        for pid in {pid for pids in first.values() for pid in pids}:
            exits.watch(pid)
        run.printer.say(f"--- the relay of {cut} (rank {rank}) goes silent: nothing passes, nothing is closed ---")
        cut_s = time.monotonic()
        run.relays[cut].cut()
        figures = _recovery(run, cut, cut_s)
        second = _task_pids(run, _placed(run), 2)
        starts = [start_time_s(pid) for pids in second.values() for pid in pids]
        ends = [exits.time_s(pid) for pids in first.values() for pid in pids]
        if any(s is None for s in starts) or any(e is None for e in ends):
            raise DemoFailed("a process of generation 1 still runs, or one of generation 2 does not")
        last_exit_s = max(e for e in ends if e is not None)
        first_start_s = min(s for s in starts if s is not None)
        status = _status(run, cut, rank, 1)
        _check_peers(status, rank, first, exits)
        exit_ = status["exit"]
        figures |= {
            "overlap_s": round(max(0.0, last_exit_s - first_start_s), 3),
            "gap_s": round(first_start_s - last_exit_s, 3),
            "cut_rank_exit_reason": exit_.get("reason") if isinstance(exit_, dict) else None,  # pyright: ignore[reportUnknownMemberType]
        }
        return _finish(run, figures)
    finally:
        exits.stop()


def _check_peers(
    cut_status: dict[str, object], cut_rank: int, pids: dict[int, tuple[int, int]], exits: ExitTimes
) -> None:
    """No peer may have been stopped before the cut rank's own deadline: until then it might have come back."""
    deadline_ns = cut_status["deadline_ns"]
    if not isinstance(deadline_ns, int):
        raise DemoFailed("the cut node's file has no deadline")
    for rank, (pid, _) in pids.items():
        ended_s = exits.time_s(pid)
        if rank != cut_rank and ended_s is not None and ended_s < deadline_ns / 1e9:
            early_s = deadline_ns / 1e9 - ended_s
            raise DemoFailed(f"rank {rank} ended {early_s:.3f} s before the cut rank's deadline")


def _finish(run: Run, figures: dict[str, object]) -> Outcome:
    deadline_s = time.monotonic() + run.options.timeout_s
    while not (job := run.job()).state.ended:
        if time.monotonic() > deadline_s:
            raise DemoFailed(f"the job did not end within {run.options.timeout_s:g} s; it is {job.state}")
        time.sleep(POLL_S)
    if job.state is not virial.JobState.SUCCEEDED:
        raise DemoFailed(f"the job ended as {job.state}: {_why(job)}")
    digest = run.result_file.read_text(encoding="ascii").strip()
    run.printer.say(f"job {job.id} {job.state} after {job.generation} generation(s); parameters have sha256 {digest}")
    return Outcome(digest, job, figures)


__all__ = ["DemoFailed", "Options", "Outcome", "boottime_s", "run_with_fault", "run_without_fault"]
