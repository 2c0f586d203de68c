"""Laws of the agent under any order of lost, late and repeated messages, crashes of either process, and clock jumps.

The laws themselves stand in `noded_world`: no deadline beyond an acknowledged renewal, no released slot prepared again,
never two generations of a job on the node, no spare started, beat numbers and leader epochs only grow.
"""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from noded.core import events as e
from noded.core import messages as m
from noded.core.lease import LeaseClock
from tests.property.noded_world import FENCE_AFTER_MS, SECOND, World
from virialpb.ids import Epoch, JobId, SlotId, Token, slot_id
from virialpb.reasons import ExitReason, StopReason

NAMES = st.one_of(st.just(None), st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 2), st.sampled_from([0, None])))
"""(job, generation, rank); None: the same as in the order before."""
LEADERS = st.sampled_from([0, 0, 0, 0, 0, 0, -1, 1])
"""Of an order's sender, against the highest leader that the agent has seen."""


Name = tuple[str, int, int | None]


def token_of(job: str, generation: int) -> Token:
    return Token(JobId(job), generation, Epoch(1, 10 * generation))


def name_of(job: str, generation: int, rank: int | None) -> SlotId:
    return slot_id(job, generation, rank or 0, spare=rank is None)


def prepare_of(job: str, generation: int, rank: int | None) -> m.Prepare:
    slot, token = name_of(job, generation, rank), token_of(job, generation)
    return m.Prepare(slot, token, rank, 2, m.TaskSpec(("x",)), fence_after_ms=FENCE_AFTER_MS)


