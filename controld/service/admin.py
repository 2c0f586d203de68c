"""AdminService: what an operator asks of the controllers themselves and of the store beneath them."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from controld.replica.admin import Admin
from controld.service.backend import Backend, Context
from controld.service.convert import admin as convert
from controld.service.convert import messages as m
from controld.service.failures import CallError
from controld.service.store_problems import controllers_in_words, in_words, memberless_in_words
from virialpb.errors import details_for
from virialpb.reasons import Reason
from virialpb.v1 import admin_pb2_grpc

PART_BYTES: Final = 256 << 10
BACKUPS_MAX: Final = 2
SCRATCH: Final = "backup-"


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """What changes something is done by the leader alone, after a barrier: another one names it."""

    def __init__(self, backend: Backend, admin: Admin) -> None:
        self._backend = backend
        self._admin = admin
        self._backups = 0

    async def ListControllers(  # noqa: N802
        self, request: m.ListControllersRequest, context: Context
    ) -> m.ListControllersResponse:
        picture = await self._admin.survey.take()
        problems = controllers_in_words(picture.controllers) + memberless_in_words(picture) + in_words(picture.findings)
        return convert.picture_to_proto(picture, problems, self._backend.store_kind)

    async def AddMember(self, request: m.AddMemberRequest, context: Context) -> m.ChangeMembersResponse:  # noqa: N802
        name, peer_url = convert.name_from(request.name), convert.peer_url_from(request.peer_url)
        await self._backend.leader.barrier()
        return convert.changed_to_proto(await self._admin.add(name, peer_url))

    async def RemoveMember(  # noqa: N802
        self, request: m.RemoveMemberRequest, context: Context
    ) -> m.ChangeMembersResponse:
        member = convert.member_from(request.member)
        await self._backend.leader.barrier()
        return convert.changed_to_proto(await self._admin.remove(member))

    async def ReplaceMember(  # noqa: N802
        self, request: m.ReplaceMemberRequest, context: Context
    ) -> m.ChangeMembersResponse:
        id_ = convert.member_id_from(request.member_id)
        name, peer_url = convert.name_from(request.name), convert.peer_url_from(request.peer_url)
        await self._backend.leader.barrier()
        return convert.changed_to_proto(await self._admin.replace(id_, name, peer_url))

    async def MoveLeader(self, request: m.MoveLeaderRequest, context: Context) -> m.MoveLeaderResponse:  # noqa: N802
        controller = convert.controller_from(request.controller)
        await self._backend.leader.barrier()
        return convert.moved_to_proto(await self._admin.move_leader(controller))

    async def Backup(self, request: m.BackupRequest, context: Context) -> AsyncIterator[m.BackupResponse]:  # noqa: N802
        """Copied to a file of this host first, so that a caller that reads slowly holds up nothing."""
        await self._backend.leader.barrier()
        if self._backups >= BACKUPS_MAX:
            raise CallError(details_for(Reason.OVERLOADED, detail=f"{BACKUPS_MAX} backups are under way"))
        if not self._backups:
            await asyncio.to_thread(_forget_stale, self._admin.scratch)
        self._backups += 1
        try:
            with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=self._admin.scratch) as scratch:
                path = Path(scratch) / "backup"
                cursor = await self._admin.backup(path)
                size_bytes = path.stat().st_size
                yield convert.backup_begins(cursor, size_bytes)
                with path.open("rb") as file:
                    while data := await asyncio.to_thread(file.read, PART_BYTES):
                        yield convert.backup_part(data)
                yield convert.backup_ends(size_bytes)
        finally:
            self._backups -= 1


def _forget_stale(directory: Path) -> None:
    """What a controller that was killed has left."""
    for path in directory.glob(f"{SCRATCH}*"):
        shutil.rmtree(path, ignore_errors=True)
