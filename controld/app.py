"""A controller process, put together: the one place that builds clock, randomness, store, planner, leader, servers."""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import os
import random
import signal
import socket
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from controld.clock import SystemClock
from controld.config import Config, StoreKind
from controld.core.state import State
from controld.core.validate import SpecLimits
from controld.heap import keep_loaded, keep_survivors
from controld.matching.port import PlannerLostError, PlannerPort, Snapshot
from controld.operating import operating
from controld.ports import Ports, forget_ports, write_ports
from controld.reconcile.limits import Limits
from controld.replica.election import Timings
from controld.replica.elector import Place
from controld.replica.errors import NotLeaderError
from controld.replica.leader import Leader
from controld.replica.planner import ProcessPlanner
from controld.replica.replica import Replica
from controld.replica.settings import LeaderSettings
from controld.securing import Security, load_security
from controld.service.address import AddressError, check_address
from controld.service.backend import Backend, LeaderPort
from controld.service.event_log import write_events
from controld.service.issuer import IssuerError
from controld.service.join_server import JoinServer
from controld.service.metrics import Metrics
from controld.service.metrics_http import MetricsServer
from controld.service.peers import GrpcPeers
from controld.service.server import METHODS, ApiServer
from controld.service.telemetry import LogName, StructLog
from controld.service.tls import ServerTls
from controld.store.etcd import EtcdStore
from controld.store.etcd_client import ClientTls, GrpcWire
from controld.store.etcd_endpoint import parse_endpoint
from controld.store.etcd_session import EtcdTimes
from controld.store.memory import MemoryStore
from controld.store.port import (
    SharedStore,
    Store,
    StoreCorruptError,
    StoreError,
    StoreLockedError,
    StoreStatus,
    StoreUnavailableError,
)
from controld.store.sqlite import SqliteStore
from controld.store.sqlite_room import RESERVE_BYTES
from virialpb.addresses import is_loopback
from virialpb.tlsfiles import TlsFilesError

NS_PER_MS: Final = 1_000_000
NS_PER_SECOND: Final = 1_000_000_000
MEMBER_GONE_SECONDS: Final = 0.45
STOP_SECONDS: Final = 5.0

EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 2
EXIT_PORT: Final = 3
EXIT_DATA_DIRECTORY: Final = 4


class StartError(Exception):
    """What keeps the controller from starting: one sentence for its operator, and the exit status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a leader is made of, alone or in turn with others."""

    clock: SystemClock
    rng: random.SystemRandom
    planner: PlannerPort
    settings: LeaderSettings
    identity: str
    metrics: Metrics


