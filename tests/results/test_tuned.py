"""Search results: the place among the values tried, and reasons to continue."""

from rows import FACTS

from rayfl.results.rows import best_trials
from rayfl.results.tuned import Setting, notes, responses, tuned

LR = "training.lr"


def trial(lr, accuracy, seed=0, label="a", **params):
    """One run; without an accuracy it has failed."""
    row = {"label": label, "title": label, "seed": seed, "facts": FACTS, "params": {LR: lr, "seed": seed} | params}
    return row | {"status": "failed"} if accuracy is None else row | {"status": "finished", "accuracy_mean": accuracy}


def chosen(trials, paths=(LR,), **options):
    best = best_trials(trials, options.get("metric"), options.get("mode", "auto"))
    return tuned(best, trials, paths, options.get("metric"))


def test_the_place_in_a_grid():
    """Whatever the order in which values were tried."""
    [best] = chosen([trial(lr, 0.5 - abs(lr - 0.3)) for lr in (1.0, 0.1, 0.3, 3.0)]).values()
    [setting] = best.settings
    assert setting == Setting(LR, 0.3, (0.1, 0.3, 1.0, 3.0)) and setting.doubt is None
    assert (setting.place, str(setting), best.point, best.doubts()) == ("2 of 4", "0.3 (2 of 4)", "lr 0.3", [])


def test_a_best_value_at_the_edge_has_a_hint():
    grid = (0.1, 0.3, 1.0)
    [low] = chosen([trial(lr, -lr) for lr in grid]).values()
    [high] = chosen([trial(lr, lr) for lr in grid]).values()
    assert low.doubts() == ["best lr 0.1 is at the edge of the values tried (0.1 to 1); try smaller values"]
    assert high.doubts() == ["best lr 1 is at the edge of the values tried (0.1 to 1); try larger values"]
    assert [str(best.settings[0]) for best in (low, high)] == ["0.1 (1 of 3) ↓", "1 (3 of 3) ↑"]
    # a value that failed was tried
    [best] = chosen([*(trial(lr, lr) for lr in grid), trial(3.0, None)]).values()
    assert best.settings[0].place == "3 of 4" and best.doubts() == []
    # what is a better end depends on the metric
    [best] = chosen([trial(lr, 0.5) | {"loss_mean": lr} for lr in grid], metric="loss_mean").values()
    assert best.settings[0].value == 0.1
    # one value is no choice
    [best] = chosen([trial(0.1, 0.5)]).values()
    assert best.doubts() == [] and best.settings[0].place == "1 of 1"


def test_lists_of_sections_are_shown_by_their_entries():
    path, of = "updates.transforms", "updates.transforms"
    trials = [
        trial(0.1, 0.5, **{of: []}),
        trial(0.1, 0.7, **{f"{of}.0.name": "topk", f"{of}.0.share": 0.1, f"{of}.1.name": "sign"}),
    ]
    [setting] = chosen(trials, [path])["a"].settings
    assert (setting.value, setting.tried) == ("topk(share=0.1), sign", ("[]", "topk(share=0.1), sign"))


def test_a_point_drawn_twice_on_a_seed_has_one_run():
    """Means of its two seeds are 0.5, which ties with the other point."""
    trials = [trial(0.1, 0.25), trial(0.1, 0.25), trial(0.1, 0.75, seed=1), trial(0.3, 0.5), trial(0.3, 0.5, seed=1)]
    assert responses(trials, LR, "accuracy_mean") == {"a": {0.1: 0.5, 0.3: 0.5}}
    assert chosen(trials)["a"].tied == ("lr 0.3",)


def test_points_tie_in_the_metric_of_the_search():
    equal_loss = [trial(0.1, 0.5) | {"loss_mean": 1.0}, trial(0.3, 0.75) | {"loss_mean": 1.0}]
    assert chosen(equal_loss, metric="loss_mean")["a"].tied == ("lr 0.3",) and chosen(equal_loss)["a"].tied == ()
    equal_score = [trial(0.1, 0.5) | {"loss_mean": 1.0}, trial(0.3, 0.5) | {"loss_mean": 2.0}]
    assert chosen(equal_score, metric="loss_mean")["a"].tied == () and chosen(equal_score)["a"].tied == ("lr 0.3",)


