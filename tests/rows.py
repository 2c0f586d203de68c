"""The table of public failures: which test keeps each row out, and which seeded defect shows that the test can fail.

    python -m tests.rows                     runs the tests of all rows, then prints the table
    python -m tests.rows --reports FOLDER    prints it from the JUnit reports of an earlier run

A test belongs to a row by `@pytest.mark.row("G3")` or by its name (`test_case_g3_...`). The defects that it catches are
named by `@pytest.mark.row("G3", defect="keeps_old_epoch")` (or a list of names), by a parameter called `defect`, by
`record_property("defect", name)` inside the test, or by its loop `for defect in (...)` where the name of the test says
`_catches_`. `tests/conftest.py` writes all of it into the reports.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The rows whose area is built. A row is added here when its area is.
REQUIRED = (
    *("C3", "C6", "C7", "C8", "C9", "C10", "C11", "C12", "C13", "C15", "E9", "F5", "F6", "F7", "F10"),
    *("G1", "G2", "G3", "G4", "G5", "G6", "G7", "G8", "G9", "G13", "G14", "G15", "G16", "G18", "G20"),
    *("H1", "H2", "H3", "H4", "H5", "H7", "H8", "H11", "H12", "H13", "H14"),
)


def looped_defects(source: str) -> list[str]:
    """The names that a test's `for defect in (a, b)` goes through; the literal may also be defined above the loop."""
    tree = ast.parse(textwrap.dedent(source))
    literals = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    names: list[str] = []
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For) and "defect" in ast.unparse(loop.target):
            used = [node.id for node in ast.walk(loop.iter) if isinstance(node, ast.Name)]
            values = [loop.iter, *(literals[name] for name in used if name in literals)]
            for value in values:
                entries = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
                names += [ast.unparse(e.elts[0] if isinstance(e, ast.Tuple) else e) for e in entries if e is not None]
    return [name.strip("'\"") for name in names]


@dataclass
class Row:
    passed: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])
    defects: list[str] = field(default_factory=list[str])

    def verdict(self) -> str:
        if self.failed:
            return "FAILED"
        if not self.passed:
            return "NO TEST"
        return "ok" if self.defects else "NO DEFECT"


def read_reports(folder: Path) -> dict[str, Row]:
    """Row -> what its tests did, from every JUnit report in `folder`. A skipped test counts as none."""
    rows: dict[str, Row] = {name: Row() for name in REQUIRED}
    for report in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            properties = [(p.get("name", ""), p.get("value", "")) for p in case.iter("property")]
            for name in dict.fromkeys(value for key, value in properties if key == "row"):
                add_case(rows.setdefault(name, Row()), case, [value for key, value in properties if key == "defect"])
    return rows


def add_case(row: Row, case: ElementTree.Element, defects: list[str]) -> None:
    test = case.get("name", "").partition("[")[0]
    if case.find("failure") is not None or case.find("error") is not None:
        row.failed.append(test)
    elif case.find("skipped") is None:
        row.passed.append(test)
        row.defects += defects


def render(rows: dict[str, Row]) -> str:
    lines: list[str] = []
    for name, row in sorted(rows.items(), key=lambda item: (item[0][0], int(item[0][1:]))):
        tests = list(dict.fromkeys(row.failed + row.passed))
        lines.append(f"{name:<5}{row.verdict():<11}{', '.join(tests) or '-'}")
        lines += [f"{'':<16}catches {defect}" for defect in dict.fromkeys(row.defects)]
    return "\n".join(lines)


def run_tests(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "row", f"--junitxml={folder / 'rows.xml'}", "tests"]
    subprocess.run(command, cwd=ROOT, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="./run rows", description="Print which test keeps which public failure out.")
    parser.add_argument("--reports", type=Path, help="a folder with JUnit reports; without it the tests are run now")
    folder: Path | None = parser.parse_args().reports
    with tempfile.TemporaryDirectory() as own:
        if folder is None:
            folder = Path(own)
            run_tests(folder)
        rows = read_reports(folder)
    print(render(rows))
    bad = [name for name, row in rows.items() if row.failed or (name in REQUIRED and row.verdict() != "ok")]
    print(f"{len(rows) - len(bad)} rows kept, {len(bad)} not: {', '.join(bad) or '-'}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
