"""Starts the tiers as processes of this machine, restarts them, and stops them in order."""

from baton.supervisor.child import ChildFailed
from baton.supervisor.cluster import Cluster
from baton.supervisor.plan import PROGRAMS, ChildSpec, Programs
from baton.supervisor.serve import describe_start, serve_cluster

__all__ = [
    "PROGRAMS",
    "ChildFailed",
    "ChildSpec",
    "Cluster",
    "Programs",
    "describe_start",
    "serve_cluster",
]
