"""Builds an agent: the ONE place of noded that makes the clock, randomness, files, streams, guardian and collectors.

A stop of noded leaves its guardian and the tasks running, and a restarted one takes them up again; only
`kill_tasks` ends them too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import socket
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import grpc
import yaml

from noded.certified import CannotJoin, OwnCertificate
from noded.collect.model import Inventory, Readings, Roots
from noded.collect.runner import STALE_PERIODS, CollectRunner
from noded.collect.sweep import collect_inventory, collect_readings
from noded.config import Machine, NodedConfig, TlsConfig, join_addresses, resolved, split_address
from noded.core import events as e
from noded.core.agent import AgentCore
from noded.core.messages import NodeFacts
from noded.declared import Declared, declared_of, merged
from noded.driver import Driver
from noded.files import NodeFiles
from noded.link.bulk import BulkLink, Target
from noded.link.control import ControlLink
from noded.link.logfiles import LogFiles
from noded.link.stream import Dialer
from noded.link.tls import read_credentials, watch_credentials
from noded.logs import LogName, NodeLog
from noded.metrics import NodeMetrics, serve_metrics
from noded.readings import ReadingsReport
from noded.run.client import GuardianClient, GuardianUnavailable
from noded.worker import Worker, WorkRefused, WorkTimeout
from virialpb.layered import ConfigError
from virialpb.rdl import RdlError, parse_document
from virialpb.tlsfiles import TlsFiles, TlsFilesError
from virialpb.version import own_version

MACHINE_SECONDS: Final = 20.0
LOOK_SECONDS: Final = 0.25
KILL_GRACE_MS: Final = 3_000
KILL_SECONDS: Final = 15.0
RDL_BYTES_MAX: Final = 8 << 20


class CannotStart(Exception):
    """One message for whoever started this noded."""


def boottime_ns() -> int:
    """The clock of leases: it goes on during a suspend, and nobody sets it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Options:
    """What is said on the command line only."""

    kill_tasks: bool = False


