"""Runs on instructions: FedIT with one client is a plain loop, and Ray and resumed runs have the serial bits."""

import pytest
import torch
import torch.nn.functional as F
from chats import causal, tasks, tokenizer
from crews import on_ray, resized, result
from helpers import run, simulate

from rayfl.core.net import Net, load, params_of
from rayfl.core.seeds import stream, torch_generator
from rayfl.data import Instructions
from rayfl.data.samples import ClientData
from rayfl.testing.tiny import tiny


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("language")
    return {
        "model": causal(root / "llama"),
        "tokenizer": tokenizer(root / "tokenizer"),
        "rows": tasks(root / "rows.jsonl", 30),
    }


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYFL_CACHE", str(tmp_path / "cache"))


def experiment(places, **sections):
    base = {"name": "causal_lm", "weights": places["model"], "checkpointing": True}
    given = {
        "data": Instructions(train=places["rows"], tokenizer=places["tokenizer"], max_length=96, label="task"),
        "model": {"name": "lora", "base": base, "rank": 4, "alpha": 8, "targets": "all-linear"},
        "training": {"optimizer": "adamw", "lr": 0.01, "batch_size": 4, "steps": 3, "accumulate": 2},
        "clients": {"count": 4, "cohort": 3, "capacities": [1, 0.5]},
        "partition": {"name": "dirichlet", "alpha": 1.0, "min_samples": 2},
        "evaluation": {"every": 2, "scores": [{"name": "generated", "max_new_tokens": 2}]},
    }
    return tiny(**given | sections)


def test_fedit_with_one_client_is_a_plain_training_loop(places, tmp_path):
    """That of peft: AdamW on the adapters, losses of batches of answers. Its loss and gradient are those of peft
    (test_causal.py)."""
    clients = {"count": 1, "cohort": 1, "capacities": [1]}
    spec = experiment(places, method="fedit", clients=clients, partition={"name": "iid"}, rounds=1)
    simulation = simulate(spec, tmp_path / "run")
    model, start = spec.model, {name: t.clone() for name, t in simulation.state["params"].items()}
    run(simulation)

    federation = simulation.data
    rows = torch.from_numpy(federation.train[0].astype("int64"))
    data = {name: torch.from_numpy(t)[rows] for name, t in spec.data.arrays().train.items()}
    module = Net(model).build().train()
    load(module, start)
    optimizer = torch.optim.AdamW(module.parameters(), 0.01, weight_decay=0)
    generator = torch_generator(stream(spec.seed, "local", 0, 0), "batches")
    for x, y in ClientData(data, federation.prepare, federation.goal).batches(3, 4, generator):
        optimizer.zero_grad()
        F.cross_entropy(module(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    for name, t in params_of(module).items():
        torch.testing.assert_close(simulation.state["params"][name], t, rtol=0, atol=1e-6)
        assert not torch.equal(t, start[name])


def test_a_resumed_run_has_the_same_bits(places, tmp_path):
    spec = experiment(places, method="flexlora")
    whole = result(simulate(spec, tmp_path / "whole"))
    begun = simulate(spec, tmp_path / "begun")
    first = run(begun, 1)
    begun.save(tmp_path / "checkpoints")
    again = simulate(spec, tmp_path / "again")
    again.restore(tmp_path / "checkpoints")
    lines, *bits = result(again)
    assert (first + lines, *bits) == whole


@pytest.mark.ray
@pytest.mark.slow
def test_ray_equals_serial(places, actors, group, tmp_path):
    """With one actor and two: losses, generated answers, the state."""
    specs = {name: experiment(places, method=name) for name in ("flexlora", "hetlora")}
    serial = {name: result(simulate(spec, tmp_path / name)) for name, spec in specs.items()}
    for count in (2, 1):
        pool = resized(actors, group, count)
        for name, spec in specs.items():
            assert result(on_ray(pool, spec, tmp_path / f"{name}-{count}")) == serial[name], (name, count)
