"""Comparison with published numbers: the section, the table, and settings changed from the file."""

import math
from pathlib import Path

import pytest
import yaml
from helpers import TINY
from rows import FACTS

from rayfl import costs
from rayfl.config import ConfigError
from rayfl.core.net import Net
from rayfl.models import MODELS
from rayfl.results.folder import flatten
from rayfl.results.published import Published, caption, from_config, in_config, latex, markdown, table
from rayfl.results.summary import summaries
from rayfl.tuning.load import load_sweep

BOTH = Published(
    source="Table 9",
    note="shorter",
    numbers={"accuracy_0.2": {"a-e": 90.0, "b.x": (80.0, 3.0)}, "local_accuracy_mean": {"a-e": 50.0}},
)


def record(label, seed, **results):
    return {"label": label, "title": label, "seed": seed, "facts": FACTS, "rounds": 7, "accuracy_mean": 0.5} | results


def test_the_difference_by_hand():
    """In points, and in standard deviations of ours over the seeds, with the published one where it is known."""
    records = [
        record("a-e", 0, local_accuracy_mean=0.5) | {"accuracy_0.2": 0.91},
        record("a-e", 1, local_accuracy_mean=0.5) | {"accuracy_0.2": 0.93},
        record("b.x", 0) | {"accuracy_0.2": 0.74},
    ]
    found = table(BOTH, records)
    assert found.header == ["method", "metric", "published %", "ours %", "points", "in stds", "seeds", "rounds"]
    assert found.rows == [
        # the standard deviation of 91 and 93 is sqrt(2)
        ["a-e", "accuracy_0.2", "90.00", "92.00 ± 1.41", "+2.00", "+1.4", "2", "7"],
        ["a-e", "local_accuracy_mean", "50.00", "50.00 ± 0.00", "+0.00", "–", "2", "7"],
        ["b.x", "accuracy_0.2", "80.00 ± 3.00", "74.00", "-6.00", "-2.0", "1", "7"],
    ]


def test_a_score_that_is_not_finite():
    single = Published(source="Table 9", numbers={"accuracy_server": {"a": 50.0}})
    found = table(single, [record("a", 0, accuracy_server=0.5), record("a", 1, accuracy_server=math.nan)])
    assert found.rows == [["a", "50.00", "nan ± nan", "+nan", "+nan", "2", "7"]]


def test_rows_that_did_not_run_are_left_out():
    single = Published(source="Table 9", numbers={"accuracy_server": {"a": 1.0, "b": 2.0}})
    found = table(single, [record("b", 0)])
    assert found.header[:2] == ["method", "published %"]
    assert found.rows == [["b", "2.00", "–", "–", "–", "0", "7"]]


def test_published_amounts_are_in_their_own_units():
    """A difference is then in per cent of what was published; of nothing there is none."""
    accuracy = {"spafl": (85.0, 2.0)}
    numbers = {"best_local_accuracy_mean": accuracy, "gbit": {"spafl": 1e-4, "local": 0}, "client_macs": {"spafl": 9e9}}
    published = Published(source="Table 1", numbers=numbers)
    sent = {"bytes_down": 6960, "bytes_up": 6960, "train_flops": 36e9}
    rows = [
        record("spafl", 0, best_local_accuracy_mean=0.875, **sent),
        record("local", 0, best_local_accuracy_mean=0.5, bytes_down=0, bytes_up=0, train_flops=12e9),
    ]
    found = table(published, rows)
    assert found.header == ["method", "metric", "published", "ours", "difference", "in stds", "seeds", "rounds"]
    assert found.rows == [
        ["spafl", "best_local_accuracy_mean %", "85.00 ± 2.00", "87.50", "+2.50", "+1.2", "1", "7"],
        ["spafl", "gbit", "0.0001", "0.00011136", "+11.36%", "–", "1", "7"],
        ["spafl", "client_macs", "9e+09", "4.5e+09", "-50.00%", "–", "1", "7"],
        ["local", "gbit", "0", "0", "–", "–", "1", "7"],
    ]
    only = Published(source="Table 1", numbers={"gbit": {"spafl": 1e-4}})
    assert "| spafl | gbit | 0.0001 |" in markdown(only, [], rows)
    # a sweep's file may name them
    assert {"gbit", "client_macs", "local_density_at_best"} < set(summaries(["local_accuracy_mean"], FACTS["scores"]))


