"""Plain values (sections, lists, text, numbers): read from YAML text within bounds, and shown in errors."""

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import yaml
from yaml.resolver import BaseResolver

LARGEST_TEXT = 2**20
"""Bytes of YAML: 100 times our longest file."""
MOST_VALUES = 200_000
"""Keys and values in a text. An alias counts as what it stands for, so that short texts cannot grow without end."""
DEEPEST = 50
"""Sections and lists within each other; ours are 6 deep."""
MOST_CHARACTERS = 200
"""Of a value in an error."""

SCALARS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str")}
"""The tags that a single value may have: no dates, no objects."""


def shown(value: Any) -> str:
    """A value as it stands in an error: of a long one the start."""
    text = repr(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def short(value: Any) -> str:
    """A value as tables and progress have it, in few characters: numbers with three digits."""
    return f"{value:.3g}" if isinstance(value, float) else value if isinstance(value, str) else shown(value)


def last(path: str) -> str:
    """The end of a dotted path that tells entries of a list apart: lr, 0.width."""
    *_, before, end = ["", *path.split(".")]
    return f"{before}.{end}" if before.isdecimal() else end


def public(text: str) -> str:
    """Without the users and passwords of the addresses in it."""
    return re.sub(r"//[^/@\s]+@", "//", text)


def joined(path: list[Any]) -> str:
    """A dotted path, whatever its keys are."""
    keys = map(str, path)
    return ".".join(key if key.isprintable() and len(key) <= MOST_CHARACTERS else shown(key) for key in keys)


def read_yaml(text: str | bytes) -> Any:
    """The value of a YAML text. `1e-3` is a number, a date is text, a key is text and stands once in its section. A
    ValueError says where the text is wrong: by line and column, or by the dotted path of a value."""
    if len(text) > LARGEST_TEXT:
        raise ValueError(f"given more than {LARGEST_TEXT} bytes; allowed: at most that many")
    try:
        _check_size(text)
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"not valid YAML: {where}{error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from None
    return None if node is None else _value(loader, node, [], itertools.count(1))


def _check_size(text: str | bytes) -> None:
    """Before nodes are made of the text: libyaml makes them by recursion, and a deep one ends the process."""
    depth = count = 0
    for event in yaml.parse(text, Loader=_Loader):
        count += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        _within(depth, count, event.start_mark.line)


def _within(depth: int, count: int, line: int) -> None:
    if depth > DEEPEST:
        raise ValueError(
            f"line {line + 1}: given sections or lists more than {DEEPEST} deep; allowed: at most {DEEPEST}"
        )
    if count > MOST_VALUES:
        raise ValueError(f"given more than {MOST_VALUES} keys and values; allowed: at most that many")


def _value(loader: Any, node: yaml.Node, path: list[Any], count: Iterator[int]) -> Any:
    """What a node stands for. `path`: where it stands; `count`: counts the values of the whole text."""
    line = node.start_mark.line
    _within(len(path), next(count), line)
    if isinstance(node, yaml.SequenceNode) and node.tag == BaseResolver.DEFAULT_SEQUENCE_TAG:
        return [_value(loader, entry, [*path, i], count) for i, entry in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode) and node.tag == BaseResolver.DEFAULT_MAPPING_TAG:
        return _section(loader, node, path, count)
    if isinstance(node, yaml.ScalarNode) and node.tag in SCALARS:
        return _scalar(loader, node, path)
    raise ValueError(f"{_place(path, line)}: given the tag {node.tag}; allowed: values without a tag")


def _section(loader: Any, node: yaml.MappingNode, path: list[Any], count: Iterator[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(f"{_place(path, line)}: given a list or a section as a key; allowed: text")
        if key.tag != BaseResolver.DEFAULT_SCALAR_TAG:
            written = joined([key.value])
            raise ValueError(
                f'{_place(path, line)}: given the key {written}; allowed: text, as is "{written}" in quotes'
            )
        below = [*path, key.value]
        if key.value in found:
            raise ValueError(f"{_place(below, line)}: given before, on line {lines[key.value] + 1}; allowed: once")
        lines[key.value] = line
        found[key.value] = _value(loader, value, below, count)
    return found


def _scalar(loader: Any, node: yaml.ScalarNode, path: list[Any]) -> Any:
    try:
        value = loader.construct_object(node)
    except (ValueError, KeyError, IndexError):
        # more digits than Python reads, or what only its tag calls a number
        value = math.nan
    if isinstance(value, int) and abs(value) >= 2**63 or isinstance(value, float) and not math.isfinite(value):
        place = _place(path, node.start_mark.line)
        raise ValueError(f"{place}: given {joined([node.value])}; allowed: finite numbers, whole ones below 2**63")
    return value


def _place(path: list[Any], line: int) -> str:
    return f"{joined(path)} (line {line + 1})" if path else f"line {line + 1}"


_Fastest: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, unless PyYAML was built without it."""


class _Loader(_Fastest):
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in SCALARS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


# YAML 1.1 wants a dot in a float and reads 1e-3 as text
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)$"),
    list("-+0123456789."),
)
