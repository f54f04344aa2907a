"""FML: two rounds against plain torch in float64, and its identities bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from independent import DATA, MIX, assert_close, batches, experiment, network, tensors, visited
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.tensors import Params, below, nbytes
from rayfl.testing.tiny import assert_same, run, simulate


def asked(**options: Any) -> Any:
    return experiment(method={"name": "fml"} | options)


def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    p = a.softmax(1)
    return (p * (p.log() - b.log_softmax(1))).sum(1).mean()


@pytest.mark.parametrize("options", [{"alpha": 0.3, "beta": 0.6}, {"detach": False, "reduction": "mean"}])
def test_rounds_are_plain_torch_s(float64: None, tmp_path: Path, options: dict[str, Any]) -> None:
    """Two, with an optimizer per network. The common network is the digits_cnn of capacity 0.2."""
    simulation = simulate(asked(weight="samples", **options), tmp_path)
    method = simulation.method
    a, b = options.get("alpha", 0.5), options.get("beta", 0.5)
    shared, classes = not options.get("detach", True), 4 if "reduction" in options else 1
    own: dict[int, Params] = {}
    common, small = simulation.state["common"], method.common_net  # pyright: ignore
    for round in range(2):
        sums, total = {name: torch.zeros_like(t) for name, t in common.items()}, 0
        for client in visited(simulation, round):
            net = client.net.model.own_net(client.net)  # pyright: ignore
            capacity = simulation.clients.capacity(client.id, 0, round)
            start = own.get(client.id) or below("own", method.initial(capacity))  # pyright: ignore
            mine, theirs = network(net, start).train(), network(small, common).train()
            for x, y in batches(client.data, client.seed, 2, 5):
                z, u = mine(x), theirs(x)
                of_mine = a * F.cross_entropy(z, y) + (1 - a) * kl(u if shared else u.detach(), z) / classes
                of_theirs = b * F.cross_entropy(u, y) + (1 - b) * kl(z if shared else z.detach(), u) / classes
                mine.zero_grad()
                theirs.zero_grad()
                of_mine.backward(retain_graph=True)
                of_theirs.backward()
                descended(mine)
                descended(theirs)
            own[client.id] = tensors(mine)
            total += len(client.data)
            for name, t in tensors(theirs).items():
                sums[name] += len(client.data) * t
        common = {name: t / total for name, t in sums.items()}
    run(simulation)
    assert_close(simulation.state["common"], common, exact=True)
    for id, kept in own.items():
        assert_close(below("own", simulation.client_states.get(id)["own"]), kept, exact=True)  # pyright: ignore


@torch.no_grad()
def descended(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter -= 0.05 * parameter.grad  # pyright: ignore


def test_without_divergence_networks_are_trained_alone(tmp_path: Path) -> None:
    """A client's own network is FedProto's without attraction, bit for bit."""
    # batches of more than 20 samples have the same kernels for a network and for a pair
    sections = {"model": MIX | {"features": 6}, "training": {"batch_size": 21}}
    one = simulate(experiment(method={"name": "fml", "alpha": 1, "beta": 0.5}, **sections), tmp_path / "fml")
    other = simulate(experiment(method={"name": "fedproto", "attraction": 0}, **sections), tmp_path / "fedproto")
    run(one)
    run(other)
    for id in one.client_states.owners:
        mine = below("own", one.client_states.get(id)["own"])  # pyright: ignore
        assert_same(mine, other.client_states.get(id)["own"])  # pyright: ignore


def test_then_the_common_network_is_fedavg_s(tmp_path: Path) -> None:
    """Bit for bit, from the same start."""
    model, clients = "digits_cnn", {"capacities": [1.0]}
    one = simulate(experiment(method={"name": "fml", "alpha": 0.5, "beta": 1}, model=model, clients=clients), tmp_path)
    other = simulate(
        experiment(method={"name": "fedavg", "weight": "uniform"}, model=model, clients=clients), tmp_path / "fedavg"
    )
    one.state = {"common": other.state["params"] | one.method.common_net.statistics()}  # pyright: ignore
    run(one)
    run(other)
    assert_same({n: one.state["common"][n] for n in other.state["params"]}, other.state["params"])


def test_the_common_network_travels_and_the_own_one_is_deployed(tmp_path: Path) -> None:
    simulation = simulate(asked(common=0.3), tmp_path)
    [line] = run(simulation, 1)
    assert line["bytes_up"] == line["bytes_down"] == len(visited(simulation, 0)) * nbytes(simulation.state["common"])
    pairs = simulation.method.task.nets
    assert simulation.method.common_net == pairs[0.3].model.own_net(pairs[0.3])  # pyright: ignore
    samples = sum(sum(len(y) for _, y in batches(c.data, c.seed, 2, 5)) * c.net.macs for c in visited(simulation, 0))
    assert line["train_flops"] == 6 * samples
    for id in simulation.client_states.owners:
        client_state, capacity = simulation.client_states.get(id), simulation.clients.capacity(id, 0, 0)
        deployed = simulation.method.deploy(simulation.state, 1, capacity, client_state)
        assert deployed.net == pairs[capacity].model.own_net(pairs[capacity])  # pyright: ignore
        assert_same(deployed.params | (deployed.statistics or {}), below("own", client_state["own"]))  # pyright: ignore


def test_requirements() -> None:
    with pytest.raises(ConfigError, match=r"method.common: 0.7 is not valid. Allowed: .*0.3, 0.2"):
        asked(common=0.7)
    with pytest.raises(ConfigError, match=r"clients.assignment: .*'dynamic'"):
        experiment(method={"name": "fml"}, clients={"capacities": [0.3, 0.2], "assignment": "dynamic"}, data=DATA)
    with pytest.raises(ConfigError, match="alpha"):
        asked(alpha=2)
