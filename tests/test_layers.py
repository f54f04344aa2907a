"""The source as a whole: imports run one way, the core knows no method, parameters have types, examples run."""

import ast
import doctest
import functools
import importlib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rayfl
from rayfl.methods import METHODS
from rayfl.methods.base import Method

ROOT = Path(rayfl.__file__).parent

LAYERS = (
    ("config", "metrics"),
    ("core", "listeners"),
    ("data", "clients", "costs"),
    ("training", "models", "system"),
    ("methods", "evaluation"),
    ("experiment",),
    ("engine", "exporting"),
    ("engine.on_ray",),
    ("results",),
    ("networks",),
    ("driver",),
    ("session",),
    ("tuning",),
    ("reference", "clusters"),
    ("cli", "testing"),
    ("__main__",),
)
"""Folders, and modules of rayfl itself. A module imports from its own folder, and from those of the layers above its
own."""

OWNERS = {
    "ray": ("engine.on_ray", "tuning", "clusters"),
    "mlflow": ("results.mlflow",),
    "typer": ("cli",),
    "pytest": ("testing",),
    "dp_accounting": ("training.privacy",),
}
"""Library -> the modules of rayfl that may import it."""

LATE = ("pandas", "scipy", "matplotlib", "sklearn", "transformers", "torchvision", "datasets")
"""Libraries that take a process long to import, which most actors never need: modules above the results import them in
functions."""

CORE = ("engine", "evaluation", "experiment", "driver", "results", "tuning", "exporting", "cli")
"""Modules that work for every method."""
NAMES = {"experiment.base": ("fedavg",)}
"""Methods that a core module names: the default of the section."""

FOREIGN = {
    "methods.masks.fedpm": "torch.autograd.Function",
    "tuning.recorder": "Ray Tune's callbacks",
    "tuning.trial": "Ray Tune's callbacks",
    "tuning.within": "Ray Tune's callbacks",
}
"""Modules with functions that a library calls, whose parameters it does not say."""


def modules() -> dict[str, str]:
    """Every module but rayfl itself: dotted name below rayfl -> source."""
    files = (file for file in ROOT.rglob("*.py") if file.parent != ROOT or file.name != "__init__.py")
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file.read_text()
        for file in sorted(files)
    }


MODULES = modules()


def within(module: str, places) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


ROOMS = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}


def room(module: str) -> str:
    """Return the innermost room of the module; "" if it has none."""
    return max((room for room in ROOMS if within(module, [room])), key=len, default="")


def layer(module: str) -> int:
    """Return the layer of the module's room; -1 if it has none."""
    return ROOMS.get(room(module), -1)


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@functools.cache
def imported(tree: ast.AST) -> list[str]:
    """The dotted names of everything that is imported, wherever it stands: "rayfl.config.ConfigError"."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def for_types(tree: ast.AST) -> list[str]:
    """Return the imports for annotations only."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
    return [name for block in blocks for name in imported(block)]


def target(name: str) -> str:
    """The module that an imported name of rayfl is, or is in: "config" of "rayfl.config.ConfigError"."""
    name = name.removeprefix("rayfl").removeprefix(".")
    return name if name in MODULES else name.rpartition(".")[0]


def offences(modules: dict[str, str]) -> Iterator[str]:
    """Every import that goes the wrong way, and every module without a place."""
    for module, source in modules.items():
        tree = parsed(source)
        if layer(module) < 0:
            yield f"rayfl.{module} has no place in LAYERS"
        for name in imported(tree):
            library = name.partition(".")[0]
            if library in OWNERS and not within(module, OWNERS[library]):
                yield f"rayfl.{module} imports {library}; only {OWNERS[library]} may"
            if library != "rayfl":
                continue
            other = target(name)
            if layer(other) >= layer(module) and room(other) != room(module):
                yield f"rayfl.{module} imports {name}, which is not above it"


def test_imports_run_one_way():
    assert list(offences(MODULES)) == []


def test_an_actor_imports_what_it_needs():
    above = {module: parsed(source) for module, source in MODULES.items() if layer(module) < layer("results")}
    first = {
        module: [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)] for module, tree in above.items()
    }
    found = {module: imported(ast.Module(statements, [])) for module, statements in first.items()}
    assert len(found) > 150
    assert [(m, name) for m, names in found.items() for name in names if name.partition(".")[0] in LATE] == []


def texts_without_encoding(modules: dict[str, str]) -> Iterator[str]:
    """Every text file that is read or written in the encoding of the machine's language."""
    for module, source in modules.items():
        for call in ast.walk(parsed(source)):
            if not isinstance(call, ast.Call) or any(keyword.arg == "encoding" for keyword in call.keywords):
                continue
            verb = getattr(call.func, "attr", getattr(call.func, "id", ""))
            is_text = verb == "write_text" or verb == "read_text" and not call.args
            # text is opened with newline=, everything else as bytes
            if is_text or verb == "open" and any(keyword.arg == "newline" for keyword in call.keywords):
                yield f"rayfl.{module}: {ast.unparse(call)}"


def test_text_files_have_an_encoding():
    assert list(texts_without_encoding(MODULES)) == []
    assert len(list(texts_without_encoding({"x": 'p.write_text("a"); p.read_text(); p.open(newline="")'}))) == 3


