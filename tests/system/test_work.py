"""Operations of a visit, counted before a run: by hand, and against the rounds of runs."""

import itertools

import numpy as np
import pytest
from helpers import run, simulate, tiny

from rayfl import costs
from rayfl.config import ConfigError
from rayfl.engine import traffic
from rayfl.engine.traffic import split
from rayfl.training.updates import Updates

BOARDS = {"devices": {"name": "classes", "classes": [{"name": "board", "gflops": 1}]}}
PUBLIC = {"data": {"public": {"share": 0.3, "labeled": True}}}


@pytest.mark.parametrize(
    ("visits", "expected"),
    [
        (((10, 50), (20, 100), (80, 400)), (5, 0)),
        # 80 operations that do not depend on the steps
        (((10, 130), (20, 180), (80, 480)), (5, 80)),
        # 1 % of the operations
        (((10, 50.5), (20, 100.5), (80, 400.5)), (5, 0.5)),
        # a width per step
        (((10, 50), (20, 70), (80, 300)), (3.75, 0)),
        # a small width in the first visit
        (((10, 50), (20, 150), (80, 750)), (9.375, 0)),
        # steps that are ignored
        (((10, 50), (10, 50), (10, 50)), (5, 0)),
    ],
)
def test_fixed_operations_and_those_per_sample(visits, expected):
    assert split(visits) == pytest.approx(expected)


def fleet_of(tmp_path, method, **sections):
    given = {"clients": {"cohort": 6, "capacities": [1.0]}, "training": {"steps": None, "epochs": 3}} | sections
    simulation = simulate(tiny(method=method, rounds=3, system=BOARDS, **given), tmp_path)
    return simulation.schedule.fleet, simulation


@pytest.mark.parametrize("refused", [2, 1])
def test_refused_updates_are_not_counted(refused, tmp_path, monkeypatch):
    """Every second update is refused, or all are."""
    usual, calls = fleet_of(tmp_path / "usual", "fedavg")[0].work[1.0], itertools.count()
    monkeypatch.setattr(Updates, "unfit", lambda *_: None if next(calls) % refused else "not finite")
    if refused == 2:
        assert fleet_of(tmp_path / "some", "fedavg")[0].work[1.0] == usual
    else:
        with pytest.raises(ConfigError, match="model: the work of capacity 1 cannot be counted, because its updates "):
            fleet_of(tmp_path / "all", "fedavg")
    assert next(calls) > 6


def test_inner_steps_are_operations_per_sample(tmp_path):
    """pFedMe takes five steps per batch."""
    plain, five = (fleet_of(tmp_path / name, name)[0].work[1.0] for name in ("fedavg", "pfedme"))
    assert (five.flops, five.fixed_flops) == (5 * plain.flops, 0)


@pytest.mark.parametrize(
    ("method", "sections"),
    [
        ({"name": "scaffold", "option": "I"}, {}),
        ({"name": "ditto", "personal_epochs": 2}, {}),
        ("fedproto", {}),
        ({"name": "fedmd", "subset": 10, "warmup_epochs": 1, "private_warmup_epochs": 1}, PUBLIC),
    ],
)
def test_all_clients_together_have_the_operations_of_a_round(tmp_path, method, sections):
    """All six are visited before the run, so that the sum of means is exact."""
    fleet, simulation = fleet_of(tmp_path, method, **sections)
    line = run(simulation)[-1]
    expected = sum(fleet.work[1.0].operations(fleet.samples(id)[0]) for id in range(6))
    assert line["train_flops"] == pytest.approx(expected, rel=1e-9)


def test_a_warm_up_is_not_counted(tmp_path):
    """FedL2G's clients do not train in its first rounds."""
    plain, later = (
        fleet_of(tmp_path / name, {"name": name} | given)[0].work[1.0]
        for name, given in (("fedavg", {}), ("fedl2g", {"warmup_rounds": 2}))
    )
    assert later.flops == pytest.approx(plain.flops, rel=1e-9) and later.fixed_flops > 0


VIT = {"name": "vit_b_16", "layers": 2, "heads": 2, "head_width": 8, "patch": 4}


@pytest.mark.parametrize(
    ("method", "cohort"),
    [
        # A and B are sent once, in round 2
        ("fedsb", 4),
        # a client receives the products of the whole cohort
        ("flora", 12),
    ],
)
def test_traffic_is_that_of_the_later_rounds(tmp_path, method, cohort):
    lora = {"name": "lora", "rank": 2, "alpha": 4, "base": VIT}
    fleet, simulation = fleet_of(
        tmp_path, method, model=lora, clients={"count": 12, "cohort": cohort, "capacities": [1]}
    )
    line, work = run(simulation)[-1], fleet.work[1.0]
    assert (line["bytes_down"], line["bytes_up"]) == (cohort * work.bytes_down, cohort * work.bytes_up)


def test_the_traffic_of_a_warm_up_is_not_counted(tmp_path):
    """LG-FedAvg sends the whole network in its first rounds, later the head."""
    plain, later = (
        fleet_of(tmp_path / str(warmup), {"name": "lg_fedavg", "warmup": warmup})[0].work[1.0] for warmup in (0, 2)
    )
    assert later == plain


@pytest.mark.parametrize("options", [{}, {"distill": True}, {"sample": "round", "norms": "static"}])
def test_widths_that_steps_draw_count_by_their_expectation(options, tmp_path):
    capacities = {"clients": {"cohort": 6, "capacities": [1.0, 0.5, 0.25]}}
    fleet, simulation = fleet_of(tmp_path, {"name": "fjord", **options}, **capacities)
    nets = simulation.method.task.nets
    for capacity, work in fleet.work.items():
        drawn = [costs.training_flops(nets[c], 1) for c in (1.0, 0.5, 0.25) if c <= capacity]
        expected = sum(drawn) / len(drawn)
        if "distill" in options:
            expected += drawn[0] * (1 - 1 / len(drawn))
        assert (work.flops, work.fixed_flops) == (pytest.approx(expected, rel=1e-12), 0)


def test_networks_that_visits_draw_count_by_the_mean_of_many_draws(tmp_path):
    """AdaptiveFL draws from its pool, the largest that fits if it is larger: 400 draws, 5 standard deviations."""
    fleet, simulation = fleet_of(tmp_path, "adaptivefl", clients={"cohort": 6, "capacities": [1.0, 0.5, 0.25]})
    method = simulation.method
    for capacity, work in fleet.work.items():
        fitting, pool = method.pool(capacity), method.pool(1.0)
        nets = [fitting[min(i, len(fitting) - 1)] for i in range(len(pool))]
        for found, each in (
            (work.flops, [costs.training_flops(net, 1) for net in nets]),
            (work.bytes_down, [4 * net.parameters for net in nets]),
            (work.bytes_up, [4 * net.parameters for net in nets]),
        ):
            assert found == pytest.approx(np.mean(each), rel=1e-12, abs=5 * np.std(each) / 20)


def test_different_networks_of_equal_costs_need_no_draws(tmp_path, monkeypatch):
    """SplitMix's clients train some of eight equal networks."""
    monkeypatch.setattr(traffic, "MANY", 10**12)
    fleet_of(tmp_path, "splitmix", clients={"cohort": 6, "capacities": [0.5]})
