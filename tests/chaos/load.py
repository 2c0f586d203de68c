"""Clients that keep a controller busy, and the history of what they were told, to be checked afterwards.

An acknowledgement is an answer that a client has in its hands: from then on it has to hold, whatever is killed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import virial
from tests.chaos.rack import Rack
from virial.errors import UnavailableError
from virial.models import Event, Job, JobState

# An impatient caller gives up on its answer and asks again with the same request id.
IMPATIENT_S = 0.25


@dataclass
class History:
    """What was acknowledged. Lists are only appended to, each by one thread at a time."""

    submitted: dict[str, Job] = field(default_factory=dict[str, Job])  # request id -> the job of the answer
    cancelled: dict[str, JobState] = field(default_factory=dict[str, JobState])  # job -> the state of the answer
    held: dict[str, bool] = field(default_factory=dict[str, bool])  # owner -> whether its hold stands
    epochs: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])  # generation -> epoch
    events: dict[int, Event] = field(default_factory=dict[int, Event])  # as a watch showed them
    violations: list[str] = field(default_factory=list[str])
    repeats: int = 0
    unanswered: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, request_id: str, job: Job) -> None:
        with self.lock:
            first = self.submitted.setdefault(request_id, job)
            if first is not job:
                self.repeats += 1
            if (first.id, first.create_time_unix_ns, first.spec) != (job.id, job.create_time_unix_ns, job.spec):
                self.violations.append(f"{request_id} was answered with {first.id}, then with {job.id}")

    def saw_job(self, job: Job) -> None:
        """A lease that was shown is granted: its generation keeps its epoch for ever."""
        if job.current is None:
            return
        key = f"{job.id}.{job.current.number}"
        with self.lock:
            first = self.epochs.setdefault(key, job.current.epoch)
            if first != job.current.epoch:
                self.violations.append(f"{key} had epoch {first}, then {job.current.epoch}")


class Load:
    """Client threads until `stop`. Whatever they do not expect is a violation."""

    def __init__(self, rack: Rack, seed: int, clients: int = 3) -> None:
        self.rack = rack
        self.history = History()
        self.held_node = f"node-{rack.cluster.nodes - 1}"
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._guard, args=(self._work, random.Random(f"{seed}/{i}"), i), name=f"client-{i}")
            for i in range(clients)
        ]
        self._threads.append(threading.Thread(target=self._guard, args=(self._watch,), name="watch", daemon=True))
        self._watcher = rack.client()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Every client finishes what it has begun: its last request has an answer, too."""
        self._stopping.set()
        for thread in self._threads[:-1]:
            thread.join(120)
            assert not thread.is_alive(), f"{thread.name} hangs"

    def _guard(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except Exception as error:
            if not (work == self._watch and self._stopping.is_set()):
                self.history.violations.append(f"{threading.current_thread().name}: {type(error).__name__}: {error}")

    def _watch(self) -> None:
        for event in self._watcher.watch_events():
            first = self.history.events.setdefault(event.sequence, event)
            if first != event:
                self.history.violations.append(f"event {event.sequence} was {first}, then {event}")

    def _work(self, rng: random.Random, number: int) -> None:
        patient, impatient = self.rack.client(), self.rack.client(IMPATIENT_S)
        mine: list[str] = []
        n = 0
        while not self._stopping.is_set():
            n += 1
            match rng.choices(("submit", "cancel", "hold", "look"), (5, 2, 2, 3))[0]:
                case "submit":
                    mine.append(self._submit(patient, impatient, rng, f"w{number}-{n}"))
                case "cancel" if mine:
                    self._cancel(patient, mine.pop(rng.randrange(len(mine))))
                case "hold":
                    self._hold(patient, f"w{number}")
                case _:
                    for job in mine[-3:]:
                        self.history.saw_job(patient.get_job(job))
            time.sleep(rng.uniform(0.02, 0.25))

    def _submit(
        self, patient: virial.SyncClient, impatient: virial.SyncClient, rng: random.Random, request_id: str
    ) -> str:
        if rng.random() < 0.3:
            spec = self.rack.spec(request_id, "--steps", "12")
        else:
            append = 'echo "$VIRIAL_JOB $VIRIAL_GENERATION $RANK $$" >> starts; sleep 0.2'
            spec = self.rack.spec(request_id, command=("/bin/sh", "-c", append))
        if rng.random() < 0.5:
            try:
                self.history.answered(request_id, impatient.submit_job(spec, request_id=request_id))
            except UnavailableError:
                self.history.unanswered += 1
        for _ in range(rng.choice((1, 1, 2, 3))):
            self.history.answered(request_id, patient.submit_job(spec, request_id=request_id))
        return self.history.submitted[request_id].id

    def _cancel(self, client: virial.SyncClient, job: str) -> None:
        request_id = f"cancel-{job}"
        state = client.cancel_job(job, request_id=request_id).state
        self.history.cancelled[job] = state

    def _hold(self, client: virial.SyncClient, owner: str) -> None:
        """Only this thread places and lifts this owner's hold."""
        stands = self.history.held.get(owner, False)
        if self._stands(client, owner) != stands:
            self.history.violations.append(f"hold of {owner}: acknowledged {stands}, found {not stands}")
        if stands:
            client.release_hold(self.held_node, owner)
        else:
            client.place_hold(self.held_node, owner, "MAINTENANCE")
        self.history.held[owner] = not stands
        if self._stands(client, owner) == stands:
            self.history.violations.append(f"hold of {owner}: acknowledged, and not done")

    def _stands(self, client: virial.SyncClient, owner: str) -> bool:
        return any(hold.owner == owner for hold in client.get_node(self.held_node).holds)


def check(rack: Rack, history: History, jobs: list[Job], events: list[Event]) -> list[str]:
    """Every way in which what is there now differs from what was acknowledged, or ran twice."""
    wrong = list(history.violations)
    by_id = {job.id: job for job in jobs}
    names = [job.spec.name for job in jobs]
    wrong += [f"{name} stands {names.count(name)} times" for name in sorted(set(names)) if names.count(name) > 1]
    for request_id, job in history.submitted.items():
        found = by_id.get(job.id)
        if found is None:
            wrong.append(f"the submission {request_id} of {job.id} is lost")
        elif (found.spec, found.create_time_unix_ns) != (job.spec, job.create_time_unix_ns):
            wrong.append(f"{job.id} is not what was submitted")
    for job_id, state in history.cancelled.items():
        found = by_id[job_id].state if job_id in by_id else JobState.PENDING
        if not found.ended or (state is not JobState.SUCCEEDED and found is not JobState.CANCELLED):
            wrong.append(f"{job_id}: cancelled with {state}, now {found}")
    for job in jobs:
        if job.generation > 1 or job.restarts:
            wrong.append(f"{job.id} was restarted: generation {job.generation}")
        if job.state is JobState.FAILED:
            wrong.append(f"{job.id} failed: {job.first_error}")
    return wrong + _check_events(history, events) + _check_nodes(rack, history) + _check_saved(rack, by_id, events)


def _check_events(history: History, events: list[Event]) -> list[str]:
    there = {event.sequence: event for event in events}
    wrong = [f"event {n} was shown and is gone" for n in history.events if n not in there]
    wrong += [f"event {n} has changed" for n, event in history.events.items() if there.get(n, event) != event]
    if sorted(there) != list(range(1, len(there) + 1)):
        wrong.append("the events have gaps")
    return wrong


def _check_nodes(rack: Rack, history: History) -> list[str]:
    """What the nodes themselves know: which rank ran where, how often, and under which token."""
    wrong: list[str] = []
    where: dict[str, str] = {}
    for (node, slot), status in rack.statuses().items():
        if where.setdefault(slot, node) != node:
            wrong.append(f"{slot} was started on {where[slot]} and on {node}")
        key = slot.rpartition(".")[0]
        granted, token = history.epochs.get(key), tuple(status["token"]["epoch"])
        if granted is not None and granted != token:
            wrong.append(f"{slot} runs under {token}, its lease was granted at {granted}")
    starts = [tuple(line[:3]) for line in rack.lines("starts")]
    wrong += [f"{start} ran {starts.count(start)} times" for start in sorted(set(starts)) if starts.count(start) > 1]
    return wrong


def _check_saved(rack: Rack, jobs: dict[str, Job], events: list[Event]) -> list[str]:
    """A rank that was told COMMITTED may throw away what it would need to start earlier."""
    wrong: list[str] = []
    committed = {(e.job, dict(e.numbers).get("step")) for e in events if e.kind == "checkpoint.committed"}
    newest: dict[str, int] = {}
    for job, _, rank, step, _ in rack.lines("saved"):
        newest[job] = max(int(step), newest.get(job, 0))
        if (job, int(step)) not in committed:
            wrong.append(f"{job}: rank {rank} was told that step {step} is committed; it is not")
    for job, step in newest.items():
        kept = {c.step for c in jobs[job].checkpoints if c.state == "COMMITTED"} if job in jobs else set[int]()
        if max(kept, default=0) < step:
            wrong.append(f"{job}: the checkpoint of step {step} is not kept; there are {sorted(kept)}")
    return wrong
