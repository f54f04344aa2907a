"""The source as a whole: what may import what, and that the examples in docstrings run."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest

import rayfl

ROOT = Path(rayfl.__file__).parent

LAYERS = (
    ("config", "seeds", "tensors", "coding", "executors"),
    ("norms", "checkpoints", "training", "population"),
    ("axes", "data"),
    ("submodel",),
    ("models",),
    ("costs",),
    ("methods",),
    ("worker", "shrink"),
    ("simulation", "executors.serial", "executors.clients"),
    ("experiment", "executors.ray"),
    ("executors.server",),
    ("executors.cluster",),
    ("tracking",),
    ("report", "export"),
    ("published", "anatomy"),
    ("tuning",),
    ("cli",),
)
"""A module imports from the layers above its own and, but for executors, within its own package."""

OWNERS = {"ray": ("executors", "tuning"), "mlflow": ("tracking.mlflow",)}
"""Library -> the modules of rayfl that may import it."""


def modules() -> dict[str, str]:
    """Every module but the packages' own: dotted name below rayfl -> source."""
    files = (file for file in ROOT.rglob("*.py") if file.parent != ROOT or file.name != "__init__.py")
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file.read_text()
        for file in sorted(files)
    }


def within(module: str, places) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def layer(module: str) -> int:
    """The layer of the longest name that fits; -1: none."""
    found = [(len(p), i) for i, places in enumerate(LAYERS) for p in places if within(module, [p])]
    return max(found, default=(0, -1))[1]


def imports(source: str) -> list[str]:
    """The dotted names of everything that is imported, wherever it stands: "rayfl.config.ConfigError"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def offences(modules: dict[str, str]) -> list[str]:
    """Every import that goes the wrong way, and every module without a place."""
    found = []
    for module, source in modules.items():
        own = module.partition(".")[0]
        if layer(module) < 0:
            found.append(f"rayfl.{module} has no place in LAYERS")
        for name in imports(source):
            library, _, target = name.partition(".")
            if library in OWNERS and not within(module, OWNERS[library]):
                found.append(f"rayfl.{module} imports {library}; only {OWNERS[library]} may")
            if library != "rayfl" or (own != "executors" and within(target, [own])):
                continue
            if layer(target) >= layer(module):
                found.append(f"rayfl.{module} imports rayfl.{target}, which is not above it")
    return found


def test_imports_run_one_way():
    assert offences(modules()) == []


@pytest.mark.parametrize(
    ("module", "source", "offence"),
    [
        (
            "axes",
            "from rayfl.models import Model",
            "rayfl.axes imports rayfl.models.Model, which is not above",
        ),
        ("costs", "def f():\n    from rayfl import methods", "rayfl.costs imports rayfl.methods, which is"),
        ("worker", "from rayfl.executors import ray", "rayfl.worker imports rayfl.executors.ray, which is"),
        ("executors.ray", "import rayfl.executors.server", "rayfl.executors.ray imports rayfl.executors.ser"),
        ("simulation", "import ray.util", "rayfl.simulation imports ray; only ('executors', 'tuning') may"),
        ("tuning", "from mlflow import log_metric", "rayfl.tuning imports mlflow; only ('tracking.mlflow',)"),
        ("novelty", "", "rayfl.novelty has no place in LAYERS"),
    ],
)
def test_a_planted_offender_is_named(module, source, offence):
    [found] = offences({module: source})
    assert found.startswith(offence)


@pytest.mark.parametrize("module", [name for name, source in modules().items() if ">>>" in source])
def test_the_examples_in_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(f"rayfl.{module}"))
    assert result.attempted and not result.failed
