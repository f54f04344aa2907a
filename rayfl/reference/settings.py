"""What every setting of a file is: its sentence, what it may be, its default. All of it is read from the classes that
check a file, so that it cannot go stale.

The text below a field is read from the source when somebody asks: pydantic would read that of all classes at every
start.
"""

import ast
import inspect
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from rayfl.config import PLAIN_WORDS, Config, ConfigError, Named, kinds_of, nearest
from rayfl.experiment import Experiment
from rayfl.reference.catalogue import FILLED, KINDS, first_sentence
from rayfl.results.published import Published
from rayfl.tuning.space import Search

SWEEP: Mapping[str, str] = {
    "question": "What the sweep is to answer, in plain words.",
    "experiment": "What all rows have in common: the sections of a run's file, without `seed`.",
    "rows": "Label -> the sections of the experiment that this row changes; every row is tuned with the same budget. "
    "`title:` is its readable name.",
    "search": "What is tuned, and how.",
    "published": "A paper's numbers, which tables then have beside ours.",
}
"""Section of a sweep's file -> what it is."""
SECTIONS: Mapping[str, type[Config]] = {"search": Search, "published": Published}
"""Those of a sweep's file that are sections of a class."""

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
    """What it is."""
    allowed: str
    """What it may be, in words."""
    default: str
    """As YAML; "" where it has to be given."""
    field: FieldInfo

    @property
    def line(self) -> str:
        """ "a number, more than 0; 0.05 unless given"."""
        return f"{self.allowed}; {f'{self.default} unless given' if self.default else 'has to be given'}"


@dataclass(frozen=True)
class Place:
    """What a dotted path leads to: a field of one class, or of those that a name chooses among."""

    path: str
    owners: Mapping[str, type[Config]]
    """What chooses the class ("" where there is one) -> the class."""
    name: str

    @property
    def settings(self) -> dict[str, Setting]:
        """Of every owner."""
        return {chosen: settings(cls)[self.name] for chosen, cls in self.owners.items()}

    @property
    def below(self) -> dict[str, type[Config]]:
        """The classes of what stands at the path: by the names that choose one, or one without a name."""
        return kinds_below(self.path, *(setting.field for setting in self.settings.values()))

    def used_by(self, owners: Sequence[str]) -> str:
        """Who of its owners has the setting: "method fedprox, scaffold", "section training: How a client trains"; ""
        where it stands in a file itself."""
        section = self.path.rpartition(".")[0]
        names = ", ".join(filter(None, owners))
        if names or not section:
            return f"{section} {names}".strip()
        return f"section {section}: {sentence_of(self.owners[owners[0]])}"


def find(path: str) -> Place:
    """What a dotted path leads to, in a run's file or in a sweep's. Places in lists may be left out. A ConfigError says
    what is known where it ends."""
    parts = [part for part in path.split(".") if not part.isdecimal()] or [path]
    if parts[0] == "experiment" and len(parts) > 1:
        parts = parts[1:]
    if parts[0] == "rows" and len(parts) > 2:
        parts = parts[2:]
    if len(parts) > 1 and parts[-1] == "name" and ".".join(parts[:-1]) in KINDS:
        parts = parts[:-1]
    owners: Mapping[str, type[Config]] = {"": Experiment}
    at = ""
    if parts[0] in SECTIONS and len(parts) > 1:
        owners, at, parts = {"": SECTIONS[parts[0]]}, f"{parts[0]}.", parts[1:]
    for i, part in enumerate(parts):
        having = {name: cls for name, cls in owners.items() if part in settings(cls)}
        if not having:
            known = sorted({name for cls in owners.values() for name in settings(cls)} | (set() if at else {*SWEEP}))
            raise ConfigError(f"{path}: {at.rstrip('.') or 'a file'} has no setting {part!r}; {nearest(part, known)}")
        place, at = Place(f"{at}{part}", having, part), f"{at}{part}."
        owners = place.below
        is_open = any(get_origin(s.field.annotation) is dict for s in place.settings.values())
        if i + 1 == len(parts) or is_open or not owners:
            return place
    raise AssertionError


def sentence_of(cls: type[Config]) -> str:
    """What a section is: the first sentence of its class."""
    text = first_sentence(cls).rpartition("` section: ")[2]
    return text[:1].upper() + text[1:]


def kinds_below(path: str, *fields: FieldInfo) -> dict[str, type[Config]]:
    """The classes of the sections at a path, as one or more fields have it: by the names that choose one, or one
    without a name."""
    if path in KINDS:
        return dict(KINDS[path].known())
    found = [kind for field in fields for kind in kinds_of(field.annotation)]
    sections = list(dict.fromkeys(kind for kind in found if issubclass(kind, Config)))
    return {"" if len(sections) == 1 else kind.__name__: kind for kind in sections}


def settings(cls: type[Config]) -> dict[str, Setting]:
    """Field -> what it is, of what a person may give in a section."""
    filled = {name for place, names in FILLED.items() if issubclass(cls, KINDS[place].base) for name in names}
    texts = documented(cls)
    return {
        name: Setting(name, texts.get(name, field.description or ""), _allowed(name, field), _default(field), field)
        for name, field in cls.model_fields.items()
        if not field.exclude and name not in filled and not (name == "name" and issubclass(cls, Named))
    }


@cache
def documented(cls: type) -> dict[str, str]:
    """Field -> the text below it in the source, of a class and what it extends."""
    found: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        if not issubclass(part, Config) or part is Config:
            continue
        try:
            [body] = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        except (OSError, TypeError, SyntaxError):  # a notebook's
            continue
        assert isinstance(body, ast.ClassDef)
        found |= dict(_texts(body))
    return found


def _texts(body: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match after:
                case ast.Expr(ast.Constant(str(text))):
                    yield statement.target.id, " ".join(text.split())


def as_yaml(value: Any) -> str:
    """A value on one line, as a file would say it."""
    if isinstance(value, Config):
        value = value.model_dump(mode="json")
    text = yaml.safe_dump(_plain(value), default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _default(field: FieldInfo) -> str:
    return "" if field.is_required() else as_yaml(field.get_default(call_default_factory=True))


def _allowed(name: str, field: FieldInfo) -> str:
    """In words, what a field may be."""
    return worded(field.annotation, field.metadata)


def worded(annotation: Any, metadata: Any = ()) -> str:
    """A type in words: "a whole number, at least 1", "one of fixed, dynamic", "a list of numbers"."""
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
