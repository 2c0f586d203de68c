"""One part is away: the others go on, nobody restarts what runs, and leases still end what nobody renews."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Generator

import pytest

from tests.chaos.rack import LONG, SECOND_NS, Rack, alive, boottime_ns, rack, until
from virial.local import guardian_pid
from virial.models import JobState, Writes

pytestmark = pytest.mark.timeout(300)
OUTAGE_S = 50 if LONG else 30  # below the default fence_after, 60 s
FENCE_S = 8


@pytest.fixture(scope="module")
def made() -> Generator[Rack]:
    with rack(nodes=3) as made:
        yield made


def until_further(made: Rack, job: str, steps: int) -> None:
    """Every rank has gone so many steps beyond where it is now, by the nodes' own files or the controller."""
    client = made.client()

    def steps_now() -> dict[str, int]:
        current = client.get_job(job).current
        assert current is not None
        return {m.slot: m.progress_step or 0 for m in current.members if m.rank is not None}

    before = steps_now()
    until(lambda: all(step >= before[slot] + steps for slot, step in steps_now().items()), f"{job} goes on")


def finish(made: Rack, job: str) -> None:
    (made.base / f"stop-{job}").touch()
    ended = made.until_ended(job)
    assert (ended.state, ended.generation, ended.restarts) == (JobState.SUCCEEDED, 1, 0)


def test_case_c13_noded_killed_alone_restarts_no_gang(made: Rack) -> None:
    client = made.client()
    for writes in (Writes.TOKEN, Writes.SHARED):
        name = f"adopted-{writes}"
        spec = made.spec(name, "--until", str(made.base / f"stop-{name}"), ranks=3, writes=writes)
        job = client.submit_job(spec, job_id=name)
        pids = made.until_running(job.id, 3)
        guardians = [guardian_pid(part.data_dir) for part in made.cluster.agents.values()]
        victims = list(made.cluster.agents.values())
        for part in victims:  # alone, and then all at once
            made.kill(part)
            if part is victims[0]:
                made.restart()
                until_further(made, job.id, 5)
        made.restart()
        until_further(made, job.id, 10)
        assert made.pids(job.id) == pids
        assert all(map(alive, pids.values()))
        assert [guardian_pid(part.data_dir) for part in made.cluster.agents.values()] == guardians
        finish(made, job.id)


def test_a_controller_that_is_away_for_half_a_minute_kills_no_task(made: Rack) -> None:
    client = made.client()
    name = "patient"
    job = client.submit_job(made.spec(name, "--until", str(made.base / f"stop-{name}"), ranks=3), job_id=name)
    pids = made.until_running(job.id, 3)
    epoch = client.get_job(job.id).current
    made.kill(made.controller)
    try:
        for _ in range(OUTAGE_S):
            time.sleep(1)
            assert all(map(alive, pids.values()))
    finally:
        made.restart()
    made.until_ready()
    until_further(made, job.id, 10)
    assert made.pids(job.id) == pids
    after = client.get_job(job.id).current
    assert epoch is not None
    assert after is not None
    assert after.epoch == epoch.epoch
    finish(made, job.id)


