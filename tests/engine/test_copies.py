"""Copies of the parameters that a round holds at most, counted by torch's profiler."""

import weakref
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from helpers import tiny
from torch import nn
from torch.profiler import ProfilerActivity, profile

import rayfl
from rayfl.core.axes import Axis, linear
from rayfl.core.fold import Update, sum_of_updates
from rayfl.core.tensors import nbytes, pack, unpack
from rayfl.engine.simulation import Simulation
from rayfl.engine.worker import Worker


class Wide(rayfl.ImageModel):
    """One hidden layer, in which nearly all memory of a client is."""

    name: Literal["wide"] = "wide"
    input: tuple[int, int, int] = (1, 8, 8)
    hidden: int = 1000

    def build(self, net):
        first, second = net.axis("first", self.hidden), net.axis("second", self.hidden)
        pixels = Axis.fixed("pixels", 64)
        return nn.Sequential(nn.Flatten(), linear(pixels, first), linear(first, second), linear(second, self.labels))


def peak(work: Callable[[], Any]) -> int:
    """Return the most bytes that torch holds during the work, beside those that it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events: list[Any] = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize("cohort, copies", [(1, 2), (2, 3), (8, 5)])
def test_a_round_holds_few_copies_of_the_parameters(cohort, copies):
    """Beside the server's parameters and the module: the gradients and an update, or two updates and their sum; the
    partial sums of earlier clients; the new parameters."""
    given = {
        "rounds": 3,
        "data": {"name": "digits"},
        "clients": {"count": 20, "cohort": cohort, "capacities": [1]},
        "model": Wide(),
        "method": {"name": "fedavg"},
        "training": {"epochs": 1, "batch_size": 20, "lr": 0.01},
        "evaluation": {"every": 3},
        "run": {"executor": "serial"},
    }
    with rayfl.start(given) as session:
        rounds = iter(session)
        next(rounds)
        size = nbytes(session.simulation.state["params"])  # pyright: ignore[reportAttributeAccessIssue]
        assert copies * size <= peak(lambda: next(rounds)) < (copies + 0.5) * size


@pytest.mark.parametrize("doublings", [1, 2, 3, 4])
def test_a_sum_holds_as_many_copies_as_doublings(doublings):
    """Updates as they arrive at the server: views of messages."""
    arrived = [unpack(pack(Update({"params": {"w": torch.full((500, 1000), float(i))}}, 1.0))) for i in range(16)]
    total = sum_of_updates()
    size = nbytes(arrived[0].sums)

    def add() -> None:
        for update in arrived[: 2**doublings]:
            total.add(update)

    assert doublings * size <= peak(add) < (doublings + 0.1) * size
    assert total.total is not None
    assert total.total.sums["params"]["w"].unique().tolist() == [sum(range(2**doublings))]
    assert all(update.sums["params"]["w"].unique().tolist() == [i] for i, update in enumerate(arrived))


def test_an_answer_is_freed_before_the_next_job(tmp_path, monkeypatch):
    experiment = tiny(
        rounds=1, clients={"cohort": 6, "capacities": [1]}, method="fedavg", run={"chunk": 1, "together": 1}
    )
    train, known, alive = Worker.train, [], []

    def watched(*given):
        alive.append(sum(ref() is not None for ref in known))
        answer = train(*given)
        known.append(weakref.ref(answer))
        return answer

    monkeypatch.setattr(Worker, "train", watched)
    Simulation(experiment, experiment.data.arrays(), tmp_path).run_round()
    assert alive == [0] * 6


def test_an_update_is_freed_before_the_next_client_trains(tmp_path, monkeypatch):
    """Of six clients in one job only the updates that wait for their partner in the pairwise sum are in memory."""
    experiment = tiny(
        rounds=1, clients={"cohort": 6, "capacities": [1]}, method="fedavg", run={"chunk": 4, "together": 1}
    )
    answer, known, alive = Worker._answer, [], []

    def watched(*given):
        alive.append(sum(ref() is not None for ref in known))
        update, *others = answer(*given)
        known.append(weakref.ref(update))
        return update, *others

    monkeypatch.setattr(Worker, "_answer", watched)
    Simulation(experiment, experiment.data.arrays(), tmp_path).run_round()
    assert alive[:4] == [0, 1, 0, 1]
