"""What code inside a task can get to see going wrong."""

from __future__ import annotations

from dataclasses import dataclass


class TaskEnvironmentError(Exception):
    """An environment variable that Virial or the launcher sets is missing or malformed. The message names it."""


class CheckpointError(Exception):
    """A checkpoint failed; raised only with `strict=True`. `reason` is one of `SaveError.reason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class SaveError:
    """Why a shard was not saved.

    `reason`: STORAGE_FULL, IO_ERROR, ABORTED (the gang's checkpoint was given up), TIMEOUT (no answer before the
    phase's deadline), DISCONNECTED (the guardian is away), PROTOCOL (an answer that makes no sense), NO_DIRECTORY
    (stand-alone without one), EXCEPTION (the `with` body raised), or a Reason that the agent or controller gave.
    """

    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"
