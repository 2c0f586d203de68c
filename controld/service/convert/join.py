"""Join tokens and certificates of nodes: messages to commands and back."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from controld.core.commands import CreateJoinToken, UseJoinToken
from controld.core.model import JoinToken
from controld.service.failures import invalid_field
from virialpb.identity import NODE_NAME
from virialpb.v1 import join_pb2

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
SECRET_LENGTH_MAX: Final = 256
REQUEST_BYTES_MAX: Final = 16 << 10
TTL_MS_MIN: Final = 60_000
TTL_MS_MAX: Final = 30 * 86_400_000
MS_NS: Final = 1_000_000


def creation_from_proto(message: join_pb2.CreateJoinTokenRequest) -> CreateJoinToken:
    """Raises CallError."""
    if not _SHA256.fullmatch(message.secret_sha256):
        raise invalid_field("secret_sha256", "must be the sha256 of the secret, 64 hexadecimal digits")
    if not TTL_MS_MIN <= message.ttl_ms <= TTL_MS_MAX:
        raise invalid_field("ttl_ms", f"{message.ttl_ms} is outside a minute and thirty days")
    return CreateJoinToken(message.secret_sha256, _node(message.node), message.ttl_ms * MS_NS)


def created_to_proto(token: JoinToken, cluster: str, ca: bytes) -> join_pb2.CreateJoinTokenResponse:
    return join_pb2.CreateJoinTokenResponse(
        cluster=cluster, node=token.node, expire_time_unix_ns=token.expire_time_unix_ns, ca=ca
    )


def use_from_proto(message: join_pb2.JoinRequest, key_sha256: str) -> UseJoinToken:
    """Raises CallError."""
    if not message.secret or len(message.secret) > SECRET_LENGTH_MAX:
        raise invalid_field("secret", "must be the one of a join token")
    return UseJoinToken(hashlib.sha256(message.secret.encode()).hexdigest(), _node(message.node), key_sha256)


def request_from_proto(message: join_pb2.JoinRequest | join_pb2.RenewCertificateRequest) -> bytes:
    """Raises CallError."""
    if not 0 < len(message.certificate_request) <= REQUEST_BYTES_MAX:
        raise invalid_field("certificate_request", f"must be a PKCS #10 request of at most {REQUEST_BYTES_MAX} bytes")
    return message.certificate_request


def certificate_to_proto(certificate: bytes, ca: bytes) -> join_pb2.CertificateResponse:
    return join_pb2.CertificateResponse(certificate=certificate, ca=ca)


def _node(name: str) -> str:
    if not NODE_NAME.fullmatch(name):
        raise invalid_field("node", f"'{name[:60]}' is not a node's name: lower-case letters, digits, '.' and '-'")
    return name
