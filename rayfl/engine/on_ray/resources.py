"""Resources of client actors: their parts of CPUs and GPUs, and the room for them in a cluster or on this machine."""

import os

import ray
from ray._private.resource_and_label_spec import ResourceAndLabelSpec

from rayfl.config import ConfigError


def bundles(actors: int, cpus: float, gpus: float) -> list[dict[str, float]]:
    """Return the client bundles of a placement group, one per actor.

    Actors on one GPU reserve equal parts of it, 0.5 for two of 0.4. Ray looks for a node by the sum of its free
    fractions: it would try a node with 0.2 free on each of two GPUs for an actor of 0.4 again and again.
    """
    gpu = {"GPU": max(gpus, 1 / sharing(gpus))} if gpus else {}
    return [{"CPU": cpus} | gpu for _ in range(actors)]


def sharing(gpus: float) -> int:
    """Return the number of client actors on one GPU; 1 if an actor needs several."""
    return max(1, int(1 / gpus + 1e-9))


def spread(actors: int, cpus: float, gpus: float, server_cpus: float = 0.0) -> float:
    """Return the largest part of a GPU, at least `gpus`, of which the present cluster has room for so many actors. Ray
    fills GPUs one after another; larger parts leave none idle."""
    parts = (1 / count for count in range(1, sharing(gpus))) if gpus else ()
    return next((part for part in parts if room(cpus, part, server_cpus) >= actors), gpus)


def room(cpus: float, gpus: float, server_cpus: float = 0.0) -> int:
    """Return the number of client actors that fit into the present cluster beside a server."""
    actors = 0
    for node in _nodes():
        free = node.get("CPU", 0.0)
        taken = min(server_cpus, free)
        server_cpus -= taken
        fit = int((free - taken) / cpus + 1e-9)
        if gpus:
            whole = int(node.get("GPU", 0.0))
            fit = min(fit, whole // int(gpus) if gpus > 1 else whole * sharing(gpus))
        actors += fit
    return actors


def require_room(actors: int, cpus: float, gpus: float, address: str | None, server_cpus: float = 0.0) -> None:
    """Raise a ConfigError if the server can never fit on this node, or the client actors into a local cluster.

    Before Ray starts only a local cluster is checked.
    """
    if not ray.is_initialized() and not is_own(address):
        return
    if server_cpus > (here := _nodes()[0].get("CPU", 0.0)):
        raise ConfigError(
            f"run.server_cpus: {server_cpus:g} is not valid. Allowed: at most {here:g}, the CPUs of this node"
        )
    if is_own(address) and actors > room(cpus, gpus, server_cpus):
        asked, found = compared(actors, cpus, gpus, server_cpus)
        raise ConfigError(
            f"run: {asked} do not fit: this machine has {found}. Hint: lower run.actors, run.cpus or run.gpus"
        )


def compared(actors: int, cpus: float, gpus: float, server_cpus: float) -> tuple[str, str]:
    """Describe what client actors and a server need, and the room for them in the present cluster."""
    server = f" and a server of {server_cpus:g} CPUs" if server_cpus else ""
    total = ", ".join(f"{sum(node.get(kind, 0.0) for node in _nodes()):g} {kind}s" for kind in ("CPU", "GPU"))
    return (
        f"{actors} client actors of {cpus:g} CPUs and {gpus:g} GPUs{server}",
        f"room for {room(cpus, gpus, server_cpus)} ({total})",
    )


def _nodes() -> list[dict[str, float]]:
    """Return the resources of every node, this one first; before Ray starts, what it will count on this machine."""
    if ray.is_initialized():
        here = ray.get_runtime_context().get_node_id()
        alive = [node for node in ray.nodes() if node["Alive"]]
        return [node["Resources"] for node in sorted(alive, key=lambda node: node["NodeID"] != here)]
    machine = ResourceAndLabelSpec()
    machine.resolve(is_head=True)
    return [{name: float(amount or 0) for name, amount in machine.to_resource_dict().items()}]


def is_own(address: str | None) -> bool:
    return (address or os.environ.get("RAY_ADDRESS") or "local") == "local"
