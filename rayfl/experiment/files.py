"""Experiments in YAML files, and `path=value` settings."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rayfl.config import ConfigError, load_yaml, parse_setting, set_path
from rayfl.experiment.base import DEFAULTS, NAMED, Experiment, read_experiment

T = TypeVar("T")


def load_experiment(path: str | Path, settings: list[str] | None = None) -> Experiment:
    """Return the experiment of a YAML file, with `path=value` settings applied."""
    given = load_yaml(path)
    if isinstance(given.get("experiment"), Mapping):
        raise ConfigError(f"{path}: the file is a sweep. Allowed: a run. Hint: `rayfl run --row ROW` runs one row")
    return with_settings(lambda some: read_experiment(overlaid(given, some), str(path)), settings, str(path))


def with_settings(load: Callable[[list[str] | None], T], settings: list[str] | None, where: str) -> T:
    """Return `load(settings)`. If it fails only with the settings, raise the ConfigError with them as its place."""
    try:
        return load(settings)
    except ConfigError as error:
        if not settings:
            raise
        try:
            load(None)
        except ConfigError as own:
            # not that of a value which only the settings supply
            if str(own) == str(error):
                raise
        problem = str(error).removeprefix(f"{where}: ")
        place = "" if problem.startswith("--set") else f"--set {blamed(settings, problem) or ' '.join(settings)}: "
        renamed = [text.replace(".name=", "=", 1) for text in settings if text.partition("=")[0].endswith(".name")]
        hint = f". Hint: --set {renamed[0]} replaces the whole section" if renamed and "unknown key" in problem else ""
        raise ConfigError(f"{place}{problem}{hint}") from None


def blamed(settings: Sequence[str], problem: str) -> str:
    """Return the settings that an error names; of a section's name only as the start of a path."""

    def is_named(path: str) -> bool:
        return (
            re.search(rf"(?<![\w.]){re.escape(path)}" + (r"(?!\w)" if "." in path else r"(?=:|\.\w)"), problem)
            is not None
        )

    return " ".join(text for text in settings if is_named(text.partition("=")[0]))


def overlaid(given: dict[str, Any], settings: list[str] | None) -> dict[str, Any]:
    """Return the content of a file with `path=value` settings applied."""
    for text in settings or []:
        given = lay_over(given, *parse_setting(text))
    return given


def lay_over(given: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return `set_path` of an experiment, after replacing a bare or default name by `{name: ...}`."""
    section = path.partition(".")[0]
    if section != path:
        given = given | {section: opened(given, section)}
    return set_path(given, path, value)


def opened(given: Mapping[str, Any], section: str) -> Any:
    """Return a section, with a bare or default name as `{name: ...}`; None if there is none."""
    value = given.get(section, DEFAULTS.get(section))
    return {"name": value} if section in NAMED and isinstance(value, str) else value
