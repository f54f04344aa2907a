"""Files of experiments: found by name, and offered on Tab with rows. A shell waits: nothing here imports torch."""

from collections.abc import Iterator
from pathlib import Path

import typer

from rayfl.config import ConfigError, load_yaml, nearest

SHIPPED = [above / "tune_configs" for above in Path(__file__).parents[1:3]]
"""Where the experiments are that come with rayfl: inside an installed package, beside it in a clone."""


def find_config(path: Path) -> Path:
    """The file, or the one of this name that comes with rayfl: quickstart, tune_configs/quickstart.yaml."""
    named = [folder / f"{path.stem}.yaml" for folder in SHIPPED if path.parent in (Path(), Path("tune_configs"))]
    found = next((place for place in (path, *named) if place.is_file()), path)
    if found == path and path.name == str(path) and not path.suffix and not path.exists():
        raise ConfigError(f"{path}: no such file, and none of this name comes with rayfl; {nearest(path, shipped())}")
    return found


def shipped() -> dict[str, Path]:
    """The experiments that come with rayfl, by name."""
    return dict(sorted((file.stem, file) for folder in SHIPPED for file in folder.glob("*.yaml")))


def configs(incomplete: str) -> Iterator[str]:
    """Shipped experiments by name, and YAML files and folders that begin so."""
    yield from (name for name in shipped() if _fits(name, incomplete))
    above, _, start = incomplete.rpartition("/")
    for place in sorted(Path(above or ("/" if incomplete.startswith("/") else ".")).glob(f"{start}*")):
        if place.is_dir():
            yield f"{place}/"
        elif place.suffix in (".yaml", ".yml"):
            yield str(place)


def rows(context: typer.Context, incomplete: str) -> list[str]:
    """Of the sweep's file that stands on the command line."""
    try:
        config = next(iter(context.args), None) or context.params.get("config") or "quickstart"
        given = load_yaml(find_config(Path(config)))
    except ConfigError:
        return []
    return [row for row in given.get("rows") or {} if _fits(row, incomplete)]


def some_rows(context: typer.Context, incomplete: str) -> list[str]:
    """The same, after those that are named before a comma."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{row}" for row in rows(context, last)]


def _fits(name: str, incomplete: str) -> bool:
    return name.startswith(incomplete)
