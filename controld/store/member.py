"""An etcd member as a child process: started, watched, started again, and left alone when its data is damaged.

The child dies with this process, however it dies, so that nothing of a killed cluster holds its ports and files.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from controld.store import member_config, sqlite_file
from controld.store.etcd_client import GrpcWire
from controld.store.etcd_endpoint import SOCKET, parse_endpoint
from controld.store.etcd_wire import STATUS, WireError
from controld.store.member_config import MemberConfig
from controld.store.member_policy import (
    Damaged,
    Ended,
    GiveUp,
    MemberEvent,
    Outcast,
    Quarantine,
    Restart,
    Started,
    assess,
)
from controld.store.port import StoreLockedError
from virialpb.etcd.v1 import etcd_pb2 as pb

INSTALL_HINT: Final = "apt-get install etcd-server"
LOG_BYTES_MAX: Final = 16 << 20
TAIL_BYTES: Final = 16 << 10
STOP_SECONDS: Final = 10.0
LOCK_SECONDS: Final = 2.0
"""An etcd whose supervisor was just killed dies with it, but not at the same instant."""
_POLL_SECONDS: Final = 0.02


class MemberError(Exception):
    """The member cannot run; the message says what to do."""


class MemberMissingError(MemberError):
    """There is no etcd on this machine."""


class MemberInUseError(MemberError):
    """Another process runs this member."""


class MemberQuarantinedError(MemberError):
    """Its data is damaged or gone. Nothing is wiped, and nothing is bootstrapped in its place."""


def find_etcd() -> str:
    """Raises MemberMissingError."""
    found = shutil.which("etcd")
    if found is None:
        raise MemberMissingError(f"etcd is not installed: {INSTALL_HINT}")
    return found


class MemberProcess:
    """One etcd. Blocking calls; `supervise` below is the loop around it."""

    def __init__(self, config: MemberConfig) -> None:
        """Raises MemberConfigError."""
        member_config.check(config)
        self.config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = sqlite_file.DirectoryLock(config.directory)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise MemberError("the member was never started")
        return self._process.pid

    def start(self) -> None:
        """Raises MemberMissingError, MemberInUseError, MemberQuarantinedError, OSError."""
        etcd = find_etcd()
        directory = self.config.directory
        with sqlite_file.directory_errors(directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.chmod(0o700)
            self._take_directory()
        try:
            self._require_fit()
            self._process = self._spawn(etcd)
        except BaseException:
            self._lock.release()
            raise

    def _spawn(self, etcd: str) -> subprocess.Popen[bytes]:
        directory = self.config.directory
        (directory / SOCKET).unlink(missing_ok=True)  # of a former life: etcd would not listen over it
        with sqlite_file.new_file(directory / "etcd.json") as partial:
            partial.write_text(member_config.render(self.config))
        self.bound_log()
        command = [etcd, "--config-file", "etcd.json"]
        if (setpriv := shutil.which("setpriv")) is not None:
            command = [setpriv, "--pdeathsig", "KILL", *command]
        with (directory / "etcd.log").open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=directory,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C at a terminal is for us to pass on
                pass_fds=[self._lock.descriptor],  # where it outlives us, nobody takes its socket from it
            )

    def _take_directory(self) -> None:
        """Before its socket is touched: that of a member that runs is no stale one."""
        if not self._lock.held:
            try:
                self._lock.acquire(LOCK_SECONDS)
            except StoreLockedError as error:
                raise MemberInUseError(str(error)) from error

    def _require_fit(self) -> None:
        directory = self.config.directory
        quarantined = directory / "quarantined"
        if quarantined.exists():
            raise MemberQuarantinedError(
                f"{directory / 'data'} is damaged ({quarantined.read_text(errors='replace').strip()}). While the "
                f"others have a majority, move {directory} away and run `virial admin members replace "
                f"{self.config.name}`; else restore a backup"
            )
        if (directory / "started").exists() and not (directory / "data" / "member").exists():
            raise MemberQuarantinedError(
                f"{directory / 'data'} is gone, and this member had started before: begun anew it would have "
                f"forgotten what it acknowledged. Move {directory} away and run `virial admin members replace "
                f"{self.config.name}`, while the others have a majority; else restore a backup. "
                f"{directory / 'started'} says that it ran"
            )

    def settle(self) -> None:
        """It has come up: never bootstrap it again."""
        marker = self.config.directory / "started"
        if not marker.exists():
            with sqlite_file.new_file(marker) as partial:
                partial.write_text(f"{self.config.name}\n")

    def quarantine(self, why: str) -> None:
        with sqlite_file.new_file(self.config.directory / "quarantined") as partial:
            partial.write_text(f"{why}\n")

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self._lock.release()

    def stop(self) -> None:
        """End it in order; kill it where it takes more than STOP_SECONDS."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        if self._process is not None:
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        self._lock.release()

    def tail(self, bytes_max: int = TAIL_BYTES) -> str:
        """The end of its log."""
        try:
            with (self.config.directory / "etcd.log").open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - min(bytes_max, TAIL_BYTES)))
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def bound_log(self) -> None:
        """Keep the last two of LOG_BYTES_MAX; etcd appends, so that it goes on at the beginning of the emptied file."""
        log = self.config.directory / "etcd.log"
        if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
            shutil.copyfile(log, log.with_name("etcd.log.1"))
            os.truncate(log, 0)


