"""Capacities and participation of clients."""

from collections import Counter

import numpy as np
import pytest

from rayfl.clients import MOST_CLIENTS, Population, parse_mode
from rayfl.config import ConfigError, parse
from rayfl.experiment import Experiment


def capacities(population: Population, round: int = 0) -> list[float]:
    return [population.capacity(id, 0, round) for id in range(population.count)]


def test_the_notation():
    assert parse_mode("a1-b2-c3-d4-e5") == [(1, 1), (0.5, 2), (0.25, 3), (0.125, 4), (0.0625, 5)]
    assert parse_mode("a6-b10-c11-d18-e55")[-1] == (0.0625, 55)
    assert parse_mode("c7") == [(0.25, 7)]


def test_fixed_blocks_and_the_remainder_for_the_last_level():
    """unit = 10 // 3 clients per unit of weight: 3 with a, 6 with b, and the remaining one with b."""
    assert capacities(Population(count=10, capacities="a1-b2")) == [1.0] * 3 + [0.5] * 7
    assert capacities(Population(count=100, capacities="a1-b1-c1"))[99] == 0.25
    given = Population(count=10, capacities=(0.25, 1.0), weights=(1, 2))
    assert capacities(given) == [0.25] * 3 + [1.0] * 7
    # the second is the server's alone
    assert capacities(Population(count=13, capacities=(1.0, 0.5), weights=(2, 0))) == [1.0] * 13


def test_numbers_of_clients_that_are_far_from_their_weights_are_noted():
    """150 // 100 is one client per unit of weight: 60, and the rest."""
    [note] = Population(count=150, capacities=(1.0, 0.25), weights=(60, 40)).capacity_notes
    assert note == (
        "clients.weights: of 150 clients, 60 of capacity 1, 90 of capacity 0.25. Hint: a clients.count that is a "
        "multiple of 100"
    )
    assert Population(count=10, capacities="a6-b3").capacity_notes == []
    assert len(Population(count=10, capacities="a2-b4").capacity_notes) == 1
    assert Population(count=150, capacities=(1.0, 0.25), weights=(60, 40), assignment="dynamic").capacity_notes == []


def test_the_default_cohort_is_at_most_all_clients():
    few = Population(count=5)
    assert few.cohort == 5 and Population(**few.model_dump()) == few
    assert few.notes == ["clients.cohort: 5 instead of the default 10, because there are 5 clients"]
    assert Population(count=10).notes == Population(count=5, cohort=5).notes == Population().notes == []
    assert Experiment(model="digits_cnn", clients={"count": 5}).notes == few.notes
    with pytest.raises(ConfigError, match="a cohort of at most count = 5 clients; cohort is 10"):
        Population(count=5, cohort=10)


def test_a_server_wider_than_every_client():
    population = Population(count=100, capacities="a0-b99")
    assert set(capacities(population)) == {0.5}
    assert population.all_capacities == [1.0, 0.5]
    dynamic = Population(count=100, capacities="a0-b99", assignment="dynamic")
    assert {c for r in range(20) for c in capacities(dynamic, r)} == {0.5}


def test_fixed_capacities_stay():
    population = Population(count=20, capacities="a1-e1")
    assert capacities(population, 0) == capacities(population, 9)


def test_dynamic_frequencies():
    """Each draw has probability weight / sum of weights: within 4 standard deviations in 20,000 draws."""
    population = Population(count=2000, capacities="a1-b2-e7", assignment="dynamic")
    drawn = Counter(c for round in range(10) for c in capacities(population, round))
    for capacity, probability in ((1.0, 0.1), (0.5, 0.2), (0.0625, 0.7)):
        deviation = (probability * (1 - probability) / 20_000) ** 0.5
        assert drawn[capacity] / 20_000 == pytest.approx(probability, abs=4 * deviation)
    assert capacities(population, 0) != capacities(population, 1)
    assert capacities(population, 3) == capacities(population, 3)


def test_tiers_draw_within_reach():
    population = Population(count=100, capacities=(0.2, 0.4, 0.6, 0.8, 1.0), assignment="tiers")
    seen = [{population.capacity(id, 0, r) for r in range(60)} for id in (0, 19, 20, 59, 80, 99)]
    assert seen == [
        {0.2, 0.4, 0.6},
        {0.2, 0.4, 0.6},
        {0.2, 0.4, 0.6, 0.8},
        {0.2, 0.4, 0.6, 0.8, 1.0},
        {0.6, 0.8, 1.0},
        {0.6, 0.8, 1.0},
    ]