class Node(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.name: Name = ("a", 1, 0)
        self.world.tell(e.InventoryRead(m.Inventory()))
        self.world.connect()
        self.world.tell(e.OrderReceived(Epoch(1, 5), m.Welcome(1000, "c")))

        self.world.acknowledge(self.world.last_seq, Epoch(1, 5))

    def _named(self, name: Name | None) -> Name:
        self.name = self.name if name is None else name
        return self.name

    def _epoch(self, leader: int) -> Epoch:
        seen = self.world.agent.leader.seen
        return Epoch(seen.history, max(1, seen.revision + leader))

    def _order(self, leader: int, order: m.Order) -> None:
        self.world.tell(e.OrderReceived(self._epoch(leader), order))

    @rule(name=NAMES, leader=LEADERS)
    def prepare(self, name: Name | None, leader: int) -> None:
        self._order(leader, prepare_of(*self._named(name)))

    @rule(name=NAMES, leader=LEADERS)
    def go(self, name: Name | None, leader: int) -> None:
        wanted = prepare_of(*self._named(name))
        self._order(leader, m.Go(wanted.slot, wanted.token, 2, "h", 1))

    @rule(name=NAMES, leader=LEADERS)
    def stop(self, name: Name | None, leader: int) -> None:
        wanted = prepare_of(*self._named(name))
        self._order(leader, m.Stop(wanted.slot, wanted.token, 0, StopReason.CANCELLED))

    @rule(name=NAMES, leader=LEADERS)
    def release(self, name: Name | None, leader: int) -> None:
        wanted = prepare_of(*self._named(name))
        self._order(leader, m.Release(wanted.slot, wanted.token))

    @rule(name=NAMES)
    def run(self, name: Name | None) -> None:
        """Nothing goes wrong for once: chance alone would seldom get so far."""
        wanted = prepare_of(*self._named(name))
        self.world.acknowledge(self.world.last_seq, self.world.agent.leader.seen)
        for order in (wanted, m.Go(wanted.slot, wanted.token, 2, "h", 1)):
            self._order(0, order)
            self.world.settle()

    @rule(name=NAMES)
    def end(self, name: Name | None) -> None:
        wanted = prepare_of(*self._named(name))
        for order in (m.Stop(wanted.slot, wanted.token, 0, StopReason.CANCELLED), m.Release(wanted.slot, wanted.token)):
            self._order(0, order)
            self.world.graces_run_out()
            self.world.settle()

    @rule()
    def graces_run_out(self) -> None:
        self.world.graces_run_out()

    @rule(back=st.sampled_from([0, 0, 0, -1, 1, 3]), leader=LEADERS)
    def acknowledge(self, back: int, leader: int) -> None:
        self.world.acknowledge(self.world.last_seq - back, self._epoch(leader))

    @rule(requests=st.sampled_from([0, 1, 9]), answers=st.sampled_from([0, 1, 9]))
    def step(self, requests: int, answers: int) -> None:
        self.world.step(requests, answers)

    @rule(tenths=st.sampled_from([0, 1, 5, 10, 10, 10, 30, 120]))
    def time_passes(self, tenths: int) -> None:
        self.world.advance(tenths * SECOND // 10)
        self.world.tell(e.Tick())

    @rule(data=st.data())
    def task_ends(self, data: st.DataObject) -> None:
        live = sorted(held.slot for held in self.world.guardian.held.values() if held.starts and held.live)
        if live:
            held = self.world.guardian.held[data.draw(st.sampled_from(live))]
            self.world.from_guardian.extend(self.world.guardian.end(held, ExitReason.EXITED))

    @rule()
    def reconnect_controller(self) -> None:
        self.world.connect()

    @rule(answered=st.booleans())
    def break_guardian_connection(self, answered: bool) -> None:
        if answered:
            self.world.step(len(self.world.to_guardian), 0)
        self.world.break_guardian_connection()
        self.world.meet()

    @rule()
    def restart_agent(self) -> None:
        self.world.restart_agent()
        self.world.connect()
        self.world.tell(e.OrderReceived(self.world.saved[0], m.Welcome(1000, "c")))

    @rule()
    def kill_guardian(self) -> None:
        self.world.kill_guardian()
        self.world.connect()
        self.world.tell(e.OrderReceived(self.world.saved[0], m.Welcome(1000, "c")))

    @invariant()
    def every_held_slot_is_known_to_the_agent(self) -> None:
        """What the guardian holds, the agent shows, so that a controller can have it stopped and released."""
        waiting = {getattr(order, "slot", "") for order in self.world.to_guardian}
        shown = {status.slot for status in self.world.agent.slots.statuses(self.world.now_ns)}
        assert {slot for slot in self.world.guardian.held if slot not in waiting} <= shown | set(
            self.world.agent.slots.gone
        )

    def teardown(self) -> None:
        """Whatever happened: a controller that looks at the beats and says again what it wants gets it."""
        world = self.world
        world.settle()
        wanted = prepare_of("z", 9, 0)
        for _ in range(60):
            world.advance(SECOND // 2)
            world.tell(e.Tick())
            world.acknowledge(world.last_seq, world.agent.leader.seen)
            for slot, status in list(world.told.items()):
                self._wind_up(slot, status, wanted)
            if wanted.slot not in world.told:
                self._order(0, wanted)
            world.graces_run_out()
            world.settle()
        states = {slot: status.state for slot, status in world.told.items()}
        assert states == {wanted.slot: m.SlotState.RUNNING}, states
        assert {slot for slot, held in world.guardian.held.items() if held.live} == {wanted.slot}

    def _wind_up(self, slot: SlotId, status: m.SlotStatus, wanted: m.Prepare) -> None:
        if slot == wanted.slot:
            if status.state is m.SlotState.READY:
                self._order(0, m.Go(slot, wanted.token, 2, "h", 1))
        elif status.state in (m.SlotState.EXITED, m.SlotState.PREPARE_FAILED):
            self._order(0, m.Release(slot, status.token))
        else:
            self._order(0, m.Stop(slot, status.token, 0, StopReason.SUPERSEDED))


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)


@given(
    fence_after_ms=st.integers(3_000, 600_000),
    agent_rate=st.integers(9_950, 10_050),
    controller_rate=st.integers(9_950, 10_050),
    renewals=st.lists(st.tuples(st.integers(1, 5_000), st.integers(0, 3_000), st.booleans()), min_size=1, max_size=20),
)
def test_an_agent_stops_before_its_controller_grants_again_whatever_the_delays(
    fence_after_ms: int, agent_rate: int, controller_rate: int, renewals: list[tuple[int, int, bool]]
) -> None:
    """Clocks whose rates differ by up to 1 %, any delay, any loss of acknowledgements. Times in ms, then real time."""
    clock = LeaseClock()
    at_ms, expiry_ms = 0, Fraction(0)
    for seq, (gap_ms, delay_ms, acknowledged) in enumerate(renewals, start=1):
        at_ms += gap_ms
        clock.sent(seq, at_ms * agent_rate * 100, renews=True)  # the agent's clock, in ns: rate 10,000 is right
        received_ms = at_ms + delay_ms
        expiry_ms = max(expiry_ms, received_ms + Fraction(10_000 * (fence_after_ms + 1_000), controller_rate))
        if acknowledged:
            clock.acknowledged(seq)
    deadline_ns = clock.deadline_ns(fence_after_ms)
    if deadline_ns is not None:
        stopped_ms = Fraction(deadline_ns, agent_rate * 100) + 1_000  # K: the time a kill may take
        assert stopped_ms <= expiry_ms