def test_a_second_controller_on_the_same_directory_is_refused(made: Rack) -> None:
    assert made.controller.process is not None
    pid = made.controller.process.pid
    client = made.client()
    leader = client.get_status().leader_epoch
    argv = [*made.controller.argv]
    argv[argv.index("--listen") + 1] = "127.0.0.1:0"
    python = ("setpriv", "--pdeathsig", "KILL", made.python)
    done = subprocess.run([*python, *argv], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert line.startswith("controld: ")
    assert f"in use by another controld (pid {pid})" in line
    assert client.get_status().leader_epoch == leader
    assert made.controller.alive


def test_an_escaped_and_a_deaf_task_are_dead_after_cancel(made: Rack) -> None:
    client = made.client()
    for name, flags in (("escapes", ("--escape",)), ("deaf", ("--deaf",)), ("both", ("--escape", "--deaf"))):
        job = client.submit_job(made.spec(name, *flags, ranks=2), job_id=name)
        pids = list(made.until_running(job.id, 2).values())
        if "--escape" in flags:
            pids += until(lambda: made.escaped(2), "a child of each rank has escaped")
        assert [pid for pid in pids if not alive(pid)] == []
        current = client.get_job(job.id).current
        assert current is not None
        client.cancel_job(job.id)
        ended = made.until_ended(job.id)
        assert ended.state is JobState.CANCELLED
        # CANCELLED is said once all of it is proven gone.
        assert [pid for pid in pids if alive(pid)] == []
        for member in current.members:
            exit_ = until(lambda m=member: made.exit_of(m.node, m.slot), f"{member.slot} is said to have ended")
            assert exit_["reason"] == "STOPPED"


def test_noded_away_for_good_frees_nothing_before_its_guardian_has_killed(made: Rack) -> None:
    """`writes: shared`: the lost node's rank may write until its lease ends, so nobody replaces it before."""
    client = made.client()
    name = "fenced"
    stop = made.base / f"stop-{name}"
    spec = made.spec(name, "--until", str(stop), ranks=2, writes=Writes.SHARED, fence_after_ns=FENCE_S * SECOND_NS)
    job = client.submit_job(spec, job_id=name)
    pids = made.until_running(job.id, 2)
    until_further(made, job.id, 10)
    current = client.get_job(job.id).current
    assert current is not None
    cut = next(member for member in current.members if member.rank == 0)
    slots = {member.slot: member.node for member in current.members}
    made.kill(made.node(cut.node))
    try:
        suspected = until(
            lambda: [e for e in client.list_events(node=cut.node) if e.kind == "node.suspect"], f"{cut.node} suspect"
        )
        assert suspected
        ended = until(lambda: made.exit_of(cut.node, cut.slot), "the lease ends the cut rank")
        assert not alive(pids[cut.slot])
        generation = client.get_job(job.id).generation
        assert ended["reason"] == "LEASE_EXPIRED"
        assert ended["at_ns"] >= made.statuses()[cut.node, cut.slot]["deadline_ns"]
        # The controller's deadline is later than the agent's: grace, and the way of the last renewal.
        assert generation == 1
        again = made.until_running(job.id, 2, generation=2)
        first = made.statuses()
        last_exit_ns = max(first[node, slot]["exit"]["at_ns"] for slot, node in slots.items())
        assert last_exit_ns < boottime_ns()
        starts_ns = [made.start_ns(pid) for pid in again.values()]
        assert min(starts_ns) > last_exit_ns
        assert all(node != cut.node for (node, slot) in first if slot.startswith(f"{name}.2."))
        restored = client.get_job(job.id).current
        assert restored is not None
        assert restored.restored_step >= 5
        stop.touch()
        ended_job = made.until_ended(job.id)
        assert (ended_job.state, ended_job.generation) == (JobState.SUCCEEDED, 2)
    finally:
        made.restart()
    made.until_ready()


def test_agents_of_a_store_that_was_lost_join_the_one_that_takes_its_place() -> None:
    """Their slots and leader epochs are from before: a store whose tokens began anew would refuse them for ever."""
    with rack(2) as r:
        job = r.client().submit_job(r.spec("lost", ranks=2, fence_after_ns=6 * SECOND_NS)).id
        r.until_running(job, ranks=2)
        r.kill(r.controller)
        shutil.rmtree(r.controller.data_dir)
        r.controller.had_state = False  # an operator's decision: a supervisor would not start it over nothing
        r.restart()
        until(lambda: not r.pids(job), "the ranks of the lost store end with their leases")
        r.until_ready()
        again = r.client().submit_job(r.spec("lost", "--steps", "5", ranks=2)).id
        assert r.until_ended(again).state is JobState.SUCCEEDED
