"""The planner process: reads questions on standard input, writes plans on standard output, until the input ends.

python -m controld.matching.worker
"""

from __future__ import annotations

import sys
import traceback
from contextlib import suppress
from typing import BinaryIO

from controld.core.ids import NodeUid
from controld.matching import wire
from controld.matching.engine import plan
from controld.matching.port import NodeView, Planner, Snapshot


class Worker:
    """What the process knows between questions: the nodes."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._nodes: dict[NodeUid, NodeView] = {}

    def handle(self, message: wire.ToPlanner) -> wire.FromPlanner | None:
        match message:
            case wire.Nodes(changed, gone):
                for node in changed:
                    self._nodes[node.uid] = node
                for uid in gone:
                    self._nodes.pop(uid, None)
                return None
            case wire.Ask(number, revision, pending):
                nodes = tuple(self._nodes[uid] for uid in sorted(self._nodes))
                try:
                    return wire.Answer(number, self._planner(Snapshot(revision, nodes), pending))
                except Exception as error:  # noqa: BLE001 - a broken plan is told; the process stays
                    traceback.print_exc(file=sys.stderr)
                    return wire.Failed(number, repr(error))


def _read(source: BinaryIO) -> bytes | None:
    prefix = source.read(wire.LENGTH_BYTES)
    if len(prefix) < wire.LENGTH_BYTES:
        return None
    length = wire.length_of(prefix)
    data = source.read(length)
    return data if len(data) == length else None


def serve(source: BinaryIO, sink: BinaryIO, planner: Planner) -> None:
    """Until the input ends: the controller is gone then, however it went. Raises WireError."""
    worker = Worker(planner)
    sink.write(wire.frame(wire.Ready()))
    sink.flush()
    while (data := _read(source)) is not None:
        answer = worker.handle(wire.to_planner(data))
        if answer is not None:
            sink.write(wire.frame(answer))
            sink.flush()


def main() -> None:
    sink = sys.stdout.buffer
    # Whatever prints must not end up between frames.
    sys.stdout = sys.stderr
    try:
        serve(sys.stdin.buffer, sink, plan)
    except BrokenPipeError:  # the controller was killed: nobody is there to be told
        with suppress(BrokenPipeError):
            sink.close()


if __name__ == "__main__":
    main()
