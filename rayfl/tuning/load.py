"""Reading of sweeps from YAML files or mappings, with changes by the command line."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayfl.config import (
    Config,
    ConfigError,
    Named,
    choose,
    component,
    differences,
    load_yaml,
    nearest,
    parse,
    parse_setting,
    set_path,
)
from rayfl.config.plain import shown
from rayfl.experiment import Experiment, lay_over, with_settings
from rayfl.results.published import Published
from rayfl.tuning.check import check, decided
from rayfl.tuning.space import Domain, Search
from rayfl.tuning.sweep import Sweep

SECTIONS = ("question", "experiment", "rows", "search", "published")
"""Sections of a sweep's file."""
TITLE = "title"
"""Key of a row's readable name."""


def is_sweep(given: Mapping[str, Any]) -> bool:
    """Return whether a file's content is a sweep's, or is meant to be."""
    return not given.keys().isdisjoint(SECTIONS)


def load_sweep(path: str | Path, settings: list[str] | None = None, rows: str | None = None) -> Sweep:
    """Return the checked sweep of a file. `settings`: "path=value", applied to every row's experiment, or to the search
    if they begin with "search.". `rows`: "a,b", the rows to keep. Raise ConfigError for an invalid sweep."""
    given = load_yaml(path)
    return with_settings(lambda some: read_sweep(given, str(path), some, rows), settings, str(path))


def read_sweep(
    given: Mapping[str, Any], where: str = "sweep", settings: list[str] | None = None, rows: str | None = None
) -> Sweep:
    """Return the checked sweep of a mapping, in which sections can be objects and the experiment an `Experiment`, whose
    seed is ignored. `where`: its name in errors. Otherwise as `load_sweep`."""
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{where}: {shown(given)} is not valid. Allowed: a mapping of sections, or a YAML file's path"
        )
    given = {section: _as_mappings(value) for section, value in given.items()}
    _check_sections(given, where)
    chosen = list(_rows(given)) if rows is None else rows.split(",")
    for row in chosen:
        choose(_rows(given), row, f"{where}: --rows", "row")
        if chosen.count(row) > 1:
            raise ConfigError(f"{where}: --rows: {row!r} appears twice. Allowed: every row once")
    published = _published(given, where)
    changed = given
    for text in settings or []:
        changed = _lay_over(changed, *parse_setting(text), where)
    sweep = _sweep(where, changed, chosen, published)
    if settings and published:
        sweep = replace(sweep, changed=tuple(_changes(_sweep(where, given, chosen, published), sweep)))
    check(sweep)
    return sweep


