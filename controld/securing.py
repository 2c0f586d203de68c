"""TLS of a controller: what it serves with, whom it lets in, how nodes get certificates. Put together for
`controld.app`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from controld.config import OFF, Config, parse_address
from controld.service.backend import LeaderPort
from controld.service.gate import CertificateGate, Gate, OpenGate
from controld.service.issuer import Issuer
from controld.service.join import Registrar
from controld.service.telemetry import StructLog
from controld.service.tls import ServerTls


@dataclass(frozen=True, slots=True)
class Security:
    """`tls` None: the controller serves without TLS. `issuer` None: it makes no certificates."""

    tls: ServerTls | None
    issuer: Issuer | None
    join_address: tuple[str, int] | None

    @property
    def asks(self) -> ServerTls | None:
        """What callers are asked by, and peers shown; None: nobody is asked who they are."""
        return self.tls if self.tls is not None and self.tls.asks else None

    def gate(self) -> Gate:
        tls = self.asks
        return OpenGate() if tls is None else CertificateGate(tls.identity.cluster, tls.authorities, wall_clock)

    def registrar(self, leader: LeaderPort) -> Registrar:
        return Registrar(leader, self.asks, self.issuer, wall_clock)


def load_security(config: Config, log: StructLog) -> Security:
    """Raises TlsFilesError, IssuerError."""
    files = config.tls
    if files.certificate is None or files.key is None:
        return Security(None, None, None)
    tls = ServerTls(certificate=files.certificate, key=files.key, client_ca=files.client_ca, log=log)
    tls.load()
    issuer: Issuer | None = None
    if files.issuer_certificate is not None and files.issuer_key is not None:
        issuer = Issuer(files.issuer_certificate, files.issuer_key)
        issuer.check(tls.authorities())
    return Security(tls, issuer, None if files.join_listen == OFF else parse_address(files.join_listen))


def wall_clock() -> datetime:
    """Certificates are about the wall clock; nothing else is."""
    return datetime.now(UTC)
