"""A whole cluster on this machine, for `virial up`, examples, tests and benchmarks; each part of it is a process.

One controld with the embedded store, or three or five with an etcd member each, and some noded. Every part has a
directory and an identity of its own; all listen on loopback, on ports that nobody else has, so that any number of such
clusters can run at once. Nothing outlives `stop`, and the parts stop by themselves when the process that started them
dies.
"""

from __future__ import annotations

from virial.local.cluster import LocalCluster, NodeOptions, Share, machine_share
from virial.local.part import Part, guardian_pid, kill_guardian
from virial.local.scratch import scratch_directory
from virial.local.supervision import Supervision

__all__ = [
    "LocalCluster",
    "NodeOptions",
    "Part",
    "Share",
    "Supervision",
    "guardian_pid",
    "kill_guardian",
    "machine_share",
    "scratch_directory",
]
