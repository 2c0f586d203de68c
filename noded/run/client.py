"""noded's side of the guardian: connects, starts one where none runs, asks, hears events, and connects again.

Closing the client leaves the guardian and its tasks running: that is the point of having one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from noded.run import protocol
from noded.run.fields import JsonObject, get_int, get_text, get_texts
from noded.run.guardian import SOURCE_ROOT
from noded.run.protocol import REPLY_BYTES_MAX, Hello, PrepareRequest, Refusal, SlotStatus, Started, Token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

EVENTS_MAX: Final = 10_000
SPAWN_SECONDS: Final = 30.0
_SLOW: Final = ("prepare", "shutdown")
RETRY_SECONDS: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class GuardianError(Exception):
    """The base of what the client raises."""


class GuardianUnavailable(GuardianError):
    """No answer: it is gone, or hangs. Whether a request was carried out is not known; all of them can be repeated."""


class GuardianRefused(GuardianError):
    """The guardian said no, for `reason`."""

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection stands (again). Another nonce than before: another guardian, whose leftovers say what was lost."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class Disconnected:
    """No guardian answers for now. Leases must not be renewed until Connected."""

    why: str


ClientEvent = protocol.Event | Connected | Disconnected


class GuardianClient:
    """One connection at a time, used from one event loop.

    `events()` yields Connected first, then what the guardian says; Disconnected and Connected around each loss.
    Requests raise GuardianRefused or GuardianUnavailable.
    """

    def __init__(
        self,
        data_dir: Path,
        runtime_dir: Path,
        *,
        allow_root_tasks: bool = False,
        fencing: str = "auto",
        spawn: bool = True,
        request_timeout_s: float = 10.0,
    ) -> None:
        self._data_dir = data_dir
        self._runtime_dir = runtime_dir
        self._allow_root_tasks = allow_root_tasks
        self._fencing = fencing
        self._may_spawn = spawn
        self._timeout_s = request_timeout_s
        # The guardian itself gives a check of user, command and directory, and a shutdown, a while.
        self._slow_timeout_s = request_timeout_s + 10.0
        self._writer: asyncio.StreamWriter | None = None
        self._replies: dict[int, asyncio.Future[JsonObject]] = {}
        self._next_id = 0
        self._events: asyncio.Queue[ClientEvent] = asyncio.Queue(EVENTS_MAX)
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def connected(self) -> bool:
        return self._writer is not None

    async def connect(self) -> Hello:
        """Connects, starting a guardian when none answers. Raises GuardianUnavailable with what it said on stderr."""
        reader, hello = await self._open()
        self._task = asyncio.create_task(self._run(reader), name="guardian-client")
        return hello

    async def close(self) -> None:
        """Leaves the guardian running."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._drop("the client was closed")

    async def events(self) -> AsyncIterator[ClientEvent]:
        while True:
            yield await self._events.get()

    # -- requests

    async def prepare(self, request: PrepareRequest) -> int:
        """The held port, or 0."""
        return get_int(await self._ask("prepare", **protocol.prepare_to_json(request)), "port")

    async def start(self, slot: str, token: Token, env_add: Mapping[str, str] | None = None) -> Started:
        reply = await self._ask("start", slot=slot, token=protocol.token_to_json(token), env_add=dict(env_add or {}))
        return Started(get_int(reply, "pid"), get_int(reply, "init_pid"), get_int(reply, "start_ticks"))

    async def extend(self, deadlines: Mapping[str, int]) -> frozenset[str]:
        """Slots whose deadline could not be moved: it has passed, or there is no such slot."""
        return frozenset(get_texts(await self._ask("extend", deadlines=dict(deadlines)), "refused"))

    async def stop(self, slot: str, grace_ms: int, reason: str) -> None:
        await self._ask("stop", slot=slot, grace_ms=grace_ms, reason=reason)

    async def release(self, slot: str) -> None:
        """Raises GuardianRefused(NOT_EMPTY) while anything of it may still run."""
        await self._ask("release", slot=slot)

    async def reply(self, slot: str, call_id: str, result: JsonObject) -> None:
        await self._ask("reply", slot=slot, call_id=call_id, result=result)

    async def reply_error(self, slot: str, call_id: str, reason: str, message: str) -> None:
        await self._ask("reply", slot=slot, call_id=call_id, error={"reason": reason, "message": message})

    async def push(self, slot: str, message: JsonObject) -> None:
        await self._ask("push", slot=slot, message=message)

    async def list_slots(self) -> tuple[SlotStatus, ...]:
        return protocol.statuses_from_json(await self._ask("list"), "slots")

    async def hello(self) -> Hello:
        return protocol.hello_from_json(await self._ask("hello"))

    async def shutdown(self, *, kill: bool = False) -> None:
        """Ends the guardian and waits until it is gone. Raises GuardianRefused(NOT_EMPTY) while slots are live, unless
        `kill`. The client is closed then."""
        self._closing = True
        try:
            await self._ask("shutdown", kill=kill)
        except GuardianRefused:
            self._closing = False
            raise
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_s):
                    await asyncio.shield(self._task)

    # -- connection

    async def _ask(self, op: str, **fields: Any) -> JsonObject:
        if self._writer is None:
            raise GuardianUnavailable(f"{op}: not connected to the guardian")
        self._next_id += 1
        request_id = self._next_id
        future: asyncio.Future[JsonObject] = asyncio.get_running_loop().create_future()
        self._replies[request_id] = future
        try:
            async with asyncio.timeout(self._slow_timeout_s if op in _SLOW else self._timeout_s):
                self._writer.write(protocol.encode_line({"id": request_id, "op": op, **fields}))
                await self._writer.drain()
                reply = await future
        except TimeoutError:
            raise GuardianUnavailable(f"{op}: no answer in time") from None
        except OSError as error:
            raise GuardianUnavailable(f"{op}: {error}") from None
        finally:
            self._replies.pop(request_id, None)
        if reply.get("ok") is True:
            return reply
        try:
            reason = Refusal(get_text(reply, "error"))
        except ValueError:
            reason = Refusal.BAD_MESSAGE
        raise GuardianRefused(reason, get_text({"message": "", **reply}, "message"))

    async def _open(self) -> tuple[asyncio.StreamReader, Hello]:
        path = str(self._runtime_dir / "guardian.sock")
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=REPLY_BYTES_MAX)
        except OSError as error:
            if not self._may_spawn:
                raise GuardianUnavailable(f"no guardian answers on {path}: {error.strerror}") from None
            await self._spawn()
            try:
                reader, writer = await asyncio.open_unix_connection(path, limit=REPLY_BYTES_MAX)
            except OSError as again:
                raise GuardianUnavailable(f"the guardian was started, but {path}: {again.strerror}") from None
        try:
            writer.write(protocol.encode_line({"id": 0, "op": "hello"}))
            async with asyncio.timeout(self._timeout_s):
                hello = protocol.hello_from_json(protocol.decode_line(await reader.readline()))
        except (OSError, TimeoutError, ValueError) as error:
            writer.close()
            raise GuardianUnavailable(f"{path}: no proper hello: {error!r}") from None
        self._writer = writer
        await self._events.put(Connected(hello))
        return reader, hello

    async def _spawn(self) -> None:
        argv = ["-P", "-m", "noded.run.guardian", "--detach"]
        argv += ["--data-dir", str(self._data_dir), "--runtime-dir", str(self._runtime_dir), "--fencing", self._fencing]
        argv += ["--allow-root-tasks"] if self._allow_root_tasks else []
        env = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "LD_LIBRARY_PATH")}
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env={**env, "PYTHONPATH": str(SOURCE_ROOT)},
                start_new_session=True,
            )
        except OSError as error:
            raise GuardianUnavailable(f"the guardian cannot be started: {error}") from None
        try:
            async with asyncio.timeout(SPAWN_SECONDS):
                code = await process.wait()
                said = b"" if code == 0 or process.stderr is None else await process.stderr.read(4096)
        except TimeoutError:
            process.kill()
            raise GuardianUnavailable(f"the guardian did not come up within {SPAWN_SECONDS} s") from None
        if code != 0:
            text = said.decode("utf-8", "replace").strip()
            raise GuardianUnavailable(text or f"the guardian ended with status {code}")

    async def _run(self, reader: asyncio.StreamReader) -> None:
        while True:
            why = await self._read(reader)
            self._drop(why)
            if self._closing:
                return
            await self._events.put(Disconnected(why))
            attempt = 0
            while True:
                try:
                    reader, _ = await self._open()
                    break
                except GuardianUnavailable:
                    await asyncio.sleep(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
                    attempt += 1

    async def _read(self, reader: asyncio.StreamReader) -> str:
        """Until the connection ends; returns why."""
        try:
            while line := await reader.readline():
                message = protocol.decode_line(line)
                if "event" in message:
                    # A noded that does not take its events stops being read to: the guardian keeps what matters.
                    await self._events.put(protocol.event_from_json(message))
                else:
                    future = self._replies.get(get_int(message, "id"))
                    if future is not None and not future.done():
                        future.set_result(message)
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "the guardian closed the connection"

    def _drop(self, why: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for future in self._replies.values():
            if not future.done():
                future.set_exception(GuardianUnavailable(why))
