"""A short run of the simulation, in this process: seeds hold, defects are caught, equal seeds give equal worlds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.sim.__main__ import known_errands
from tests.sim.mutation import Mutation
from tests.sim.mutations import MUTATIONS
from tests.sim.runner import ROOT, Errand, run
from tests.sim.world import Shape

SHORT = Shape(trouble_s=200, length_s=0, commands=30, faults=8)
SHORT_SEVERAL = replace(SHORT, commands=60, several=True)


@pytest.mark.parametrize("errand", [*known_errands(), Errand(1), Errand(2), Errand(1, several=True)], ids=str)
def test_nothing_that_was_promised_is_broken(errand: Errand) -> None:
    result = run(errand)
    assert result.violations == (), errand
    assert result.faults >= 10
    assert result.commands >= (200 if errand.several else 50)
    assert result.virtual_s >= 600


# Those of a row; `./run sim`, in the same stage, judges every one of them.
@pytest.mark.parametrize(
    "defect", [pytest.param(m, id=m.name, marks=[pytest.mark.row(*m.rows)]) for m in MUTATIONS if m.rows]
)
def test_a_defect_is_caught_by_the_checker_that_is_there_for_it(defect: Mutation) -> None:
    for seed in defect.seeds():
        accused = {checker for checker, _ in run(Errand(seed, defect.name)).violations}
        if accused & set(defect.checkers):
            return
    pytest.fail(f"no seed of {list(defect.seeds())} brings it out: ./run sim MUTATION={defect.name}")


@pytest.mark.parametrize("shape", ["SHORT", "SHORT_SEVERAL"])
def test_a_seed_is_the_same_world_every_time_and_in_every_process(shape: str) -> None:
    """Also where strings hash otherwise: nothing may depend on the order of a set."""
    digests = {run(Errand(5), shape=globals()[shape]).digest}
    for hash_seed in ("1", "2"):
        script = (
            f"from tests.sim.runner import Errand, run; from tests.sim.test_sim_short import {shape}; "
            f"import json; print(json.dumps(run(Errand(5), shape={shape}).digest))"
        )
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        digests.add(json.loads(done.stdout))
    assert len(digests) == 1


def test_another_seed_is_another_world() -> None:
    assert run(Errand(5), shape=SHORT).digest != run(Errand(6), shape=SHORT).digest
