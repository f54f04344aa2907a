"""Sends run folders to MLflow."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rayfl.config import ConfigError
from rayfl.config.plain import public
from rayfl.engine.checkpoints import STORE
from rayfl.results.files import read_lines
from rayfl.results.folder import RunFolder, Status, flatten, runs
from rayfl.results.made import NO_COMMIT, Made
from rayfl.results.mlflow import sent as memory
from rayfl.results.mlflow import system
from rayfl.results.mlflow.sent import Sent, experiment_of
from rayfl.results.mlflow.store import Store, first_line
from rayfl.results.mlflow.study import (
    ALL_OF,
    DataUsed,
    Study,
    data_of,
    data_used,
    means,
    over_rounds,
    reproduced,
    row_description,
)
from rayfl.results.rows import Record

METRICS_A_BATCH, TEXTS_A_BATCH = 1000, 100
PARAM_LENGTH, TAG_LENGTH = 6000, 8000
"""MLflow's limits."""

STATUS: dict[Status, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
}

FACTS, RESULT, MADE = "rayfl.facts", "rayfl.result", "rayfl.made"
"""Tags with a run's `Facts`, its result.json, and what made it."""

KIND = "mlflow.experimentKind"
"""The tag that says what an experiment's page is like."""
VIEW = "mlflow.sharedViewState.rayfl"
"""The tag with the columns of an experiment's page; an address asks for it by its last part."""

FAULTS_OF_A_RUN = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE"}
"""Error codes of a server that is there and refuses one run: the others can still be sent."""


