"""Asking for a certificate: messages of JoinService and of CertificateService."""

from __future__ import annotations

from dataclasses import dataclass

from virialpb.v1 import join_pb2
from virialpb.v1.join_pb2 import CertificateResponse

__all__ = ["CertificateResponse", "Certified", "certified_from_proto", "join_to_proto", "renewal_to_proto"]


@dataclass(frozen=True, slots=True)
class Certified:
    """PEM: this node's certificate, and whom it is to believe from now on."""

    certificate: bytes
    ca: bytes


def join_to_proto(node: str, secret: str, request: bytes) -> join_pb2.JoinRequest:
    return join_pb2.JoinRequest(node=node, secret=secret, certificate_request=request)


def renewal_to_proto(request: bytes) -> join_pb2.RenewCertificateRequest:
    return join_pb2.RenewCertificateRequest(certificate_request=request)


def certified_from_proto(message: CertificateResponse) -> Certified:
    return Certified(message.certificate, message.ca)
