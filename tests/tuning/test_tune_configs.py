"""The shipped experiments: all are valid, all can train, and together they use every option of every method."""

from collections.abc import Iterator
from pathlib import Path

import helpers
import pytest

from rayfl.config import load_yaml
from rayfl.experiment import read_experiment
from rayfl.methods import METHODS, METHODS_KIND, Method
from rayfl.tuning.load import load_sweep

PATHS = sorted(Path("tune_configs").glob("*.yaml"))
OWN = [path for path in PATHS if "\npublished:" not in path.read_text()]
"""Files without numbers of a paper."""
MOST_MACS = 2e8
"""Networks of more multiply-adds are not trained here."""


def test_every_file_stands_in_the_readme():
    readme = Path("tune_configs/README.md").read_text()
    assert [path.stem for path in PATHS if f"`{path.stem}`" not in readme] == []


def test_every_option_of_every_method_is_used():
    """Each is set, by some row of some file, to something else than its default. Where only one value is allowed there
    is no option."""
    used: dict[str, set[str]] = {name: set() for name in METHODS}
    for path in PATHS:
        for method in methods_of(path):
            fields = type(method).model_fields
            used[method.name] |= {
                name for name in options(type(method)) if getattr(method, name) != fields[name].default
            }
    unused = {name: sorted(options(cls) - used[name]) for name, cls in METHODS.items()}
    assert {name: left for name, left in unused.items() if left} == {}


def methods_of(path: Path) -> Iterator[Method]:
    """The method of every row, with each value in turn that the search has for one of its options."""
    given = load_yaml(path)
    base = section(given["experiment"].get("method", "fedavg"))
    searched = {p.removeprefix("method."): d for p, d in given.get("search", {}).get("space", {}).items()}
    grids = {name: domain["grid"] for name, domain in searched.items() if "grid" in domain}
    for row in (given.get("rows") or {"run": {}}).values():
        own = section(row.get("method", {}))
        method = own if "name" in own else base | own
        yield METHODS_KIND.read(method, str(path))
        for name, values in grids.items():
            if name in METHODS[method["name"]].model_fields:
                yield from (METHODS_KIND.read(method | {name: v}, str(path)) for v in values)


def section(given) -> dict:
    return {"name": given} if isinstance(given, str) else given


def options(cls: type[Method]) -> set[str]:
    fields = {name: field for name, field in cls.model_fields.items() if name not in ("name", "task")}
    return {name for name, field in fields.items() if not is_one_value(field.annotation)}


def is_one_value(annotation) -> bool:
    """Whether it is a Literal of one value."""
    return "Literal" in repr(annotation) and len(annotation.__args__) == 1


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_every_file_is_valid(path):
    """Those of papers, whose networks are large, are read where they train a step."""
    load_sweep(path)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_one_of_each_method_and_model_trains_a_step(path, tmp_path):
    """On made-up images or text in place of real ones, of at most 100 clients, and from no file of weights."""
    plan = load_sweep(path)
    rows = {repr((changes.get("method"), changes.get("model"))): row for row, changes in plan.rows.items()}
    examples = [plan.example(row) for row in rows.values()]
    for (method, model), experiment in {(e.method.name, e.model.name): e for e in examples}.items():
        server = experiment.bound().task.server
        if server.macs > MOST_MACS:
            continue
        given, data = experiment.plain(), experiment.data
        if data.name not in EMBEDDED:
            given["data"] = made_up(data.offers)
        if data.public is not None:
            given["data"]["public"] = {"share": 0.1, "labeled": data.public.labeled}
        if experiment.partition.name == "users":
            given["partition"] = {"name": "iid"}
        given["model"] = experiment.model.blank.model_dump()
        given["clients"] |= {"cohort": 1, "count": min(experiment.clients.count, 100)}
        # a straggler of FedProx does a part of a round
        given["training"] |= {"steps": 2, "batch_size": 2}
        line = helpers.simulate(read_experiment(given, str(path)), tmp_path / f"{method}-{model}").train()
        # FedMD's first visit has passes of its own
        most = 1000 if method == "fedmd" else 2
        assert (line["clients"], line["refused"]) == (1, 0) and 1 <= line["steps"] <= most, (method, model)


EMBEDDED = ("digits", "breast_cancer", "diabetes")


def made_up(offers) -> dict:
    """The `data:` section of made-up samples that look like these."""
    if "input" in offers:
        shape = {"shape": list(offers["input"]), "classes": offers["classes"]}
        return {"name": "synthetic", "samples": 2000, "test_samples": 200} | shape
    classes = {"classes": offers["classes"]} if offers["task"] == "classes" else {}
    tokens = {"tokens": offers["ids"] - (offers["task"] == "masked_lm"), "length": offers["length"]} | classes
    return {"name": "synthetic_text", "task": offers["task"], "samples": 2000, "test_samples": 200} | tokens
