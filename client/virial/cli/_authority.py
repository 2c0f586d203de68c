"""The directory of an operator's authorities: who signs, who is trusted, what was issued. Behind `virial admin certs`.

    authority.json             the cluster, the number of the authority that signs, those that are trusted
    authorities/N.pem -key     each, and `members-N` of the second one: only etcd members may have its certificates
    ca.pem members-ca.pem      what is trusted now, to be copied to every machine
    controller-c1/             what goes to one machine: ca.pem certificate.pem key.pem (a controller: members-ca.pem
                               member.pem member-key.pem too)

What is trusted and who signs changes in one file, in three steps (begin, switch, finish), so that at any moment every
certificate in use is trusted by everyone who has done the step before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final, cast

from virial.cli.exits import CliError, ExitCode
from virialpb import certificates as c
from virialpb.identity import IdentityError, Role, check_cluster, make_identity

STATE_FILE: Final = "authority.json"
AUTHORITIES: Final = "authorities"
MEMBERS: Final = "members-"
AUTHORITY_DAYS: Final = 3_650
ISSUER: Final = "issuer"


@dataclass(frozen=True, slots=True)
class State:
    cluster: str
    signer: int
    trusted: tuple[int, ...]

    @property
    def rotation(self) -> str:
        """Which step was done last: "" none, "begin", "switch"."""
        if len(self.trusted) < 2:
            return ""
        return "begin" if self.signer == self.trusted[0] else "switch"


@dataclass(frozen=True, slots=True)
class Issued:
    """One certificate of one machine or person. `role`: as in its identity, or `issuer`."""

    name: str
    role: str
    directory: str
    not_after: str
    hosts: tuple[str, ...]


def create(directory: Path, cluster: str, now: datetime) -> State:
    """Make the directory and both authorities in it. Raises CliError, OSError."""
    try:
        check_cluster(cluster)
    except IdentityError as error:
        raise CliError(str(error)) from None
    if directory.exists():
        raise CliError(
            f"{directory} exists: another authority would not be trusted where this one's files are in use; "
            f"name another --directory, or replace the authority step by step with `virial admin certs rotate begin`",
            ExitCode.CONFLICT,
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = _fresh(directory)
    (made / AUTHORITIES).mkdir(mode=0o700)
    state = State(cluster, 1, (1,))
    _add(made, state.cluster, 1, now)
    _save(made, state)
    made.rename(directory)
    _sync(directory.parent)
    return state


def load(directory: Path) -> State:
    """Raises CliError."""
    path = directory / STATE_FILE
    try:
        found: object = json.loads(path.read_bytes())
        fields = cast("dict[str, object]", found)
        numbers = cast("Sequence[int]", fields["trusted"])
        return State(str(fields["cluster"]), int(str(fields["signer"])), tuple(int(number) for number in numbers))
    except FileNotFoundError:
        raise CliError(
            f"{directory} holds no authority: make one with `virial admin certs init NAME --directory {directory}`, "
            "or say with --directory where yours is"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CliError(f"{path} is damaged ({error}): put it back from a backup") from None


def issue(
    directory: Path,
    role: str,
    name: str,
    hosts: Sequence[str],
    now: datetime,
    days: int,
    *,
    renew: bool = False,
) -> Issued:
    """What a machine or person needs, in a directory of its own; `renew` without `hosts` keeps those it has. Raises
    CliError, OSError."""
    state = load(directory)
    target = directory / f"{role}-{name}"
    if renew and not target.is_dir():
        raise CliError(f"{target} does not exist, so there is nothing to renew; leave out --renew")
    if target.exists() and not renew:
        raise CliError(
            f"{target} exists: add --renew to put new certificates with new keys in it, or move it away",
            ExitCode.CONFLICT,
        )
    if renew and not hosts:
        hosts = _read_issued(target).hosts
    try:
        files = _files(directory, state, role, name, hosts, now, days)
    except (IdentityError, c.CertificateError) as error:
        raise CliError(str(error)) from None
    if renew:
        # Each file is whole, not all together: a daemon that finds a key without its certificate waits for the other.
        for file, content in files.items():
            _write(target / file, content)
    else:
        made = _fresh(target)
        for file, content in files.items():
            _write(made / file, content)
        made.rename(target)
        _sync(directory)
    return _read_issued(target)


def issued(directory: Path) -> list[Issued]:
    """What there is a directory of, by name. Raises CliError."""
    load(directory)
    return [_read_issued(path.parent) for path in sorted(directory.glob("*/certificate.pem"))]


def begin(directory: Path, now: datetime) -> State:
    """Step 1: a new authority, which everyone is to trust beside the old one. Raises CliError, OSError."""
    state = _expect(directory, "")
    number = state.signer + 1
    _add(directory, state.cluster, number, now)
    return _trust(directory, replace(state, trusted=(state.signer, number)))


def switch(directory: Path, now: datetime, days: int) -> tuple[State, list[Issued]]:
    """Step 2: the new authority signs, and all that was issued is issued anew. Raises CliError, OSError."""
    state = load(directory)
    if state.rotation != "switch":  # done again after it broke off, it goes on where it was
        state = _expect(directory, "begin")
        state = _trust(directory, replace(state, signer=state.trusted[-1]))
    renewed = [issue(directory, one.role, one.name, one.hosts, now, days, renew=True) for one in issued(directory)]
    return state, renewed


def finish(directory: Path) -> State:
    """Step 3: the old authority is trusted no more, and its key is gone. Raises CliError, OSError."""
    state = _expect(directory, "switch")
    new = c.read_certificates((directory / AUTHORITIES / f"{state.signer}.pem").read_bytes())
    for path in sorted(directory.glob("*/certificate.pem")):
        if not c.signed_by(c.read_certificates(path.read_bytes())[0], new):
            raise CliError(f"{path} is still the old authority's: run `virial admin certs rotate switch` again")
    former = [number for number in state.trusted if number != state.signer]
    state = _trust(directory, replace(state, trusted=(state.signer,)))
    for number in former:
        for prefix in ("", MEMBERS):
            (directory / AUTHORITIES / f"{prefix}{number}-key.pem").unlink(missing_ok=True)
    return state


_STEPS: Final = {"": "begin", "begin": "switch", "switch": "finish"}


def _expect(directory: Path, rotation: str) -> State:
    state = load(directory)
    if state.rotation != rotation:
        raise CliError(
            f"the step that comes now is `virial admin certs rotate {_STEPS[state.rotation]} --directory {directory}`"
        )
    return state


def _add(directory: Path, cluster: str, number: int, now: datetime) -> None:
    for prefix, what in (("", "authority"), (MEMBERS, "authority of etcd members")):
        made = c.new_authority(f"{cluster} {what} {number}", now, AUTHORITY_DAYS)
        _write(directory / AUTHORITIES / f"{prefix}{number}-key.pem", c.key_pem(made.key))
        _write(directory / AUTHORITIES / f"{prefix}{number}.pem", c.pem_of(made.certificate))


def _trust(directory: Path, state: State) -> State:
    """Save the state, then what follows from it; a step that broke off is completed by the same or the next one."""
    _save(directory, state)
    for path in sorted(directory.glob("*/certificate.pem")):
        for prefix in ("", MEMBERS):
            if (path.parent / f"{prefix}ca.pem").exists():
                _write(path.parent / f"{prefix}ca.pem", _trusted(directory, state, prefix))
    return state


def _save(directory: Path, state: State) -> None:
    _write(directory / STATE_FILE, json.dumps(asdict(state), indent=2).encode() + b"\n")
    for prefix in ("", MEMBERS):
        _write(directory / f"{prefix}ca.pem", _trusted(directory, state, prefix))


def _trusted(directory: Path, state: State, prefix: str) -> bytes:
    return b"".join((directory / AUTHORITIES / f"{prefix}{number}.pem").read_bytes() for number in state.trusted)


def _signer(directory: Path, state: State, prefix: str) -> c.Authority:
    path = directory / AUTHORITIES / f"{prefix}{state.signer}.pem"
    return c.load_authority(path.read_bytes(), path.with_name(f"{prefix}{state.signer}-key.pem").read_bytes())


def _files(
    directory: Path, state: State, role: str, name: str, hosts: Sequence[str], now: datetime, days: int
) -> dict[str, bytes]:
    """What the machine gets. Keys come first: a certificate whose key is there already can be used at once."""
    authority = _signer(directory, state, "")
    ca = _trusted(directory, state, "")
    if role == ISSUER:
        make_identity(state.cluster, Role.CONTROLLER, name)  # as a name only: what signs has no role
        issuer = c.new_issuer(authority, f"{state.cluster} issuer {name}", now, days)
        return {"key.pem": c.key_pem(issuer.key), "certificate.pem": issuer.chain, "ca.pem": ca}
    identity = make_identity(state.cluster, Role(role), name)
    serves = identity.role is Role.CONTROLLER
    if serves and not hosts:
        raise CliError("a controller's certificate names where it is reached: give each name and address with --host")
    if hosts and not serves:
        raise CliError(f"--host is for controllers: nobody connects to a {role}")
    key = c.new_key()
    certificate = c.issue(authority, key.public_key(), name, now, days, identity=identity, hosts=hosts, serves=serves)
    files = {"key.pem": c.key_pem(key), "certificate.pem": certificate, "ca.pem": ca}
    if serves:
        member, members = c.new_key(), _signer(directory, state, MEMBERS)
        files["member-key.pem"] = c.key_pem(member)
        files["member.pem"] = c.issue(members, member.public_key(), name, now, days, hosts=hosts, serves=True)
        files["members-ca.pem"] = _trusted(directory, state, MEMBERS)
    return files


def _read_issued(path: Path) -> Issued:
    facts = c.facts_of(c.read_certificates((path / "certificate.pem").read_bytes())[0])
    role, _, name = path.name.partition("-")
    identity = facts.identity
    if identity is not None:
        role, name = identity.role, identity.name
    return Issued(name, str(role), str(path), facts.not_after.isoformat(), (*facts.dns, *facts.ips))


def _fresh(target: Path) -> Path:
    """An empty directory beside `target`, to be renamed to it when all is in it."""
    made = target.with_name(f".{target.name}.new")
    shutil.rmtree(made, ignore_errors=True)  # of a run that broke off: nobody has used it
    made.mkdir(mode=0o700)
    return made


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all; a key is readable by its owner only, from its first byte."""
    mode = 0o600 if path.name.endswith("key.pem") or path.name == STATE_FILE else 0o644
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
