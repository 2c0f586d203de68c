"""A process that commits as fast as it can and says on standard output what was acknowledged, until it is killed.

    python -m tests.support_committer DIRECTORY WHO [SIZE_BYTES]

One line a commit, only after it: `WHO SEQ REVISION`; the commit puts `WHO/SEQ` and moves `counter`. A failed one is
`WHO SEQ ErrorName`, then it is tried again once with the same number, and then the process ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import count
from pathlib import Path

from controld.store.port import StoredChange, StoreError
from controld.store.sqlite import SqliteStore


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # nothing stays in a buffer of this process


async def run(directory: Path, who: str, size_bytes: int) -> None:
    store = SqliteStore(directory)
    await store.open()
    leader = await store.campaign(who)
    say(who, "epoch", leader.epoch)
    for seq in count(1):
        value = f"{who}/{seq}".encode().ljust(size_bytes, b".")
        changes = [StoredChange(f"{who}/{seq:06d}", value), StoredChange("counter", value)]
        if seq % 3 == 0:
            changes.append(StoredChange(f"{who}/{seq - 1:06d}", None))
        for attempt in (1, 2):
            try:
                revision = await store.commit(leader, seq, changes)
            except StoreError as error:
                say(who, seq, type(error).__name__)
                if attempt == 2:
                    await store.close()
                    return
            else:
                say(who, seq, revision)
                break


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 100))
