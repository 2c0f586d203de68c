"""decide(state, command, now): the one place where a command becomes a change or a refusal.

Pure: the state is only read. The leader applies what is returned, first to its head and, once the store
has committed it, to what the world may see.
"""

from __future__ import annotations

from controld.core import commands as c
from controld.core.outcome import Outcome
from controld.core.state import State
from controld.core.transitions import checkpoints, generations, jobs, joins, leases, nodes, prune

__all__ = ["decide"]


def decide(state: State, command: c.Command, now: c.Now) -> Outcome:
    match command:
        case c.SubmitJob():
            return jobs.submit(state, command, now)
        case c.CancelJob():
            return jobs.cancel(state, command, now)
        case c.PlaceHold():
            return nodes.place_hold(state, command, now)
        case c.ReleaseHold():
            return nodes.release_hold(state, command, now)
        case c.DrainNode():
            return nodes.drain(state, command, now)
        case c.RemoveNode():
            return nodes.remove(state, command, now)
        case c.CreateJoinToken():
            return joins.create(state, command, now)
        case c.UseJoinToken():
            return joins.use(state, command, now)
        case c.AdmitNode():
            return nodes.admit(state, command, now)
        case c.ReportInventory():
            return nodes.report_inventory(state, command)
        case c.MarkSuspect():
            return nodes.mark_suspect(state, command)
        case c.MarkLive():
            return nodes.mark_live(state, command)
        case c.MarkExpired():
            return leases.mark_expired(state, command)
        case c.ExpireLeases():
            return leases.expire(state, command)
        case c.ReleaseMember():
            return leases.release(state, command, now)
        case c.StartGeneration():
            return generations.start(state, command, now)
        case c.CommitGo():
            return generations.go(state, command)
        case c.MarkActive():
            return generations.mark_active(state, command)
        case c.MarkProgress():
            return generations.mark_progress(state, command)
        case c.StopGeneration():
            return generations.stop(state, command, now)
        case c.EndGeneration():
            return generations.end(state, command, now)
        case c.BeginCheckpoint():
            return checkpoints.begin(state, command, now)
        case c.PrepareShard():
            return checkpoints.prepare(state, command)
        case c.AbortCheckpoint():
            return checkpoints.abort(state, command)
        case c.ReportBadShard():
            return checkpoints.report_bad(state, command)
        case c.CollectCheckpoints():
            return checkpoints.collect(state, command)
        case c.ForgetCheckpoint():
            return checkpoints.forget(state, command)
        case c.Prune():
            return prune.prune(state, command)
