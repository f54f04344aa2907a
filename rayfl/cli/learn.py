"""rayfl init, explain, list, schema: reference of the configuration files."""

import json
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_origin

import typer
from rich.console import Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rayfl.cli.files import find_config, shipped
from rayfl.cli.shared import notify, print_table
from rayfl.config import ConfigError, load_yaml

if TYPE_CHECKING:
    from rayfl.config import Config
    from rayfl.reference.settings import Place

PLACES = {
    "methods": "method",
    "models": "model",
    "data": "data",
    "partitions": "partition",
    "scores": "evaluation.scores",
    "transforms": "updates.transforms",
    "listeners": "listeners",
    "devices": "system.devices",
    "availability": "system.availability",
    "samplers": "system.sampler",
}
"""Argument of `rayfl list` -> place in a file."""
FILES = "configs"
MOST_FILES = 5
"""Shipped files that `rayfl explain` names."""


def _listed(incomplete: str) -> list[str]:
    return [name for name in (*PLACES, FILES) if name.startswith(incomplete)]


def init(
    file: Annotated[Path, typer.Argument(help="File to write.")] = Path("experiment.yaml"),
    sweep: Annotated[bool, typer.Option("--sweep", help="Write a comparison of several methods.")] = False,
) -> None:
    """Write a configuration file to start from: a small experiment on real digits, with every setting, its meaning and
    its default."""
    if file.exists():
        raise ConfigError(f"{file}: the file exists. Allowed: a new file")
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: {file.parent} is not a folder. Allowed: a file in an existing folder")
    from rayfl.reference import template

    given = load_yaml(find_config(Path("quickstart")))
    if not sweep:
        # one row's settings make the experiment of a single run
        given = given["experiment"] | list(given["rows"].values())[1]
    file.write_text(template.of_sweep(given) if sweep else template.of_run(given), encoding="utf-8")
    word = shlex.quote(str(file))
    notify(f"wrote {file}. Next: edit it, `rayfl check {word}`, `rayfl {'sweep' if sweep else 'run'} {word}`")


def explain(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Settings, sections or names: training.lr, method, heterofl.")
    ],
) -> None:
    """Explain settings: meaning, allowed values, default, the classes that have it and shipped files that set it. For a
    section, list its settings; for a choice by name, the names. For the name of a method, model or other choice, print
    its card: equations, settings, requirements, the smallest file, shipped files."""
    from rayfl.reference.settings import SECTIONS, SWEEP, find

    for path in paths:
        # rows.LABEL is any row
        section = "rows" if path.startswith("rows.") and path.count(".") == 1 else path
        if section in SWEEP:
            print_table(_titled(path, SWEEP[section]))
            if path in SECTIONS:
                print_table(_fields(SECTIONS[path]))
            continue
        if cards := _cards(path):
            print_table(Group(*map(Markdown, cards)))
            continue
        print_table(_explained(find(path)))
        if files := _that_set(path):
            more = f" and {len(files) - MOST_FILES} more" if len(files) > MOST_FILES else ""
            print_table(_indented(f"set in {', '.join(files[:MOST_FILES])}{more}", "dim"))


def _cards(name: str) -> list[str]:
    """Return the cards of a name, one per kind that has it. None of a setting."""
    from rayfl.experiment import Experiment
    from rayfl.reference.card import card, plain
    from rayfl.reference.catalogue import KINDS

    if name in Experiment.model_fields or "." in name:
        return []
    return [plain(card(place, name, _shipped())) for place, kind in KINDS.items() if name in kind.known()]


def _explained(place: "Place") -> RenderableType:
    from rayfl.experiment import DEFAULTS
    from rayfl.reference.catalogue import KINDS, catalogue
    from rayfl.reference.settings import sentence_of

    if place.path in KINDS:
        default = f". Default: {DEFAULTS[place.path]}" if place.path in DEFAULTS else ""
        is_list = any(get_origin(setting.field.annotation) is tuple for setting in place.settings.values())
        each = "a list, each " if is_list else ""
        lines = [_indented(f"{each}a name, or a section with a name and options{default}")]
        texts = [setting.text for setting in place.settings.values()]
        return Group(_titled(place.path, texts[0] or "Chosen by its name."), *lines, _entries(catalogue()[place.path]))
    section = place.below.get("")
    parts: list[RenderableType] = []
    groups: dict[tuple[str, str], list[str]] = {}
    for owner, setting in place.settings.items():
        groups.setdefault((setting.text, setting.line), []).append(owner)
    for (text, line), owners in groups.items():
        parts.append(_titled(place.path, text or (f"{sentence_of(section)}." if section else "")))
        if section is None or text:
            others = place.other_defaults(owners)
            parts.append(_indented(f"{line}; {others}" if others else line))
        if used := place.used_by(owners):
            parts.append(_indented(f"in {used}", "dim"))
    return Group(*parts, *([_fields(section)] if section else []))


