"""The shard file: one rank's part of a checkpoint, as the task writes it and the agent verifies it.

Standard library only. `virial.task` writes and reads shards, `noded.shards` verifies them; neither imports the other.

A shard is two files in the directory that the controller named:

- `rank-00000.shard`: the task's bytes as they are, no header. A *stripe* is 1 MiB of it; the last may be shorter.
- `rank-00000.json`: the manifest (`Manifest`). It is published after the shard is durable, so a shard without a
  manifest is what a killed save leaves behind, and is never eligible.

The shard's digest covers its length and every stripe, and can be checked with a shell. It is the sha256, in hex, of
this ASCII text, each line ended by one newline:

    virial-shard-1 stripe_bytes=1048576 size_bytes=<size>
    <sha256 of stripe 0, in hex>
    <sha256 of stripe 1, in hex>
    ...

Nothing is ever overwritten: a name that exists is refused (killed mid-save into a re-used directory, other formats
later load a mix of two steps without an error).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

FORMAT: Final = "virial-shard-1"
STRIPE_BYTES: Final = 1 << 20
TOLD_BYTES: Final = 32 * STRIPE_BYTES
MANIFEST_BYTES_MAX: Final = 64 << 20
"""Bound on a manifest from disk: about 900,000 stripes, a shard of 0.9 TB."""
RANK_MAX: Final = 99_999
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class Problem(StrEnum):
    """What is wrong with a shard. Data, for decisions; `str(ShardCorrupt)` has the words."""

    MISSING = "MISSING"
    NOT_A_FILE = "NOT_A_FILE"
    MANIFEST = "MANIFEST"
    SIZE = "SIZE"
    STRIPE = "STRIPE"
    DIGEST = "DIGEST"
    IDENTITY = "IDENTITY"


class ShardCorrupt(Exception):
    """A shard or its manifest is not what was saved. Not an OSError: zip readers swallow those.

    `file` is the path that is bad, `stripe` the index of the bad stripe or None when the problem is not one stripe's.
    """

    def __init__(self, file: str, problem: Problem, detail: str, stripe: int | None = None) -> None:
        where = file if stripe is None else f"{file}: stripe {stripe}"
        super().__init__(f"{where}: {detail}")
        self.file = file
        self.problem = problem
        self.detail = detail
        self.stripe = stripe


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """Whose part of which checkpoint a shard is."""

    checkpoint_id: str
    step: int
    rank: int
    world_size: int
    job: str = ""
    generation: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size <= RANK_MAX + 1:
            raise ValueError(f"rank {self.rank} of world_size {self.world_size}: need 0 <= rank < world_size <= 100000")
        if self.step < 0 or self.generation < 0:
            raise ValueError(f"step {self.step}, generation {self.generation}: neither may be negative")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `rank-*.json` holds. `digest` is `shard_digest(size_bytes, stripe_digests)`."""

    identity: ShardIdentity
    size_bytes: int
    stripe_digests: tuple[str, ...] = field(repr=False)
    digest: str

    @property
    def file(self) -> str:
        """Name of the shard file inside the checkpoint's directory."""
        return shard_name(self.identity.rank)


def shard_name(rank: int) -> str:
    """Name of a rank's shard file."""
    return f"rank-{rank:05d}.shard"


def manifest_name(rank: int) -> str:
    """Name of a rank's manifest file."""
    return f"rank-{rank:05d}.json"


