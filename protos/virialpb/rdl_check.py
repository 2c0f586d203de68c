"""What must hold between the declarations of an RDL document: names once, references that lead somewhere, no loops."""

from __future__ import annotations

from collections.abc import Iterable

from virialpb.rdl_model import Document, DomainDecl, DomainKind
from virialpb.strict import ErrorList
from virialpb.suggest import nearest

_RANK = {kind: rank for rank, kind in enumerate(DomainKind)}


def check_references(document: Document, errors: ErrorList) -> None:
    """Note every broken rule in ``errors``. Paths are those of the document."""
    _once("nodes", (node.name for node in document.nodes), errors)
    _once("links", (link.name for link in document.links), errors)
    _once("domains", (domain.name for domain in document.domains), errors)
    _once("redundancy_groups", (group.name for group in document.redundancy_groups), errors)
    for index, node in enumerate(document.nodes):
        _once(f"nodes[{index}].devices", (device.name for device in node.devices), errors)
    _check_domains(document, errors)
    _check_links(document, errors)


def _once(path: str, names: Iterable[str], errors: ErrorList) -> None:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if not name:
            continue
        if name in first:
            errors.add(f"{path}[{index}].name", f"'{name}' is already {path}[{first[name]}]")
        else:
            first[name] = index


def _check_domains(document: Document, errors: ErrorList) -> None:
    by_name = {domain.name: domain for domain in document.domains}
    for index, node in enumerate(document.nodes):
        if node.domain and node.domain not in by_name:
            errors.add(f"nodes[{index}].domain", f"no domain '{node.domain}'", nearest(node.domain, by_name))
    for index, domain in enumerate(document.domains):
        if not domain.parent:
            continue
        path = f"domains[{index}].parent"
        parent = by_name.get(domain.parent)
        if parent is None:
            errors.add(path, f"no domain '{domain.parent}'", nearest(domain.parent, by_name))
        elif _in_loop(domain, by_name):
            errors.add(path, f"'{domain.name}' is its own ancestor")
        elif _RANK[parent.kind] < _RANK[domain.kind]:
            errors.add(path, f"a {parent.kind.value} ('{parent.name}') cannot hold a {domain.kind.value}")


def _in_loop(domain: DomainDecl, by_name: dict[str, DomainDecl]) -> bool:
    seen: set[str] = set()
    at: DomainDecl | None = domain
    while at is not None and at.name not in seen:
        seen.add(at.name)
        at = by_name.get(at.parent)
    return at is not None and at.name == domain.name


def _check_links(document: Document, errors: ErrorList) -> None:
    devices = {node.name: {device.name for device in node.devices if device.name} for node in document.nodes}
    groups = {group.name: 0 for group in document.redundancy_groups}
    for index, link in enumerate(document.links):
        path = f"links[{index}]"
        if link.ends[0] == link.ends[1]:
            errors.add(f"{path}.ends", f"both ends are '{link.ends[0]}'")
        for side, end in enumerate(link.ends):
            _check_end(f"{path}.ends[{side}]", end, devices, errors)
        if link.redundancy_group in groups:
            groups[link.redundancy_group] += not link.inactive_by_design
        elif link.redundancy_group:
            errors.add(
                f"{path}.redundancy_group",
                f"no redundancy group '{link.redundancy_group}'",
                nearest(link.redundancy_group, groups),
            )
    for index, group in enumerate(document.redundancy_groups):
        if group.minimum_members > groups[group.name]:
            errors.add(
                f"redundancy_groups[{index}].minimum_members",
                f"{group.minimum_members} members needed, but {groups[group.name]} active links are in '{group.name}'",
            )


def _check_end(path: str, end: str, devices: dict[str, set[str]], errors: ErrorList) -> None:
    """``node/device`` must name both; a bare name may be a switch, which no document has to declare."""
    node, slash, device = end.partition("/")
    if not slash:
        return
    if node not in devices:
        errors.add(path, f"no node '{node}'", nearest(node, devices))
    elif device not in devices[node]:
        errors.add(path, f"node '{node}' has no device '{device}'", nearest(device, sorted(devices[node])))
