"""Captured trees of other projects, unpacked for a test. They lie beside the project and are never copied into it."""

from __future__ import annotations

import lzma
import re
import tarfile
from pathlib import Path

import pytest

from noded.collect.model import Roots

DUMPS = Path(__file__).resolve().parents[3] / "shared" / "data" / "node_dumps"


def dump(name: str) -> Path:
    """The path of a dump; skips the test, saying why, where the data is not there."""
    path = DUMPS / name
    if not path.exists():
        pytest.skip(f"needs the captured data of ../shared/data/node_dumps/{name}")
    return path


def roots_at(tree: Path) -> Roots:
    return Roots(str(tree / "sys"), str(tree / "proc"), str(tree / "dev"))


def unpack_ttar(archive: Path, target: Path) -> None:
    """Unpack a .ttar.xz (the text archive of the Prometheus projects).

    Entries are `Directory: PATH`, or `Path: PATH` followed by `SymlinkTo: TARGET` or by `Lines: N` and N lines. In a
    file's text NULLBYTE stands for a NUL, and EOF at the very end for a missing last newline.
    """
    content = lzma.decompress(archive.read_bytes()).decode("utf-8", "surrogateescape")
    lines = iter(content.split("\n"))
    for line in lines:
        kind, _, name = line.partition(": ")
        if kind not in ("Directory", "Path"):
            continue
        path = target / name
        assert path.resolve().is_relative_to(target.resolve()), name
        if kind == "Directory":
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        how, _, what = next(lines).partition(": ")
        if how == "SymlinkTo":
            path.symlink_to(what)
        else:
            text = "".join(f"{next(lines)}\n" for _ in range(int(what)))
            text = text.removesuffix("EOF\n") if text.endswith("EOF\n") else text
            path.write_text(text.replace("NULLBYTE", "\0"), encoding="utf-8", errors="surrogateescape")


def unpack_tar(archive: Path, target: Path) -> Path:
    """Unpack a tar of one captured machine; the folder that holds its sys and proc."""
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="tar")
    (found,) = (path.parent for path in target.glob("*/proc"))
    return found


def unpack_all(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")


def hwloc_counts(name: str) -> dict[str, int]:
    """How many packages, cores and threads hwloc finds in its dump ``name``: its published right answer."""
    console, xml = DUMPS / "hwloc" / f"{name}.console", DUMPS / "hwloc" / f"{name}.xml"
    if console.exists():
        found = re.findall(r"depth \d+:\s+(\d+) (\w+) ", console.read_text(errors="replace"))
        return {kind: int(count) for count, kind in found}
    text = xml.read_text()
    return {kind: text.count(f'<object type="{kind}"') for kind in ("Package", "Core", "PU")}
