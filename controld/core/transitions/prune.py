"""Bound the state: old idempotency keys, events past the limit, generations that hold nothing, jobs long ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from controld.core import keys
from controld.core.checkpoints import holders
from controld.core.commands import Prune
from controld.core.draft import Draft
from controld.core.ids import JobId
from controld.core.model import Checkpoint, CheckpointState, Liveness, Tier
from controld.core.outcome import Outcome
from controld.core.state import State

# One prune is one commit: it stays well under the limits of a store transaction; the next tick goes on.
DELETES_MAX = 256
YOUNG_MAX = 1_000
# The newest of a job, so that a late report of a former generation still meets its record.
GENERATIONS_KEPT = 8


def events_overdue(state: State, events_max: int) -> bool:
    """Whether there are so many events that some are to go now, not with the next regular prune."""
    return len(state.events) - events_max > DELETES_MAX and any(_old_events(state, events_max))


def prune(state: State, command: Prune) -> Outcome:
    draft = Draft(state)
    left = DELETES_MAX
    for checkpoint in _to_drop(state, command.ended_jobs_max):
        left -= 1
        if left < 0:
            return draft.done()
        draft.put(replace(checkpoint, state=CheckpointState.DROPPING))
    for group in _doomed(state, command):
        left -= len(group)
        if left < 0:
            break
        for key in group:
            draft.delete(key)
    return draft.done()


def _doomed(state: State, command: Prune) -> Iterator[tuple[str, ...]]:
    """Keys to delete, in groups that go together: half of an ended job would be a broken state."""
    for key in _old_requests(state, command.requests_before_unix_ns):
        yield (key,)
    for key in _old_events(state, command.events_max):
        yield (key,)
    evicted = _evicted(state, command.ended_jobs_max)
    for job, table in state.generations.items():
        if job not in evicted:
            for number in sorted(table)[:-GENERATIONS_KEPT]:
                if not table[number].leased:
                    yield (keys.generation(job, number),)
    for job in evicted:
        if _files_left(state, job):
            continue
        # Checkpoints first, one by one, as there may be more than fit: nothing of an ended job refers to them.
        for id_ in state.checkpoints.get(job, {}):
            yield (keys.checkpoint(job, id_),)
        numbers = sorted(state.generations.get(job, {}))
        for number in numbers[:-GENERATIONS_KEPT]:
            yield (keys.generation(job, number),)
        yield (*(keys.generation(job, number) for number in numbers[-GENERATIONS_KEPT:]), keys.job(job))


def _to_drop(state: State, ended_jobs_max: int) -> Iterator[Checkpoint]:
    """Checkpoints on the disks of nodes, of jobs that are about to be forgotten: nothing would name them afterwards."""
    for job in _evicted(state, ended_jobs_max):
        for checkpoint in state.checkpoints.get(job, {}).values():
            if checkpoint.state is not CheckpointState.DROPPING and _on_nodes(state, checkpoint):
                yield checkpoint


def _files_left(state: State, job: JobId) -> bool:
    return any(_on_nodes(state, checkpoint) for checkpoint in state.checkpoints.get(job, {}).values())


def _on_nodes(state: State, checkpoint: Checkpoint) -> bool:
    """Whether a node has files of it that it can be told to delete; one that was given up is not waited for."""
    return checkpoint.tier is Tier.LOCAL and any(
        state.nodes[uid].liveness is not Liveness.EXPIRED for uid in holders(state, checkpoint)
    )


def _old_requests(state: State, before_unix_ns: int) -> Iterator[str]:
    """Keys of requests of long ago, of each commit all or none.

    They lie in the order they came in, so the young ones need not all be looked at: a day of them is millions. Some
    are, or one that was made while the wall clock was wrong would keep all that came after it.
    """
    young = 0
    for key, requests in state.request_packs.items():
        if all(request.time_unix_ns < before_unix_ns for request in requests):
            yield key
        elif (young := young + 1) > YOUNG_MAX:
            return


def _old_events(state: State, events_max: int) -> Iterator[str]:
    """Keys of the oldest events, of each commit all or none, such that at least `events_max` are left."""
    surplus = len(state.events) - events_max
    if surplus <= 0:
        return
    for key, events in sorted(state.event_packs.items(), key=lambda item: item[1][0].sequence if item[1] else 0):
        surplus -= len(events)
        if surplus < 0:
            return
        yield key


def _evicted(state: State, ended_jobs_max: int) -> dict[JobId, None]:
    """The jobs that ended longest ago, past the bound; one whose leases still hold something stays."""
    ended = sorted((j for j in state.jobs.values() if j.state.ended), key=lambda j: (j.end_time_unix_ns, j.number))
    surplus = ended[: max(0, len(ended) - ended_jobs_max)]
    return {j.id: None for j in surplus if not any(g.leased for g in state.generations.get(j.id, {}).values())}
