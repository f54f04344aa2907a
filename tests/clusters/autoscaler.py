"""Ray's autoscaler on the head of a cluster made by `ray up`, with its configuration.

Two nodes of a kind are asked for and installed, then one is ended. Writes JSON: those that were made, and are left.
"""

import json
import sys
import time
from pathlib import Path

from ray.autoscaler._private.providers import _get_node_provider
from ray.autoscaler.v2.instance_manager.config import FileConfigReader, Provider
from ray.autoscaler.v2.instance_manager.node_provider import NodeProviderAdapter
from ray.autoscaler.v2.instance_manager.ray_installer import RayInstaller
from ray.core.generated.instance_manager_pb2 import Instance, NodeKind

kind, head_address, answer = sys.argv[1:]
reader = FileConfigReader(str(Path.home() / "ray_bootstrap_config.yaml"), skip_content_hash=False)
config = reader.get_cached_autoscaling_config()
assert config.provider == Provider.UNKNOWN
node_provider = _get_node_provider(config.get_provider_config(), config.get_config("cluster_name"))
cloud = NodeProviderAdapter(v1_provider=node_provider, config_reader=reader)


def workers() -> dict:
    return {name: node for name, node in cloud.get_non_terminated().items() if node.node_kind == NodeKind.WORKER}


def until(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        errors = cloud.poll_errors()
        assert not errors and time.monotonic() < deadline, errors
        time.sleep(0.1)


for request in ("1", "2"):
    # moto makes one spot node, whatever is asked
    cloud.launch(shape={kind: 1}, request_id=request)
until(lambda: len(workers()) == 2)
made = sorted(workers())
for name in made:
    RayInstaller(node_provider, config).install_ray(
        Instance(instance_id=name, cloud_instance_id=name, instance_type=kind, node_kind=NodeKind.WORKER), head_address
    )
cloud.terminate(ids=made[:1], request_id="3")
until(lambda: made[0] not in workers())
Path(answer).write_text(json.dumps({"made": made, "left": sorted(workers())}))
