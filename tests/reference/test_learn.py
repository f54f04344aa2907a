"""rayfl init, explain, list, schema: what a file may say, as the classes that check it have it."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from helpers import TINY
from pydantic import Field
from typer.testing import CliRunner

from rayfl import cli
from rayfl.cli.files import find_config
from rayfl.config import Config, load_yaml
from rayfl.experiment import Experiment, load_experiment, read_experiment
from rayfl.methods import METHODS
from rayfl.reference.card import MATH, card, plain
from rayfl.reference.catalogue import FILLED, KINDS
from rayfl.reference.schema import schema
from rayfl.reference.settings import SECTIONS, SWEEP, documented, find, settings, worded
from rayfl.results.folder import flatten
from rayfl.training.privacy import Privacy
from rayfl.tuning.load import load_sweep

SHIPPED = sorted(Path("tune_configs").glob("*.yaml"))


def rayfl(*arguments, columns=80):
    """(exit code, what it printed); of errors their message."""
    answer = CliRunner().invoke(cli.app, list(map(str, arguments)), env={"COLUMNS": str(columns)}, prog_name="rayfl")
    return answer.exit_code, answer.output or str(answer.exception)


# init


def uncommented(text: str) -> str:
    """With every setting that stood behind a "# " given."""
    return "\n".join(re.sub(r"^( *)# ( *[a-z_]+:)", r"\1\2", line) for line in text.splitlines())


def test_init_writes_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert rayfl("init", "mine.yaml")[0] == 0
    code, out = rayfl("check", "mine.yaml")
    assert (code, out) == (0, "mine.yaml: valid run of heterofl\n")
    text = Path("mine.yaml").read_text()
    given = load_experiment("mine.yaml")
    whole = yaml.safe_load(uncommented(text))
    assert set(whole) == set(Experiment.model_fields)
    # privacy excludes a system, and has settings without a default
    assert set(whole.pop("privacy")) == set(Privacy.model_fields)
    assert read_experiment(whole, "all").with_(system=None) == given
    assert [name for name in settings(type(given.method)) if f" {name}: " not in text] == []
    assert all(len(line) <= 100 for line in text.splitlines() if line.lstrip().startswith("##"))
    quick = given.with_(rounds=1, run={"executor": "serial"})
    from rayfl.driver import run

    assert len(run(quick).lines) == 1


def test_init_writes_a_comparison(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert rayfl("init", "both.yaml", "--sweep")[0] == 0
    assert (
        rayfl("check", "both.yaml")[1]
        == "both.yaml: valid sweep with 4 rows: fedavg-smallest, heterofl, fjord, fiarse\n"
    )
    mine, shipped = load_sweep("both.yaml"), load_sweep(find_config(Path("quickstart")))
    assert (mine.plain(), mine.trials) == (shipped.plain(), shipped.trials)
    whole = yaml.safe_load(uncommented(Path("both.yaml").read_text()))
    assert set(whole["search"]) == set(settings(SECTIONS["search"]))


def test_init_overwrites_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("x")
    assert rayfl("init", "mine.yaml") == (1, "mine.yaml: the file exists. Allowed: a new file")
    assert rayfl("init", "no/mine.yaml")[1] == "no/mine.yaml: no is not a folder. Allowed: a file in an existing folder"
    assert Path("mine.yaml").read_text() == "x"


# explain


def test_explain_says_all_of_a_setting():
    code, out = rayfl("explain", "training.lr")
    assert code == 0 and [line.strip() for line in out.splitlines()][:3] == [
        "training.lr: Learning rate in round 0.",
        "a number, more than 0. Default: 0.05",
        "in section training: Local training of clients",
    ]
    assert "set in ablation_" in out and "ablation_labels_digits" in out
    out = rayfl("explain", "method.mu", "clients.assignment", "search.trials")[1]
    assert "in method fedprox" in out and "one of fixed, dynamic, tiers. Default: fixed" in out
    assert (
        "at least 1, at most 10000. Default: 1" in out and "set in knowledge_fashion_mnist, nefl_search_digits" in out
    )


def test_explain_says_which_methods_have_another_default():
    out = rayfl("explain", "method.server.epochs", "method.distillation.epochs", "method.mu")[1]
    assert "Default: 1; 100 in fedtgp" in out and "Default: null; 5 in dsfl, takfl; 20 in fedbe" in out
    assert "Default: 0.01\n" in "".join(f"{line.rstrip()}\n" for line in out.splitlines())


def test_explain_settings_of_a_class_that_a_setting_names():
    out = rayfl("explain", "data.public.data.root", "model.base.heads", "rows.a")[1]
    assert "data.public.data.root: Folder of the files." in out and "in model.base vit_b_16" in out
    assert "rows.a: Label -> settings that this row changes." in out


def test_explain_of_every_path():
    """Experiments with every method, and every section of a file."""
    paths = {*SWEEP, *(f"search.{name}" for name in settings(SECTIONS["search"]))}
    for kind_of in KINDS:
        for cls in KINDS[kind_of].known().values():
            paths |= {kind_of, *(f"{kind_of}.{option}" for option in settings(cls))}
    paths |= set(flatten(read_experiment(TINY, "tiny").plain())) - {f"model.{name}" for name in FILLED["model"]}
    code, out = rayfl("explain", *sorted(paths))
    assert code == 0, out
    assert max(map(len, out.splitlines())) <= 140
    said = {line.partition(":")[0].rstrip() for line in out.splitlines()}
    assert [path for path in paths if path.removesuffix(".name") not in said] == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "training.lrr",
            "training.lrr: training has no setting 'lrr'. Did you mean 'lr'? Allowed: accumulate, batch_size, ",
        ),
        ("trainig", "trainig: a file has no setting 'trainig'. Did you mean 'training'? Allowed: clients, data, "),
        (
            "method.mux",
            "method.mux: method has no setting 'mux'. Did you mean 'mu'? Allowed: adaptive, aggregation, alpha, ",
        ),
        ("0", "0: a file has no setting '0'. Allowed: "),
        ("fiars", "fiars: a file has no setting 'fiars'. Did you mean 'fiarse'? Allowed: clients, data, "),
        ("search.tials", "search.tials: search has no setting 'tials'. Did you mean 'trials'? Allowed: "),
    ],
)
def test_explain_of_what_is_not_there(path, message):
    code, out = rayfl("explain", path)
    assert code == 1 and out.startswith(message)


def test_explain_prints_the_card_of_a_name():
    code, out = rayfl("explain", "fiarse", "digits", columns=200)
    assert code == 0
    for text in ("NeurIPS 2024", "biased_term", "Public data: none", "method: fiarse", "quickstart: rows fiarse"):
        assert text in " ".join(out.split())
    assert "data: digits" in out


@pytest.mark.parametrize("place", KINDS)
def test_every_name_has_a_card(place):
    """The smallest file of a method is valid: `smallest` raises otherwise."""
    for name, cls in KINDS[place].known().items():
        text = card(place, name, {})
        assert text.startswith(f"# {name}\n\n`{place}: {name}`. ")
        assert [key for key in settings(cls) if f"| `{key}` |" not in text] == []


def test_a_card_says_what_a_method_needs():
    assert "- Public data: samples and labels.\n" in card("method", "fedmd", {})
    assert "- Model: with early exits.\n" in card("method", "depthfl", {})
    assert "weights: [0, 1]" in card("method", "fedgkt", {})
    assert "- Fixed capacities: " in card("method", "hetlora", {})
    assert "- Fixed capacities: " not in card("method", "heterofl", {})
    files = {"a": {"experiment": {"method": "fedmd"}, "rows": {"b": {"method": {"name": "fedmd"}}, "c": None}}}
    assert "- `a`: rows b\n" in card("method", "fedmd", files)


@pytest.mark.parametrize("name", METHODS)
def test_a_card_of_a_method_has_its_equations_and_its_cost(name):
    text = card("method", name, {})
    assert len(MATH.findall(text)) >= 7 and "$" not in plain(text)
    assert re.search(r"\n    .*\$.*\n\nCost per round: .*\bdown\b.*\bserver\b", text, re.S)
    assert "as in `base`" not in text


def test_every_setting_is_explained():
    """The words are read from the source: a field without some is one that says nothing."""
    silent = {"data", "partition", "model", "method"}
    roots = {section: find(section).below for section in settings(Experiment)}
    classes = {section: some[""] for section, some in roots.items() if "" in some}
    named = {f"{kind} {name}": cls for kind in KINDS for name, cls in KINDS[kind].known().items()}
    for section, cls in (classes | dict(SECTIONS) | named).items():
        assert [f"{section}.{name}" for name, s in settings(cls).items() if not s.text] == [], section
    assert [s.name for s in settings(Experiment).values() if not s.text and s.name not in {*classes, *silent}] == []


class Base(Config):
    one: int = Field(default=1, ge=1, lt=9)
    """The first."""


class Derived(Base):
    two: float | None = None
    one: int = 2
    """The first, anew: over
    two lines."""
    # no words
    three: tuple[int, ...] = ()


def test_words_below_fields():
    assert documented(Derived) == {"one": "The first, anew: over two lines."}
    assert [s.line for s in settings(Base).values()] == ["a whole number, at least 1, less than 9. Default: 1"]
    assert [s.line for s in settings(Derived).values()] == [
        "a whole number. Default: 2",
        "a number, or null. Default: null",
        "a list, each a whole number. Default: []",
    ]
    assert worded(bool | int) == "true or false, or a whole number"


# list


def test_list_of_one_kind_fits_80_columns():
    code, out = rayfl("list", "methods")
    assert code == 0 and out.startswith("methods (`method:` in a file)\n")
    # no terminal: tables for a pipe
    assert [name for name in METHODS if f"\n  {name}" not in out] == [] and "digits_cnn" not in out
    assert "wide_resnet101_2" in rayfl("list", "models", "scores")[1]
    out = rayfl("list", "configs")[1]
    assert [path.stem for path in SHIPPED if f"  {path.stem} " not in out] == []
    code, out = rayfl("list", "metods")
    assert code == 1 and out.startswith("list: 'metods' is not valid. Allowed: methods, models, data, partitions, ")


def test_list_of_ones_own():
    code, out = rayfl("list", "helpers:PersonalHead")
    assert code == 0 and "helpers:PersonalHead" in out and "fedavg " not in out


# schema


@pytest.fixture(scope="module")
def validators():
    found = {}
    for kind in ("run", "sweep"):
        jsonschema.Draft202012Validator.check_schema(schema(kind))
        found[kind] = jsonschema.Draft202012Validator(schema(kind))
    return found


@pytest.mark.slow
def test_every_shipped_file_is_right_by_the_schema(validators):
    wrong = {path.stem: [e.message for e in validators["sweep"].iter_errors(load_yaml(path))][:1] for path in SHIPPED}
    assert {name: errors for name, errors in wrong.items() if errors} == {}


def test_sections_that_may_be_null_are_so_in_the_schema(validators):
    validators["run"].validate({"model": "digits_cnn", "system": None, "privacy": None})
    validators["sweep"].validate({"experiment": {}, "rows": {"untimed": {"system": None}}})
    assert not validators["run"].is_valid({"model": "digits_cnn", "training": None})


@pytest.mark.parametrize("method", METHODS)
def test_a_run_with_every_default_is_right_by_the_schema(validators, method):
    plain = {"model": "digits_cnn", "method": method, "data": {"name": "digits"}}
    validators["run"].validate(plain)
    validators["run"].validate(plain | {"method": {"name": method}, "training": {"lr": 0.1, "clip": None}})


def test_what_init_writes_is_right_by_the_schema(validators, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rayfl("init", "run.yaml")
    rayfl("init", "sweep.yaml", "--sweep")
    for kind, validator in validators.items():
        validator.validate(load_yaml(f"{kind}.yaml"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"training": {"lrr": 0.1}},
        {"training": {"lr": 0}},
        {"training": {"lr": "fast"}},
        {"training": {"optimizer": "sdg"}},
        {"clients": {"count": 0}},
        {"method": "fedrolexx"},
        {"method": {"name": "fedprox", "scalr": True}},
        {"method": {"mu": 0.1}},
        {"updates": {"transforms": [{"name": "topk"}]}},
        {"updates": {"transforms": ["clop"]}},
        {"evaluation": {"scores": ["macro_f2"]}},
        {"listeners": [{"name": "early_stopping", "patience": 0}]},
        {"trainig": {}},
        {"model": None},
    ],
    ids=str,
)
def test_the_schema_refuses_what_check_refuses(validators, wrong):
    right = {"model": "digits_cnn", "method": {"name": "fedprox", "mu": 0.1}, "listeners": ["early_stopping"]}
    right |= {"updates": {"transforms": [{"name": "topk", "share": 0.1}]}, "evaluation": {"scores": ["macro_f1"]}}
    right["partition"] = "my_pkg.partitions:OneLabel"
    assert validators["run"].is_valid(right)
    assert not validators["run"].is_valid(right | wrong)
    del right["partition"]
    read_experiment(right, "right")
    with pytest.raises(ValueError, match="wrong: "):
        read_experiment(right | wrong, "wrong")


def test_the_schema_of_a_sweep(validators):
    right = {
        "experiment": {"model": "digits_cnn"},
        "rows": {"a": {"method": "fedprox"}, "b": {"method": {"mu": 1}}, "c": None},
    }
    sweep = validators["sweep"]
    assert sweep.is_valid(right | {"search": {"space": {"training.lr": {"grid": [1]}}, "seeds": [0]}})
    for wrong in (
        {"rows": {"a": {"methd": "fedprox"}}},
        {"rows": {"a": {"method": {"mux": 1}}}},
        {"search": {"space": {"training.lr": {"grd": [1]}}}},
        {"search": {"seeds": [-1]}},
        {"experiment": {"seed": 1}},
        {"serch": {}},
    ):
        assert not sweep.is_valid(right | wrong), wrong


def test_the_schema_has_words():
    code, out = rayfl("schema", "run")
    printed = json.loads(out)
    assert code == 0 and printed == schema("run")
    assert printed["$defs"]["Training"]["properties"]["lr"]["description"] == (
        "Learning rate in round 0. (a number, more than 0. Default: 0.05)"
    )
