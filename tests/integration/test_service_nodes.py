"""NodeService and ClusterService over real gRPC: agents come, work, are held, drained and cloned."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from controld.replica.admission import Admission
from tests.support_service import GIB, FakeAgent, Served, failure, job_spec, serve
from virialpb.errors import details_from
from virialpb.reasons import Reason
from virialpb.v1 import cluster_pb2, common_pb2, job_pb2, node_pb2, node_pb2_grpc


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serve(tmp_path) as served:
        yield served


async def node(served: Served, name: str = "nodes/n1") -> cluster_pb2.Node:
    return await served.cluster.GetNode(cluster_pb2.GetNodeRequest(name=name))


async def run_job(served: Served, agent: FakeAgent, job_id: str = "a") -> job_pb2.Job:
    """A job of one rank, running on the agent."""
    await served.jobs.SubmitJob(job_pb2.SubmitJobRequest(job_id=job_id, spec=job_spec()))
    await agent.until(lambda: any(message.go.token.job == job_id for message in agent.orders("go")))
    async for message in served.jobs.WatchJobs(job_pb2.WatchJobsRequest(name=f"jobs/{job_id}")):
        if message.job.state == job_pb2.Job.RUNNING:
            return message.job
    raise AssertionError("the watch ended")


async def test_a_node_joins_and_is_shown(served: Served) -> None:
    agent = await FakeAgent(served, "n1").join()
    found = await node(served)
    assert (found.name, found.uid, found.liveness, found.connected) == ("nodes/n1", "uid-n1", "LIVE", True)
    assert found.schedulable
    assert found.beat_age_ms >= 0
    assert [device.key for device in found.inventory.devices] == ["gpu-1"]
    assert (found.cpu_free_millis, found.memory_free_bytes) == (4_000, 8 * GIB)
    page = await served.cluster.ListNodes(cluster_pb2.ListNodesRequest(brief=True))
    assert [one.name for one in page.nodes] == ["nodes/n1"]
    assert not page.nodes[0].HasField("inventory")
    await agent.leave()


async def test_a_node_without_its_inventory_gets_no_work(served: Served) -> None:
    agent = await FakeAgent(served, "n1").join(bulk=False)
    assert not (await node(served)).schedulable
    status = await served.cluster.GetStatus(cluster_pb2.GetStatusRequest())
    assert [problem.partition(" (")[0] for problem in status.problems] == ["1 node(s) without an inventory yet"]
    await agent.leave()


async def test_a_beat_is_acknowledged(served: Served) -> None:
    agent = await FakeAgent(served, "n1").join()
    agent.beat()
    await agent.until(lambda: any(message.beat_ack.seq >= 1 for message in agent.orders("beat_ack")))
    assert {message.leader_epoch.history for message in agent.told} == {1}
    assert agent.orders("welcome")[0].welcome.renew_interval_ms == 200
    await agent.leave()


async def test_a_job_runs_to_its_end(served: Served) -> None:
    agent = await FakeAgent(served, "n1").join()
    job = await run_job(served, agent)
    (member,) = job.current.members
    assert (member.rank, member.node, member.node_name, member.task_state) == (0, "uid-n1", "n1", "RUNNING")
    assert (job.progress_step, job.progress_generation) == (3, 1)
    used = await node(served)
    assert (used.cpu_free_millis, list(used.slots)) == (3_500, [member.slot])
    agent.exit(member.slot)
    async for message in served.jobs.WatchJobs(job_pb2.WatchJobsRequest(name=job.name)):
        if message.job.state == job_pb2.Job.SUCCEEDED:
            break
    assert (await node(served)).cpu_free_millis == 4_000
    await agent.leave()


def clone_of(served: Served, agent: FakeAgent) -> FakeAgent:
    """An agent on another host with a copy of this one's data directory."""
    return FakeAgent(served, "n2", uid=agent.incarnation.node_uid, boot_id="boot-2", nonce="g2")


