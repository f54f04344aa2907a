"""Ray's own autoscaler, with a provider that starts raylets on this machine in place of instances: nodes come because
trials wait for them, and go when they are idle."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from helpers import TINY
from processes import descendants, until

from rayfl.engine import status
from rayfl.engine.cluster import cluster
from rayfl.results.folder import RunFolder, runs

HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
"""What the provider takes the head's id for."""
IDLE_MINUTES = 0.1


@pytest.fixture
def autoscaled(tmp_path):
    """The address of a head without CPUs for clients, which may grow by two workers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = {
        "cluster_name": "grows",
        "max_workers": 2,
        "idle_timeout_minutes": IDLE_MINUTES,
        "provider": {"type": "fake_multinode", "head_node_id": HEAD, "gcs_address": address, "launch_multiple": True},
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": {"CPU": 2, "GPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2},
        },
        "head_node_type": "ray.head.default",
    }
    file = tmp_path / "grows.json"
    file.write_text(json.dumps(config))
    # short, because it is part of sockets' names
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as place:
        head = subprocess.Popen(
            [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
            + [f"--port={address.partition(':')[2]}", "--num-cpus=1", f"--autoscaling-config={file}"]
            + ["--include-dashboard=false", f"--temp-dir={place}"],
            env=os.environ
            | {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD},
            stdout=(tmp_path / "head.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        started = []
        try:
            until(lambda: "Ray runtime started" in (tmp_path / "head.log").read_text())
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