def stripe_count(size_bytes: int) -> int:
    """Stripes in a shard of this size; an empty shard has none."""
    return -(-size_bytes // STRIPE_BYTES)


def shard_digest(size_bytes: int, stripe_digests: Sequence[str]) -> str:
    """The shard's digest in hex: sha256 of the text in this module's docstring."""
    total = hashlib.sha256(f"{FORMAT} stripe_bytes={STRIPE_BYTES} size_bytes={size_bytes}\n".encode("ascii"))
    for digest in stripe_digests:
        total.update(f"{digest}\n".encode("ascii"))
    return total.hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON, one key a line."""
    identity = manifest.identity
    fields: dict[str, object] = {
        "format": FORMAT,
        "checkpoint_id": identity.checkpoint_id,
        "job": identity.job,
        "generation": identity.generation,
        "step": identity.step,
        "rank": identity.rank,
        "world_size": identity.world_size,
        "file": manifest.file,
        "size_bytes": manifest.size_bytes,
        "stripe_bytes": STRIPE_BYTES,
        "digest": manifest.digest,
        "stripe_digests": list(manifest.stripe_digests),
    }
    return (json.dumps(fields, indent=0, allow_nan=False) + "\n").encode("utf-8")


def decode_manifest(data: bytes, file: str) -> Manifest:
    """Inverse of `encode_manifest`. Raises ShardCorrupt(MANIFEST) naming `file` and what is wrong with it."""

    def bad(detail: str) -> ShardCorrupt:
        return ShardCorrupt(file, Problem.MANIFEST, f"not a shard manifest: {detail}")

    try:
        decoded: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise bad(f"not JSON ({error})") from None
    if not isinstance(decoded, dict):
        raise bad("not a JSON object")
    fields = cast("dict[str, object]", decoded)

    def text(name: str) -> str:
        value = fields.get(name)
        if not isinstance(value, str):
            raise bad(f"{name} is {value!r:.40}, not a string")
        return value

    def count(name: str) -> int:
        value = fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise bad(f"{name} is {value!r:.40}, not a whole number >= 0")
        return value

    if text("format") != FORMAT:
        raise bad(f"format is {text('format')!r:.40}, this reads {FORMAT!r}")
    if count("stripe_bytes") != STRIPE_BYTES:
        raise bad(f"stripe_bytes is {count('stripe_bytes')}, this reads {STRIPE_BYTES}")
    try:
        identity = ShardIdentity(
            checkpoint_id=text("checkpoint_id"),
            step=count("step"),
            rank=count("rank"),
            world_size=count("world_size"),
            job=text("job"),
            generation=count("generation"),
        )
    except ValueError as error:
        raise bad(str(error)) from None
    listed = fields.get("stripe_digests")
    stripes: list[str] = []
    for digest in cast("list[object]", listed) if isinstance(listed, list) else []:
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise bad(f"stripe_digests[{len(stripes)}] is {digest!r:.80}, not 64 hex digits")
        stripes.append(digest)
    manifest = Manifest(identity, count("size_bytes"), tuple(stripes), text("digest"))
    # The name is fixed by the rank: a manifest never leads its reader to another file.
    if text("file") != manifest.file:
        raise bad(f"file is {text('file')!r:.80}, rank {identity.rank} has {manifest.file!r}")
    if len(stripes) != stripe_count(manifest.size_bytes):
        raise bad(f"{len(stripes)} stripe digests for {manifest.size_bytes} bytes")
    if manifest.digest != shard_digest(manifest.size_bytes, stripes):
        raise ShardCorrupt(file, Problem.DIGEST, "digest is not that of its stripe digests")
    return manifest


def read_manifest(directory: str | os.PathLike[str], rank: int) -> Manifest:
    """The manifest of one rank. Raises ShardCorrupt (MISSING when there is none) and OSError for a failing disk."""
    path = os.path.join(directory, manifest_name(rank))
    fd = _open_regular(path)
    with open(fd, "rb") as file:
        data = file.read(MANIFEST_BYTES_MAX + 1)
    if len(data) > MANIFEST_BYTES_MAX:
        raise ShardCorrupt(path, Problem.MANIFEST, f"longer than {MANIFEST_BYTES_MAX} bytes")
    manifest = decode_manifest(data, path)
    if manifest.identity.rank != rank:
        raise ShardCorrupt(path, Problem.IDENTITY, f"it is rank {manifest.identity.rank}'s")
    return manifest


def verify_shard(
    directory: str | os.PathLike[str],
    rank: int,
    *,
    digest: str | None = None,
    told: Callable[[int], None] | None = None,
) -> Manifest:
    """Read a whole shard and check every stripe, and `digest` (what the registry recorded) if given.

    `told` hears after each TOLD_BYTES how many were read and are right. Memory: one stripe. Raises ShardCorrupt for
    the first thing wrong, OSError for a failing disk.
    """
    manifest = read_manifest(directory, rank)
    if digest is not None and manifest.digest != digest:
        path = os.path.join(directory, manifest_name(rank))
        raise ShardCorrupt(path, Problem.IDENTITY, f"digest is {manifest.digest}, {digest} was recorded")
    with VerifiedReader(directory, manifest) as reader:
        for index in range(len(manifest.stripe_digests)):
            reader.stripe(index)
            if told is not None and (read := (index + 1) * STRIPE_BYTES) % TOLD_BYTES == 0:
                told(read)
    return manifest


class VerifiedReader(io.RawIOBase):
    """Reads a shard; no byte is handed out before the digest of its stripe was checked. Seekable, one stripe in memory.

    Raises ShardCorrupt when opened (missing, no regular file, wrong size) or read (a stripe's digest), and OSError.
    """

    def __init__(self, directory: str | os.PathLike[str], manifest: Manifest) -> None:
        super().__init__()
        self.path = os.path.join(directory, manifest.file)
        self.manifest = manifest
        self._at = 0
        self._index = -1
        self._stripe = b""
        self._fd = -1
        self._fd = _open_regular(self.path)
        size_bytes = os.fstat(self._fd).st_size
        if size_bytes != manifest.size_bytes:
            self.close()
            detail = f"{size_bytes} bytes, the manifest has {manifest.size_bytes}"
            raise ShardCorrupt(self.path, Problem.SIZE, detail)

    def stripe(self, index: int) -> bytes:
        """One verified stripe. Raises ShardCorrupt(STRIPE), IndexError past the end."""
        if index == self._index:
            return self._stripe
        expected = self.manifest.stripe_digests[index]
        start = index * STRIPE_BYTES
        length = min(STRIPE_BYTES, self.manifest.size_bytes - start)
        parts: list[bytes] = []
        got = 0
        while got < length:
            part = os.pread(self._fd, length - got, start + got)
            if not part:
                raise ShardCorrupt(self.path, Problem.SIZE, f"ends at byte {start + got}", index)
            parts.append(part)
            got += len(part)
        data = b"".join(parts)
        if hashlib.sha256(data).hexdigest() != expected:
            detail = f"bytes {start} to {start + length - 1} differ from what was saved (sha256)"
            raise ShardCorrupt(self.path, Problem.STRIPE, detail, index)
        self._index, self._stripe = index, data
        return data

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        index, skip = divmod(self._at, STRIPE_BYTES)
        if self._at >= self.manifest.size_bytes:
            return 0
        target = memoryview(buffer).cast("B")
        part = memoryview(self.stripe(index))[skip : skip + len(target)]
        target[: len(part)] = part
        self._at += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.manifest.size_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        super().close()


class ShardWriter:
    """Writes one shard and its manifest so that neither is ever seen half done.

    `write` as often as wanted, then `finish`; or `discard`. Raises OSError (ENOSPC, EDQUOT, EFBIG, EIO, ...) and
    FileExistsError for a name that is taken. Memory: one stripe.
    """

    def __init__(self, directory: str | os.PathLike[str], identity: ShardIdentity) -> None:
        self.identity = identity
        self.size_bytes = 0
        self._directory = os.fspath(directory)
        self._stripes: list[str] = []
        self._buffer = bytearray()
        self._made: list[str] = []
        self._shard = self._path(shard_name(identity.rank))
        self._manifest = self._path(manifest_name(identity.rank))
        for path in (self._shard, self._manifest):
            _refuse_existing(path)
        self._temporary = self._path(f".{shard_name(identity.rank)}.tmp")
        self._fd = self._create(self._temporary)

    def write(self, data: ReadableBuffer) -> int:
        """Append bytes; full stripes are hashed and written at once."""
        view = memoryview(data).cast("B")
        length = len(view)
        if self._buffer:
            room = STRIPE_BYTES - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]
            if len(self._buffer) == STRIPE_BYTES:
                self._put(memoryview(self._buffer))
                self._buffer = bytearray()
        while len(view) >= STRIPE_BYTES:
            self._put(view[:STRIPE_BYTES])
            view = view[STRIPE_BYTES:]
        self._buffer += view
        return length

    def finish(self) -> Manifest:
        """Make the shard durable under its name, then the manifest, then both names. Returns the manifest."""
        if self._buffer:
            self._put(memoryview(self._buffer))
            self._buffer = bytearray()
        self._publish(self._fd, self._temporary, self._shard)
        stripes = tuple(self._stripes)
        manifest = Manifest(self.identity, self.size_bytes, stripes, shard_digest(self.size_bytes, stripes))
        temporary = self._path(f".{manifest_name(self.identity.rank)}.tmp")
        self._fd = self._create(temporary)
        _write_all(self._fd, memoryview(encode_manifest(manifest)))
        self._publish(self._fd, temporary, self._manifest)
        sync_directory(self._directory)
        self._made.clear()
        return manifest

    def discard(self) -> None:
        """Remove what this writer made (after a failed save: a full disk gets its room back). Never raises."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
        for path in reversed(self._made):
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._made.clear()

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def _create(self, path: str) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self._made.append(path)
        return fd

    def _put(self, stripe: memoryview) -> None:
        self._stripes.append(hashlib.sha256(stripe).hexdigest())
        _write_all(self._fd, stripe)
        self.size_bytes += len(stripe)

    def _publish(self, fd: int, temporary: str, final: str) -> None:
        os.fsync(fd)
        self._fd = -1
        os.close(fd)  # may fail too: NFS tells of a full quota here
        _refuse_existing(final)  # rename would replace it; the directory is this checkpoint's alone, so this is enough
        os.rename(temporary, final)
        self._made[-1] = final


def make_directory(directory: str | os.PathLike[str]) -> None:
    """Create a checkpoint's directory and its parents, durably; one that is there already is fine. Raises OSError."""
    path = os.path.abspath(directory)
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        make_directory(parent)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return  # whoever made it makes it durable before its own PREPARED, and COMMIT waits for all of them
    sync_directory(parent)


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_regular(path: str) -> int:
    """Open for reading what must be a regular file: the agent reads directories that tasks can write to.

    A symbolic link would lead a privileged reader elsewhere, a FIFO would block it for ever.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ShardCorrupt(path, Problem.MISSING, "no such file") from None
    except OSError as error:
        if os.path.islink(path):
            raise ShardCorrupt(path, Problem.NOT_A_FILE, "a symbolic link, not a file") from None
        raise error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ShardCorrupt(path, Problem.NOT_A_FILE, "not a regular file")
    return fd


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _refuse_existing(path: str) -> None:
    if os.path.lexists(path):
        raise FileExistsError(
            errno.EEXIST, "a shard is never overwritten; each checkpoint has a directory of its own", path
        )