def test_numbers_of_losses_are_not_in_per_cent():
    published = Published(source="Table 3", numbers={"accuracy_mean": {"a": 60}, "loss_mean": {"a": 1.25}})
    found = table(published, [record("a", seed, loss_mean=1.5 + seed) for seed in (0, 1)])
    assert [row[:6] for row in found.rows] == [
        ["a", "accuracy_mean %", "60.00", "50.00 ± 0.00", "-10.00", "–"],
        # 0.75 above; the standard deviation of 1.5 and 2.5 is sqrt(0.5)
        ["a", "loss_mean", "1.25", "2 ± 0.7071", "+60.00%", "+1.1"],
    ]


def test_it_survives_a_configuration():
    """MLflow stores it flat, as text; names of metrics and rows may contain dots."""
    changed = ["rounds: 200 -> 60", "seeds: [0] -> [1, 2]", "data.root: 'a' -> \"it's\""]
    config = {"published": in_config(BOTH, changed), "search": {"metric": "accuracy_mean"}}
    params = {key: str(value) for key, value in flatten(config).items()}
    assert from_config(params) == from_config(config) == (BOTH, changed)
    assert from_config({"search.metric": "accuracy_mean"}) == (None, [])


def test_the_caption_of_the_table():
    changed, records = ["model_a: 1 -> 2", "rounds: 200 -> 60"], [record("a-e", 0)]
    said = ["Compared with Table 9 (shorter)", "changed from the file: model_a: 1 -> 2, rounds: 200 -> 60"]
    assert caption(BOTH, changed) == said and caption(BOTH, []) == said[:1]
    long = BOTH.model_copy(update={"source": "Table\n9\n", "note": "\nshorter\n"})
    assert caption(long, changed) == said
    assert markdown(BOTH, changed, records).startswith(f"{said[0]}\n\n{said[1]}\n\n| method |")
    assert latex(BOTH, changed, records).startswith(f"% {said[0]}\n% {said[1]}\n\\begin{{tabular}}")


NUMBERS = {"source": "Table 9", "numbers": {"accuracy_mean": {"own": 90}}}


def write(tmp_path, **sections):
    given = {
        "experiment": TINY | {"method": "heterofl", "run": {"chunk": 1}},
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
    assert set(plan.changed) == {
        "wide: rounds: 9 -> 3",
        "narrow: rounds: 2 -> 3",
        "wide: training.lr: 0.5 -> 0.2",
        "narrow: training.lr: 0.05 -> 0.2",
        "search.seeds: [0] -> [0, 1]",
    }
    untouched = load_sweep(write(tmp_path))
    assert untouched.changed == () and untouched.experiment("wide", {}, 0).rounds == 9
    assert from_config(plan.plain()) == (plan.published, list(plan.changed))


def test_a_bare_name_is_a_section(tmp_path):
    """In the base or in a row, as in `method: heterofl`."""
    path = write(tmp_path, rows={"own": {"method": "fedrolex"}, "base": {}}, published=NUMBERS)
    plan = load_sweep(path, ["method.scaler=false", "training.lr=0.2"])
    methods = [plan.experiment(row, {}, 0).method for row in plan.rows]
    assert [(m.name, m.scaler) for m in methods] == [("fedrolex", False), ("heterofl", False)]
    assert set(plan.changed) == {"method.scaler: True -> False", "training.lr: 0.05 -> 0.2"}


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        ({"own": {"training": {"lr": 0.3}}}, [], "rows.own.training.lr: 0.3 is in search.space too"),
        ({"own": {}}, ["training.lr=0.2"], "--set training.lr: the setting is in search.space, which decides it"),
        ({"own": {}}, ["seed=5"], r"--set search.seeds=\[5\]"),
        ({"own": {"data": {"samples": 90}}, "base": {}}, [], "because all trials share one data set"),
        (
            {"own": {"method": "standalone"}},
            [],
            "search.metric: 'validation_accuracy_mean' does not fit rows.own, whose clients have personal networks",
        ),
        (["own"], [], "rows: .* is not valid. Allowed: a mapping"),
    ],
)
def test_rows_and_settings_that_would_be_ignored_are_refused(rows, settings, said, tmp_path):
    search = {"space": {"training.lr": {"grid": [0.1, 0.2]}}}
    path = write(tmp_path, rows=rows, search=search, published=NUMBERS)
    with pytest.raises(ConfigError, match=said):
        load_sweep(path, settings)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"best_accuracy_server": {"wid": 90}}, "published.numbers.best_accuracy_server: no row is called 'wid'"),
        ({"best_accuracy": {"wide": 90}}, "published.numbers: no metric is called 'best_accuracy'. Did you mean"),
        ({"accuracy_mean": {"wide": "high"}}, "published.numbers.accuracy_mean.wide: 'high' is not valid. Allowed: "),
        ({}, "published.numbers"),
    ],
)
def test_numbers_that_are_wrong(tmp_path, numbers, said):
    with pytest.raises(ConfigError, match=said):
        load_sweep(write(tmp_path, published={"source": "Table 9", "numbers": numbers}))


