"""Reading of folders of rayfl 0.4 and earlier, which have no facts and no mark on evaluated rounds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict

from rayfl.clients import Population
from rayfl.config import Config, parse
from rayfl.metrics import CLIENT_SCORES, EVALUATED, SPLITS, Line, label
from rayfl.results.files import read_json

PERSONAL = ("lg_fedavg", "spafl", "standalone")
"""Methods that were judged by the clients' own accuracies."""
STARTS = ("spafl", "standalone")
"""Methods of `PERSONAL` whose global accuracies belong to an untrained network."""
SCORES = {"accuracy": "max", "loss": "min"}


def today(given: Mapping[str, Any], config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a run.json completed with facts from its configuration (`where`: that file) and costs by capacity."""
    experiment = _section(config, "experiment") or config
    clients = parse(Population, _section(experiment, "clients"), f"{where}: clients")
    costs, labels = _section(given, "costs"), map(label, clients.all_capacities)
    facts = {
        "judge": "local_accuracy_mean" if _is_local(config) else "accuracy_mean",
        "capacities": clients.all_capacities,
        "trained": sorted((c for c, weight in clients.levels if weight), reverse=True),
        "scores": SCORES,
        "clients": clients.count,
        "rounds": experiment.get("rounds", 20),
    }
    by_capacity = {
        c: {"parameters": costs[f"parameters_{c}"], "macs": costs[f"macs_{c}"]} for c in labels if f"macs_{c}" in costs
    }
    return {**given, "version": 1, "costs": by_capacity, "facts": facts}


def lines(lines: list[Line], config: Mapping[str, Any]) -> list[Line]:
    """Return lines in today's form: evaluated rounds are marked, and scores of untrained networks are left out."""
    marked = [line | {EVALUATED: True} if "accuracy_mean" in line else line for line in lines]
    if _method(config) not in STARTS:
        return marked
    untrained = tuple(f"{SPLITS[split]}{score}_" for split in ("test", "validation") for score in SCORES)
    return [{name: value for name, value in line.items() if not name.startswith(untrained)} for line in marked]


def client_scores(file: Path) -> np.ndarray:
    """Return the rows of `CLIENT_SCORES` in a clients.json; none if there is no file."""
    scores = parse(_Clients, {"clients": read_json(file)}, str(file)).clients
    return np.array(sorted(scores.items()), CLIENT_SCORES)


class _Clients(Config):
    model_config = ConfigDict(allow_inf_nan=True)

    clients: dict[int, float]


def _method(config: Mapping[str, Any]) -> str:
    return _section(config, "method").get("name", "")


def _is_local(config: Mapping[str, Any]) -> bool:
    if search := _section(config, "search"):
        return str(search.get("metric")).startswith("local_")
    return _method(config) in PERSONAL and _section(config, "evaluation").get("clients", True)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}
