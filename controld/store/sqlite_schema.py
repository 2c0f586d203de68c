"""The tables of the embedded store. SQLite keeps these texts in the file, so `check` can tell that they are whole."""

from __future__ import annotations

APPLICATION_ID = 0x56495241  # "VIRA"
VERSION = 1

TABLES = (
    """CREATE TABLE head (
    id INTEGER PRIMARY KEY CHECK (id = 0),
    history INTEGER NOT NULL, revision INTEGER NOT NULL, compacted_revision INTEGER NOT NULL,
    token INTEGER NOT NULL, epoch_history INTEGER NOT NULL, epoch_revision INTEGER NOT NULL,
    seq INTEGER NOT NULL, seq_revision INTEGER NOT NULL,
    records INTEGER NOT NULL, digest INTEGER NOT NULL, checksum INTEGER NOT NULL
)""",
    """CREATE TABLE kv (
    key TEXT NOT NULL PRIMARY KEY, value BLOB NOT NULL,
    create_revision INTEGER NOT NULL, modify_revision INTEGER NOT NULL, checksum INTEGER NOT NULL
)""",
    "CREATE TABLE log (revision INTEGER PRIMARY KEY, changes BLOB NOT NULL, checksum INTEGER NOT NULL)",
)

CREATE = ";\n".join(
    ["BEGIN", *TABLES, f"PRAGMA application_id = {APPLICATION_ID}", f"PRAGMA user_version = {VERSION}", "COMMIT"]
)
