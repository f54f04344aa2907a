"""Further fields of a configuration as a hashable value: a mapping in a file."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema


def frozen(value: Any) -> Any:
    """Return mappings as tuples of pairs and lists as tuples, recursively.

    >>> frozen({"rope_parameters": {"rope_type": "default"}, "layers": [1, 2]})
    (('layers', (1, 2)), ('rope_parameters', (('rope_type', 'default'),)))
    """
    if isinstance(value, Mapping):
        return tuple((name, frozen(value[name])) for name in sorted(value))
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def plain(settings: tuple[Any, ...]) -> dict[str, Any]:
    """Return the mapping passed to `frozen`.

    >>> plain(frozen({"rope_parameters": {"rope_type": "default"}, "layers": [1, 2]}))
    {'layers': [1, 2], 'rope_parameters': {'rope_type': 'default'}}
    """
    return {name: _thawed(value) for name, value in settings}


def _thawed(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    pairs = [isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str) for part in value]
    return plain(value) if pairs and all(pairs) else [_thawed(part) for part in value]


def _read(value: Any) -> Any:
    if isinstance(value, Mapping) or value in ((), []):
        return frozen(value)
    raise ValueError("a mapping from names of the configuration to values")


Settings = Annotated[
    tuple[Any, ...],
    BeforeValidator(_read),
    PlainSerializer(plain, return_type=dict),
    WithJsonSchema({"type": "object", "default": {}}),
]
"""A mapping of plain values."""
