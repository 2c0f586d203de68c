"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def authority(directory: Path) -> tuple[Path, Path, Path]:
    """(certificate of a new authority, certificate for 127.0.0.1 that it signed, its key)."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: apt-get install openssl")
    directory.mkdir(mode=0o700, parents=True)

    def run(*words: str) -> None:
        subprocess.run([openssl, *words], cwd=directory, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test authority")
    run("req", *new_key, "-keyout", "member.key", "-out", "member.csr", "-subj", "/CN=member")
    (directory / "extensions").write_text(
        "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\nbasicConstraints=CA:FALSE\n"
    )
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extensions")
    run("x509", "-req", "-in", "member.csr", "-out", "member.pem", *signed)
    return directory / "ca.pem", directory / "member.pem", directory / "member.key"
