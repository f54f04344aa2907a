"""FedBABU: two rounds against plain torch, its head, equal training of FedRep with a head that keeps its start, and
work by hand."""

from pathlib import Path
from typing import Any

import pytest
from personal import assert_equal_states, sgd, two_rounds

from rayfl.core.seeds import stream
from rayfl.core.tensors import Params
from rayfl.testing.tiny import assert_same, run, simulate, tiny

HEAD = {"head.weight", "head.bias"}


@pytest.mark.parametrize("tuned", ["head", "all"])
@pytest.mark.parametrize("size", ["largest", "own"])
@pytest.mark.usefixtures("float64")
def test_rounds_are_plain_torch_s(tmp_path: Path, tuned: str, size: str) -> None:
    def work(received: Params, own: Params | None, client: Any) -> tuple[Params, Params]:
        names = HEAD if tuned == "head" else received.keys()
        personal = sgd(received, client, names, stream(client.seed, "personal"), epochs=3)
        trained = sgd(received, client, received.keys() - HEAD)
        return {name: trained[name] for name in received.keys() - HEAD}, {name: personal[name] for name in names}

    method = {"name": "fedbabu", "size": size, "tuned": tuned, "tuning_epochs": 3}
    assert_equal_states(*two_rounds(tmp_path, method, work))


def test_the_head_never_changes_and_fine_tuning_changes_no_bit_of_the_body(tmp_path: Path) -> None:
    """Fine-tuned or not, and as FedRep whose heads keep their start. With momentum and weight decay."""
    training = {"momentum": 0.9, "weight_decay": 0.1}
    methods: list[dict[str, Any]] = [
        {"name": "fedbabu", "tuned": "all"},
        {"name": "fedbabu", "tuning_epochs": 0},
        {"name": "fedrep", "head_epochs": 0},
    ]
    states = []
    for i, method in enumerate(methods):
        simulation = simulate(tiny(method=method, training=training), tmp_path / str(i))
        run(simulation)
        states.append(simulation.state)
        assert_same({n: simulation.state["params"][n] for n in sorted(HEAD)}, heads_at_start(simulation))
    assert_same(states[1], states[0])
    assert_same(states[2], states[0])


def heads_at_start(simulation: Any) -> Params:
    start = simulation.method.init()["params"]
    return {name: start[name] for name in sorted(HEAD)}


def test_a_client_is_evaluated_with_its_head_and_the_present_body(tmp_path: Path) -> None:
    simulation = simulate(tiny(method="fedbabu", rounds=3), tmp_path)
    simulation.train()
    simulation.round += 1
    id = next(iter(simulation.client_states.files))
    kept = simulation.client_states.get(id)
    assert kept is not None and kept["own"].keys() == HEAD
    simulation.state = simulation.state | {"params": {n: t + 1 for n, t in simulation.state["params"].items()}}
    found = simulation.method.deploy(simulation.state, 1, 0.3, kept).params
    body = {n: t for n, t in found.items() if n not in HEAD}
    assert_same(body, {n: simulation.state["params"][n] for n in body})
    assert_same({n: found[n] for n in kept["own"]}, kept["own"])


@pytest.mark.parametrize(("tuned", "backward"), [("head", 4 * 4 * 39), ("all", None)])
def test_work_by_hand(tmp_path: Path, tuned: str, backward: int | None) -> None:
    """A step of the head: a forward pass, and the gradients by its 4 x 39 weights and by its input."""
    simulation = simulate(tiny(rounds=1, method={"name": "fedbabu", "tuned": tuned}), tmp_path)
    net, cohort = simulation.method.task.server, simulation.clients.sample(0, 0)
    samples = sum(len(simulation.data.train[id]) for id in cohort)
    trained = sum(min(10, len(simulation.data.train[id])) for id in cohort)
    [line] = run(simulation)
    passes = 2 * net.macs + (4 * net.macs if backward is None else backward)
    assert line["steps"] == 2 * len(cohort)
    assert line["train_flops"] == 6 * net.macs * trained + 5 * samples * passes
