"""Functions shared by loggers."""

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfl.config import ConfigError
from rayfl.metrics import Line


def require(library: str, extra: str) -> None:
    """Raise ConfigError if a library is not installed."""
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f"the package {library} is not installed. Hint: uv sync --extra {extra}")


def name_of(config: Mapping[str, Any], folder: Path | None) -> str:
    """Return the name of the run's folder. For trials of a sweep, which have none, return method, seed and 8 characters
    of a digest of the configuration and the trial's id."""
    if folder is not None:
        return folder.name
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return f"{config['method']['name']}-s{config['seed']}-{digest[:8]}"


def numbers(line: Line) -> dict[str, float]:
    """Return the numeric metrics of a line."""
    return {key: value for key, value in line.items() if isinstance(value, int | float) and key != "round"}
