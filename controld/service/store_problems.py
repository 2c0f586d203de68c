"""What is wrong with the members of the store, in words, each with what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from controld.replica.survey import ControllerSeen, Picture, Role
from controld.store.members import Ailment, Finding
from virialpb.units import format_bytes

LIST: Final = "`virial admin members list`"


def in_words(findings: Iterable[Finding]) -> list[str]:
    return [_WORDS[finding.ailment](finding) for finding in findings]


def controllers_in_words(controllers: Iterable[ControllerSeen]) -> list[str]:
    """As seen by one that asked them all."""
    known = list(controllers)
    found = silent_in_words(known)
    found += [
        f"controller {controller.told.identity} ({controller.address}) has no copy of the state yet, so it cannot lead"
        for controller in known
        if controller.told is not None and controller.role is Role.LOADING
    ]
    if not any(controller.role is Role.LEADS for controller in known):
        found.insert(0, "no controller leads, so nothing is decided; what runs goes on until its leases end")
    return found


def silent_in_words(controllers: Iterable[ControllerSeen]) -> list[str]:
    return [
        f"controller {controller.address} does not answer: see whether controld runs there"
        for controller in controllers
        if controller.role is Role.SILENT
    ]


def memberless_in_words(picture: Picture) -> list[str]:
    """A controller whose member was removed still answers, and shows a copy that grows old. One whose member is down is
    not told of here: the member is."""
    silent_members = sum(1 for member in picture.members if member.listed.name and member.look is None)
    silent = sum(1 for controller in picture.controllers if controller.told is None)
    without = [c for c in picture.controllers if c.told is not None and c.told.member is None]
    if not picture.members or len(without) + silent <= silent_members:
        return []
    return [
        f"controller {controller.told.identity} ({controller.address}) has no store member beside it, so it gets "
        "no news and cannot lead: add one there (`virial admin members add`), or stop it and take it out of peers"
        for controller in without
        if controller.told is not None
    ]


def _no_majority(finding: Finding) -> str:
    answering, voters, needed = finding.numbers
    return (
        f"the store has no majority: {answering} of its {voters} members answer{_in(finding.members)}, {needed} are "
        "needed, and nothing can be written; start the members that are down. Only when they are lost for good, "
        "restore a backup into new members"
    )


def _corrupt(finding: Finding) -> str:
    return (
        f"store member {_names(finding.members)} is reported as corrupt; replace it: "
        f"`virial admin members replace {finding.members[0] if finding.members else 'NAME'}`"
    )


def _alarm(finding: Finding) -> str:
    text = f"the store has no space left{_in(finding.members)}, and takes no writes"
    if finding.details:
        return (
            f"{text}; it is defragmented and freed by the leader, but only while every member is in step, and "
            f"{_names(finding.details)} is not: bring that back, or replace it"
        )
    return f"{text}; the leader compacts and defragments it now, one member after the other"


def _short(finding: Finding) -> str:
    used, limit = finding.numbers
    return (
        f"the store uses {format_bytes(used)} of the {format_bytes(limit)} it may have: remove ended jobs sooner "
        "(keep.ended_jobs, keep.events), or raise store.size_max of every controller and member"
    )


def _silent(finding: Finding) -> str:
    names = _names(finding.members)
    if len(finding.members) > 1:
        return (
            f"store members {names} do not answer: start `controld member` and controld there; what is lost for good "
            "is replaced, one after the other: `virial admin members replace NAME`"
        )
    return (
        f"store member {names} does not answer: start `controld member` and controld there; if its host or its data is "
        f"lost for good, `virial admin members replace {names}`"
    )


def _not_started(finding: Finding) -> str:
    return (
        f"the member at {_names(finding.members)} was added to the store and has not started: run `controld member "
        "--joins` there, with the --peer flags that adding it printed"
    )


def _blind(finding: Finding) -> str:
    return f"store member {_names(finding.members)} cannot reach the others: see the network between their peer URLs"


def _lags(finding: Finding) -> str:
    return (
        f"store member {_names(finding.members)} lags {finding.numbers[0]} entries behind: see its disk and its network"
    )


def _learns(finding: Finding) -> str:
    return f"store member {_names(finding.members)} is catching up; the leader gives it its vote when it is in step"


def _even(finding: Finding) -> str:
    voters, losses = finding.numbers
    return (
        f"the store has {voters} members, which survive the loss of {losses}, no more than {voters - 1} would: add one"
    )


def _old(finding: Finding) -> str:
    return (
        f"etcd {finding.details[0]} ({_names(finding.members)}) has known faults in watches and snapshots; production "
        "asks for 3.4.38 or 3.5.23 and up"
    )


def _mixed(finding: Finding) -> str:
    return f"members run etcd {_names(finding.details)}: finish the upgrade, all of them shall run the same"


_WORDS: Final[dict[Ailment, Callable[[Finding], str]]] = {
    Ailment.NO_MAJORITY: _no_majority,
    Ailment.CORRUPT: _corrupt,
    Ailment.SPACE_ALARM: _alarm,
    Ailment.SPACE_SHORT: _short,
    Ailment.SILENT: _silent,
    Ailment.NOT_STARTED: _not_started,
    Ailment.BLIND: _blind,
    Ailment.LAGS: _lags,
    Ailment.LEARNS: _learns,
    Ailment.EVEN: _even,
    Ailment.OLD_VERSION: _old,
    Ailment.MIXED_VERSIONS: _mixed,
}


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "of unknown name"


def _in(names: tuple[str, ...]) -> str:
    return f" ({_names(names)})" if names else ""
