"""TLS files in PEM that are read again when they change, so that a renewed certificate needs no restart.

Standard library only. Files are replaced one by one: as long as a key does not belong to its certificate, or a file
cannot be read, what was read before stays in use.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# How often daemons look. Whoever rotates an authority waits a multiple of it between two steps.
LOOK_SECONDS: Final = 2.0
PEM_BYTES_MAX: Final = 1 << 20
_ATTEMPTS: Final = 3

_Signature = tuple[tuple[int, int, int], ...]


class TlsFilesError(OSError):
    """The files cannot be used as they are. `strerror` says which and why."""

    def __init__(self, message: str) -> None:
        super().__init__(0, message)

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True, slots=True)
class TlsContent:
    """`ca`: who signed the other side's certificates; empty where that is not asked."""

    ca: bytes
    certificate: bytes
    key: bytes


class TlsFiles:
    """`certificate` and `key` come together. All methods block for a moment on a local disk."""

    def __init__(self, *, ca: str | None, certificate: str | None, key: str | None) -> None:
        self._ca, self._certificate, self._key = ca, certificate, key
        self._seen: _Signature | None = None

    def read(self) -> TlsContent:
        """Raises TlsFilesError."""
        for _ in range(_ATTEMPTS):
            before = self._signature()
            content = TlsContent(_content(self._ca), _content(self._certificate), _content(self._key))
            self._check()
            if self._signature() == before:
                self._seen = before
                return content
        raise TlsFilesError(f"{self._certificate or self._ca} changes all the time")

    def changed(self) -> TlsContent | None:
        """What there is now, where the files have changed since it was last asked; None where they have not.

        Raises TlsFilesError for a change that cannot be used, once; it is read when the files change again.
        """
        now = self._signature()
        if now == self._seen:
            return None
        try:
            return self.read()
        except TlsFilesError:
            self._seen = now
            raise

    def _signature(self) -> _Signature:
        found: list[tuple[int, int, int]] = []
        for name in (self._ca, self._certificate, self._key):
            try:
                status = os.stat(name) if name is not None else None
            except OSError:
                status = None
            found.append((0, 0, 0) if status is None else (status.st_ino, status.st_size, status.st_mtime_ns))
        return tuple(found)

    def _check(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # gRPC would say only that nobody can be reached
        if self._ca is not None:
            try:
                context.load_verify_locations(self._ca)
            except (OSError, ssl.SSLError) as error:
                raise TlsFilesError(f"{self._ca}: no certificate in PEM form: {_words(error)}") from None
        if self._certificate is not None and self._key is not None:
            try:
                # The password is asked for on a terminal otherwise, and a daemon would wait for ever.
                context.load_cert_chain(self._certificate, self._key, password=_no_password)
            except (OSError, ssl.SSLError, ValueError) as error:
                names = f"{self._certificate} and {self._key}"
                raise TlsFilesError(f"{names} do not fit together as certificate and key: {_words(error)}") from None


def _no_password() -> str:
    raise ValueError("the key has a password; a daemon has nobody to ask for it")


def _content(name: str | None) -> bytes:
    if name is None:
        return b""
    try:
        with Path(name).open("rb") as file:
            content = file.read(PEM_BYTES_MAX + 1)
    except OSError as error:
        raise TlsFilesError(f"cannot read {name}: {error.strerror}") from None
    if len(content) > PEM_BYTES_MAX:
        raise TlsFilesError(f"{name} has more than {PEM_BYTES_MAX} bytes")
    return content


def _words(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason).replace("_", " ").lower() if str(reason).isupper() else str(reason)
