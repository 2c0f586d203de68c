"""virial.testing: a program under test sees what it would see of a cluster."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import islice, takewhile

import pytest

import virial
from virial import JobSpec, JobState, SyncClient
from virial.models import (
    CheckpointPolicy,
    Durability,
    Event,
    Gang,
    JobChange,
    Resources,
    RestartPolicy,
    TaskSpec,
    Writes,
)
from virial.testing import FakeClient, FakeCluster, StalledError

GIB = 1 << 30


def spec(ranks: int = 3, spares: int = 0, *, writes: Writes = Writes.TOKEN, restarts: int = 3) -> JobSpec:
    return JobSpec(
        name="train",
        gang=Gang(ranks, spares),
        task=TaskSpec(command=("train",)),
        resources=Resources(1000, GIB),
        writes=writes,
        checkpoint=CheckpointPolicy(Durability.SHARED, "/checkpoints"),
        restart=RestartPolicy(max=restarts),
    )


def nodes_of(client: SyncClient, job: str) -> list[str]:
    current = client.get_job(job).current
    assert current is not None
    return [m.node for m in current.members if m.rank is not None]


def public(kind: type) -> dict[str, str]:
    """Each public method with its signature as text."""
    found = {n: f for n, f in inspect.getmembers(kind, inspect.isfunction) if not n.startswith("_")}
    return {name: str(inspect.signature(function)) for name, function in found.items()}


def test_the_fake_has_the_methods_and_signatures_of_the_client() -> None:
    assert public(FakeClient) == public(SyncClient)
    own = {name for name in vars(FakeClient) if not name.startswith("_")}
    assert own == set(public(SyncClient)) - {"close"}


def test_a_job_runs_from_submission_to_its_end() -> None:
    cluster = FakeCluster(nodes=3)
    client = cluster.client()
    job = client.submit_job(spec())
    assert (job.id, job.state) == ("train-1", JobState.PENDING)
    cluster.run(3)
    assert client.get_job(job.id).state is JobState.RUNNING
    cluster.progress(job.id, 10)
    cluster.run(1)
    assert client.get_job(job.id).progress_step == 10
    cluster.finish(job.id)
    assert client.wait_job(job.id).state is JobState.SUCCEEDED
    assert all(not node.slots for node in client.list_nodes())


def test_the_loss_of_a_node_restarts_the_gang_on_its_spare_from_its_checkpoint() -> None:
    cluster = FakeCluster(nodes=4)
    client = cluster.client()
    job = client.submit_job(spec(3, 1)).id
    cluster.run(3)
    before = nodes_of(client, job)
    spare = ({f"node-{i}" for i in range(4)} - set(before)).pop()
    checkpoint = cluster.checkpoint(job, 20)
    cluster.lose_node(before[1])
    cluster.run(15)
    after = client.get_job(job)
    assert after.current is not None
    assert (after.state, after.generation) == (JobState.RUNNING, 2)
    assert (after.current.restored_checkpoint, after.current.restored_step) == (checkpoint, 20)
    assert nodes_of(client, job) == [before[0], spare, before[2]]
    assert client.get_node(before[1]).liveness == "SUSPECT"


def test_a_job_that_writes_elsewhere_waits_until_the_lost_node_s_lease_has_ended() -> None:
    cluster = FakeCluster(nodes=4)
    client = cluster.client()
    job = client.submit_job(spec(3, 1, writes=Writes.SHARED)).id
    cluster.run(3)
    cluster.lose_node(nodes_of(client, job)[0])
    cluster.run(50)
    assert client.get_job(job).generation == 1
    cluster.run(25)
    assert (client.get_job(job).state, client.get_job(job).generation) == (JobState.RUNNING, 2)


def test_a_node_that_returns_takes_work_again() -> None:
    cluster = FakeCluster(nodes=3)
    client = cluster.client()
    job = client.submit_job(spec(3)).id
    cluster.run(3)
    cluster.lose_node("node-2")
    cluster.run(90)
    assert client.get_node("node-2").liveness == "EXPIRED"
    assert client.get_job(job).state is JobState.RESTARTING
    cluster.return_node("node-2")
    cluster.run(10)
    assert client.get_job(job).state is JobState.RUNNING


def test_a_job_that_does_not_fit_waits_and_is_explained_until_nodes_join() -> None:
    cluster = FakeCluster(nodes=2)
    client = cluster.client()
    job = client.submit_job(spec(3)).id
    cluster.run(5)
    explained = client.explain_job(job)
    assert explained.state is JobState.PENDING
    assert [r.reason for r in explained.reasons] == ["TOO_FEW_NODES"]
    assert explained.relaxation == "ranks=2"
    assert cluster.add_nodes() == ["node-2"]
    cluster.run(3)
    assert client.get_job(job).state is JobState.RUNNING


def test_a_job_fails_for_good_once_its_restarts_are_used_up() -> None:
    cluster = FakeCluster(nodes=3)
    client = cluster.client()
    job = client.submit_job(spec(restarts=1)).id
    for _ in range(2):
        cluster.run(10)
        cluster.fail(job, 1, code=7, stderr="boom")
    ended = client.wait_job(job)
    assert ended.state is JobState.FAILED
    assert ended.first_error is not None
    assert ended.first_error.exit is not None
    assert (ended.first_error.rank, ended.first_error.exit.code, ended.first_error.exit.stderr_tail) == (1, 7, "boom")


def test_devices_and_labels_are_matched() -> None:
    cluster = FakeCluster(nodes=1)
    client = cluster.client()
    cluster.add_nodes(devices={"accelerator": 2}, labels={"rack": "r1"})
    request = virial.parse_spec(
        {
            "name": "gpu",
            "resources": {"cpu": 1, "memory": "1GiB", "devices": [{"kind": "accelerator", "count": 2}]},
            "task": {"command": ["x"]},
            "node_constraints": [{"attribute": "rack", "value": "r1"}],
        }
    )
    job = client.submit_job(request).id
    cluster.run(3)
    current = client.get_job(job).current
    assert current is not None
    assert nodes_of(client, job) == ["node-1"]
    assert {d.device_key for d in current.members[0].devices} == {"accelerator-0", "accelerator-1"}


def test_holds_and_drains() -> None:
    cluster = FakeCluster(nodes=3)
    client = cluster.client()
    job = client.submit_job(spec(2)).id
    cluster.run(3)
    first = nodes_of(client, job)[0]
    assert client.place_hold(first, "me", "new fan").schedulable is False
    cluster.run(5)
    assert client.get_job(job).generation == 1
    assert client.release_hold(first, "me").schedulable is True
    assert client.drain_node(first, "firmware").draining is True
    cluster.run(10)
    assert first not in nodes_of(client, job)
    assert client.get_job(job).state is JobState.RUNNING


def test_errors_are_those_of_a_cluster() -> None:
    client = FakeCluster(nodes=1).client()
    for call in (lambda: client.get_job("x"), lambda: client.cancel_job("x"), lambda: client.explain_job("x")):
        with pytest.raises(virial.NotFoundError, match="jobs/x does not exist"):
            call()
    with pytest.raises(virial.NotFoundError, match="nodes/x does not exist"):
        client.get_node("x")
    with pytest.raises(virial.InvalidRequestError) as caught:
        client.submit_job(spec(0))
    assert [v.field for v in caught.value.violations] == ["spec.gang.ranks"]
    client.submit_job(spec(), job_id="a")
    with pytest.raises(virial.AlreadyExistsError):
        client.submit_job(spec(), job_id="a")


def test_a_request_id_is_answered_once() -> None:
    client = FakeCluster().client()
    first = client.submit_job(spec(), request_id="r")
    assert client.submit_job(spec(), request_id="r").id == first.id
    assert len(client.list_jobs()) == 1
    with pytest.raises(virial.InvalidRequestError):
        client.submit_job(spec(2), request_id="r")


def test_a_dry_run_commits_nothing() -> None:
    client = FakeCluster().client()
    assert client.submit_job(spec(), validate_only=True).state is JobState.PENDING
    assert client.list_jobs() == []


def until_running(changes: Iterator[JobChange]) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for change in changes:
        if change.job is not None:
            found.append((change.job.state, change.job.generation))
            if change.job.state is JobState.RUNNING:
                return found
    return found


def test_a_watch_gives_the_present_state_then_each_change_and_resumes_from_its_cursor() -> None:
    cluster = FakeCluster(nodes=3)
    client = cluster.client()
    job = client.submit_job(spec()).id
    changes = list(islice(client.watch_jobs(job), 3))
    assert [c.job.state if c.job else None for c in changes] == [JobState.PENDING, None, JobState.STARTING]
    assert changes[1].synced
    states = until_running(client.watch_jobs(job, cursor=changes[-1].cursor))
    assert states[-1] == (JobState.RUNNING, 1)
    assert (JobState.PENDING, 0) not in states


def test_watched_events_are_the_listed_ones_without_a_gap() -> None:
    cluster = FakeCluster(nodes=3)
    client = cluster.client()
    job = client.submit_job(spec()).id
    watched = list(takewhile(lambda e: e.kind != "generation.active", client.watch_events(job_id=job)))
    listed = [e for e in client.list_events(job_id=job) if e.kind != "generation.active"]
    assert watched == listed
    after = list(islice(client.watch_events(listed[1].sequence, job_id=job), 2))
    assert after == client.list_events(job_id=job)[2:4]


def test_logs_are_followed_until_the_task_ends() -> None:
    cluster = FakeCluster(nodes=3)
    client = cluster.client()
    job = client.submit_job(spec()).id
    with pytest.raises(virial.NotFoundError):
        next(client.read_logs(job))
    cluster.run(3)
    cluster.write_log(job, "one\n", rank=1)
    following = client.read_logs(job, 1, follow=True)
    assert next(following).data == b"one\n"
    cluster.write_log(job, "two\n", rank=1)
    assert next(following).data == b"two\n"
    cluster.finish(job)
    assert list(following) == []
    assert [c.data for c in client.read_logs(job, 1, tail_bytes=4)] == [b"two\n"]


def test_a_wait_that_nothing_will_end_says_so() -> None:
    cluster = FakeCluster(nodes=3)
    client = cluster.client()
    job = client.submit_job(spec()).id
    with pytest.raises(virial.UnavailableError, match="still RUNNING after 20"):
        client.wait_job(job, timeout_s=20)
    with pytest.raises(StalledError, match="is still RUNNING"):
        client.wait_job(job)


def test_the_same_test_gives_the_same_history() -> None:
    def history() -> list[Event]:
        cluster = FakeCluster(nodes=4)
        client = cluster.client()
        job = client.submit_job(spec(3, 1)).id
        cluster.run(3)
        cluster.lose_node(nodes_of(client, job)[2])
        cluster.run(120)
        return client.list_events()

    assert history() == history()


def test_misuse_is_told_in_words() -> None:
    cluster = FakeCluster(nodes=1)
    with pytest.raises(ValueError, match="there is no node 'n9'; there are node-0"):
        cluster.lose_node("n9")
    with pytest.raises(ValueError, match="has no generation yet"):
        cluster.finish("train-1")