def _rows(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return label -> changes. Default: one row without changes."""
    return given.get("rows") or {"run": {}}


def _check_sections(given: Mapping[str, Any], where: str) -> None:
    if not is_sweep(given) and set(given) & set(Experiment.model_fields):
        raise ConfigError(f"{where}: the file is a run. Allowed: a sweep's file. Hint: `rayfl run {where}` runs it")
    for key in given:
        if key not in SECTIONS:
            inside = f"Did you mean 'experiment.{key}'? Allowed: {', '.join(SECTIONS)}"
            hint = inside if key in Experiment.model_fields else nearest(key, SECTIONS)
            raise ConfigError(f"{where}: unknown key {shown(key)}. {hint}")
    if not isinstance(given.get("experiment"), Mapping):
        raise ConfigError(f"{where}: experiment: missing; a sweep file holds {', '.join(SECTIONS)}")
    _check_text(given, "question", where)
    rows = _rows(given)
    if not isinstance(rows, Mapping):
        raise ConfigError(
            f"{where}: rows: {shown(rows)} is not valid. Allowed: a mapping of labels to what each row changes"
        )
    for row, changes in rows.items():
        if not re.fullmatch(r"[\w.-]+", component(row, f"{where}: rows")):
            raise ConfigError(
                f"{where}: rows: {shown(row)} is not valid. Allowed: letters, digits and . _ - in a row's label"
            )
        if not isinstance(changes, Mapping | None):
            raise ConfigError(
                f"{where}: rows.{row}: {shown(changes)} is not valid. Allowed: sections of the experiment"
            )
        _check_text(changes or {}, TITLE, f"{where}: rows.{row}")
    for place, section in {"experiment": given["experiment"], **{f"rows.{row}": rows[row] for row in rows}}.items():
        if "seed" in (section or {}):
            raise ConfigError(
                f"{where}: {place}.seed: {shown(section['seed'])} is not valid. Allowed: search.seeds instead"
            )


def _check_text(given: Mapping[str, Any], key: str, where: str) -> None:
    if not isinstance(text := given.get(key, "-"), str) or not text.strip():
        raise ConfigError(f"{where}: {key}: {shown(text)} is not valid. Allowed: text")


def _as_mappings(value: Any) -> Any:
    """Return objects as mappings, which rows can change; named objects stay objects."""
    if isinstance(value, Config) and not isinstance(value, Named):
        chosen = value.model_fields_set - ({"seed"} if isinstance(value, Experiment) else set())
        value = {name: part for name, part in value if name in chosen}
    return {key: _as_mappings(part) for key, part in value.items()} if isinstance(value, Mapping) else value


def _sweep(where: str, given: Mapping[str, Any], chosen: list[str], published: Published | None) -> Sweep:
    rows = _rows(given)
    search = parse(Search, given.get("search", {}), f"{where}: search")
    for row in search.spaces:
        choose(rows, row, f"{where}: search.spaces", "row")
    changes = {row: {key: v for key, v in (rows[row] or {}).items() if key != TITLE} for row in chosen}
    return Sweep(
        Path(where).stem,
        where,
        given["experiment"],
        changes,
        search,
        published,
        " ".join(given.get("question", "").split()),
        {row: " ".join(rows[row][TITLE].split()) for row in chosen if TITLE in (rows[row] or {})},
    )


def _searched(path: str, rows: Iterable[str]) -> list[str]:
    """Return the parts of a path into the search; a setting is one part, and so is a row's name:
    "search.spaces.fedavg.mean.training.lr.grid" of the row fedavg.mean."""
    places = ["search.space", *(f"search.spaces.{row}" for row in rows)]
    place = max((place for place in places if f"{path}.".startswith(f"{place}.")), key=len, default=None)
    if place is None:
        return path.split(".")
    setting, dot, kind = path[len(place) + 1 :].rpartition(".")
    rest = [setting, kind] if dot and kind in Domain.model_fields else [path[len(place) + 1 :]]
    return [*place.split(".", 2), *filter(None, rest)]


def _lay_over(given: dict[str, Any], path: str, value: Any, where: str) -> dict[str, Any]:
    """Return the file with one setting applied to the search, or to the experiment and the rows that change its
    section."""
    if path.startswith("search."):
        return set_path(given, _searched(path, given.get("rows") or ()), value)
    path = path.removeprefix("experiment.")
    if path == "seed":
        raise ConfigError(
            f"{where}: --set seed: {shown(value)} is not valid. Allowed: search.seeds, as in --set "
            f"search.seeds=[{shown(value)}]"
        )
    search = given.get("search")
    if isinstance(search, Mapping):
        given_spaces = search.get("spaces")
        rows_spaces = given_spaces if isinstance(given_spaces, Mapping) else {}
        spaces = {f"search.spaces.{row}": space for row, space in rows_spaces.items()}
        for place, space in ({"search.space": search.get("space")} | spaces).items():
            if isinstance(space, Mapping) and decided({path: value}, space):
                raise ConfigError(
                    f"{where}: --set {path}: the setting is in {place}, which decides it. Hint: --set {place}={{}} "
                    "searches nothing"
                )
    section = path.partition(".")[0]
    rows = {
        row: lay_over(dict(changes), path, value) if changes and section in changes else changes
        for row, changes in (given.get("rows") or {}).items()
    }
    if rows and all(section in (changes or {}) for changes in rows.values()):
        return given | {"rows": rows}
    return given | {"experiment": lay_over(dict(given["experiment"]), path, value)} | ({"rows": rows} if rows else {})


def _published(given: Mapping[str, Any], where: str) -> Published | None:
    if "published" not in given:
        return None
    published = parse(Published, given["published"], f"{where}: published")
    for metric, numbers in published.numbers.items():
        for row in numbers:
            choose(_rows(given), row, f"{where}: published.numbers.{metric}", "row")
    return published


def _changes(file: Sweep, sweep: Sweep) -> list[str]:
    """Return the changes by settings in the rows and in the search."""
    rows: dict[str, list[str]] = {}
    for row in sweep.rows:
        point = sweep.search.of(row).points(0)[0]
        old, new = (s.experiment(row, point, 0).plain() for s in (file, sweep))
        for change in differences(old, new):
            if not change.startswith(("run.", "data.root")):
                rows.setdefault(change, []).append(row)
    old, new = ({"search": s.search.model_dump(mode="json")} for s in (file, sweep))
    changes = [c if len(of) == len(sweep.rows) else f"{', '.join(of)}: {c}" for c, of in rows.items()]
    return [*changes, *differences(old, new)]
