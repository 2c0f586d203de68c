"""The agent's own files in its data directory: who this node is, the highest leader seen, what was prepared.

noded.lock        held while a noded lives: one for each data directory
node.json         node_uid, made once (0600)
leader.json       highest leader epoch, and the cluster it belongs to
slots/<slot>.json what a restarted agent must know of a slot that its guardian kept
ports.json        where this noded listens, for whoever started it with port 0
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

import msgspec

from noded.core.messages import SlotRecord
from virialpb.ids import NO_EPOCH, Epoch, NodeUid, parse_epoch

RECORDS_MAX: Final = 4096


class DataDirProblem(Exception):
    """The data directory cannot be used; one message for the operator."""


class NodeFiles:
    """`open` first. All methods block for a moment on a local disk."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self._lock_fd = -1

    def open(self, make_uid: Callable[[], str]) -> NodeUid:
        """Lock the directory, making it if missing, and return this node's uid. Raises DataDirProblem."""
        try:
            new = not self.data_dir.exists()
            self.data_dir.mkdir(parents=True, exist_ok=True)
            if new:
                # Tasks of other users pass through to their sockets and checkpoints; they cannot list.
                self.data_dir.chmod(0o711)
            (self.data_dir / "slots").mkdir(mode=0o700, exist_ok=True)
            self._lock()
            self.forget_ports()
            return self._node_uid(make_uid)
        except OSError as error:
            where = error.filename or self.data_dir
            raise DataDirProblem(f"data_dir: cannot use {where}: {error.strerror}") from None

    def close(self) -> None:
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                self.forget_ports()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _lock(self) -> None:
        fd = os.open(self.data_dir / "noded.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            raise DataDirProblem(
                f"data_dir: {self.data_dir} is in use by a noded that runs (pid {holder or 'unknown'});"
                " stop it, or give this one a --data-dir of its own"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = fd

    def _node_uid(self, make_uid: Callable[[], str]) -> NodeUid:
        path = self.data_dir / "node.json"
        try:
            stored: object = json.loads(path.read_bytes())
        except FileNotFoundError:
            uid = make_uid()
            self._write("node.json", json.dumps({"node_uid": uid}).encode(), durable=True)
            return NodeUid(uid)
        except ValueError:
            stored = None
        uid = cast("dict[str, object]", stored).get("node_uid") if isinstance(stored, dict) else None
        if not isinstance(uid, str) or not uid:
            raise DataDirProblem(
                f"data_dir: {path} is damaged; remove it to join as a new node (its old leases will have to run out)"
            )
        return NodeUid(uid)

    # -- the leader

    def leader(self) -> tuple[Epoch, str]:
        """(highest leader epoch seen, its cluster's uid). A damaged file reads as none: it is then learnt anew."""
        try:
            stored: object = json.loads((self.data_dir / "leader.json").read_bytes())
            fields = cast("dict[str, str]", stored)
            return parse_epoch(fields["leader_epoch"]), fields["cluster_uid"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return NO_EPOCH, ""

    def save_leader(self, leader_epoch: Epoch, cluster_uid: str) -> None:
        body = json.dumps({"leader_epoch": str(leader_epoch), "cluster_uid": cluster_uid})
        self._write("leader.json", body.encode(), durable=True)

    # -- slots

    def records(self) -> tuple[SlotRecord, ...]:
        """What was written down of slots; a damaged file reads as none, and its slot's lease then runs out."""
        found: list[SlotRecord] = []
        for path in sorted((self.data_dir / "slots").glob("*.json"))[:RECORDS_MAX]:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                found.append(msgspec.json.decode(path.read_bytes(), type=SlotRecord))
        return tuple(found)

    def remember(self, record: SlotRecord) -> None:
        self._write(f"slots/{record.slot}.json", msgspec.json.encode(record))

    def forget(self, slot: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.data_dir / "slots" / f"{slot}.json").unlink()

    # -- ports

    def forget_ports(self) -> None:
        """Nobody shall find the ports of a former life, which may be another program's by now."""
        (self.data_dir / "ports.json").unlink(missing_ok=True)

    def save_ports(self, ports: dict[str, str]) -> None:
        self._write("ports.json", json.dumps(ports).encode(), mode=0o644)

    def _write(self, name: str, body: bytes, *, durable: bool = False, mode: int = 0o600) -> None:
        """Whole or not at all."""
        path = self.data_dir / name
        temporary = path.with_name(f".{path.name}.tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:
            file.write(body)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
