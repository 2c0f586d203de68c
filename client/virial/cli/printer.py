"""What a command prints: a table, JSON or YAML on standard output; remarks on standard error.

JSON is an interface: keys are the names of `virial.models` fields, one document (one object a line for streams).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO, cast

from virial.cli.human import clean

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

# Fields of models that are pairs, and read as a mapping.
MAPPINGS: Final = frozenset({"env", "labels", "numbers", "details", "attributes", "capacity", "jobs_by_state"})
# Only states are coloured: the eye should find what is wrong.
STATE_COLOURS: Final[Mapping[str, str]] = {
    "RUNNING": "green",
    "SUCCEEDED": "green",
    "LIVE": "green",
    "ACTIVE": "green",
    "COMMITTED": "green",
    "STARTING": "cyan",
    "PENDING": "yellow",
    "RESTARTING": "yellow",
    "SUSPECT": "yellow",
    "held": "yellow",
    "draining": "yellow",
    "CANCELLING": "yellow",
    "FAILED": "red",
    "EXPIRED": "red",
    "BAD": "red",
    "unknown": "dim",
}


class Output(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are text, cleaned when printed. Columns named in `right` are aligned to the right."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    right: frozenset[str] = frozenset()


def document(value: object) -> object:
    """A model as plain values. Unknown is null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _field(f.name, getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (list, tuple)):
        return [document(item) for item in cast("Iterable[object]", value)]
    return str(value) if isinstance(value, StrEnum) else value


def _field(name: str, value: object) -> object:
    if name in MAPPINGS:
        return {key: document(item) for key, item in cast("Iterable[tuple[str, object]]", value)}
    return document(value)


def _json(plain: object, indent: int | None = None) -> str:
    """As people read it, but for what a terminal would obey: JSON itself escapes only what is below a space."""
    text = json.dumps(plain, indent=indent, ensure_ascii=False)
    return text if _shown(text) else "".join(c if _shown(c) else json.dumps(c)[1:-1] for c in text)


def _shown(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


class Stream(Protocol):
    def isatty(self) -> bool: ...


def terminal(stream: Stream) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # already closed
        return False


def coloured(stream: Stream) -> bool:
    """Colours only on a terminal that has them, and not where NO_COLOR is set (no-color.org)."""
    return terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Printer:
    def __init__(self, output: Output) -> None:
        self.output = output

    @property
    def for_people(self) -> bool:
        return self.output is Output.TABLE

    def line(self, text: str) -> None:
        """A line for people. At once: whoever reads a pipe should not wait for a full buffer."""
        print(text, flush=True)

    def note(self, text: str) -> None:
        """A remark on standard error: never part of what a script reads."""
        print(text, file=sys.stderr, flush=True)

    def value(self, value: object) -> None:
        """One JSON or YAML document."""
        plain = document(value)
        if self.output is Output.YAML:
            import yaml

            dumper = cast("Any", yaml)  # its stubs are only partly typed
            text: str = dumper.safe_dump(plain, sort_keys=False, allow_unicode=True)
            if not _shown(text):
                text = dumper.safe_dump(plain, sort_keys=False, allow_unicode=False)
            print(text, end="", flush=True)
        else:
            print(_json(plain, indent=2), flush=True)

    def item(self, value: object) -> None:
        """One value of a stream: a JSON object a line, or a YAML document of its own."""
        if self.output is Output.YAML:
            print("---")
            self.value(value)
        else:
            print(_json(document(value)), flush=True)

    def table(self, table: Table) -> None:
        rows = [[clean(cell) for cell in row] for row in table.rows]
        if terminal(sys.stdout):
            _print_rich(table, rows, console())
        else:
            _print_plain(table, rows)

    def pairs(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Names and values, one a line; pairs without a value are left out."""
        shown = [(name, clean(value)) for name, value in pairs if value]
        width = max((len(name) for name, _ in shown), default=0)
        out = console() if terminal(sys.stdout) else None
        for name, value in shown:
            if out is None:
                print(f"{name:<{width}}  {value}")
            else:
                from rich.text import Text

                label = Text(f"{name:<{width}}  ", style="bold")
                out.print(label + Text(value, style=STATE_COLOURS.get(value.split(" ")[0], "")), soft_wrap=True)


def console(stream: TextIO | None = None) -> Console:
    from rich.console import Console

    target = stream or sys.stdout
    return Console(file=target, no_color=not coloured(target), highlight=False, markup=False, emoji=False)


def rich_table(table: Table, rows: Sequence[Sequence[str]]) -> RichTable:
    """The table as rich draws it."""
    from rich.table import Table as NewTable
    from rich.text import Text

    drawn = NewTable(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in table.columns:
        drawn.add_column(name, justify="right" if name in table.right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell, style=STATE_COLOURS.get(cell, "")) for cell in row))
    return drawn


def _print_rich(table: Table, rows: Sequence[Sequence[str]], out: Console) -> None:
    out.print(rich_table(table, rows))


def _print_plain(table: Table, rows: Sequence[Sequence[str]]) -> None:
    """Columns two spaces apart, as wide as they need to be: for grep, awk and files."""
    widths = [max(len(r[i]) for r in (table.columns, *rows)) for i in range(len(table.columns))]
    for row in (table.columns, *rows):
        cells = [
            cell.rjust(width) if name in table.right else cell.ljust(width)
            for name, cell, width in zip(table.columns, row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())
    sys.stdout.flush()
