"""`virial nodes`, `node`, `hold`, `release`, `drain`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from virial.cli.frame import Session, bare, command
from virial.cli.human import UNKNOWN, cpu, duration, moment, named, plural, quantity, size
from virial.cli.printer import Printer, Table

if TYPE_CHECKING:
    from virial.models import Hold, Link, Node

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.", callback=bare("nodes/"))]
MS_NS = 1_000_000


@command("nodes", "virial nodes", "virial nodes -o json | jq '.[] | select(.schedulable) | .name'")
def nodes(session: Session) -> None:
    """List nodes."""
    with session.client() as client:
        found = client.list_nodes()
    if session.printer.for_people:
        session.printer.table(nodes_table(found))
    else:
        session.printer.value(found)


def nodes_table(found: list[Node]) -> Table:
    rows = [
        (
            n.name,
            n.liveness,
            use(n),
            f"{cpu(n.cpu_free_millis)}/{cpu(n.cpu_millis)}",
            f"{size(n.memory_free_bytes)}/{size(n.memory_bytes)}",
            str(len(n.slots)),
            _temperature(n),
            _beat(n),
        )
        for n in found
    ]
    right = frozenset({"CPU FREE", "MEMORY FREE", "TASKS", "TEMPERATURE", "LAST BEAT"})
    return Table(
        ("NODE", "LIVENESS", "USE", "CPU FREE", "MEMORY FREE", "TASKS", "TEMPERATURE", "LAST BEAT"), rows, right
    )


def use(node: Node) -> str:
    """Whether new work goes there, in one word."""
    if node.draining:
        return "draining"
    if any(not h.device_key for h in node.holds):
        return "held"
    return "open" if node.schedulable else "closed"


def _temperature(node: Node) -> str:
    found = next((r for r in node.readings if r.name == "temperature_max"), None)
    return UNKNOWN if found is None else quantity(found.value, found.unit)


def _beat(node: Node) -> str:
    return UNKNOWN if node.beat_age_ms is None else f"{duration(node.beat_age_ms * MS_NS)} ago"


@command("node", "virial node node-3", "virial node node-3 -o yaml")
def node(session: Session, node: NodeArgument) -> None:
    """Show one node: devices, links, readings, holds, tasks."""
    with session.client() as client:
        found = client.get_node(node)
    if session.printer.for_people:
        _show(session.printer, found)
    else:
        session.printer.value(found)


def _show(printer: Printer, n: Node) -> None:
    printer.pairs(
        [
            ("node", n.name),
            ("uid", n.uid),
            ("liveness", n.liveness),
            ("new work", use(n)),
            ("connected", "yes" if n.connected else "no"),
            ("last beat", _beat(n)),
            ("address", n.advertise_address or UNKNOWN),
            ("fencing", n.fencing or UNKNOWN),
            ("CPU", f"{cpu(n.cpu_free_millis)} free of {cpu(n.cpu_millis)}"),
            ("memory", f"{size(n.memory_free_bytes)} free of {size(n.memory_bytes)}"),
            ("labels", ", ".join(f"{k}={v}" for k, v in n.labels)),
            ("tasks", ", ".join(n.slots) or "none"),
            ("version", n.version or UNKNOWN),
            *(("held", _hold(hold)) for hold in n.holds),
        ]
    )
    tables = [
        Table(
            ("DEVICE", "KIND", "NAME", "CAPACITY"),
            [(d.key, d.kind, d.name or "-", ", ".join(named(k, v) for k, v in d.capacity) or "-") for d in n.devices],
        ),
        Table(
            ("LINK", "KIND", "STATE", "NOW", "EXPECTED", "TO"),
            [(link.key, link.kind, link.state, *_speeds(link), link.end_b or UNKNOWN) for link in n.links],
            frozenset({"NOW", "EXPECTED"}),
        ),
        Table(
            ("READING", "VALUE", "QUALITY", "AGE"),
            [(r.name, quantity(r.value, r.unit), r.quality, duration(r.age_ms * MS_NS)) for r in n.readings],
            frozenset({"VALUE", "AGE"}),
        ),
    ]
    for table in tables:
        if table.rows:
            printer.line("")
            printer.table(table)


def _speeds(link: Link) -> tuple[str, str]:
    expected = link.expected_bytes_per_second
    return (
        quantity(link.current_bytes_per_second, "bytes_per_second"),
        quantity(expected, "bytes_per_second") if expected else UNKNOWN,
    )


def _hold(hold: Hold) -> str:
    what = f"device {hold.device_key} " if hold.device_key else ""
    until = f"until {moment(hold.expire_time_unix_ns)}" if hold.expire_time_unix_ns else "until released"
    return f"{what}by {hold.owner}: {hold.reason} ({until})"


@command(
    "hold",
    'virial hold node-3 --owner maintenance --reason "new fan"',
    'virial hold node-3 --owner maintenance --reason "new fan" --for 2h',
    'virial hold node-3 --owner ops --reason "bad memory" --device gpu-7f3a',
)
def hold(
    session: Session,
    node: NodeArgument,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; others will read it.")],
    owner: Annotated[str, typer.Option("--owner", metavar="NAME", help="The hold's name; lifting it takes the same.")],
    expire: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="Such as 2h. [default: until released]")
    ] = "",
    device: Annotated[str, typer.Option("--device", metavar="KEY", help="Only this device of the node.")] = "",
) -> None:
    """Keep a node from new work.

    What runs there stays. With --device, only that device of it is held.
    """
    expire_ms = _expire_ms(expire) if expire else 0
    with session.client() as client:
        found = client.place_hold(node, owner, reason, expire_after_ms=expire_ms, device_key=device)
    _done(session, found, f"{found.name} is held by {owner}" + (f" for {expire}" if expire else " until released"))


def _expire_ms(text: str) -> int:
    from virial.cli.exits import CliError
    from virialpb.units import QuantityError, parse_duration_ns

    try:
        value_ns = parse_duration_ns(text)
    except QuantityError as error:
        raise CliError(f"--for: {error}") from None
    if value_ns < MS_NS:
        raise CliError(f"--for: {text} is too short: the least is 1ms")
    return value_ns // MS_NS


@command("release", "virial release node-3 --owner maintenance", "virial release node-3 --owner drain")
def release(
    session: Session,
    node: NodeArgument,
    owner: Annotated[str, typer.Option("--owner", metavar="NAME", help="Whose hold to lift; drain ends a drain.")],
    device: Annotated[str, typer.Option("--device", metavar="KEY", help="The hold on this device.")] = "",
) -> None:
    """Lift one owner's hold of a node; the holds of others stay."""
    with session.client() as client:
        found = client.release_hold(node, owner, device_key=device)
    others = [h.owner for h in found.holds]
    left = f"; still held by {', '.join(others)}" if others else ""
    _done(session, found, f"{found.name}: hold of {owner} released{left}")


@command("drain", 'virial drain node-3 --reason "firmware"', "virial release node-3 --owner drain")
def drain(
    session: Session,
    node: NodeArgument,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; others will read it.")],
) -> None:
    """Hold a node and move its gangs away.

    Each moves through a new generation, from its newest checkpoint.
    """
    with session.client() as client:
        found = client.drain_node(node, reason)
    tasks = f"; {plural(len(found.slots), 'task')} to move" if found.slots else ""
    _done(session, found, f"{found.name} is draining{tasks} (end it with: virial release {found.name} --owner drain)")


def _done(session: Session, found: Node, text: str) -> None:
    if session.printer.for_people:
        session.printer.line(text)
    else:
        session.printer.value(found)


@command("remove-node", "virial remove-node node-3")
def remove_node(session: Session, node: NodeArgument) -> None:
    """Forget a lost node for good.

    Refused while it is not lost, while leases on it have not ended, and while shards of a job's checkpoints are on its
    disk and nowhere else. One that comes back joins as a new node.
    """
    with session.client() as client:
        uid = client.remove_node(node)
    if session.printer.for_people:
        session.printer.line(f"{node} ({uid}) is removed")
    else:
        session.printer.value({"name": node, "uid": uid})
