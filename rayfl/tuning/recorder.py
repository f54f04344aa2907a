"""Writes the records of a sweep's trials as their results come in."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import cloudpickle
from ray import tune
from ray.exceptions import ActorUnavailableError, RayTaskError

from rayfl.config import ConfigError
from rayfl.config.plain import last, short
from rayfl.engine import checkpoints
from rayfl.engine.on_ray.cluster import require_ray
from rayfl.results.console import SweepProgress
from rayfl.results.folder import RunFolder, Status, runs
from rayfl.tuning.search import called, trial_of
from rayfl.tuning.space import Point, text_of
from rayfl.tuning.sweep import Sweep
from rayfl.tuning.trial import ENDED

NAME_BYTES = 120
"""Of a trial's folder, without its id."""
COLORS = re.compile(r"\x1b\[\d+m")
"""What Ray writes into tracebacks for terminals."""


class RayDied(BaseException):
    """No Exception: after one Tune cleans up, and waits for the dead until Ray's core ends this process."""


class Recorder(tune.Callback):
    """Writes the trials' records as their results come in, shows `progress`, and tells `follow` every trial's folder.

    A ConfigError of a trial ends the sweep at once, because the other trials most likely have it too: it is kept in
    `refusal`. Other errors are kept in the trial's run.json, and the others go on.
    """

    current: "Recorder | None" = None

    def __init__(self, sweep: Sweep, run: RunFolder, progress: SweepProgress, follow: Callable[[Path], None]):
        self.sweep, self.run, self.progress, self.follow = sweep, run, progress, follow
        self.trials: dict[str, RunFolder] = {}
        self.failures: list[str] = []
        """A sentence for each trial that failed for good."""
        self.refusal: ConfigError | None = None
        Recorder.current = self

    def __reduce__(self):
        # Tune stores its callbacks; a restored one is the one of the process that restores it
        return _current_recorder, ()

    def recall(self) -> None:
        """Shows the trials that finished before this process began, and has them sent."""
        for record in runs(self.run.path):
            if record.sweep == self.run.id and record.status == "finished":
                trial_id = record.path.name.rpartition("-")[2]
                self._show(trial_id, record)
                self.progress.done(trial_id, "finished")
                # its end may not have been sent
                self.follow(record.path)
        self.progress.resumed()

    def leave(self) -> None:
        """Marks the trials that nobody runs any more as stopped."""
        for record in self.trials.values():
            if record.status == "running":
                record.finish("stopped")

    # what Tune tells

    def on_step_begin(self, iteration: int, trials: list, **info) -> None:
        try:
            require_ray()
        except RuntimeError as error:
            raise RayDied(str(error)) from None

    def on_trial_start(self, iteration: int, trials: list, trial, **info) -> None:
        self._open(trial)

    def on_trial_result(self, iteration: int, trials: list, trial, result: dict, **info) -> None:
        record, lines = self.trials[trial.trial_id], result.pop("lines")
        scores, ended = result.pop("client_scores", None), result.pop(ENDED, None)
        if lines and lines[0]["round"] != len(record.rounds()) + 1:
            try:
                record.truncate_after(lines[0]["round"] - 1)
            except ConfigError as error:
                self.refusal = error
                raise
        record.append(lines)
        if scores is not None and len(scores):
            record.save_clients(scores)
        if ended:
            record.tags[ENDED] = f"by a listener after round {ended}"
        for line in lines:
            self.progress.update(trial.trial_id, line["round"], line)
            if "refusals" in line:
                self.progress.note(f"{record.label}: round {line['round']}: refused {line['refusals']}")

    def on_trial_complete(self, iteration: int, trials: list, trial, **info) -> None:
        record = self.trials[trial.trial_id]
        if trial.checkpoint is not None:
            with trial.checkpoint.as_directory() as folder:
                checkpoints.copy(Path(folder), record.path / "checkpoints")
        done = ENDED in record.tags or record.rounds()[-1]["round"] >= record.config["rounds"]
        self._end(trial, "finished" if done else "stopped")

    def on_trial_recover(self, iteration: int, trials: list, trial, **info) -> None:
        self._refuse(trial)
        self.progress.note(f"{self._what(trial)}: {_reason(trial)}; it starts again from its last checkpoint")

    def on_trial_error(self, iteration: int, trials: list, trial, **info) -> None:
        self._refuse(trial)
        record = self._opened(trial)
        self.failures.append(f"{self._what(trial)}: {_reason(trial)}; the whole error is in {record.path / 'run.json'}")
        self.progress.note(f"{self._what(trial)} failed: {_reason(trial)}")
        self._end(trial, "failed", _text(trial))

    # records

    def _open(self, trial) -> RunFolder:
        """The record that the trial began before, marked as running again, or a new one."""
        row, seed, point = trial_of(trial.config)
        path = self.run.path / "trials" / folder_name(row, point, seed, trial.trial_id)
        if RunFolder.exists(path):
            record = RunFolder.open(path)
            record.tags.pop(ENDED, None)
            record.resume()
        else:
            experiment = self.sweep.experiment(row, point, seed)
            record = RunFolder.create(
                path,
                row,
                experiment.plain(),
                experiment.tags() | {"point": text_of(point)},
                experiment.facts(),
                costs=experiment.costs(),
                sweep=self.run.id,
                title=self.sweep.titles.get(row, ""),
            )
        self.trials[trial.trial_id] = record
        self._show(trial.trial_id, record)
        self.follow(path)
        return record

    def _opened(self, trial) -> RunFolder:
        """The trial's record; one whose process never started has none yet."""
        return self.trials.get(trial.trial_id) or self._open(trial)

    def _show(self, trial_id: str, record: RunFolder) -> None:
        point, rounds = record.tags["point"], record.config["rounds"]
        self.progress.start(trial_id, record.label, point, rounds, record.rounds())

    def _end(self, trial, status: Status, error: str | None = None) -> None:
        self.trials[trial.trial_id].finish(status, error)
        self.progress.done(trial.trial_id, status)

    # errors

    def _what(self, trial) -> str:
        row, seed, point = trial_of(trial.config)
        return called(row, point, seed)

    def _refuse(self, trial) -> None:
        """Raises the trial's error if the user has to do something about it."""
        if isinstance(error := _cause(trial), ConfigError):
            self._opened(trial).finish("failed", _text(trial))
            self.refusal = ConfigError(f"{self._what(trial)}: {error}")
            raise self.refusal


