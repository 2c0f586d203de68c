"""`./run sim SEEDS=100 [SEED=7 [WORLD=several]] [MUTATION=name]`: seeds, then defects that must be caught.

Odd seeds run in the world of several controllers, even ones in that of one, unless told otherwise. The last line is
JSON. A world that fails prints the command that runs it again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from tests.sim.mutation import SEEDS_MAX
from tests.sim.mutations import BY_NAME, MUTATIONS
from tests.sim.runner import Errand, results, run, serve
from tests.sim.world import Result

SEEDS_FILE = Path(__file__).with_name("seeds.txt")
TAIL_LINES = 120


ONE, SEVERAL = "one", "several"


def known_errands() -> list[Errand]:
    """Seeds that failed once, and the world each did in: run again each time."""
    lines = SEEDS_FILE.read_text().splitlines()
    words = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    return [Errand(int(seed), several=world == SEVERAL) for seed, world, *_ in words]


def usual_errand(seed: int) -> Errand:
    return Errand(seed, several=seed % 2 == 1)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./run sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=25, help="how many seeds, from 1 on (those in seeds.txt as well)")
    parser.add_argument("--seed", type=int, help="only this one; prints what happened, however it ends")
    parser.add_argument("--world", choices=(ONE, SEVERAL), help="with --seed: of one controller, or of several")
    parser.add_argument("--mutation", choices=sorted(BY_NAME), help="only this defect")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--log", type=Path, help="with --seed: write every line of what happened to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def replay(errand: Errand, log: Path | None) -> bool:
    """Run one seed here, telling what happened. True when nothing was violated."""
    result = run(errand, keep_log=True)
    if log is not None:
        log.write_text("\n".join(result.lines) + "\n")
    print("\n".join(result.lines[-TAIL_LINES:]))
    tell_violations(errand, result)
    print(f"seed {errand.seed}: trace {result.digest}, {result.virtual_s:.0f} virtual s, {sum_up(result.counts)}")
    print(json.dumps({"seeds": 1, "violations": len(result.violations), "commands": result.commands} | tally(result)))
    return not result.violations


def tally(result: Result) -> dict[str, object]:
    return {"faults": result.faults, "mutations_caught": "0/0"}


def sum_up(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def tell_violations(errand: Errand, result: Result) -> None:
    for checker, text in result.violations[:10]:
        print(f"  {checker}: {text}")
    if len(result.violations) > 10:
        print(f"  ... {len(result.violations) - 10} more")
    if result.violations:
        how = f"MUTATION={errand.mutation}" if errand.mutation else f"WORLD={SEVERAL if errand.several else ONE}"
        print(f"  replay: ./run sim SEED={errand.seed} {how}", flush=True)


def run_seeds(errands: list[Errand], jobs: int) -> tuple[int, Counter[str]]:
    """How many violations, and the sums of everything counted."""
    violations = 0
    sums: Counter[str] = Counter()
    for errand, result in results(errands, jobs):
        violations += len(result.violations)
        sums.update({"commands": result.commands, "faults": result.faults, "virtual_s": round(result.virtual_s)})
        sums.update(result.counts)
        if result.violations:
            print(f"seed {errand.seed}: {len(result.violations)} violations")
            tell_violations(errand, result)
    return violations, sums


def run_mutations(names: list[str], jobs: int) -> int:
    """Print the table of defects; how many were caught. Each starts with the seed known to bring it out."""
    tried: Counter[str] = Counter()
    caught: dict[str, str] = {}
    while missing := [name for name in names if name not in caught and tried[name] < SEEDS_MAX]:
        errands = [Errand(BY_NAME[name].seeds()[tried[name]], name) for name in missing]
        for errand, result in results(errands, jobs):
            tried[errand.mutation] += 1
            wanted = BY_NAME[errand.mutation].checkers
            hit = next(((checker, text) for checker, text in result.violations if checker in wanted), None)
            if hit is not None:
                caught[errand.mutation] = f"by {hit[0]}, seed {errand.seed}: {hit[1]}"
    for name in names:
        print(f"{name:<28}{caught.get(name, f'NOT CAUGHT within {tried[name]} seeds')[:150]}")
    return len(caught)


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    if arguments.worker:
        serve(sys.stdin, sys.stdout)
        return 0
    if arguments.seed is not None:
        usual = usual_errand(arguments.seed)
        several = usual.several if arguments.world is None else arguments.world == SEVERAL
        return 0 if replay(Errand(arguments.seed, arguments.mutation or "", several), arguments.log) else 1
    violations, sums, seeds = 0, Counter[str](), list[Errand]()
    if arguments.mutation is None:
        seeds = list(dict.fromkeys([*known_errands(), *map(usual_errand, range(1, arguments.seeds + 1))]))
        violations, sums = run_seeds(seeds, arguments.jobs)
        print(f"{len(seeds)} seeds, {sums['virtual_s']} virtual s: {sum_up(dict(sums))}", flush=True)
    names = [arguments.mutation] if arguments.mutation else [mutation.name for mutation in MUTATIONS]
    caught = run_mutations(names, arguments.jobs)
    told = {"seeds": len(seeds), "violations": violations, "commands": sums["commands"], "faults": sums["faults"]}
    print(json.dumps(told | {"mutations_caught": f"{caught}/{len(names)}"}))
    return 0 if not violations and caught == len(names) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
