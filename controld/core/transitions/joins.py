"""Join tokens: made by an admin, used once by whoever brings the secret and a key."""

from __future__ import annotations

from dataclasses import replace

from controld.core import events, keys
from controld.core.commands import CreateJoinToken, Now, UseJoinToken
from controld.core.draft import Draft
from controld.core.model import JoinToken
from controld.core.outcome import Outcome, Refused, Reply, Transition
from controld.core.state import State
from virialpb.reasons import Reason

# Every new node of a large cluster at once, twice over.
TOKENS_MAX = 20_000
# What has run out goes with the next that is made: so many, since a store transaction takes only so many changes.
DROPS_MAX = 128


def create(state: State, command: CreateJoinToken, now: Now) -> Outcome:
    """The same again changes nothing. `detail` of a refusal is EXISTS or TOO_MANY."""
    known = state.join_tokens.get(command.secret_sha256)
    if known is not None:
        if known.node != command.node:
            return Refused(Reason.ALREADY_EXISTS, f"nodes/{known.node}", detail="EXISTS")
        return Transition(reply=Reply(known.node))
    draft = Draft(state)
    # What has run out needs no commit to end, but must not pile up.
    over = [token for token in state.join_tokens.values() if token.expire_time_unix_ns <= now.unix_ns]
    for token in over[:DROPS_MAX]:
        draft.delete(keys.join_token(token.secret_sha256))
    if len(state.join_tokens) - len(over) >= TOKENS_MAX:
        return Refused(Reason.QUOTA, "the join tokens", detail="TOO_MANY")
    draft.put(JoinToken(command.secret_sha256, command.node, now.unix_ns + command.ttl_ns))
    draft.tell(events.event("token.created", node=command.node))
    return draft.done(Reply(command.node))


def use(state: State, command: UseJoinToken, now: Now) -> Outcome:
    """Once: the same key may come again, since its answer may have been lost and nobody else can have it.

    `detail` of a refusal: UNKNOWN, EXPIRED, USED, or NODE and the name that the token is for.
    """
    subject = f"nodes/{command.node}"
    token = state.join_tokens.get(command.secret_sha256)
    if token is None:
        return Refused(Reason.UNAUTHENTICATED, subject, detail="UNKNOWN")
    if token.node != command.node:
        return Refused(Reason.PERMISSION_DENIED, subject, detail=f"NODE {token.node}")
    if token.expire_time_unix_ns <= now.unix_ns:
        return Refused(Reason.PERMISSION_DENIED, subject, detail="EXPIRED")
    if token.used_by == command.key_sha256:
        return Transition(reply=Reply(token.node))
    if token.used_by:
        return Refused(Reason.PERMISSION_DENIED, subject, detail="USED")
    draft = Draft(state)
    draft.put(replace(token, used_by=command.key_sha256))
    draft.tell(events.event("node.certified", node=command.node))
    return draft.done(Reply(token.node))
