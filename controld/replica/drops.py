"""Which agents have deleted the files of a checkpoint; when all that matter have, its record may go.

Kept in memory only: a new leader orders the deletion again, and agents answer again.
"""

from __future__ import annotations

from controld.core import keys
from controld.core.agent import DropDone
from controld.core.checkpoints import holders
from controld.core.commands import ForgetCheckpoint
from controld.core.ids import NodeUid
from controld.core.model import CheckpointState, Tier
from controld.core.state import State


class Drops:
    def __init__(self) -> None:
        self._done: dict[str, set[NodeUid]] = {}

    def done(self, state: State, uid: NodeUid, report: DropDone) -> ForgetCheckpoint | None:
        """The command to give when this was the last answer that matters.

        Of a shared directory any one will do. Of local tiers every node that may have files, also one that is silent:
        it may come back with files that nobody would know of any more.
        """
        checkpoint = state.checkpoints.get(report.job, {}).get(report.checkpoint)
        if checkpoint is None or checkpoint.state is not CheckpointState.DROPPING:
            return None
        key = keys.checkpoint(report.job, report.checkpoint)
        answered = self._done.setdefault(key, set())
        answered.add(uid)
        if checkpoint.tier is Tier.LOCAL and not holders(state, checkpoint) <= answered:
            return None
        return ForgetCheckpoint(report.job, report.checkpoint)

    def forgotten(self, key: str) -> None:
        """The record under this store key is gone."""
        self._done.pop(key, None)
