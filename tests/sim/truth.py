"""What truly ran where and when, by the world's own clock: no party of the protocol is asked.

Promises 1 and 3 are judged here at each start of a rank: nothing it shares a device, a core or a job with may run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from controld.core.capacity import WHOLE_THOUSANDTHS
from controld.core.model import Member
from controld.core.spec import Writes
from controld.core.state import State
from virialpb.ids import SlotId, Token


@dataclass(eq=False, slots=True)
class Run:
    """One rank, from exec to the end of its last process. `exempt`: its whole host was suspended, clocks and all."""

    host: str
    slot: SlotId
    token: Token
    member: Member
    writes: Writes
    start_ns: int
    end_ns: int | None = None
    finished: bool = False
    exempt: bool = False


@dataclass(slots=True)
class Truth:
    """`accuse` takes a checker's name and what it found."""

    accuse: Callable[[str, str], None]
    now_ns: Callable[[], int]
    capacity: dict[str, int] = field(default_factory=dict[str, int])
    running: dict[str, list[Run]] = field(default_factory=dict[str, list[Run]])
    finished: set[tuple[str, int, int]] = field(default_factory=set[tuple[str, int, int]])
    runs: list[Run] = field(default_factory=list[Run])
    _once: set[tuple[SlotId, Token]] = field(default_factory=set[tuple[SlotId, Token]])

    def start(self, host: str, slot: SlotId, token: Token, state: State) -> Run | None:
        """A rank begins to run. `state` is what the store holds; None: no commit ever granted this."""
        generation = state.generations.get(token.job, {}).get(token.generation)
        member = generation.member(slot) if generation is not None else None
        job = state.jobs.get(token.job)
        if generation is None or member is None or job is None or state.epoch_of(generation) != token.epoch:
            self.accuse("device", f"{slot} runs on {host} under {token}, which was never granted")
            return None
        if (slot, token) in self._once:
            self.accuse("device", f"{slot} is run a second time under {token}, on {host}")
        self._once.add((slot, token))
        run = Run(host, slot, token, member, job.spec.writes, self.now_ns())
        self._judge_devices(run)
        self._judge_generations(run)
        self.running.setdefault(host, []).append(run)
        self.runs.append(run)
        return run

    def end(self, run: Run) -> None:
        if run.end_ns is None:
            run.end_ns = self.now_ns()
            self.running[run.host].remove(run)
            if run.finished and run.member.rank is not None:
                self.finished.add((run.token.job, run.token.generation, run.member.rank))

    def running_slot(self, slot: SlotId) -> list[Run]:
        return [r for runs in self.running.values() for r in runs if r.slot == slot]

    def _judge_devices(self, new: Run) -> None:
        runs = [r for r in self.running.get(new.host, []) if not r.exempt]
        cpu_millis = sum(r.member.cpu_millis for r in (*runs, new))
        if cpu_millis > self.capacity[new.host]:
            others = ", ".join(r.slot for r in runs)
            self.accuse("device", f"{new.slot} starts on {new.host} beside {others}: {cpu_millis} thousandths of cores")
        use: Counter[str] = Counter()
        for run in (*runs, new):
            for grant in run.member.devices:
                use[grant.device_key] += grant.share_thousandths
        for key, thousandths in use.items():
            if thousandths > WHOLE_THOUSANDTHS:
                holders = ", ".join(r.slot for r in (*runs, new) if any(g.device_key == key for g in r.member.devices))
                self.accuse("device", f"{key} of {new.host} is held by {holders} at once")

    def _judge_generations(self, new: Run) -> None:
        if new.writes is not Writes.SHARED:
            return
        for runs in self.running.values():
            for run in runs:
                if run.token.job == new.token.job and run.token.generation != new.token.generation and not run.exempt:
                    text = f"{new.slot} starts on {new.host} while {run.slot} still runs on {run.host}"
                    self.accuse("two_generations", f"{text}, and the job writes elsewhere")
