"""Calls over real gRPC: what is sent again, where, and what the caller sees. Both clients do the same."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

import virial
from tests.integration.sdk_support import Script, refuse, serving, transport
from virial import Client, JobSpec, SyncClient
from virial.models import Resources, TaskSpec
from virialpb.reasons import Reason
from virialpb.v1 import job_pb2

SPEC = JobSpec(name="a", task=TaskSpec(command=("true",)), resources=Resources(1000, 1 << 30))
# What a test calls: a method by name, on a client of some addresses.
Call = Callable[..., Any]


def call_sync(addresses: str, method: str, *arguments: object, timeout_s: float = 20.0, **named: object) -> Any:
    with SyncClient(addresses, timeout_s=timeout_s) as client:
        return getattr(client, method)(*arguments, **named)


def call_async(addresses: str, method: str, *arguments: object, timeout_s: float = 20.0, **named: object) -> Any:
    async def run() -> Any:
        async with Client(addresses, timeout_s=timeout_s) as client:
            return await getattr(client, method)(*arguments, **named)

    return asyncio.run(run())


@pytest.fixture(params=[call_sync, call_async], ids=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Call:
    return request.param


def dead_address() -> str:
    """An address nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


RETRIED = {
    "broken_connection": transport(grpc.StatusCode.UNAVAILABLE),
    "no_leader": refuse(Reason.NO_LEADER),
    "not_leader_and_nobody_knows_who_is": refuse(Reason.NOT_LEADER),
    "outcome_unknown": refuse(Reason.OUTCOME_UNKNOWN),
    "overloaded": refuse(Reason.OVERLOADED),
}


@pytest.mark.parametrize("failure", RETRIED)
def test_a_mutation_is_repeated_with_the_same_request_id(call: Call, failure: str) -> None:
    script = Script(failures=[RETRIED[failure]] * 2)
    with serving(script) as address:
        assert call(address, "submit_job", SPEC).id == "made"
    ids = [r.request_id for r in script.requests if isinstance(r, job_pb2.SubmitJobRequest)]
    assert len(ids) == 3
    assert len(set(ids)) == 1
    assert ids[0]


def test_two_calls_have_two_request_ids_unless_the_caller_gives_one(call: Call) -> None:
    script = Script()
    with serving(script) as address:
        call(address, "submit_job", SPEC)
        call(address, "submit_job", SPEC)
        call(address, "submit_job", SPEC, request_id="mine")
    ids = [r.request_id for r in script.requests if isinstance(r, job_pb2.SubmitJobRequest)]
    assert len(set(ids)) == 3
    assert ids[2] == "mine"


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (refuse(Reason.NOT_FOUND), virial.NotFoundError),
        (refuse(Reason.STALE), virial.ConflictError),
        (refuse(Reason.INVALID_SPEC), virial.InvalidRequestError),
        (refuse(Reason.PERMISSION_DENIED), virial.DeniedError),
        (refuse(Reason.INVARIANT_BROKEN), virial.InternalError),
        (transport(grpc.StatusCode.UNIMPLEMENTED), virial.InternalError),
    ],
)
def test_what_waiting_does_not_help_is_not_repeated(
    call: Call, failure: Callable[[grpc.ServicerContext], None], error: type[virial.VirialError]
) -> None:
    script = Script(failures=[failure])
    with serving(script) as address, pytest.raises(error) as caught:
        call(address, "get_job", "x")
    assert type(caught.value) is error
    assert len(script.requests) == 1


def test_the_leader_is_found_through_any_controller(call: Call) -> None:
    leader, follower = Script(), Script()
    with serving(leader) as leader_address, serving(follower) as follower_address:
        follower.failures = [refuse(Reason.NOT_LEADER, leader=leader_address)]
        assert call(follower_address, "get_job", "x").id == "x"
    assert (len(follower.requests), len(leader.requests)) == (1, 1)


def test_a_leader_that_is_gone_is_left_for_the_given_addresses(call: Call) -> None:
    follower = Script(failures=[refuse(Reason.NOT_LEADER, leader=dead_address())])
    with serving(follower) as address:
        assert call(address, "get_job", "x").id == "x"
    assert len(follower.requests) == 2


def test_a_dead_controller_is_passed_over(call: Call) -> None:
    script = Script()
    with serving(script) as address:
        assert call(f"{dead_address()},{address}", "get_job", "x").id == "x"


def test_when_nobody_answers_the_error_says_where_was_tried_and_how_long(call: Call) -> None:
    address = dead_address()
    with pytest.raises(virial.UnavailableError, match=f"no answer from {address} in 0.3 s") as caught:
        call(address, "get_job", "x", timeout_s=0.3)
    assert caught.value.reason is None


def test_a_controller_that_does_not_answer_is_given_up_at_the_deadline(call: Call) -> None:
    release = threading.Event()

    def hang(_: grpc.ServicerContext) -> None:
        release.wait(60)

    script = Script(failures=[hang])
    with serving(script) as address:
        with pytest.raises(virial.UnavailableError):
            call(address, "get_job", "x", timeout_s=0.3)
        release.set()