class App:
    """One life of a controller, alone or one of several. For tests `planner` replaces the process that plans, and
    `store` (not opened) the one that the settings name."""

    def __init__(
        self,
        config: Config,
        *,
        log: StructLog,
        planner: PlannerPort | None = None,
        store: SharedStore | None = None,
    ) -> None:
        self._config = config
        self.started = asyncio.Event()
        self._log = log
        self._planner = planner
        self._store = store
        self._stack = AsyncExitStack()
        self._leader: Leader | None = None
        self._replica: Replica | None = None
        self._server: ApiServer | None = None
        self._events: asyncio.Task[None] | None = None
        self._peers: GrpcPeers | None = None

    @property
    def leader(self) -> Leader:
        """Of a controller that is alone."""
        if self._leader is None:
            raise RuntimeError("the controller has not started, or is one of several")
        return self._leader

    @property
    def replica(self) -> Replica:
        """Of a controller that is one of several."""
        if self._replica is None:
            raise RuntimeError("the controller has not started, or is alone")
        return self._replica

    async def start(self) -> Ports:
        """Raises StartError; then nothing is left running."""
        try:
            ports = await self._start()
            self.started.set()
            return ports
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> Ports:
        config = self._config
        store = await self._open_store()
        forget_ports(Path(config.data_dir))
        # Before it leads: a start that is bound to fail shall not depose anyone.
        check_addresses(config)
        security = self._load_security()
        metrics = Metrics(METHODS)
        planner = self._planner
        if planner is None:
            planner = ProcessPlanner(plan_deadline_seconds=config.loop.plan_deadline_ns / NS_PER_SECOND)
        self._stack.push_async_callback(planner.close)
        try:
            settings = within(leader_settings(config), await store.status())
            identity = config.identity or socket.gethostname()
            parts = _Parts(SystemClock(), random.SystemRandom(), planner, settings, identity, metrics)
            leader: LeaderPort
            if config.peers:
                leader = self._replica = self._one_of_several(store, parts, security.asks)
            else:
                leader = await self._alone(store, parts)
        except StoreError as error:
            raise StartError(str(error), _status_of(error)) from error
        self._stack.push_async_callback(self._stop_leading)
        metrics.count_state(lambda: _state_of(leader), lambda: leader.view)
        metrics.tell_role(lambda: self._replica is None or self._replica.leads)
        operated = operating(
            config,
            store=store,
            place=Place(identity, config.address, config.others),
            replica=self._replica,
            colleagues=self._peers,
            version=version(),
            log=self._log,
        )
        backend = Backend(
            leader=leader,
            clock=parts.clock,
            limits=SpecLimits(fence_after_min_ns=config.fence_after_min_ns),
            fence_after_default_ns=config.lease.fence_after_ns,
            store_kind=config.store.kind.value,
            identity=identity,
            version=version(),
            replica=self._replica,
            admin=operated.admin,
        )
        make_id = lambda: f"c-{parts.rng.getrandbits(96):024x}"  # noqa: E731
        registrar = security.registrar(leader)
        server = ApiServer(
            backend, log=self._log, metrics=metrics, make_id=make_id, gate=security.gate(), registrar=registrar
        )
        joins = JoinServer(registrar, log=self._log, metrics=metrics, make_id=make_id)
        ports = await self._listen(server, MetricsServer(metrics.registry), joins, security)
        if self._replica is not None:
            await self._replica.start()
            if operated.care is not None:
                self._stack.callback(asyncio.create_task(operated.care.run(), name="care for the members").cancel)
            warming = asyncio.create_task(_warm_up(planner), name="planner warm-up")
            self._stack.callback(warming.cancel)
        keep_loaded()
        self._log(
            LogName.CONTROLD_STARTED,
            grpc_address=ports.grpc_address,
            metrics_address=ports.metrics_address,
            data_dir=config.data_dir,
            store=config.store.kind.value,
            version=backend.version,
        )
        return ports

    async def _alone(self, store: Store, parts: _Parts) -> Leader:
        """Leads from now on, or the process ends. Raises StoreError."""
        self._leader = Leader(
            store=store,
            clock=parts.clock,
            rng=parts.rng,
            planner=parts.planner,
            settings=parts.settings,
            identity=parts.identity,
            log=self._log,
            observer=parts.metrics,
        )
        await self._leader.start()
        self._log_events(self._leader)
        return self._leader

    def _one_of_several(self, store: Store, parts: _Parts, tls: ServerTls | None) -> Replica:
        """Not started: it serves before it leads. Raises StartError."""
        config = self._config
        if not isinstance(store, EtcdStore | MemoryStore):
            raise StartError("peers: several controllers need a store that they share: store.kind etcd", EXIT_CONFIG)
        # Controllers show each other the certificates that they serve with.
        peers = self._peers = GrpcPeers(config.address, None if tls is None else tls.content)
        if tls is not None:
            tls.on_change.append(peers.renew)
        self._stack.push_async_callback(peers.close)
        election = config.election
        return Replica(
            place=Place(parts.identity, config.address, config.others),
            store=store,
            peers=peers,
            clock=parts.clock,
            rng=parts.rng,
            planner=parts.planner,
            settings=parts.settings,
            timings=Timings(election.ping_interval_ns, election.takeover_ns, election.proof_max_ns),
            log=self._log,
            observer=parts.metrics,
            on_lead=self._log_events,
            on_loaded=keep_loaded,
        )

    def _log_events(self, leader: Leader) -> None:
        """Those of a former leadership end with its hub."""
        if self._events is None:
            self._stack.callback(self._end_events)
        self._events = asyncio.create_task(write_events(leader.hub, self._log), name="event log")

    def _end_events(self) -> None:
        if self._events is not None:
            self._events.cancel()

    async def stop(self) -> None:
        """Take no new calls, finish the commit under way, answer the rest with "not leader", close the store."""
        self._log(LogName.CONTROLD_STOPPING)
        await self._stack.aclose()
        self._log(LogName.CONTROLD_STOPPED)

    async def run(self) -> int:
        """Serve until a signal, or until one that is alone loses the leadership. The exit status. Raises StartError."""
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, stopping)
        keep_survivors()
        await self.start()
        over = self.leader.lost if self._replica is None else self._replica.broken
        waits = [asyncio.create_task(stopping.wait()), asyncio.create_task(over.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await self.stop()
        return 0 if stopping.is_set() else EXIT_FAILED

    @staticmethod
    def _signalled(stopping: asyncio.Event) -> None:
        if stopping.is_set():
            os._exit(EXIT_FAILED)  # asked twice: at once. What was acknowledged is on disk
        stopping.set()

    async def _open_store(self) -> Store:
        directory = Path(self._config.data_dir)
        store = self._store or make_store(self._config)
        try:
            make_directory(directory)
            await store.open()
        except (StoreLockedError, StoreCorruptError) as error:
            raise StartError(str(error), EXIT_DATA_DIRECTORY) from error
        except StoreUnavailableError as error:
            raise StartError(str(error), EXIT_FAILED) from error
        except StoreError as error:
            raise StartError(f"cannot open the store in {directory}: {error}", EXIT_DATA_DIRECTORY) from error
        except OSError as error:
            raise StartError(_directory_message(directory, error), EXIT_DATA_DIRECTORY) from error
        self._stack.push_async_callback(store.close)
        return store

    def _load_security(self) -> Security:
        """Raises StartError."""
        try:
            security = load_security(self._config, self._log)
        except (TlsFilesError, IssuerError) as error:
            raise StartError(f"cannot use the TLS files: {error}", EXIT_CONFIG) from error
        if security.tls is not None:
            self._stack.callback(asyncio.create_task(security.tls.watch(), name="TLS files").cancel)
        return security

    async def _listen(
        self, server: ApiServer, metrics_server: MetricsServer, joins: JoinServer, security: Security
    ) -> Ports:
        config, tls = self._config, security.tls
        host, port = config.grpc_address
        if tls is None and not is_loopback(host):
            self._log(LogName.CONTROLD_INSECURE, listen=config.listen)
        try:
            bound = await server.start(host, port, tls)
        except AddressError as error:
            raise _port_error(error, "--listen") from error
        self._server = server
        ports = Ports(
            _join(host, bound), await self._serve_metrics(metrics_server), await self._serve_joins(joins, security)
        )
        directory = Path(config.data_dir)
        try:
            write_ports(directory, ports)
        except OSError as error:
            raise StartError(_directory_message(directory, error), EXIT_DATA_DIRECTORY) from error
        self._stack.callback(forget_ports, directory)
        return ports

    async def _serve_joins(self, server: JoinServer, security: Security) -> str:
        if security.join_address is None or security.tls is None:
            return ""
        try:
            bound = await server.start(*security.join_address, security.tls)
        except AddressError as error:
            raise _port_error(error, "--tls-join-listen") from error
        self._stack.push_async_callback(server.stop)
        return _join(security.join_address[0], bound)

    async def _serve_metrics(self, server: MetricsServer) -> str:
        address = self._config.metrics_address
        if address is None:
            return ""
        try:
            bound = await server.start(*address)
        except OSError as error:
            raise _port_error(error, "--metrics-listen") from error
        self._stack.push_async_callback(server.stop)
        return _join(address[0], bound)

    async def _stop_leading(self) -> None:
        """Both at once: streams end when the leader does, so that stopping takes no longer than the last commit. One of
        several serves until another leads, so that its callers are told where to go."""
        if self._replica is not None:
            await self._replica.stop()
        stops = [] if self._leader is None else [self._leader.stop()]
        if self._server is not None:
            stops.append(self._server.stop(STOP_SECONDS))
        await asyncio.gather(*stops)


def leader_settings(config: Config) -> LeaderSettings:
    limits = Limits(
        grace_ns=config.lease.grace_ns,
        session_fence_after_ns=config.lease.fence_after_ns,
        reconnect_ns=config.loop.reconnect_ns,
        prepare_timeout_ns=config.loop.prepare_timeout_ns,
    )
    settings = LeaderSettings(
        limits=limits,
        renew_interval_ms=config.lease.renew_interval_ns // NS_PER_MS,
        request_keep_seconds=config.keep.requests_ns // NS_PER_SECOND,
        events_max=config.keep.events,
        ended_jobs_max=config.keep.ended_jobs,
    )
    # Of several, whoever gets no outcome from a store that has asked again by itself makes room for another.
    return replace(settings, commit_attempts_max=1) if config.peers else settings


def make_store(config: Config) -> Store:
    """The one that the settings name, not opened."""
    match config.store.kind:
        case StoreKind.SQLITE:
            return SqliteStore(
                Path(config.data_dir),
                size_bytes_max=config.store.size_max_bytes,
                first_history=SystemClock().unix_ns() // NS_PER_SECOND,
                reserve_bytes=RESERVE_BYTES,
            )
        case StoreKind.ETCD:
            return etcd_store(config)
        case StoreKind.MEMORY:
            return MemoryStore()


async def _warm_up(planner: PlannerPort) -> None:
    """A planner takes a while to start: it shall not be waited for after a takeover."""
    with suppress(PlannerLostError):
        await planner.plan(Snapshot(0, ()), ())


def _state_of(leader: LeaderPort) -> State:
    """For counting: empty while a follower has no copy."""
    try:
        return leader.state
    except NotLeaderError:
        return State()


def _times(config: Config) -> EtcdTimes:
    """One of several lets another lead soon after its member is gone; a single one waits for it."""
    times = EtcdTimes(open=config.store.open_timeout_ns / NS_PER_SECOND)
    return replace(times, refused=MEMBER_GONE_SECONDS) if config.peers else times


def etcd_store(config: Config, *, beside: bool = False) -> EtcdStore:
    """Not opened. `config` was validated. `beside`: a controller may have the data directory locked meanwhile."""
    store = config.store
    tls = None
    if store.ca is not None and store.certificate is not None and store.key is not None:
        tls = ClientTls(Path(store.ca), Path(store.certificate), Path(store.key))
    endpoints = [parse_endpoint(text) for text in store.etcd_endpoints]
    return EtcdStore(
        lambda: GrpcWire(endpoints, tls),
        rng=random.SystemRandom(),
        directory=None if beside else Path(config.data_dir),
        prefix=store.prefix,
        size_bytes_max=store.size_max_bytes,
        times=_times(config),
        first_history=SystemClock().unix_ns() // NS_PER_SECOND,
    )


def within(settings: LeaderSettings, status: StoreStatus) -> LeaderSettings:
    """Batches that the store takes in one transaction."""
    operations_max, bytes_max = status.commit_operations_max, status.commit_bytes_max
    return replace(
        settings,
        batch_operations_max=min(settings.batch_operations_max, operations_max or settings.batch_operations_max),
        batch_bytes_max=min(settings.batch_bytes_max, bytes_max or settings.batch_bytes_max),
    )


def check_addresses(config: Config) -> None:
    """Raises StartError."""
    for flag, address in (("--listen", config.grpc_address), ("--metrics-listen", config.metrics_address)):
        if address is not None:
            try:
                check_address(*address)
            except AddressError as error:
                raise _port_error(error, flag) from error


def make_directory(directory: Path) -> None:
    """Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def version() -> str:
    try:
        return importlib.metadata.version("virial")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return "0+unknown"


def _port_error(error: OSError, flag: str) -> StartError:
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRNOTAVAIL:
        return StartError(f"{reason}; name an address of this machine with {flag}", EXIT_PORT)
    return StartError(f"{reason}; stop what uses it, or name another with {flag} (port 0 takes a free one)", EXIT_PORT)


def _status_of(error: StoreError) -> int:
    return EXIT_DATA_DIRECTORY if isinstance(error, StoreCorruptError | StoreLockedError) else EXIT_FAILED


def _directory_message(directory: Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    if str(directory) in reason:
        return reason  # the store has said it all
    return f"cannot use the data directory {directory}: {reason}; name one that this user may write with --data-dir"


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
