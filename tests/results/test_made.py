"""Provenance of runs."""

import subprocess
import sys
from importlib.metadata import version

import pytest
from helpers import tiny

import rayfl
from rayfl.results import made
from rayfl.results.folder import RunFolder


@pytest.fixture
def anew():
    """Provenance without the cache."""
    made.here.cache_clear()
    yield made.here
    made.here.cache_clear()


def test_versions_machine_and_command_without_passwords(anew, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/rayfl", "run", "a b.yaml", "--tracking-uri", "http://me:secret@host:1"])
    found = anew()
    assert found.command == "rayfl run 'a b.yaml' --tracking-uri http://host:1"
    assert found.versions["torch"] == version("torch")
    assert found.versions["python"] == sys.version.split()[0]
    assert found.cpu and found.cores >= 1 and found.user and found.host


def test_the_commit_of_a_folder(tmp_path):
    assert made.commit_of(tmp_path) == "none"

    def git(*arguments):
        subprocess.run(("git", "-c", "user.name=x", "-c", "user.email=x", *arguments), cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    clean = made.commit_of(tmp_path)
    assert len(clean) == 12
    (tmp_path / "a").write_text("2")
    assert made.commit_of(tmp_path) == f"{clean}-dirty"


def test_a_missing_program_has_no_output(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert made.commit_of(tmp_path) == "none"


def test_bits_may_differ_on_another_processor_or_torch(anew):
    one = anew()
    assert one.same_bits(one.model_copy(update={"host": "other", "command": "other"}))
    assert not one.same_bits(one.model_copy(update={"cpu": "other"}))
    assert not one.same_bits(one.model_copy(update={"gpus": ("other",)}))
    assert not one.same_bits(one.model_copy(update={"versions": one.versions | {"torch": "0"}}))


def test_a_run_lists_each_driver_process_once(anew, monkeypatch, tmp_path):
    experiment = tiny(rounds=1)
    monkeypatch.setattr(sys, "argv", ["rayfl", "run"])
    rayfl.run(experiment, tmp_path / "run")
    made.here.cache_clear()
    monkeypatch.setattr(sys, "argv", ["rayfl", "run", "--resume"])
    for rounds in (2, 3):
        rayfl.run(experiment.with_(rounds=rounds), tmp_path / "run", resume=True)
    assert [one.command for one in RunFolder.open(tmp_path / "run").made] == ["rayfl run", "rayfl run --resume"]
