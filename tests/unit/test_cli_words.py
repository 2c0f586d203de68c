"""Reasons and events in words: none is left without, and what is new is shown rather than dropped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import pytest

from controld.core.events import KINDS
from virial.cli import jobs, words
from virial.cli.printer import Output, Printer
from virial.models import Event, Explanation, Gang, Job, JobError, JobSpec, JobState, Resources, TaskExit, UnfitCount
from virial.models import TaskSpec as Task
from virial.testing import FakeCluster
from virialpb.reasons import ExitReason, PrepareFailure, StopReason, Unfit

SHOUTED = re.compile(r"[A-Z]{4,}|_")


def event(kind: str, **fields: object) -> Event:
    plain: dict[str, object] = {
        "sequence": 1,
        "kind": kind,
        "job": "",
        "node": "",
        "generation": 0,
        "reason": "",
        "numbers": (),
        "details": (),
        "create_time_unix_ns": 0,
        "cause_id": "",
        "revision": 1,
    }
    return Event(**(plain | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_registered_event_has_words(kind: str) -> None:
    about_node = kind.startswith(("node.", "inventory.", "hold."))
    made = event(kind, node="node-1") if about_node else event(kind, job="a", generation=2, node="node-1")
    text = words.event_text(made)
    assert text.startswith("node node-1: " if about_node else "job a")
    assert kind not in text
    assert not SHOUTED.search(text), text


@pytest.mark.parametrize("reason", Unfit)
@pytest.mark.parametrize("nodes", [0, 1, 3])
def test_every_reason_to_wait_has_words(reason: Unfit, nodes: int) -> None:
    text = words.unfit_line(UnfitCount(reason, nodes))
    assert not SHOUTED.search(text.replace("node_constraints", "").replace("`virial node NODE`", "")), text
    assert len(text.split()) > 3
    if nodes:
        assert text.startswith(("1 node ", "3 nodes ")) or reason in words._UNFIT_OF_JOB  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("reason", StopReason)
def test_every_stop_reason_has_words(reason: StopReason) -> None:
    assert words.stop_words(reason) != reason.replace("_", " ").lower()


@pytest.mark.parametrize("reason", ExitReason)
def test_every_exit_reason_has_words(reason: ExitReason) -> None:
    text = words.exit_words(TaskExit(reason, 3, 9, ""))
    assert not SHOUTED.search(text.replace("SIGKILL", "")), text
    assert ("code 3" in text) == (reason is ExitReason.EXITED)
    assert ("SIGKILL" in text) == (reason is not ExitReason.EXITED)


@pytest.mark.parametrize("failure", PrepareFailure)
def test_every_prepare_failure_has_words(failure: PrepareFailure) -> None:
    error = JobError(1, 2, "nodes/node-3", StopReason.PREPARE_FAILED, f"{failure}: /srv/x", None)
    text = words.error_line(error)
    assert text.startswith("generation 1, rank 2 on node-3: a rank could not be prepared (")
    assert text.endswith(": /srv/x)")
    known = failure is not PrepareFailure.GUARDIAN_LOST
    assert (failure not in text) == known


def test_numbers_are_told_with_their_units() -> None:
    count = UnfitCount("MEMORY", 4, (("free_most_memory_bytes", 1 << 30), ("needed_memory_bytes", 2 << 30)))
    assert words.unfit_line(count) == "4 nodes without enough free memory (free most memory 1GiB, needed memory 2GiB)"
    waits = UnfitCount("BACK_OFF", 0, (("wait_ms", 61_000),))
    assert "wait 1m1s" in words.unfit_line(waits)
    held = UnfitCount("WAITS_FOR_EXPIRY", 2, details=(("nodes", "n1, n2"),))
    assert words.unfit_line(held).endswith("(n1, n2)")


def test_a_relaxation_is_told_as_a_field_of_the_spec() -> None:
    explained = Explanation("a", JobState.PENDING, (), 3, "memory_bytes=1073741824")
    assert words.relaxation_line(explained) == "it would fit with resources.memory: 1GiB"
    assert (
        words.relaxation_line(Explanation("a", JobState.PENDING, (), 3, "ranks=2")) == "it would fit with gang.ranks: 2"
    )
    assert words.relaxation_line(Explanation("a", JobState.PENDING, (), 3, "")) == ""


def test_a_placement_names_every_seat_and_where_it_starts_from() -> None:
    placed = event(
        "generation.started",
        job="a",
        generation=2,
        numbers=(("ranks", 2), ("restored_step", 40), ("spares", 1)),
        details=(("checkpoint", "c1"), ("rank0", "n0"), ("rank1", "n1"), ("spare0", "n2")),
    )
    assert words.event_text(placed) == (
        "job a generation 2: placed: rank 0 on n0, rank 1 on n1, spare on n2; from checkpoint step 40"
    )


def test_seats_are_told_in_the_order_of_ranks() -> None:
    details = tuple(sorted((f"rank{i}", f"n{i}") for i in range(11)))
    text = words.event_text(event("generation.started", job="a", generation=1, details=details))
    assert text.index("rank 2 ") < text.index("rank 10 ")


def test_what_is_not_known_is_shown_by_its_own_name() -> None:
    new = event("volume.mounted", job="a", reason="NEW_REASON", numbers=(("size_bytes", 5),), details=(("path", "/x"),))
    assert words.event_text(new) == "job a: volume.mounted NEW_REASON size 5B path=/x"
    assert words.unfit_line(UnfitCount("NEW_REASON", 2)) == "2 nodes: new reason"
    assert words.stop_words("NEW_REASON") == "new reason"


def test_text_from_elsewhere_cannot_drive_the_terminal() -> None:
    text = words.event_text(event("hold.placed", node="n1", reason="\x1b[2Jgone\n", details=(("owner", "me"),)))
    assert text == "node n1: held from new work by me: \\x1b[2Jgone\\n"


def test_a_line_starts_with_the_time_of_day() -> None:
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d  node n1: .*", words.event_line(event("node.live", node="n1", create_time_unix_ns=10**18))
    )
    dated = words.event_line(event("node.live", node="n1", create_time_unix_ns=10**18), dated=True)
    assert re.fullmatch(r"2001-09-0\d \d\d:\d\d:\d\d  node n1: .*", dated)


def test_a_job_whose_saves_fail_and_that_lacks_spares_says_so() -> None:
    cluster = FakeCluster()
    cluster.add_nodes(3)
    client = cluster.client()
    spec = JobSpec("train", Task(("train",)), Resources(1000, 1 << 30), Gang(3, 2))
    job = client.submit_job(spec)
    cluster.run(3)
    found = client.get_job(job.id)
    shown = pairs_of(replace(found, aborted_saves=4, last_abort_reason="STORAGE_FULL"))
    assert shown["saves"].startswith("4 checkpoints failed since one was last complete: no room left")
    assert shown["spares"] == "0 of 2 held: no node had room for the others"
    assert pairs_of(found)["saves"] == ""
    (missing,) = client.explain_job(job.id).reasons
    assert words.unfit_line(missing).startswith("runs without all its spares")
    assert "spares held 0, spares wanted 2" in words.unfit_line(missing)


def pairs_of(job: Job) -> dict[str, str]:
    class Pairs(Printer):
        def __init__(self) -> None:
            super().__init__(Output.TABLE)

        def pairs(self, pairs: Iterable[tuple[str, str]]) -> None:
            told.update(pairs)

    told: dict[str, str] = {}
    jobs.show(Pairs(), job)
    return told
