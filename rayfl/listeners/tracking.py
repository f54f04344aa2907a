"""What loggers share: their library, a name for a run of any process, and what of a line is a number."""

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfl.metrics import Line


def require(library: str, extra: str) -> None:
    """A ValueError where a library is not installed."""
    if importlib.util.find_spec(library) is None:
        raise ValueError(f"with the package {library}, which is not installed; pip install 'rayfl[{extra}]'")


def name_of(config: Mapping[str, Any], folder: Path | None) -> str:
    """The name of a run's folder. A trial of a sweep has none: its method, its seed, and eight letters that tell its
    configuration from all others; the same when it goes on."""
    if folder is not None:
        return folder.name
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return f"{config['method']['name']}-s{config['seed']}-{digest[:8]}"


def numbers(line: Line) -> dict[str, float]:
    """Metric -> value, of what a line has of numbers."""
    return {key: value for key, value in line.items() if isinstance(value, int | float) and key != "round"}
