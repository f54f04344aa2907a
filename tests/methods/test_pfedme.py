"""pFedMe: two rounds against plain torch, FedAvg inside it, traffic and work by hand."""

from pathlib import Path
from typing import Any

import pytest
from independent import batches
from personal import BATCH, LR, STEPS, assert_equal_states, built, close, gradients, two_rounds

from rayfl.core.tensors import Params, nbytes
from rayfl.testing.tiny import assert_same, run, simulate, tiny


@pytest.mark.parametrize("size", ["largest", "own"])
@pytest.mark.parametrize(("times", "beta"), [(1, 1.0), (3, 1.0), (3, 1.7)])
@pytest.mark.usefixtures("float64")
def test_rounds_are_plain_torch_s(tmp_path: Path, size: str, times: int, beta: float) -> None:
    def work(received: Params, own: Params | None, client: Any) -> tuple[Params, Params]:
        w = {name: t.clone() for name, t in received.items()}
        theta = {name: t.clone() for name, t in received.items()}
        for x, y in batches(client.data, client.seed, STEPS, BATCH):
            for _ in range(times):
                g = gradients(built(client.net, theta), x, y)
                theta = {name: t - LR * (g[name] + 4 * (t - w[name])) for name, t in theta.items()}
            w = {name: t - 0.1 * 4 * (t - theta[name]) for name, t in w.items()}
        return w, theta

    method = {"name": "pfedme", "size": size, "lam": 4, "eta": 0.1, "inner_steps": times, "beta": beta}
    assert_equal_states(*two_rounds(tmp_path, method, work, beta))


@pytest.mark.usefixtures("float64")
def test_a_copy_that_follows_at_once_is_fedavg_s(tmp_path: Path) -> None:
    """One inner step and eta lambda = 1: w_k is theta_k after every batch, and nothing pulls."""
    runs = []
    for method in ({"name": "fedavg", "size": "own"}, {"name": "pfedme", "lam": 2, "eta": 0.5, "inner_steps": 1}):
        simulation = simulate(tiny(method=method | {"size": "own"}), tmp_path / method["name"])  # pyright: ignore
        for _ in range(2):
            simulation.train()
            simulation.round += 1
        runs.append(simulation)
    fedavg, pfedme = runs
    close(pfedme.state["params"], fedavg.state["params"])


def test_a_client_is_evaluated_with_theta(tmp_path: Path) -> None:
    """And starts its next round from the server's network: its own is not read."""
    simulation = simulate(tiny(rounds=2, method="pfedme", clients={"cohort": 6}), tmp_path)
    run(simulation, 1)
    id = next(iter(simulation.client_states.files))
    kept = simulation.client_states.get(id)
    assert kept is not None
    assert_same(simulation.method.deploy(simulation.state, 1, 0.3, kept).params, kept["own"])
    other = simulate(tiny(rounds=2, method="pfedme", clients={"cohort": 6}), tmp_path / "other")
    run(other, 1)
    for client in other.client_states.files:
        zeros = {name: t * 0 for name, t in kept["own"].items()}  # pyright: ignore
        other.client_states.put(client, 0, {"own": zeros})
    run(simulation)
    run(other)
    assert_same(other.state, simulation.state)


@pytest.mark.parametrize("times", [1, 5])
def test_traffic_and_work_by_hand(tmp_path: Path, times: int) -> None:
    """The traffic and steps of FedAvg, and `inner_steps` times its work."""
    simulation = simulate(tiny(rounds=1, method={"name": "pfedme", "inner_steps": times}), tmp_path)
    whole, net = nbytes(simulation.state["params"]), simulation.method.task.server
    trained = sum(min(10, len(simulation.data.train[id])) for id in simulation.clients.sample(0, 0))
    [line] = run(simulation)
    assert (line["bytes_down"], line["bytes_up"], line["steps"]) == (4 * whole, 4 * whole, 8)
    assert line["train_flops"] == times * 6 * net.macs * trained
