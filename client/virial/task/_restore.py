"""The checkpoint that a generation starts from, read with every stripe verified."""

from __future__ import annotations

import io
import os

from virial.task._environment import CheckpointToRestore
from virialpb.shardfile import Manifest, Problem, ShardCorrupt, VerifiedReader, manifest_name, read_manifest


class Restored:
    """A committed checkpoint. Made by `Task.restore`, which has read and checked this rank's manifest.

    `world_size` is that of the gang that saved it: a gang that came back smaller reads other ranks' shards too.
    """

    def __init__(self, checkpoint: CheckpointToRestore, rank: int) -> None:
        self.step = checkpoint.step
        self.checkpoint_id = checkpoint.checkpoint_id
        self.directory = checkpoint.directory
        self._rank = rank
        self._manifest = self._read_manifest(rank)
        self.world_size = self._manifest.identity.world_size

    def open(self, rank: int | None = None) -> io.BufferedReader:
        """A seekable binary file over this rank's (or another's) shard; one stripe in memory.

        Raises ShardCorrupt, naming file and stripe, here or from the read that comes upon a bad stripe, before any of
        its bytes are handed out; OSError for a failing disk.
        """
        manifest = self._manifest if rank in (None, self._rank) else self._read_manifest(rank)
        return io.BufferedReader(VerifiedReader(self.directory, manifest))

    def read(self, rank: int | None = None) -> bytes:
        """The whole shard. Raises as `open` does."""
        with self.open(rank) as file:
            return file.read()

    def _read_manifest(self, rank: int) -> Manifest:
        manifest = read_manifest(self.directory, rank)
        identity = manifest.identity
        path = os.path.join(self.directory, manifest_name(rank))
        if identity.step != self.step:
            raise ShardCorrupt(path, Problem.IDENTITY, f"step {identity.step}, not the {self.step} to restore")
        if self.checkpoint_id and identity.checkpoint_id != self.checkpoint_id:
            detail = f"of checkpoint {identity.checkpoint_id!r:.80}, not {self.checkpoint_id!r:.80}"
            raise ShardCorrupt(path, Problem.IDENTITY, detail)
        return manifest
