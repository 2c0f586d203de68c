"""`./run demo` as its users run it: without a network, as nobody in particular, two at once, ended at any moment.

That one rank's corrupted gradient changes the digest is in tests/unit/test_train_run.py.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest

from tests.chaos.rack import LONG, SEED
from tests.demo.demo_support import (
    KEYS_KILL,
    KEYS_PARTITION,
    NOBODY,
    SHORT,
    Demo,
    demo,
    ordinary_user,
    ordinary_user_without_namespaces,
    without_network,
)

pytestmark = pytest.mark.timeout(600)
USER = NOBODY if os.geteuid() == 0 else None


def check_report(report: dict[str, Any]) -> None:
    fault = report["fault"]
    assert set(report) == (KEYS_KILL if fault == "kill" else KEYS_PARTITION)
    assert report["ok"] is True
    assert report["digest_equal"] is True
    assert report["generations"] == 2
    assert report["lost_node"].startswith("node-")
    assert report["restored_step"] >= 20
    assert report["steps_redone"] >= 0
    assert report["recovery_s"] > report["detect_s"] > 0
    if fault == "partition":
        assert report["overlap_s"] == 0
        assert report["gap_s"] > 0
        assert report["cut_rank_exit_reason"] == "LEASE_EXPIRED"


def finish(running: Demo, fencing: str = "") -> None:
    check_report(running.report())
    assert f"fencing {fencing}" in running.text
    running.check_nothing_is_left()


def test_three_at_once_without_a_network_and_as_ordinary_users() -> None:
    with (
        demo(*SHORT, "--lose-rank=0", by=without_network()) as alone,
        demo(*SHORT, "--fault=partition", "--lose-rank=1", by=ordinary_user(), user=USER) as cut,
        demo(*SHORT, "--lose-rank=2", by=ordinary_user_without_namespaces(), user=USER) as weak,
    ):
        finish(alone)
        finish(weak, "weak")
        finish(cut, "pidns")


@pytest.mark.skipif(not LONG, reason="minutes; VIRIAL_LONG=1 runs it")
@pytest.mark.parametrize("fault", ["kill", "partition"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_whichever_rank_is_lost_in_whichever_way(fault: str, rank: int) -> None:
    with (
        demo(*SHORT, f"--fault={fault}", f"--lose-rank={rank}") as one,
        demo(*SHORT, f"--fault={fault}", f"--lose-rank={rank}", by=ordinary_user(), user=USER) as other,
    ):
        finish(one)
        finish(other)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_at_any_moment_it_leaves_nothing(number: signal.Signals) -> None:
    rng = random.Random(f"{SEED}/{number}")
    for _ in range(15 if LONG else 1):
        with demo(*SHORT, "--fault=partition") as running:
            time.sleep(rng.uniform(0.5, 12))
            running.process.send_signal(number)
            if rng.random() < 0.5:  # impatient
                time.sleep(rng.uniform(0, 1))
                running.process.send_signal(number)
            out, err = running.process.communicate(timeout=60)
            assert running.process.returncode == 130, out + err
            assert "Traceback" not in out + err
            running.check_nothing_is_left()
