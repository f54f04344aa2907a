"""Configuration files by name, and shell completion. Imports no torch: completion must be fast."""

from collections.abc import Iterator
from pathlib import Path

import typer

from rayfl.config import ConfigError, load_yaml
from rayfl.config.errors import names_of, typo_of
from rayfl.config.plain import shown

SHIPPED = [above / "tune_configs" for above in Path(__file__).parents[1:3]]
"""Folders of the shipped files: inside an installed package, beside the package in a clone."""

LONGEST, LONGEST_PATH = 255, 4095
"""Most bytes of a file's name and of a path on Linux."""


def find_config(path: Path) -> Path:
    """Return the file, or the shipped file of this name: quickstart, tune_configs/quickstart.yaml."""
    if len(path.name) > LONGEST or len(str(path)) > LONGEST_PATH:
        raise ConfigError(f"{shown(str(path))}: the path is too long. Allowed: a file's path")
    is_name = path.suffix in ("", ".yaml") and path.parent in (Path(), Path("tune_configs"))
    named = [folder / f"{path.stem}.yaml" for folder in SHIPPED if is_name]
    found = next((place for place in (path, *named) if place.is_file()), path)
    if found == path and not path.exists():
        files = sorted(map(str, path.parent.glob("*.y*ml")))
        hint = typo_of(path, files) or typo_of(path.stem, shipped())
        known = names_of([*files, *shipped()])
        raise ConfigError(f"{path}: no such file, and no shipped file of this name. {hint}Allowed: {known}")
    return found


def shipped() -> dict[str, Path]:
    """Return the shipped files by name."""
    return dict(sorted((file.stem, file) for folder in SHIPPED for file in folder.glob("*.yaml")))


def configs(incomplete: str) -> Iterator[str]:
    """Yield matching shipped names, YAML files and folders."""
    yield from (name for name in shipped() if _fits(name, incomplete))
    above, _, start = incomplete.rpartition("/")
    for place in sorted(Path(above or ("/" if incomplete.startswith("/") else ".")).glob(f"{start}*")):
        if place.is_dir():
            yield f"{place}/"
        elif place.suffix in (".yaml", ".yml"):
            yield str(place)


def rows(context: typer.Context, incomplete: str) -> list[str]:
    """Return matching rows of the sweep's file on the command line."""
    try:
        config = next(iter(context.args), None) or context.params.get("config") or "quickstart"
        given = load_yaml(find_config(Path(config)))
    except ConfigError:
        return []
    return [row for row in given.get("rows") or {} if _fits(row, incomplete)]


def some_rows(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the last row of a comma-separated list."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{row}" for row in rows(context, last)]


def _fits(name: str, incomplete: str) -> bool:
    return name.startswith(incomplete)
