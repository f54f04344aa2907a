"""Published numbers beside ours: the section, the table, and what the command line changed."""

import pytest
import yaml
from helpers import TINY

from rayfl.config import ConfigError
from rayfl.published import Published, caption, from_params, table
from rayfl.tracking.records import flatten
from rayfl.tuning import load_sweep

BOTH = Published(
    source="Table 9",
    note="shorter",
    numbers={"accuracy_server": {"a-e": 90.0, "b.x": (80.0, 3.0)}, "local_accuracy_mean": {"a-e": 50.0}},
)


def record(label, seed, **results):
    return {"label": label, "seed": seed, "rounds": 7, "accuracy_mean": 0.5} | results


def test_the_difference_by_hand():
    """In points, and in standard deviations of ours over the seeds, with the published one where it is known."""
    records = [
        record("a-e", 0, accuracy_server=0.91, local_accuracy_mean=0.5),
        record("a-e", 1, accuracy_server=0.93, local_accuracy_mean=0.5),
        record("b.x", 0, accuracy_server=0.74),
    ]
    found = table(BOTH, records)
    assert found.header == ["method", "metric", "published %", "ours %", "points", "std", "seeds", "rounds"]
    assert found.rows == [
        # the standard deviation of 91 and 93 is sqrt(2)
        ["a-e", "accuracy_server", "90.00", "92.00 ± 1.41", "+2.00", "+1.4", "2", "7"],
        ["a-e", "local_accuracy_mean", "50.00", "50.00 ± 0.00", "+0.00", "–", "2", "7"],
        ["b.x", "accuracy_server", "80.00 ± 3.00", "74.00", "-6.00", "-2.0", "1", "7"],
    ]


def test_rows_that_did_not_run_are_left_out():
    single = Published(source="Table 9", numbers={"accuracy_server": {"a": 1.0, "b": 2.0}})
    found = table(single, [record("b", 0)])
    assert found.header[:2] == ["method", "published %"]
    assert found.rows == [["b", "2.00", "–", "–", "–", "0", "7"]]


def test_it_survives_flat_text():
    """As MLflow keeps parameters."""
    config = {"published": BOTH.model_dump(mode="json"), "changed": ["rounds: 200 -> 60", "seeds: [0] -> [1, 2]"]}
    params = {key: str(value) for key, value in flatten(config).items()}
    published, changed = from_params(params)
    assert published == BOTH and changed == config["changed"]
    assert from_params(flatten(config)) == (published, changed)
    assert from_params({"search.metric": "accuracy_mean"}) == (None, [])
    assert caption(BOTH, changed) == (
        "beside Table 9 (shorter)\nchanged from the file: rounds: 200 -> 60, seeds: [0] -> [1, 2]"
    )


def write(tmp_path, **sections):
    given = {
        "experiment": TINY | {"method": "heterofl"},
        "rows": {"wide": {"rounds": 9, "training": {"lr": 0.5}}, "narrow": {}},
        "published": {"source": "Table 9", "numbers": {"best_accuracy_server": {"wide": 90}}},
    }
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(given | sections, sort_keys=False))
    return tmp_path / "table.yaml"


def test_settings_reach_every_row_and_are_remembered(tmp_path):
    """Also the rows that say otherwise, for it is the command line that was typed last."""
    plan = load_sweep(write(tmp_path), ["rounds=3", "training.lr=0.2", "search.seeds=[0,1]", "run.actors=2"])
    for row in plan.rows:
        experiment = plan.experiment(row, {}, 0)
        assert (experiment.rounds, experiment.training.lr, experiment.training.batch_size) == (3, 0.2, 5)
    assert plan.changed == ("rounds: 9 -> 3", "search.seeds: [0] -> [0, 1]", "training.lr: 0.5 -> 0.2")
    untouched = load_sweep(write(tmp_path))
    assert untouched.changed == () and untouched.experiment("wide", {}, 0).rounds == 9
    assert plan.plain()["published"]["source"] == "Table 9" and plan.plain()["changed"] == list(plan.changed)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"best_accuracy_server": {"wid": 90}}, "published.numbers.best_accuracy_server: no row is called 'wid'"),
        ({"best_accuracy": {"wide": 90}}, "published.numbers: no metric is called 'best_accuracy'; did you mean"),
        ({"accuracy_mean": {"wide": "high"}}, "published.numbers.accuracy_mean.wide: given 'high'; allowed: "),
        ({}, "published.numbers"),
    ],
)
def test_numbers_that_are_wrong(tmp_path, numbers, said):
    with pytest.raises(ConfigError, match=said):
        load_sweep(write(tmp_path, published={"source": "Table 9", "numbers": numbers}))