def test_no_imports_in_a_circle():
    graph = {}
    for module, source in MODULES.items():
        tree = parsed(source)
        names = set(imported(tree)) - set(for_types(tree))
        graph[module] = {target(name) for name in names if name.startswith("rayfl.")} - {module, ""}
    TopologicalSorter(graph).prepare()


def test_a_circle_is_found():
    with pytest.raises(CycleError):
        TopologicalSorter({"engine.pool": {"engine.actors"}, "engine.actors": {"engine.pool"}}).prepare()


@pytest.mark.parametrize(
    ("module", "source", "offence"),
    [
        (
            "core.axes",
            "from rayfl.models.base import Model",
            "rayfl.core.axes imports rayfl.models.base.Model, which is not above",
        ),
        ("costs", "def f():\n    from rayfl import methods", "rayfl.costs imports rayfl.methods, which is not above"),
        (
            "core.net",
            "if TYPE_CHECKING:\n    from rayfl.models.base import Model",
            "rayfl.core.net imports rayfl.models.base.Model, which is not above",
        ),
        (
            "engine.worker",
            "from rayfl.engine.on_ray import pool",
            "rayfl.engine.worker imports rayfl.engine.on_ray.pool, which is not",
        ),
        ("core.net", "import rayfl.clients", "rayfl.core.net imports rayfl.clients, which is not above it"),
        ("engine.simulation", "import ray.util", "rayfl.engine.simulation imports ray; only ('engine.on_ray', "),
        (
            "tuning.space",
            "from mlflow import log_metric",
            "rayfl.tuning.space imports mlflow; only ('results.mlflow',)",
        ),
        ("driver", "def f():\n    import typer", "rayfl.driver imports typer; only ('cli',) may"),
        ("novelty", "", "rayfl.novelty has no place in LAYERS"),
    ],
)
def test_a_planted_offender_is_named(module, source, offence):
    [found] = offences({module: source})
    assert found.startswith(offence)


# the core knows no method


def flags(modules: dict[str, str]) -> Iterator[str]:
    """Every method that the core names, and everything that it asks of one and not every method has."""
    everybodys = (set(dir(Method)) | set(Method.model_fields)) - {"contract"}
    for module, source in modules.items():
        if not within(module, CORE):
            continue
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.Constant) and node.value in METHODS and node.value not in NAMES.get(module, ()):
                yield f"rayfl.{module} names the method {node.value}"
            asked = [name for name in _asked(node) if name not in everybodys]
            yield from (f"rayfl.{module} asks a method for {name}" for name in asked)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rayfl.methods."):
                if node.module != "rayfl.methods.base":
                    yield f"rayfl.{module} imports {node.module}"


def _asked(node: ast.AST) -> list[str]:
    """Return the attributes read from `method`, `self.method`, `experiment.method`, also by `getattr`."""
    if isinstance(node, ast.Attribute) and _is_method(node.value):
        return [node.attr]
    if (
        isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("getattr", "hasattr")
        and _is_method(node.args[0])
    ):
        return [getattr(node.args[1], "value", "what it computes")]
    return []


def _is_method(node: ast.expr) -> bool:
    return "method" in (getattr(node, "id", None), getattr(node, "attr", None))


def test_the_core_knows_no_method_and_asks_for_no_flag():
    assert list(flags(MODULES)) == []


@pytest.mark.parametrize(
    ("module", "source", "offence"),
    [
        ("engine.simulation", "if method.name == 'spafl': pass", "rayfl.engine.simulation names the method spafl"),
        ("evaluation", "self.method.is_personal", "rayfl.evaluation asks a method for is_personal"),
        ("driver", "experiment.method.contract", "rayfl.driver asks a method for contract"),
        (
            "results.report",
            "getattr(method, 'keeps_capacities', 0)",
            "rayfl.results.report asks a method for keeps_capacities",
        ),
        ("engine.worker", "from rayfl.methods.dense import Dense", "rayfl.engine.worker imports rayfl.methods.dense"),
    ],
)
def test_a_planted_flag_is_named(module, source, offence):
    assert list(flags({module: source})) == [offence]


# types


def untyped(modules: dict[str, str]) -> Iterator[str]:
    """Every parameter without a type: behind it a call could go anywhere."""
    for module, source in modules.items():
        functions = [n for n in ast.walk(parsed(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        for function in functions if module not in FOREIGN else []:
            a = function.args
            given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
            for parameter in given:
                if parameter.annotation is None and parameter.arg not in ("self", "cls"):
                    yield f"rayfl.{module}: {function.name}({parameter.arg})"


def test_every_parameter_has_a_type():
    assert list(untyped(MODULES)) == []


def test_an_untyped_parameter_is_named():
    assert list(untyped({"net": "def f(a: int, b, *c: int, **d): pass"})) == ["rayfl.net: f(b)", "rayfl.net: f(d)"]


# examples


@pytest.mark.parametrize("module", [name for name, source in MODULES.items() if ">>>" in source])
def test_the_examples_in_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(f"rayfl.{module}"))
    assert result.attempted and not result.failed
