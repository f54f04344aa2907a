"""The cluster files are what Ray's own launcher accepts, and hold nothing but where to run."""

from pathlib import Path

import pytest
import yaml

FILES = [path for path in sorted(Path("clusters").glob("*.yaml")) if "provider:" in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ray_accepts(path):
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load(path.read_text()))
    validate_config(config)
    assert config["head_node_type"] in config["available_node_types"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_mounted_is_there(path):
    mounts = yaml.safe_load(path.read_text())["file_mounts"]
    local = [source for source in mounts.values() if not source.startswith("~")]
    assert local and all(Path(source).exists() for source in local)


def test_both_kinds_are_there():
    assert {path.stem for path in FILES} >= {"aws", "local"}


def test_workers_of_aws_scale_from_nothing():
    types = yaml.safe_load(Path("clusters/aws.yaml").read_text())["available_node_types"]
    assert types["gpu-worker"]["min_workers"] == 0 < types["gpu-worker"]["max_workers"]


def test_a_typo_is_refused():
    import jsonschema
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load(Path("clusters/aws.yaml").read_text()) | {"max_worker": 3}
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config(config))
