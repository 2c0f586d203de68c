"""Tokens and names that every end shares. Standard library only; pure rooms may import this module."""

from __future__ import annotations

import re
from typing import NamedTuple, NewType

NodeUid = NewType("NodeUid", str)
JobId = NewType("JobId", str)
CheckpointId = NewType("CheckpointId", str)
SlotId = NewType("SlotId", str)

ID_LENGTH_MAX = 63
NODE_SLOTS_MAX = 192
"""Tasks of one node: as many as fit into one beat with the longest names of jobs, a message of at most 64 KiB."""
_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class Epoch(NamedTuple):
    """A fencing token: (history counter, store revision). Only grows; a restore raises the history counter."""

    history: int
    revision: int

    def __str__(self) -> str:
        return f"{self.history}.{self.revision}"


NO_EPOCH = Epoch(0, 0)


class Token(NamedTuple):
    """The right of one generation of one job, carried by every report and order about it."""

    job: JobId
    generation: int
    epoch: Epoch


class Incarnation(NamedTuple):
    """One life of a node. It is continued only when all three parts match."""

    node_uid: NodeUid
    boot_id: str
    guardian_nonce: str


def valid_id(text: str) -> bool:
    """Whether `text` may name a job, node, hold or checkpoint: RFC 1034 label, at most 63 characters (aip.dev/122)."""
    return _ID.fullmatch(text) is not None


def valid_request_id(text: str) -> bool:
    """Whether `text` may be an idempotency key: 1 to 64 characters of [A-Za-z0-9._:-]."""
    return _REQUEST_ID.fullmatch(text) is not None


def slot_id(job: str, generation: int, index: int, *, spare: bool = False) -> SlotId:
    """Name of one task of one generation; a spare has no rank, so it is counted apart."""
    return SlotId(f"{job}.{generation}.{'s' if spare else ''}{index}")


def parse_epoch(text: str) -> Epoch:
    """Inverse of `str(Epoch)`. Raises ValueError on anything else."""
    history, _, revision = text.partition(".")
    return Epoch(int(history), int(revision))
