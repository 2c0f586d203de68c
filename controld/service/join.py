"""Certificates of nodes: CertificateService beside the others, JoinService at an address of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from controld.core.outcome import Refused
from controld.replica.errors import RefusedError
from controld.service.backend import Context, LeaderPort
from controld.service.convert import join as convert
from controld.service.convert import messages as m
from controld.service.failures import CallError, invalid_field
from controld.service.gate import CALLER
from controld.service.issuer import Issuer, IssuerError
from controld.service.tls import ServerTls
from virialpb.errors import details_for
from virialpb.reasons import Reason
from virialpb.v1 import join_pb2_grpc

_NEW: Final = "make a new one: virial admin token create --node NAME"


@dataclass(frozen=True, slots=True)
class Registrar:
    """`tls` None: callers are not asked for certificates, so none are made. `issuer` None: none was set."""

    leader: LeaderPort
    tls: ServerTls | None
    issuer: Issuer | None
    now: Callable[[], datetime]

    def check(self) -> tuple[ServerTls, Issuer]:
        """Raises CallError saying what to set."""
        if self.tls is None or not self.tls.asks:
            raise _cannot("this controller asks nobody for a certificate", "set tls.certificate, key and client_ca")
        if self.issuer is None:
            raise _cannot(
                "this controller cannot sign certificates",
                "make an issuer (virial admin certs issue issuer NAME) and set tls.issuer_certificate, tls.issuer_key "
                "and tls.join_listen of every controller",
            )
        try:
            # Each time: an authority may have been replaced, and this one's issuer forgotten. A node that took such a
            # certificate would be let in nowhere, with no way back.
            self.issuer.check(self.tls.authorities())
        except IssuerError as error:
            raise _cannot(str(error), "put the issuer's files right; a join token is still good") from error
        return self.tls, self.issuer

    def problems(self) -> list[str]:
        """What is wrong with certificates, in words."""
        return [] if self.tls is None else self.tls.problems(self.now())

    def sign(self, node: str, request: bytes) -> m.CertificateResponse:
        """Raises CallError."""
        from virialpb.certificates import CertificateError

        tls, issuer = self.check()
        try:
            certificate = issuer.sign(tls.identity.cluster, node, request, self.now())
        except CertificateError as error:
            raise invalid_field("certificate_request", str(error)) from error
        except IssuerError as error:
            raise _cannot(str(error), "put the issuer's files right; a join token is still good") from error
        return convert.certificate_to_proto(certificate, tls.content.ca)


class CertificateServicer(join_pb2_grpc.CertificateServiceServicer):
    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar

    async def CreateJoinToken(  # noqa: N802
        self, request: m.CreateJoinTokenRequest, context: Context
    ) -> m.CreateJoinTokenResponse:
        command = convert.creation_from_proto(request)
        tls, _ = self._registrar.check()
        leader = self._registrar.leader
        await leader.submit(command)
        token = leader.state.join_tokens.get(command.secret_sha256)
        if token is None:
            raise CallError(details_for(Reason.STALE, subject="the join token"))
        return convert.created_to_proto(token, tls.identity.cluster, tls.content.ca)

    async def RenewCertificate(  # noqa: N802
        self, request: m.RenewCertificateRequest, context: Context
    ) -> m.CertificateResponse:
        return self._registrar.sign(CALLER.get().name, convert.request_from_proto(request))


class JoinServicer(join_pb2_grpc.JoinServiceServicer):
    def __init__(self, registrar: Registrar) -> None:
        self._registrar = registrar

    async def Join(self, request: m.JoinRequest, context: Context) -> m.CertificateResponse:  # noqa: N802
        """The token is used by a commit, before anything is signed: it holds over changes of leader."""
        csr = convert.request_from_proto(request)
        command = convert.use_from_proto(request, _key_sha256(csr))
        self._registrar.check()
        try:
            await self._registrar.leader.submit(command)
        except RefusedError as error:
            raise _refused(error.refused) from error
        return self._registrar.sign(command.node, csr)


def _key_sha256(request: bytes) -> str:
    """Raises CallError."""
    from virialpb import certificates as c

    try:
        return c.key_sha256(c.requested_key(request))
    except c.CertificateError as error:
        raise invalid_field("certificate_request", str(error)) from error


def _refused(refused: Refused) -> CallError:
    words = {
        "UNKNOWN": "the join token is not known here; it may have run out",
        "EXPIRED": "the join token has run out",
        "USED": "the join token was used already, for another key",
    }
    kind, _, node = refused.detail.partition(" ")
    detail = f"the join token is for the node {node}" if kind == "NODE" else words.get(kind, refused.detail)
    return CallError(details_for(refused.reason, subject=refused.subject, detail=detail, todo=_NEW))


def _cannot(detail: str, todo: str) -> CallError:
    return CallError(details_for(Reason.NOT_NOW, subject="making a certificate", detail=detail, todo=todo))
