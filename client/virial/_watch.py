"""What a watch has given so far, so that a new start of it gives only what is new. Pure."""

from __future__ import annotations

from dataclasses import replace

from virial.models import Cursor, Job, JobChange


class JobWatch:
    """A watch of jobs over broken connections and over a controller that has forgotten its history.

    A controller keeps the changes since its start, at most so many: to a watcher from before it answers COMPACTED.
    The jobs are then listed again; those that changed are given, and so are those that are gone.
    """

    def __init__(self, cursor: Cursor | None) -> None:
        # Where the next request starts; None: with a list of everything.
        self.position = cursor
        # Only who has seen every job can tell what is gone.
        self._may_list_again = cursor is None
        self._given: dict[str, Job] = {}
        # While jobs are listed again: those that are there, and where the watch stood before.
        self._present: set[str] | None = None
        self._before: Cursor | None = None

    def list_again(self) -> bool:
        """The history after `position` is lost: start anew if this watch can; else the caller must list."""
        if self.position is None or not self._may_list_again:
            return False
        self._before, self.position = self.position, None
        self._present = set()
        return True

    def take(self, change: JobChange) -> list[JobChange]:
        """What to pass on of a change that arrived."""
        if self._present is not None and self._before is not None:
            return self._relisted(change, self._present, self._before)
        if change.synced or self.position is not None:
            self.position = change.cursor
        return self._news(change)

    def _relisted(self, change: JobChange, present: set[str], before: Cursor) -> list[JobChange]:
        if not change.synced:
            if change.job is not None:
                present.add(change.job.id)
            # Items of a list have no cursor of their own; whoever keeps this one lists again too.
            return self._news(replace(change, cursor=before))
        self.position = change.cursor
        self._present = self._before = None
        gone = sorted(id_ for id_ in self._given if id_ not in present)
        for id_ in gone:
            del self._given[id_]
        return [replace(change, synced=False, deleted_id=id_) for id_ in gone]

    def _news(self, change: JobChange) -> list[JobChange]:
        if change.job is not None:
            # After a new start some of what was given comes again.
            if self._given.get(change.job.id) == change.job:
                return []
            self._given[change.job.id] = change.job
        elif change.deleted_id:
            self._given.pop(change.deleted_id, None)
        return [change]
