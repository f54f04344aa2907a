"""Resources of client actors: their parts of CPUs and GPUs, and the room for them in a cluster or on this machine."""

import os
from pathlib import Path

import ray
import yaml
from ray._private.resource_and_label_spec import ResourceAndLabelSpec

from rayfl import costs
from rayfl.config import ConfigError
from rayfl.engine.devices import usable
from rayfl.experiment import Experiment, Resources

GROWING = "~/ray_bootstrap_config.yaml"
"""File of `ray up` on a cluster's head: the kinds of nodes that its autoscaler may start."""


def gpus_of(run: Resources) -> float:
    """Return the GPUs per client actor. auto: 1 where Ray and PyTorch find GPUs, or the largest equal part that suits
    a given number of actors; otherwise 0."""
    if run.gpus != "auto":
        return run.gpus
    if not _has_gpus():
        return 0.0
    return 1.0 if run.actors == "auto" else spread(run.actors, run.cpus, 1 / run.actors, run.server_cpus)


def _has_gpus() -> bool:
    """Return whether the present cluster has GPUs, or may start nodes with some. PyTorch is asked on this node only; an
    actor on another node checks its own GPU (`Host.load`)."""
    here, *others = (node.get("GPU", 0.0) > 0 for node in _nodes())
    return here and usable() or any(others) or _may_grow()


def _may_grow() -> bool:
    """Return whether the autoscaler of the connected cluster may start nodes with GPUs."""
    if not ray.is_initialized() or _is_head():
        return False
    try:
        kinds = yaml.safe_load(Path(GROWING).expanduser().read_text(encoding="utf-8"))["available_node_types"].values()
        return any(kind.get("max_workers", 0) and kind["resources"].get("GPU", 0) for kind in kinds)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        return False


def _is_head() -> bool:
    """Return whether this process has started the cluster that it is connected to."""
    node = ray._private.worker._global_node  # pyright: ignore
    return node is not None and node.is_head()


def described(clients: list[dict[str, float]], run: Resources) -> str:
    """Describe the client actors with these bundles: "2 actors on CPUs; no GPU found"."""
    some, gpus = f"{len(clients):,} actor{'s' * (len(clients) > 1)}", clients[0].get("GPU", 0.0)
    if gpus:
        part = "one GPU" if gpus == 1 else f"{gpus:g} GPUs" if gpus > 1 else f"{gpus:.3g} of a GPU"
        return f"{some}, {part} each"
    if run.gpus == 0:
        return f"{some} on CPUs; run.gpus is 0"
    if found := sum(node.get("GPU", 0.0) for node in _nodes()):
        return f"{some} on CPUs; PyTorch cannot use the {found:g} GPU{'s' * (found != 1)} that Ray found"
    return f"{some} on CPUs; no GPU found"


def memory_of(experiment: Experiment) -> float:
    """Return the bytes of memory per client actor: `run.memory`, or an estimate from the networks."""
    run, training = experiment.run, experiment.training
    if run.memory != "auto":
        return run.memory * 1e9
    nets = experiment.bound().task.nets
    return costs.actor_gb(nets.values(), training.at_once, training.moments, experiment.together) * 1e9


def reserved(experiment: Experiment, actors: int, gpus: float) -> float:
    """Return the bytes to reserve per client actor: `run.memory`, or the estimate if the present nodes state their
    memory and all actors have room for it, so that an estimate refuses no run."""
    run, memory = experiment.run, memory_of(experiment)
    is_known = all("memory" in node for node in _nodes())
    has_room = is_known and room(run.cpus, gpus, run.server_cpus, memory) >= actors
    return memory if run.memory != "auto" or has_room else 0.0


def bundles(actors: int, cpus: float, gpus: float, memory: float = 0.0) -> list[dict[str, float]]:
    """Return the client bundles of a placement group, one per actor.

    Actors on one GPU reserve equal parts of it, 0.5 for two of 0.4. Ray looks for a node by the sum of its free
    fractions: it would try a node with 0.2 free on each of two GPUs for an actor of 0.4 again and again.
    """
    gpu = {"GPU": max(gpus, 1 / sharing(gpus))} if gpus else {}
    return [{"CPU": cpus} | gpu | ({"memory": float(round(memory))} if memory else {}) for _ in range(actors)]


def sharing(gpus: float) -> int:
    """Return the number of client actors on one GPU; 1 if an actor needs several."""
    return max(1, int(1 / gpus + 1e-9))


def spread(actors: int, cpus: float, gpus: float, server_cpus: float = 0.0) -> float:
    """Return the largest part of a GPU, at least `gpus`, of which the present cluster has room for so many actors. Ray
    fills GPUs one after another; larger parts leave none idle."""
    nodes = _nodes()
    parts = (1 / count for count in range(1, sharing(gpus))) if gpus else ()
    return next((part for part in parts if _room(nodes, cpus, part, server_cpus) >= actors), gpus)


def room(cpus: float, gpus: float, server_cpus: float = 0.0, memory: float = 0.0) -> int:
    """Return the number of client actors that fit into the present cluster beside a server."""
    return _room(_nodes(), cpus, gpus, server_cpus, memory)


def _room(nodes: list[dict[str, float]], cpus: float, gpus: float, server_cpus: float, memory: float = 0.0) -> int:
    actors = 0
    for node in nodes:
        free = node.get("CPU", 0.0)
        taken = min(server_cpus, free)
        server_cpus -= taken
        fit = int((free - taken) / cpus + 1e-9)
        if gpus:
            whole = int(node.get("GPU", 0.0))
            fit = min(fit, whole // int(gpus) if gpus > 1 else whole * sharing(gpus))
        if memory and "memory" in node:
            fit = min(fit, int(node["memory"] / memory))
        actors += fit
    return actors


def require_room(
    actors: int, cpus: float, gpus: float, address: str | None, server_cpus: float = 0.0, memory: float = 0.0
) -> None:
    """Raise a ConfigError if the server can never fit on this node, or the client actors into a local cluster.

    Before Ray starts only a local cluster is checked.
    """
    if not ray.is_initialized() and not is_own(address):
        return
    if server_cpus > (here := _nodes()[0].get("CPU", 0.0)):
        raise ConfigError(
            f"run.server_cpus: {server_cpus:g} is not valid. Allowed: at most {here:g}, the CPUs of this node"
        )
    if is_own(address) and actors > room(cpus, gpus, server_cpus, memory):
        asked, found = compared(actors, cpus, gpus, server_cpus, memory)
        lower = "run.actors, run.cpus, run.gpus or run.memory" if memory else "run.actors, run.cpus or run.gpus"
        raise ConfigError(f"run: {asked} do not fit: this machine has {found}. Hint: lower {lower}")


def compared(actors: int, cpus: float, gpus: float, server_cpus: float, memory: float = 0.0) -> tuple[str, str]:
    """Describe what client actors and a server need, and the room for them in the present cluster."""
    server = f" and a server of {server_cpus:g} CPUs" if server_cpus else ""
    sums = {kind: sum(node.get(kind, 0.0) for node in _nodes()) for kind in ("CPU", "GPU", "memory")}
    total = f"{sums['CPU']:g} CPUs, {sums['GPU']:g} GPUs" + (f", {sums['memory'] / 1e9:.3g} GB" if memory else "")
    each = f"{cpus:g} CPUs, {gpus:g} GPUs and {memory / 1e9:.3g} GB" if memory else f"{cpus:g} CPUs and {gpus:g} GPUs"
    some = f"{actors} client actor{'s' * (actors > 1)}"
    return (f"{some} of {each}{server}", f"room for {room(cpus, gpus, server_cpus, memory)} ({total})")


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
