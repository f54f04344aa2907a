"""FedMRL: two rounds against plain torch in float64, its forward pass by hand, and what a device holds."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from independent import MIX, assert_close, batches, experiment, network, tensors, visited
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.tensors import Params, below, nbytes
from rayfl.models.features import classifier_path, feature_size, tapped
from rayfl.testing.methods import rows_of
from rayfl.testing.tiny import run, simulate

SIZES = {"name": "mix", "networks": {"0.3": {"name": "resnet8", "channels": 4}, "0.2": "digits_cnn"}}
"""16 and 128 features."""


def asked(**options: Any) -> Any:
    return experiment(method={"name": "fedmrl", "features": 5} | options, model=SIZES)


class Three:
    """The two networks and the projection of a client, in torch's own layers."""

    def __init__(self, method: Any, capacity: float, own: Params, common: Params):
        self.nets = (net := method.task.nets[capacity]).model.own_net(net), method.common_net
        self.f, self.g = network(self.nets[0], below("own", own)), network(self.nets[1], common)
        weight, self.bias = own["project.weight"].clone(), own["project.bias"].clone()
        self.weight = weight.requires_grad_()
        self.bias.requires_grad_()

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        paths = [classifier_path(net) for net in self.nets]
        with tapped(self.f, paths[0]) as f, tapped(self.g, paths[1]) as g:
            self.f(x)
            self.g(x)
        r = torch.cat([g.features, f.features], 1) @ self.weight.T + self.bias
        return self.g.get_submodule(paths[1])(r[:, :5]), self.f.get_submodule(paths[0])(r)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [*self.f.parameters(), *self.g.parameters(), self.weight, self.bias]

    @property
    def own(self) -> Params:
        own = {f"own.{name}": t for name, t in tensors(self.f).items()}
        return own | {"project.weight": self.weight.detach().clone(), "project.bias": self.bias.detach().clone()}


@pytest.mark.parametrize("weight", ["samples", "uniform"])
def test_rounds_are_plain_torch_s(float64: None, tmp_path: Path, weight: str) -> None:
    simulation = simulate(asked(weight=weight), tmp_path)
    method, common = simulation.method, simulation.state["common"]
    own: dict[int, Params] = {}
    for round in range(2):
        sums, total = {name: torch.zeros_like(t) for name, t in common.items()}, 0
        for client in visited(simulation, round):
            capacity = simulation.clients.capacity(client.id, 0, round)
            start = own.get(client.id) or method.initial(capacity)  # pyright: ignore
            three = Three(method, capacity, start, common)
            for x, y in batches(client.data, client.seed, 2, 5):
                of_common, of_own = three(x)
                loss = F.cross_entropy(of_common, y) + F.cross_entropy(of_own, y)
                slopes = torch.autograd.grad(loss, three.parameters)
                with torch.no_grad():
                    for parameter, slope in zip(three.parameters, slopes, strict=True):
                        parameter -= 0.05 * slope
            own[client.id] = three.own
            share = len(client.data) if weight == "samples" else 1
            total += share
            for name, t in tensors(three.g).items():
                sums[name] += share * t
        common = {name: t / total for name, t in sums.items()}
    run(simulation)
    assert_close(simulation.state["common"], common, exact=True)
    for id, kept in own.items():
        assert_close(simulation.client_states.get(id)["own"], kept, exact=True)  # pyright: ignore


def test_with_a_projection_of_zeros_and_ones_a_device_is_its_own_network(float64: None, tmp_path: Path) -> None:
    """P = [0 I], b = 0: r = f(x). Otherwise it is the three parts with the newest common network."""
    simulation = simulate(asked(), tmp_path)
    run(simulation)
    method, state = simulation.method, simulation.state
    for id in simulation.client_states.owners:
        capacity, own = simulation.clients.capacity(id, 0, 0), dict(simulation.client_states.get(id)["own"])  # pyright: ignore
        [(x, _)] = rows_of(simulation, id).plain(1000)

        def logits(own: Params, capacity: float = capacity, x: torch.Tensor = x) -> torch.Tensor:
            deployed = method.deploy(state, 2, capacity, {"own": own})
            return network(deployed.net, deployed.params | (deployed.statistics or {})).eval()(x)[1]

        three = Three(method, capacity, own, state["common"])
        three.f.eval()
        three.g.eval()
        torch.testing.assert_close(logits(own), three(x)[1])
        size = feature_size(three.nets[0])
        own["project.weight"] = torch.cat([torch.zeros(size, 5), torch.eye(size)], 1)
        own["project.bias"] = torch.zeros(size)
        torch.testing.assert_close(logits(own), three.f(x))


def test_traffic_and_costs(tmp_path: Path) -> None:
    """The common network up and down. Both classifiers are computed twice."""
    simulation = simulate(asked(), tmp_path)
    [line] = run(simulation, 1)
    clients = visited(simulation, 0)
    assert line["bytes_up"] == line["bytes_down"] == len(clients) * nbytes(simulation.state["common"])
    for net in simulation.method.task.nets.values():
        own, common = net.model.own_net(net), simulation.method.common_net  # pyright: ignore
        size = feature_size(own)
        assert net.macs == own.macs + common.macs + (5 + size) * size + 4 * (5 + size)


def test_requirements() -> None:
    with pytest.raises(
        ConfigError, match=r"method.features: the common network has 128 features, .*capacity 0.3 has 16"
    ):
        asked(features=None)
    asked(features=None, common=0.3)
    with pytest.raises(ConfigError, match=r"clients.assignment: .*'dynamic'"):
        dynamic = {"capacities": [0.3, 0.2], "assignment": "dynamic"}
        experiment(method={"name": "fedmrl"}, model=MIX | {"features": 6}, clients=dynamic)


def test_the_projected_common_network_has_one_classifier() -> None:
    """Of a mix with projections, the common network's is replaced."""
    method = experiment(method={"name": "fedmrl", "features": 3}, model=MIX | {"features": 6}).bound()
    common: Any = method
    layers = [m for m in common.common_net.build().modules() if isinstance(m, nn.Linear)]
    assert [layer.out_features for layer in layers][-2:] == [3, 4] and layers[-2].in_features == 128
