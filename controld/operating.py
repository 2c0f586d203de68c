"""What a controller needs to be operated: a picture of all controllers and members, the care for them, the requests of
an operator. Put together for `controld.app`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from controld.config import Config
from controld.replica.admin import Admin
from controld.replica.care import Care
from controld.replica.elector import Place
from controld.replica.observe import Log
from controld.replica.replica import Replica
from controld.replica.survey import Colleagues, Role, Survey, Told
from controld.store.etcd import EtcdStore
from controld.store.members import MembersPort
from controld.store.port import Store


@dataclass(frozen=True, slots=True)
class Operating:
    """`care` is None where there are no members of ours, or one only, which the store cares for by itself."""

    admin: Admin
    care: Care | None


def operating(
    config: Config,
    *,
    store: Store,
    place: Place,
    replica: Replica | None,
    colleagues: Colleagues | None,
    version: str,
    log: Log,
) -> Operating:
    members: MembersPort | None = None
    short = asyncio.Event()
    if isinstance(store, EtcdStore) and config.store.member_dir is not None:
        members, short = store.members, store.short
    survey = Survey(place=place, me=_teller(place, replica, version), colleagues=colleagues, members=members)
    admin = Admin(store=store, survey=survey, replica=replica, members=members, scratch=Path(config.data_dir), log=log)
    if replica is None or members is None or colleagues is None:
        return Operating(admin, None)
    care = Care(
        address=place.address,
        office=replica,
        members=members,
        colleagues=colleagues,
        survey=survey,
        short=short,
        log=log,
    )
    return Operating(admin, care)


def _teller(place: Place, replica: Replica | None, version: str) -> Callable[[], Told]:
    def tell() -> Told:
        if replica is None or replica.leads:
            role = Role.LEADS
        else:
            role = Role.FOLLOWS if replica.loaded else Role.LOADING
        return Told(place.identity, role, version)

    return tell
