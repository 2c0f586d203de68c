"""Files that matter: shards of checkpoints, on a host's own disk or on the directory all hosts share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from noded.core.messages import Restore, SlotRecord
from noded.run.protocol import SlotStatus
from virialpb.ids import NO_EPOCH, Epoch
from virialpb.reasons import PrepareFailure

LOCAL_TIER = "/data/checkpoints"
SHARD_BYTES = 1 << 20


def content_of(job: str, step: int, rank: int) -> str:
    """What a rank's parameters are after a step: training is deterministic, so any other content is damage."""
    return hashlib.sha256(f"{job}/{step}/{rank}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Shard:
    """`durable`: synced and renamed. `generation` wrote it."""

    checkpoint: str
    step: int
    rank: int
    generation: int
    content: str
    durable: bool = False

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.checkpoint}/{self.content}".encode()).hexdigest()

    @property
    def file(self) -> str:
        return f"rank-{self.rank:05d}.shard"


@dataclass(slots=True)
class Tree:
    """Directories of shards. `full`: no room for another byte."""

    directories: dict[str, dict[str, Shard]] = field(default_factory=dict[str, dict[str, Shard]])
    full: bool = False

    def find(self, directory: str, file: str) -> Shard | None:
        return self.directories.get(directory, {}).get(file)

    def lose_power(self) -> None:
        """What was not synced is gone."""
        for directory, files in self.directories.items():
            self.directories[directory] = {name: shard for name, shard in files.items() if shard.durable}

    def corrupt(self, directory: str, file: str) -> bool:
        shard = self.find(directory, file)
        if shard is None:
            return False
        self.directories[directory][file] = replace(shard, content=shard.content[::-1])
        return True


def check_shard(tree: Tree, directory: str, restore: Restore) -> tuple[PrepareFailure, str] | None:
    """As `noded.shards.verify.check_shard`, on a simulated tree."""
    shard = tree.find(directory, restore.file)
    if shard is None or not shard.durable:
        return PrepareFailure.SHARD_MISSING, f"{directory}/{restore.file}"
    same = (shard.checkpoint, shard.step, shard.digest) == (restore.checkpoint, restore.step, restore.digest)
    return None if same else (PrepareFailure.SHARD_CORRUPT, f"{directory}/{restore.file}")


@dataclass(slots=True)
class HostDisk:
    """What a host keeps over everything but the loss of its disk."""

    node_uid: str
    leader_epoch: Epoch = NO_EPOCH
    cluster_uid: str = ""
    records: dict[str, SlotRecord] = field(default_factory=dict[str, SlotRecord])
    # The guardian's status.json of each slot, with the boot it was written in.
    statuses: dict[str, tuple[SlotStatus, str]] = field(default_factory=dict[str, tuple[SlotStatus, str]])
    shards: Tree = field(default_factory=Tree)

    def copy(self) -> HostDisk:
        """As `cp -a` of the data directory to another machine."""
        shards = Tree({path: dict(files) for path, files in self.shards.directories.items()})
        return replace(self, records=dict(self.records), statuses=dict(self.statuses), shards=shards)
