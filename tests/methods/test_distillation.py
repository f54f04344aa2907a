"""Students, and properties of all distillation methods: equal results across actors, resumes and chunks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import saved_inside

from rayfl import costs
from rayfl.config import ConfigError
from rayfl.core.fold import Update
from rayfl.core.tensors import Params
from rayfl.engine.simulation import Simulation
from rayfl.engine.worker import Recipe, Worker
from rayfl.experiment import Experiment
from rayfl.methods import METHODS_KIND
from rayfl.testing.tiny import Shuffled, assert_same, run, simulate, tiny
from rayfl.training import distillation
from rayfl.training.distillation import Distillation, beginning, go_on, is_done, result
from rayfl.training.settings import divergence
from rayfl.training.updates import Updates

PUBLIC = {"name": "synthetic", "samples": 120, "test_samples": 24, "classes": 4, "public": {"share": 0.3}}
SMALL = {"steps": 6, "batch_size": 8, "optimizer": "adam", "lr": 0.01, "patience": 4, "validate_every": 2}


def experiment(method: Any, **sections: Any) -> Experiment:
    given = {"data": PUBLIC, "partition": "iid", "method": method, "evaluation": {"holdout": 0.2}}
    return tiny(**given | sections)


def feddf(**options: Any) -> dict[str, Any]:
    return {"name": "feddf", "distillation": SMALL} | options


# students


def data_with_targets(simulation: Simulation) -> Any:
    worker = simulation.executor.worker  # pyright: ignore
    public = worker.public
    return public.labeled(torch.randn(len(public), 4, generator=torch.Generator().manual_seed(1))), worker.validation


@pytest.mark.parametrize(
    "how",
    [
        Distillation(steps=13, batch_size=8, momentum=0.9, lr=0.05),
        Distillation(epochs=2, batch_size=8, optimizer="adam", lr=0.01, cosine=True, clip=1.0),
        Distillation(steps=13, batch_size=8, lr=0.05, average_from=4, average_every=3),
        Distillation(steps=40, batch_size=8, lr=0.3, patience=6, validate_every=3),
        Distillation(steps=12, batch_size=8, lr=0.3, patience=6, validate_every=3, keep_start=True),
    ],
)
def test_a_student_goes_on_from_any_step_to_the_same_bits(how: Distillation, tmp_path: Path) -> None:
    simulation = simulate(experiment(feddf()), tmp_path)
    data, validation = data_with_targets(simulation)
    net = simulation.method.task.server
    start = beginning(simulation.state["net 0.3"])

    def learned(most: int) -> Params:
        student = start
        while not is_done(student):
            student, _ = go_on(student, net, data, lambda z, t: divergence(t, z, 1.0), how, 7, validation, most)
        return student

    whole = learned(1000)
    assert_same(learned(1), whole)
    assert_same(learned(5), whole)
    assert int(whole["step"]) <= how.steps_of(len(data))
    assert_same(result(whole), {n: whole[f"{kept(how)}.{n}"] for n in sorted(simulation.state["net 0.3"])})


def kept(how: Distillation) -> str:
    return "best" if how.patience else "mean" if how.average_from is not None else "net"


def test_a_student_is_torch_s_own_loop(tmp_path: Path) -> None:
    """SGD with momentum on KL by hand, in the order given by the seed, from the same start."""
    simulation = simulate(experiment(feddf(), model="digits_cnn"), tmp_path)
    data, _ = data_with_targets(simulation)
    net = simulation.method.task.server
    given = simulation.state["net 0.3"]
    how = Distillation(steps=7, batch_size=10, momentum=0.5, lr=0.1)
    student, metrics = go_on(beginning(given), net, data, lambda z, t: divergence(t, z, 2.0), how, 3)
    module = net.build()
    module.load_state_dict({n: t for n, t in given.items() if n in net.layout.shapes}, strict=False)
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, 0.5)
    [(x, y)] = data.plain(1000)
    order = torch.cat(
        [torch.randperm(len(x), generator=distillation.torch_generator(3, "student", e)) for e in range(3)]
    )
    per_epoch = -(-len(x) // 10)
    for step in range(7):
        epoch, place = divmod(step, per_epoch)
        rows = order[epoch * len(x) :][: len(x)][place * 10 : place * 10 + 10]
        optimizer.zero_grad()
        log_p, log_q = F.log_softmax(y[rows] / 2, 1), F.log_softmax(module(x[rows]) / 2, 1)
        ((log_p.exp() * (log_p - log_q)).sum() / len(rows)).backward()
        optimizer.step()
    assert metrics["server_steps"] == 7
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(student[f"net.{name}"], parameter.detach(), rtol=1e-4, atol=1e-6)


# the same bits


def test_a_run_goes_on_from_the_middle_of_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved after every server task, each restored run ends with the same bits."""
    monkeypatch.setattr(distillation, "TASK_STEPS", 2)
    asked = experiment(feddf())
    straight = simulate(asked, tmp_path / "straight")
    lines = run(straight)
    saved = saved_inside(asked, tmp_path)
    assert saved >= 3
    for i in range(1, saved + 1):
        again = simulate(asked, tmp_path / f"again {i}")
        assert again.restore(tmp_path / f"checkpoint {i}") == (1, [])
        assert again.partial_round
        assert run(again) == lines[1:]
        assert_same(again.state, straight.state)


