"""Virial: a control plane that makes a rack of AI servers behave as one machine. This is its SDK.

    with virial.SyncClient("127.0.0.1:7700") as client:
        job = client.submit_job(virial.load_spec("train.yaml"))

`Client` is the same for asyncio. Code inside a task uses `virial.task`. Names are loaded when they are first used,
so that `import virial.task` in a training script brings no gRPC with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from virial._async.client import Client as Client
    from virial._connect import Tls as Tls
    from virial._sync.client import SyncClient as SyncClient
    from virial.errors import AlreadyExistsError as AlreadyExistsError
    from virial.errors import CompactedError as CompactedError
    from virial.errors import ConflictError as ConflictError
    from virial.errors import DeniedError as DeniedError
    from virial.errors import ExhaustedError as ExhaustedError
    from virial.errors import ForkedClientError as ForkedClientError
    from virial.errors import InternalError as InternalError
    from virial.errors import InvalidRequestError as InvalidRequestError
    from virial.errors import NotFoundError as NotFoundError
    from virial.errors import UnavailableError as UnavailableError
    from virial.errors import VirialError as VirialError
    from virial.models import Job as Job
    from virial.models import JobSpec as JobSpec
    from virial.models import JobState as JobState
    from virial.models import Node as Node
    from virial.spec import SpecError as SpecError
    from virial.spec import load_spec as load_spec
    from virial.spec import parse_spec as parse_spec

_HOMES = {
    "Client": "virial._async.client",
    "SyncClient": "virial._sync.client",
    "Tls": "virial._connect",
    "AlreadyExistsError": "virial.errors",
    "CompactedError": "virial.errors",
    "ConflictError": "virial.errors",
    "DeniedError": "virial.errors",
    "ExhaustedError": "virial.errors",
    "ForkedClientError": "virial.errors",
    "InternalError": "virial.errors",
    "InvalidRequestError": "virial.errors",
    "NotFoundError": "virial.errors",
    "UnavailableError": "virial.errors",
    "VirialError": "virial.errors",
    "Job": "virial.models",
    "JobSpec": "virial.models",
    "JobState": "virial.models",
    "Node": "virial.models",
    "SpecError": "virial.spec",
    "load_spec": "virial.spec",
    "parse_spec": "virial.spec",
}

__all__ = [
    "AlreadyExistsError",
    "Client",
    "CompactedError",
    "ConflictError",
    "DeniedError",
    "ExhaustedError",
    "ForkedClientError",
    "InternalError",
    "InvalidRequestError",
    "Job",
    "JobSpec",
    "JobState",
    "Node",
    "NotFoundError",
    "SpecError",
    "SyncClient",
    "Tls",
    "UnavailableError",
    "VirialError",
    "load_spec",
    "parse_spec",
]


if not TYPE_CHECKING:  # to a type checker, a name that is not imported above does not exist

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'virial' has no attribute {name!r}")
        return getattr(importlib.import_module(home), name)
