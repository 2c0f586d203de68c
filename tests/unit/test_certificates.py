"""Identities, and certificates that carry them."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from virialpb import certificates as c
from virialpb.identity import Identity, IdentityError, Role, make_identity, parse_identity

NOW = datetime(2031, 5, 17, 12, tzinfo=UTC)
NODE = make_identity("rack-7", Role.NODE, "node-1")


@pytest.mark.parametrize("role", Role)
def test_an_identity_reads_as_it_was_written(role: Role) -> None:
    name = "a.b-1" if role is Role.NODE else "a.b_C-1"
    identity = make_identity("rack-7", role, name)
    assert identity.uri == f"spiffe://rack-7/{role.value}/{name}"
    assert parse_identity(identity.uri) == identity


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "spiffe://rack-7",
        "spiffe://rack-7/node",
        "spiffe://rack-7/node/",
        "spiffe://rack-7/root/node-1",
        "spiffe://rack-7/NODE/node-1",
        "spiffe://rack-7/node/node-1/admin",
        "spiffe://rack-7//node/node-1",
        "spiffe://rack-7/node/../admin",
        "spiffe://rack-7/node/%61",
        "spiffe://Rack-7/node/node-1",
        "SPIFFE://rack-7/node/node-1",
        "https://rack-7/node/node-1",
        "spiffe://rack-7/node/node-1\n",
        "spiffe://rack-7/node/" + "n" * 254,
    ],
)
def test_what_is_almost_an_identity_is_none(uri: str) -> None:
    with pytest.raises(IdentityError):
        parse_identity(uri)


@pytest.mark.parametrize("name", ["Node-1", "node_1", "NODE"])
def test_a_node_gets_no_certificate_under_a_name_that_it_cannot_join_by(name: str) -> None:
    with pytest.raises(IdentityError, match="is not a node's"):
        make_identity("rack-7", Role.NODE, name)
    assert make_identity("rack-7", Role.USER, name).name == name


def certificate(identity: Identity | None = NODE, days: int = 30) -> c.Facts:
    authority = c.new_authority("a", NOW, 100)
    key = c.new_key()
    pem = c.issue(authority, key.public_key(), "node-1", NOW, days, identity=identity, hosts=("h.example", "10.0.0.1"))
    return c.facts_of(c.read_certificates(pem)[0])


def test_a_certificate_says_who_until_when_and_where() -> None:
    facts = certificate()
    assert facts.identity == NODE
    assert facts.not_after == NOW + timedelta(days=30)
    assert (facts.dns, facts.ips, facts.common_name) == (("h.example",), ("10.0.0.1",), "node-1")
    assert certificate(None).identity is None


def test_nothing_outlives_its_authority() -> None:
    assert certificate(days=1_000).not_after == NOW + timedelta(days=100)


def test_who_signed_it_itself_is_told_from_who_lent_the_right() -> None:
    root, other = c.new_authority("a", NOW, 100), c.new_authority("a", NOW, 100)
    issuer = c.new_issuer(root, "join", NOW, 50)
    key = c.new_key().public_key()
    direct = c.read_certificates(c.issue(root, key, "n", NOW, 1, identity=NODE))
    lent = c.read_certificates(c.issue(issuer, key, "n", NOW, 1, identity=NODE))
    assert len(direct) == 1
    assert [one.subject for one in lent[1:]] == [issuer.certificate.subject]
    assert c.signed_by(direct[0], [root.certificate])
    assert c.signed_by(direct[0], [other.certificate, root.certificate])
    assert not c.signed_by(direct[0], [other.certificate])
    assert not c.signed_by(lent[0], [root.certificate])
    assert c.signed_by(lent[0], [issuer.certificate])
    read = c.load_authority(issuer.chain, c.key_pem(issuer.key))
    assert c.read_certificates(c.issue(read, key, "n", NOW, 1))[1:] == lent[1:]


def test_what_an_issuer_signs_serves_nobody() -> None:
    """An issuer lies on every controller; with a server's certificate of it one could pass for another controller."""
    issuer = c.new_issuer(c.new_authority("a", NOW, 100), "join", NOW, 50)
    usage = issuer.certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_a_request_gives_its_key_and_nothing_else() -> None:
    key = c.new_key()
    pem = c.request_pem(key, "admin")
    assert c.requested_key(pem) == key.public_key()
    middle = len(pem) // 2
    for bad in (b"", b"x", pem[:middle], pem[: middle - 9] + pem[middle:], b"-" * (c.PEM_BYTES_MAX + 1)):
        with pytest.raises(c.CertificateError):
            c.requested_key(bad)


P256_ID, EC_KEY_ID = bytes.fromhex("06082a8648ce3d030107"), bytes.fromhex("06072a8648ce3d0201")


def request_of(key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    digest = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .sign(key, digest)
        .public_bytes(serialization.Encoding.PEM)
    )


def odd(part: bytes) -> bytes:
    """A request in which a number that names an algorithm names none that is known."""
    der = x509.load_pem_x509_csr(request_of(c.new_key())).public_bytes(serialization.Encoding.DER)
    text = base64.encodebytes(der.replace(part, part[:-1] + b"\x7f"))
    return b"-----BEGIN CERTIFICATE REQUEST-----\n" + text + b"-----END CERTIFICATE REQUEST-----\n"


@pytest.mark.parametrize(
    "request_pem",
    [
        odd(P256_ID),
        odd(EC_KEY_ID),
        request_of(ec.generate_private_key(ec.SECP256K1())),
        request_of(ed25519.Ed25519PrivateKey.generate()),
    ],
)
def test_a_key_that_tls_does_not_know_is_refused_in_words(request_pem: bytes) -> None:
    with pytest.raises(c.CertificateError):
        c.requested_key(request_pem)


def test_the_signature_of_a_key_that_is_refused_anyway_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has no certificate may send one: that of a large RSA key would hold up the controller's loop."""
    looked: list[object] = []
    monkeypatch.setattr(c, "_signs_itself", looked.append)
    with pytest.raises(c.CertificateError, match="must be on the curve"):
        c.requested_key(request_of(rsa.generate_private_key(65_537, 2_048)))
    assert looked == []


def test_a_key_of_another_is_no_authority() -> None:
    root = c.new_authority("a", NOW, 100)
    with pytest.raises(c.CertificateError, match="not that of the certificate"):
        c.load_authority(c.pem_of(root.certificate), c.key_pem(c.new_key()))
    key = c.new_key()
    leaf = c.issue(root, key.public_key(), "n", NOW, 1)
    with pytest.raises(c.CertificateError, match="may not sign others"):
        c.load_authority(leaf, c.key_pem(key))


@pytest.mark.parametrize("host", ["", "a b", "a..b", "ä.example", "http://h", "10.0.0.1:7700"])
def test_a_host_is_a_name_or_an_address(host: str) -> None:
    with pytest.raises(c.CertificateError):
        c.host_name(host)