def test_marginal_frequencies_of_tiers():
    """.157 .207 .273 .207 .157 for five submodels of NeFL."""
    population = Population(count=1000, capacities=(1.0, 0.8, 0.6, 0.4, 0.2), assignment="tiers")
    drawn = Counter(c for round in range(20) for c in capacities(population, round))
    frequencies = [drawn[c] / 20_000 for c in (0.2, 0.4, 0.6, 0.8, 1.0)]
    assert frequencies == pytest.approx([0.1567, 0.2067, 0.2733, 0.2067, 0.1567], abs=0.012)


def test_tiers_without_reach_are_fixed():
    """Three submodels and 10 clients: 3, 3 and 4, as in NeFL's code."""
    population = Population(count=10, cohort=1, capacities=(1.0, 0.5, 0.25), assignment="tiers", reach=0)
    assert capacities(population) == [0.25] * 3 + [0.5] * 3 + [1.0] * 4


def test_cohorts_are_drawn_without_replacement():
    population = Population(count=30, cohort=10)
    for round in range(20):
        cohort = population.sample(0, round)
        assert len(set(cohort)) == 10 and cohort == sorted(cohort)
        assert cohort == population.sample(0, round)
    assert population.sample(0, 0) != population.sample(0, 1)
    assert population.sample(0, 0) != population.sample(1, 0)
    assert Population(count=8, cohort=8).sample(0, 0) == list(range(8))


def test_everybody_is_drawn_equally_often():
    population = Population(count=20, cohort=5)
    drawn = np.bincount([id for round in range(2000) for id in population.sample(0, round)], minlength=20)
    assert abs(drawn - 500).max() < 4.5 * (2000 * 0.25 * 0.75) ** 0.5


@pytest.mark.parametrize(
    "clients",
    [
        {"capacities": "a1-b2-c3", "count": 50},
        {"capacities": "a0-b2-e1", "count": 50},
        {"capacities": "a2-b0", "count": 7},
        {"capacities": (0.25, 1.0, 0.5), "weights": (1, 0, 2), "count": 50},
        {"capacities": "a1-b2-e7", "assignment": "dynamic", "count": 50},
        {"capacities": (1.0, 0.6, 0.3), "assignment": "tiers", "reach": 1, "count": 50},
    ],
    ids=str,
)
def test_capacities_of_many(clients):
    """Equal to the capacity of one after another, in any order."""
    population = Population(cohort=1, **clients)
    ids = np.random.default_rng(0).permutation(population.count)
    found = population.capacities_of(ids, 3, 2)
    assert found.dtype == np.float64
    assert found.tolist() == [population.capacity(int(id), 3, 2) for id in ids]
    assert population.capacities_of(ids[:0], 3, 2).shape == (0,)