def test_unordered_values_have_no_edges():
    trials = [trial(0.1, score, **{"method.mean": mean}) for mean, score in (("samples", 0.5), ("clients", 0.75))]
    [best] = chosen(trials, ["method.mean"]).values()
    assert (str(best.settings[0]), best.doubts()) == ("clients (of 2)", [])
    # a truth value is one, and a section whose name chooses its class
    flags = [trial(0.1, score, **{"method.scaler": flag}) for flag, score in ((True, 0.5), (False, 0.25))]
    assert str(chosen(flags, ["method.scaler"])["a"].settings[0]) == "True (of 2)"
    sections = [trial(0.1, 0.5, **{"method.name": "fedavg"})]
    assert str(chosen(sections, ["method"])["a"].settings[0]) == "fedavg (of 1)"


def test_a_setting_that_a_row_does_not_have_is_a_dash():
    server = "method.distillation.lr"
    trials = [trial(0.1, 0.5), trial(0.1, 0.4, label="b", **{server: 3.0}), trial(0.1, 0.6, label="b", **{server: 1.0})]
    found = chosen(trials, [LR, server])
    assert [str(setting) for setting in found["a"].settings] == ["0.1 (1 of 1)", "–"]
    assert (found["a"].point, found["a"].doubts()) == ("training.lr 0.1", [])
    assert (str(found["b"].settings[1]), found["b"].point[-1]) == ("1 (1 of 2) ↓", "1")


def test_a_tie_is_on_the_seeds_that_both_ran_on():
    """The best point was confirmed on a second seed, where the others did not run."""
    trials = [trial(0.1, 0.5), trial(0.3, 0.75), trial(0.3, 0.25, seed=1), trial(1.0, 0.75), trial(3.0, 0.5)]
    [best] = chosen(trials).values()
    assert best.tied == ("lr 1",) and best.doubts() == ["lr 0.3 is tied with lr 1"]
    [best] = chosen([trial(0.1, 0.5), trial(0.3, 0.75), trial(1.0, 0.7499)]).values()
    assert best.tied == ()


def test_a_trial_that_was_stopped_before_its_first_evaluation_was_not_tried():
    trials = [trial(0.1, 0.5), trial(0.3, 0.75), trial(1.0, None)]
    for status, doubts in {"stopped": 1, "running": 1, "failed": 0, "finished": 0}.items():
        [best] = chosen([*trials[:2], {**trials[2], "status": status}]).values()
        assert len(best.doubts()) == doubts
    [best] = chosen([*trials[:2], {**trial(1.0, 0.25), "status": "stopped"}]).values()
    assert not best.doubts()


def test_parameters_from_mlflow_are_text():
    trials = [trial(lr, score) for lr, score in ((0.1, 0.5), (0.03, 0.75), (1e-05, 0.25))]
    texts = [row | {"params": {key: str(value) for key, value in row["params"].items()}} for row in trials]
    assert chosen(trials) == chosen(texts)
    assert chosen(texts)["a"].settings[0].tried == (1e-05, 0.03, 0.1)


def test_several_settings_and_rows():
    trials = [
        trial(lr, lr + decay, label=label, **{"training.decay": decay, "method.lr": 1})
        for label in "ab"
        for lr in (0.1, 0.2, 0.4)
        for decay in (0.0, 1.0)
    ]
    paths = [LR, "training.decay", "method.lr"]
    found = chosen(trials, paths)
    assert [str(setting) for setting in found["b"].settings] == ["0.4 (3 of 3) ↑", "1 (2 of 2) ↑", "1 (1 of 1)"]
    # two settings that end alike have their whole paths
    assert found["a"].point == "training.lr 0.4, decay 1, method.lr 1"
    assert notes(found, {"a": "A", "b": "B"}) == [
        "A; B: best training.lr 0.4 is at the edge of the values tried (0.1 to 0.4); try larger values",
        "A; B: best decay 1 is at the edge of the values tried (0 to 1); try larger values",
    ]
    assert chosen(trials, ()) == {}


def test_the_metric_over_a_setting_is_of_the_best_of_its_points():
    """On the seeds that all points ran on."""
    trials = [
        trial(lr, score, **{"training.decay": decay})
        for lr, decay, score in ((0.1, 0, 0.5), (0.1, 1, 0.25), (0.3, 0, 0.125), (0.3, 1, 0.75))
    ]
    trials += [trial(0.3, 0.0, seed=1, **{"training.decay": 1}), trial(1.0, None), trial(0.1, 0.4, label="b")]
    assert responses(trials, LR, "accuracy_mean") == {"a": {0.1: 0.5, 0.3: 0.75}, "b": {0.1: 0.4}}
    assert responses(trials, LR, "accuracy_mean", "min")["a"] == {0.1: 0.25, 0.3: 0.125}
    assert responses(trials, "training.decay", "accuracy_mean").keys() == {"a"}
