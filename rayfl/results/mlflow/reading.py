"""Reading of rows from a tracking server."""

import json
from collections.abc import Mapping
from typing import Any

from rayfl.config import ConfigError, nearest
from rayfl.results.mlflow.copy import FACTS, MADE, RESULT, STATUS
from rayfl.results.mlflow.store import Store, first_line, imported


class Reader:
    """Reader of the studies on a tracking server. Default: of all experiments."""

    def __init__(self, store: Store, experiment: str | None = None):
        self.store, self.experiment = store, experiment

    def read(self, kind: str = "run", sweep: str | None = None, tags: Mapping[str, str] | None = None) -> list[dict]:
        """Return the runs (`kind`: or sweeps), of the sweep with this id and with these tags, newest first. Rows are as
        of `RunFolder.record` with `tags`, `made` and `experiment`; `params` are text, and there is no `path`.

        Runs sent by earlier versions are left out until they are sent again from their folders. Raise ConfigError for
        an unknown server or experiment, or if it stops answering.
        """
        wanted = {"rayfl.kind": kind} | ({} if sweep is None else {"rayfl.sweep": sweep}) | dict(tags or {})
        self.store.require()
        text = " AND ".join(f"tags.`{name}` = '{value}'" for name, value in wanted.items())
        return self.store.patiently(lambda: self._read(text))

    def _read(self, wanted: str) -> list[dict[str, Any]]:
        exceptions = imported().exceptions
        from sqlalchemy.exc import SQLAlchemyError

        try:
            names = {e.experiment_id: e.name for e in self.store.experiments()}
            if self.experiment is not None and self.experiment not in names.values():
                known = nearest(self.experiment, names.values())
                raise ConfigError(f"{self.store}: there is no experiment {self.experiment!r}. {known}")
            where = [id for id, name in names.items() if self.experiment in (None, name)]
            found = self.store.search(where, wanted)
            return [_record(run, names[run.info.experiment_id]) for run in found if FACTS in run.data.tags]
        except (exceptions.MlflowException, SQLAlchemyError) as error:
            raise ConfigError(f"{self.store}: MLflow cannot be read: {first_line(error)}") from None


def _record(found: Any, experiment: str) -> dict[str, Any]:
    """Return an MLflow run in the form of `RunFolder.record`."""
    status = {theirs: ours for ours, theirs in STATUS.items()}
    tags = found.data.tags
    return {
        "id": tags["rayfl.run_id"],
        "label": tags["label"],
        "title": tags.get("title") or tags["label"],
        "point": tags.get("point", ""),
        "status": status[found.info.status],
        "error": tags.get("error"),
        "sweep": tags.get("rayfl.sweep"),
        "seed": int(tags.get("seed", 0)),
        "params": dict(found.data.params),
        "facts": json.loads(_long(tags, FACTS)),
        "tags": {name: value for name, value in tags.items() if not name.startswith(("mlflow.", "rayfl."))},
        "made": json.loads(_long(tags, MADE)),
        "experiment": experiment,
    } | json.loads(_long(tags, RESULT) or "{}")


def _long(tags: Mapping[str, str], name: str) -> str:
    """Return the text that `copy` split into tags."""
    parts, i = [tags.get(name, "")], 1
    while (part := tags.get(f"{name}.{i}")) is not None:
        parts.append(part)
        i += 1
    return "".join(parts)
