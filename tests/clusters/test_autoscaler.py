"""Ray's own autoscaler, with a provider that starts raylets on this machine in place of instances: nodes come because
trials wait for them, and go when they are idle."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray
import yaml
from helpers import TINY
from processes import descendants, free_port, until

from rayfl.engine.devices import ONLY_DECLARED
from rayfl.engine.on_ray import status
from rayfl.engine.on_ray.cluster import cluster
from rayfl.results.folder import RunFolder, runs

HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
"""Name of the head for the provider."""
HEAD_TYPE = "ray.head.default"
IDLE_MINUTES = 0.1


@pytest.fixture
def autoscaled(tmp_path):
    """The address of a head without CPUs for clients, which may grow by two workers."""
    port = free_port()
    address = f"{ray.util.get_node_ip_address()}:{port}"
    config = {
        "cluster_name": "grows",
        "max_workers": 2,
        "idle_timeout_minutes": IDLE_MINUTES,
        # by its name, fake_multinode, the launcher would look for a file that Ray's wheel lacks
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "head_node_id": HEAD,
            "gcs_address": address,
            "launch_multiple": True,
            "disable_node_updaters": True,
        },
        "available_node_types": {
            HEAD_TYPE: {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": {"CPU": 2, "GPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2},
        },
        "head_node_type": HEAD_TYPE,
        # what the launcher fills in for clouds that it knows
        "auth": {},
        "upscaling_speed": 1.0,
        "file_mounts": {},
        "cluster_synced_files": [],
    } | {
        f"{part}_commands": []
        for part in ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    }
    file = tmp_path / "grows.json"
    file.write_text(json.dumps(config))
    # short, because it is part of sockets' names
    log = tmp_path / "head.log"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as place, log.open("w") as said:
        head = subprocess.Popen(
            [Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={port}"]
            + ["--num-cpus=1", f"--autoscaling-config={file}", "--include-dashboard=false", f"--temp-dir={place}"],
            env=os.environ
            | {ONLY_DECLARED: "1"}
            | {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD}
            # as `ray up` starts a head
            | {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD, "RAY_NODE_TYPE_NAME": HEAD_TYPE},
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        started = []
        try:
            until(lambda: "Ray runtime started" in log.read_text())
            yield address
            started = descendants(head.pid)
        finally:
            head.terminate()
            head.wait()
            for process in started:
                subprocess.run(["kill", "-9", str(process)], capture_output=True)


@pytest.mark.ray
@pytest.mark.slow
def test_a_cluster_grows_from_nothing_for_trials_and_shrinks_after_them(autoscaled, start, tmp_path):
    experiment = TINY | {"rounds": 6, "run": {"chunk": 1, "actors": 1, "gpus": 1}}
    config = tmp_path / "small.yaml"
    rows = {name: {"method": name} for name in ("heterofl", "fedrolex")}
    config.write_text(yaml.safe_dump({"experiment": experiment, "rows": rows}))
    with cluster(autoscaled):
        assert [node.gpus for node in status.nodes()] == [0]
        sweep = start(
            config, "--output", tmp_path / "runs", "--address", autoscaled, program=(sys.executable, "scripts/sweep.py")
        )
        until(lambda: sum(node.is_alive for node in status.nodes()) == 3, sweep)
        code, printed = sweep.finish()
        assert code == 0, printed
        until(lambda: sum(node.is_alive for node in status.nodes()) == 1)
    found = [run for run in runs(tmp_path / "runs") if run.kind == "run"]
    assert sorted((run.label, run.status) for run in found) == [("fedrolex", "finished"), ("heterofl", "finished")]
    assert RunFolder.open(tmp_path / "runs" / "small").status == "finished"