def test_every_page_of_a_list_is_fetched(call: Call) -> None:
    script = Script(pages={"": (["a", "b"], "t1"), "t1": (["c"], "t2"), "t2": ([], "")})
    with serving(script) as address:
        assert [job.id for job in call(address, "list_jobs")] == ["a", "b", "c"]


def test_a_call_fails_between_two_pages_and_the_list_is_whole(call: Call) -> None:
    script = Script(pages={"": (["a"], "t1"), "t1": (["b"], "")})
    script.failures = [lambda _: None, transport(grpc.StatusCode.UNAVAILABLE)]
    with serving(script) as address:
        assert [job.id for job in call(address, "list_jobs")] == ["a", "b"]


def read_sync(addresses: str, **named: Any) -> bytes:
    with SyncClient(addresses) as client:
        return b"".join(chunk.data for chunk in client.read_logs("x", **named))


def read_async(addresses: str, **named: Any) -> bytes:
    async def run() -> bytes:
        async with Client(addresses) as client:
            return b"".join([chunk.data async for chunk in client.read_logs("x", **named)])

    return asyncio.run(run())


@pytest.mark.parametrize("read", [read_sync, read_async])
def test_a_log_goes_on_where_it_broke_off(read: Callable[..., bytes]) -> None:
    broken = transport(grpc.StatusCode.UNAVAILABLE)
    script = Script(log=b"0123456789ab", failures=[broken, refuse(Reason.NODE_UNREACHABLE)])
    with serving(script) as address:
        assert read(address, follow=True, tail_bytes=100) == b"0123456789ab"
    asked = [(r.generation, r.offset, r.tail_bytes) for r in script.log_requests]
    assert asked == [(0, 0, 100), (3, 4, 0), (3, 8, 0)]


@pytest.mark.parametrize("read", [read_sync, read_async])
def test_a_log_that_is_not_there_is_not_asked_for_again(read: Callable[..., bytes]) -> None:
    script = Script(log=b"01234567", failures=[refuse(Reason.NOT_FOUND)])
    with serving(script) as address, pytest.raises(virial.NotFoundError):
        read(address)
    assert len(script.log_requests) == 1


def test_a_client_says_so_in_a_forked_child() -> None:
    with serving(Script()) as address, SyncClient(address) as client:
        client.get_job("x")
        read, write = os.pipe()
        child = os.fork()
        if child == 0:  # nothing but the attempt: the test's own machinery belongs to the parent
            try:
                client.get_job("x")
                answer = "answered"
            except virial.ForkedClientError as error:
                answer = str(error)
            except BaseException as error:
                answer = repr(error)
            os.write(write, answer.encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answers:
            assert answers.read() == "this client was made before a fork; make a new one in the child process"
        os.waitpid(child, 0)
        assert client.get_job("x").id == "x"


def test_both_clients_have_the_same_methods() -> None:
    def signatures(kind: type) -> dict[str, str]:
        found = {n: f for n, f in inspect.getmembers(kind, inspect.isfunction) if not n.startswith("_")}
        return {n: str(inspect.signature(f)).replace("AsyncIterator", "Iterator") for n, f in found.items()}

    assert signatures(Client) == signatures(SyncClient)


def test_closing_twice_is_allowed_and_a_closed_client_connects_anew() -> None:
    with serving(Script()) as address:
        client = SyncClient(address)
        client.get_job("x")
        client.close()
        client.close()
        assert client.get_job("x").id == "x"
        client.close()


def test_a_call_that_redials_does_not_end_the_calls_beside_it() -> None:
    """A stream that is open goes on while another call on the same client meets a broken connection."""
    opened, release = threading.Event(), threading.Event()

    def slow(_: grpc.ServicerContext) -> None:
        opened.set()
        assert release.wait(60)

    script = Script(failures=[slow])
    with serving(script) as address, SyncClient(address) as client:
        answers: list[object] = []
        beside = threading.Thread(target=lambda: answers.append(client.get_job("slow")))
        beside.start()
        assert opened.wait(60)
        script.failures = [transport(grpc.StatusCode.UNAVAILABLE)] * 2
        assert client.get_job("x").id == "x"
        release.set()
        beside.join(60)
    assert [getattr(answer, "id", answer) for answer in answers] == ["slow"]
    # One request each, and two that failed: the slow one was never sent again.
    assert len(script.requests) == 4


async def test_an_asynchronous_call_that_redials_does_not_end_the_calls_beside_it() -> None:
    opened, release = threading.Event(), threading.Event()

    def slow(_: grpc.ServicerContext) -> None:
        opened.set()
        assert release.wait(60)

    script = Script(failures=[slow])
    with serving(script) as address:
        async with Client(address) as client:
            beside = asyncio.create_task(client.get_job("slow"))
            await asyncio.to_thread(opened.wait, 60)
            script.failures = [transport(grpc.StatusCode.UNAVAILABLE)] * 2
            assert (await client.get_job("x")).id == "x"
            release.set()
            assert (await beside).id == "slow"
    assert len(script.requests) == 4
