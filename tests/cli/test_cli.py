"""Commands that start neither Ray nor MLflow, and bad input: exit code 2, one clear error, nothing left behind."""

import json
import re
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import yaml
from helpers import TINY, message
from rows import folder, line, study

from rayfl import cli
from rayfl.cli import train
from rayfl.cli.look import _studies
from rayfl.cli.shared import experiment_of, resumable, say_mlflow
from rayfl.core.net import Net
from rayfl.data import Digits
from rayfl.listeners import LISTENERS
from rayfl.methods import METHODS
from rayfl.models import MODELS

CONFIGS = Path(__file__).parents[2] / "tune_configs"


@pytest.fixture
def rayfl(monkeypatch, capsys, tmp_path):
    """Runs a command in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS", "RAYFL_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))

    def command(*arguments):
        monkeypatch.setattr("sys.argv", ["rayfl", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return command


@pytest.fixture
def config(tmp_path):
    """Writes a YAML file: TINY with changed sections."""

    def write(name="exp.yaml", **sections):
        (tmp_path / name).write_text(yaml.safe_dump(TINY | sections))
        return name

    return write


def test_addresses_are_printed_without_their_password(monkeypatch, capsys, tmp_path):
    say_mlflow(tmp_path, "http://me:secret@host:5000/", "#/page")
    say_mlflow(tmp_path / "my runs", None)
    monkeypatch.setattr("sys.argv", ["rayfl", "run", "a.yaml", "--tracking-uri", "postgresql://me:secret@host/db"])
    for begun in (False, True):
        if begun:
            folder(tmp_path / "a")
        # without a folder there is nothing to continue
        with pytest.raises(KeyboardInterrupt), resumable(tmp_path / "a"):
            raise KeyboardInterrupt
    printed = capsys.readouterr()
    assert printed.out == (
        "open MLflow: http://host:5000/#/page\n"
        f"open MLflow: mlflow ui --backend-store-uri 'sqlite:///{tmp_path}/my runs/mlflow.db'\n"
    )
    assert printed.err == "to continue: rayfl run a.yaml --tracking-uri postgresql://host/db --resume\n"


def test_a_folder_of_another_command_is_refused(rayfl, config, tmp_path):
    config()
    output = tmp_path / "runs"
    folder(output / "swept", kind="sweep")
    folder(output / "scaled", kind="scale")
    for words, expected in {
        "run exp.yaml --name swept": "swept: the folder is of `rayfl sweep`. Allowed: a new folder",
        "run exp.yaml --name swept --resume": "swept: the folder is of `rayfl sweep`. Allowed: a folder of `rayfl run`",
        "sweep quickstart --name scaled --resume": "the folder is of `rayfl scale`. Allowed: a folder of `rayfl sweep`",
        "scale --name scaled": "scaled: the folder is of `rayfl scale`. Allowed: a new folder",
    }.items():
        code, _, err = rayfl(*words.split(), "--output", output)
        assert code == 2 and expected in err.replace("\n", " ")


def test_a_misspelt_section_of_a_sweep(rayfl, tmp_path):
    text = CONFIGS.joinpath("quickstart.yaml").read_text().replace("\nexperiment:", "\nexperimnt:")
    tmp_path.joinpath("typo.yaml").write_text(text)
    for command in ("check", "sweep", "describe"):
        code, _, err = rayfl(command, "typo.yaml", *["--row", "fjord"] * (command == "describe"))
        assert code == 2 and "typo.yaml: unknown key 'experimnt'. Did you mean 'experiment'?" in err


def test_a_file_between_a_run_and_a_sweep(rayfl, config):
    config(rows={"a": {}})
    for command in (["check"], ["sweep"], ["run", "--row", "a"]):
        code, _, err = rayfl(command[0], "exp.yaml", *command[1:])
        assert code == 2 and re.search("exp.yaml: unknown key '(\\w+)'. Did you mean 'experiment.\\1'?", err)


def test_a_check_of_several_files_says_all(rayfl, config):
    config("valid.yaml", method="heterofl")
    config("wrong.yaml", rounds=0)
    code, out, err = rayfl("check", "wrong.yaml", "nowhere", "valid.yaml")
    assert code == 2 and out == "valid.yaml: valid run of heterofl\n"
    assert "wrong.yaml: rounds: 0 is not valid" in err and "nowhere: no such file" in err


def test_a_check_says_what_a_run_would_say(rayfl, config, tmp_path):
    config("few.yaml", clients={"count": 8, "capacities": [1]})
    note = "clients.cohort: 8 instead of the default 10, because there are 8 clients\n"
    assert rayfl("check", "few.yaml") == (0, f"few.yaml: valid run of fedavg\nfew.yaml: {note}", "")
    experiment = {section: value for section, value in TINY.items() if section != "run"}
    for count, said in ((8, f"s.yaml: {note}"), (16, f"s.yaml: a: {note}")):
        experiment["clients"] = {"count": count, "capacities": [1]}
        sweep = {"experiment": experiment, "rows": {"a": {"clients": {"count": 8}}, "b": None}, "search": {}}
        tmp_path.joinpath("s.yaml").write_text(yaml.safe_dump(sweep))
        assert rayfl("check", "s.yaml") == (0, f"s.yaml: valid sweep with 2 rows: a, b\n{said}", "")


def test_a_name_that_no_method_is_like(rayfl, config):
    config(method="fednova")
    code, _, err = rayfl("check", "exp.yaml")
    assert code == 2 and "exp.yaml: method.name: no method is called 'fednova'. Allowed: one of " in err
    assert "fedrora" not in err and "Hint: `rayfl list --like TEXT`" in err


def test_errors_in_a_search_space_name_it(rayfl, tmp_path):
    experiment = {section: value for section, value in TINY.items() if section != "run"}
    space = {"training.lr": {"grid": [0.1, -1]}}
    for search, place in (({"space": space}, "search.space"), ({"spaces": {"a": space}}, "search.spaces.a")):
        sweep = {"experiment": experiment, "rows": {"a": {"training": {"epochs": 1}}}, "search": search}
        tmp_path.joinpath("s.yaml").write_text(yaml.safe_dump(sweep))
        code, _, err = rayfl("check", "s.yaml")
        assert (code, err) == (2, f"error: s.yaml: {place}: training.lr: -1 is not valid. Allowed: more than 0\n")


def test_errors_of_the_file_system_name_the_file(rayfl, tmp_path):
    tmp_path.joinpath("plots").write_text("in the way of a folder")
    folder(tmp_path, lines=[line(1, accuracy_mean=0.5, accuracy_1=0.5)])
    code, _, err = rayfl("report", ".")
    assert code == 1 and "plots: " in err and "Errno" not in err and "Traceback" not in err


def test_a_damaged_database_is_an_error_of_one_line(rayfl, tmp_path):
    tmp_path.joinpath("runs").mkdir()
    tmp_path.joinpath("runs", "mlflow.db").write_bytes(b"damaged" * 1000)
    code, _, err = rayfl("compare")
    assert code == 2 and "mlflow.db: MLflow cannot be read: (sqlite3.DatabaseError) file is not a database" in err
    assert len(err.splitlines()) == 1


HETEROFL = [
    (1.0, 1_556_874, 80_504_320),
    (0.5, 391_370, 20_493_056),
    (0.25, 98_922, 5_306_752),
    (0.125, 25_274, 1_418_432),
    (0.0625, 6_594, 400_480),
]


@pytest.mark.parametrize("capacities", ["1,0.5,0.25,0.125,0.0625", "a1-b1-c1-d1-e1"])
def test_describe_gives_the_published_table(rayfl, capacities):
    code, out, _ = rayfl(
        *("describe", "--model", "heterofl_cnn", "--capacities", capacities),
        *("--convention", "heterofl_official", "--json"),
    )
    records = json.loads(out)
    assert code == 0
    assert [(r["capacity"], r["parameters"], r["flops"]) for r in records] == HETEROFL
    assert [(r["bytes_down"], r["bytes_up"]) for r in records] == [(4 * p, 4 * p) for _, p, _ in HETEROFL]
    assert [round(r["space_mb"], 4) for r in records] == [5.939, 1.493, 0.3774, 0.0964, 0.0252]


def test_describe_counts_what_a_method_sends(rayfl, config):
    code, out, _ = rayfl("describe", "--model", "digits_cnn", "--capacities", "1,0.5", "--method", "fedavg", "--json")
    whole = 4 * json.loads(out)[0]["parameters"]
    assert code == 0 and [record["bytes_down"] for record in json.loads(out)] == [whole, whole]
    name = config(method={"name": "fedavg", "size": "smallest"})
    code, out, _ = rayfl("describe", name, "--json")
    records = json.loads(out)
    assert [record["capacity"] for record in records] == TINY["clients"]["capacities"]
    assert {record["bytes_down"] for record in records} == {4 * records[-1]["parameters"]}
    code, out, _ = rayfl("describe", name, "--method", "heterofl", "--capacities", "0.5", "--json")
    [record] = json.loads(out)
    assert record["capacity"] == 0.5 and record["bytes_down"] == 4 * record["parameters"]


def test_describe_a_row_of_a_sweep(rayfl):
    code, out, _ = rayfl("describe", CONFIGS / "nested_fashion_mnist.yaml", "--row", "nefl-wd", "--json")
    records = json.loads(out)
    assert code == 0 and [record["capacity"] for record in records] == [1, 0.75, 0.5, 0.25]
    assert records[-1]["blocks"] == "10 10 10 10" and records[-1]["width"] == 0.671875


@pytest.mark.parametrize("option", [("--coverage", "2"), ("--convention", "flops2")])
def test_describe_refuses_what_times_do_not_show(rayfl, option):
    code, _, err = rayfl("describe", CONFIGS / "time_digits.yaml", "--row", "heterofl", "--time", *option)
    assert code == 2 and f"{option[0]}: not valid with --time" in err


def test_describe_as_a_table(rayfl):
    code, out, _ = rayfl("describe", "--model", "lenet5_caffe", "--capacities", "1")
    assert code == 0 and "430,500" in out


def test_list_names_everything(rayfl):
    code, out, _ = rayfl("list")
    known = (*METHODS, *MODELS, *LISTENERS, "dirichlet", "fashion_mnist", "macro_f1", "quantize")
    assert code == 0 and all(name in out for name in known)
    assert "mu: 0.01, stragglers: 0.0" in out and "test_fraction: 0.2" in out and "samples: null" in out


def test_list_by_words_of_the_data_sheets(rayfl):
    names = lambda out: re.findall(r"^  (\w+) {2,}", out, re.M)  # noqa: E731
    code, out, _ = rayfl("list", "methods", "--like", "PROTOTYPE class")
    assert code == 0 and names(out) == ["fedproto", "fedtgp"]
    # all words, each from its start: "proto" is inside of FedProto only
    assert rayfl("list", "methods", "--like", "prototypes generator")[0] == 2
    assert names(rayfl("list", "--like", "fedtgp")[1]) == ["fedtgp"]
    code, out, _ = rayfl("list", "configs", "--like", "writers mnist")
    assert code == 0 and names(out) == ["writers_mnist"]


def test_check_says_what_a_file_is(rayfl, config, tmp_path):
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"experiment": SWEPT, "rows": {"a": None, "b": None}}))
    code, out, _ = rayfl("check", config(), "sweep.yaml")
    assert code == 0
    assert [line for line in out.splitlines() if ": valid " in line] == [
        "exp.yaml: valid run of fedavg",
        "sweep.yaml: valid sweep with 2 rows: a, b",
    ]


def test_check_names_every_wrong_file(rayfl, config, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"experiment": SWEPT | {name: 1}, "rows": {"a": None}}))
    code, out, err = rayfl("check", "one.yaml", config(method="heterofl"), "two.yaml")
    assert code == 2 and out.splitlines() == ["exp.yaml: valid run of heterofl"]
    first, second = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "one.yaml: " in first and "'one'" in first and "two.yaml: " in second and "'two'" in second


def test_check_goes_on_after_an_error_in_a_users_code(rayfl, config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lab_model.py").write_text(
        "import rayfl\n\n\nclass Ints(rayfl.ImageModel):\n"
        "    def build(self, net):\n        return rayfl.linear(64, self.labels)\n"
    )
    (tmp_path / "ints.yaml").write_text(yaml.safe_dump({"model": "lab_model:Ints", "data": "digits"}))
    code, out, err = rayfl("check", "ints.yaml", config(method="heterofl"))
    assert code == 2 and out.splitlines() == ["exp.yaml: valid run of heterofl"]
    assert err.startswith(
        "error: ints.yaml: model: lab_model:Ints, build at width 1: "
        "AttributeError: 'int' object has no attribute 'length'"
    )
    assert "return rayfl.linear(64, self.labels)" in err


BAD = {
    "unknown key": ({"training": {"lrr": 1}}, "training.lrr: unknown key 'lrr'. Did you mean 'lr'?"),
    "unknown section": ({"trainig": {}}, "unknown key 'trainig'. Did you mean 'training'?"),
    "wrong type": ({"training": {"lr": "fast"}}, "training.lr: 'fast' is not valid. Allowed: a number"),
    "rate outside (0, 1]": ({"clients": {"capacities": [1, 1.5]}}, "fractions in (0, 1]; 1.5 is not"),
    "rate 0": ({"clients": {"capacities": [0]}}, "fractions in (0, 1]; 0.0 is not"),
    "cohort": ({"clients": {"count": 3, "cohort": 4}}, "a cohort of at most count = 3 clients; cohort is 4"),
    "no data for a client": (
        {"clients": {"count": 200, "cohort": 4}},
        "bad.yaml: clients.count: 200 is not valid. Allowed: at most 72",
    ),
    "no channel": ({"clients": {"capacities": [1e-6], "metric": "params"}}, "the narrowest network of model"),
    "norm groups": ({"model": {"name": "digits_cnn", "norm": "group"}}, "needs a multiple of 4 channels"),
    "method": ({"method": "fedrolexx"}, "no method is called 'fedrolexx'. Did you mean 'fedrolex'?"),
    "model": ({"model": "resnet"}, "no model is called 'resnet'"),
    "data": ({"data": "minst"}, "no data set is called 'minst'. Did you mean 'mnist'?"),
    "data folder": (
        {"data": {"name": "mnist", "root": "/no/such/folder"}, "model": "mcmahan_cnn"},
        "data.root: the folder '/no/such/folder' does not exist. Allowed: an existing folder",
    ),
}


SWEPT = TINY | {"run": {"chunk": 1}}
"""A sweep's trials are Ray's."""


@pytest.mark.parametrize(("sections", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_bad_input(rayfl, tmp_path, command, sections, message):
    given = {"experiment": SWEPT | sections} if command == "sweep" else TINY | sections
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(given))
    code, out, err = rayfl(command, "bad.yaml")
    assert code == 2
    assert err.startswith("error: ") and message in err.replace("\n", " ")
    assert "Traceback" not in out + err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nothere.yaml"], "nothere.yaml: no such file, and no shipped file of this name. Allowed: "),
        (["run", "exp.yamll"], "exp.yamll: no such file, and no shipped file of this name. Did you mean 'exp.yaml'?"),
        (
            ["check", "tune_configs/quickstat.yaml"],
            "tune_configs/quickstat.yaml: no such file, and no shipped file of this name. Did you mean 'quickstart'?",
        ),
        (["run", "quickstat"], "quickstat: no such file, and no shipped file of this name. Did you mean 'quickstart'?"),
        (["run", "exp.yaml", "--set", "training.lr"], "Allowed: path=value"),
        (["run", "exp.yaml", "--set", "training.lrr=1"], "Did you mean 'lr'?"),
        (["run", "exp.yaml", "--resume"], "the folder contains no run"),
        (["run", "exp.yaml", "--row", "a"], "--row: exp.yaml is a run's file, which has no rows"),
        (["run", "exp.yaml", "--name", "n" * 300], "--name: 'nnn"),
        (["run", "exp.yaml", "--name", "../x"], "--name: '../x' is not valid. Allowed: the name of a folder"),
        (["run", "exp.yaml", "--name", ".."], "--name: '..' is not valid. Allowed: the name of a folder"),
        (["run", "exp.yaml", "--name", "/tmp/x"], "--name: '/tmp/x' is not valid. Allowed: the name of a folder"),
        (["run", "exp.yaml", "--name", "mlflow.db"], "--name: 'mlflow.db' is not valid. Allowed: the name of a folder"),
        (["run", "exp.yaml", "--name", "artifacts"], "--name: 'artifacts' is not valid. Allowed: the name of a folder"),
        (["run", "exp.yaml", "--name", "a\udcffb"], "--name: 'a\\udcffb' is not valid. Allowed: the name of a folder"),
        (["run", "exp.yaml", "--output", "exp.yaml"], "exp.yaml is a file. Allowed: a new or an existing folder"),
        (["run", "exp.yaml", "--output", "exp.yaml/runs"], "exp.yaml is a file. Allowed: a new or an existing folder"),
        (
            ["run", "exp.yaml", "--output", "n" * 300],
            "cannot be made: File name too long. Allowed: a new or an existing",
        ),
        (["describe"], "neither CONFIG nor --model is set"),
        (["describe", "--model", "lenet"], "Did you mean 'lenet5_caffe'?"),
        (
            ["describe", "--model", "resnet18", "--convention", "mac"],
            "Invalid value for '--convention': 'mac' is not one of",
        ),
        (["describe", "--model", "resnet18", "--capacities", "x,y"], "letters a to e with a whole weight"),
        (["describe", "--model", "resnet18", "--capacities", "1;0.5"], "--capacities: '1;0.5' is not valid"),
        (["describe", "--model", "resnet18", "--row", "x"], "--row: a model has no rows"),
        (
            ["describe", "--model", "resnet18", "--classes", "-1"],
            "Invalid value for '--classes': Input should be greater than or",
        ),
        (["describe", "exp.yaml", "--classes", "3"], "--classes: a CONFIG's data set defines its classes"),
        (
            ["list", "methods", "--like", "no such method"],
            "--like: no entry has the words 'no such method'. Allowed: words of a name or a data sheet",
        ),
        (
            ["list", "os:path"],
            "os:path: the class is of no kind that a file can name. Allowed: a subclass of rayfl.DataSet,",
        ),
        (["list", "nowhere:Thing"], "'nowhere:Thing' cannot be imported (ModuleNotFoundError: No module"),
        (["report", "."], ".: the folder contains no run. Allowed: the folder of a sweep or a run"),
        (["report", "nowhere"], "nowhere: there is no such folder. Allowed: the folder of a sweep or a run"),
        (["compare", "--format", "html"], "Invalid value for '--format': 'html' is not one of 'table'"),
        (["compare"], "run a sweep first"),
        (["export", ".", "--capacity", "1", "--to", "x"], "the folder contains no run"),
        (["walk"], "walk"),
        (
            ["run", "exp.yaml", "--rounds", "0"],
            "Invalid value for '--rounds': Input should be greater than or equal to 1",
        ),
        (["run", "exp.yaml", "--rounds", "5", "--set", "rounds=2"], "--rounds, --set rounds: both are set."),
        (["run", "exp.yaml", "--set", "clients.count=1000000"], "--set clients.count=1000000: clients.count: 1000000"),
        (["compare", "--tracking-uri", "sqlite:///typo.db"], "typo.db: the file does not exist"),
        (["sweep", "quickstart", "--cluster", "exp.yaml"], "--cluster: 'exp.yaml' is not valid"),
        (["check", "quickstart.txt"], "quickstart.txt: no such file, and no shipped file of this name. Did you mean"),
        (["check", "nowhere", "exp.yaml", "nothere"], "nothere: no such file"),
        (
            ["describe", "quickstart"],
            "the file is a sweep. Allowed: a run's file, or --row with one of fedavg-smallest",
        ),
        (["explain", "training.lr.foo"], "training.lr is a value, without settings. Allowed: training.lr"),
        (["explain", "cohort"], "a file has no setting 'cohort'. Did you mean clients.cohort?"),
        (
            ["sweep", "exp.yaml"],
            "exp.yaml: the file is a run. Allowed: a sweep's file. Hint: `rayfl run exp.yaml` runs it",
        ),
        (["run", "exp.yaml", "--fast"], "No such option: --fast"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(rayfl, config, tmp_path, arguments, message):
    config()
    code, out, err = rayfl(*arguments)
    assert (code, "Traceback" in out + err) == (2, False)
    assert message in err.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["exp.yaml"]


BAD_SWEEPS = {
    "metric": (
        {"search": {"metric": "acuracy_mean"}},
        "search.metric: no metric is called 'acuracy_mean'. Did you mean",
    ),
    "no validation set": (
        {"experiment": SWEPT | {"evaluation": {"holdout": 0}}},
        "search.metric: 'validation_accuracy_mean' needs validation data with rows.run. Allowed: evaluation.holdout "
        "above 0",
    ),
    "searcher": (
        {"search": {"searcher": "optunaa"}},
        "search.searcher: no searcher is called 'optunaa'. Did you mean 'optuna'?",
    ),
    "scheduler": ({"search": {"scheduler": "pbt"}}, "search.scheduler: 'pbt' is not valid. Allowed: one of fifo, asha"),
    "row's name": ({"rows": {"het/ero": None}}, "rows: 'het/ero' is not valid. Allowed: the name of a folder"),
    "row's type": ({"rows": {"a": "heterofl"}}, "rows.a: 'heterofl' is not valid. Allowed: sections"),
    "unequal actors": ({"rows": {"a": None, "b": {"run": {"threads": 2}}}}, "rows.b: run:"),
    "domain": (
        {"search": {"space": {"training.lr": {"uniform": ["a", 1]}}}},
        "uniform: ['a', 1] is not valid. Allowed: numbers without quotes",
    ),
    "value in the space": ({"search": {"space": {"training.lr": {"grid": [0.1, -1]}}}}, "training.lr: -1 is not valid"),
    "path in the space": ({"search": {"space": {"training.lrr": {"grid": [1]}}}}, "Did you mean 'lr'?"),
    "unknown key": ({"serch": {}}, "unknown key 'serch'. Did you mean 'search'?"),
}


@pytest.mark.parametrize(("sections", "message"), BAD_SWEEPS.values(), ids=BAD_SWEEPS)
def test_bad_sweep(rayfl, tmp_path, sections, message):
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump({"experiment": SWEPT} | sections))
    for command in ("check", "sweep"):
        code, out, err = rayfl(command, "bad.yaml")
        assert (code, "Traceback" in out + err) == (2, False)
        assert err.startswith("error: bad.yaml: ") and message in err.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


def test_nobody_answers_at_an_address(rayfl, config, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        code, _, err = rayfl("run", config(run={"executor": "ray"}), "--address", address)
    assert code == 2 and f"--address {address}: no Ray head answers at this address" in err.replace("\n", " ")
    code, _, err = rayfl("run", "exp.yaml", "--address", "ray://head")
    assert code == 2 and "Allowed: HOST:PORT of a Ray head" in err.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["exp.yaml"]


@pytest.mark.parametrize("command", ["run", "sweep"])
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"actors": 1000}, "1000 client actors of 1 CPUs and 0 GPUs do not fit: this machine has "),
        ({"gpus": 64}, "1 client actor of 1 CPUs and 64 GPUs do not fit: this machine has "),
        ({"server_cpus": 1000}, "run.server_cpus: 1000 is not valid. Allowed: at most "),
    ],
)
def test_what_this_machine_has_not_is_refused_before_ray_starts(rayfl, tmp_path, monkeypatch, command, asked, said):
    without_mlflow(monkeypatch)
    given = TINY | {"run": asked | ({"executor": "ray"} if command == "run" else {})}
    (tmp_path / "big.yaml").write_text(yaml.safe_dump({"experiment": given} if command == "sweep" else given))
    code, _, err = rayfl(command, "big.yaml")
    assert code == 2 and said in err.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["big.yaml"]


@pytest.mark.parametrize("command", ["run", "sweep", "compare"])
def test_an_address_that_no_store_of_mlflow_has(rayfl, tmp_path, command):
    (tmp_path / "exp.yaml").write_text(yaml.safe_dump({"experiment": SWEPT} if command == "sweep" else TINY))
    code, _, err = rayfl(command, "exp.yaml", "--tracking-uri", "nonsense://me:secret@x")
    assert code == 2
    assert err.startswith(
        "error: --tracking-uri: 'nonsense://x' is not valid. Allowed: sqlite:///FILE, http://HOST:PORT, "
    )
    assert [path.name for path in tmp_path.iterdir()] == ["exp.yaml"]


def test_check_reads_tables_and_users(rayfl, config, tmp_path):
    (tmp_path / "a.csv").write_text("x,sex,y\n" + "1,m,0\n,f,1\n" * 10)
    (tmp_path / "b.csv").write_text("sex,y\nm,0\nf,1\n")
    data = {"name": "table", "train": "a.csv", "y": "y", "categories": ["sex"], "missing": "mean"}
    cases = [
        ({"data": "digits", "partition": "users"}, "partition.name: users needs user ids"),
        ({"data": data | {"missing": "refuse"}}, "data: column 'x' of the training table has 10 missing values"),
        ({"data": data | {"categories": []}}, "data: column 'sex' of the training table is no column of numbers"),
        ({"data": data | {"test": "b.csv"}}, "data: the test table has no column 'x'"),
        ({"data": data | {"x": ["z"]}}, "data: no column is called 'z'"),
        ({"data": data | {"public": {"data": "breast_cancer"}}}, "data.public: samples of breast_cancer have shape"),
    ]
    few = {"clients": {"count": 2, "cohort": 2}, "partition": "iid", "model": "mlp", "method": "fedavg"}
    for sections, expected in cases:
        model = {} if sections["data"] == "digits" else few
        code, _, err = rayfl("check", config(**model | sections))
        assert code == 2 and f"error: exp.yaml: {expected}" in err.replace("\n", " ")
    assert rayfl("check", config(**few, data=data))[0] == 0
    text = {"data": {"name": "synthetic_text", "samples": 50}, "model": "heterofl_transformer", "partition": "iid"}
    code, _, err = rayfl("check", config(**text, clients={"count": 100, "cohort": 2}))
    assert code == 2 and err.startswith("error: exp.yaml: clients.count: 100 is not valid. Allowed: at most 46")


def test_a_comparison_without_sweeps_is_refused():
    assert message(_studies, [SimpleNamespace(read=lambda kind: [])], [], {}) == (
        "compare: MLflow has no sweep. Hint: run a sweep first, or `rayfl report FOLDER` for a run"
    )


@pytest.mark.parametrize(
    ("names", "found"),
    [(["quickstart", "two"], ["old", "new"]), (["two"], ["new"]), (["file"], ["file"]), ([], ["new"])],
)
def test_a_sweep_is_named_by_its_experiment_before_its_file(names, found):
    """The newest comes first; both are of one file."""
    sweeps = [
        {"id": id, "label": label, "experiment": experiment}
        for id, label, experiment in (
            ("new", "quickstart", "two"),
            ("old", "quickstart", "quickstart"),
            ("file", "file", "three"),
        )
    ]
    reader = SimpleNamespace(read=lambda kind="run", **wanted: sweeps if kind == "sweep" else [])
    assert [study.sweep["id"] for study in _studies([reader], names, {})] == found


def test_a_report_names_rows_without_results(rayfl, tmp_path):
    sweep = study(tmp_path / "sweep")
    folder(sweep.path / "trials" / "nefl", "nefl", status="failed", sweep=sweep.id, title="NeFL")
    code, out, err = rayfl("report", "sweep")
    assert code == 0, err
    assert "\nNeFL: not ranked, because no finished trial has a finite accuracy_mean\n" in out
    assert out.count("not ranked") == 1


def test_a_report_on_a_killed_run_is_of_its_lines(rayfl, tmp_path):
    folder(tmp_path / "run", lines=[line(1, accuracy_mean=0.25), line(2, accuracy_mean=0.5)], status="running")
    code, out, err = rayfl("report", "run")
    assert code == 0, err
    assert "50.00" in out and "fedavg has not ended: these results are not final" in out


def test_a_run_of_a_sweeps_file_is_refused_unless_a_row_is_named(rayfl, tmp_path, monkeypatch):
    rows = {"het": {"method": "heterofl"}, "avg": None}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"experiment": SWEPT, "rows": rows}))
    code, _, err = rayfl("run", "sweep.yaml")
    assert code == 2
    assert err == "error: sweep.yaml: the file is a sweep. Allowed: a run's file, or --row with one of avg, het\n"
    code, _, err = rayfl("run", "sweep.yaml", "--row", "hte")
    assert code == 2 and "no row is called 'hte'. Did you mean 'het'? Allowed: avg, het" in err
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]
    without_mlflow(monkeypatch)
    code, _, err = rayfl("run", "sweep.yaml", "--row", "het", "--set", "rounds=1", "--set", "run.executor=serial")
    assert code == 0, err
    saved = json.loads((tmp_path / "runs" / "sweep-het" / "config.json").read_text())
    assert (saved["method"]["name"], saved["rounds"]) == ("heterofl", 1)


def without_mlflow(monkeypatch):
    monkeypatch.setattr(
        train, "sending_to", lambda *_: nullcontext(SimpleNamespace(add=lambda path: None, page=lambda path: ""))
    )


def test_exported_into_a_file(rayfl, config, tmp_path, monkeypatch):
    without_mlflow(monkeypatch)
    (tmp_path / "taken").write_text("")
    code, _, err = rayfl("run", config(rounds=1), "--output", "new")
    assert code == 0, err
    code, _, err = rayfl("export", "new/exp", "--capacity", "0.3", "--to", "taken")
    assert code == 2
    assert err == "error: taken: the folder cannot be made: taken is a file. Allowed: a new or an existing folder\n"
    code, _, err = rayfl("export", "new/exp", "--capacity", "0.5", "--to", "there")
    assert (code, err) == (2, "error: capacity: 0.5 is not valid. Allowed: 0.3, 0.2, 0.1\n")
    code, _, err = rayfl("export", "new/exp", "--capacity", "0.3", "--to", "there", "--client", "6")
    assert (code, err) == (2, "error: client: 6 is not valid. Allowed: 0 to 5\n")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("output", ["a[/b]", "a\udcffb"])
def test_names_of_folders_are_printed_as_they_are(rayfl, config, tmp_path, output, monkeypatch):
    """Brackets are no markup, and what cannot be encoded does not end a good run."""
    if output != "a[/b]":
        without_mlflow(monkeypatch)
    code, out, err = rayfl("run", config(rounds=1), "--output", output)
    assert code == 0, err
    said = str(tmp_path / output / "exp").encode(errors="replace").decode()
    assert f"results in {said}" in out.replace("\n", "")
    assert json.loads((tmp_path / output / "exp" / "run.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_bad_input_in_a_process_of_its_own(config, tmp_path):
    program = Path(sys.executable).with_name("rayfl")
    name = config(training={"lr": -1})
    done = subprocess.run([program, "run", name], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {name}: training.lr: -1 is not valid. Allowed: more than 0\n"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_run_that_fails_says_why(rayfl, config, tmp_path, monkeypatch):
    without_mlflow(monkeypatch)
    code, out, err = rayfl("run", config(training={"lr": 1e30, "steps": 2}, updates={"policy": "stop"}))
    assert code == 1
    assert err.startswith("failed: round 1: the update of client ") and "lower training.lr" in err
    assert "Traceback" not in out + err
    record = json.loads((tmp_path / "runs" / "exp" / "run.json").read_text())
    assert record["status"] == "failed" and record["error"] in err


def test_a_run_of_clients_own_networks_is_judged_by_them(rayfl, config, tmp_path, monkeypatch):
    """Its progress, its tables and its plots; a report too."""
    without_mlflow(monkeypatch)
    code, out, _ = rayfl("run", config(method="standalone", evaluation={"every": 1}))
    folder = tmp_path / "runs" / "exp"
    local = json.loads((folder / "result.json").read_text())["local_accuracy_mean"]
    assert code == 0 and f", local accuracy {local:.4f}, " in out and "best local %" in out
    assert "submodels.png" not in [file.name for file in (folder / "plots").iterdir()]
    curve, table = folder / "plots" / "learning_curves.csv", folder / "results.md"
    for _ in range(2):
        assert curve.read_text().splitlines()[-1] == f"2,{local}"
        header, _, row = table.read_text().splitlines()
        assert header.startswith("| method | seeds | local % | ")
        assert row.startswith(f"| standalone | 1 | {100 * local:.2f} | ")
        curve.unlink()
        table.unlink()
        assert rayfl("report", folder)[0] == 0


def test_the_defaults_need_no_network():
    assert Digits().arrays().train["x"].shape == (1438, 1, 8, 8)
    assert Net(MODELS["digits_cnn"](input=(1, 8, 8))).parameters == 53_194


def test_a_setting_of_a_row_may_change_what_the_model_takes_from_the_data(tmp_path):
    config = tmp_path / "exp.yaml"
    config.write_text(yaml.safe_dump({"experiment": SWEPT, "rows": {"one": {"method": "heterofl"}}}))
    assert experiment_of(config, None, "one").model.classes == 4
    assert experiment_of(config, ["data.classes=3", "partition=iid"], "one").model.classes == 3
