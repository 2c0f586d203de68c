"""How many connections may be open: callers, known or not, must not take the files that the controller itself needs.

A connection costs a file before anybody is asked who they are. Without files left, the store and the planner fail too.
"""

from __future__ import annotations

import resource
from typing import Final

# Connections of 4,096 agents, their renewals and people, several times over.
FILES_MAX: Final = 65_536
# The store's, the planner's, those to other controllers, certificates that are read anew, backups; and those who join.
FILES_KEPT: Final = 384
CONNECTIONS_MIN: Final = 64
# Whoever connects and says nothing is hung up on. gRPC's own time-out is two minutes.
HANDSHAKE: Final = ("grpc.server_handshake_timeout_ms", 10_000)


def at_most(connections: int) -> tuple[str, int]:
    """An option of a gRPC server: who comes beyond that is hung up on at once."""
    return ("grpc.max_allowed_incoming_connections", connections)


def connections_max() -> int:
    """As many as leave files for the rest. Raises this process's own limit as far as it may, to `FILES_MAX`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = FILES_MAX if soft == resource.RLIM_INFINITY else min(soft, FILES_MAX)
    return max(files - FILES_KEPT, CONNECTIONS_MIN)
