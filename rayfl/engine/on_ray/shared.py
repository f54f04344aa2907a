"""Check that all nodes of a cluster share a folder. Ray Tune stores trials' checkpoints there; a node with its own disk
would write them to a place that no other node reads."""

from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayfl.config import ConfigError
from rayfl.engine.locks import LOCK


@ray.remote(num_cpus=0, max_retries=0)
def _read(file: str) -> str | None:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError:
        return None


def require_shared(folder: Path) -> None:
    """Raise ConfigError with the nodes that do not see a folder locked by this process (`locks.locked`)."""
    file = folder / LOCK
    here, held = ray.get_runtime_context().get_node_id(), file.read_text(encoding="utf-8")
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in others]
    asked = [_read.options(scheduling_strategy=place).remote(str(file)) for place in places]
    seen = [_sees(ref, held) for ref in asked]
    blind = sorted(node["NodeManagerAddress"] for node, is_seen in zip(others, seen, strict=True) if not is_seen)
    if blind:
        raise _unseen(folder, ", ".join(blind))


def require_seen(file: Path) -> None:
    """Raise ConfigError if this node, which may have joined later, does not see a file of the folder."""
    if not file.exists():
        raise _unseen(file.parent, ray.util.get_node_ip_address())


def _sees(ref: ray.ObjectRef, held: str) -> bool:
    try:
        return ray.get(ref) == held
    except RayError:
        # the node left the cluster
        return True


def _unseen(folder: Path, nodes: str) -> ConfigError:
    return ConfigError(
        f"--output: {folder} is not shared with these nodes: {nodes}. Allowed: a folder that all nodes share "
        "(clusters/README.md), or --storage s3://BUCKET/FOLDER for the files of trials"
    )
