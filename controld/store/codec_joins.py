"""Join tokens, as they are stored."""

from __future__ import annotations

from controld.core.model import JoinToken
from virialpb.store.v1 import joins_pb2 as pb


def join_token(value: JoinToken) -> pb.JoinToken:
    return pb.JoinToken(
        secret_sha256=value.secret_sha256,
        node=value.node,
        expire_time_unix_ns=value.expire_time_unix_ns,
        used_by=value.used_by,
    )


def read_join_token(data: bytes) -> JoinToken:
    value = pb.JoinToken.FromString(data)
    return JoinToken(
        secret_sha256=value.secret_sha256,
        node=value.node,
        expire_time_unix_ns=value.expire_time_unix_ns,
        used_by=value.used_by,
    )