def _indented(text: str, style: str = "") -> Padding:
    return Padding(Text(text, style), (0, 0, 0, 2))


def _titled(path: str, text: str) -> RenderableType:
    return Text.assemble((path, "bold"), f": {text}" if text else "")


def _fields(cls: "type[Config]") -> Table:
    from rayfl.reference.settings import settings

    return _entries([(name, setting.text, setting.line) for name, setting in settings(cls).items()])


def _entries(entries: Sequence[tuple[str, str, str]]) -> Table:
    """Return a table of (name, sentence, details below it)."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, sentence, more in entries:
        lines = [Text(sentence)] * bool(sentence) + [Text(more, "dim")] * bool(more)
        table.add_row(Text(f"  {name}", "bold"), Group(*lines))
    return table


def _that_set(path: str) -> list[str]:
    """Return the names of the shipped files that set a path."""
    found = []
    for name, given in _shipped().items():
        experiments = [given.get("experiment", given), *(given.get("rows") or {}).values()]
        searched = (given.get("search") or {}).get("space", {})
        if path in searched or any(_holds(some or {}, path.split(".")) for some in [given, *experiments]):
            found.append(name)
    return found


@cache
def _shipped() -> dict[str, dict]:
    return {name: load_yaml(file) for name, file in shipped().items()}


def _holds(given: object, path: Sequence[str]) -> bool:
    if not path:
        return True
    return isinstance(given, dict) and path[0] in given and _holds(given[path[0]], path[1:])


def list_(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT...",
            help=f"{', '.join(PLACES)}, {FILES} (the shipped files); or a class of your own, package.module:Class.",
            autocompletion=_listed,
        ),
    ] = None,
    like: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="List only entries with all words of TEXT, or words that start with them, in their name or data sheet "
            "(the docstring: title, paper, equations, departures); of files: in their name, first sentence or rows.",
        ),
    ] = "",
) -> None:
    """List methods, models, data sets, partitions, scores, transforms, listeners and devices, with their options and
    defaults. Those of installed packages are included."""
    asked = [name for name in names or [] if name in (*PLACES, FILES)]
    own = [name for name in names or [] if name not in asked]
    if wrong := [name for name in own if ":" not in name]:
        known = ", ".join([*PLACES, FILES])
        raise ConfigError(
            f"list: {wrong[0]!r} is not valid. Allowed: {known}, or a class of your own as package.module:Class"
        )
    from rayfl.reference.catalogue import about, catalogue

    files = [entry for entry in _files() if about(like, *entry)] if FILES in asked else []
    is_empty = not files
    if FILES not in asked or len(asked) > 1 or own:
        found = catalogue(own, like)
        for name, place in PLACES.items():
            entries = [entry for entry in found[place] if not own or asked or entry[0] in own]
            if entries and (name in asked or not asked):
                is_empty = False
                notify(f"{name} (`{place}:` in a file)")
                print_table(_entries(entries))
                notify("")
    if files:
        notify(f"{FILES} (`rayfl sweep NAME`)")
        print_table(_entries(files))
    if like and is_empty:
        raise ConfigError(f"--like: no entry has the words {like!r}. Allowed: words of a name or a data sheet")


def _files() -> Iterator[tuple[str, str, str]]:
    """Yield each shipped file: name, first sentence of its first comment, rows."""
    for name, file in shipped().items():
        words = [
            line.removeprefix("#").strip()
            for line in file.read_text(encoding="utf-8").splitlines()
            if line.startswith("#")
        ]
        rows = load_yaml(file).get("rows") or {}
        yield name, " ".join(words).partition(". ")[0].rstrip("."), ", ".join(rows)


def schema(kind: Annotated[Literal["run", "sweep"], typer.Argument(help="Kind of file.")] = "sweep") -> None:
    """Print the JSON schema of a sweep's or a run's file, for completion and checks in editors."""
    from rayfl.reference.schema import schema as made

    print(json.dumps(made(kind), indent=1))
