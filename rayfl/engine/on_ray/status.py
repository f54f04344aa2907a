"""Status of a cluster: its nodes, and its runs with their client actors.

A run's server actor has a name and answers during a round, so every process connected to the cluster can ask it. The
same numbers are gauges of `ray.util.metrics`, for Prometheus and for Ray's dashboard.
"""

import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.util.metrics import Gauge

from rayfl.engine.on_ray.actors import Place

PREFIX = "rayfl-"
"""Prefix of the names of server actors."""
ANSWER_SECONDS = 10.0
"""Time limit for the answer of a server actor, which may be loading a run or dying."""


@dataclass(frozen=True)
class About:
    """Name of a run among several."""

    label: str
    """Method, or the sweep's row with its point and seed."""
    study: str
    """Folder of the run or of its sweep."""
    trials: int = 1
    """Trials of the study."""


@dataclass(frozen=True)
class RunStatus:
    """Progress of a run."""

    about: About
    round: int
    rounds: int
    pace: float | None
    """Mean seconds per round of the last rounds; None before the first."""
    places: Sequence[Place]
    """Places of the client actors that are ready."""
    gpus: float
    """GPUs of each client actor, possibly a fraction."""
    starting: int
    """Client actors that have not loaded the run yet."""
    deaths: int
    """Client actors that died, in all runs of these processes."""

    @property
    def left(self) -> float | None:
        """Seconds left at this pace."""
        return None if self.pace is None else self.pace * (self.rounds - self.round)


@dataclass(frozen=True)
class Node:
    """Node of the cluster, with its total and used resources."""

    id: str
    address: str
    is_alive: bool
    cpus: float
    gpus: float
    cpus_taken: float
    gpus_taken: float


def nodes() -> list[Node]:
    """Return living and dead nodes, the head first."""
    free = available_resources_per_node()
    found = []
    for node in ray.nodes():
        total, left = node["Resources"], free.get(node["NodeID"], {})
        cpus, gpus = (total.get(kind, 0.0) for kind in ("CPU", "GPU"))
        taken = (n - left.get(kind, 0.0) if node["Alive"] else 0.0 for kind, n in (("CPU", cpus), ("GPU", gpus)))
        found.append(Node(node["NodeID"], node["NodeManagerAddress"], node["Alive"], cpus, gpus, *taken))
    head = {node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"]}
    return sorted(found, key=lambda node: (node.id not in head, not node.is_alive, node.address, node.id))


def running() -> list[RunStatus]:
    """Return the runs of the cluster, of all drivers, without those that do not answer in time."""
    # pairs of name and namespace, whatever Ray's annotation says
    named: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    servers = []
    for actor in named:
        # the actor may have ended
        with suppress(ValueError):
            if actor["name"].startswith(PREFIX):
                servers.append(ray.get_actor(actor["name"], actor["namespace"]))
    found: list[RunStatus] = []
    for ref in [server.status.remote() for server in servers]:
        with suppress(RayError):
            run: Any = ray.get(ref, timeout=ANSWER_SECONDS)
            found += [] if run is None else [run]
    return sorted(found, key=lambda run: (run.about.study, run.about.label))


def server_name() -> str:
    """Return a name that `running` recognises as a server actor's."""
    return f"{PREFIX}{uuid.uuid4().hex[:12]}"


class Gauges:
    """Gauges of a run for Prometheus, tagged with study and run."""

    def __init__(self) -> None:
        self.gauges = {
            name: Gauge(f"rayfl_{name}", description=text, tag_keys=("study", "run"))
            for name, text in {
                "round": "Finished rounds",
                "rounds": "Rounds of the run",
                "round_seconds": "Mean seconds per round, last rounds",
                "seconds_left": "Seconds left at this pace",
                "client_actors": "Client actors that are ready",
                "client_actor_deaths": "Client actors that died",
            }.items()
        }

    def show(self, run: RunStatus) -> None:
        """Set all gauges. Their errors are ignored: no gauge ends a run."""
        tags = {"study": as_ascii(run.about.study), "run": as_ascii(run.about.label)}
        shown = (run.round, run.rounds, run.pace, run.left, len(run.places), run.deaths)
        for gauge, value in zip(self.gauges.values(), shown, strict=True):
            with suppress(Exception):
                gauge.set(value, tags)


def as_ascii(text: str) -> str:
    r"""Return text as a tag of Ray's metrics, which are ASCII: "größe" becomes "gr\xf6\xdfe"."""
    return text.encode("ascii", "backslashreplace").decode()
