"""The few places where real code reaches for the machine by itself; here they reach for the simulated one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from controld.replica import elector
from noded import driver
from noded.run import control as guardian_control
from tests.sim.clock import own_boottime_ns

TICK_SECONDS = 0.25
"""Coarser than the agent's own 0.1 s, for speed: what it enforces late stays within the kill budget of 1 s."""
POLL_SECONDS = 2.0
"""How often noded asks its guardian; its patience of 3 s stays as it is."""

PULSE_SECONDS = 0.1
"""How often a follower looks whether its loop has stood still, as rarely as its election's timings are long."""


@contextmanager
def simulated_machine() -> Generator[None]:
    places = (
        (guardian_control, "boottime_ns", own_boottime_ns),
        (elector, "PULSE_SECONDS", PULSE_SECONDS),
        (driver, "TICK_SECONDS", TICK_SECONDS),
        (driver, "POLL_SECONDS", POLL_SECONDS),
    )
    former = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, stand_in in places:
        setattr(module, name, stand_in)
    try:
        yield
    finally:
        for module, name, real in former:
            setattr(module, name, real)
