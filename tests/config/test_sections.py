"""Configuration sections and their whole error messages."""

import time
from typing import Annotated, Any, Literal

import pytest
from helpers import message
from pydantic import BaseModel, Field, field_validator, model_validator

from rayfl.config import (
    Config,
    ConfigError,
    choose,
    component,
    differences,
    load_yaml,
    nearest,
    parse,
    parse_setting,
    set_path,
)


class Inner(Config):
    depth: int = 1
    deep: bool = False


class Outer(Config):
    size: int = 1
    """In metres."""
    lr: float = Field(0.1, gt=0, lt=1)
    inner: Inner = Inner()
    rounds: int | None = None
    steps: tuple[int, ...] = ()
    betas: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(le=1)]] = (0, 1)
    space: dict[str, dict[str, Any]] = {}
    weights: dict[str, float] = {}
    chunk: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    norm: Literal["batch", "group", "none"] = "none"
    width: float | str = "auto"
    parts: Literal["auto", "all"] | tuple[Inner, ...] = "auto"
    scaler: bool = True
    source: str = ""
    seeds: tuple[int, ...] = Field((0,), min_length=1, max_length=2)
    amount: float | tuple[float, float] = 1.0
    type: float = 1.0
    default: int = 1
    hidden: int = Field(0, exclude=True)


KEYS = ", ".join(sorted(Outer.model_fields.keys() - {"hidden"}))

