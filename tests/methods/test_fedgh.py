"""FedGH: two rounds against plain torch in float64, logistic regression on class means, and traffic by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from independent import DATA, MIX, assert_close, batches, descend, experiment, network, tensors, visited

from rayfl.config import ConfigError
from rayfl.core.seeds import stream, torch_generator
from rayfl.core.tensors import Params
from rayfl.models.features import classifier_path, tapped
from rayfl.testing.methods import rows_of
from rayfl.testing.tiny import assert_same, run, simulate

SIZE = 6
PROJECTED = MIX | {"features": SIZE}
SERVER = {"epochs": 3, "batch_size": 4, "lr": 0.2}


def asked(**options: Any) -> Any:
    return experiment(method={"name": "fedgh", "server": SERVER} | options, model=PROJECTED)


def features_of(client: Any, given: Params) -> dict[int, torch.Tensor]:
    """Return the mean features of a client's classes."""
    module, [(x, y)] = network(client.net, given).eval(), client.data.plain(1000)
    with torch.no_grad(), tapped(module, classifier_path(client.net)) as tap:
        module(x)
        return {j: tap.features[y == j].mean(0) for j in sorted(set(y.tolist()))}


def test_rounds_are_plain_torch_s(float64: None, tmp_path: Path) -> None:
    simulation = simulate(asked(), tmp_path)
    method, head = simulation.method, simulation.state["head"]
    own: dict[int, Params] = {}
    for round in range(2):
        pairs = {}
        for client in visited(simulation, round):
            path, capacity = classifier_path(client.net), simulation.clients.capacity(client.id, 0, round)
            start = own.get(client.id) or method.initial(capacity)  # pyright: ignore
            module = network(client.net, start | {f"{path}.{name}": t for name, t in head.items()})
            descend(module, batches(client.data, client.seed, 2, 5), F.cross_entropy, 0.05)
            own[client.id] = tensors(module)
            pairs |= {(client.id, j): mean for j, mean in features_of(client, own[client.id]).items()}
        h, y = torch.stack([pairs[key] for key in sorted(pairs)]), torch.tensor([j for _, j in sorted(pairs)])
        head = trained(head, h, y, stream(0, "refine", round))
    run(simulation)
    assert_close(simulation.state["head"], head, exact=True)
    assert set(simulation.state) == {"head"}
    for id, kept in own.items():
        assert_close(simulation.client_states.get(id)["own"], kept, exact=True)  # pyright: ignore


def trained(head: Params, h: torch.Tensor, y: torch.Tensor, seed: int) -> Params:
    """Logistic regression, with gradients by hand: (p - e_y) h^T."""
    w, b = head["weight"], head["bias"]
    for epoch in range(3):
        for rows in torch.randperm(len(y), generator=torch_generator(seed, "student", epoch)).split(4):
            slope = ((h[rows] @ w.T + b).softmax(1) - F.one_hot(y[rows], len(w))) / len(rows)
            w, b = w - 0.2 * slope.T @ h[rows], b - 0.2 * slope.sum(0)
    return {"weight": w, "bias": b}


def test_clients_that_do_not_train_send_the_features_of_the_start(float64: None, tmp_path: Path) -> None:
    """With one architecture the head is logistic regression on class means of one extractor."""
    sections = {"model": "digits_cnn", "clients": {"capacities": [1.0]}, "training": {"steps": None, "epochs": 0}}
    simulation = simulate(experiment(method={"name": "fedgh", "server": SERVER}, **sections), tmp_path)
    start, head = simulation.method.initial(1.0), simulation.state["head"]  # pyright: ignore
    pairs = {}
    for client in visited(simulation, 0):
        pairs |= {(client.id, j): mean for j, mean in features_of(client, start).items()}
    h, y = torch.stack([pairs[key] for key in sorted(pairs)]), torch.tensor([j for _, j in sorted(pairs)])
    run(simulation, 1)
    assert_close(simulation.state["head"], trained(head, h, y, stream(0, "refine", 0)), exact=True)


def test_a_device_has_its_own_extractor_and_the_global_head(tmp_path: Path) -> None:
    simulation = simulate(asked(), tmp_path)
    run(simulation)
    for id in simulation.client_states.owners:
        capacity, kept = simulation.clients.capacity(id, 0, 0), simulation.client_states.get(id)
        deployed = simulation.method.deploy(simulation.state, 2, capacity, kept)
        path = classifier_path(deployed.net)
        found = deployed.params | (deployed.statistics or {})
        assert_same({name: found[f"{path}.{name}"] for name in ("weight", "bias")}, simulation.state["head"])
        assert not torch.equal(kept["own"][f"{path}.weight"], found[f"{path}.weight"])  # pyright: ignore
        rest = {name: t for name, t in kept["own"].items() if not name.startswith(f"{path}.")}  # pyright: ignore
        assert_same({name: found[name] for name in rest}, rest)


def test_traffic(tmp_path: Path) -> None:
    """Down C (D + 1) numbers, up D + 1 per class of the client."""
    simulation = simulate(asked(), tmp_path)
    for round in range(2):
        clients = visited(simulation, round)
        [line] = run(simulation, 1)
        held = [len(set(rows_of(simulation, c.id).samples["y"].tolist())) for c in clients]
        assert line["bytes_up"] == 4 * (SIZE + 1) * sum(held)
        assert line["bytes_down"] == 4 * 4 * (SIZE + 1) * len(clients)
        assert line["server_flops"] == 6 * 4 * SIZE * 3 * sum(held)


def test_requirements() -> None:
    with pytest.raises(ConfigError, match=r"16 of capacity 0.3, 128 of capacity 0.2.*Hint: set model.features"):
        experiment(method={"name": "fedgh"})
    vit = {"name": "vit_b_16", "layers": 1, "heads": 5, "head_width": 100, "patch": 8}
    sections = {"model": {"name": "mix", "networks": {"0.3": vit, "0.2": "lenet5_caffe"}}}
    with pytest.raises(ConfigError, match=r"some classifiers have no bias: 2 in that of capacity 0.3, 1 in .*0.2"):
        experiment(method={"name": "fedgh"}, data=DATA | {"shape": [1, 16, 16]}, **sections)
