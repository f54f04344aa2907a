"""FedPer: two rounds against plain torch, FedPer of all layers is Standalone, traffic by hand, and its layers."""

from pathlib import Path
from typing import Any

import pytest
from helpers import bound
from independent import experiment
from personal import assert_equal_states, sgd, two_rounds

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.tensors import Params, nbytes
from rayfl.methods import METHODS
from rayfl.testing.tiny import assert_same, run, simulate, tiny

FedPer: Any = METHODS["fedper"]
HEAD = {"head.weight", "head.bias"}


@pytest.mark.parametrize("size", ["largest", "own"])
@pytest.mark.parametrize("weight", ["samples", "uniform"])
@pytest.mark.usefixtures("float64")
def test_rounds_are_plain_torch_s(tmp_path: Path, size: str, weight: str) -> None:
    def work(received: Params, own: Params | None, client: Any) -> tuple[Params, Params]:
        trained = sgd(received | (own or {}), client)
        head = {name: trained.pop(name) for name in HEAD}
        return trained, head

    method = {"name": "fedper", "size": size, "weight": weight}
    simulation, whole, states = two_rounds(tmp_path, method, work)
    assert_equal_states(simulation, whole, states)
    assert_same({n: whole[n] for n in HEAD}, {n: simulation.method.init()["params"][n] for n in HEAD})
    id, own = next(iter(states.items()))
    deployed = simulation.method.deploy(simulation.state, 2, 0.3, simulation.client_states.get(id))
    shapes = {name: deployed.params[name].shape for name in own}
    assert shapes == {name: t.shape for name, t in own.items()}


def test_if_all_layers_are_personal_it_is_standalone(tmp_path: Path) -> None:
    """Equal bit for bit, with momentum and weight decay. A run of this is refused, so that the option is set later."""
    training = {"momentum": 0.9, "weight_decay": 0.1, "clip": 1.0}
    layers = ["conv1", "conv2", "norm1", "norm2", "hidden", "head"]
    states = []
    for method in ({"name": "standalone", "size": "own"}, {"name": "fedper", "size": "own"}):
        simulation = simulate(tiny(method=method, training=training), tmp_path / method["name"])
        if method["name"] == "fedper":
            simulation = replaced(simulation, personal=tuple(layers))
        for _ in range(2):
            simulation.train()
            simulation.round += 1
        states.append({id: simulation.client_states.get(id) for id in sorted(simulation.client_states.files)})
    assert states[0].keys() == states[1].keys()
    for one, other in zip(states[0].values(), states[1].values(), strict=True):
        assert_same(other, one)


def replaced(simulation: Any, **options: Any) -> Any:
    """Change options of a simulation's method, without the check of the run."""
    worker = simulation.executor.worker
    method = simulation.method.model_copy(update=options)
    simulation.method = worker.method = method
    simulation.verbs = worker.verbs = type(simulation.verbs)(method)
    return simulation


def test_traffic_by_hand(tmp_path: Path) -> None:
    """digits_cnn at capacity 0.3: 10 channels. The head, 4 x 10 + 4 numbers, is sent once per client."""
    simulation = simulate(tiny(rounds=2, method="fedper", clients={"cohort": 6}), tmp_path)
    whole = nbytes(simulation.state["params"])
    first, second = run(simulation)
    head = 4 * nbytes_of_head(simulation)
    assert (first["bytes_down"], first["bytes_up"]) == (6 * whole, 6 * (whole - head))
    assert (second["bytes_down"], second["bytes_up"]) == (6 * (whole - head), 6 * (whole - head))


def nbytes_of_head(simulation: Any) -> int:
    shapes = simulation.method.task.server.layout.shapes
    (rows, columns), bias = shapes["head.weight"], shapes["head.bias"]
    return rows * columns + bias[0]


def test_layers_are_checked() -> None:
    def refusal(**options: Any) -> str:
        with pytest.raises(ConfigError) as error:
            bound(FedPer(**options), 1.0).check(9, Population())
        return str(error.value)

    assert (
        refusal(personal=["hed"]) == "method.personal: unknown layer 'hed'. Did you mean 'head'? Allowed: head, hidden0"
    )
    assert refusal(personal=["head", "hidden0"]) == (
        "method: no layer of model perceptron is left to average. Allowed: at least one"
    )
    bound(FedPer(personal=["hidden0"]), 1.0).check(9, Population())


def test_capacities_must_be_fixed() -> None:
    with pytest.raises(ConfigError, match="the client state of method fedper fits one network only"):
        experiment({"name": "fedper", "size": "own"}, model="digits_cnn", clients={"assignment": "dynamic"})


def test_a_path_stands_for_the_layers_below_it() -> None:
    method = tiny(method={"name": "fedper", "personal": ["stage4", "head"]}, model={"name": "resnet18", "channels": 8})
    kept = method.bound().kept(method.bound().task.server)  # pyright: ignore
    assert {name.partition(".")[0] for name in kept} == {"stage4", "head"}