MISTAKES = {
    "no section": (5, f"outer: 5 is not valid. Allowed: a mapping with the keys {KEYS}"),
    "unknown key": ({"sise": 1}, f"outer.sise: unknown key 'sise'. Did you mean 'size'? Allowed: {KEYS}"),
    "key that is not text": ({1: 2}, f"outer.1: unknown key 1. Allowed: {KEYS}"),
    "what rayfl fills in": ({"hidden": 1}, f"outer.hidden: unknown key 'hidden'. Allowed: {KEYS}"),
    "key of a section inside": (
        {"deep": True},
        f"outer.deep: unknown key 'deep'. Did you mean 'inner.deep'? Allowed: {KEYS}",
    ),
    "unknown key in a section": (
        {"inner": {"depht": 2}},
        "outer.inner.depht: unknown key 'depht'. Did you mean 'depth'? Allowed: deep, depth",
    ),
    "unknown key in a list of sections": (
        {"parts": [{"depht": 2}]},
        "outer.parts.0.depht: unknown key 'depht'. Did you mean 'depth'? Allowed: deep, depth",
    ),
    "key of a mapping": ({"space": {5: {}}}, "outer.space.5: 5 is not valid. Allowed: text"),
    "text for a whole number": ({"size": "many"}, "outer.size: 'many' is not valid. Allowed: a whole number"),
    "half a whole number": ({"size": 1.5}, "outer.size: 1.5 is not valid. Allowed: a whole number"),
    "list for a whole number": ({"size": []}, "outer.size: [] is not valid. Allowed: a whole number"),
    "nothing for a whole number": ({"size": None}, "outer.size: None is not valid. Allowed: a whole number"),
    "large float for a whole number": (
        {"size": 1e30},
        "outer.size: 1e+30 is not valid. Allowed: a whole number below 2**63",
    ),
    "large whole number": ({"size": 2**63}, f"outer.size: {2**63} is not valid. Allowed: at most {2**63 - 1}"),
    "larger than a float": ({"lr": 10**400}, f"outer.lr: 1{'0' * 199}... is not valid. Allowed: a number"),
    "text for a number": ({"lr": "fast"}, "outer.lr: 'fast' is not valid. Allowed: a number"),
    "infinity": ({"lr": float("inf")}, "outer.lr: inf is not valid. Allowed: a finite number"),
    "out of range": (
        {"lr": 1, "betas": [-0.5, 1.5]},
        "outer.lr: 1 is not valid. Allowed: less than 1\n"
        "outer.betas.0: -0.5 is not valid. Allowed: at least 0\nouter.betas.1: 1.5 is not valid. Allowed: at most 1",
    ),
    "not positive": ({"lr": 0}, "outer.lr: 0 is not valid. Allowed: more than 0"),
    "true for a whole number": ({"size": True}, "outer.size: True is not valid. Allowed: a whole number"),
    "true for a number": ({"lr": True}, "outer.lr: True is not valid. Allowed: a number"),
    "false for a number or nothing": (
        {"rounds": False},
        "outer.rounds: False is not valid. Allowed: a whole number, or null",
    ),
    "true in a list": ({"steps": [1, True]}, "outer.steps.1: True is not valid. Allowed: a whole number"),
    "true in a pair": ({"betas": [0, True]}, "outer.betas.1: True is not valid. Allowed: a number"),
    "true in a mapping": ({"weights": {"a": True}}, "outer.weights.a: True is not valid. Allowed: a number"),
    "true in a section": ({"inner": {"depth": True}}, "outer.inner.depth: True is not valid. Allowed: a whole number"),
    "true in a list of sections": (
        {"parts": [{"depth": True}]},
        "outer.parts.0.depth: True is not valid. Allowed: a whole number",
    ),
    "true for one of two types": ({"chunk": True}, "outer.chunk: True is not valid. Allowed: a whole number, or auto"),
    "true for a number or text": ({"width": True}, "outer.width: True is not valid. Allowed: a number, or text"),
    "true for a field of pydantic's words": (
        {"type": True, "default": True},
        "outer.type: True is not valid. Allowed: a number\nouter.default: True is not valid. Allowed: a whole number",
    ),
    "text for a truth value": ({"scaler": "maybe"}, "outer.scaler: 'maybe' is not valid. Allowed: true or false"),
    "list for a truth value": ({"scaler": []}, "outer.scaler: [] is not valid. Allowed: true or false"),
    "number for text": ({"source": 5}, "outer.source: 5 is not valid. Allowed: text"),
    "number for a list": ({"steps": 5}, "outer.steps: 5 is not valid. Allowed: a list"),
    "too short a list": ({"seeds": []}, "outer.seeds: [] is not valid. Allowed: a length of at least 1"),
    "too long a list": ({"seeds": [1, 2, 3]}, "outer.seeds: [1, 2, 3] is not valid. Allowed: a length of at most 2"),
    "half a pair": ({"betas": [0]}, "outer.betas.1: a value is required"),
    "list for a mapping": ({"space": []}, "outer.space: [] is not valid. Allowed: a section"),
    "list for a section": ({"inner": []}, "outer.inner: [] is not valid. Allowed: a section"),
    "none of the choices": ({"norm": "layer"}, "outer.norm: 'layer' is not valid. Allowed: one of batch, group, none"),
    "a list as a choice": (
        {"norm": ["batch"]},
        "outer.norm: ['batch'] is not valid. Allowed: one of batch, group, none",
    ),
    "one of two types": ({"chunk": 0}, "outer.chunk: 0 is not valid. Allowed: at least 1, or auto"),
    "neither of two types": ({"parts": 3}, "outer.parts: 3 is not valid. Allowed: one of auto, all, or a list"),
    "a number or a pair": ({"amount": "x"}, "outer.amount: 'x' is not valid. Allowed: a number, or a list"),
    "control characters in a key": ({"a\nb": 1}, f"outer.'a\\nb': unknown key 'a\\nb'. Allowed: {KEYS}"),
    "a long value": (
        {"size": ["abc"] * 10**6},
        f"outer.size: {repr(['abc'] * 40)[:200]}... is not valid. Allowed: a whole number",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    given, expected = MISTAKES[mistake]
    expected = "\n".join(f"f.yaml: {line}" for line in expected.split("\n"))
    assert message(parse, Outer, given, "f.yaml: outer") == expected


def test_numbers_stay_what_they_are():
    given = {"size": 3, "lr": 1e-3, "width": 1, "amount": 1, "weights": {"a": 2}, "scaler": False}
    outer = parse(Outer, given, "f.yaml: outer")
    assert (outer.size, outer.lr, outer.width, outer.scaler) == (3, 0.001, 1, False)
    assert type(outer.width) is float and type(outer.amount) is float and type(outer.weights["a"]) is float
    assert parse(Outer, {"size": 1e3, "width": "sqrt(0.2)"}, "f.yaml: outer").size == 1000
    assert parse(Outer, {"space": {"lr": {"grid": [True, 1, 0.5]}}}, "f").space == {"lr": {"grid": [True, 1, 0.5]}}

    class Either(Config):
        number: int | float
        flag: bool | int = 0

    for number in (1, 1.0):
        assert type(Either(number=number).number) is type(number)
    assert Either(number=1, flag=True).flag is True and type(Either(number=1, flag=1).flag) is int


def test_missing_values():
    class Needy(Config):
        size: int

    assert message(parse, Needy, {}, "f.yaml: needy") == "f.yaml: needy.size: a value is required"
    assert message(parse, Needy, {}, "f.yaml") == "f.yaml: size: a value is required"


def test_errors_of_validators():
    class Checked(Config):
        even: int = 0
        odd: int = 1

        @field_validator("even")
        @classmethod
        def _even(cls, value: int) -> int:
            if value % 2:
                raise ValueError("an even number")
            return value

        @model_validator(mode="after")
        def _ordered(self) -> "Checked":
            if self.even > self.odd:
                raise ConfigError(f"odd: {self.odd} is not valid. Allowed: at least {self.even}\neven: lower it")
            return self

    assert message(parse, Checked, {"even": 3}, "f: c") == "f: c.even: 3 is not valid. Allowed: an even number"
    assert message(parse, Checked, {"even": 2}, "f") == "f: odd: 1 is not valid. Allowed: at least 2\nf: even: lower it"


class Middle(Config):
    inner: Inner = Inner(depth=3)
    size: int = 1


class Most(Config):
    inner: Inner = Inner(depth=2, deep=True)
    middle: Middle = Middle(inner=Inner(deep=True), size=2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Most()),
        ({"inner": {}, "middle": {}}, Most()),
        ({"inner": {"depth": 5}}, Most(inner=Inner(depth=5, deep=True))),
        ({"middle": {"size": 7}}, Most(middle=Middle(inner=Inner(deep=True), size=7))),
        ({"middle": {"inner": {"depth": 9}}}, Most(middle=Middle(inner=Inner(depth=9, deep=True), size=2))),
        ({"middle": Middle(size=7)}, Most(middle=Middle(inner=Inner(depth=3), size=7))),
    ],
)
def test_a_part_of_a_section_leaves_the_rest_of_its_default(given, expected):
    assert parse(Most, given, "most") == expected


