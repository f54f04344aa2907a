"""Meaning, allowed values and default of every setting, read from the classes that validate a file.

Field docstrings are read from the source on demand: pydantic would read those of all classes at every start.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rayfl.config import PLAIN_WORDS, Config, ConfigError, Named, kinds_of
from rayfl.config.errors import names_of, typo_of
from rayfl.experiment import NAMED, Experiment
from rayfl.reference.catalogue import FILLED, KINDS, as_yaml, first_sentence
from rayfl.results.published import Published
from rayfl.tuning.space import Search

SWEEP: Mapping[str, str] = {
    "question": "Question that the sweep answers, in plain words.",
    "experiment": "Settings shared by all rows: the sections of a run's file, without `seed`.",
    "rows": "Label -> settings that this row changes. Every row is tuned with the same budget. `title:` is its "
    "readable name.",
    "search": "Search space, algorithm and budget.",
    "published": "Published numbers, shown in tables beside the measured ones.",
}
"""Section of a sweep's file -> its meaning."""
SECTIONS: Mapping[str, type[Config]] = {"search": Search, "published": Published}
"""Sections of a sweep's file that are defined by a class."""

BOUNDS = {
    "ge": PLAIN_WORDS["greater_than_equal"],
    "gt": PLAIN_WORDS["greater_than"],
    "le": PLAIN_WORDS["less_than_equal"],
    "lt": PLAIN_WORDS["less_than"],
    "min_length": PLAIN_WORDS["too_short"],
    "max_length": PLAIN_WORDS["too_long"],
}
WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    NoneType: "null",
    dict: "a section",
}


@dataclass(frozen=True)
class Setting:
    """One field of a section."""

    name: str
    text: str
    """Its docstring."""
    allowed: str
    """Allowed values, in words."""
    default: str
    """As YAML; "" if the setting is required."""
    field: FieldInfo

    @property
    def line(self) -> str:
        """Allowed values and default: "a number, more than 0. Default: 0.05"."""
        return f"{self.allowed}. {f'Default: {self.default}' if self.default else 'Required'}"


@dataclass(frozen=True)
class Place:
    """Target of a dotted path: a field of one class, or of all classes that can be named there."""

    path: str
    owners: Mapping[str, type[Config]]
    """Name that selects the class ("" if there is only one) -> class."""
    name: str
    defaults: Mapping[str, Config] = field(default_factory=dict)
    """Owner of the section in which the field is -> its default of that section."""

    @cached_property
    def settings(self) -> dict[str, Setting]:
        """The setting of every owner."""
        return {chosen: settings(cls)[self.name] for chosen, cls in self.owners.items()}

    @cached_property
    def below(self) -> dict[str, type[Config]]:
        """Classes of the sections at the path, by the name that selects one ("" if there is only one)."""
        fields = [setting.field for setting in self.settings.values()]
        classes = {cls for field in fields for cls in kinds_of(field.annotation)}
        chosen = next((kind for kind in NAMED.values() if kind.base in classes), None)
        return dict(chosen.known()) if chosen else kinds_below(self.path, *fields)

    def other_defaults(self, owners: Sequence[str]) -> str:
        """Return the defaults in sections of these classes that differ from the class's: "5 in dsfl, takfl; 20 in
        fedbe"."""
        found: dict[str, list[str]] = {}
        for chosen in owners:
            usual = self.settings[chosen].default
            for by, section in self.defaults.items():
                if type(section) is self.owners[chosen] and (own := as_yaml(getattr(section, self.name))) != usual:
                    found.setdefault(own, []).append(by)
        return "; ".join(f"{value} in {', '.join(by)}" for value, by in found.items())

    def used_by(self, owners: Sequence[str]) -> str:
        """Return the owners in words: "method fedprox, scaffold", "section training: Local training"; "" at the top
        level of a file."""
        section = self.path.rpartition(".")[0]
        names = ", ".join(filter(None, owners))
        if names or not section:
            return f"{section} {names}".strip()
        return f"section {section}: {sentence_of(self.owners[owners[0]])}"


