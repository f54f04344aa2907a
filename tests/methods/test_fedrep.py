"""FedRep: two rounds against plain torch, what each part of a round trains, and work by hand."""

from pathlib import Path
from typing import Any

import pytest
from personal import assert_equal_states, sgd, two_rounds

from rayfl.config import ConfigError
from rayfl.core.seeds import stream
from rayfl.core.tensors import Params
from rayfl.testing.tiny import assert_same, made_up_for, model_of, run, simulate, tiny

HEAD = {"head.weight", "head.bias"}


@pytest.mark.parametrize("size", ["largest", "own"])
@pytest.mark.parametrize("weight", ["samples", "uniform"])
@pytest.mark.usefixtures("float64")
def test_rounds_are_plain_torch_s(tmp_path: Path, size: str, weight: str) -> None:
    def work(received: Params, own: Params | None, client: Any) -> tuple[Params, Params]:
        start = received | (own or {})
        tuned = sgd(start, client, HEAD, stream(client.seed, "personal"), epochs=3)
        trained = sgd(tuned, client, start.keys() - HEAD)
        return trained, {name: trained.pop(name) for name in HEAD}

    method = {"name": "fedrep", "size": size, "weight": weight, "head_epochs": 3}
    assert_equal_states(*two_rounds(tmp_path, method, work))


def test_without_steps_of_the_representation_only_heads_change(tmp_path: Path) -> None:
    """With momentum and weight decay: what does not train does not decay either."""
    training = {"steps": None, "epochs": 0, "momentum": 0.9, "weight_decay": 0.1}
    simulation = simulate(tiny(method={"name": "fedrep", "head_epochs": 2}, training=training), tmp_path)
    before = {name: t.clone() for name, t in simulation.state["params"].items()}
    simulation.train()
    for name, t in simulation.state["params"].items():
        assert (t - before[name]).abs().max() < 1e-6
    for id in simulation.client_states.files:
        own = simulation.client_states.get(id)["own"]  # pyright: ignore
        assert own.keys() == HEAD and all((own[name] != before[name]).any() for name in HEAD)


def test_without_epochs_of_the_head_it_keeps_its_start(tmp_path: Path) -> None:
    training = {"momentum": 0.9, "weight_decay": 0.1}
    simulation = simulate(tiny(method={"name": "fedrep", "head_epochs": 0}, training=training), tmp_path)
    before = simulation.method.init()["params"]
    simulation.train()
    for id in simulation.client_states.files:
        assert_same(simulation.client_states.get(id)["own"], {name: before[name] for name in before if name in HEAD})  # pyright: ignore
    assert (simulation.state["params"]["conv1.weight"] != before["conv1.weight"]).any()


def test_work_by_hand(tmp_path: Path) -> None:
    """A step of the head: a forward pass, and the gradients by its 4 x 39 weights and by its input."""
    experiment = tiny(rounds=1, method={"name": "fedrep", "head_epochs": 3})
    simulation = simulate(experiment, tmp_path)
    net, cohort = simulation.method.task.server, simulation.clients.sample(0, 0)
    samples = sum(len(simulation.data.train[id]) for id in cohort)
    trained = sum(min(10, len(simulation.data.train[id])) for id in cohort)
    [line] = run(simulation)
    assert line["steps"] == 2 * len(cohort)
    assert net.layout.shapes["head.weight"] == (4, 39)
    assert line["train_flops"] == 6 * net.macs * trained + 3 * samples * (2 * net.macs + 4 * 4 * 39)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu"])
def test_a_model_without_a_trained_classifier_is_refused(name: str) -> None:
    frozen = {"name": "lora", "base": model_of("lora").base, "targets": ["q.linear"], "head": "frozen"}
    with pytest.raises(ConfigError, match=f"model: lora has no trained classifier, which method {name} keeps on"):
        tiny(method=name, model=frozen, data=made_up_for(model_of("lora")))