def test_a_configuration_is_frozen():
    outer = parse(Outer, {"size": 3}, "f.yaml: outer")
    with pytest.raises(ValueError, match="frozen"):
        outer.size = 4  # pyright: ignore
    assert parse(Outer, outer.model_dump(mode="json"), "again") == outer


@pytest.mark.parametrize(
    ("given", "count"),
    [({f"key{i}": 1 for i in range(100_000)}, 100_000), ({"steps": ["x"] * 100_000}, 100_000)],
    ids=["unknown keys", "wrong numbers"],
)
def test_only_the_first_of_many_mistakes_are_listed(given, count):
    start = time.process_time()
    lines = message(parse, Outer, given, "f.yaml: outer").split("\n")
    assert time.process_time() - start < 10
    assert len(lines) == 11 and lines[-1] == f"and {count - 10} more"
    assert all(len(line) < 400 for line in lines)


# YAML files


def written(tmp_path, text):
    file = tmp_path / "exp.yaml"
    file.write_text(text)
    return file


def test_files_that_cannot_be_used(tmp_path):
    missing = tmp_path / "missing.yaml"
    assert message(load_yaml, missing) == f"{missing}: cannot be read: No such file or directory"
    assert message(load_yaml, tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    file = written(tmp_path, "- a\n- b\n")
    assert message(load_yaml, file) == f"{file}: ['a', 'b'] is not valid. Allowed: a mapping of sections"
    file = written(tmp_path, "")
    assert message(load_yaml, file) == f"{file}: the file is empty. Allowed: a mapping of sections"
    file = written(tmp_path, "a: [1\n")
    assert message(load_yaml, file) == f"{file}: not valid YAML: line 2, column 1: did not find expected ',' or ']'"
    file = written(tmp_path, "training:\n  lr: 1\n  lr: 2\n")
    assert message(load_yaml, file) == f"{file}: training.lr (line 3): the key is already on line 2. Allowed: once"
    file = written(tmp_path, "a: 1\n" + "#" * 10**8)
    assert message(load_yaml, file) == f"{file}: the text has more than 1048576 bytes. Allowed: at most 1048576"


def test_a_file_is_a_mapping_of_sections(tmp_path):
    assert load_yaml(str(written(tmp_path, "training: {lr: 1e-3}\n"))) == {"training": {"lr": 0.001}}


# settings


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("training.lr=1e-2", ("training.lr", 0.01)),
        ("method=heterofl", ("method", "heterofl")),
        ("training.milestones=[1, 2]", ("training.milestones", [1, 2])),
        ("training.clip=null", ("training.clip", None)),
        ("training.clip=", ("training.clip", None)),
        ("data.root=a=b", ("data.root", "a=b")),
    ],
)
def test_settings(text, setting):
    assert parse_setting(text) == setting


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.lr", "--set: 'training.lr' is not valid. Allowed: path=value, e.g. training.lr=0.05"),
        ("=3", "--set: '=3' is not valid. Allowed: path=value, e.g. training.lr=0.05"),
        ("a=[1", "--set 'a=[1': not valid YAML: line 2, column 1: did not find expected ',' or ']'"),
        ("a={1: 2}", "--set 'a={1: 2}': line 1: the key 1 is not text. Allowed: text, e.g. \"1\" in quotes"),
        (
            "a=" + "[" * 5000,
            f"--set 'a={'[' * 197}...: line 1: sections or lists are nested more than 50 deep. Allowed: at most 50",
        ),
    ],
)
def test_bad_settings(text, expected):
    assert message(parse_setting, text) == expected


