"""Grids that continue beyond their ends."""

import cloudpickle
import pytest
from sweeps import refused, write

from rayfl.tuning.following import Following
from rayfl.tuning.load import load_sweep
from rayfl.tuning.space import Search
from rayfl.tuning.widening import beyond


def following(values, best, widen=2, grid=None, path="training.lr"):
    """The next values of a setting, from those tried."""
    search = Search(space={path: {"grid": grid or values}}, widen=widen)
    return [point[path] for point in beyond(search, [{path: value} for value in values], {path: best})]


@pytest.mark.parametrize(
    "values, best, expected",
    [
        ([0.1, 0.3, 1.0, 3.0], 3.0, [9.0]),
        ([0.1, 0.3, 1.0, 3.0], 0.1, [0.033]),
        ([0.1, 0.3, 1.0, 3.0], 1.0, []),
        ([0.4, 0.1, 0.2], 0.4, [0.8]),
        ([1, 2, 4], 4, [8]),
        ([1, 2, 4], 1, [0]),
        ([0, 0.5, 0.9], 0.9, [1.6]),
        ([0.0, 0.2, 0.3], 0.0, [-0.2]),
        (["adam", "sgd"], "adam", []),
        ([False, True], True, []),
        ([0.5], 0.5, []),
        ([0.98, 0.985, 0.99], 0.98, [0.975]),
        ([0.12, 0.121, 0.122], 0.122, [0.123]),
    ],
)
def test_the_next_value_by_hand(values, best, expected):
    """In the ratio of the outermost two; at their distance next to 0; with as many digits as lie beyond. The row is
    asked whether it allows the value."""
    space = {"training.lr": {"grid": values}, "method.weight": {"grid": [1, 2]}}
    search = Search(space=space, widen=1)
    tried = [{"training.lr": value, "method.weight": weight} for value in values for weight in (1, 2, 3)]
    points = beyond(search, tried, {"training.lr": best, "method.weight": 2})
    assert points == [{"training.lr": value, "method.weight": 2} for value in expected]


def test_at_most_so_many_values_beyond_each_end():
    assert following([1.0, 2.0, 4.0], 4.0, 1, grid=[1.0, 2.0]) == []
    assert following([1.0, 2.0, 4.0], 4.0, 2, grid=[1.0, 2.0]) == [8.0]
    assert following([0.5, 1.0, 2.0], 2.0, 1, grid=[1.0, 2.0]) == [4.0]


def test_every_setting_at_an_end_is_continued_beside_the_best_point():
    search = Search(space={"a": {"grid": [1.0, 2.0]}, "b": {"grid": [1.0, 10.0]}, "c": {"uniform": [0, 1]}}, widen=1)
    tried = [{"a": a, "b": b, "c": 0.5} for a in (1.0, 2.0) for b in (1.0, 10.0)]
    assert beyond(search, tried, {"a": 2.0, "b": 1.0, "c": 0.5}) == [
        {"a": 4.0, "b": 1.0, "c": 0.5},
        {"a": 2.0, "b": 0.1, "c": 0.5},
    ]


def test_what_a_setting_or_the_budget_does_not_allow_is_not_tried(tmp_path):
    plan = load_sweep(write(tmp_path, space={"training.momentum": {"grid": [0.3, 0.6]}}, widen=1))
    assert plan.allows("heterofl", {"training.momentum": 0.9}) and not plan.allows(
        "heterofl", {"training.momentum": 1.2}
    )


def test_what_ray_tune_restores_reads_the_folder_of_this_process():
    """Not that of the first start: it may have been moved."""

    def trials(folder):
        return Following({"row": 2}, lambda ended: True, lambda row, ended: [folder], lambda row, ended: [folder])

    before = trials({"in": "old"})
    before.ended["row"].add("abc_0")
    tuner, state = cloudpickle.dumps(before), cloudpickle.dumps(before.get_state())
    trials({"in": "new"})
    restored = cloudpickle.loads(tuner)
    restored.set_state(cloudpickle.loads(state))
    assert restored.ended == {"row": {"abc_0"}}
    assert restored.widened("row", set()) == restored.confirming("row", set()) == [{"in": "new"}]


def test_a_row_is_not_confirmed_while_a_record_of_its_search_runs():
    """Tune calls its searcher before the recorder, and runs a trial again whose record could not be written."""
    records, asked = {"a": "running"}, []

    def settled(ended):
        return all(records[trial_id] != "running" for trial_id in ended)

    def following(row, ended):
        asked.append(set(ended))
        return []

    trials = Following({"row": 1}, settled, following, following)
    trials._finished, trials.rows = True, {"a": "row"}
    trials.on_trial_complete("a")
    assert trials.next_trial() is None and asked == [] and not trials.is_finished()
    trials.on_trial_complete("a", error=True)
    assert trials.next_trial() is None and asked == [] and trials.is_finished()
    records["a"] = "finished"
    trials.on_trial_complete("a")
    assert trials.next_trial() is None and asked == [{"a"}, {"a"}] and trials.is_finished()


@pytest.mark.parametrize(
    "search, said",
    [
        ({"widen": 1}, "search: widen: 1, but space has no grid of at least two numbers. Allowed: 0"),
        (
            {"widen": 1, "space": {"training.lr": {"grid": [0.1, 1]}}, "scheduler": "asha"},
            "search: widen: 1 needs the results of whole grids. Allowed: 0, or searcher random and scheduler fifo",
        ),
    ],
)
def test_searches_that_cannot_be_widened(tmp_path, search, said):
    assert refused(write(tmp_path, **search)) == said
