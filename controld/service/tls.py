"""The certificates that a controller serves with, and whom it trusts: as the files are now, without a restart.

A server takes new ones at the next handshake; streams that are open go on. Whose certificate ran out is shown out by
`tenure`, since TLS looks at it at the handshake only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import grpc

from controld.service.telemetry import LogName, StructLog
from virialpb.identity import Identity, Role
from virialpb.tlsfiles import LOOK_SECONDS, TlsContent, TlsFiles, TlsFilesError

if TYPE_CHECKING:
    from cryptography import x509

# Long enough for whoever looks at the status once a week.
WARN: Final = timedelta(days=14)


class ServerTls:
    """`client_ca`: callers must show a certificate that it signed. `load` first."""

    def __init__(self, *, certificate: str, key: str, client_ca: str | None, log: StructLog) -> None:
        self._files = TlsFiles(ca=client_ca, certificate=certificate, key=key)
        self._asks = client_ca is not None
        self._log = log
        self._content: TlsContent | None = None
        self._authorities: tuple[x509.Certificate, ...] = ()
        self._identity: Identity | None = None
        self.on_change: list[Callable[[TlsContent], None]] = []

    @property
    def asks(self) -> bool:
        """Whether callers must show who they are."""
        return self._asks

    @property
    def not_after(self) -> datetime:
        """The end of this controller's own certificate."""
        from virialpb import certificates as c

        return c.facts_of(c.read_certificates(self.content.certificate)[0]).not_after

    def not_after_seconds(self) -> float:
        """The same as unix time."""
        return self.not_after.timestamp()

    def problems(self, now: datetime) -> list[str]:
        """In words; empty when nothing is wrong."""
        left = self.not_after - now
        if left > WARN:
            return []
        when = self.not_after.date().isoformat()
        ends = f"ends on {when}" if left > timedelta(0) else f"ended on {when}, so nobody can connect any more"
        return [f"this controller's certificate {ends}: renew it (virial admin certs issue controller NAME --renew)"]

    @property
    def content(self) -> TlsContent:
        if self._content is None:
            raise RuntimeError("load the files first")
        return self._content

    @property
    def identity(self) -> Identity:
        """This controller's own, where callers are asked for theirs."""
        if self._identity is None:
            raise RuntimeError("load the files first; without client_ca nobody has an identity")
        return self._identity

    def authorities(self) -> tuple[x509.Certificate, ...]:
        """Whom callers may be signed by. The same object until it changes."""
        return self._authorities

    def load(self) -> None:
        """Raises TlsFilesError."""
        self._take(self._files.read())

    def credentials(self, *, ask: bool = True) -> grpc.ServerCredentials:
        """For one server; it looks again at each handshake. `ask` False: not even where there is a `client_ca`."""
        given = self.content

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC, from a thread of its own. None: as before."""
            nonlocal given
            if self.content is given:
                return None
            given = self.content
            return _configuration(given)

        changing: Any = fetch  # the stubs do not know that it may give None
        return grpc.dynamic_ssl_server_credentials(_configuration(given), changing, ask and self._asks)

    async def watch(self) -> None:
        """Until cancelled. A change that cannot be used is told once, and what was there stays in use."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                content = await asyncio.to_thread(self._files.changed)
                if content is None:
                    continue
                self._take(content)
            except TlsFilesError as error:
                self._log(LogName.TLS_REFUSED, error=str(error))
                continue
            self._log(LogName.TLS_LOADED)
            for tell in self.on_change:
                tell(content)

    def _take(self, content: TlsContent) -> None:
        if not self._asks:
            self._content = content
            return
        from virialpb import certificates as c

        try:
            authorities = tuple(c.read_certificates(content.ca))
            own = c.facts_of(c.read_certificates(content.certificate)[0])
        except c.CertificateError as error:
            raise TlsFilesError(str(error)) from None
        identity = own.identity
        if identity is None or identity.role is not Role.CONTROLLER:
            found = "names no identity" if identity is None else f"is that of {identity.uri}"
            raise TlsFilesError(
                f"tls.certificate {found}: a controller's is made by `virial admin certs issue controller`, or carries "
                "one URI spiffe://CLUSTER/controller/NAME"
            )
        if self._identity is not None and self._identity.cluster != identity.cluster:
            raise TlsFilesError(f"tls.certificate is of the cluster {identity.cluster}, not {self._identity.cluster}")
        self._content, self._authorities, self._identity = content, authorities, identity


def _configuration(content: TlsContent) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(content.key, content.certificate)], root_certificates=content.ca or None
    )
