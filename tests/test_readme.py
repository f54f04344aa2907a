"""What the README shows is true: its example method runs, its commands, files and options exist."""

import inspect
import re
from pathlib import Path

import helpers
import yaml

from rayfl import cli
from rayfl.experiment import DATASETS, METHODS, parse_experiment

README = Path("README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_example_method_is_the_one_that_the_contract_suite_runs():
    [example] = [block for block in blocks("python") if "class " in block]
    assert inspect.getsource(helpers.PersonalHead) in example


def test_the_example_config_is_valid(tmp_path):
    from rayfl.tuning import load_sweep

    [example] = blocks("yaml")
    (tmp_path / "example.yaml").write_text(example)
    plan = load_sweep(tmp_path / "example.yaml")
    assert list(plan.rows) == ["heterofl", "fedrolex"] and plan.search.seeds == (0, 1, 2)


def test_every_command_is_there():
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    assert set(re.findall(r"`rayfl (\w+)", README)) == names


def test_every_method_and_data_set_is_named():
    assert all(f"`{name}`" in README for name in METHODS)
    assert all(name in README for name in DATASETS)


def test_files_that_it_names_exist():
    for path in re.findall(r"`((?:rayfl|tests|scripts|clusters|tune_configs|\.github)/[\w./]*)`", README):
        assert Path(path).exists(), path
    for path in re.findall(r"\]\(([^)h][^)]*)\)", README):
        assert Path(path).exists(), path


def test_every_shipped_config_runs_a_round(tmp_path):
    for path in sorted(Path("tune_configs").glob("*.yaml")):
        given = yaml.safe_load(path.read_text())
        short = given["experiment"] | {"rounds": 1, "run": {"executor": "serial"}}
        experiment = parse_experiment(short, str(path))
        assert len(helpers.run(helpers.simulate(experiment, tmp_path / path.stem))) == 1