def test_drawn_capacities_are_the_same_in_every_version():
    """A change of these values would change all published results."""
    dynamic = Population(count=12, capacities="a1-b2-e7", assignment="dynamic")
    assert capacities(dynamic, 3) == [
        0.0625,
        0.0625,
        0.0625,
        0.0625,
        0.0625,
        0.0625,
        0.0625,
        0.0625,
        0.0625,
        0.0625,
        0.0625,
        0.0625,
    ]
    tiers = Population(count=12, capacities=(1.0, 0.5, 0.25), assignment="tiers", reach=1)
    assert capacities(tiers, 3) == [0.5, 0.5, 0.5, 0.5, 1.0, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert Population(count=1000, cohort=6).sample(0, 5) == [69, 181, 282, 531, 643, 724]


def test_very_many_clients_cost_nothing():
    population = Population(count=MOST_CLIENTS, cohort=100, capacities="a1-e9")
    assert len(set(population.sample(0, 0))) == 100
    assert population.capacities_of(np.array([0, MOST_CLIENTS // 10 - 1, MOST_CLIENTS // 10]), 0, 0).tolist() == [
        1.0,
        1.0,
        0.0625,
    ]


ERRORS = {
    "a share above 1": (
        {"capacities": [1.5]},
        "exp.yaml: clients.capacities: [1.5] is not valid. Allowed: fractions in (0, 1]; 1.5 is not",
    ),
    "no share": (
        {"capacities": [1, 0]},
        "exp.yaml: clients.capacities: [1, 0] is not valid. Allowed: fractions in (0, 1]; 0.0 is not",
    ),
    "none": ({"capacities": []}, "exp.yaml: clients.capacities: [] is not valid. Allowed: at least one capacity"),
    "twice": (
        {"capacities": "a1-b1-b2"},
        "exp.yaml: clients.capacities: 'a1-b1-b2' is not valid. Allowed: each capacity once, to 6 digits; "
        "use weights for the numbers of clients",
    ),
    "unknown letter": (
        {"capacities": "a1-f2"},
        "exp.yaml: clients.capacities: 'a1-f2' is not valid. Allowed: letters a to e with a whole weight "
        "of at most 9 digits, joined by '-', e.g. a1-e9; not 'f2'",
    ),
    "too many digits": (
        {"capacities": "a1-b1234567890"},
        "exp.yaml: clients.capacities: 'a1-b1234567890' is not valid. Allowed: letters a to e with a whole "
        "weight of at most 9 digits, joined by '-', e.g. a1-e9; not 'b1234567890'",
    ),
    "too many clients": (
        {"count": 10**9, "cohort": 10**9},
        "exp.yaml: clients.count: 1000000000 is not valid. Allowed: at most 100000000\n"
        "exp.yaml: clients.cohort: 1000000000 is not valid. Allowed: at most 100000000",
    ),
    "too large a weight": (
        {"capacities": [1, 0.5], "weights": [1, 10**30], "assignment": "dynamic"},
        f"exp.yaml: clients.weights.1: {10**30} is not valid. Allowed: at most 100000000",
    ),
    "weights that are true": (
        {"capacities": [1, 0.5], "weights": [1, True]},
        "exp.yaml: clients.weights.1: True is not valid. Allowed: a whole number",
    ),
    "a capacity that is true": (
        {"capacities": [True, 0.5]},
        "exp.yaml: clients.capacities.0: True is not valid. Allowed: a number",
    ),
    "a share without list": (
        {"capacities": 0.5},
        "exp.yaml: clients.capacities: 0.5 is not valid. Allowed: a list, or text",
    ),
    "unknown assignment": (
        {"assignment": "random"},
        "exp.yaml: clients.assignment: 'random' is not valid. Allowed: one of fixed, dynamic, tiers",
    ),
    "smallest first": (
        {"capacities": "b1-a1"},
        "exp.yaml: clients.capacities: 'b1-a1' is not valid. Allowed: the largest letter (the server's) "
        "first; 'b1-a1' starts with 'b'",
    ),
    "cohort": (
        {"count": 5, "cohort": 6},
        "exp.yaml: clients: {'count': 5, 'cohort': 6} is not valid. Allowed: a cohort of at most count = 5 "
        "clients; cohort is 6",
    ),
    "weights with tiers": (
        {"capacities": "a1-b2", "assignment": "tiers"},
        "exp.yaml: clients: {'capacities': 'a1-b2', 'assignment': 'tiers'} is not valid. Allowed: no weights with "
        "tiers, which are equal blocks of clients",
    ),
    "weights twice": (
        {"capacities": "a1", "weights": [1]},
        "exp.yaml: clients: {'capacities': 'a1', 'weights': [1]} is not valid. Allowed: weights inside the "
        "notation, or a list of capacities with weights; not both",
    ),
    "too few weights": (
        {"capacities": [1, 0.5], "weights": [1]},
        "exp.yaml: clients: {'capacities': [1, 0.5], 'weights': [1]} is not valid. Allowed: one weight for each "
        "of the 2 capacities",
    ),
    "all weights 0": (
        {"capacities": "a0"},
        "exp.yaml: clients: {'capacities': 'a0'} is not valid. Allowed: weights of at least 0, not all 0",
    ),
    "weights over count": (
        {"count": 10, "capacities": "a1-b10"},
        "exp.yaml: clients: {'count': 10, 'capacities': 'a1-b10'} is not valid. Allowed: fixed weights that sum to "
        "at most count = 10; they sum to 11",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    given, message = ERRORS[case]
    with pytest.raises(ConfigError) as error:
        parse(Population, given, "exp.yaml: clients")
    assert str(error.value) == message