def folder_name(row: str, point: Point, seed: int, trial_id: str) -> str:
    """The folder of a trial below `trials/`: one component of a path, whatever the point's values are."""
    name = "-".join([row, *(f"{last(path)}={short(value)}" for path, value in point.items()), f"s{seed}"])
    plain = re.sub(r"[^\w.=+-]", "_", name).encode()[:NAME_BYTES].decode(errors="ignore")
    return f"{plain}-{trial_id}"


def _cause(trial) -> BaseException | None:
    """What a trial's code raised, behind the layers that Ray puts around it; None if nobody can tell."""
    error = None
    # there may be no file, and a class of a user's package may raise anything where it is unpickled
    with suppress(Exception):
        error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    while isinstance(error, RayTaskError):
        error = error.cause
    return error


def _text(trial) -> str:
    """All that is known of a trial's error: Ray's tracebacks, of every time that it failed."""
    # Trial.get_error reads a copy, which Tune makes later
    return COLORS.sub("", Path(trial.error_file).read_text()).strip()


def _reason(trial) -> str:
    """The last line of a trial's error."""
    if isinstance(cause := _cause(trial), ActorUnavailableError):
        return "its process or its node does not answer"
    return (str(cause or "").strip() or _text(trial)).splitlines()[-1]


def _current_recorder() -> Recorder | None:
    return Recorder.current
