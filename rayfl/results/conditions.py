"""Conditions of runs: all settings that do not belong to the row. Two rows are tested only if their conditions are
equal, because otherwise the data, the model or the number of rounds may cause the difference."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from rayfl.config.plain import MOST_CHARACTERS
from rayfl.results.rows import Record, facts_of
from rayfl.results.tuned import MISSING

HARDWARE = ("run.", "listeners.")
"""Prefixes of settings that do not change results."""
OF_ROWS = ("method", "seed")
"""Sections in which the rows of any sweep may differ."""
PLACES = ".root"
"""End of settings that name a folder of the machine."""


@dataclass(frozen=True)
class Conditions:
    """Settings of a run of a sweep's row."""

    values: Mapping[str, str]
    """Dotted setting -> value as text, as MLflow stores it."""
    own: tuple[str, ...]
    """Settings and sections of the row: its method, its changes in the sweep's file, and the tuned settings."""

    @classmethod
    def of(cls, row: Record, sweep: Record) -> Self:
        values = {path: str(value) for path, value in row["params"].items() if not _is_of_machine(path)}
        # of a run that was continued for more rounds, MLflow keeps the parameters of its start
        values |= {"rounds": str(facts_of(row).rounds)}
        start = f"rows.{row['label']}."
        changed = [path.removeprefix(start) for path in sweep["params"] if path.startswith(start)]
        # a section with a name replaces the experiment's
        own = [path.removesuffix(".name") for path in changed]
        return cls(values, (*OF_ROWS, *own, *facts_of(sweep).tuned))

    def apart(self, other: "Conditions") -> dict[str, tuple[str, str]]:
        """Return setting -> both values, of those that differ and belong to neither row."""
        own = {*self.own, *other.own}
        both = {
            path: (self.values.get(path, MISSING), other.values.get(path, MISSING))
            for path in dict.fromkeys([*self.values, *other.values])
        }
        return {path: pair for path, pair in both.items() if pair[0] != pair[1] and own.isdisjoint(_above(path))}


def is_comparable(one: Sequence[Record], other: Sequence[Record]) -> bool:
    """Return whether rows of two labels may be tested: their `conditions`, if both have some, are equal."""
    known = [rows[0]["conditions"] for rows in (one, other) if "conditions" in rows[0]]
    return len(known) < 2 or not known[0].apart(known[1])


def listed(found: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a note for each section in which studies differ. `found`: dotted setting, study, and its value."""
    values: dict[str, dict[str, dict[str, None]]] = {}
    for path, study, value in found:
        values.setdefault(path, {}).setdefault(study, {})[_cut(value)] = None
    sections: dict[str, dict[str, str]] = {}
    for path, of in values.items():
        section, _, key = path.partition(".")
        sections.setdefault(section, {})[key] = ", ".join(
            f"{' or '.join(some)} ({study})" for study, some in of.items()
        )
    notes = []
    for section, keys in sections.items():
        # data sets, partitions or models with different names have different settings
        keys = {"": keys["name"]} if "name" in keys else keys
        notes.append(f"Studies differ in {section}: {'; '.join(f'{key} {text}'.strip() for key, text in keys.items())}")
    return notes


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def _is_of_machine(path: str) -> bool:
    return path.startswith(HARDWARE) or path.endswith(PLACES)


def _above(path: str) -> list[str]:
    """Return the path and the sections that contain it."""
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]
