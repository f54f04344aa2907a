"""Template of a configuration file: chosen settings, and every other setting as a comment with its default.

`## ` starts a line of text, `# ` a setting with its default; without these two characters it is set.
"""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from rayfl.config import Config
from rayfl.experiment import DEFAULTS, NAMED, Experiment
from rayfl.reference.catalogue import as_yaml
from rayfl.reference.settings import SECTIONS, SWEEP, Setting, kinds_below, sentence_of, settings

WIDTH = 100
STEP = "  "

ABOUT = (
    "`rayfl check` validates this file, `rayfl explain training.lr` explains a setting, `rayfl list methods` lists the "
    "methods. Settings after `#` are optional and shown with their defaults."
)


def of_run(given: Mapping[str, Any]) -> str:
    """Return a run's file with the settings `given`, a valid run."""
    return _text([*_words(f"One run, for `rayfl run`. {ABOUT}", ""), *_experiment(given, "")])


def of_sweep(given: Mapping[str, Any]) -> str:
    """Return a sweep's file with the settings `given`, a valid sweep."""
    lines = [*_words(f"A comparison, for `rayfl sweep`. {ABOUT}", "")]
    for name, text in SWEEP.items():
        lines += ["", *_words(text, "")]
        if name == "experiment":
            lines += ["experiment:", *_experiment(given[name], STEP, without=("seed",))]
        elif name == "rows":
            lines += ["rows:", *(f"{STEP}{row}: {as_yaml(changes)}" for row, changes in given[name].items())]
        elif name in SECTIONS and name in given:
            lines += [f"{name}:", *_fields(SECTIONS[name], given[name], STEP)]
        elif name in SECTIONS:
            lines += [f"# {name}:", *_fields(SECTIONS[name], {}, f"# {STEP}", is_off=True)]
        else:
            lines += [f"{name}: {as_yaml(given[name])}" if name in given else f"# {name}: "]
    return _text(lines)


def _experiment(given: Mapping[str, Any], indent: str, without: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the sections of an experiment."""
    for name, setting in settings(Experiment).items():
        if name in without:
            continue
        section = kinds_below(name, setting.field)
        if name not in NAMED and len(section) != 1:
            yield from _field(name, setting, given, indent)
            continue
        off = "" if name in given else "# "
        value = given.get(name, DEFAULTS.get(name, {}))
        yield ""
        if name in NAMED:
            value = {"name": value} if isinstance(value, str) else value
            cls = NAMED[name].find(value["name"], name)
            yield from _words(f"One of {', '.join(sorted(NAMED[name].known()))}, or your own class.", indent)
        else:
            [cls] = section.values()
            yield from _words(f"{sentence_of(cls)}.", indent)
        yield f"{indent}{off}{name}:"
        if name in NAMED:
            yield f"{indent}{off}{STEP}name: {value['name']}"
        yield from _fields(cls, value, f"{indent}{off}{STEP}" if off else f"{indent}{STEP}", bool(off))


def _fields(cls: type[Config], given: Mapping[str, Any], indent: str, is_off: bool = False) -> Iterator[str]:
    """Yield the settings of a section. `is_off`: the section is commented out."""
    for name, setting in settings(cls).items():
        yield from _field(name, setting, given, indent, is_off)


def _field(name: str, setting: Setting, given: Mapping[str, Any], indent: str, is_off: bool = False) -> Iterator[str]:
    yield from _words(" ".join(filter(None, [setting.text, f"({setting.allowed})"])), indent.partition("#")[0])
    value = as_yaml(given[name]) if name in given else setting.default
    yield f"{indent}{'' if is_off or name in given else '# '}{name}: {value}".rstrip()


def _words(text: str, indent: str) -> list[str]:
    before = f"{indent}## "
    return textwrap.wrap(text, WIDTH, initial_indent=before, subsequent_indent=before, break_on_hyphens=False)


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