def test_a_path_is_set_in_a_copy():
    given = {"training": {"lr": 1}, "rounds": 3, "run": None}
    assert set_path(given, "training.momentum", 2)["training"] == {"lr": 1, "momentum": 2}
    assert set_path(given, "run.actors", 2)["run"] == {"actors": 2}
    assert set_path(given, "new.deep", 2)["new"] == {"deep": 2}
    assert given == {"training": {"lr": 1}, "rounds": 3, "run": None}
    assert message(set_path, given, "rounds.x", 2) == "rounds.x: rounds is 3. Allowed: a section"
    assert message(set_path, given, ".".join("a" * 51), 2) == (
        f"'{'.'.join('a' * 51)}': the path has 51 parts. Allowed: at most 50"
    )


def test_a_path_reaches_into_a_list():
    given = {"method": {"submodels": [{"width": 1}, {"width": 0.5}], "norms": []}}
    assert set_path(given, "method.submodels.1.width", 0.4)["method"]["submodels"] == [{"width": 1}, {"width": 0.4}]
    assert set_path(given, "method.submodels.0", 3)["method"]["submodels"] == [3, {"width": 0.5}]
    assert given["method"]["submodels"] == [{"width": 1}, {"width": 0.5}]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("submodels.2.width", "submodels is a list without the entry '2'. Allowed: 0 to 1"),
        ("submodels.width", "submodels is a list without the entry 'width'. Allowed: 0 to 1"),
        ("submodels.-1", "submodels is a list without the entry '-1'. Allowed: 0 to 1"),
        ("submodels.0.width.x", "submodels.0.width is 1. Allowed: a section"),
        ("norms.0", "norms is a list without the entry '0'. Allowed: no entry, because the list is empty"),
        ("sizes.0.width", "sizes is not set and has no entry 0. Hint: set the whole list"),
        ("variant.0", "variant is 'W'. Allowed: a section"),
    ],
)
def test_missing_list_entries(path, expected):
    given = {"submodels": [{"width": 1}, {"width": 0.5}], "norms": [], "variant": "W"}
    assert message(set_path, given, path, 2) == f"{path}: {expected}"


# names


def test_differences():
    old = {"a": 1, "b": {"c": 2, "d": [1, 2]}, "gone": {"x": 1}}
    new = {"a": 1, "b": {"c": 3, "d": [1, 2]}, "new": 4}
    assert differences(old, new) == ["b.c: 2 -> 3", "gone: {'x': 1} -> None", "new: None -> 4"]


def test_the_nearest_name():
    assert nearest("fedavgg", ["heterofl", "fedavg"]) == "Did you mean 'fedavg'? Allowed: fedavg, heterofl"
    # too far: other methods, not typing errors
    assert nearest("fednova", ["fedrora", "fedavg"]) == "Allowed: fedavg, fedrora"
    for given, name in {"sdg": "sgd", "minst": "mnist", "optimiser": "optimizer", "lr": "lr_decay"}.items():
        assert nearest(given, ["other", name]).startswith(f"Did you mean {name!r}? ")
    assert nearest("zzz", ["heterofl", "fedavg"]) == "Allowed: fedavg, heterofl"
    assert nearest("zzz", map(str, range(1000, 1150))).endswith(", 1098, 1099, and 50 more")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("b", "f: name: no row is called 'b'. Allowed: aa"),
        ("a", "f: name: no row is called 'a'. Did you mean 'aa'? Allowed: aa"),
        (["aa"], "f: name: no row is called ['aa']. Allowed: aa"),
        ({"aa": 1}, "f: name: no row is called {'aa': 1}. Allowed: aa"),
    ],
)
def test_a_choice(name, expected):
    assert choose({"aa": 5}, "aa", "f: name", "row") == 5
    assert message(choose, {"aa": 5}, name, "f: name", "row") == expected


@pytest.mark.parametrize("name", ["fedavg", "a b", "größe", "日本", "v1.2", "...", ".hidden", "é" * 75])
def test_a_component_of_a_path(name):
    assert component(name, "--name") == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "/",
        "a\\b",
        "a\nb",
        "a\0b",
        "\x7f",
        "\ud800",
        "é" * 76,
        "mlflow.db",
        "artifacts",
        5,
        None,
        [],
    ],
)
def test_invalid_components_of_a_path(name):
    assert message(component, name, "f.yaml: rows") == (
        f"f.yaml: rows: {name!r} is not valid. Allowed: the name of a folder, 1 to 150 bytes of printable text without "
        "/ and \\, except ., .., artifacts, mlflow.db"
    )


def test_sections_of_other_models():
    """A plain model of pydantic is read with the same errors."""

    class Plain(BaseModel):
        size: int

    assert message(parse, Plain, {"size": "x"}, "f") == "f: size: 'x' is not valid. Allowed: a whole number"
