"""What happened, as lines: always hashed, kept only when asked for. Equal seeds must give equal hashes."""

from __future__ import annotations

import hashlib
from collections import Counter

from tests.sim.loop import SimLoop

TAIL_MAX = 4_000


class Trace:
    def __init__(self, loop: SimLoop, *, keep: bool) -> None:
        self._loop = loop
        self._keep = keep
        self._hash = hashlib.blake2b(digest_size=16)
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()

    def note(self, kind: str, *facts: object) -> None:
        self.counts[kind] += 1
        line = f"{self._loop.time():.6f} {kind} {' '.join(map(str, facts))}"
        self._hash.update(line.encode())
        if self._keep:
            self.lines.append(line)

    def log(self, who: str, what: str, **fields: object) -> None:
        """A log entry of real code: kept, but no part of the hash, since words may change."""
        if self._keep:
            told = " ".join(f"{name}={value}" for name, value in fields.items())
            self.lines.append(f"{self._loop.time():.6f}   [{who}] {what} {told}")

    def digest(self) -> str:
        return self._hash.hexdigest()
