"""Certificates for tests: those that an operator makes with `virial admin certs`, and some that nobody should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc

from virial.cli import _authority
from virialpb import certificates as c
from virialpb.identity import Identity, Role


@dataclass(frozen=True, slots=True)
class Files:
    """What one machine or person has, in PEM."""

    directory: Path

    @property
    def ca(self) -> Path:
        return self.directory / "ca.pem"

    @property
    def certificate(self) -> Path:
        return self.directory / "certificate.pem"

    @property
    def key(self) -> Path:
        return self.directory / "key.pem"

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes())


class Operator:
    """The authority of a cluster, for loopback."""

    def __init__(self, directory: Path, cluster: str = "rack-7") -> None:
        self.directory = directory
        self.cluster = cluster
        _authority.create(directory, cluster, datetime.now(UTC))

    @property
    def ca(self) -> Path:
        return self.directory / "ca.pem"

    def issue(self, role: str, name: str = "it", *, renew: bool = False) -> Files:
        hosts = ("127.0.0.1", "localhost") if role == Role.CONTROLLER else ()
        made = _authority.issue(self.directory, role, name, hosts, datetime.now(UTC), 2, renew=renew)
        return Files(Path(made.directory))

    def get(self, role: str, name: str) -> Files:
        """What was issued, or is now."""
        found = Files(self.directory / f"{role}-{name}")
        return found if found.directory.exists() else self.issue(role, name)

    def authority(self) -> c.Authority:
        number = _authority.load(self.directory).signer
        path = self.directory / "authorities" / f"{number}.pem"
        return c.load_authority(path.read_bytes(), path.with_name(f"{number}-key.pem").read_bytes())

    def odd(
        self,
        name: str,
        *,
        uris: Sequence[str] = (),
        identity: Identity | None = None,
        lives: timedelta = timedelta(days=1),
        authority: c.Authority | None = None,
    ) -> Files:
        """A certificate of this authority (or another) that the operator's commands would not make."""
        directory = self.directory / f"odd-{name}"
        directory.mkdir()
        key = c.new_key()
        text = odd_certificate(
            authority or self.authority(), key, name, uris or ([identity.uri] if identity else []), lives
        )
        (directory / "key.pem").write_bytes(c.key_pem(key))
        (directory / "certificate.pem").write_bytes(text)
        (directory / "ca.pem").write_bytes(self.ca.read_bytes())
        return Files(directory)


def odd_certificate(authority: c.Authority, key: c.Key, name: str, uris: Sequence[str], lives: timedelta) -> bytes:
    """With any names in it, and until any time."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + lives)
    )
    if uris:
        names = [x509.UniformResourceIdentifier(uri) for uri in uris]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return c.pem_of(builder.sign(authority.key, hashes.SHA256())) + authority.chain


def authority(directory: Path) -> tuple[Path, Path, Path]:
    """(certificate of a new authority, certificate of an etcd member on 127.0.0.1 that it signed, its key)."""
    made = Operator(directory).issue(Role.CONTROLLER).directory
    return made / "members-ca.pem", made / "member.pem", made / "member-key.pem"
