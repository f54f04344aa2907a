"""APFL: two rounds against plain torch, FedAvg and Standalone inside it, the share by hand, traffic and work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from independent import batches
from personal import BATCH, LR, STEPS, assert_equal_states, built, close, gradients, two_rounds
from torch import nn

from rayfl.core.tensors import Params, nbytes
from rayfl.methods.personal.apfl import Pair
from rayfl.testing.tiny import assert_same, run, simulate, tiny


@pytest.mark.parametrize("size", ["largest", "own"])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.usefixtures("float64")
def test_rounds_are_plain_torch_s(tmp_path: Path, size: str, adaptive: bool) -> None:
    def work(received: Params, kept: Any, client: Any) -> tuple[Params, Any]:
        w = {name: t.clone() for name, t in received.items()}
        v = {name: t.clone() for name, t in (kept["local"] if kept else received).items()}
        alpha = kept["alpha"] if kept else 0.4
        for i, (x, y) in enumerate(batches(client.data, client.seed, STEPS, BATCH)):
            mixed = {name: alpha * v[name] + (1 - alpha) * w[name] for name in w}
            g, h = (gradients(built(client.net, params), x, y) for params in (w, mixed))
            new = alpha
            if adaptive and i == 0:
                inner = sum(float(((v[name] - w[name]) * h[name]).sum()) for name in w)
                new = min(max(alpha - LR * (inner + 0.02 * alpha), 0.0), 1.0)
            w = {name: t - LR * g[name] for name, t in w.items()}
            v = {name: t - LR * alpha * h[name] for name, t in v.items()}
            alpha = new
        own = {name: alpha * v[name] + (1 - alpha) * w[name] for name in w}
        return w, {"own": own, "local": v, "alpha": alpha}

    method = {"name": "apfl", "size": size, "alpha": 0.4, "adaptive": adaptive, "weight": "samples"}
    simulation, whole, states = two_rounds(tmp_path, method, work)
    for group in ("own", "local"):
        assert_equal_states(simulation, whole, {id: kept[group] for id, kept in states.items()}, group)
    if adaptive:
        # in its first round a client's two networks are equal, so that alpha only decays
        assert len({kept["alpha"] for kept in states.values()}) == 3
        for id, kept in states.items():
            close(simulation.client_states.get(id)["share"], {"alpha": torch.tensor(kept["alpha"])})  # pyright: ignore


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("size", ["largest", "own"])
def test_the_server_s_network_is_fedavg_s(tmp_path: Path, alpha: float, size: str) -> None:
    """With momentum and weight decay. At the share 0 clients use the networks that they send, and bits are equal.
    Otherwise steps go over two networks in one vector, at whose other end a processor can round otherwise."""
    training, states = {"momentum": 0.9, "weight_decay": 0.1}, []
    for method in ({"name": "fedavg", "weight": "uniform"}, {"name": "apfl", "alpha": alpha}):
        simulation = simulate(tiny(method=method | {"size": size}, training=training), tmp_path / method["name"])
        run(simulation)
        states.append(simulation.state)
    if alpha == 0:
        assert_same(states[1], states[0])
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", ["largest", "own"])
@pytest.mark.usefixtures("float64")
def test_at_the_share_one_clients_are_alone(tmp_path: Path, size: str) -> None:
    """Standalone's networks, which had the same start because all clients are there in the first round."""
    runs = []
    for method in ({"name": "standalone"}, {"name": "apfl", "alpha": 1}):
        experiment = tiny(method=method | {"size": size}, clients={"cohort": 6})
        runs.append(simulate(experiment, tmp_path / method["name"]))
        for _ in range(2):
            runs[-1].train()
            runs[-1].round += 1
    alone, apfl = runs
    for id in alone.client_states.files:
        close(apfl.client_states.get(id)["own"], alone.client_states.get(id)["own"])  # pyright: ignore


def test_a_share_stays_within_its_bounds() -> None:
    """A step of alpha for f(m) = 3 m on one weight: v - w = 2, so 0.5 - lr (6 + 0.01)."""
    for lr, expected in ((0.01, 0.5 - 0.0601), (1.0, 0.0), (-1.0, 1.0)):
        pair: Any = Pair(nn.Linear(1, 1, bias=False), torch.tensor(0.5), True)
        with torch.no_grad():
            pair.w.weight.fill_(1)
            pair.v.weight.fill_(3)
        output, mixed = pair(torch.ones(1, 1))
        assert (output.item(), mixed.item()) == (1, 2)
        (3 * mixed).sum().backward()
        assert (pair.v.weight.grad.item(), pair.w.weight.grad) == (1.5, None)  # pyright: ignore
        pair.adapt(lr)
        assert pair.alpha.item() == pytest.approx(expected)
        pair.adapt(lr)
        assert pair.alpha.item() == pytest.approx(expected)


@pytest.mark.parametrize(("alpha", "networks"), [(0, 1), (0.5, 2)])
def test_traffic_and_work_by_hand(tmp_path: Path, alpha: float, networks: int) -> None:
    """The traffic of FedAvg; two networks train unless the share is 0."""
    simulation = simulate(tiny(rounds=1, method={"name": "apfl", "alpha": alpha}), tmp_path)
    whole, net = nbytes(simulation.state["params"]), simulation.method.task.server
    trained = sum(min(10, len(simulation.data.train[id])) for id in simulation.clients.sample(0, 0))
    [line] = run(simulation)
    assert (line["bytes_down"], line["bytes_up"], line["steps"]) == (4 * whole, 4 * whole, 8)
    assert line["train_flops"] == networks * 6 * net.macs * trained
