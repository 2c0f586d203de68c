"""What each role may call. One table; a method that is not in it is refused to everyone.

Who may do more with their own things than with those of others (cancel a job, read its output, run as another user of
the hosts) is said where that is decided; this is about whole methods. Why so: docs/operate/certificates.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from virialpb.identity import Role

# Not even a certificate is asked for: it says only that the process serves.
HEALTH: Final = "/grpc.health.v1.Health/"
# At an address of its own: who asks has no certificate yet, and shows a token.
JOIN: Final = "/virialpb.v1.JoinService/Join"

_PEOPLE: Final = frozenset({Role.USER, Role.ADMIN})
_ADMINS: Final = frozenset({Role.ADMIN})
_NODES: Final = frozenset({Role.NODE})
_CONTROLLERS: Final = frozenset({Role.CONTROLLER})

_SERVICES: Final[Mapping[str, tuple[frozenset[Role], tuple[str, ...]]]] = {
    "virialpb.v1.JobService": (
        _PEOPLE,
        ("SubmitJob", "GetJob", "ListJobs", "CancelJob", "WatchJobs", "ReadLogs", "ExplainJob"),
    ),
    "virialpb.v1.ClusterService": (
        _PEOPLE,
        ("GetNode", "ListNodes", "WatchNodes", "GetStatus", "ListEvents", "WatchEvents"),
    ),
    "virialpb.v1.NodeService": (_NODES, ("Control", "Bulk")),
    "virialpb.v1.ReplicaService": (_CONTROLLERS, ("Ping", "AskAgreement", "HandOver", "Look", "Defragment")),
    "virialpb.v1.AdminService": (
        _ADMINS,
        ("ListControllers", "AddMember", "RemoveMember", "ReplaceMember", "MoveLeader", "Backup"),
    ),
    "virialpb.v1.CertificateService": (_ADMINS, ("CreateJoinToken",)),
    # What the API is, no more; `grpcurl` asks it.
    "grpc.reflection.v1alpha.ServerReflection": (_PEOPLE, ("ServerReflectionInfo",)),
}
# Taking a node from everyone is an operator's, as in Slurm (`scontrol update` of a node) and Nomad (`node:write`).
_OPERATORS: Final = ("PlaceHold", "ReleaseHold", "DrainNode", "RemoveNode")

_BASE: Final[Mapping[str, frozenset[Role]]] = {
    f"/{service}/{method}": roles for service, (roles, methods) in _SERVICES.items() for method in methods
} | {f"/virialpb.v1.ClusterService/{method}": _ADMINS for method in _OPERATORS}

ROLES: Final[Mapping[str, frozenset[Role]]] = _BASE | {"/virialpb.v1.CertificateService/RenewCertificate": _NODES}


def may(role: Role, method: str) -> bool:
    """Whether a caller of this role may call `method` ("/package.Service/Method")."""
    return role in ROLES.get(method, frozenset())
