"""Sending of run folders to MLflow."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rayfl.config import ConfigError
from rayfl.config.plain import public
from rayfl.engine.checkpoints import CHECKPOINTS, STORE
from rayfl.results.files import read_lines
from rayfl.results.folder import RunFolder, Status, flatten, run_paths
from rayfl.results.made import NO_COMMIT, Made
from rayfl.results.mlflow import system
from rayfl.results.mlflow.sent import Sent, experiment_of
from rayfl.results.mlflow.store import Store, first_line
from rayfl.results.mlflow.study import (
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
"""Limits of MLflow."""

STATUS: dict[Status, str] = {"running": "RUNNING", "finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}

FACTS, RESULT, MADE = "rayfl.facts", "rayfl.result", "rayfl.made"
"""Tags with a run's `Facts`, its result.json, and its provenance (`Made`)."""

KIND = "mlflow.experimentKind"
"""Tag with the kind of an experiment's page."""
VIEW = "mlflow.sharedViewState.rayfl"
"""Tag with the columns of an experiment's page; URLs refer to it by its last part."""
NOTE = "mlflow.note.content"
"""Tag with the description of a run or experiment."""

FAULTS_OF_A_RUN = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE"}
"""Error codes with which a reachable server rejects one run; others can still be sent."""


Value = tuple[str, Any, float, int]
"""A metric: name, value, time (Unix, seconds), step."""


