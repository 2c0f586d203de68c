"""A gang survives the loss of a node, on this machine: `./run demo [--fault kill|partition]`.

One controld and four noded are started, a training job of three ranks and a spare is submitted, and after two
committed checkpoints one node is killed outright or cut off. Then the same job runs undisturbed on a fresh cluster,
and the digests of the final parameters are compared. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.scenario import DemoFailed, Options, run_with_fault, run_without_fault
from demo.timeline import Printer

from virial import VirialError

EXIT_INTERRUPTED = 130


def parse_options() -> tuple[Options, str]:
    parser = argparse.ArgumentParser(prog="./run demo", description=__doc__)
    parser.add_argument("--fault", choices=("kill", "partition"), default="kill", help="what happens to one node")
    parser.add_argument("--steps", type=int, default=400, help="training steps")
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--step-ms-min", type=int, default=50, help="pace: a step takes at least this long")
    parser.add_argument("--lose-rank", type=int, choices=(0, 1, 2), default=1, help="whose node is lost")
    parser.add_argument("--fence-after-s", type=int, default=8, help="for partition: the lease of each rank")
    parser.add_argument("--timeout-s", type=float, default=180.0, help="give up when something takes longer")
    parser.add_argument("--keep", metavar="DIRECTORY", default="", help="work here and keep everything, logs too")
    given = parser.parse_args()
    options = Options(
        fault=given.fault,
        steps=given.steps,
        checkpoint_every=given.checkpoint_every,
        step_ms_min=given.step_ms_min,
        lose_rank=given.lose_rank,
        timeout_s=given.timeout_s,
        fence_after_s=given.fence_after_s,
    )
    return options, given.keep


def demo(options: Options, directory: Path) -> dict[str, object]:
    printer = Printer()
    printer.say(f"first run: one node will be lost ({options.fault})")
    faulty = run_with_fault(options, printer, directory / "faulty")
    printer.say("second run: the same job without a fault, on a fresh cluster")
    quiet = run_without_fault(options, printer, directory / "quiet")
    figures = faulty.figures
    restored = figures.get("restored_step")
    ok = (
        faulty.digest == quiet.digest
        and faulty.job.generation == 2
        and quiet.job.generation == 1
        and isinstance(restored, int)
        and restored > 0
    )
    if options.fault == "partition":
        gap_s = figures.get("gap_s")
        ok = ok and isinstance(gap_s, float) and gap_s > 0 and figures.get("overlap_s") == 0
        ok = ok and figures.get("cut_rank_exit_reason") == "LEASE_EXPIRED"
    return {
        "ok": ok,
        "fault": options.fault,
        "lost_node": figures.pop("lost_node", None),
        "generations": faulty.job.generation,
        "restored_step": figures.pop("restored_step", None),
        "steps_redone": figures.pop("steps_redone", None),
        "digest_equal": faulty.digest == quiet.digest,
        **figures,
    }


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """Stop once: whoever presses Ctrl-C again would otherwise break off the stopping, and leave something behind."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    options, keep = parse_options()
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, interrupt)
    try:
        if keep:
            report = demo(options, Path(keep).resolve())
        else:
            with tempfile.TemporaryDirectory(prefix="virial-demo-") as scratch:
                report = demo(options, Path(scratch))
    except KeyboardInterrupt:
        print("interrupted; everything the demo started has been stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (DemoFailed, VirialError, OSError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        print(json.dumps({"ok": False, "fault": options.fault, "error": str(error)}))
        return 1
    print(json.dumps(report))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
