"""A disk of one member's own: a file with ext4 in it. It can be full, and its writes can be held to a few a second."""

from __future__ import annotations

import contextlib
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.netns import run

SIZE_BYTES = 320 << 20
BLKIO = Path("/sys/fs/cgroup/blkio")


@dataclass(frozen=True, slots=True)
class Disk:
    """Mounted at `path`. `device` is empty where the kernel throttles no writes."""

    path: Path
    group: Path
    device: str

    def fill(self) -> None:
        """Not a byte is left."""
        with contextlib.suppress(OSError), (self.path / "ballast").open("wb", buffering=0) as ballast:
            while ballast.write(bytes(1 << 20)):
                pass
        with contextlib.suppress(OSError), (self.path / "ballast").open("ab", buffering=0) as ballast:
            while ballast.write(bytes(1 << 10)):
                pass

    def empty(self) -> None:
        (self.path / "ballast").unlink(missing_ok=True)

    def slow(self, pid: int, writes_per_second: int) -> None:
        """For this process, until `fast`."""
        self.group.mkdir(exist_ok=True)
        (self.group / "blkio.throttle.write_iops_device").write_text(f"{self.device} {writes_per_second}")
        (self.group / "cgroup.procs").write_text(str(pid))

    def fast(self) -> None:
        if self.group.exists():
            (self.group / "blkio.throttle.write_iops_device").write_text(f"{self.device} 0")

    def close(self) -> None:
        """Of processes that are gone."""
        self.fast()
        run(["umount", "--lazy", str(self.path)])
        with contextlib.suppress(OSError):
            self.group.rmdir()


def mount(path: Path, image: Path) -> Disk:
    """Raises CalledProcessError, FileNotFoundError where such disks cannot be made here."""
    with image.open("wb") as file:
        file.truncate(SIZE_BYTES)
    run(["mkfs.ext4", "-q", str(image)])
    run(["mount", "-o", "loop", str(image), str(path)])
    path.chmod(0o700)
    lost = path / "lost+found"
    lost.rmdir()
    device = ""
    if (BLKIO / "blkio.throttle.write_iops_device").exists() or (BLKIO / "cgroup.procs").exists():
        found = subprocess.run(["findmnt", "-no", "MAJ:MIN", str(path)], capture_output=True, text=True, check=True)
        device = found.stdout.strip()
    return Disk(path, BLKIO / f"virial-chaos-{uuid.uuid4().hex[:8]}", device)
