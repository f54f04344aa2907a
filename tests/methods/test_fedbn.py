"""FedBN: two rounds against plain torch, without norms it is FedAvg, traffic by hand, and what a norm is."""

from pathlib import Path
from typing import Any

import pytest
from helpers import model_of
from personal import assert_equal_states, sgd, two_rounds

from rayfl.core.net import Net
from rayfl.core.tensors import Params, nbytes
from rayfl.methods.personal.fedbn import norms_of
from rayfl.testing.tiny import assert_same, run, simulate, tiny

NORMS = {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}


@pytest.mark.parametrize("size", ["largest", "own"])
@pytest.mark.parametrize("weight", ["samples", "uniform"])
@pytest.mark.usefixtures("float64")
def test_rounds_are_plain_torch_s(tmp_path: Path, size: str, weight: str) -> None:
    def work(received: Params, own: Params | None, client: Any) -> tuple[Params, Params]:
        trained = sgd(received | (own or {}), client)
        return trained, {name: trained.pop(name) for name in NORMS}

    simulation, whole, states = two_rounds(tmp_path, {"name": "fedbn", "size": size, "weight": weight}, work)
    assert_equal_states(simulation, whole, states)
    assert all((whole[name] == name.endswith("weight")).all() for name in NORMS)


def test_without_norms_it_is_fedavg(tmp_path: Path) -> None:
    """Equal bit for bit, without client states."""
    runs = []
    for method in ({"name": "fedavg", "size": "own"}, {"name": "fedbn", "size": "own", "weight": "samples"}):
        experiment = tiny(method=method, model={"name": "digits_cnn", "norm": "none"}, training={"momentum": 0.9})
        simulation = simulate(experiment, tmp_path / method["name"])
        runs.append((run(simulation), simulation.state))
        assert not simulation.client_states.files
    assert runs[0][0] == runs[1][0]
    assert_same(runs[1][1], runs[0][1])


def test_traffic_by_hand(tmp_path: Path) -> None:
    """Capacity 0.3 has norms of 10 and 20 channels: 60 numbers, which are sent once per client."""
    simulation = simulate(tiny(rounds=2, method="fedbn", clients={"cohort": 6}), tmp_path)
    whole = nbytes(simulation.state["params"])
    first, second = run(simulation)
    assert (first["bytes_down"], first["bytes_up"]) == (6 * whole, 6 * (whole - 4 * 60))
    assert (second["bytes_down"], second["bytes_up"]) == (6 * (whole - 4 * 60), 6 * (whole - 4 * 60))


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("digits_cnn", 4),
        ({"name": "digits_cnn", "norm": "group"}, 4),
        ({"name": "digits_cnn", "norm": "none"}, 0),
        ({"name": "vit_b_16", "layers": 2, "heads": 2, "head_width": 8, "patch": 4}, 10),
    ],
    ids=str,
)
def test_norms_of_all_kinds_are_found(model: Any, count: int) -> None:
    """A block of a vision transformer has two norms, and its end has one."""
    found = norms_of(Net(model_of(model)))
    assert len(found) == count
    assert all(len(Net(model_of(model)).layout.shapes[name]) == 1 for name in found)
