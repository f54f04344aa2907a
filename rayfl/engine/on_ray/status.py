"""What a cluster does now: its nodes, and every run on it with its client actors.

A run's server actor has a name, and answers for its run while a round goes on. So anybody who is connected to the
cluster can ask, and nothing has to be kept for it. The same numbers are gauges of `ray.util.metrics`, for Prometheus
and for Ray's dashboard.
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
"""What the names of server actors begin with."""
ANSWER_SECONDS = 10.0
"""How long a server actor is waited for that loads a run, or is about to die."""


@dataclass(frozen=True)
class About:
    """What a run is called where several are looked at."""

    label: str
    """The method, or the sweep's row with its point and seed."""
    study: str
    """The folder of the run, or of its sweep."""
    trials: int = 1
    """How many the study has."""


@dataclass(frozen=True)
class RunStatus:
    """Where a run is."""

    about: About
    round: int
    rounds: int
    pace: float | None
    """Seconds of a round, as the last ones took; None before the first."""
    places: Sequence[Place]
    """Of the client actors that are ready."""
    gpus: float
    """What each of them has of a GPU, or how many GPUs."""
    starting: int
    """Client actors that have not taken up the run yet."""
    deaths: int
    """Client actors that died, in all runs of these processes."""

    @property
    def left(self) -> float | None:
        """Seconds to the end at this pace."""
        return None if self.pace is None else self.pace * (self.rounds - self.round)


@dataclass(frozen=True)
class Node:
    """A node of the cluster, with what it has and what is taken of it."""

    id: str
    address: str
    is_alive: bool
    cpus: float
    gpus: float
    cpus_taken: float
    gpus_taken: float


def nodes() -> list[Node]:
    """Those that live and those that died, the head first."""
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
    """The runs of the cluster, of all drivers. One that answers nothing in time, as it loads its data, is left out."""
    # pairs of name and namespace, whatever Ray's annotation says
    named: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    servers = []
    for actor in named:
        # it may end meanwhile
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
    """A name by which `running` finds a server actor."""
    return f"{PREFIX}{uuid.uuid4().hex[:12]}"


class Gauges:
    """A run's numbers for Prometheus, with the study and the run as tags."""

    def __init__(self) -> None:
        self.gauges = {
            name: Gauge(f"rayfl_{name}", description=text, tag_keys=("study", "run"))
            for name, text in {
                "round": "Rounds that are done",
                "rounds": "Rounds of the run",
                "round_seconds": "Seconds of a round, mean of the last ones",
                "seconds_left": "Seconds to the run's end at this pace",
                "client_actors": "Client actors that are ready",
                "client_actor_deaths": "Client actors that died",
            }.items()
        }

    def show(self, run: RunStatus) -> None:
        tags = {"study": run.about.study, "run": run.about.label}
        shown = (run.round, run.rounds, run.pace, run.left, len(run.places), run.deaths)
        for gauge, value in zip(self.gauges.values(), shown, strict=True):
            gauge.set(value, tags)