async def run(config: NodedConfig, options: Options, log: NodeLog) -> None:
    """From start to SIGTERM or SIGINT. Raises ConfigError, DataDirProblem and CannotStart."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    worker = Worker()
    config = resolved(config, await read_machine(config, worker))
    declared = read_declared(config)
    files = NodeFiles(Path(config.data_dir))
    node_uid = files.open(lambda: secrets.token_hex(16))
    try:
        config, own = await certified(config, files.data_dir, log)
        leader_epoch, cluster_uid = files.leader()
        core = AgentCore(
            node_uid,
            facts_of(config, declared),
            local_tier=str(files.data_dir / "checkpoints"),
            leader_epoch=leader_epoch,
            cluster_uid=cluster_uid,
        )
        guardian = GuardianClient(
            files.data_dir,
            private_dir(config.runtime_dir),
            allow_root_tasks=config.allow_root_tasks,
            fencing=config.fencing,
        )
        agent = Agent(config, declared, core, guardian, files, worker, log, own)
        # Before the guardian, which outlives this process: a start that is bound to fail leaves nothing behind.
        agent.listen()
        try:
            await guardian.connect()
        except GuardianUnavailable as error:
            raise CannotStart(str(error)) from None
        log.info(LogName.NODED_STARTED, uid=node_uid, data_dir=config.data_dir, controllers=list(config.controllers))
        try:
            await agent.run(stop, options)
        finally:
            await guardian.close()
            log.info(LogName.NODED_STOPPED, tasks_killed=options.kill_tasks)
    finally:
        files.close()


class Agent:
    """The parts of one agent, wired."""

    def __init__(
        self,
        config: NodedConfig,
        declared: Declared,
        core: AgentCore,
        guardian: GuardianClient,
        files: NodeFiles,
        worker: Worker,
        log: NodeLog,
        own: OwnCertificate | None = None,
    ) -> None:
        self._config = config
        self._own = own
        self._declared = declared
        self._core = core
        self._guardian = guardian
        self._files = files
        self._log = log
        self._events: Counter[str] = Counter()
        self._driver = Driver(
            core,
            guardian,
            files,
            worker,
            boottime_ns,
            log,
            bind_address=config.bind_address,
            on_handled=self._handled,
        )
        jitter = random.SystemRandom()
        self._tls = tls_files(config.tls)
        credentials = None if self._tls is None else credentials_of(self._tls)
        dialer = Dialer(credentials, warm=config.controllers)
        self._control = ControlLink(dialer, config.controllers, jitter, self._driver.post, log)
        self._bulk = BulkLink(
            Dialer(credentials),
            LogFiles(files.data_dir / "tasks"),
            worker,
            jitter,
            self._is_over,
            log,
        )
        self._driver.attach(self._control)
        self._ports = {"pid": str(os.getpid())}
        self._metrics = NodeMetrics(core, self._control.counters, boottime_ns, self._events, lambda: worker.running)

    def listen(self) -> None:
        """Open the metrics endpoint, if one is wanted. Raises CannotStart."""
        address = split_address(self._config.metrics_listen)
        if address is not None:
            host, port = address
            try:
                port = serve_metrics(self._metrics, host, port)
            except OSError as error:
                raise CannotStart(f"metrics_listen: cannot listen on {host}:{port}: {error.strerror}") from None
            self._ports["metrics"] = f"{host}:{port}"

    async def run(self, stop: asyncio.Event, options: Options) -> None:
        """Until `stop`. `listen` comes before."""
        self._files.save_ports(self._ports)
        inventory, readings = self._collectors()
        work = [
            asyncio.create_task(self._driver.run(), name="driver"),
            asyncio.create_task(self._streams(), name="streams"),
            asyncio.create_task(self._watch(inventory, readings), name="collectors"),
        ]
        if self._tls is not None:
            work.append(asyncio.create_task(watch_credentials(self._tls, self._renew, self._log), name="TLS files"))
        if self._tls is not None and self._own is not None:
            keep = self._own.keep(
                self._config.controllers, partial(read_credentials, self._tls), random.SystemRandom(), self._log
            )
            work.append(asyncio.create_task(keep, name="certificate"))
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait((stopping, *work), return_when=asyncio.FIRST_COMPLETED)
            if stopping in done and options.kill_tasks:
                await self._kill_tasks()
        finally:
            inventory.stop(0)
            readings.stop(0)
            for task in (stopping, *work):
                task.cancel()
            await asyncio.wait((stopping, *work))
        for task in done:
            task.result()

    async def _streams(self) -> None:
        """No stream before the first guardian was met: it makes this node's incarnation."""
        await self._driver.met_guardian.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._control.run(), name="control")
            group.create_task(self._bulk.run(), name="bulk")

    def _renew(self, credentials: grpc.ChannelCredentials) -> None:
        self._bulk.renew(credentials)
        self._control.renew(credentials)

    async def _kill_tasks(self) -> None:
        self._driver.post(e.ShutdownRequested(KILL_GRACE_MS))
        await self._driver.wait_until_ended(KILL_SECONDS)
        with contextlib.suppress(GuardianUnavailable):
            await self._guardian.shutdown(kill=True)

    def _handled(self, event: e.Event) -> None:
        self._events[type(event).__name__] += 1
        address, incarnation = self._control.address, self._core.incarnation
        if self._core.welcomed and address is not None and incarnation is not None:
            self._bulk.follow(Target(address, incarnation))
        else:
            self._bulk.follow(None)

    def _is_over(self, slot: str) -> bool:
        held = next((held for held in self._core.slots.all() if held.id == slot), None)
        return held is None or held.ended

    # -- collectors

    def _collectors(self) -> tuple[CollectRunner[Inventory], CollectRunner[Readings]]:
        periods = self._config.collect
        inventory = CollectRunner(
            "inventory", lambda _: collect_inventory(Roots()), periods.inventory_period_ns, boottime_ns
        )
        readings = CollectRunner(
            "readings", lambda now_ns: collect_readings(Roots(), now_ns), periods.readings_period_ns, boottime_ns
        )
        inventory.start()
        readings.start()
        return inventory, readings

    async def _watch(self, inventory: CollectRunner[Inventory], readings: CollectRunner[Readings]) -> None:
        """Hands on what the collectors' threads have. Looking never waits for them."""
        report = ReadingsReport(readings.period_ns)
        inventory_at_ns, readings_at_ns, failures = -1, -1, 0
        while True:
            found = inventory.latest()
            if found.value is not None and found.at_ns != inventory_at_ns:
                inventory_at_ns = found.at_ns
                whole = merged(found.value, self._declared)
                self._bulk.report(whole)
                self._driver.post(e.InventoryRead(whole))
            taken = readings.latest()
            now_ns = boottime_ns()
            if taken.at_ns != readings_at_ns or taken.overdue(now_ns, STALE_PERIODS * readings.period_ns):
                readings_at_ns = taken.at_ns
                self._driver.post(e.ReadingsTaken(report.samples(taken, now_ns)))
            if found.failures + taken.failures > failures:
                failures = found.failures + taken.failures
                self._log.error(LogName.COLLECTOR_FAILED, why=found.last_failure or taken.last_failure)
            await asyncio.sleep(LOOK_SECONDS)