@pytest.mark.parametrize("chunk", [1, 2])
def test_the_order_of_work_changes_no_bit(tmp_path: Path, chunk: int) -> None:
    asked = experiment(feddf())
    serial = simulate(asked, tmp_path / "serial")
    lines = run(serial)
    arrays = asked.data.arrays()

    def shuffled(recipe: Recipe) -> Shuffled:
        return Shuffled(Worker(recipe, arrays))

    other = simulate(experiment(feddf(), run={"chunk": chunk}), tmp_path / "other", shuffled)
    assert run(other) == lines
    assert_same(other.state, serial.state)


def test_steps_or_epochs() -> None:
    for bad in ({"steps": -1}, {"epochs": 0}, {"steps": None}, {"steps": 1, "epochs": 1}):
        with pytest.raises(ConfigError, match="steps|epochs"):
            experiment(feddf(distillation=bad))


def test_the_best_student_or_the_mean() -> None:
    with pytest.raises(ConfigError, match="at most one of patience and average_from"):
        experiment(feddf(distillation=SMALL | {"average_from": 2}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "feddf", "distillation": {"momentum": 0.9}}, "momentum only with optimizer: sgd; optimizer is adam"),
        ({"name": "fedbe", "distillation": {"optimizer": "adam", "momentum": 0.5}}, "momentum only with optimizer"),
        (
            {"name": "fedbe", "distillation": {"steps": 60}},
            "average_from of at most steps = 60, .* average_from is 525",
        ),
        (feddf(distillation=SMALL | {"patience": 0, "keep_start": True}), "keep_start only with patience"),
    ],
)
def test_settings_that_would_do_nothing(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment(given)


def test_adam_replaces_the_paper_s_momentum() -> None:
    adam = {"steps": 9, "optimizer": "adam", "average_from": 9}
    method = METHODS_KIND.read({"name": "fedbe", "distillation": adam}, "method")
    assert method.distillation.momentum == 0  # pyright: ignore
    assert METHODS_KIND.read({"name": "fedbe"}, "method").distillation.momentum == 0.9  # pyright: ignore


@pytest.mark.parametrize("keep_start", [True, False])
def test_the_start_is_a_candidate(keep_start: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores 5 of the start, then 4, 5 and 3: the start, or the second of the validated steps."""
    simulation = simulate(experiment(feddf()), tmp_path)
    data, validation = data_with_targets(simulation)
    scores = iter([5.0, 4.0, 5.0, 3.0][not keep_start :])
    monkeypatch.setattr(distillation, "score_of", lambda *_: next(scores))
    how = Distillation(steps=6, batch_size=8, lr=0.3, patience=6, validate_every=2, keep_start=keep_start)
    start = simulation.state["net 0.3"]
    net = simulation.method.task.server
    student, metrics = go_on(beginning(start), net, data, lambda z, t: divergence(t, z, 1.0), how, 7, validation)
    assert next(scores, None) is None and is_done(student)
    assert int(student["best"]) == (0 if keep_start else 4)
    trained = 36 + 8  # an epoch of 36 samples in 5 steps, and a step of 8
    assert len(data) == 36
    scored = costs.forward_flops(net, len(validation)) * (4 if keep_start else 3)
    assert metrics["server_flops"] == costs.training_flops(net, trained) + scored
    if keep_start:
        assert_same(result(student), dict(sorted(start.items())))


def trained_student(simulation: Simulation, how: Distillation) -> tuple[Any, dict[str, float]]:
    data, validation = data_with_targets(simulation)
    net, start = simulation.method.task.server, simulation.state["net 0.3"]
    return go_on(beginning(start), net, data, lambda z, t: divergence(t, z, 1.0), how, 100, validation)


def test_the_steps_that_are_averaged(tmp_path: Path) -> None:
    """4, 7, 10 and 13."""
    how = Distillation(steps=13, batch_size=8, average_from=4, average_every=3)
    student, _ = trained_student(simulate(experiment(feddf()), tmp_path), how)
    assert int(student["averaged"]) == 4


@pytest.mark.parametrize(("scores", "best", "steps"), [([5, 4, 3], 2, 6), ([3, 4, 4, 5], 7, 7)])
def test_patience_and_the_last_step(
    scores: list[float], best: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 2, 4, 6 and the last, 7, are validated."""
    remaining = iter(scores)
    monkeypatch.setattr(distillation, "score_of", lambda *_: next(remaining))
    how = Distillation(steps=7, batch_size=8, patience=4, validate_every=2)
    student, metrics = trained_student(simulate(experiment(feddf()), tmp_path), how)
    assert (int(student["best"]), metrics["server_steps"]) == (best, steps)


def test_every_step_of_a_student_draws_its_own_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, scope = [], distillation.torch_scope
    simulation = simulate(experiment(feddf()), tmp_path)
    monkeypatch.setattr(distillation, "torch_scope", lambda seed, device: seeds.append(seed) or scope(seed, device))
    trained_student(simulation, Distillation(steps=5, batch_size=8))
    assert len(set(seeds)) == len(seeds) == 5


def test_a_student_of_no_steps_is_its_start(tmp_path: Path) -> None:
    simulation = simulate(experiment(feddf()), tmp_path)
    data, validation = data_with_targets(simulation)
    start, net = simulation.state["net 0.3"], simulation.method.task.server
    student, metrics = go_on(beginning(start), net, data, F.l1_loss, Distillation(steps=0), 7, validation)
    assert is_done(student) and metrics == {"server_flops": 0, "server_steps": 0}
    assert_same(result(student), dict(sorted(start.items())))


@pytest.mark.parametrize("model", ["heterofl_transformer", {"name": "lora", "base": "heterofl_transformer"}])
def test_networks_that_answer_tokens_are_refused(model: Any) -> None:
    """The check runs the network, because adapters do not tell the task of their base."""
    data = {"name": "synthetic_text", "task": "next_token", "public": {"share": 0.3}}
    with pytest.raises(ConfigError, match="does not support networks with outputs per token"):
        tiny(data=data, model=model, partition="iid", method="feddf", clients={"capacities": [1]})


@pytest.mark.parametrize("transform", [{"name": "noise", "deviation": 0.5}, {"name": "quantize", "bits": 1}])
def test_a_variance_that_a_transform_changes_is_not_negative(transform: Any, tmp_path: Path) -> None:
    """Running statistics are sent with a network, and a student's would be NaN."""
    how = {"name": "fedbe", "samples": 2, "distillation": {"steps": 2, "batch_size": 8, "average_from": None}}
    model, data = {"name": "resnet8", "channels": 4}, PUBLIC | {"shape": [1, 8, 8]}
    asked = experiment(how, model=model, data=data, updates={"transforms": [transform]}, rounds=1)
    simulation = simulate(asked, tmp_path)
    assert simulation.train()["refused"] == 0
    variances = [t for n, t in simulation.state["net 0.3"].items() if n.endswith(".running_var")]
    assert min(float(t.min()) for t in variances) >= 0
    while simulation.partial_round or simulation.round == 0:
        simulation.advance()
    assert all(t.isfinite().all() for t in simulation.state["net 0.3"].values())


def test_a_client_whose_teacher_is_not_finite_is_refused() -> None:
    """Finite parameters can give infinite logits, which would become the targets of all clients."""
    update = Update({"net 1": {"w": torch.ones(2)}}, 1.0, derived={"teachers": {"sum": torch.tensor([torch.inf])}})
    assert Updates().unfit(update, 1.0) == "not finite"
    update.derived["teachers"]["sum"] = torch.ones(1)
    assert Updates().unfit(update, 1.0) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"distillation": {"steps": 500}}, {"steps": 500, "epochs": None, "optimizer": "adam", "lr": 1e-3, "clip": 5}),
        ({"distillation": {"epochs": 2, "clip": None}}, {"steps": None, "epochs": 2, "clip": None, "cosine": True}),
        ({}, {"steps": 10_000, "patience": 1000}),
    ],
)
def test_a_part_of_a_section_leaves_the_paper_s_other_settings(given: Any, expected: Any) -> None:
    method = METHODS_KIND.read({"name": "feddf"} | given, "method")
    how = method.distillation.model_dump()  # pyright: ignore
    assert {name: how[name] for name in expected} == expected
    assert METHODS_KIND.read(method.model_dump(mode="json", exclude={"task"}), "method") == method


def test_training_beside_the_round_s_own_is_at_one_rate(tmp_path: Path) -> None:
    """The warm-up and cosine of `training` refer to the round's own steps."""
    labeled = PUBLIC | {"public": {"share": 0.3, "labeled": True}}
    method = {"name": "fedmd", "warmup_epochs": 3, "private_warmup_epochs": 1, "subset": 10}
    asked = experiment(method, data=labeled)
    waved = asked.with_(training=asked.training.model_copy(update={"warmup": 1000, "cosine_rounds": 2}))
    one, other = simulate(asked, tmp_path / "one"), simulate(waved, tmp_path / "other")
    one.train()
    other.train()
    for client in one.client_states.files:
        assert_same(one.client_states.get(client) or {}, other.client_states.get(client) or {})
