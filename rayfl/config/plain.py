"""Plain values (sections, lists, text, numbers): bounded reading of YAML, and formatting for errors."""

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import yaml
from yaml.resolver import BaseResolver

LARGEST_TEXT = 2**20
"""Maximum size of a YAML text in bytes, 100 times the longest file of rayfl."""
MOST_VALUES = 200_000
"""Maximum number of keys and values in a text, with aliases expanded (a short text can expand to a huge one)."""
DEEPEST = 50
"""Maximum nesting of sections and lists; the files of rayfl use 6 levels."""
MOST_CHARACTERS = 200
"""Maximum length of a value in an error."""

SECRETS = "passw|pwd|token|secret|key|credential|signature|auth"
"""Parts of the names of parameters in URLs whose values are not shown."""

SCALARS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")}
"""Supported tags of a scalar: no dates, no objects."""

MERGE = "<<"
"""Key of YAML 1.1 whose sections are merged into its own."""
ZEROS = re.compile(r"^[-+]?0[0-9_]+$")
"""Whole numbers with leading zeros, which versions of YAML read differently."""


def shown(value: Any) -> str:
    """Return a value as text for an error, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def short(value: Any) -> str:
    """Return a value as short text for tables and progress lines; floats have three digits."""
    return f"{value:.3g}" if isinstance(value, float) else value if isinstance(value, str) else shown(value)


def last(path: str) -> str:
    """Return the last part of a dotted path, with the index if it follows one: lr, 0.width."""
    *_, before, end = ["", *path.split(".")]
    return f"{before}.{end}" if before.isdecimal() else end


def public(text: str) -> str:
    """Return `text` without the user names and passwords in its URLs, also in their queries."""
    without_users = re.sub(r"//[^/\s]*@", "//", text)
    return re.sub(rf"([?&;][^=&;\s]*(?:{SECRETS})[^=&;\s]*=)[^&;#\s'\"]+", r"\1...", without_users, flags=re.IGNORECASE)


def joined(path: list[Any]) -> str:
    """Return the dotted path; long and unprintable keys are quoted."""
    keys = map(str, path)
    return ".".join(key if key.isprintable() and len(key) <= MOST_CHARACTERS else shown(key) for key in keys)


def read_yaml(text: str | bytes) -> Any:
    """Return the value of a YAML text. `1e-3` is a number, a date is text, keys are text and unique per section, and
    `<<` merges sections. A ValueError gives the line and column, or the dotted path of the value."""
    if len(text) > LARGEST_TEXT:
        raise ValueError(f"the text has more than {LARGEST_TEXT} bytes. Allowed: at most {LARGEST_TEXT}")
    try:
        _check_size(text)
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark and "nesting depth" in str(error.problem):  # the limit of libyaml since 0.2.6
            _within(DEEPEST + 1, 0, mark.line)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"not valid YAML: {where}{error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from None
    return None if node is None else _value(loader, node, [], itertools.count(1))


def write_yaml(value: Any, **form: Any) -> str:
    """Return a YAML text of which `read_yaml` and readers of YAML 1.1 make this value, keys in their order. `form`:
    further options of `yaml.dump`."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **form)


def _check_size(text: str | bytes) -> None:
    """Raise a ValueError for a text that is too deep or too large: libyaml recurses and would crash the process."""
    depth = count = 0
    for event in yaml.parse(text, Loader=_Loader):
        count += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        _within(depth, count, event.start_mark.line)


def _within(depth: int, count: int, line: int) -> None:
    if depth > DEEPEST:
        raise ValueError(
            f"line {line + 1}: sections or lists are nested more than {DEEPEST} deep. Allowed: at most {DEEPEST}"
        )
    if count > MOST_VALUES:
        raise ValueError(f"the text has more than {MOST_VALUES} keys and values. Allowed: at most {MOST_VALUES}")


def _value(loader: Any, node: yaml.Node, path: list[Any], count: Iterator[int]) -> Any:
    """Return the value of the node at `path`. `count` counts the values of the whole text."""
    line = node.start_mark.line
    _within(len(path), next(count), line)
    if isinstance(node, yaml.SequenceNode) and node.tag == BaseResolver.DEFAULT_SEQUENCE_TAG:
        return [_value(loader, entry, [*path, i], count) for i, entry in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode) and node.tag == BaseResolver.DEFAULT_MAPPING_TAG:
        return _section(loader, node, path, count)
    if isinstance(node, yaml.ScalarNode) and node.tag in SCALARS:
        return _scalar(loader, node, path)
    raise ValueError(f"{_place(path, line)}: the tag {node.tag} is not supported. Allowed: values without a tag")


def _section(loader: Any, node: yaml.MappingNode, path: list[Any], count: Iterator[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    merged: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(f"{_place(path, line)}: a key is a list or a section. Allowed: text")
        if key.tag != BaseResolver.DEFAULT_SCALAR_TAG:
            written = joined([key.value])
            raise ValueError(
                f'{_place(path, line)}: the key {written} is not text. Allowed: text, e.g. "{written}" in quotes'
            )
        below = [*path, key.value]
        if key.value in lines:
            raise ValueError(f"{_place(below, line)}: the key is already on line {lines[key.value] + 1}. Allowed: once")
        lines[key.value] = line
        # a quoted key is text
        if key.value == MERGE and not key.style:
            merged = _merged(_value(loader, value, below, count), below, line)
        else:
            found[key.value] = _value(loader, value, below, count)
    return merged | found


def _merged(given: Any, path: list[Any], line: int) -> dict[str, Any]:
    """Return the keys of the merged sections; of equal keys, the first counts."""
    sections = given if isinstance(given, list) else [given]
    if not all(isinstance(one, dict) for one in sections):
        raise ValueError(f"{_place(path, line)}: {shown(given)} is not valid. Allowed: a section or a list of sections")
    return {key: value for one in reversed(sections) for key, value in one.items()}


def _scalar(loader: Any, node: yaml.ScalarNode, path: list[Any]) -> Any:
    try:
        value = loader.construct_object(node)
    except (ValueError, KeyError, IndexError):
        # more digits than Python reads, or text that is tagged as a number
        value = math.nan
    if ZEROS.match(node.value) and isinstance(value, int | float):
        # YAML 1.1 reads 010 as 8, YAML 1.2 as 10
        digits = joined([node.value])
        raise ValueError(
            f"{_place(path, node.start_mark.line)}: {digits} is not valid. Allowed: whole numbers without leading "
            f'zeros, or "{digits}" in quotes for text'
        )
    if ":" in node.value and isinstance(value, int | float):
        # YAML 1.1 reads 1:30 as 90
        return node.value
    if isinstance(value, int) and abs(value) >= 2**63 or isinstance(value, float) and not math.isfinite(value):
        place = _place(path, node.start_mark.line)
        raise ValueError(
            f"{place}: {joined([node.value])} is not valid. Allowed: finite numbers, whole ones below 2**63"
        )
    return value


def _place(path: list[Any], line: int) -> str:
    return f"{joined(path)} (line {line + 1})" if path else f"line {line + 1}"


_Fastest: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader of libyaml. Default without libyaml: the loader in Python."""


class _Loader(_Fastest):
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in SCALARS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    """Quotes texts that either YAML 1.1 or `_Loader` reads as something else."""


for _either in (_Loader, _Dumper):
    # YAML 1.1 requires a dot in a float and reads 1e-3 as text
    _either.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)$"), list("-+0123456789.")
    )
    # YAML 1.1 reads 08 as text and 07 as a number
    _either.add_implicit_resolver("tag:yaml.org,2002:int", ZEROS, list("-+0"))
