"""Certificates of a cluster: keys, authorities, what they sign, and what a certificate says.

Import late: this loads `cryptography`, which the light client does not come with (extras `admin`, `server`, `node`).
Keys are on the curve P-256. Times are aware datetimes and come in as arguments.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from virialpb.identity import Identity, IdentityError, parse_identity

# Clocks of a rack differ: a certificate made a moment ago is valid on a host that is late.
BACKDATE: Final = timedelta(hours=1)
PEM_BYTES_MAX: Final = 256 << 10
_COMMON_NAME_MAX: Final = 64
# Those that TLS has.
_CURVES: Final = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)

Key = ec.EllipticCurvePrivateKey


class CertificateError(ValueError):
    """Not usable as what it should be. The message says what is wrong; it never holds any of a key."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a certificate says. `identity` None: it names none, or more than one."""

    identity: Identity | None
    common_name: str
    not_after: datetime
    dns: tuple[str, ...]
    ips: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Authority:
    """Who signs: a certificate that may, with its key. `chain`: PEM of what stands between it and its root, with it."""

    certificate: x509.Certificate
    key: Key
    chain: bytes = b""


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Key) -> bytes:
    """PKCS #8, not encrypted: daemons start unattended, the file's mode protects it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def pem_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def new_authority(name: str, now: datetime, days: int) -> Authority:
    """A root of its own."""
    key = new_key()
    builder = _begin(name, key.public_key(), now, now + timedelta(days=days))
    certificate = _as_authority(builder, path_length=1).issuer_name(_name(name)).sign(key, hashes.SHA256())
    return Authority(certificate, key)


def new_issuer(authority: Authority, name: str, now: datetime, days: int) -> Authority:
    """One that a root lends its right to sign to, such as a controller that admits nodes."""
    key = new_key()
    builder = _begin(name, key.public_key(), now, _at_most(authority, now, days))
    # It lies on every controller: whoever takes it from one must not pass for a controller to nodes and people.
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
    certificate = _sign(authority, _as_authority(builder, path_length=0))
    return Authority(certificate, key, chain=pem_of(certificate) + authority.chain)


def load_authority(certificate_pem: bytes, pem_key: bytes) -> Authority:
    """Raises CertificateError: no authority, or a key that is not its own."""
    certificates = read_certificates(certificate_pem)
    certificate, key = certificates[0], read_key(pem_key)
    if not _may_sign(certificate):
        raise CertificateError("this certificate may not sign others: it is no authority's")
    if certificate.public_key() != key.public_key():
        raise CertificateError("the key is not that of the certificate")
    above = [one for one in certificates if one.issuer != one.subject]
    return Authority(certificate, key, chain=b"".join(pem_of(one) for one in above))


def request_pem(key: Key, name: str) -> bytes:
    """A request to certify `key`. What the certificate will say is decided by who signs it."""
    request = x509.CertificateSigningRequestBuilder().subject_name(_name(name)).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def requested_key(pem: bytes) -> ec.EllipticCurvePublicKey:
    """The key of a request whose sender has shown that it holds the private part. Raises CertificateError."""
    if len(pem) > PEM_BYTES_MAX:
        raise CertificateError(f"a request of {len(pem)} bytes is too large")
    try:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
    except (ValueError, TypeError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
        raise CertificateError(f"no certificate request in PEM form: {error}") from None
    # Before the signature is looked at: anyone may send a request, and with a key made for it that would take long.
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, _CURVES):
        raise CertificateError("the key of the request must be on the curve P-256, P-384 or P-521")
    if not _signs_itself(request):
        raise CertificateError("the request is not signed with the key that it asks for")
    return key


def _signs_itself(request: x509.CertificateSigningRequest) -> bool:
    try:
        return request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return False


def key_sha256(key: ec.EllipticCurvePublicKey) -> str:
    """Hexadecimal; names a key without showing it."""
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()


def issue(
    authority: Authority,
    public_key: ec.EllipticCurvePublicKey,
    name: str,
    now: datetime,
    days: int,
    *,
    identity: Identity | None = None,
    hosts: Iterable[str] = (),
    serves: bool = False,
) -> bytes:
    """PEM of a certificate, with what stands between its authority and the root; never valid for longer than that.

    `hosts`: DNS names and IP addresses of one that serves, or of a member, which has no `identity`.
    """
    builder = _begin(name, public_key, now, _at_most(authority, now, days))
    names: list[x509.GeneralName] = [] if identity is None else [x509.UniformResourceIdentifier(identity.uri)]
    names += [host_name(host) for host in hosts]
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if serves else [])]
    builder = (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return pem_of(_sign(authority, builder)) + authority.chain


def host_name(host: str) -> x509.IPAddress | x509.DNSName:
    """Raises CertificateError for what is neither an IP address nor a DNS name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.rstrip(".").split(".")
    if not host.isascii() or not all(label.replace("-", "a").replace("*", "a").isalnum() for label in labels):
        raise CertificateError(f"'{host[:80]}' is neither an IP address nor a DNS name")
    return x509.DNSName(host)


def read_certificates(pem: bytes) -> list[x509.Certificate]:
    """All in a PEM file, at least one. Raises CertificateError."""
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise CertificateError(f"no certificate in PEM form: {error}") from None
    if not found:
        raise CertificateError("no certificate in it")
    return found


def read_key(pem: bytes) -> Key:
    """Raises CertificateError."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise CertificateError("no private key in PEM form without a password") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError("the key must be on an elliptic curve, as `virial admin certs` makes them")
    return key


def facts_of(certificate: x509.Certificate) -> Facts:
    """Never raises: what cannot be read is not there."""
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        names = x509.SubjectAlternativeName([])
    return Facts(
        identity=_identity(names.get_values_for_type(x509.UniformResourceIdentifier)),
        common_name=str(common[0].value) if common else "",
        not_after=certificate.not_valid_after_utc,
        dns=tuple(names.get_values_for_type(x509.DNSName)),
        ips=tuple(str(ip) for ip in names.get_values_for_type(x509.IPAddress)),
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
    )


def signed_by(certificate: x509.Certificate, authorities: Sequence[x509.Certificate]) -> bool:
    """Whether one of them signed it itself, with none in between."""
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
        except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm):
            continue
        return True
    return False


def leads_to(
    certificate: x509.Certificate, between: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]
) -> bool:
    """Whether signatures lead from it to one of the authorities, over some of `between` that may sign."""
    left = list(between)
    while not signed_by(certificate, authorities):
        signer = next((one for one in left if _may_sign(one) and signed_by(certificate, [one])), None)
        if signer is None:
            return False
        left.remove(signer)
        certificate = signer
    return True


def _may_sign(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, x509.DuplicateExtension, ValueError):
        return False


def _identity(uris: Sequence[str]) -> Identity | None:
    """Of exactly one URI: of two nobody could say which one is meant."""
    try:
        return parse_identity(uris[0]) if len(uris) == 1 else None
    except IdentityError:
        return None


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_COMMON_NAME_MAX])])


def _begin(
    name: str, public_key: ec.EllipticCurvePublicKey, now: datetime, not_after: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _as_authority(builder: x509.CertificateBuilder, path_length: int) -> x509.CertificateBuilder:
    return builder.add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True).add_extension(
        _usage(signs=True), critical=True
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _at_most(authority: Authority, now: datetime, days: int) -> datetime:
    return min(now + timedelta(days=days), authority.certificate.not_valid_after_utc)


def _sign(authority: Authority, builder: x509.CertificateBuilder) -> x509.Certificate:
    known = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return (
        builder.issuer_name(authority.certificate.subject)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(known), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
