"""FedKD: the compression by hand, two rounds against plain torch in float64, and traffic."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from independent import MIX, assert_close, batches, experiment, network, tensors, visited

from rayfl.config import ConfigError
from rayfl.core.tensors import Params, below, nbytes
from rayfl.methods.base import Visit
from rayfl.methods.distillation.fedkd import truncated
from rayfl.models.features import classifier_path, tapped
from rayfl.testing.methods import rows_of
from rayfl.testing.tiny import run, simulate

PROJECTED = MIX | {"features": 6}


def asked(**options: Any) -> Any:
    return experiment(method={"name": "fedkd", "energy_rounds": 2} | options, model=PROJECTED, rounds=3)


def test_the_rank_is_the_smallest_with_the_energy() -> None:
    """Squares 9, 4 and 1: of 14, 0.9 needs two values (13 / 14), 0.93 all three, 0.5 one."""
    old = torch.ones(8, 9, dtype=torch.float64)
    difference = torch.zeros(8, 9, dtype=torch.float64)
    difference[0, 0], difference[1, 1], difference[2, 2] = 3, 2, 1
    for energy, rank in ((0.5, 1), (0.9, 2), (0.93, 3), (1.0, 3)):
        found, numbers = truncated({"w": old + difference}, {"w": old}, energy)
        kept = difference.clone()
        kept[rank:] = 0
        torch.testing.assert_close(found["w"], old + kept)
        assert numbers == rank * (8 + 9 + 1)


def test_what_is_not_smaller_travels_as_it_is() -> None:
    """A square of full rank, a vector and a matrix of one row. No change takes no numbers."""
    new = {"w": torch.eye(4), "b": torch.rand(7), "row": torch.rand(1, 5)}
    found, numbers = truncated(new, {name: torch.zeros_like(t) for name, t in new.items()}, 0.9)
    assert all(found[name] is t for name, t in new.items())
    assert numbers == 16 + 7 + 5
    assert truncated({"w": new["w"]}, {"w": new["w"]}, 0.9)[1] == 0


def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    p = a.softmax(1)
    return (p * (p.log() - b.log_softmax(1))).sum(1).mean()


def compressed(new: Params, old: Params, energy: float) -> Params:
    """By the eigenvalues of the difference's Gram matrix."""
    found = {}
    for name, t in new.items():
        found[name] = t
        if t.dim() > 1:
            d = (t - old[name]).flatten(1)
            values, vectors = torch.linalg.eigh(d @ d.T)
            values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
            rank = next(r for r in range(1, len(values) + 1) if values[:r].sum() >= energy * values.sum())
            if rank * (sum(d.shape) + 1) < t.numel():
                found[name] = old[name] + (vectors[:, :rank] @ vectors[:, :rank].T @ d).view_as(t)
    return found


@pytest.mark.parametrize("detach", [False, True])
def test_rounds_are_plain_torch_s(float64: None, tmp_path: Path, detach: bool) -> None:
    simulation = simulate(asked(detach=detach, energy=[0.5, 0.9]), tmp_path)
    method, common = simulation.method, simulation.state["common"]
    small = method.common_net  # pyright: ignore
    own: dict[int, Params] = {}

    def constant(t: torch.Tensor) -> torch.Tensor:
        return t.detach() if detach else t

    for round in range(2):
        energy, sums, count = (0.7, 0.9)[round], {name: torch.zeros_like(t) for name, t in common.items()}, 0
        for client in visited(simulation, round):
            net = client.net.model.own_net(client.net)  # pyright: ignore
            capacity = simulation.clients.capacity(client.id, 0, round)
            start = own.get(client.id) or method.initial(capacity)  # pyright: ignore
            mentor, mentee = network(net, below("own", start)).train(), network(small, common).train()
            w = start["project.weight"].clone().requires_grad_()
            parameters = [*mentor.parameters(), *mentee.parameters(), w]
            for x, y in batches(client.data, client.seed, 2, 5):
                with tapped(mentor, classifier_path(net)) as t, tapped(mentee, classifier_path(small)) as s:
                    z, u = mentor(x), mentee(x)
                h, v = t.features, s.features @ w.T
                both = F.cross_entropy(z, y) + F.cross_entropy(u, y)
                of_mentor = kl(constant(u), z) + ((h - constant(v)) ** 2).mean()
                of_mentee = kl(constant(z), u) + ((constant(h) - v) ** 2).mean()
                slopes = torch.autograd.grad(both + (of_mentor + of_mentee) / constant(both), parameters)
                with torch.no_grad():
                    for parameter, slope in zip(parameters, slopes, strict=True):
                        parameter -= 0.05 * slope
            own[client.id] = {f"own.{name}": t for name, t in tensors(mentor).items()}
            own[client.id]["project.weight"] = w.detach()
            for name, t in compressed(tensors(mentee), common, energy).items():
                sums[name] += t
            count += 1
        common = compressed({name: t / count for name, t in sums.items()}, common, energy)
    run(simulation, 2)
    assert_close(simulation.state["common"], common, exact=True)
    for id, kept in own.items():
        assert_close(simulation.client_states.get(id)["own"], kept, exact=True)  # pyright: ignore


def test_with_energy_one_the_mean_is_that_of_the_networks(float64: None, tmp_path: Path) -> None:
    """Of the trained networks. A full rank is never more numbers than the network has."""
    one = simulate(asked(energy=[1, 1]), tmp_path / "one")
    method, common = one.method, one.state["common"]
    sums = {name: torch.zeros_like(t) for name, t in common.items()}
    for selection, clients in one.cohort().values():
        for client in clients:
            [visit] = [c for c in visited(one, 0) if c.id == client.id]
            work = Visit(client, selection, rows_of(one, client.id), None, visit.seed)
            given = method.initial(client.capacity) | {f"common.{n}": t for n, t in common.items()}  # pyright: ignore
            trained, _ = method.trained(given, work, loss=method.pair_loss(work))  # pyright: ignore
            for name, t in below("common", trained).items():
                sums[name] += t / 4
    [line] = run(one, 1)
    assert_close(one.state["common"], sums, exact=True)
    assert 0 < line["bytes_up"] <= 4 * nbytes(common) / 2


def test_the_traffic_is_of_the_factors(tmp_path: Path) -> None:
    """Clients that were there in the round before get the compressed update, the others the whole network."""
    simulation = simulate(asked(energy=[0.5, 0.5]), tmp_path)
    whole, before, sizes = nbytes(simulation.state["common"]), set(), 0
    for round in range(3):
        ids = {client.id for client in visited(simulation, round)}
        [line] = run(simulation, 1)
        assert line["bytes_down"] == whole * len(ids - before) + sizes * len(ids & before)
        assert 0 < line["bytes_up"] < whole * len(ids) / 2
        before, sizes = ids, 4 * int(simulation.state["numbers"]["down"])
        assert 0 < sizes < whole


def test_the_energy_rises() -> None:
    method = asked(energy=[0.5, 0.9], energy_rounds=4).bound()
    assert [round(method.energy_at(r), 9) for r in (0, 1, 3, 9)] == [0.6, 0.7, 0.9, 0.9]


def test_requirements() -> None:
    with pytest.raises(ConfigError, match=r"16 of capacity 0.3, 128 of capacity 0.2.*Hint: set model.features"):
        experiment(method={"name": "fedkd"})
    with pytest.raises(ConfigError, match="energy"):
        asked(energy=[0, 1])
