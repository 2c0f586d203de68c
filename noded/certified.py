"""The certificate of a node that joined by a token: asked for once, kept in the data directory, renewed in time.

tls/key.pem          made here, once; it never leaves the host (0600)
tls/certificate.pem  this node's, as a controller signed it
tls/ca.pem           whom it believes
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import grpc

from noded.config import TlsConfig
from noded.link.backoff import Backoff
from noded.link.control import LinkLog
from noded.link.convert_join import Certified
from noded.link.join import NotCertified, join, renew
from virialpb.joinfile import BYTES_MAX, JoinFile, JoinFileError, parse_join_file

if TYPE_CHECKING:
    from virialpb.certificates import Facts, Key

JOIN_SECONDS: Final = 60.0
# Daily, though a certificate is good for months: that is how soon a joined node believes a new authority.
RENEW_SECONDS: Final = 86_400.0
RETRY_SECONDS: Final = 3_600.0
_SOON: Final = timedelta(days=30)


class CannotJoin(Exception):
    """One message for whoever started this noded."""


class OwnCertificate:
    """`data_dir` exists. Its methods but `join` and `keep` block for a moment on a local disk."""

    def __init__(self, data_dir: Path, node: str) -> None:
        self._directory = data_dir / "tls"
        self._node = node

    @property
    def tls(self) -> TlsConfig:
        names = ("ca.pem", "certificate.pem", "key.pem")
        return TlsConfig(*(str(self._directory / name) for name in names))

    def there(self, now: datetime) -> bool:
        """Whether there is one that is still good. Raises CannotJoin where it is another node's."""
        facts = self._facts()
        if facts is None or facts.not_after <= now:
            return False
        if facts.identity is None or facts.identity.name != self._node:
            whose = facts.identity.uri if facts.identity else "nobody"
            raise CannotJoin(
                f"{self._directory / 'certificate.pem'} is that of {whose}, "
                f"and this node is {self._node}: set the name back, or remove {self._directory} and join anew"
            )
        return True

    async def join(self, token_file: str, addresses: tuple[str, ...], random: Random, log: LinkLog) -> None:
        """Raises CannotJoin."""
        token = read_join_file(token_file)
        if token.node != self._node:
            raise CannotJoin(
                f"join_token_file: {token_file} is for the node {token.node}, and this one is {self._node}"
            )
        try:
            found = await join(
                addresses,
                token.ca.encode(),
                node=self._node,
                secret=token.secret,
                request=self._request(),
                backoff=Backoff(random),
                patience_seconds=JOIN_SECONDS,
                log=log,
            )
        except NotCertified as error:
            raise CannotJoin(f"no certificate for this node: {error}") from None
        self._take(found)
        log.info("node.joined", cluster=token.cluster, node=self._node)

    async def keep(
        self,
        addresses: tuple[str, ...],
        credentials: Callable[[], grpc.ChannelCredentials],
        random: Random,
        log: LinkLog,
    ) -> None:
        """Until cancelled: a new one each day. Whoever watches the files takes them up."""
        pause_seconds = RENEW_SECONDS * random.uniform(0.5, 1.0)
        while True:
            facts = self._facts()
            if facts is not None and facts.not_after - datetime.now(UTC) < _SOON:
                pause_seconds = min(pause_seconds, RETRY_SECONDS)
            await asyncio.sleep(pause_seconds)
            try:
                self._take(await renew(addresses, credentials(), self._request()))
                pause_seconds = RENEW_SECONDS * random.uniform(0.9, 1.0)
                log.info("certificate.renewed")
            except (NotCertified, CannotJoin, OSError) as error:
                pause_seconds = RETRY_SECONDS * random.uniform(0.5, 1.0)
                log.warning("certificate.not_renewed", why=str(error))

    def _facts(self) -> Facts | None:
        from virialpb import certificates as c

        try:
            return c.facts_of(c.read_certificates((self._directory / "certificate.pem").read_bytes())[0])
        except (OSError, c.CertificateError):
            return None

    def _request(self) -> bytes:
        """Always for the same key: asking again after a lost answer is the same request."""
        from virialpb import certificates as c

        return c.request_pem(self._key(), self._node)

    def _key(self) -> Key:
        from virialpb import certificates as c

        path = self._directory / "key.pem"
        try:
            return c.read_key(path.read_bytes())
        except FileNotFoundError:
            pass
        except c.CertificateError as error:
            raise CannotJoin(f"{path}: {error}: remove {self._directory} and join anew") from None
        self._directory.mkdir(mode=0o700, exist_ok=True)
        key = c.new_key()
        self._write("key.pem", c.key_pem(key))
        return key

    def _take(self, found: Certified) -> None:
        """The certificate last: where it is, all is."""
        self._write("ca.pem", found.ca)
        self._write("certificate.pem", found.certificate)

    def _write(self, name: str, content: bytes) -> None:
        """Whole or not at all."""
        temporary = self._directory / f".{name}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._directory / name)
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def read_join_file(name: str) -> JoinFile:
    """Raises CannotJoin."""
    try:
        with Path(name).open("rb") as file:
            content = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise CannotJoin(f"join_token_file: cannot read {name}: {error.strerror}") from None
    try:
        if len(content) > BYTES_MAX:
            raise JoinFileError("it is too large")
        return parse_join_file(content.decode("ascii"))
    except (UnicodeDecodeError, JoinFileError) as error:
        what = "it is not text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise CannotJoin(f"join_token_file: {name} is no join file: {what}") from None
