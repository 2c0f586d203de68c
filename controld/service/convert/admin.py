"""AdminService: pictures of controllers and members, changes of members, the bytes of a backup."""

from __future__ import annotations

from collections.abc import Iterable

from controld.core.ids import valid_id
from controld.replica.admin import Changed
from controld.replica.survey import ControllerSeen, Picture
from controld.service.convert.common import cursor_to_proto
from controld.service.failures import invalid_field
from controld.store.members import Seen
from virialpb.v1 import admin_pb2 as pb

URL_LENGTH_MAX = 300
NAME_LENGTH_MAX = 300


def picture_to_proto(picture: Picture, problems: Iterable[str], store_kind: str) -> pb.ListControllersResponse:
    return pb.ListControllersResponse(
        controllers=[_controller(controller) for controller in picture.controllers],
        members=[_member(member) for member in picture.members],
        problems=problems,
        store_kind=store_kind,
    )


def _controller(seen: ControllerSeen) -> pb.Controller:
    told = seen.told
    if told is None:
        return pb.Controller(address=seen.address, role=seen.role.value)
    return pb.Controller(
        address=seen.address,
        identity=told.identity,
        role=seen.role.value,
        version=told.version,
        member_id="" if told.member is None else f"{told.member.id:x}",
    )


def _member(seen: Seen) -> pb.StoreMember:
    message = pb.StoreMember(
        id=f"{seen.listed.id:x}",
        name=seen.listed.name,
        peer_url=seen.listed.peer_url,
        role=_role(seen),
        controller=seen.controller,
        lag_entries=seen.lag_entries,
    )
    if seen.look is not None:
        message.version = seen.look.version
        message.size_bytes = seen.look.size_bytes
        message.used_bytes = seen.look.used_bytes
    return message


def _role(seen: Seen) -> str:
    if seen.listed.learner and seen.listed.name:
        return "LEARNS"
    if seen.look is None:
        return "SILENT"
    return "LEADS" if seen.look.leader_id == seen.look.id else "VOTES"


def name_from(text: str, field: str = "name") -> str:
    """Raises CallError."""
    if not valid_id(text):
        raise invalid_field(
            field, f"'{text[:80]}' is no name of a member: 1 to 63 lower-case letters, digits and '-', such as c1"
        )
    return text


def peer_url_from(text: str) -> str:
    """Raises CallError. The members themselves look closer."""
    scheme, _, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme not in ("http", "https") or not host or not port.isdecimal() or len(text) > URL_LENGTH_MAX:
        raise invalid_field(
            "peer_url",
            f"'{text[:80]}' is not how other members reach it: write https://HOST:PORT",
        )
    return text


def member_from(text: str) -> str:
    """A name or an id. Raises CallError."""
    if not 0 < len(text) <= NAME_LENGTH_MAX:
        raise invalid_field("member", "name a member, by its name or its id")
    return text


def member_id_from(text: str) -> int:
    """Raises CallError."""
    try:
        return int(text, 16)
    except ValueError:
        raise invalid_field("member_id", f"'{text[:80]}' is no id of a member: hexadecimal, as listed") from None


def controller_from(text: str) -> str:
    """Raises CallError."""
    if not 0 < len(text) <= NAME_LENGTH_MAX:
        raise invalid_field("controller", "name the controller that shall lead, by its name or HOST:PORT")
    return text


def changed_to_proto(changed: Changed) -> pb.ChangeMembersResponse:
    return pb.ChangeMembersResponse(
        members=[_member(member) for member in changed.members],
        peers=changed.peers,
        added_id="" if changed.added is None else f"{changed.added.id:x}",
    )


def moved_to_proto(leader: str) -> pb.MoveLeaderResponse:
    return pb.MoveLeaderResponse(leader=leader)


def backup_begins(cursor: tuple[int, int], size_bytes: int) -> pb.BackupResponse:
    return pb.BackupResponse(cursor=cursor_to_proto(*cursor), size_bytes=size_bytes)


def backup_part(data: bytes) -> pb.BackupResponse:
    return pb.BackupResponse(data=data)


def backup_ends(size_bytes: int) -> pb.BackupResponse:
    return pb.BackupResponse(complete=True, size_bytes=size_bytes)
