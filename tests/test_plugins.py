"""A user's own package beside an installed rayfl: the blocks of PLUGINS.md as they stand, outside the source tree."""

import json
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from processes import ROOT

from rayfl.results.folder import RunFolder

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("uv") is None, reason="uv builds the wheel and the environment"),
]

TEXT = (ROOT / "rayfl" / "PLUGINS.md").read_text()
FILES = {name: f"{body}\n" for name, body in re.findall(r"```\w+\n# (\S+)\n(.*?)\n```", TEXT, re.S)}
COMMANDS = re.search(r"```sh\n(.*?)\n```", TEXT, re.S)
SECONDS = 500


@dataclass(frozen=True)
class Outside:
    """A folder with the package, and an environment with the wheel."""

    folder: Path
    environment: Path

    def run(self, *command: str | Path, folder: Path | None = None) -> str:
        """Return the output of a command of the environment, which must succeed."""
        done = self.start(*command, folder=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, *command: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess:
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "RAY_ADDRESS", "MLFLOW_TRACKING_URI")
        known = {name: value for name, value in os.environ.items() if name not in hidden}
        settings = {"PATH": f"{self.environment / 'bin'}:{known['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        return subprocess.run(
            [str(self.environment / "bin" / str(command[0])), *map(str, command[1:])],
            cwd=folder or self.folder,
            env=known | settings,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )


def uv(*arguments: str | Path) -> None:
    done = subprocess.run(["uv", *map(str, arguments)], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """The dependencies are those of this process: the environment has nothing of its own but the wheel."""
    folder, environment = tmp_path_factory.mktemp("outside"), tmp_path_factory.mktemp("environment") / "env"
    uv("build", "--wheel", "--out-dir", folder / "dist", ROOT)
    [wheel] = (folder / "dist").glob("*.whl")
    uv("venv", environment)
    uv("pip", "install", "--no-deps", "--python", environment, wheel)
    [site] = environment.glob("lib/*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    for name, body in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(body)
    return Outside(folder, environment)


def numbers(folder: Path) -> list[dict]:
    """The lines of a run, without their seconds and sums."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "sum")} for line in lines]


def test_the_wheel_is_what_is_imported(outside):
    at = outside.run("python", "-c", "import rayfl.driver; print(rayfl.__file__)")
    assert Path(at.strip()).is_relative_to(outside.environment)


def test_a_package_of_every_kind_runs_on_ray(outside):
    """The commands as they stand; the run has the bits of one in a single process."""
    assert COMMANDS
    said = [outside.run(*command.split()) for command in COMMANDS[1].splitlines()]
    assert re.search(r"my_pkg.methods:FedPer +FedPer \(Arivazhagan et al., arXiv 1912.00818\)", said[0])
    assert re.search(r"my_pkg.gated:Gated +A perceptron with gates\s+hidden: 64", said[0])
    assert said[1] == "my_experiment.yaml: valid run of my_pkg.methods:FedPer\n"
    assert "my_pkg.methods:FedPer" in said[2]
    ran = outside.folder / "runs" / "my_experiment"
    assert {"accuracy_mean", "WorstClass_mean", "local_WorstClass_worst"} <= set(numbers(ran)[-1])
    assert json.loads((ran / "run.json").read_text())["facts"]["judge"] == "local_accuracy_mean"
    curve = (outside.folder / "curve.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in curve] == ["round", "2", "4"]
    outside.run("rayfl", "run", "my_experiment.yaml", "--name", "serial", "--set", "run.executor=serial")
    assert numbers(outside.folder / "runs" / "serial") == numbers(ran)


def test_what_is_wrong_in_a_package_is_said_as_of_ours(outside):
    given = yaml.safe_load(FILES["my_experiment.yaml"])
    mistakes = {
        "model: {name: my_pkg.models:SmallCNN, chanels: 3}": "unknown key 'chanels'. Did you mean 'channels'?",
        "model: {name: my_pkg.models:SmallCNN, channels: many}": "'many' is not valid. Allowed: a whole number",
        "model: my_pkg.models:SmalCNN": "has no attribute 'SmalCNN'). Allowed: package.module:Class",
        "method: my_pkg.models:SmallCNN": "is not a subclass of rayfl.methods.base:Method. Allowed: its subclasses",
    }
    paths = [outside.folder / f"wrong{i}.yaml" for i in range(len(mistakes))]
    for path, mistake in zip(paths, mistakes, strict=True):
        path.write_text(yaml.safe_dump(given | yaml.safe_load(mistake)))
    done = outside.start("rayfl", "check", *paths)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (2, len(mistakes)), done.stderr
    for path, said, line in zip(paths, mistakes.values(), lines, strict=True):
        assert line.startswith(f"error: {path}: m") and said in line


def test_the_notebook(outside):
    said = outside.run("python", "notebook.py")
    assert said.splitlines()[0] == "round" and "local_accuracy_mean" in said
    assert (outside.folder / "curves.png").exists()
    assert (outside.folder / "exported" / "model.pt2").exists()
    assert len((outside.folder / "notebook.csv").read_text().splitlines()) == 1 + 4


def test_a_folder_of_images(outside):
    generator = np.random.default_rng(0)
    for label in ("dark", "light"):
        place = outside.folder / "pictures" / label
        place.mkdir(parents=True)
        for i in range(30):
            pixels = generator.integers(100, size=(12, 10, 3), dtype=np.uint8) + (100 if label == "light" else 0)
            Image.fromarray(pixels.astype(np.uint8)).save(place / f"{i}.png")
    given = yaml.safe_load(FILES["my_experiment.yaml"]) | {
        "data": {"name": "folder", "root": "pictures", "size": 32},
        "clients": {"count": 4, "cohort": 2},
        "run": {"executor": "serial"},
    }
    (outside.folder / "pictures.yaml").write_text(yaml.safe_dump(given))
    outside.run("rayfl", "run", "pictures.yaml")
    assert "local_accuracy_mean" in numbers(outside.folder / "runs" / "pictures")[-1]


def test_a_sweep_of_own_classes(outside):
    """Every trial's processes have the package. As JSON: nothing of Ray's or MLflow's is between the lines."""
    experiment = yaml.safe_load(FILES["my_experiment.yaml"])
    experiment["listeners"][0]["path"] = str(outside.folder / "trial.csv")
    plan = {
        "experiment": experiment | {"evaluation": {"every": 2, "local_holdout": 0.2}, "run": {"actors": 1}},
        "rows": {"per": {}, "avg": {"method": "fedavg"}},
        "search": {"metric": "local_validation_accuracy_mean"},
    }
    (outside.folder / "my_sweep.yaml").write_text(yaml.safe_dump(plan))
    done = outside.start("rayfl", "sweep", "my_sweep.yaml", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    of = {kind: [e for e in events if e["event"] == kind] for kind in {e["event"] for e in events}}
    assert of["started"][0]["trials"] == 2
    assert sorted(e["status"] for e in of["trial"]) == ["finished"] * 2 + ["running"] * 2
    assert len(of.get("round", []) + of["evaluated"]) == 2 * 4
    results = {outside.folder / e["path"]: e for e in of["result"]}
    assert len(results) == 2
    for path, event in results.items():
        assert RunFolder.open(path).result.items() - {("method", event["label"])} <= event.items()
    assert [e["status"] for e in of["ended"]] == ["finished"]
    assert events.index(of["result"][0]) > events.index(of["ended"][0])
    table = (outside.folder / "runs" / "my_sweep" / "results.csv").read_text()
    assert {line.partition(",")[0] for line in table.splitlines()} == {"method", "per", "avg"}


def test_the_default_sweep_is_found_in_an_empty_folder(outside, tmp_path):
    said = outside.run("rayfl", "check", "quickstart", folder=tmp_path)
    assert "valid sweep with 4 rows" in said and str(outside.environment) in said.replace("\n", "")
    assert not [*tmp_path.iterdir()]


def test_entry_points_give_short_names(outside, tmp_path):
    uv("pip", "install", "--no-deps", "--python", outside.environment, outside.folder)
    try:
        (tmp_path / "exp.yaml").write_text(FILES["my_experiment.yaml"].replace('"my_pkg.methods:FedPer"', "my_fedper"))
        assert re.search(r"\n  my_fedper +FedPer \(Arivazhagan", outside.run("rayfl", "list", folder=tmp_path))
        outside.run("rayfl", "run", "exp.yaml", "--set", "run.executor=serial", folder=tmp_path)
        lines = numbers(tmp_path / "runs" / "exp")
        assert lines[-1]["round"] == 4 and "local_WorstClass_mean" in lines[-1]
    finally:
        uv("pip", "uninstall", "--python", outside.environment, "my_pkg")


def test_the_contract_suite_by_one_import(outside):
    said = outside.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_pkg.py")
    assert re.search(r"\d\d passed", said)
