"""The task's end of the socket: nothing of it may stall or kill training, and a forked child has its own."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from pathlib import Path

import pytest

from tests.unit.task_support import Fields, Refuse, answers, guardian, in_child, managed_task, silent
from virial.task import Deadlines, SaveRequest
from virial.task._channel import LINE_BYTES_MAX, CallFailed, Channel


def ignore_push(message: object) -> None:
    del message


def test_progress_reaches_the_guardian_with_its_metrics(tmp_path: Path) -> None:
    with guardian(tmp_path) as fake, managed_task(fake) as task:
        task.progress(7, loss=1.5, tokens=3, rate=True)
        assert fake.wait_for_call("progress").args == {"step": 7, "metrics": {"loss": 1.5, "tokens": 3.0, "rate": 1.0}}


def test_metrics_that_are_no_finite_numbers_are_left_out(tmp_path: Path) -> None:
    with guardian(tmp_path) as fake, managed_task(fake) as task:
        metrics = {"nan": math.nan, "inf": math.inf, "text": "much", "none": None, "huge": 10**400, "loss": 2}
        task.progress(1, **metrics)  # pyright: ignore[reportArgumentType] - what an untyped script may pass
        assert fake.wait_for_call("progress").args["metrics"] == {"loss": 2.0}
        task.progress(2, **{f"m{i}": i for i in range(1000)}, **{"n" * 100_000: 1})
        assert len(str(fake.wait_for_call("progress", 2).args)) < 2000


def test_a_step_that_is_no_whole_number_is_a_mistake_in_the_script(tmp_path: Path) -> None:
    with guardian(tmp_path) as fake, managed_task(fake) as task, pytest.raises(TypeError):
        task.progress(1.5)  # pyright: ignore[reportArgumentType]


def test_one_report_is_in_flight_and_the_newest_waits(tmp_path: Path) -> None:
    answer = threading.Event()

    def hold(args: Fields) -> Fields:
        answer.wait()
        return {}

    with guardian(tmp_path, progress=hold) as fake, managed_task(fake) as task:
        for step in range(100_000):  # would fill every buffer on the way if each were sent
            task.progress(step)
        answer.set()
        fake.wait_for(lambda: any(call.args["step"] == 99_999 for call in fake.calls))
        assert [call.args["step"] for call in fake.calls] == [0, 99_999]


def test_the_last_report_is_handed_over_at_close(tmp_path: Path) -> None:
    with guardian(tmp_path, progress=silent) as fake, managed_task(fake) as task:
        task.progress(1)
        task.progress(2)
        task.close()
        assert fake.wait_for_call("progress", 2).args["step"] == 2


def test_a_guardian_that_is_away_or_never_was_harms_nothing(tmp_path: Path) -> None:
    with guardian(tmp_path) as fake, managed_task(fake) as task:
        task.progress(1)
        fake.wait_for_call("progress")
        fake.close()
        for step in range(1000):
            task.progress(step)
        assert task.save_requested() is None
        with task.checkpoint(5, deadlines=Deadlines(begin_s=0.05)) as shard:
            shard.write(b"x")
        assert shard.error is not None
        assert shard.error.reason == "DISCONNECTED"
    channel = Channel(str(tmp_path / "nothing"), ignore_push)
    channel.connect()
    channel.progress({"step": 1})
    channel.notify("checkpoint_failed", {})
    with pytest.raises(CallFailed, match="DISCONNECTED: hello: the guardian cannot be reached"):
        channel.call("hello", {}, 0.05)


def test_it_connects_again_to_a_guardian_that_came_back(tmp_path: Path) -> None:
    with guardian(tmp_path) as fake:
        channel = Channel(str(fake.path), ignore_push)
        assert channel.call("hello", {}, 30) == {}
        fake.disconnect()
        fake.wait_for(lambda: not fake.connections)
        assert channel.call("hello", {}, 30) == {}
        assert [call.connection for call in fake.named("hello")] == [1, 2]
        channel.close()


def test_answers_find_their_calls_in_any_order(tmp_path: Path) -> None:
    with guardian(tmp_path, slow=silent, quick=answers(value=2)) as fake:
        channel = Channel(str(fake.path), ignore_push)
        results: list[object] = []
        thread = threading.Thread(target=lambda: results.append(channel.call("slow", {}, 30)))
        thread.start()
        fake.wait_for_call("slow")
        assert channel.call("quick", {}, 30) == {"value": 2}
        fake.send_raw(b'{"id": 999, "ok": true}\n{"id": "1", "ok": true}\n{"id": 1, "ok": true, ')
        fake.send_raw(b'"result": {"value": 1}}\n')
        thread.join()
        assert results == [{"value": 1}]
        channel.close()


def test_a_refusal_and_an_answer_without_sense_are_told_apart(tmp_path: Path) -> None:
    def refuse(args: Fields) -> Fields:
        raise Refuse("FENCED", "generation 1 is over")

    with guardian(tmp_path, refuse=refuse, odd=silent) as fake:
        channel = Channel(str(fake.path), ignore_push)
        with pytest.raises(CallFailed, match="FENCED: generation 1 is over"):
            channel.call("refuse", {}, 30)
        thread = threading.Thread(
            target=lambda: (fake.wait_for_call("odd"), fake.send_raw(b'{"id": 2, "ok": true, "result": 5}\n'))
        )
        thread.start()
        with pytest.raises(CallFailed, match="PROTOCOL: odd: the answer's result is not an object"):
            channel.call("odd", {}, 30)
        thread.join()
        channel.close()


@pytest.mark.parametrize(
    "data", [b"hello\n", b"[1]\n", b"\xff\xfe\n", b"x" * (LINE_BYTES_MAX + 2), b"[" * 100_000 + b"\n"]
)
def test_what_is_no_protocol_ends_the_connection_and_the_calls_on_it(tmp_path: Path, data: bytes) -> None:
    with guardian(tmp_path, wait=silent) as fake:
        channel = Channel(str(fake.path), ignore_push)
        failures: list[CallFailed] = []

        def call() -> None:
            with pytest.raises(CallFailed) as caught:
                channel.call("wait", {}, 30)
            failures.append(caught.value)

        thread = threading.Thread(target=call)
        thread.start()
        fake.wait_for_call("wait")
        with contextlib.suppress(OSError):  # closed before all of it was read: as it should be
            fake.send_raw(data)
        thread.join()
        assert [failure.reason for failure in failures] == ["DISCONNECTED"]
        fake.wait_for(lambda: not fake.connections)


def test_save_requests_arrive_while_the_training_thread_does_nothing(tmp_path: Path) -> None:
    with guardian(tmp_path) as fake, managed_task(fake) as task:
        fake.wait_for_connections(1)
        assert task.save_requested() is None
        fake.push(push="save_now", step=40, reason="DRAIN")
        fake.push(push="unheard of", step=1)
        task.progress(1)
        fake.wait_for_call("progress")
        while task.save_requested() is None:
            os.sched_yield()
        first = task.save_requested()
        assert first is not None
        assert first == SaveRequest(40, "DRAIN")
        assert [first.due(step) for step in (39, 40, 41)] == [False, True, True]
        fake.push(push="save_now", step=None, reason="HOT")
        while task.save_requested() == first:
            os.sched_yield()
        task.clear_save_request(first)
        newer = task.save_requested()
        assert newer is not None
        assert newer == SaveRequest(None, "HOT")
        assert newer.due(0)
        task.clear_save_request()
        assert task.save_requested() is None


def test_a_forked_child_has_a_connection_of_its_own_and_leaves_the_parents_alone(tmp_path: Path) -> None:
    with guardian(tmp_path, checkpoint_begin=answers(answer=1)) as fake, managed_task(fake) as task:
        task.progress(1)
        fake.wait_for_call("progress")

        def child() -> None:
            task.progress(2)
            assert task._channel is not None
            assert task._channel.call("checkpoint_begin", {"step": 3}, 30) == {"answer": 1}

        assert in_child(child) == 0
        assert in_child(lambda: None) == 0  # one that uses nothing opens nothing
        task.progress(4)
        fake.wait_for(lambda: any(call.args.get("step") == 4 for call in fake.calls))
        seen = [(call.connection, call.call, call.args["step"]) for call in fake.calls]
        assert seen == [(1, "progress", 1), (2, "progress", 2), (2, "checkpoint_begin", 3), (1, "progress", 4)]
        assert fake.accepted == 2


def test_a_child_forked_while_a_thread_holds_the_lock_does_not_hang(tmp_path: Path) -> None:
    with guardian(tmp_path) as fake:
        channel = Channel(str(fake.path), ignore_push)
        channel.call("hello", {}, 30)
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with channel._lock:
                held.set()
                release.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()

        def child() -> None:
            assert channel.call("hello", {}, 30) == {}

        status = in_child(child)
        release.set()
        thread.join()
        assert status == 0
        channel.close()
