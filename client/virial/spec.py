"""Job specifications as files: YAML or JSON with units -> JobSpec. Every mistake is named, with the nearest word."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from virial.models import (
    CheckpointPolicy,
    Constraint,
    DeviceRequest,
    Durability,
    Gang,
    JobSpec,
    Resources,
    RestartPolicy,
    TaskSpec,
    Writes,
)
from virial.yamlfile import YamlDocument, load_document
from virialpb.strict import (
    ErrorList,
    FieldError,
    FieldProblem,
    Fields,
    StrictError,
    integer,
    kind_of,
    name_text,
    one_of,
    text,
)
from virialpb.units import parse_bytes, parse_cpu_millis, parse_duration_ns, parse_share_thousandths

KINDS = ("training", "batch", "latency")
OPERATORS = ("EQ", "NE", "LT", "LE", "GT", "GE", "IN", "EXISTS")
RESTART_WAYS = ("in_place", "spare", "requeue")
SPEC_BYTES_MAX = 1 << 20


class SpecError(StrictError):
    """A job specification with mistakes; `errors` holds all of them. Of a file, the text names file and line too, but
    for a field that was `replaced`: what stands in the file is not what is wrong."""

    def __init__(
        self, errors: tuple[FieldError, ...], document: YamlDocument | None = None, replaced: Collection[str] = ()
    ) -> None:
        super().__init__(errors)
        if document is not None:
            texts = (
                f"{document.source_name} with {field} replaced: {error}"
                if (field := _field_of(error.path, replaced))
                else document.describe(error)
                for error in errors
            )
            self.args = ("\n".join(texts),)


def _field_of(path: str, replaced: Collection[str]) -> str:
    """Which of the replaced fields this is, or is part of; "" for none."""
    return next((field for field in replaced if path == field or path.startswith((f"{field}.", f"{field}["))), "")


def load_spec(path: str | Path, overrides: Mapping[str, object] | None = None) -> JobSpec:
    """Read a job specification. A relative working directory counts from the current one, as a shell user expects.

    `overrides`: values by dotted field ("gang.ranks") that replace the file's.
    Raises SpecError for its content, `virial.yamlfile.YamlError` for its syntax, OSError for the file.
    """
    with Path(path).open("rb") as file:
        # One byte more than is allowed is enough to see that it is too much.
        return read_spec(file.read(SPEC_BYTES_MAX + 1), str(path), overrides)


def read_spec(content: bytes, source_name: str, overrides: Mapping[str, object] | None = None) -> JobSpec:
    """As `load_spec`, of a text that came from elsewhere; `source_name` stands in messages."""
    document = load_document(content, source_name)
    try:
        spec = parse_spec(apply_overrides(document.value, overrides or {}))
    except SpecError as error:
        raise SpecError(error.errors, document, overrides or ()) from None
    directory = Path.cwd() / spec.task.working_directory
    return replace(spec, task=replace(spec.task, working_directory=str(directory.resolve())))


def parse_spec(document: object) -> JobSpec:
    """A JobSpec from what a YAML or JSON loader gives; its working directory must be absolute. Raises SpecError."""
    errors = ErrorList()
    with Fields(document, "", errors, what="a job specification (a mapping)") as f:
        spec = JobSpec(
            name=f.required("name", name_text, on_error="x"),
            kind=f.optional("kind", one_of(KINDS), default=""),
            gang=_gang(f),
            resources=_resources(f),
            task=_task(f),
            fence_after_ns=_fence_after_ns(f),
            writes=Writes(f.optional("writes", one_of([w.value for w in Writes]), default=Writes.SHARED.value)),
            checkpoint=_checkpoint(f),
            restart=_restart(f),
            node_constraints=_constraints(f, "node_constraints"),
            priority=f.optional("priority", integer(-1000, 1000), default=0),
            fencing=f.optional("fencing", one_of(("any", "strong")), default="any"),
            start_timeout_ns=f.optional("start_timeout", parse_duration_ns, default=0),
        )
    errors.raise_if_any(SpecError)
    return spec


def _gang(parent: Fields) -> Gang:
    with parent.child("gang") as f:
        return Gang(
            ranks=f.optional("ranks", integer(1, 4096), default=1),
            spares=f.optional("spares", integer(0, 4096), default=0),
            spread=f.optional("spread", one_of(("node", "none")), default="node"),
        )


def _resources(parent: Fields) -> Resources:
    with parent.child("resources") as f:
        devices: list[DeviceRequest] = []
        for d in f.children("devices"):
            with d:
                devices.append(
                    DeviceRequest(
                        kind=d.required("kind", text, on_error=""),
                        count=d.optional("count", integer(1, 4096), default=1),
                        share_thousandths=d.optional("share", parse_share_thousandths, default=1000),
                        constraints=_constraints(d, "constraints"),
                    )
                )
        return Resources(
            cpu_millis=f.required("cpu", parse_cpu_millis, on_error=1),
            memory_bytes=f.required("memory", parse_bytes, on_error=1),
            devices=tuple(devices),
        )


def _constraints(parent: Fields, name: str) -> tuple[Constraint, ...]:
    found: list[Constraint] = []
    for f in parent.children(name):
        with f:
            operator = f.optional("operator", _operator, default="EQ")
            values = f.values("values", _scalar)
            single = f.optional("value", _scalar, default="")
            if single:
                values = (*values, single)
            if not values and operator != "EXISTS":
                f.error("value", "required field is missing")
            found.append(Constraint(f.required("attribute", text, on_error=""), operator, values))
    return tuple(found)


def _operator(value: object) -> str:
    return one_of(OPERATORS)(value.upper() if isinstance(value, str) else value)


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else text(value)


def _task(parent: Fields) -> TaskSpec:
    with parent.child("task") as f:
        before = len(f.errors)
        command = f.values("command", _argument)
        if not command and len(f.errors) == before:
            f.error("command", "required field is missing: a list of the program and its arguments")
        env: list[tuple[str, str]] = []
        for key, path, value in f.entries("env"):
            env.append((key, f.errors.read(path, value, _env_value, "")))
        return TaskSpec(
            command=command,
            env=tuple(sorted(env)),
            working_directory=f.optional("working_directory", text, default=""),
            user=f.optional("user", text, default=""),
            group=f.optional("group", text, default=""),
            grace_ns=f.optional("grace", _duration_or_zero_ns, default=5_000_000_000),
            log_bytes_max=f.optional("log_bytes_max", parse_bytes, default=16 << 20),
            log_files_max=f.optional("log_files_max", integer(1, 100), default=4),
            runtime=f.optional("runtime", one_of(("process",)), default="process"),
        )


def _argument(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or "\0" in value:
        raise FieldProblem("expected a text without NUL; put numbers with a point and true/false in quotes")
    return value


def _env_value(value: object) -> str:
    return "" if value == "" else _argument(value)


def _duration_or_zero_ns(value: object) -> int:
    return parse_duration_ns(value, allow_zero=True)


def _fence_after_ns(parent: Fields) -> int:
    with parent.child("lease") as f:
        return f.optional(
            "fence_after", parse_duration_ns, default=JobSpec.__dataclass_fields__["fence_after_ns"].default
        )


def _checkpoint(parent: Fields) -> CheckpointPolicy:
    with parent.child("checkpoint") as f:
        durability = Durability(f.optional("durability", one_of([d.value for d in Durability]), default="local"))
        directory = f.optional("directory", text, default="")
        if directory.startswith("~/"):  # of who submits: a home is often what every node sees
            directory = os.path.expanduser(directory)
        if durability is Durability.SHARED and not directory.startswith("/"):
            f.error("directory", "durability shared needs an absolute directory that every node sees")
        return CheckpointPolicy(
            durability=durability,
            directory=directory,
            keep=f.optional("keep", integer(1, 10_000), default=2),
            timeout_ns=f.optional("timeout", parse_duration_ns, default=600_000_000_000),
        )


def _restart(parent: Fields) -> RestartPolicy:
    with parent.child("restart") as f:
        before = len(f.errors)
        allow = f.values("allow", one_of(RESTART_WAYS)) if f.has("allow") else RESTART_WAYS
        if not allow and len(f.errors) == before:
            # On the wire an empty list means the default, all ways: not what its author meant.
            f.error("allow", "is empty; name at least one way, or set max to 0 for a job that never restarts")
        return RestartPolicy(
            max=f.optional("max", integer(0, 1_000_000), default=3),
            window_ns=f.optional("window", parse_duration_ns, default=3_600_000_000_000),
            allow=allow,
        )


def apply_overrides(document: object, overrides: Mapping[str, object]) -> object:
    """`document` with the values at dotted fields ("gang.ranks") replaced. Raises SpecError.

    Only fields of mappings can be named: a list is replaced whole.
    """
    for path, value in overrides.items():
        document = _with_value(document, path.split("."), value, path)
    return document


def _with_value(document: object, steps: list[str], value: object, path: str) -> object:
    if not steps:
        return value
    if not all(steps):
        raise SpecError((FieldError(path, "is not a dotted field such as gang.ranks"),))
    found: object = {} if document is None else document
    if not isinstance(found, dict):
        within = ".".join(path.split(".")[: -len(steps)])
        message = f"cannot be set: {within or 'the document'} is {kind_of(found)}, not a mapping"
        raise SpecError((FieldError(path, message),))
    mapping = cast("dict[object, object]", found)
    return {**mapping, steps[0]: _with_value(mapping.get(steps[0]), steps[1:], value, path)}