class Copy:
    """Sender of run folders to a tracking server, for one thread. `note` receives each problem once, and its end."""

    def __init__(self, store: Store, note: Callable[[str], None] = print):
        self.store, self.note = store, note
        self._experiments: dict[str, str] = {}
        self._viewed: set[str] = set()
        """Ids of experiments with a `VIEW`."""
        self._ids: dict[str, str] = {}
        self._troubles: set[str] = set()

    def sync(self, run: RunFolder) -> bool:
        """Send what is new of a run or sweep. Return whether it was sent."""
        return not self.sync_runs([run])

    def sync_all(self, folder: str | Path) -> int:
        """Send what is new below a folder; runs that cannot be read are noted. Return the number not sent. Raise
        ConfigError if MLflow stops answering."""
        found = []
        for path in run_paths(folder):
            try:
                found.append(RunFolder.open(path))
            except ConfigError as error:
                self.note(f"not sent to MLflow: {error}")
        return len(self.store.patiently(lambda: self.sync_runs(found)))

    def sync_runs(self, given: list[RunFolder]) -> list[RunFolder]:
        """Send what is new of these runs. Return those not sent."""
        failed: list[RunFolder] = []
        for i, run in enumerate(given):
            try:
                self._send(run)
            # no error of a server, database, disk or cloud library may end a run
            except Exception as error:
                if not RunFolder.exists(run.path):  # deleted while it was sent
                    continue
                failed.append(run)
                if isinstance(error, ConfigError):
                    self._warn(run.id, f"does not receive a damaged file: {first_line(error)}")
                elif getattr(error, "error_code", None) in FAULTS_OF_A_RUN:
                    self._warn(run.id, f"rejects {run.path}: {first_line(error)}")
                else:
                    self._warn("", f"fails: {first_line(error)}; runs continue and are sent later")
                    return failed + given[i + 1 :]
        if "" in self._troubles and given:
            self._troubles.remove("")
            self.note(f"MLflow at {self.store} works again")
        return failed

    def page(self, folder: Path) -> str:
        """Return the URL fragment of the charts of the run or sweep in a folder; "" if its experiment is unknown.
        MLflow 3.17 shows pages for model training only if the URL asks for them."""
        id = self._experiments.get(experiment_of(RunFolder.open(folder)))
        view = "&viewStateShareKey=rayfl" if id in self._viewed else ""
        return f"#/experiments/{id}/runs?compareRunsMode=CHART&workflowType=machine_learning{view}" if id else ""

    def warn_silent(self) -> None:
        self._warn("", f"has not answered for {self.store.SILENT_SECONDS:g} s; the next command sends the rest")

    def _warn(self, about: str, text: str) -> None:
        if about not in self._troubles:
            self._troubles.add(about)
            self.note(f"MLflow at {self.store} {public(text)}")

    # the methods below raise the errors of mlflow

    def experiment(self, name: str) -> str:
        """Return the id of the experiment with this name; create it if it is missing."""
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
        if sent.run_id != run_id:  # of another store, or not sent
            sent = Sent(experiment, run_id)
        if not sent.misses(run):
            return
        if sent.status is None:
            self._describe(run, run_id, experiment)
            sent.status = "running"
            sent.save(run.path)
        self._send_rounds(run, run_id, sent)
        self._send_samples(run, run_id, sent)
        if run.status != "running":
            self._send_files(run, run_id, sent)
        if sent.status != run.status:
            self._send_end(run, run_id, experiment, sent)
            sent.status = run.status
            sent.save(run.path)

    def id_of(self, rayfl_id: str, experiment: str, started: float | None = None) -> str:
        """Return MLflow's id of a run or sweep; create it if missing: a trial may be sent before its sweep."""
        if rayfl_id not in self._ids:
            # runs deleted by the user in MLflow are not created again
            where = self.experiment(experiment)
            found = next(self.store.search([where], f"tags.`rayfl.run_id` = '{rayfl_id}'", "all"), None)
            if found is None:
                start = None if started is None else _milliseconds(started)
                found = self.store.call("create_run", where, start, tags={"rayfl.run_id": rayfl_id})
            self._ids[rayfl_id] = found.info.run_id
        return self._ids[rayfl_id]

    def _describe(self, run: RunFolder, run_id: str, experiment: str) -> None:
        self._log_texts(run_id, _name(run), self._tags(run, experiment), flatten(run.config))
        if run.kind != "sweep":
            self._log_data(run_id, data_used(run.config))
        where = self.experiment(experiment)
        question = "" if run.sweep else run.config.get("question")
        if question and NOTE not in self.store.call("get_experiment", where).tags:
            self.store.call("set_experiment_tag", where, NOTE, question)

    def _tags(self, run: RunFolder, experiment: str) -> dict[str, str]:
        """Return the tags that describe a run; a resumption may change them."""
        tags = run.tags | {"label": run.label, "title": run.title or run.label, "rayfl.kind": run.kind}
        tags |= _source(run.made)
        tags |= _long(FACTS, run.facts.model_dump_json())
        tags |= _long(MADE, json.dumps([made.model_dump(mode="json") for made in run.made]))
        if run.sweep is not None:
            tags |= {"rayfl.sweep": run.sweep, "mlflow.parentRunId": self.id_of(run.sweep, experiment)}
        elif run.kind != "sweep":
            tags[NOTE] = reproduced(run.made)
        return tags

    def _send_rounds(self, run: RunFolder, run_id: str, sent: Sent) -> None:
        if values := [value for value in history(run) if value[-1] > sent.round]:
            self.log(run_id, values)
            sent.round = values[-1][-1]
            sent.save(run.path)

    def _send_end(self, run: RunFolder, run_id: str, experiment: str, sent: Sent) -> None:
        # the error of an earlier end
        if sent.status == "failed" and "error" in self.store.call("get_run", run_id).data.tags:
            self.store.call("delete_tag", run_id, "error")
        if run.status == "running":
            self.store.call("update_run", run_id, status="RUNNING")
            return
        tags = self._tags(run, experiment)
        if run.result:
            tags |= _long(RESULT, json.dumps(run.result))
        if run.error is not None:
            tags["error"] = run.error
        self.store.call("update_run", run_id, name=_name(run))
        self._tag(run_id, tags)
        # parameters of rows cannot change, and of two values at a step MLflow shows the larger one
        if run.kind == "sweep" and run.status == "finished":
            self._send_study(Study.of(run), run_id, experiment)
        if final := max((run.path / CHECKPOINTS).glob("round-*"), default=None):
            self._send_checkpoint(final, run_id)
        self.store.call("set_terminated", run_id, STATUS[run.status])

    def _send_study(self, study: Study, run_id: str, experiment: str) -> None:
        """Send the ranked summary over rounds and a run for every row."""
        folder = study.folder
        self._tag(run_id, {NOTE: study.description()})
        where = self.experiment(experiment)
        self.store.call("set_experiment_tag", where, VIEW, study.view())
        self._viewed.add(where)
        self.log(run_id, over_rounds(study.summary(), folder.started))
        self._log_data(run_id, data_of(row for rows in study.rows.values() for row in rows))
        from rayfl.results.drawing import styles_of

        styles = styles_of(study.rows)
        # MLflow shows the newest run first
        for label, rows in reversed(list(study.rows.items())):
            self._send_row(folder, label, rows, experiment, styles[label]["color"])

    def _send_row(self, sweep: RunFolder, label: str, rows: Sequence[Record], experiment: str, color: str) -> None:
        run_id = self.id_of(f"{sweep.id}/{quote(label, safe='')}", experiment)
        tags = {
            "label": label,
            "rayfl.kind": "row",
            "rayfl.sweep": sweep.id,
            NOTE: row_description(rows),
            "mlflow.runColor": color,
        }
        tuned = {name: rows[0]["params"][name] for name in sweep.facts.tuned if name in rows[0]["params"]}
        self._log_texts(run_id, f"{rows[0]['title']}, mean of {len(rows)}", tags | _source(sweep.made), tuned)
        self._log_data(run_id, data_of(rows))
        self.log(run_id, over_rounds(means(rows), sweep.started))
        self.store.call("set_terminated", run_id)

    def _send_samples(self, run: RunFolder, run_id: str, sent: Sent) -> None:
        new = [line for line in read_lines(run.path / system.FILE) if line["round"] > sent.samples]
        if new:
            self.log(run_id, [(k, v, line["time"], line["round"]) for line in new for k, v in line.items() if "/" in k])
            sent.samples = new[-1]["round"]
            sent.save(run.path)

    # formats of MLflow

    def log(self, run_id: str, values: Iterable[Value], model_id: str | None = None) -> None:
        """Log metrics of a run, and of its model, except those that are not numbers."""
        from mlflow.entities import Metric

        metrics = [
            Metric(key, float(value), _milliseconds(at), step, model_id)
            for key, value, at, step in values
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        for some in _batches(metrics, METRICS_A_BATCH):
            self.store.call("log_batch", run_id, metrics=some)

    def _log_texts(self, run_id: str, name: str, tags: Mapping[str, str], params: Mapping[str, Any]) -> None:
        """Log a run's name, tags and parameters; existing parameters are kept."""
        from mlflow.entities import Param

        self.store.call("update_run", run_id, name=name)
        self._tag(run_id, tags)
        # MLflow rejects changed parameters, e.g. `rounds` of an extended run
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

    def _send_files(self, run: RunFolder, run_id: str, sent: Sent) -> None:
        if changed := sent.changed(run.path):
            for file in sorted(changed):
                where = file.parent.relative_to(run.path).as_posix()
                self.store.call("log_artifact", run_id, str(file), None if where == "." else where)
            sent.files = max(changed.values())
            sent.save(run.path)

    def _send_checkpoint(self, folder: Path, run_id: str) -> None:
        for file in sorted(folder.iterdir()):
            self.store.call("log_artifact", run_id, str(file), f"checkpoints/{folder.name}")
        if (kept := folder.parent / STORE).exists():
            self._tag(run_id, {"rayfl.client_states": f"in {kept.resolve()}"})


def history(run: RunFolder) -> list[Value]:
    """Return all metrics of a run; the time of a round follows from its line."""
    at, values = run.started, []
    for line in run.rounds():
        at += line.get("seconds", 0)
        values += [(name, value, at, line["round"]) for name, value in line.items() if name != "round"]
    return values


def _name(run: RunFolder) -> str:
    """Return row, point and seed of a trial; the title of a study."""
    if run.sweep is None:
        return run.title or run.label
    return ", ".join(filter(None, [run.title or run.label, run.tags.get("point"), f"seed {run.seed}"]))


def _source(made: Sequence[Made]) -> dict[str, str]:
    """Return MLflow's tags of user, source and versions."""
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
    """Return a long text as tags name, name.1, ..."""
    parts = [text[i : i + TAG_LENGTH] for i in range(0, len(text), TAG_LENGTH)]
    return {f"{name}.{i}" if i else name: part for i, part in enumerate(parts)}


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _batches(items: list, size: int) -> Iterator[list]:
    return (items[i : i + size] for i in range(0, len(items), size))
