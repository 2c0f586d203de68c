"""Around every call: who calls and whether they may, a cause_id, a deadline, a bound on how many run, metrics, a log
entry, and errors as statuses.

In one place, so that no servicer can forget one of them and no exception reaches a caller unmapped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, cast

import grpc
import grpc.aio
import structlog

from controld.core.ids import valid_request_id
from controld.replica.reading import STALE_READS
from controld.service.backend import CAUSE_ID, Context
from controld.service.failures import details_of
from controld.service.gate import CALLER, Caller, Gate, Peer
from controld.service.metrics import Metrics
from controld.service.roles import HEALTH
from controld.service.shares import Shares
from controld.service.telemetry import LogName, StructLog
from controld.service.tenure import tenure
from virialpb.errors import ErrorDetails, details_for, trailing_metadata
from virialpb.reasons import Reason

CAUSE_HEADER = "virial-cause-id"
# A read that may be answered by a follower, as of the revision that comes back with it.
READ_HEADER = "virial-read"
STALE = "stale"
READ_REVISION_HEADER = "virial-read-revision"
STALE_METHODS = frozenset(
    {
        *("GetJob", "ListJobs", "WatchJobs", "ExplainJob", "GetNode", "ListNodes", "WatchNodes"),
        *("GetStatus", "ListEvents", "WatchEvents"),
    }
)
# No call of ours takes seconds; a caller that sets no deadline must not wait for ever for a store that hangs.
UNARY_SECONDS_MAX = 30.0
# But for those that write a file of gigabytes.
LONG_SECONDS = {"Defragment": 310.0}
# Of all people, and as many of all agents and controllers.
UNARY_CALLS_MAX = 1_024
STREAMS_MAX = 16_384
# Whatever these began may still be committed when the time is up.
MUTATIONS = frozenset(
    {
        *("SubmitJob", "CancelJob", "PlaceHold", "ReleaseHold", "DrainNode", "RemoveNode"),
        *("AddMember", "RemoveMember", "ReplaceMember", "MoveLeader"),
    }
)

_Unary = Callable[[Any, Context], Awaitable[Any]]
_Stream = Callable[[Any, Context], AsyncIterator[Any]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """`make_id` gives a cause_id to a call that brings none; `revision`: (history, revision) of what is read."""

    def __init__(
        self,
        *,
        log: StructLog,
        metrics: Metrics,
        make_id: Callable[[], str],
        revision: Callable[[], tuple[int, int]],
        gate: Gate,
    ) -> None:
        self._log = log
        self._metrics = metrics
        self._make_id = make_id
        self._revision = revision
        self._gate = gate
        self._calls = Shares("calls are under way")
        self._streams = Shares("streams are open")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(HEALTH):
            return handler  # None is answered with UNIMPLEMENTED
        headers = dict(handler_call_details.invocation_metadata or ())
        given = headers.get(CAUSE_HEADER)
        stale = headers.get(READ_HEADER) == STALE and method.rpartition("/")[2] in STALE_METHODS
        cause_id = given if isinstance(given, str) and valid_request_id(given) else self._make_id()
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            unary = self._unary(cast("_Unary", handler.unary_unary), method, cause_id, stale)
            return grpc.unary_unary_rpc_method_handler(cast("Any", unary), **codec)
        if handler.unary_stream is not None:
            stream = self._stream(cast("_Stream", handler.unary_stream), method, cause_id, stale)
            return grpc.unary_stream_rpc_method_handler(cast("Any", stream), **codec)
        stream = self._stream(cast("_Stream", handler.stream_stream), method, cause_id, stale)
        return grpc.stream_stream_rpc_method_handler(cast("Any", stream), **codec)

    def _unary(self, behaviour: _Unary, method: str, cause_id: str, stale: bool) -> _Unary:
        name = method.rpartition("/")[2]

        async def call(request: Any, context: Context) -> Any:
            made = getattr(request, "request_id", "") or cause_id
            self._enter(name, made if valid_request_id(made) else cause_id, stale)
            began = time.monotonic()
            code = grpc.StatusCode.OK
            try:
                caller = self._admit(method, context)
                with self._calls.taken(caller, UNARY_CALLS_MAX):
                    async with asyncio.timeout(LONG_SECONDS.get(name, UNARY_SECONDS_MAX)):
                        reply = await behaviour(request, context)
                if stale:
                    text = "{}.{}".format(*self._revision())
                    context.set_trailing_metadata(((READ_REVISION_HEADER, text),))
                return reply
            except TimeoutError:
                reason = Reason.OUTCOME_UNKNOWN if name in MUTATIONS else Reason.OVERLOADED
                details = details_for(reason, detail=f"no answer within {UNARY_SECONDS_MAX:g} s")
                code = details.code
                await self._abort(context, name, details)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except grpc.aio.AbortError:
                code = grpc.StatusCode.UNKNOWN
                raise
            except Exception as error:  # noqa: BLE001 - the edge: whatever it is, the caller gets a status
                details = self._details(name, error)
                code = details.code
                await self._abort(context, name, details)
            finally:
                self._leave(name, code, time.monotonic() - began)

        return call

    def _stream(self, behaviour: _Stream, method: str, cause_id: str, stale: bool) -> _Unary:
        name = method.rpartition("/")[2]

        async def call(request: Any, context: Context) -> None:
            self._enter(name, cause_id, stale)
            code = grpc.StatusCode.OK
            try:
                caller = self._admit(method, context)
                # A coroutine that writes, not a generator: what the servicer holds is let go of here, not by the
                # garbage collector, when the caller has gone.
                with self._streams.taken(caller, STREAMS_MAX):
                    async with (
                        tenure(lambda: self._gate.admit(method, self._peer(context)), _now),
                        aclosing(cast("Any", behaviour(request, context))) as messages,
                    ):
                        async for message in messages:
                            await context.write(message)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except grpc.aio.BaseError:
                code = grpc.StatusCode.CANCELLED  # the caller is gone: there is nobody to tell
            except Exception as error:  # noqa: BLE001 - the edge: whatever it is, the caller gets a status
                details = self._details(name, error)
                code = details.code
                await self._abort(context, name, details)
            finally:
                self._leave(name, code, None)

        return call

    def _admit(self, method: str, context: Context) -> Caller:
        """Raises CallError."""
        caller = self._gate.admit(method, self._peer(context))
        CALLER.set(caller)
        if caller.identity is not None:
            structlog.contextvars.bind_contextvars(caller=caller.identity.uri)
        return caller

    def _peer(self, context: Context) -> Peer:
        return cast("Peer", context.auth_context()) if self._gate.asks else {}

    def _enter(self, name: str, cause_id: str, stale: bool) -> None:
        CAUSE_ID.set(cause_id)
        STALE_READS.set(stale)
        structlog.contextvars.bind_contextvars(cause_id=cause_id, method=name)
        self._metrics.call_began(name)

    def _leave(self, name: str, code: grpc.StatusCode, seconds: float | None) -> None:
        self._metrics.call_ended(name, code.name, seconds)
        if code is grpc.StatusCode.OK:
            self._log(LogName.CALL_SERVED, duration_ms=round((seconds or 0) * 1000, 3))

    def _details(self, name: str, error: Exception) -> ErrorDetails:
        details = details_of(error)
        if details is None or details.reason is Reason.INVARIANT_BROKEN:
            self._log.broken(LogName.CALL_BROKEN, error)
        # The exception's own text may hold anything; it goes to the log only.
        return details or details_for(Reason.INVARIANT_BROKEN, detail=f"in {name}")

    async def _abort(self, context: Context, name: str, details: ErrorDetails) -> None:
        named = ErrorDetails(
            reason=details.reason,
            message=details.message,
            violations=details.violations,
            metadata={**details.metadata, "cause_id": CAUSE_ID.get()},
            retry_after_ms=details.retry_after_ms,
            code=details.code,
        )
        self._log(LogName.CALL_REFUSED, reason=str(details.reason), message=details.message)
        await context.abort(named.code, named.message, trailing_metadata(named))


def _now() -> datetime:
    return datetime.now(UTC)
