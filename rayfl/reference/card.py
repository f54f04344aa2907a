"""Card of a class that a file can name: its data sheet, settings, requirements, smallest file and shipped files."""

import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rayfl.config import Config, ConfigError
from rayfl.experiment import Experiment
from rayfl.methods.base import Method
from rayfl.reference.catalogue import KINDS, as_yaml, sheet
from rayfl.reference.settings import settings

LORA = {"name": "lora", "base": {"name": "vit_b_16", "layers": 2, "heads": 2, "head_width": 16, "patch": 2}, "rank": 4}
MIX = {"name": "mix", "networks": {"1": "digits_cnn", "0.25": {"name": "resnet8", "channels": 4}}, "features": 32}
MODELS: Mapping[str, tuple[str, Any]] = {
    "": ("any", "digits_cnn"),
    "exits": ("with early exits", {"name": "resnet8", "exits": ["stage1.0"]}),
    "blocks": ("with residual blocks", "resnet8"),
    "adapters": ("with low-rank adapters", LORA),
    "networks": ("any, also a different one per capacity", MIX),
    "features": ("any, also a different one per capacity; their classifiers read equally many features", MIX),
    "extractors": (
        "one for the clients and a larger one for the server, with equal extractors",
        {"name": "mix", "networks": {"1": "resnet55_gkt", "0.25": "resnet8_gkt"}},
    ),
}
"""Requirement of a method's contract -> its meaning, and a model of digits that meets it."""
PUBLIC: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "samples": {"public": {"share": 0.2}},
    "samples and labels": {"public": {"share": 0.2, "labeled": True}},
}
"""Public data that a method needs -> settings of `data:`."""
MATH = re.compile(r"\$([^$]+)\$")
"""Mathematics in a data sheet: AsciiMath between dollar signs."""


def card(place: str, name: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the card of a class in Markdown, with mathematics as in its data sheet (`MATH`). `place`: where it is
    named, a key of `KINDS`. `files`: name -> content of the files that are searched for it. Raise ConfigError if there
    is no such class."""
    cls = KINDS[place].find(name, place)
    head, _, text = inspect.cleandoc(sheet(cls)).partition("\n\n")
    parts = [f"# {name}", f"`{place}: {name}`. {' '.join(head.split())}", _with_symbols(cls, text)]
    if rows := settings_table(cls):
        parts += ["## Settings", rows]
    if issubclass(cls, Method):
        public, example = smallest(cls, name)
        facts = {"Model": MODELS[cls.contract.wants][0], "Public data": public, **_facts(cls, example)}
        parts += ["## Requirements", "\n".join(f"- {title}: {fact}." for title, fact in facts.items())]
        parts += [
            "## The smallest file",
            "\n".join(["```yaml", *(f"{key}: {as_yaml(value)}" for key, value in example.items()), "```"]),
        ]
    if found := {file: where for file, content in files.items() if (where := _named(content, place, name))}:
        shown = (f"- `{file}`{': rows ' * any(rows)}{', '.join(filter(None, rows))}" for file, rows in found.items())
        parts += ["## Shipped files", "\n".join(shown)]
    return "\n\n".join(filter(None, [*parts, f"Source: `{cls.__module__}`, class `{cls.__qualname__}`."])) + "\n"


def smallest(cls: type[Method], name: str) -> tuple[str, dict[str, Any]]:
    """Return the public data that a method needs, and a small valid experiment with it."""
    wants = cls.contract.wants
    clients = {"count": 20, "capacities": [1, 0.25], **cls.contract.clients}
    if wants == "extractors":  # the larger network is the server's only
        clients["weights"] = [0, 1]
    reasons = []
    for public, more in PUBLIC.items():
        found = {"rounds": 10, "data": {"name": "digits", **more}, "clients": clients, "model": MODELS[wants][1]}
        found["method"] = name
        try:
            Experiment.model_validate(found).bound()
            return public, found
        except ValueError as error:
            reasons.append(str(error))
    raise ConfigError(f"method {name}: no small experiment is valid: {reasons[-1]}")


def plain(card: str) -> str:
    """Return a card with its mathematics as plain text.

    >>> plain("$x$ is the mean $(sum_k y_k)/K$.")
    'x is the mean (sum_k y_k)/K.'
    """
    return MATH.sub(r"\1", card)


def _with_symbols(cls: type, text: str) -> str:
    """Return a data sheet in which "Symbols: as in `base`" are those of that module beside the class's."""
    package = cls.__module__.rpartition(".")[0]

    def symbols(match: re.Match[str]) -> str:
        sheet = sys.modules[f"{package}.{match[1]}"].__doc__ or ""
        return next(part for part in sheet.split("\n\n") if part.startswith("Symbols: ")).removesuffix(".")

    return re.sub(r"^Symbols: as in `(\w+)`", symbols, text, flags=re.M)


def _facts(cls: type[Method], example: Mapping[str, Any]) -> dict[str, str]:
    """Return further requirements of a method with its defaults. `example`: a valid experiment."""
    facts = {"Evaluated on": "the clients' own test data" if cls.judged_on == "clients" else "the test set"}
    method = cls.model_construct()
    reasons = {
        "One class per sample": method.needs_classes,
        "No `updates.transforms`": method.needs_exact_updates,
        "No asynchrony": method.synchronous,
        "Fixed capacities": _fixed(example),
    }
    return facts | {title: reason for title, reason in reasons.items() if reason}


def _fixed(example: Mapping[str, Any]) -> str:
    """Return the reason why a client's capacity may not change between rounds; "" if it may."""
    given = {**example, "clients": {**example["clients"], "assignment": "dynamic"}}
    try:
        Experiment.model_validate(given).bound()
    except ValueError as error:
        return "a client's state fits one network" if "clients.assignment" in str(error) else ""
    return ""


def settings_table(cls: type[Config]) -> str:
    """Return the settings of a section as a table in Markdown; "" if there are none."""
    rows = [
        (f"`{name}`", setting.text, setting.allowed, f"`{setting.default}`" if setting.default else "required")
        for name, setting in settings(cls).items()
    ]
    return table(("setting", "meaning", "allowed", "default"), rows) if rows else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _named(content: Mapping[str, Any], place: str, name: str) -> list[str]:
    """Return the rows of a file that name a class at a place; "" for the file itself."""
    tables = {"": content.get("experiment", content), **(content.get("rows") or {})}
    return [row for row, given in tables.items() if _name(given or {}, place) == name]


def _name(given: Any, place: str) -> Any:
    for part in place.split("."):
        given = given.get(part) if isinstance(given, Mapping) else None
    return given.get("name") if isinstance(given, Mapping) else given
