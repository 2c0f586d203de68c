"""Where a shard's two-phase save is agreed: with the controller through the guardian, or alone in a directory."""

from __future__ import annotations

import os
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from virial.task._channel import CallFailed, Channel, Fields
from virial.task._environment import CheckpointToRestore
from virialpb.shardfile import Manifest, ShardCorrupt, read_manifest

ASK_AGAIN_S = 5.0
"""Longer than an agent's restart (1 s); a quarter of the default deadline of a phase."""
STATES_KEPT = 64
"""Pushed states remembered; a task looks at the newest few."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A checkpoint that may be written: its id and the directory that the controller named."""

    checkpoint_id: str
    directory: str


class Registry(Protocol):
    """The phases of a save. Each raises CallFailed, at the latest after its `timeout_s`."""

    def begin(self, step: int, timeout_s: float) -> Begun:
        """Ask for a checkpoint of `step`. Its directory may not exist yet."""
        ...

    def prepared(self, begun: Begun, manifest: Manifest, timeout_s: float) -> str:
        """Report a durable shard. Returns PREPARED, COMMITTED or ABORTED."""
        ...

    def wait(self, begun: Begun, timeout_s: float) -> str:
        """Wait for the whole gang. Returns COMMITTED or ABORTED."""
        ...

    def failed(self, begun: Begun, reason: str, message: str) -> None:
        """Tell that this rank's shard will not come. Never waits, never raises."""
        ...

    def state(self, checkpoint_id: str) -> str | None:
        """COMMITTED or ABORTED once known without asking."""
        ...


class GangRegistry:
    """The controller's registry, reached through the guardian."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._states: OrderedDict[str, str] = OrderedDict()

    def begin(self, step: int, timeout_s: float) -> Begun:
        result = self._ask("checkpoint_begin", {"step": step}, timeout_s)
        directory = _text(result, "directory")
        if not os.path.isabs(directory):
            raise CallFailed("PROTOCOL", f"checkpoint_begin: directory {directory!r:.200} is not absolute")
        return Begun(checkpoint_id=_text(result, "checkpoint_id"), directory=directory)

    def prepared(self, begun: Begun, manifest: Manifest, timeout_s: float) -> str:
        args: Fields = {
            "checkpoint_id": begun.checkpoint_id,
            "step": manifest.identity.step,
            "size_bytes": manifest.size_bytes,
            "digest": manifest.digest,
            "file": manifest.file,
        }
        return self._known(begun, _text(self._ask("checkpoint_prepared", args, timeout_s), "state"))

    def wait(self, begun: Begun, timeout_s: float) -> str:
        args = {"checkpoint_id": begun.checkpoint_id}
        return self._known(begun, _text(self._ask("checkpoint_wait", args, timeout_s), "state"))

    def failed(self, begun: Begun, reason: str, message: str) -> None:
        args = {"checkpoint_id": begun.checkpoint_id, "reason": reason, "message": message[:1000]}
        self._channel.notify("checkpoint_failed", args)

    def state(self, checkpoint_id: str) -> str | None:
        return self._states.get(checkpoint_id)

    def handle_push(self, push: Fields) -> None:
        """Remember a pushed state. Called by the reading thread."""
        checkpoint_id, state = push.get("checkpoint_id"), push.get("state")
        if isinstance(checkpoint_id, str) and isinstance(state, str):
            self._states[checkpoint_id] = state
            while len(self._states) > STATES_KEPT:
                self._states.popitem(last=False)

    def _ask(self, call: str, args: Fields, timeout_s: float) -> Fields:
        """Call, and ask again while unanswered: an agent that restarts forgets calls that it had taken on.

        All three calls are idempotent: a checkpoint is known by its step or id, and a shard by its rank.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_s = max(0.0, deadline - time.monotonic())
            try:
                return self._channel.call(call, args, min(ASK_AGAIN_S, remaining_s))
            except CallFailed as failure:
                if failure.reason != "TIMEOUT":
                    raise
                if time.monotonic() >= deadline:
                    raise CallFailed("TIMEOUT", f"{call}: no answer within {timeout_s:g} s") from None

    def _known(self, begun: Begun, state: str) -> str:
        if state not in ("PREPARED", "COMMITTED", "ABORTED"):
            raise CallFailed("PROTOCOL", f"checkpoint {begun.checkpoint_id}: unknown state {state!r:.40}")
        return state


class LocalRegistry:
    """Stand-alone: a directory on this machine (or a shared one), no controller.

    Each run of the script makes directories of its own, `step-<step>.run-<n>`, n being one above the highest that was
    there when the run began. Ranks that disagree on n (one started much later) write incomplete checkpoints, which are
    never restored: a mix of two runs cannot come about. Nothing is deleted.
    """

    _NAME = re.compile(r"step-(\d{12})\.run-(\d{4,9})")

    def __init__(self, directory: str, world_size: int) -> None:
        self._directory = os.path.abspath(directory) if directory else ""
        self._world_size = world_size
        self._run = 1 + max((run for _, run, _ in self._listed()), default=0)

    def begin(self, step: int, timeout_s: float) -> Begun:
        del timeout_s
        if not self._directory:
            raise CallFailed("NO_DIRECTORY", "outside Virial, task.current(directory=...) says where checkpoints go")
        name = f"step-{step:012d}.run-{self._run:04d}"
        return Begun(checkpoint_id=name, directory=os.path.join(self._directory, name))

    def prepared(self, begun: Begun, manifest: Manifest, timeout_s: float) -> str:
        del manifest, timeout_s
        return "COMMITTED" if self._complete(begun.directory) else "PREPARED"

    def wait(self, begun: Begun, timeout_s: float) -> str:
        del timeout_s
        if self._complete(begun.directory):
            return "COMMITTED"
        raise CallFailed("TIMEOUT", f"{begun.directory} lacks other ranks' shards; nobody waits for them stand-alone")

    def failed(self, begun: Begun, reason: str, message: str) -> None:
        """Nobody to tell: a missing shard makes the directory incomplete."""

    def state(self, checkpoint_id: str) -> str | None:
        del checkpoint_id
        return None

    def newest(self) -> CheckpointToRestore | None:
        """The complete checkpoint of the highest step, of the newest run among equals."""
        for step, _, name in sorted(self._listed(), reverse=True):
            path = os.path.join(self._directory, name)
            if self._complete(path):
                return CheckpointToRestore(checkpoint_id=name, directory=path, step=step)
        return None

    def _listed(self) -> list[tuple[int, int, str]]:
        if not self._directory or not os.path.isdir(self._directory):
            return []
        found = (self._NAME.fullmatch(name) for name in os.listdir(self._directory))
        return [(int(match[1]), int(match[2]), match[0]) for match in found if match]

    def _complete(self, path: str) -> bool:
        try:
            manifests = [read_manifest(path, rank) for rank in range(self._world_size)]
        except (ShardCorrupt, OSError):
            return False
        name = os.path.basename(path)
        return all(
            manifest.identity.checkpoint_id == name and manifest.identity.world_size == self._world_size
            for manifest in manifests
        )


def _text(result: Fields, name: str) -> str:
    value = result.get(name)
    if isinstance(value, str) and value:
        return value
    raise CallFailed("PROTOCOL", f"the answer's {name} is {value!r:.80}")
