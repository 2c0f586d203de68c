"""Whether a job specification is possible at all. Every mistake is found at once, each with the path of its field.

A gang that the cluster could never hold is no mistake: it stays pending and is explained, since nodes may join.
Paths are those of the API ("gang.ranks", "fence_after_ms"); the caller puts its own prefix before them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from controld.core.checkpoints import KEEP_MIN
from controld.core.ids import valid_id
from controld.core.outcome import FieldViolation
from controld.core.spec import (
    SECOND_NS,
    CheckpointSpec,
    Constraint,
    DeviceRequest,
    Durability,
    GangSpec,
    JobSpec,
    Operator,
    Resources,
    RestartSpec,
    TaskSpec,
)

MS_NS = 1_000_000
DAY_NS = 86_400 * SECOND_NS

# One generation is one packed record; 512 ranks with 8 devices each take about 200 KB of it.
RANKS_MAX = 4_096
# A job id is its name, '-' and a number: 48 characters leave room for the number within the 63 of an id.
NAME_LENGTH_MAX = 48
DEVICE_COUNT_MAX = 1_024
DEVICE_REQUESTS_MAX = 64
CONSTRAINTS_MAX = 64
VALUES_MAX = 256
# Linux refuses an argument or variable longer than 128 KiB (MAX_ARG_STRLEN), whatever the total.
ARGUMENT_BYTES_MAX = 128 * 1024 - 1
SPEC_BYTES_MAX = 256 * 1024
CPU_MILLIS_MAX = 1_000_000_000
INT64_MAX = 2**63 - 1
GRACE_MS_MAX = 3_600_000
LOG_BYTES_MIN = 4 * 1024
LOG_FILES_MAX = 100
PATH_LENGTH_MAX = 4_095
KEEP_MAX = 1_000
RESTARTS_MAX = 100_000

KINDS = ("", "training", "batch", "latency")
SPREADS = ("node", "none")
FENCINGS = ("any", "strong")
RUNTIMES = ("process",)
DEVICE_KINDS = ("cpu", "accelerator", "nic", "dpu", "memory", "storage")
_ORDERED = (Operator.LT, Operator.LE, Operator.GT, Operator.GE)

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ACCOUNT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}")
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_ATTRIBUTE = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_./-]{0,251}[A-Za-z0-9_])?")

Violations = Iterator[FieldViolation]


@dataclass(frozen=True, slots=True)
class SpecLimits:
    """What this cluster's own settings demand of a specification.

    `fence_after_min_ns`: below it, a lease would run out while agents look for the controller after its restart.
    """

    fence_after_min_ns: int
    fence_after_max_ns: int = DAY_NS


def validate(spec: JobSpec, limits: SpecLimits) -> tuple[FieldViolation, ...]:
    """Every impossible value; empty when the specification may be submitted."""
    return tuple(_violations(spec, limits))


def validate_job_id(job_id: str) -> tuple[FieldViolation, ...]:
    """An id that the user chose; empty (the controller makes one) is right."""
    if not job_id or valid_id(job_id):
        return ()
    return (
        FieldViolation(
            "job_id",
            f"'{job_id[:80]}' is not an id: 1 to 63 lower-case letters, digits and '-', a letter first, no '-' last",
        ),
    )


def spec_bytes(spec: JobSpec) -> int:
    """UTF-8 bytes of all texts of a specification, with 16 for each of its parts: close to its stored size."""
    texts = [spec.name, *spec.task.command, spec.task.working_directory, spec.checkpoint.directory]
    texts += [text for pair in spec.task.env for text in pair]
    constraints = [*spec.node_constraints, *(c for device in spec.resources.devices for c in device.constraints)]
    texts += [text for constraint in constraints for text in (constraint.attribute, *constraint.values)]
    return sum(len(text.encode(errors="replace")) + 16 for text in texts)


def _violations(spec: JobSpec, limits: SpecLimits) -> Violations:
    size_bytes = spec_bytes(spec)
    if size_bytes > SPEC_BYTES_MAX:
        yield FieldViolation(
            "", f"takes {size_bytes} bytes, the most is {SPEC_BYTES_MAX}; put large inputs into files the tasks read"
        )
    if not spec.name:
        yield FieldViolation("name", "is missing; name the job, such as train-llama")
    elif not valid_id(spec.name) or len(spec.name) > NAME_LENGTH_MAX:
        yield FieldViolation(
            "name",
            f"'{spec.name[:80]}' is not a name: 1 to {NAME_LENGTH_MAX} lower-case letters, digits and '-', a letter "
            "first, no '-' last",
        )
    yield from _one_of("kind", spec.kind, KINDS)
    yield from _one_of("fencing", spec.fencing, FENCINGS)
    yield from _gang(spec.gang)
    yield from _resources(spec.resources)
    yield from _task(spec.task)
    yield from _fence_after(spec.fence_after_ns, limits)
    yield from _checkpoint(spec.checkpoint)
    yield from _restart(spec.restart)
    yield from _constraints("node_constraints", spec.node_constraints)
    yield from _between_ms("start_timeout_ms", spec.start_timeout_ns, 0, 7 * DAY_NS)


def _gang(gang: GangSpec) -> Violations:
    yield from _between("gang.ranks", gang.ranks, 1, RANKS_MAX)
    yield from _between("gang.spares", gang.spares, 0, RANKS_MAX)
    yield from _one_of("gang.spread", gang.spread, SPREADS)


def _resources(resources: Resources) -> Violations:
    yield from _between("resources.cpu_millis", resources.cpu_millis, 1, CPU_MILLIS_MAX)
    yield from _between("resources.memory_bytes", resources.memory_bytes, 1, INT64_MAX)
    yield from _at_most("resources.devices", resources.devices, DEVICE_REQUESTS_MAX)
    for index, device in enumerate(resources.devices[:DEVICE_REQUESTS_MAX]):
        yield from _device(f"resources.devices[{index}]", device)


def _device(path: str, device: DeviceRequest) -> Violations:
    yield from _one_of(f"{path}.kind", device.kind, DEVICE_KINDS)
    yield from _between(f"{path}.count", device.count, 1, DEVICE_COUNT_MAX)
    yield from _between(f"{path}.share_thousandths", device.share_thousandths, 1, 1000)
    if device.count > 1 and device.share_thousandths < 1000:
        yield FieldViolation(
            f"{path}.share_thousandths", "only a count of 1 may be shared; ask for whole devices or for one share"
        )
    yield from _constraints(f"{path}.constraints", device.constraints)


def _task(task: TaskSpec) -> Violations:
    if not task.command or not task.command[0]:
        yield FieldViolation(
            "task.command", "is empty; give the program and its arguments as a list (no shell reads it)"
        )
    for index, argument in enumerate(task.command):
        yield from _argument(f"task.command[{index}]", argument)
    for name, value in task.env:
        if not _ENV_NAME.fullmatch(name):
            yield FieldViolation(
                "task.env", f"'{name[:80]}' is not a variable's name: letters, digits and '_', no digit first"
            )
        yield from _argument(f"task.env.{name[:80]}", value)
    if task.working_directory:
        yield from _directory("task.working_directory", task.working_directory)
    for field, account in (("task.user", task.user), ("task.group", task.group)):
        if account and not _ACCOUNT.fullmatch(account):
            yield FieldViolation(field, f"'{account[:40]}' is not a name or number of an account")
    yield from _between("task.grace_ms", task.grace_ms, 0, GRACE_MS_MAX)
    yield from _between("task.log_bytes_max", task.log_bytes_max, LOG_BYTES_MIN, INT64_MAX)
    yield from _between("task.log_files_max", task.log_files_max, 1, LOG_FILES_MAX)
    if task.runtime == "container":
        yield FieldViolation("task.runtime", "'container' is not supported yet; use process")
    else:
        yield from _one_of("task.runtime", task.runtime, RUNTIMES)


def _argument(path: str, text: str) -> Violations:
    if "\0" in text:
        yield FieldViolation(path, "contains a NUL character, which no program can be given")
    if len(text.encode(errors="replace")) > ARGUMENT_BYTES_MAX:
        yield FieldViolation(path, f"is longer than {ARGUMENT_BYTES_MAX} bytes, the most that Linux passes on")


def _fence_after(value_ns: int, limits: SpecLimits) -> Violations:
    if value_ns < limits.fence_after_min_ns:
        minimum_ms = -(-limits.fence_after_min_ns // MS_NS)
        yield FieldViolation(
            "fence_after_ms",
            f"{value_ns // MS_NS} ms is too short: tasks would be stopped whenever the controller restarts; "
            f"the least here is {minimum_ms} ms",
        )
    elif value_ns > limits.fence_after_max_ns:
        yield FieldViolation(
            "fence_after_ms",
            f"{value_ns // MS_NS} ms is too long: a lost node's devices would stay locked for it; "
            f"the most is {limits.fence_after_max_ns // MS_NS} ms",
        )


def _checkpoint(checkpoint: CheckpointSpec) -> Violations:
    path = "checkpoint.directory"
    if checkpoint.durability is Durability.SHARED_DIRECTORY:
        if not checkpoint.directory:
            yield FieldViolation(path, "is missing; name an absolute directory that every node reaches")
        else:
            yield from _directory(path, checkpoint.directory)
    elif checkpoint.directory:
        yield FieldViolation(
            path, "is for durability SHARED_DIRECTORY; with LOCAL_DISK each node keeps shards in its own data directory"
        )
    yield from _between("checkpoint.keep", checkpoint.keep, KEEP_MIN, KEEP_MAX)
    yield from _between_ms("checkpoint.timeout_ms", checkpoint.timeout_ns, SECOND_NS, 7 * DAY_NS)


def _restart(restart: RestartSpec) -> Violations:
    yield from _between("restart.max", restart.max, 0, RESTARTS_MAX)
    yield from _between_ms("restart.window_ms", restart.window_ns, SECOND_NS, 365 * DAY_NS)
    if len(set(restart.allow)) < len(restart.allow):
        yield FieldViolation("restart.allow", "names a way twice")


def _constraints(path: str, constraints: tuple[Constraint, ...]) -> Violations:
    yield from _at_most(path, constraints, CONSTRAINTS_MAX)
    for index, constraint in enumerate(constraints[:CONSTRAINTS_MAX]):
        here = f"{path}[{index}]"
        if not _ATTRIBUTE.fullmatch(constraint.attribute):
            yield FieldViolation(f"{here}.attribute", f"'{constraint.attribute[:80]}' is not an attribute's name")
        yield from _values(f"{here}.values", constraint)


def _values(path: str, constraint: Constraint) -> Violations:
    operator, values = constraint.operator, constraint.values
    if operator is Operator.EXISTS:
        if values:
            yield FieldViolation(path, "EXISTS compares with nothing; leave the values out")
    elif operator is Operator.IN:
        if not values:
            yield FieldViolation(path, "IN needs at least one value")
        yield from _at_most(path, values, VALUES_MAX)
    elif len(values) != 1:
        yield FieldViolation(path, f"{operator.value} needs one value, {len(values)} given")
    elif operator in _ORDERED and not _INTEGER.fullmatch(values[0]):
        yield FieldViolation(path, f"{operator.value} needs a whole number in base units, not '{values[0][:40]}'")


def _directory(path: str, text: str) -> Violations:
    if not text.startswith("/") or ".." in text.split("/"):
        yield FieldViolation(path, f"'{text[:80]}' must be absolute, without '..'")
    elif "\0" in text or len(text) > PATH_LENGTH_MAX:
        yield FieldViolation(path, f"must have at most {PATH_LENGTH_MAX} characters and no NUL")


def _one_of(path: str, value: str, choices: tuple[str, ...]) -> Violations:
    if value not in choices:
        known = ", ".join(choice for choice in choices if choice)
        yield FieldViolation(path, f"unknown value '{value[:40]}'; use one of {known}")


def _between(path: str, value: int, minimum: int, maximum: int) -> Violations:
    if not minimum <= value <= maximum:
        yield FieldViolation(path, f"{value} is outside {minimum} to {maximum}")


def _between_ms(path: str, value_ns: int, minimum_ns: int, maximum_ns: int) -> Violations:
    yield from _between(path, value_ns // MS_NS, minimum_ns // MS_NS, maximum_ns // MS_NS)


def _at_most(path: str, items: Iterable[object], maximum: int) -> Violations:
    count = sum(1 for _ in items)
    if count > maximum:
        yield FieldViolation(path, f"{count} are too many: the most is {maximum}")