class Copy:
    """Sends run folders to a tracking server. Trouble is said to `note`, once, and when it is over. Use it from one
    thread at a time."""

    def __init__(self, store: Store, note: Callable[[str], None] = print):
        self.store, self.note = store, note
        self._experiments: dict[str, str] = {}
        self._viewed: set[str] = set()
        """The ids of experiments with a `VIEW`."""
        self._ids: dict[str, str] = {}
        self._troubles: set[str] = set()

    def sync(self, run: RunFolder) -> bool:
        """Sends what is new of a run or a sweep; False if it could not be sent."""
        return not self.sync_runs([run])

    def sync_all(self, folder: str | Path) -> int:
        """Sends what is new below an output folder; returns how many runs could not be sent. A ConfigError if MLflow
        stops to answer."""
        return len(self.store.patiently(lambda: self.sync_runs(list(runs(folder)))))

    def sync_runs(self, given: list[RunFolder]) -> list[RunFolder]:
        """Sends what is new of these runs; returns those that could not be sent."""
        failed: list[RunFolder] = []
        for i, run in enumerate(given):
            try:
                self._send(run)
            # whatever a server, a database, a disk or a cloud's library raises: no run dies of it
            except Exception as error:
                if not RunFolder.exists(run.path):  # deleted while it was sent
                    continue
                failed.append(run)
                if isinstance(error, ConfigError):
                    self._say(run.id, f"does not get a damaged file: {first_line(error)}")
                elif getattr(error, "error_code", None) in FAULTS_OF_A_RUN:
                    self._say(run.id, f"refuses {run.path}: {first_line(error)}")
                else:
                    self._say("", f"fails: {first_line(error)}; runs go on, and it is sent later")
                    return failed + given[i + 1 :]
        if "" in self._troubles and given:
            self._troubles.remove("")
            self.note(f"MLflow at {self.store} is back")
        return failed

    def page(self, folder: Path) -> str:
        """The page with the charts of the run or sweep in a folder; "" where its experiment was not met. MLflow 3.17
        shows pages for model training only where the address says so."""
        id = self._experiments.get(experiment_of(RunFolder.open(folder)))
        view = "&viewStateShareKey=rayfl" if id in self._viewed else ""
        return f"#/experiments/{id}/runs?compareRunsMode=CHART&workflowType=machine_learning{view}" if id else ""

    def say_silent(self) -> None:
        """That it does not answer."""
        self._say(
            "", f"has not answered for {self.store.SILENT_SECONDS:g} s; the next command sends what it has not got"
        )

    def _say(self, about: str, text: str) -> None:
        if about not in self._troubles:
            self._troubles.add(about)
            self.note(f"MLflow at {self.store} {public(text)}")

    # everything below raises what mlflow raises

    def experiment(self, name: str) -> str:
        """The id of the experiment of this name; it is made if there is none."""
        if name not in self._experiments:
            found = self.store.call("get_experiment_by_name", name)
            if found is None:
                database = self.store.database
                artifacts = None if database is None else (database.parent / "artifacts").as_uri()
                made = self.store.call("create_experiment", name, artifact_location=artifacts)
            else:
                made = found.experiment_id
            if found is None or KIND not in found.tags:
                self.store.call("set_experiment_tag", made, KIND, "custom_model_development")
            if found is not None and VIEW in found.tags:
                self._viewed.add(made)
            self._experiments[name] = made
        return self._experiments[name]

    def _send(self, run: RunFolder) -> None:
        experiment = experiment_of(run)
        run_id = self.id_of(run.id, experiment, run.started)
        sent = Sent.of(run.path)
        if sent.run_id != run_id:  # of another store, or nothing
            sent = Sent(experiment, run_id)
        if sent.status == run.status != "running":
            return
        if sent.status is None:
            self._describe(run, run_id, experiment)
            sent.status = "running"
            sent.save(run.path)
        self._send_rounds(run, run_id, sent)
        self._send_samples(run, run_id, sent)
        if sent.status != run.status:
            self._send_end(run, run_id, experiment)
            sent.status = run.status
            sent.save(run.path)

    def id_of(self, rayfl_id: str, experiment: str, started: float | None = None) -> str:
        """MLflow's id of a run or sweep, made if there is none: a trial may come before its sweep."""
        if rayfl_id not in self._ids:
            # a run that the user deleted in MLflow is not made again
            where = self.experiment(experiment)
            found = next(self.store.search([where], f"tags.`rayfl.run_id` = '{rayfl_id}'", "all"), None)
            if found is None:
                start = None if started is None else _milliseconds(started)
                found = self.store.call("create_run", where, start, tags={"rayfl.run_id": rayfl_id})
            self._ids[rayfl_id] = found.info.run_id
        return self._ids[rayfl_id]

    def _describe(self, run: RunFolder, run_id: str, experiment: str) -> None:
        """Name, parent, tags, parameters, data."""
        tags = run.tags | {"label": run.label, "title": run.title or run.label, "rayfl.kind": run.kind}
        tags |= _source(run.made)
        tags |= _long(FACTS, run.facts.model_dump_json())
        tags |= _long(MADE, json.dumps([made.model_dump(mode="json") for made in run.made]))
        if run.sweep is not None:
            tags |= {"rayfl.sweep": run.sweep, "mlflow.parentRunId": self.id_of(run.sweep, experiment)}
        elif run.kind != "sweep":
            tags["mlflow.note.content"] = reproduced(run.made)
        self._log_texts(run_id, _name(run), tags, flatten(run.config))
        if run.kind != "sweep":
            self._log_data(run_id, data_used(run.config))

    def _send_rounds(self, run: RunFolder, run_id: str, sent: Sent) -> None:
        at, last, values = run.started, sent.round, []
        for line in run.rounds():
            at += line.get("seconds", 0)
            if line["round"] > sent.round:
                last = line["round"]
                values += [(key, value, at, last) for key, value in line.items() if key != "round"]
        if values:
            self._log(run_id, values)
            sent.round = last
            sent.save(run.path)

    def _send_end(self, run: RunFolder, run_id: str, experiment: str) -> None:
        if run.status == "running":
            self.store.call("update_run", run_id, status="RUNNING")
            return
        if run.result:
            self._tag(run_id, _long(RESULT, json.dumps(run.result)))
        if run.error is not None:
            self._tag(run_id, {"error": run.error})
        if run.kind == "sweep":
            self._send_study(Study.of(run), run_id, experiment)
        self._send_files(run, run_id)
        self.store.call("set_terminated", run_id, STATUS[run.status])

    def _send_study(self, study: Study, run_id: str, experiment: str) -> None:
        """The ranked summary, over rounds, and a run for every row."""
        folder = study.folder
        self._tag(run_id, {"mlflow.note.content": study.description()})
        where = self.experiment(experiment)
        self.store.call("set_experiment_tag", where, VIEW, study.view())
        self._viewed.add(where)
        self._log(run_id, over_rounds(study.summary(), folder.started))
        self._log_data(run_id, data_of(row for rows in study.rows.values() for row in rows))
        from rayfl.results.drawing import styles_of

        styles = styles_of(study.rows)
        # MLflow shows the newest runs first
        for label, rows in reversed(list(study.rows.items())):
            self._send_row(folder, label, rows, experiment, styles[label]["color"])

    def _send_row(self, sweep: RunFolder, label: str, rows: Sequence[Record], experiment: str, color: str) -> None:
        run_id = self.id_of(f"{sweep.id}/{quote(label, safe='')}", experiment)
        tags = {
            "label": label,
            "rayfl.kind": "row",
            "rayfl.sweep": sweep.id,
            "mlflow.note.content": row_description(rows),
            "mlflow.runColor": color,
        }
        tuned = {name: rows[0]["params"][name] for name in sweep.facts.tuned if name in rows[0]["params"]}
        self._log_texts(run_id, f"{rows[0]['title']}, mean of {len(rows)}", tags | _source(sweep.made), tuned)
        self._log_data(run_id, data_of(rows))
        found = {ALL_OF.format(name): points for name, points in means(rows).items()}
        self._log(run_id, over_rounds(found, sweep.started))
        self.store.call("set_terminated", run_id)

    def _send_samples(self, run: RunFolder, run_id: str, sent: Sent) -> None:
        new = [line for line in read_lines(run.path / system.FILE) if line["round"] > sent.samples]
        if new:
            self._log(
                run_id, [(k, v, line["time"], line["round"]) for line in new for k, v in line.items() if "/" in k]
            )
            sent.samples = new[-1]["round"]
            sent.save(run.path)

    # what MLflow takes

    def _log(self, run_id: str, values: list[tuple[str, Any, float, int]]) -> None:
        """Metrics as (name, value, time in seconds, step); what is no number is left out."""
        from mlflow.entities import Metric

        metrics = [
            Metric(key, float(value), _milliseconds(at), step)
            for key, value, at, step in values
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        for some in _batches(metrics, METRICS_A_BATCH):
            self.store.call("log_batch", run_id, metrics=some)

    def _log_texts(self, run_id: str, name: str, tags: Mapping[str, str], params: Mapping[str, Any]) -> None:
        """A run's name, tags and parameters; parameters that it has stay."""
        from mlflow.entities import Param

        self.store.call("update_run", run_id, name=name)
        self._tag(run_id, tags)
        # MLflow refuses a parameter that changes, as `rounds` does of a run that is made longer
        known = self.store.call("get_run", run_id).data.params
        found = [Param(k, str(v)[:PARAM_LENGTH]) for k, v in params.items() if k not in known]
        for some in _batches(found, TEXTS_A_BATCH):
            self.store.call("log_batch", run_id, params=some)

    def _tag(self, run_id: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        for some in _batches([RunTag(k, v[:TAG_LENGTH]) for k, v in tags.items()], TEXTS_A_BATCH):
            self.store.call("log_batch", run_id, tags=some)

    def _log_data(self, run_id: str, used: Sequence[DataUsed]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(one.name, one.digest, "rayfl", one.settings), [InputTag("mlflow.data.context", one.context)]
            )
            for one in used
        ]
        if inputs:
            self.store.call("log_inputs", run_id, inputs)

    def _send_files(self, run: RunFolder, run_id: str) -> None:
        for file in sorted(run.path.iterdir()):
            if file.suffix in (".json", ".jsonl", ".npy", ".csv", ".md", ".tex", ".html"):
                if file.name not in ("run.json", memory.NAME):
                    self.store.call("log_artifact", run_id, str(file))
        if (plots := run.path / "plots").exists():
            self.store.call("log_artifacts", run_id, str(plots), "plots")
        if final := max((run.path / "checkpoints").glob("round-*"), default=None):
            self._send_checkpoint(final, run_id)

    def _send_checkpoint(self, folder: Path, run_id: str) -> None:
        for file in sorted(folder.iterdir()):
            self.store.call("log_artifact", run_id, str(file), f"checkpoints/{folder.name}")
        if (kept := folder.parent / STORE).exists():
            self._tag(run_id, {"rayfl.client_states": f"in {kept.resolve()}"})


def _name(run: RunFolder) -> str:
    """Of a trial its row, point and seed; of a study its own."""
    if run.sweep is None:
        return run.title or run.label
    return ", ".join(filter(None, [run.title or run.label, run.tags.get("point"), f"seed {run.seed}"]))


def _source(made: Sequence[Made]) -> dict[str, str]:
    """MLflow's tags of who made a run with what, and the versions."""
    if not made:
        return {}
    first = made[0]
    tags = {
        "mlflow.user": first.user,
        # MLflow shows what follows the last slash
        "mlflow.source.name": first.command.partition(" -")[0],
        "mlflow.source.type": "LOCAL",
    }
    if first.commit != NO_COMMIT:
        tags["mlflow.source.git.commit"] = first.commit
    return tags | {f"version.{name}": version for name, version in first.versions.items()}


def _long(name: str, text: str) -> dict[str, str]:
    """A text as tags, as many as it takes: name, name.1, ..."""
    parts = [text[i : i + TAG_LENGTH] for i in range(0, len(text), TAG_LENGTH)]
    return {f"{name}.{i}" if i else name: part for i, part in enumerate(parts)}


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _batches(items: list, size: int) -> Iterator[list]:
    return (items[i : i + size] for i in range(0, len(items), size))
