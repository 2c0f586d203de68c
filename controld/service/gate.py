"""Who calls, and whether they may: the identity in the caller's certificate, checked at every call in one place.

TLS looks at a certificate when a connection begins; a connection may outlive what it was let in with. So each call
looks again, and a stream is looked at as long as it is open.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final, Protocol

from controld.service.failures import CallError
from controld.service.roles import HEALTH, JOIN, may
from virialpb.errors import details_for
from virialpb.identity import Identity, Role
from virialpb.reasons import Reason

if TYPE_CHECKING:
    from cryptography import x509

# As many as there may be agents and people; a certificate that was put out is read again.
CALLERS_MAX: Final = 16_384
# What a caller sends of those between its certificate and an authority. A controller's issuer is one.
BETWEEN_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Caller:
    """`identity` None: callers are not asked who they are (no TLS, or no `tls.client_ca`)."""

    identity: Identity | None = None
    not_after: datetime | None = None

    @property
    def name(self) -> str:
        return "" if self.identity is None else self.identity.name

    @property
    def only_own(self) -> bool:
        """Whether the caller may change only what is their own."""
        return self.identity is not None and self.identity.role is not Role.ADMIN


ANYONE: Final = Caller()
# Set for each call by the interceptor.
CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYONE)

# What gRPC says of the other end of a connection (`ServicerContext.auth_context`).
Peer = Mapping[str, Sequence[bytes]]


class Gate(Protocol):
    @property
    def asks(self) -> bool:
        """Whether it looks at `peer`, which costs gRPC some work."""
        ...

    def admit(self, method: str, peer: Peer) -> Caller:
        """Who calls. Raises CallError where they may not."""
        ...


class OpenGate:
    """Without certificates whoever reaches the address may do everything: on loopback, and by --insecure."""

    asks = False

    def admit(self, method: str, peer: Peer) -> Caller:
        return ANYONE


class JoinGate:
    """Of the address where nodes join: nothing else is served there."""

    asks = False

    def admit(self, method: str, peer: Peer) -> Caller:
        if method != JOIN and not method.startswith(HEALTH):
            raise _denied(method.rpartition("/")[2], "at this address nodes join, and nothing else is done")
        return ANYONE


@dataclass(frozen=True, slots=True)
class _Read:
    """`direct`: signed by an authority itself. `trusted`: by one, or by whom one lets sign."""

    identity: Identity | None
    not_after: datetime
    direct: bool
    trusted: bool


class CertificateGate:
    """`cluster`: that of the controller's own certificate. `authorities`: whom it trusts, at the moment of the call."""

    asks = True

    def __init__(
        self, cluster: str, authorities: Callable[[], tuple[x509.Certificate, ...]], now: Callable[[], datetime]
    ) -> None:
        self._cluster = cluster
        self._authorities = authorities
        self._now = now
        self._trusted: tuple[x509.Certificate, ...] = ()
        self._known: OrderedDict[tuple[bytes, bytes], _Read] = OrderedDict()

    def admit(self, method: str, peer: Peer) -> Caller:
        if method.startswith(HEALTH):
            return ANYONE
        identity, not_after = self._identify(peer)
        if not may(identity.role, method):
            name = method.rpartition("/")[2]
            raise _denied(name, f"{identity.uri} has the role {identity.role}, which may not call it")
        return Caller(identity, not_after)

    def _identify(self, peer: Peer) -> tuple[Identity, datetime]:
        pems = peer.get("x509_pem_cert", ())
        if len(pems) != 1:
            raise _unknown("it shows no certificate")
        read = self._read(pems[0], b"".join(peer.get("x509_pem_cert_chain", ())))
        if read is None:
            raise _unknown("its certificate cannot be read")
        if read.not_after <= self._now():
            raise _unknown(f"its certificate was valid until {read.not_after.isoformat()}")
        if read.identity is None:
            raise _unknown("its certificate names no identity, spiffe://CLUSTER/ROLE/NAME, or more than one")
        if read.identity.cluster != self._cluster:
            raise _unknown(f"{read.identity.uri} is of another cluster; this one is {self._cluster}")
        if not read.direct and read.identity.role is not Role.NODE:
            # Who may admit nodes could make an admin otherwise.
            raise _unknown(f"{read.identity.uri} was signed by an issuer, which may make certificates of nodes only")
        if not read.trusted:
            # TLS has seen to this once, when the connection began: an authority may have gone since.
            raise _unknown(f"{read.identity.uri} was signed by nobody who is trusted")
        return read.identity, read.not_after

    def _read(self, pem: bytes, chain: bytes) -> _Read | None:
        trusted = self._authorities()
        if trusted is not self._trusted:
            self._trusted = trusted
            self._known.clear()
        shown = (pem, chain)
        known = self._known.get(shown)
        if known is not None:
            self._known.move_to_end(shown)
            return known
        from virialpb import certificates as c

        try:
            certificate = c.read_certificates(pem)[0]
            between = c.read_certificates(chain)[:BETWEEN_MAX] if chain else []
        except c.CertificateError:
            return None
        facts = c.facts_of(certificate)
        direct = c.signed_by(certificate, trusted)
        read = _Read(facts.identity, facts.not_after, direct, direct or c.leads_to(certificate, between, trusted))
        self._known[shown] = read
        if len(self._known) > CALLERS_MAX:
            self._known.popitem(last=False)
        return read


def check_owner(owner: str, what: str) -> None:
    """Raises CallError unless the caller of this call may do what only an owner, or an admin, may."""
    caller = CALLER.get()
    if caller.only_own and caller.name != owner:
        raise _denied(what, f"it belongs to {owner or 'nobody'}, and you are {caller.name}")


def check_node(caller: Caller, node: str) -> None:
    """Raises CallError where a certificate is that of another node than the one that is spoken for."""
    if caller.identity is not None and caller.name != node:
        raise _denied(f"nodes/{node}", f"the certificate is that of the node {caller.name}")


def check_user(user: str) -> None:
    """Raises CallError where tasks would run as another user of the hosts than their submitter."""
    caller = CALLER.get()
    if caller.only_own and user not in ("", caller.name):
        raise CallError(
            details_for(
                Reason.PERMISSION_DENIED,
                subject="task.user",
                detail=f"you are {caller.name}, and the tasks would run as {user}",
                todo="leave task.user out, or ask an admin to submit the job",
            )
        )


def _denied(subject: str, detail: str) -> CallError:
    return CallError(details_for(Reason.PERMISSION_DENIED, subject=subject, detail=detail))


def _unknown(detail: str) -> CallError:
    return CallError(details_for(Reason.UNAUTHENTICATED, detail=detail))
