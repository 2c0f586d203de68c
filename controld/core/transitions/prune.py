"""Bound the state: old idempotency keys, events past the limit, generations that hold nothing, jobs long ended."""

from __future__ import annotations

from controld.core import keys
from controld.core.commands import Prune
from controld.core.draft import Draft
from controld.core.outcome import Outcome
from controld.core.state import State

# One prune is one commit: it stays well under the limits of a store transaction; the next tick goes on.
DELETES_MAX = 256
# Beside the current one, so that a late report of a former generation still meets its record.
GENERATIONS_KEPT = 8


def prune(state: State, command: Prune) -> Outcome:
    draft = Draft(state)
    doomed: list[str] = []
    doomed += [
        keys.request(r.request_id) for r in state.requests.values() if r.time_unix_ns < command.requests_before_unix_ns
    ]
    surplus = len(state.events) - command.events_max
    if surplus > 0:
        doomed += [keys.event(sequence) for sequence in sorted(state.events)[:surplus]]
    for job, table in state.generations.items():
        for number in sorted(table)[:-GENERATIONS_KEPT]:
            if not any(m.lease.holds for m in table[number].members):
                doomed.append(keys.generation(job, number))
    ended = sorted((j for j in state.jobs.values() if j.state.ended), key=lambda j: (j.end_time_unix_ns, j.number))
    for job_record in ended[: max(0, len(ended) - command.ended_jobs_max)]:
        table = state.generations.get(job_record.id, {})
        if any(m.lease.holds for g in table.values() for m in g.members):
            continue
        doomed += [keys.generation(job_record.id, number) for number in table]
        doomed += [keys.checkpoint(job_record.id, id_) for id_ in state.checkpoints.get(job_record.id, {})]
        doomed.append(keys.job(job_record.id))
    for key in list(dict.fromkeys(doomed))[:DELETES_MAX]:
        draft.delete(key)
    return draft.done()
