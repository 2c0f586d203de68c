"""The authority that a controller signs certificates of nodes with: read anew for each, so that it may be replaced."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from virialpb.identity import IdentityError, Role, make_identity

if TYPE_CHECKING:
    from cryptography import x509

    from virialpb.certificates import Authority

# Renewed by agents long before; a host that was away for longer joins again.
NODE_DAYS: Final = 90


class IssuerError(Exception):
    """Nothing can be signed. The message names the setting and says why."""


class Issuer:
    def __init__(self, certificate: str, key: str) -> None:
        self._certificate, self._key = Path(certificate), Path(key)

    def check(self, trusted: tuple[x509.Certificate, ...]) -> None:
        """Whether callers with its certificates would be let in. Raises IssuerError."""
        from virialpb import certificates as c

        own = self._authority().certificate
        if own not in trusted and not c.signed_by(own, trusted):
            raise IssuerError(f"tls.issuer_certificate: {self._certificate} was not signed by tls.client_ca")

    def sign(self, cluster: str, node: str, request: bytes, now: datetime) -> bytes:
        """A certificate for the key of a request. Raises IssuerError, CertificateError for the request."""
        from virialpb import certificates as c

        key = c.requested_key(request)
        try:
            identity = make_identity(cluster, Role.NODE, node)
        except IdentityError as error:
            raise c.CertificateError(str(error)) from None
        return c.issue(self._authority(), key, node, now, NODE_DAYS, identity=identity)

    def _authority(self) -> Authority:
        from virialpb import certificates as c

        try:
            return c.load_authority(self._certificate.read_bytes(), self._key.read_bytes())
        except OSError as error:
            raise IssuerError(f"tls.issuer: cannot read {error.filename}: {error.strerror}") from None
        except c.CertificateError as error:
            raise IssuerError(f"tls.issuer_certificate: {self._certificate}: {error}") from None