# --- what SpaFL's Table 1 counts ---

SPAFL = {
    # model, whether its classifier is masked, what the paper calls its parameters and thresholds, epochs, rounds,
    # samples a client
    "FMNIST": (MODELS["lenet5_caffe"](), True, 430_500, 580, 5, 500, 600),
    "CIFAR-10": (MODELS["spafl_cnn"](), True, 807_366, 1_418, 5, 500, 500),
    "CIFAR-100": (MODELS["spafl_resnet18"](classes=100, channels=64), False, 11_159_232, 4_800, 7, 1500, 500),
}
COHORT = 10


@pytest.mark.parametrize(
    ("data", "spafl", "fedavg", "heterofl"),
    [
        # 133.8 is printed for FedAvg, but HeteroFL's 68.88 is half of 137.76
        ("FMNIST", 0.1856, 137.76, 68.88),
        ("CIFAR-10", 0.4537, 258.36, 129.178),
        ("CIFAR-100", 4.6080, 10712, 5356.4),
    ],
)
def test_spafls_communication(data, spafl, fedavg, heterofl):
    """Gbit: 32 bits up and down for what a client sends, by a cohort of ten in every round (section 1.10)."""
    model, is_head_masked, parameters, thresholds, _, rounds, _ = SPAFL[data]

    def gbit(values):
        return 2 * 32 * values * COHORT * rounds / 1e9

    assert gbit(thresholds) == pytest.approx(spafl, abs=1e-4)
    assert gbit(parameters) == pytest.approx(fedavg, rel=1e-4)
    assert gbit(0.5 * parameters) == pytest.approx(heterofl, rel=1e-4)
    # those of CIFAR-10 are of other things than the network's parameters and rows: see test_models.py
    if data != "CIFAR-10":
        shapes = {name: shape for name, shape in Net(model).layout.shapes.items() if len(shape) > 1}
        masked = [shape for name, shape in shapes.items() if is_head_masked or name != "head.weight"]
        assert sum(math.prod(shape) for shape in masked) == parameters
        assert sum(shape[0] for shape in masked) == thresholds


@pytest.mark.parametrize(
    ("data", "ours", "printed", "ratio"),
    [
        ("FMNIST", 10.3185e11, 10.345e11, 1.0026),
        # four times 5 epochs
        ("CIFAR-10", 3.0934e13, 12.382e13, 4.003),
        ("CIFAR-100", 8.7478e14, 8.7289e14, 0.9978),
    ],
)
def test_spafls_operations_of_dense_training(data, ours, printed, ratio):
    """Multiply-adds of masked layers, three passes, a mean over 100 clients (section 1.11)."""
    model, is_head_masked, _, _, epochs, rounds, samples = SPAFL[data]
    masked = sum(n for path, n in Net(model).layer_macs.items() if is_head_masked or path != "head")
    found = 3 * epochs * samples * masked * rounds * COHORT / 100
    assert found == pytest.approx(ours, rel=1e-4) and printed / found == pytest.approx(ratio, rel=1e-3)
    # ours counts the classifier too, 2 a multiply-add: within two in ten thousand
    counted = costs.training_flops(Net(model), epochs * samples) / 2 * rounds * COHORT / 100
    assert counted == pytest.approx(found, rel=2e-4)


def test_the_configurations_of_spafls_table_are_of_the_same_training():
    """The configurations train as long, and mask the same layers, as is counted here."""
    for name, data in (("fashion_mnist", "FMNIST"), ("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100")):
        plan = load_sweep(Path(f"tune_configs/spafl_table1_{name}.yaml"))
        assert plan.published is not None
        experiment = plan.example("spafl")
        _, is_head_masked, _, _, epochs, rounds, _ = SPAFL[data]
        given = (experiment.training.epochs, experiment.rounds, experiment.method.classifier, experiment.clients.cohort)
        assert given == (epochs, rounds, is_head_masked, COHORT)
        assert plan.published.numbers["gbit"].keys() == plan.published.numbers["client_macs"].keys()
        assert plan.published.numbers["gbit"]["local"] == 0


@pytest.mark.parametrize(
    "text", ["text", "{}", '{"section": 3, "changed": []}', '{"section": {}, "changed": []}', "[" * 5000]
)
def test_a_damaged_text_is_refused(text):
    with pytest.raises(ConfigError, match="published: the stored text is damaged: .*Hint: restore a copy of it"):
        from_config({"published": text})