@pytest.mark.row("C9")
async def test_case_c9_a_clone_is_refused_and_the_first_is_kept(served: Served) -> None:
    first = await FakeAgent(served, "n1").join()
    clone = clone_of(served, first)
    clone.send(clone.hello())
    messages = [message async for message in clone.control]
    assert [message.WhichOneof("message") for message in messages] == ["session_refused"]
    refused = messages[0].session_refused
    assert refused.reason == "DUPLICATE_NODE"
    assert "delete the agent's data directory" in refused.message
    before = len(first.orders("beat_ack"))
    await first.until(lambda: len(first.orders("beat_ack")) > before)
    found = await node(served)
    assert (found.name, found.incarnation.boot_id, found.connected) == ("nodes/n1", "boot-1", True)
    page = await served.cluster.ListEvents(cluster_pb2.ListEventsRequest(node="nodes/n1"))
    assert "node.duplicate" in [event.kind for event in page.events]
    await first.leave()


@pytest.mark.row("C9", defect="latest_hello_wins")
async def test_case_c9_catches_a_controller_that_lets_the_latest_hello_win(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check the rows of two nodes overwrite each other, as in the reported cases."""

    def let_in(_self: object, _hello: object, _former: object, _now_ns: int) -> None:
        return

    monkeypatch.setattr(Admission, "refuse_duplicate", let_in)
    first = await FakeAgent(served, "n1").join()
    clone = await clone_of(served, first).join(bulk=False)
    assert [one.name for one in (await served.cluster.ListNodes(cluster_pb2.ListNodesRequest())).nodes] == ["nodes/n2"]
    await clone.leave()
    await first.leave()


async def test_a_name_belongs_to_one_node(served: Served) -> None:
    first = await FakeAgent(served, "n1").join()
    second = FakeAgent(served, "n1", uid="uid-other")
    second.send(second.hello())
    messages = [message async for message in second.control]
    assert messages[0].session_refused.reason == "ALREADY_EXISTS"
    assert "this one takes its place by itself when" in messages[0].session_refused.message
    await first.leave()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (node_pb2.Hello(name="N 1"), "hello.name"),
        (node_pb2.Hello(incarnation=common_pb2.Incarnation(node_uid="a/b")), "hello.incarnation.node_uid"),
        (node_pb2.Hello(incarnation=common_pb2.Incarnation(boot_id=" ")), "hello.incarnation.boot_id"),
    ],
)
async def test_a_malformed_hello_is_refused(served: Served, change: node_pb2.Hello, field: str) -> None:
    agent = FakeAgent(served, "n1")
    message = agent.hello()
    message.hello.MergeFrom(change)
    agent.send(message)
    details = await stream_failure(agent.control)
    assert (details.reason, [v.field for v in details.violations]) == (Reason.INVALID_SPEC, [field])


async def stream_failure(call: grpc.aio.StreamStreamCall[node_pb2.ControlUp, node_pb2.ControlDown]):

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return details_from(caught.value)


async def test_a_stream_that_starts_otherwise_is_refused(served: Served) -> None:
    agent = FakeAgent(served, "n1")
    agent.beat()
    assert [v.field for v in (await stream_failure(agent.control)).violations] == ["hello"]


@pytest.mark.parametrize(
    "bad",
    [
        node_pb2.ControlUp(beat=node_pb2.Beat(slots=[node_pb2.SlotStatus(slot="a.1.0", failure_detail="x" * 70_000)])),
        node_pb2.ControlUp(beat=node_pb2.Beat(slots=[node_pb2.SlotStatus(slot="a.1.0")])),
        node_pb2.ControlUp(hello=node_pb2.Hello()),
    ],
)
async def test_a_malformed_report_ends_that_stream_only(served: Served, bad: node_pb2.ControlUp) -> None:
    other = await FakeAgent(served, "n2").join()
    agent = await FakeAgent(served, "n1").join()
    agent.send(bad)
    await agent.control.code()
    assert await agent.control.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not (await node(served)).connected
    assert (await node(served, "nodes/n2")).connected
    await agent.leave()
    again = await FakeAgent(served, "n1").join()
    assert (await node(served)).connected
    await again.leave()
    await other.leave()


async def test_a_bulk_stream_needs_a_session(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controld.service.node.SESSION_WAIT_SECONDS", 0.01)
    stub: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(served.channel)
    hello = node_pb2.BulkHello(incarnation=common_pb2.Incarnation(node_uid="uid-x", boot_id="b", guardian_nonce="g"))
    call = stub.Bulk(iter([node_pb2.BulkUp(hello=hello)]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_holds_keep_work_away_until_released(served: Served) -> None:
    agent = await FakeAgent(served, "n1").join()
    request = cluster_pb2.PlaceHoldRequest(
        request_id="h1", name="nodes/n1", owner="maintenance", reason="new fan", expire_after_ms=3_600_000
    )
    held = await served.cluster.PlaceHold(request)
    assert not held.schedulable
    assert [(hold.owner, hold.reason) for hold in held.holds] == [("maintenance", "new fan")]
    again = await served.cluster.PlaceHold(request)
    assert again.holds == held.holds  # a retry does not start the hour anew
    free = await served.cluster.ReleaseHold(cluster_pb2.ReleaseHoldRequest(name="nodes/n1", owner="maintenance"))
    assert free.schedulable
    details = await failure(
        served.cluster.ReleaseHold(cluster_pb2.ReleaseHoldRequest(name="nodes/n1", owner="maintenance"))
    )
    assert details.reason is Reason.NOT_FOUND
    await agent.leave()


async def test_a_drained_node_is_left_by_its_work(served: Served) -> None:
    agent = await FakeAgent(served, "n1").join()
    await run_job(served, agent)
    drained = await served.cluster.DrainNode(cluster_pb2.DrainNodeRequest(name="nodes/n1", reason="new disk"))
    assert drained.draining
    assert not drained.schedulable
    # The rank reports progress, so it is asked to save before it is stopped.
    await agent.until(lambda: bool(agent.orders("save_now")))
    await agent.leave()


async def test_bad_input_of_each_cluster_call(served: Served) -> None:
    cluster = served.cluster
    agent = await FakeAgent(served, "n1").join()
    hold = cluster_pb2.PlaceHoldRequest
    cases = (
        (cluster.GetNode(cluster_pb2.GetNodeRequest(name="n1")), "name"),
        (cluster.ListNodes(cluster_pb2.ListNodesRequest(page_token="x")), "page_token"),
        (cluster.PlaceHold(hold(name="nodes/", owner="a", reason="r")), "name"),
        (cluster.PlaceHold(hold(name="nodes/n1", owner="A!", reason="r")), "owner"),
        (cluster.PlaceHold(hold(name="nodes/n1", owner="drain", reason="r")), "owner"),
        (cluster.PlaceHold(hold(name="nodes/n1", owner="a", reason=" ")), "reason"),
        (cluster.PlaceHold(hold(name="nodes/n1", owner="a", reason="r", expire_after_ms=1 << 62)), "expire_after_ms"),
        (cluster.PlaceHold(hold(name="nodes/n1", owner="a", reason="r", request_id="?")), "request_id"),
        (cluster.ReleaseHold(cluster_pb2.ReleaseHoldRequest(name="nodes/n1", owner="")), "owner"),
        (cluster.DrainNode(cluster_pb2.DrainNodeRequest(name="nodes/n1", reason="")), "reason"),
        (cluster.ListEvents(cluster_pb2.ListEventsRequest(job="a")), "job"),
        (cluster.ListEvents(cluster_pb2.ListEventsRequest(node="a")), "node"),
        (cluster.WatchEvents(cluster_pb2.WatchEventsRequest(job="a")), "job"),
    )
    for call, field in cases:
        details = await failure(call)
        assert (details.reason, [v.field for v in details.violations]) == (Reason.INVALID_SPEC, [field])
    for call in (
        cluster.GetNode(cluster_pb2.GetNodeRequest(name="nodes/n9")),
        cluster.DrainNode(cluster_pb2.DrainNodeRequest(name="nodes/n9", reason="r")),
        cluster.PlaceHold(hold(name="nodes/n1", owner="a", reason="r", device_key="gpu-9")),
    ):
        assert (await failure(call)).reason is Reason.NOT_FOUND
    await agent.leave()


async def test_the_status_counts(served: Served) -> None:
    status = await served.cluster.GetStatus(cluster_pb2.GetStatusRequest())
    assert (len(status.cluster_uid), status.leader, status.store_kind) == (32, "controld-test", "memory")
    assert list(status.problems) == []
    await served.jobs.SubmitJob(job_pb2.SubmitJobRequest(spec=job_spec()))
    status = await served.cluster.GetStatus(cluster_pb2.GetStatusRequest())
    assert dict(status.jobs_by_state) == {"PENDING": 1}
    (problem,) = status.problems
    assert "start noded" in problem