async def ready(member: MemberProcess, timeout_seconds: float) -> None:
    """Wait until it is part of a majority. Raises MemberError, with etcd's last words where it ended."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_seconds
    wire = GrpcWire([parse_endpoint(member.config.endpoint)])
    try:
        while loop.time() < end:
            if (status := member.poll()) is not None:
                raise MemberError(f"etcd {member.config.name} ended ({status}): {_last_line(member.tail())}")
            try:
                if (await wire.call(STATUS, pb.StatusRequest(), 1.0)).leader:
                    member.settle()
                    return
            except WireError:
                pass
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        await wire.close()
    raise MemberError(
        f"etcd {member.config.name} found no majority in {timeout_seconds:g} s; see {member.config.directory}/etcd.log"
    )


async def supervise(member: MemberProcess, tell: Callable[[MemberEvent], None]) -> None:
    """Run it until cancelled, and again when it ends.

    Raises MemberMissingError, MemberQuarantinedError, MemberError where it will not come up, OSError.
    """
    fast_ends = 0
    log = member.config.directory / "etcd.log"
    try:
        while True:
            log_from = _size(log)
            began = time.monotonic()
            member.start()
            tell(Started(member.pid))
            status = await _ended(member)
            said = member.tail(max(0, _size(log) - log_from))
            decision, fast_ends = assess(fast_ends=fast_ends, up_seconds=time.monotonic() - began, tail=said)
            match decision:
                case Restart():
                    tell(Ended(status, decision.delay_seconds, _last_line(said)))
                    await asyncio.sleep(decision.delay_seconds)
                case Quarantine():
                    member.quarantine(decision.why)
                    tell(Damaged(decision.why))
                    member.start()  # raises, with what to do
                case Outcast():
                    raise MemberQuarantinedError(_outcast(member.config, wiped=decision.wiped))
                case GiveUp():
                    raise MemberError(f"etcd {member.config.name} does not come up: {_plain(decision.why)}")
    finally:
        await asyncio.to_thread(member.stop)


def _outcast(config: MemberConfig, *, wiped: bool) -> str:
    if wiped:
        return (
            f"the others know {config.name} from before, and {config.directory} is empty: begun anew it would have "
            "forgotten what it acknowledged. Move the directory away and run `virial admin members replace "
            f"{config.name}`"
        )
    return (
        f"{config.name} was removed from the cluster and cannot come back with the data in {config.directory}. If it "
        f"shall be a member, move the directory away and run `virial admin members add {config.name} "
        f"{config.peers[config.name]}`"
    )


async def _ended(member: MemberProcess) -> int:
    settled = False
    while True:
        status = member.poll()
        if status is not None:
            return status
        if not settled and (member.config.directory / "data" / "member" / "wal").exists():
            settled = True
            member.settle()
        member.bound_log()
        await asyncio.sleep(0.1)


def _environment() -> dict[str, str]:
    """Without what could set etcd's options by itself."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    machine = platform.machine()
    if machine in ("aarch64", "arm64"):  # 3.4 asks to be told that this is meant
        environment["ETCD_UNSUPPORTED_ARCH"] = "arm64"
    return environment


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return _plain(lines[-1]) if lines else "it said nothing"


def _plain(line: str) -> str:
    """etcd's own words, without its stack: it writes a JSON object a line."""
    try:
        entry: object = json.loads(line)
    except ValueError:
        entry = None
    fields = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
    said = [str(fields[name]) for name in ("msg", "error") if fields.get(name)]
    return (": ".join(said) or line)[:500]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
