"""What the README shows is true: its example method runs, its commands, files and options exist."""

import inspect
import re
from pathlib import Path

import helpers

from rayfl import cli, costs
from rayfl.experiment import DATASETS, METHODS, parse_experiment
from rayfl.tuning import load_sweep

README = Path("README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_example_method_is_the_one_that_the_contract_suite_runs():
    [example] = [block for block in blocks("python") if "class " in block]
    assert inspect.getsource(helpers.PersonalHead) in example


def test_the_example_config_is_valid(tmp_path):
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
    """Every row is valid. One of each method in a file trains a step, on made-up images where it wants real ones,
    unless another file's did on the same network, or it takes more than 10^9 multiply-adds."""
    worked = set()
    for path in sorted(Path("tune_configs").glob("*.yaml")):
        plan = load_sweep(path)
        experiments = [plan.example(row) for row in plan.rows]
        for experiment in {e.method.name: e for e in experiments}.values():
            given, model, method = experiment.plain(), experiment.model.blank, experiment.bound_method()
            kind = (method.name, model.name, model.classes, method.task.server)
            if kind in worked or costs.flops(model, method.task.server) > 1e9:
                continue
            worked.add(kind)
            given["model"] = model.model_dump()
            if experiment.data.name != "digits":
                shape = {"shape": list(experiment.data.shape), "classes": model.classes, "size": experiment.data.size}
                given["data"] = {"name": "synthetic", "samples": 2000, "test_samples": 200} | shape
            given["clients"] |= {"cohort": 1}
            given["training"] |= {"steps": 1, "batch_size": 2}
            given["run"] = {"executor": "serial"}
            simulation = helpers.simulate(parse_experiment(given, str(path)), tmp_path / path.stem)
            line = simulation._train()
            assert line["steps"] == 1 and line["refused"] == 0