def find(path: str) -> Place:
    """Return the target of a dotted path in a run's or a sweep's file. List indices are optional. Raise ConfigError,
    with the known settings, for an unknown path."""
    parts = [part for part in path.split(".") if not part.isdecimal()] or [path]
    if parts[0] == "experiment" and len(parts) > 1:
        parts = parts[1:]
    if parts[0] == "rows" and len(parts) > 2:
        parts = parts[2:]
    if len(parts) > 1 and parts[-1] == "name" and ".".join(parts[:-1]) in KINDS:
        parts = parts[:-1]
    owners: Mapping[str, type[Config]] = {"": Experiment}
    at, defaults = "", {}
    if parts[0] in SECTIONS and len(parts) > 1:
        owners, at, parts = {"": SECTIONS[parts[0]]}, f"{parts[0]}.", parts[1:]
    for i, part in enumerate(parts):
        having = {name: cls for name, cls in owners.items() if part in settings(cls)}
        if not having:
            known = sorted({name for cls in owners.values() for name in settings(cls)} | (set() if at else {*SWEEP}))
            inside = [] if at else [f"{name}.{part}" for name in settings(Experiment) if _has(find(name), part)]
            choices = [] if at else sorted(name for kind in KINDS.values() for name in kind.known())
            close = typo_of(part, [*known, *choices])
            hint = f"Did you mean {' or '.join(inside)}?" if inside else f"{close}Allowed: {names_of(known)}"
            raise ConfigError(f"{path}: {at.rstrip('.') or 'a file'} has no setting {part!r}. {hint}")
        place, at = Place(f"{at}{part}", having, part, defaults), f"{at}{part}."
        owners = place.below
        given = {owner: setting.field.default for owner, setting in place.settings.items()}
        defaults = {owner: default for owner, default in given.items() if owner and isinstance(default, Config)}
        is_open = any(get_origin(s.field.annotation) is dict for s in place.settings.values())
        if i + 1 == len(parts) or is_open:
            return place
        if not owners:
            raise ConfigError(f"{path}: {place.path} is a value, without settings. Allowed: {place.path}")
    raise AssertionError


def _has(place: Place, name: str) -> bool:
    return any(name in settings(cls) for cls in place.below.values())


def sentence_of(cls: type[Config]) -> str:
    """Return the first sentence of a section's class."""
    text = first_sentence(cls).rpartition("` section: ")[2]
    return text[:1].upper() + text[1:]


def kinds_below(path: str, *fields: FieldInfo) -> dict[str, type[Config]]:
    """Return the classes of the sections that `fields` define at a path, by the name that selects one ("" if there is
    only one)."""
    if path in KINDS:
        return dict(KINDS[path].known())
    found = [kind for field in fields for kind in kinds_of(field.annotation)]
    sections = list(dict.fromkeys(kind for kind in found if issubclass(kind, Config)))
    return {"" if len(sections) == 1 else kind.__name__: kind for kind in sections}


@cache
def settings(cls: type[Config]) -> Mapping[str, Setting]:
    """Return the settings of a section that a user can write, by name."""
    filled = {name for place, names in FILLED.items() if issubclass(cls, KINDS[place].base) for name in names}
    texts = documented(cls)
    return {
        name: Setting(
            name,
            texts.get(name, field.description or ""),
            worded(field.annotation, field.metadata),
            _default(field),
            field,
        )
        for name, field in cls.model_fields.items()
        if not field.exclude and name not in filled and not (name == "name" and issubclass(cls, Named))
    }


def documented(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a class and its bases, read from the source."""
    found: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        if issubclass(part, Config) and part is not Config:
            found |= _own_texts(part)
    return found


@cache
def _own_texts(cls: type) -> dict[str, str]:
    try:
        [body] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # a notebook's
        return {}
    assert isinstance(body, ast.ClassDef)
    return dict(_texts(body))


def _texts(body: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match after:
                case ast.Expr(ast.Constant(str(text))):
                    yield statement.target.id, " ".join(text.split())


def _default(field: FieldInfo) -> str:
    return "" if field.is_required() else as_yaml(field.get_default(call_default_factory=True))


def worded(annotation: Any, metadata: Any = ()) -> str:
    """Return a type in words: "a whole number, at least 1", "one of fixed, dynamic", "a list of numbers"."""
    origin = get_origin(annotation)
    parts: tuple[Any, ...] = get_args(annotation)
    if origin is Annotated:
        more = [part for entry in parts[1:] for part in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
        return worded(parts[0], [*more, *metadata])
    if origin in (Union, UnionType):
        options = [worded(part, () if part in (NoneType, bool) else metadata) for part in parts]
        return ", or ".join(dict.fromkeys(options))
    if origin is Literal:
        return f"{'one of ' * (len(parts) > 1)}{', '.join(map(as_yaml, parts))}"
    if origin in (tuple, list) and parts:
        if origin is list or parts[-1] is ...:
            each = "" if parts[0] is Any else f", each {worded(parts[0])}"
            return f"a list{each}{_bounds(metadata)}"
        return f"[{'; '.join(map(worded, parts))}]"
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return "a section"
    return WORDS.get(origin or annotation, "any value") + _bounds(metadata)


def _bounds(metadata: Any) -> str:
    found = [
        words.format(**{bound: f"{limit:g}" if isinstance(limit, float) else limit})
        for entry in metadata
        for bound, words in BOUNDS.items()
        if (limit := getattr(entry, bound, None)) is not None
    ]
    return "".join(f", {words}" for words in found)
