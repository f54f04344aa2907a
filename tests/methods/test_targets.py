"""Every method with numbers or with several labels as targets: it trains, or refuses in a sentence."""

import itertools
import math

import pytest
import torch
from helpers import NESTED, message, simulate, tiny

from rayfl.core.seeds import torch_scope
from rayfl.data import InMemory, Numbers
from rayfl.data.goal import LabelSets
from rayfl.listeners import EarlyStopping
from rayfl.methods import METHODS
from rayfl.methods.distillation import DISTILLATION
from rayfl.testing.networks import MIX

LABELLED = {"share": 0.25, "labeled": True}


def images(target):
    """Images whose targets are the means of their halves, or whether these are positive."""
    with torch_scope(0):
        x = torch.randn(200, 1, 8, 8)
    y = x.flatten(2).unflatten(2, (2, -1)).mean((1, 3)) * 100 + 50
    return InMemory(x, y if target == "numbers" else (y > 50).int(), target=target, public=LABELLED)


def sections(name, target):
    """Return a tiny experiment of a method."""
    given = {"model": MIX if name in DISTILLATION else "digits_cnn"} | NESTED.get(name, {})
    given["data"] = images(target)
    if given["model"] is not MIX and "lora" in str(getattr(given["model"], "name", "")):
        given["model"] = {"name": "lora", "base": "liang_mlp", "targets": ["hidden1"], "rank": 10}
    given["clients"] = given.get("clients", {}) | {"cohort": 2}
    short = dict(METHODS[name].contract.short)
    return given | {"method": {"name": name, **short}, "partition": "iid", "rounds": 1, "evaluation": {"holdout": 0.2}}


@pytest.mark.parametrize(("name", "target"), list(zip(METHODS, itertools.cycle(("numbers", "labels")), strict=False)))
def test_a_method_trains_or_says_why_not(name, target, tmp_path):
    """Methods of a family, which are neighbours, take turns."""
    given = sections(name, target)
    method = METHODS[name](**given["method"])
    if method.needs_classes:
        assert message(lambda: tiny(**given)) == (
            f"test: method: {name} needs one class per sample, because {method.needs_classes}. The targets of data set "
            f"arrays are {target}. Allowed: a data set of classes, or another method such as heterofl"
        )
        return
    simulation = simulate(tiny(**given), tmp_path)
    line = simulation.run_round()
    assert line["refused"] == 0 and math.isfinite(line["train_loss"])
    scores = simulation.data.goal.scores
    assert type(simulation.data.goal) is (Numbers if target == "numbers" else LabelSets)
    found = [
        line[f"{split}{score.label}_mean"]
        for score in scores
        for split in ("", "local_")
        if f"{split}{score.label}_mean" in line
    ]
    assert found and all(map(math.isfinite, found))


@pytest.mark.parametrize(
    ("name", "options", "needs"),
    [
        ("depthfl", {"distill": False}, False),
        ("depthfl", {}, True),
        ("scalefl", {}, False),
        ("scalefl", {"gamma": 0.5}, True),
        ("fjord", {}, False),
        ("fjord", {"distill": True}, True),
        ("feddf", {}, True),
        ("fedmd", {}, False),
        ("fedpm", {}, False),
    ],
)
def test_distillation_between_classes_needs_them(name, options, needs):
    assert bool(METHODS[name](**options).needs_classes) == needs


def test_scores_of_other_targets_are_refused():
    given = {"data": images("numbers"), "partition": "iid", "evaluation": {"scores": ["macro_f1"]}}
    assert message(lambda: tiny(**given)) == (
        "test: evaluation.scores: macro_f1 scores targets of kind class, and those of data set arrays are numbers. "
        "Allowed: mse, mae, r2"
    )


def test_a_smaller_error_is_better(tmp_path):
    experiment = tiny(data=images("numbers"), partition="iid", run={"patience": 1}, evaluation={"every": 1})
    assert experiment.chosen_by == "validation_mse_mean"
    found = experiment.metrics()
    assert (found["mse_mean"].better, found["mae_worst"].better, found["r2_mean"].better) == ("min", "min", "max")
    assert experiment.facts()["scores"] == {"mse": "min", "mae": "min", "r2": "max"}
    [own] = tiny(data=images("numbers"), partition="iid", listeners=["early_stopping"]).all_listeners()
    for stopping in (*experiment.all_listeners(), own):
        assert isinstance(stopping, EarlyStopping)
        assert (stopping.metric, stopping.mode) == ("validation_mse_mean", "min")
    line = simulate(experiment, tmp_path).run_round()
    capacities = [line[f"mse_{c}"] for c in ("0.3", "0.2", "0.1")]
    assert line["mse_worst"] == max(capacities) and line["r2_worst"] == min(
        line[f"r2_{c}"] for c in ("0.3", "0.2", "0.1")
    )
