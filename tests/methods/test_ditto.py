"""Ditto: two rounds against plain torch, FedAvg and Standalone inside it, traffic and work by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from personal import assert_equal_states, sgd, two_rounds

from rayfl.core.tensors import Params, nbytes
from rayfl.testing.tiny import assert_same, run, simulate, tiny


@pytest.mark.parametrize("size", ["largest", "own"])
@pytest.mark.parametrize("epochs", [None, 3])
@pytest.mark.usefixtures("float64")
def test_rounds_are_plain_torch_s(tmp_path: Path, size: str, epochs: int | None) -> None:
    def work(received: Params, own: Params | None, client: Any) -> tuple[Params, Params]:
        of: dict[str, Any] = {} if epochs is None else {"epochs": epochs}
        return sgd(received, client), sgd(own or received, client, pull=(received, 0.7), **of)

    method = {"name": "ditto", "size": size, "lam": 0.7, "personal_epochs": epochs, "weight": "samples"}
    assert_equal_states(*two_rounds(tmp_path, method, work))


@pytest.mark.parametrize("size", ["largest", "own"])
def test_without_the_pull_it_is_fedavg_and_standalone(tmp_path: Path, size: str) -> None:
    """The server's network and the clients' own, equal bit for bit, also with momentum, weight decay and clipping. All
    clients are there in the first round, so that their networks have one start."""
    simulations: dict[str, Any] = {}
    for method in ({"name": "fedavg", "weight": "uniform"}, {"name": "standalone"}, {"name": "ditto", "lam": 0}):
        training = {"momentum": 0.9, "weight_decay": 0.1, "clip": 1.0}
        experiment = tiny(method=method | {"size": size}, training=training, clients={"cohort": 6})
        simulations[method["name"]] = simulation = simulate(experiment, tmp_path / method["name"])
        run(simulation)
    fedavg, standalone, ditto = simulations.values()
    assert_same(ditto.state, fedavg.state)
    assert len(ditto.client_states.files) == 6
    for id in ditto.client_states.files:
        assert_same(ditto.client_states.get(id), standalone.client_states.get(id))


def test_a_stronger_pull_keeps_networks_closer(tmp_path: Path) -> None:
    distances = []
    for lam in (0.0, 1.0, 10.0):
        simulation = simulate(tiny(method={"name": "ditto", "lam": lam}, training={"steps": 20}), tmp_path / str(lam))
        received = {name: t.clone() for name, t in simulation.state["params"].items()}
        simulation.train()
        owns = [simulation.client_states.get(id)["own"] for id in simulation.client_states.files]  # pyright: ignore
        distances.append(sum(float((t - received[name]).square().sum()) for own in owns for name, t in own.items()))
    assert distances[0] > 1.2 * distances[1] > 1.5 * distances[2]


def test_traffic_and_work_by_hand(tmp_path: Path) -> None:
    """The traffic of FedAvg, and twice its work; one network's part with other passes for the own network."""
    lines = {}
    for epochs in (None, 3):
        simulation = simulate(
            tiny(rounds=1, method={"name": "ditto", "personal_epochs": epochs}), tmp_path / str(epochs)
        )
        whole, net = nbytes(simulation.state["params"]), simulation.method.task.server
        cohort = simulation.clients.sample(0, 0)
        sizes = [len(simulation.data.train[id]) for id in cohort]
        [line] = run(simulation)
        assert (line["bytes_down"], line["bytes_up"], line["steps"]) == (4 * whole, 4 * whole, 8)
        lines[epochs] = line["train_flops"] / (6 * net.macs)
    trained = sum(min(10, size) for size in sizes)  # pyright: ignore
    assert lines == {None: 2 * trained, 3: trained + 3 * sum(sizes)}  # pyright: ignore


def test_a_client_is_evaluated_with_its_own_network(tmp_path: Path) -> None:
    simulation = simulate(tiny(rounds=1, method="ditto"), tmp_path)
    run(simulation)
    id = next(iter(simulation.client_states.files))
    kept = simulation.client_states.get(id)
    assert kept is not None
    assert_same(simulation.method.deploy(simulation.state, 1, 0.3, kept).params, kept["own"])
    assert not torch.equal(kept["own"]["head.weight"], simulation.state["params"]["head.weight"])  # pyright: ignore