def facts_of(config: NodedConfig, declared: Declared) -> NodeFacts:
    return NodeFacts(
        name=config.name,
        advertise_address=config.advertise_address,
        cpu_millis=config.cpu_millis or 0,
        memory_bytes=config.memory_bytes or 0,
        labels=tuple(sorted((dict(declared.labels) | dict(config.labels)).items())),
        version=own_version(),
    )


async def certified(config: NodedConfig, data_dir: Path, log: NodeLog) -> tuple[NodedConfig, OwnCertificate | None]:
    """With the certificate of a node that joined by a token, or joins now. Raises CannotStart."""
    if config.tls != TlsConfig() or not config.join_token_file:
        return config, None
    own = OwnCertificate(data_dir, config.name)
    try:
        if not own.there(datetime.now(UTC)):
            await own.join(config.join_token_file, join_addresses(config), random.SystemRandom(), log)
    except CannotJoin as problem:
        raise CannotStart(str(problem)) from None
    except OSError as error:
        raise CannotStart(f"cannot keep this node's certificate: {error.filename}: {error.strerror}") from None
    return replace(config, tls=own.tls), own


def tls_files(tls: TlsConfig) -> TlsFiles | None:
    return None if tls.ca is None else TlsFiles(ca=tls.ca, certificate=tls.certificate, key=tls.key)


def credentials_of(files: TlsFiles) -> grpc.ChannelCredentials:
    """Raises CannotStart naming the file that cannot be used."""
    try:
        return read_credentials(files)
    except TlsFilesError as error:
        raise CannotStart(f"tls: {error}") from None


async def read_machine(config: NodedConfig, worker: Worker) -> Machine:
    """What this machine offers. A host that cannot be read in time is described by its settings, or refused there."""
    cpu_millis, memory_bytes = None, None
    with contextlib.suppress(WorkTimeout, WorkRefused):
        found = await worker.run(lambda: collect_inventory(Roots()), MACHINE_SECONDS)
        cpu_millis, memory_bytes = found.cpu_millis, found.memory_bytes
    address = own_address(config.controllers[0])
    return Machine(socket.gethostname(), address, cpu_millis, memory_bytes, tempfile.gettempdir())


def own_address(controller: str) -> str:
    """The address this host would reach the controller from; nothing is sent. The host's name where none is known."""
    host, port = split_address(controller) or ("", 0)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def read_declared(config: NodedConfig) -> Declared:
    """The RDL file of this node, if there is one. Raises ConfigError."""
    if not config.rdl:
        return Declared()
    path = Path(config.rdl)
    try:
        with path.open("rb") as file:
            text = file.read(RDL_BYTES_MAX + 1)
        if len(text) > RDL_BYTES_MAX:
            raise ConfigError([f"rdl: {path} is larger than {RDL_BYTES_MAX} bytes"])
        document = parse_document(yaml.safe_load(text))
    except OSError as error:
        raise ConfigError([f"rdl: cannot read {path}: {error.strerror}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"rdl: {path} is not YAML: {' '.join(str(error).split())}"]) from None
    except RdlError as error:
        raise ConfigError([f"rdl: {path}: {problem}" for problem in error.errors]) from None
    return declared_of(document, config.name, str(path))


def private_dir(runtime_dir: str) -> Path:
    """The runtime directory, ours alone: in a shared place for temporary files somebody else may have made it.

    Raises CannotStart.
    """
    path = Path(runtime_dir)
    try:
        path.mkdir(mode=0o711, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise CannotStart(f"runtime_dir: cannot make {path}: {error.strerror}") from None
    if path.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise CannotStart(
            f"runtime_dir: {path} must be a directory that belongs to this user and that no other can write to;"
            " choose another one"
        )
    return path
