"""SIGKILL of the controller at random moments, under load: what was acknowledged holds, and nothing restarts."""

from __future__ import annotations

import random
import time

import pytest

from tests.chaos.load import Load, check
from tests.chaos.rack import LONG, SEED, Rack, rack, until
from virial.models import JobState

KILLS = 40 if LONG else 8


def kill_and_restart(rack: Rack, load: Load, rng: random.Random) -> bool:
    """True when it was killed while it served; False: while it started."""
    ports = rack.controller.data_dir / "ports.json"
    if rng.random() > 0.25:
        history, before = load.history, len(load.history.submitted)
        until(lambda: history.violations or len(history.submitted) >= before + 2, "clients are served")
        time.sleep(rng.uniform(0.0, 1.5))
    else:
        time.sleep(rng.uniform(0.0, 1.0))
    served = ports.exists()
    rack.kill(rack.controller)
    rack.restart()
    return served


@pytest.mark.timeout(1800)
def test_nothing_acknowledged_is_lost_whenever_the_controller_is_killed() -> None:
    rng = random.Random(SEED)
    with rack(nodes=3) as made:
        stop = made.base / "stop"
        client = made.client()
        gang = client.submit_job(made.spec("gang", "--until", str(stop), ranks=2), request_id="gang")
        pids = made.until_running(gang.id, 2)
        leader = client.get_status().leader_epoch
        load = Load(made, SEED)
        load.start()
        served = sum(kill_and_restart(made, load, rng) for _ in range(KILLS))
        until(lambda: made.lines("saved"), "a checkpoint")
        load.stop()
        made.until_ready(2)  # a hold may stand on the third
        assert client.get_status().leader_epoch > leader
        assert made.pids(gang.id) == pids
        load.history.answered("gang", gang)
        load.history.saw_job(client.get_job(gang.id))
        for owner, stands in load.history.held.items():
            if stands:
                client.release_hold(load.held_node, owner)
        stop.touch()
        jobs = made.until_all_ended()
        wrong = check(made, load.history, jobs, client.list_events())
        assert not wrong, f"seed {SEED}:\n" + "\n".join(wrong)
        # It was at work: answers got lost, requests were repeated, jobs ran and were cancelled, leases were read.
        history = load.history
        assert served >= KILLS // 3
        assert len(history.submitted) >= KILLS
        assert history.repeats
        assert history.unanswered
        assert history.cancelled
        assert history.epochs
        assert sum(job.state is JobState.SUCCEEDED for job in jobs) > 1
        assert len(made.lines("saved")) > KILLS


@pytest.mark.timeout(300)
def test_the_history_catches_a_controller_that_answers_before_it_commits() -> None:
    rng = random.Random(SEED)
    with rack(nodes=1) as made:
        module = made.controller.argv.index("controld")
        made.controller.argv[module] = "tests.chaos.hasty_controld"
        load = Load(made, SEED, clients=4)
        load.start()
        for _ in range(4):
            kill_and_restart(made, load, rng)
        made.controller.argv[module] = "controld"
        kill_and_restart(made, load, rng)
        load.stop()
        made.until_ready(0)
        client = made.client()
        wrong = check(made, load.history, client.list_jobs(), client.list_events())
        assert any("lost" in line or "does not exist" in line for line in wrong), wrong
