"""Laws of the slot table under any order of events, with a driver that may be late, deaf or repeat itself."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from noded.run.protocol import ExitReason, PrepareRequest, Started, TaskSpec, Token
from noded.run.slots import (
    NS_PER_MS,
    Action,
    Announce,
    Drop,
    Forget,
    Kill,
    Launch,
    Outcome,
    Persist,
    Phase,
    Refused,
    SlotTable,
)

JOBS = ("a", "b")
DEVICES = ("gpu0", "gpu1", "gpu2")
slot_names = st.tuples(st.sampled_from(JOBS), st.integers(1, 3), st.integers(0, 1))


class Slots(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable()
        self.now_ns = 1_000
        self.newest: dict[str, Token] = {}
        self.launched: set[tuple[str, Token]] = set()
        self.killed: set[str] = set()
        self.announced: dict[tuple[str, Token], list[bool]] = {}

    def take(self, actions: list[Action] | Refused | Started) -> None:
        if isinstance(actions, Refused | Started):
            return
        for action in actions:
            match action:
                case Launch():
                    slot = self.table.get(action.slot)
                    assert slot is not None
                    assert slot.deadline_ns > self.now_ns, "started after its deadline"
                    assert slot.token.order >= self.newest[slot.token.job].order, "an older generation was started"
                    assert (slot.id, slot.token) not in self.launched, "started twice"
                    self.launched.add((slot.id, slot.token))
                case Kill():
                    self.killed.add(action.slot)
                case Drop() | Forget():
                    self.killed.discard(action.slot)
                case Announce():
                    told = self.announced.setdefault((action.slot, action.token), [])
                    assert True not in told, "an end was announced after the final one"
                    told.append(action.exit.empty)
                case Persist() | _:
                    pass

    @rule(
        name=slot_names,
        revision=st.integers(0, 2),
        devices=st.sets(st.sampled_from(DEVICES)),
        lease=st.integers(-5, 50),
    )
    def prepare(self, name: tuple[str, int, int], revision: int, devices: set[str], lease: int) -> None:
        job, generation, rank = name
        token = Token(job, generation, (0, generation * 10 + revision))
        request = PrepareRequest(
            f"{job}.{generation}.{rank}",
            token,
            TaskSpec(("x",), {}),
            self.now_ns + lease * NS_PER_MS,
            device_keys=tuple(sorted(devices)),
        )
        result = self.table.prepare(request, self.now_ns)
        if not isinstance(result, Refused) and result:
            assert lease > 0
            assert token.order >= self.newest.get(job, token).order, "an older generation was prepared"
            self.newest[job] = token
            # Given back before it ran, it may be asked for again.
            assert (request.slot, token) not in self.launched
            self.announced.pop((request.slot, token), None)
        self.take(result)

    def pick(self, data: st.DataObject) -> str:
        known = [slot.id for slot in self.table.all()]
        return data.draw(st.sampled_from([*known, "a.1.0"]))

    @rule(data=st.data(), port=st.integers(0, 9))
    def prepared(self, data: st.DataObject, port: int) -> None:
        self.take(self.table.prepared(self.pick(data), port))

    @rule(data=st.data())
    def prepare_failed(self, data: st.DataObject) -> None:
        self.take(self.table.prepare_failed(self.pick(data)))

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        slot = self.table.get(self.pick(data))
        if slot is not None:
            self.take(self.table.start(slot.id, slot.token, {}, self.now_ns))

    @rule(data=st.data())
    def started(self, data: st.DataObject) -> None:
        slot = self.table.get(self.pick(data))
        if slot is not None and (slot.id, slot.token) in self.launched:
            self.take(self.table.started(slot.id, Started(5, 4, 3)))

    @rule(data=st.data(), lease=st.integers(-5, 50))
    def extend(self, data: st.DataObject, lease: int) -> None:
        slot_id = self.pick(data)
        before = self.table.get(slot_id)
        refused, actions = self.table.extend({slot_id: self.now_ns + lease * NS_PER_MS}, self.now_ns)
        self.take(actions)
        after = self.table.get(slot_id)
        if before is None or after is None:
            assert refused == [slot_id]
            return
        assert after.deadline_ns >= before.deadline_ns, "a deadline went back"
        if before.deadline_ns <= self.now_ns:
            assert refused == [slot_id]
            assert after.deadline_ns == before.deadline_ns, "a passed deadline was moved"

    @rule(data=st.data(), grace_ms=st.integers(0, 20))
    def stop(self, data: st.DataObject, grace_ms: int) -> None:
        self.take(self.table.stop(self.pick(data), grace_ms, self.now_ns))

    @rule(data=st.data(), code=st.integers(0, 1))
    def ended(self, data: st.DataObject, code: int) -> None:
        self.take(self.table.ended(self.pick(data), Outcome(code=code), self.now_ns))

    @rule(data=st.data())
    def emptied(self, data: st.DataObject) -> None:
        self.take(self.table.emptied(self.pick(data), self.now_ns))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = self.table.get(self.pick(data))
        result = self.table.release(slot.id if slot is not None else "a.1.0")
        if slot is not None and slot.phase not in (Phase.PREPARING, Phase.PREPARED, Phase.EXITED):
            assert isinstance(result, Refused)
        self.take(result)

    @rule(step_ms=st.sampled_from([0, 1, 5, 30, 20_000]))
    def tick(self, step_ms: int) -> None:
        self.now_ns += step_ms * NS_PER_MS
        self.take(self.table.tick(self.now_ns))
        for slot in self.table.live():
            assert slot.deadline_ns > self.now_ns or slot.killed_at_ns is not None, "alive after its deadline"

    @invariant()
    def a_device_has_one_holder(self) -> None:
        held = [key for slot in self.table.live() for key in slot.request.device_keys]
        assert len(held) == len(set(held))

    @invariant()
    def what_ran_ends_only_when_empty(self) -> None:
        for slot in self.table.all():
            if slot.phase is Phase.EXITED:
                assert slot.exit is not None
                assert slot.exit.empty
                assert slot.id not in self.killed, "ended, but what it left was not taken back"
                if (slot.id, slot.token) not in self.launched:
                    assert slot.exit.reason in (
                        ExitReason.STOPPED,
                        ExitReason.LEASE_EXPIRED,
                        ExitReason.START_FAILED,
                    )

    @invariant()
    def wakes_in_time(self) -> None:
        wake_ns = self.table.next_wake_ns()
        for slot in self.table.live():
            if slot.killed_at_ns is None:
                assert wake_ns is not None
                assert wake_ns <= slot.deadline_ns


Slots.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestSlots = Slots.TestCase
