"""Trials whose checkpoints lie in S3: moto's, which both the sweep and the trials reach by its address."""

import subprocess

import boto3
import pytest
import yaml
from helpers import TINY
from moto.server import ThreadedMotoServer
from processes import assert_terminated, until

from rayfl.config import ConfigError
from rayfl.results.folder import RunFolder, runs
from rayfl.tuning.stages import checked

BUCKET = "runs"


@pytest.fixture
def bucket(monkeypatch):
    """A bucket with nothing in it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    s3 = boto3.client("s3", region_name="us-east-1")
    s3.create_bucket(Bucket=BUCKET)
    yield lambda: [entry["Key"] for entry in s3.list_objects_v2(Bucket=BUCKET).get("Contents", [])]
    server.stop()


@pytest.mark.slow
def test_a_place_that_is_none_is_refused(bucket, tmp_path):
    for place in ("s3://nobody-has-this/runs", "s4://runs", "runs", str(tmp_path / "file" / "below")):
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="Allowed: s3://BUCKET/FOLDER of a bucket"):
            checked(place)
    assert checked(f"s3://{BUCKET}/rayfl/") == f"s3://{BUCKET}/rayfl"


@pytest.mark.ray
@pytest.mark.slow
def test_a_sweep_goes_on_from_checkpoints_in_s3(bucket, start, tmp_path):
    """The sweep is terminated while its trials run; its own folder has records alone, and the bucket the rest."""
    experiment = TINY | {"rounds": 40, "evaluation": {"every": 10}, "run": {"actors": 1, "checkpoint_seconds": 0}}
    config, folder = tmp_path / "small.yaml", tmp_path / "runs" / "small"
    config.write_text(yaml.safe_dump({"experiment": experiment, "rows": {"heterofl": {"method": "heterofl"}}}))
    arguments = ("sweep", config, "--output", tmp_path / "runs", "--storage", f"s3://{BUCKET}/rayfl", "--no-models")
    first = start(*arguments)

    def has_checkpoints():
        return any("/checkpoint_" in key and "round-" in key for key in bucket())

    until(has_checkpoints, first)
    first.terminate()
    assert_terminated(first, folder)
    [stopped] = [run for run in runs(folder) if run.kind == "run"]
    assert stopped.status == "stopped" and 0 < len(stopped.rounds()) < 40
    code, printed = start(*arguments, "--resume").finish()
    assert code == 0, printed
    [ended] = [run for run in runs(folder) if run.kind == "run"]
    assert (ended.status, len(ended.rounds())) == ("finished", 40)
    assert (ended.path / "checkpoints").is_dir()
    id = RunFolder.open(folder).id
    assert bucket() and all(key.startswith(f"rayfl/{id}/") for key in bucket() if key != "rayfl/")
    left = subprocess.run(["find", str(folder / "tune"), "-type", "f"], capture_output=True, text=True).stdout.split()
    assert sorted(left) == [str(folder / "tune" / "search" / name) for name in ("done", "snapshot.zip", "storage")]
