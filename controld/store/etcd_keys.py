"""Where the store lies in etcd, and what its own keys say. Bytes and texts only.

    PREFIX/head             what was committed last: "HISTORY.EPOCH_REVISION:SEQ"; "HISTORY:0" when a leadership begins
    PREFIX/live/evidence    the leader's nonce, under a lease of 3 s that its barriers keep alive
    PREFIX/live/history     the history counter; "N restoring" while a restore is under way
    PREFIX/live/leader      who leads: identity, address, nonce. Its mod_revision is the token of the leadership
    PREFIX/live/records/K   the record K

All but the head lies in one range, so that one watch shows commits, leadership and restores in one order.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from controld.core.ids import Epoch
from controld.store.port import StoreCorruptError

HISTORY_FIRST: Final = 1
_RESTORING: Final = " restoring"


@dataclass(frozen=True, slots=True)
class Keys:
    """`prefix` keeps several clusters apart in one etcd."""

    prefix: str

    @property
    def head(self) -> bytes:
        return f"{self.prefix}/head".encode()

    @property
    def live(self) -> bytes:
        return f"{self.prefix}/live/".encode()

    @property
    def evidence(self) -> bytes:
        return self.live + b"evidence"

    @property
    def history(self) -> bytes:
        return self.live + b"history"

    @property
    def leader(self) -> bytes:
        return self.live + b"leader"

    @property
    def records(self) -> bytes:
        return self.live + b"records/"

    def record(self, key: str) -> bytes:
        return self.records + key.encode()

    def name(self, key: bytes) -> str:
        """Inverse of `record`. Raises StoreCorruptError for a key that is not UTF-8."""
        try:
            return key[len(self.records) :].decode()
        except UnicodeDecodeError as error:
            raise StoreCorruptError(f"etcd holds the key {key!r}, which is none of ours; remove it") from error


def end_of(prefix: bytes) -> bytes:
    """The `range_end` of everything that begins with a prefix, which ends in a byte below 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


@dataclass(frozen=True, slots=True)
class Claim:
    """The value of the leader key. `nonce` tells two takeovers of the same identity apart.

    `evidence`: it promised to renew the evidence key, so that its absence says something.
    """

    identity: str
    address: str
    nonce: str
    evidence: bool

    def encode(self) -> bytes:
        content = {
            "identity": self.identity,
            "address": self.address,
            "nonce": self.nonce,
            "evidence": self.evidence,
        }
        return json.dumps(content, separators=(",", ":"), sort_keys=True).encode()


def read_claim(value: bytes) -> Claim:
    """Raises StoreCorruptError."""
    try:
        content = json.loads(value)
        claim = Claim(content["identity"], content["address"], content["nonce"], content["evidence"])
    except (ValueError, TypeError, KeyError) as error:
        raise StoreCorruptError(f"etcd: the leader key holds {value[:80]!r}, which no controller wrote") from error
    return claim


def opening(history: int) -> bytes:
    """The head when a leadership begins: its epoch is the revision of this write, which its writer cannot know."""
    return f"{history}:0".encode()


def head_text(epoch: Epoch, seq: int) -> bytes:
    return f"{epoch}:{seq}".encode()


def read_head(value: bytes, token: int) -> tuple[Epoch, int]:
    """(epoch, seq), where `token` leads. Raises StoreCorruptError."""
    left, _, seq = value.partition(b":")
    history, _, revision = left.partition(b".")
    try:
        return Epoch(int(history), int(revision) if revision else token), int(seq)
    except ValueError as error:
        raise StoreCorruptError(f"etcd: the head key holds {value[:80]!r}, which no controller wrote") from error


def history_text(history: int, *, restoring: bool = False) -> bytes:
    return f"{history}{_RESTORING if restoring else ''}".encode()


def read_history(value: bytes) -> tuple[int, bool]:
    """(history counter, whether a restore is under way). Raises StoreCorruptError."""
    number, _, restoring = value.partition(b" ")
    if not number.isdigit():
        raise StoreCorruptError(f"etcd: the history key holds {value[:80]!r}, which no controller wrote")
    return int(number), bool(restoring)
