"""The cluster files are what Ray's own launcher accepts, and hold nothing but where to run."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from fakes import program
from ray.autoscaler._private.util import prepare_config, validate_config, with_envs

FILES = [Path("clusters", f"{name}.yaml") for name in ("aws", "gcp", "local")]
WITH_TYPES = [path for path in FILES if path.stem != "local"]


def given(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def every(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", files, ids=lambda path: path.stem)


@every(FILES)
def test_ray_accepts(path):
    config = prepare_config(given(path))
    validate_config(config)
    assert config["head_node_type"] in config["available_node_types"]


@every(FILES)
def test_the_head_can_read_it_again(path):
    """The autoscaler prepares what `ray up` has prepared: common commands would come twice."""
    once = prepare_config(given(path))
    again = prepare_config(json.loads(json.dumps(once)))
    assert again["worker_setup_commands"] == once["worker_setup_commands"] == given(path)["worker_setup_commands"]


@every(FILES)
def test_what_is_mounted_is_there(path):
    mounts = given(path)["file_mounts"]
    local = [source for source in mounts.values() if not source.startswith("~")]
    assert local and all(Path(source).exists() for source in local)
    assert mounts["~/.ray/auth_token"] == "~/.ray/auth_token"


@every(FILES)
def test_the_dashboard_and_mlflow_are_the_heads_alone(path):
    config = given(path)
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][-1]
    assert not [line for line in config["worker_start_ray_commands"] if "head.sh" in line]
    assert "0.0.0.0" not in path.read_text()


@every(FILES)
def test_which_autoscaler_the_head_starts(path, tmp_path):
    """Ray's v2 counts the head among the `min_workers` of its type. Existing machines have one type: one of them would
    never become a worker."""
    program(tmp_path / "ray", '#!/bin/bash\necho "$1 $RAY_enable_autoscaler_v2"')
    # as `ray up` does
    [command] = with_envs(given(path)["head_start_ray_commands"][-1:], {"RAY_enable_autoscaler_v2": "1"})
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(["bash", "-c", command], env=environment, text=True, capture_output=True)
    kinds = prepare_config(given(path))["available_node_types"]
    assert ran.stdout == f"start {0 if len(kinds) == 1 else 1}\n"


@every(FILES)
def test_idle_nodes_go_away(path):
    assert given(path)["idle_timeout_minutes"] == 5


@every(WITH_TYPES)
def test_gpu_workers_come_from_nothing(path):
    config = given(path)
    kinds = config["available_node_types"]
    assert kinds["head"]["max_workers"] == 0 and all(kind["min_workers"] == 0 for kind in kinds.values())
    assert kinds["gpu-worker"]["max_workers"] == config["max_workers"] > 0


def test_nodes_that_aws_takes_back_are_the_default():
    kinds = given(Path("clusters/aws.yaml"))["available_node_types"]
    spot, lasting = kinds["gpu-worker"], kinds["gpu-worker-on-demand"]
    assert spot["node_config"] == lasting["node_config"] | {"InstanceMarketOptions": {"MarketType": "spot"}}
    assert lasting["max_workers"] == 0


def test_a_typo_is_refused():
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config(given(Path("clusters/aws.yaml")) | {"max_worker": 3}))
