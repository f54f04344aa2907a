"""Comparison of rows at equal cost."""

import math

import pytest
from rows import folder

from rayfl.metrics import EVALUATED
from rayfl.results.budgets import CLIENT_FLOPS, TRAFFIC, budgets, equal_cost, reached, with_spent


def lines(down: int, flops: float, *scores: float) -> list[dict]:
    """Rounds that are evaluated where there is a score."""
    return [
        {"round": i + 1, "bytes_down": down, "bytes_up": 10, "train_flops": flops}
        | ({} if math.isnan(score) else {EVALUATED: True, "accuracy_server": score})
        for i, score in enumerate(scores)
    ]


def test_spending_adds_up_in_its_unit():
    run = lines(115, 2e12, 0.1, 0.2)
    assert [line["gbit"] for line in with_spent(run, TRAFFIC)] == [1e-6, 2e-6]
    assert [line["tflops"] for line in with_spent(run, CLIENT_FLOPS)] == [2, 4]


def test_updates_that_came_too_late_are_spent_too():
    """In simulated time: clients that dropped out, or were asked beyond the cohort."""
    run = [line | {"wasted_bytes": 125, "wasted_flops": 1e12} for line in lines(115, 2e12, 0.1, 0.2)]
    assert [line["gbit"] for line in with_spent(run, TRAFFIC)] == [2e-6, 4e-6]
    assert [line["tflops"] for line in with_spent(run, CLIENT_FLOPS)] == [3, 6]


def test_a_seed_that_diverged_is_not_left_out_of_its_rows_mean():
    found = reached([lines(115, 1e12, 0.5), lines(115, 1e12, 0.5)], TRAFFIC, 1, ["accuracy_server", "accuracy_mean"])
    assert found.values == {"accuracy_server": [0.5, 0.5], "accuracy_mean": []}
    diverged = [line | {"accuracy_server": math.nan} for line in lines(115, 1e12, 0.5)]
    found = reached([lines(115, 1e12, 0.5), diverged], TRAFFIC, 1, ["accuracy_server"])
    assert math.isnan(sum(found.values["accuracy_server"])) and len(found.values["accuracy_server"]) == 2


def test_a_row_has_its_last_evaluation_within_a_budget():
    runs = [lines(115, 1e12, 0.1, math.nan, 0.3, 0.4), lines(115, 1e12, 0.2, math.nan, 0.5, 0.6)]
    found = reached(runs, TRAFFIC, 3e-6, ["accuracy_server"])
    assert (found.rounds, found.values) == ([3, 3], {"accuracy_server": [0.3, 0.5]})
    found = reached(runs, TRAFFIC, 2.9e-6, ["accuracy_server"])
    assert (found.rounds, found.values) == ([1, 1], {"accuracy_server": [0.1, 0.2]})
    assert reached(runs, TRAFFIC, 0.9e-6, ["accuracy_server"]).rounds == []


def test_budgets_are_total_costs_of_rows():
    cheap, dear, dearest = ([lines(down, 1e12, 0.1, 0.2)] for down in (115, 240, 490))
    assert budgets([cheap, dear, dearest], TRAFFIC) == pytest.approx([2e-6, 4e-6, 8e-6])
    assert budgets([cheap, dearest], TRAFFIC) == pytest.approx([2e-6, 8e-6])
    assert budgets([cheap, dear], CLIENT_FLOPS) == [], "all spend as much"
    silent = [[line | {"bytes_down": 0, "bytes_up": 0} for line in cheap[0]]]
    assert budgets([silent, dear], TRAFFIC) == []


def test_all_seeds_of_a_row_end_within_its_budget():
    """Two seeds cost 250 and 500 bytes, and the other row 2 kB."""
    unequal = [lines(115, 1e12, 0.1, 0.2), lines(240, 1e12, 0.3, 0.4)]
    own, _ = budgets([unequal, [lines(990, 1e12, 0.1, 0.2)]], TRAFFIC)
    assert own == pytest.approx(4e-6)
    assert reached(unequal, TRAFFIC, own, ["accuracy_server"]).values == {"accuracy_server": [0.2, 0.4]}


def test_the_table_of_equal_traffic(tmp_path):
    """A row a method at every budget; a dash where it was not evaluated by then."""
    cheap = folder(tmp_path / "cheap", "cheap", judged_lines(115, 0.1, 0.2))
    dear = folder(tmp_path / "dear", "dear", judged_lines(490, 0.3, 0.4))
    table = equal_cost([run.record() for run in (cheap, dear)], TRAFFIC)
    assert table is not None
    assert table.header == [
        *("method", "seeds"),
        *("accuracy %, 250 B", "server %, 250 B", "round"),
        *("accuracy %, 1 kB", "server %, 1 kB", "round"),
    ]
    assert table.rows == [
        ["dear", "1", "–", "–", "–", "40.00", "41.00", "2"],
        ["cheap", "1", "20.00", "21.00", "2", "20.00", "21.00", "2"],
    ]
    assert equal_cost([cheap.record()], CLIENT_FLOPS) is None


def judged_lines(down: int, *scores: float) -> list[dict]:
    found = lines(down, 1e12, *(score + 0.01 for score in scores))
    return [line | {"accuracy_mean": score, "seconds": 1.0} for line, score in zip(found, scores, strict=True)]
