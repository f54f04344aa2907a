"""Callback of Ray Tune that writes the folders of a sweep's trials."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import cloudpickle
from ray import tune
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.tune.experiment import Trial

from rayfl.config import ConfigError
from rayfl.engine import checkpoints
from rayfl.engine.on_ray.cluster import require_ray
from rayfl.engine.on_ray.memory import KILLED, by_ray
from rayfl.engine.on_ray.pool import ANSI
from rayfl.engine.termination import reason
from rayfl.results.console import SweepProgress
from rayfl.results.folder import RunFolder, Status, runs
from rayfl.tuning.search import called, folder_name, trial_id_of, trial_of
from rayfl.tuning.space import text_of
from rayfl.tuning.sweep import Sweep
from rayfl.tuning.trial import CLIENT_TABLE, DIVERGED, ENDED


class RayDied(BaseException):
    """Raised when Ray died. Not an Exception: Tune would clean up and wait until Ray's core ends this process."""


BORN_DEAD = "error raised in its creation task"
"""What Ray says of a process that could not start, for example because an import failed; the last line is the cause."""


class Recorder(tune.Callback):
    """Writes trials' folders, updates `progress`, and calls `follow` with every trial's folder.

    A ConfigError of a trial ends the sweep and is kept in `refusal`, because other trials probably have it too. Other
    errors are written to the trial's run.json, and the sweep continues; after it, they are errors of the sweep, except
    for trials that diverged, whose points have been tried.
    """

    current: "Recorder | None" = None

    def __init__(self, sweep: Sweep, run: RunFolder, progress: SweepProgress, follow: Callable[[Path], None]):
        self.sweep, self.run, self.progress, self.follow = sweep, run, progress, follow
        self.trials: dict[str, RunFolder] = {}
        self.failures: list[str] = []
        """One sentence per trial that failed finally."""
        self.refusal: ConfigError | None = None
        self.confirms = False
        self.keep_snapshot: Callable[[Path], None] = lambda staging: None
        """Called with the folder of every snapshot before Tune copies it."""
        self._all: Sequence[Trial] = ()
        """All trials, of Tune's own list."""
        self.is_memory_said = False
        """True once a note has said which processes held how much memory."""
        self.planned = {(row, text_of(point)) for row, points in sweep.points.items() for point in points}
        """Row and point of the search trials in the progress's total."""
        self.counted: set[str] = set()
        """Ids of the trials of wider grids that are in the progress's total too."""
        Recorder.current = self

    def __reduce__(self):
        # Tune pickles its callbacks; unpickling returns the current process's recorder
        return _current_recorder, ()

    def recall(self) -> None:
        """Show the trials that finished before this process started, and pass them to `follow`."""
        for record in runs(self.run.path):
            if record.sweep == self.run.id and (record.status == "finished" or has_diverged(record)):
                if (title := self.sweep.titles.get(record.label, "")) != record.title:
                    record.title = title
                    record.save()
                trial_id = trial_id_of(record.path)
                self._show(trial_id, record)
                self.progress.done(trial_id, record.status)
                # its end may not have reached MLflow
                self.follow(record.path)
            elif record.sweep == self.run.id and record.status == "running":
                # its process was killed; Tune may not know the trial, and run its point as another
                record.finish("stopped")
                self.follow(record.path)
        self.progress.resumed()

    def leave(self) -> None:
        """Mark unfinished trials as stopped."""
        for record in self.trials.values():
            if record.status == "running":
                record.finish("stopped")

    # callbacks of Tune

    def get_state(self) -> None:
        # Tune calls this when it has written the other files of a snapshot
        if self._all and (storage := self._all[0].storage) is not None:
            self.keep_snapshot(Path(storage.experiment_driver_staging_path))

    def on_step_begin(self, iteration: int, trials: list, **info) -> None:
        self._all = trials
        try:
            require_ray()
        except RuntimeError as error:
            raise RayDied(str(error)) from None

    def on_trial_start(self, iteration: int, trials: list, trial, **info) -> None:
        self._open(trial)

    def on_trial_result(self, iteration: int, trials: list, trial, result: dict, **info) -> None:
        record, lines = self.trials[trial.trial_id], result.pop("lines")
        scores, ended = result.pop("client_scores", None), result.pop(ENDED, None)
        diverged, table = result.pop(DIVERGED, None), result.pop(CLIENT_TABLE, None)
        before = lines[0]["round"] - 1 if lines else result["round"]
        if before != record.count():
            try:
                record.truncate_after(before)
            except ConfigError as error:
                self.refusal = error
                raise
        if diverged:
            record.tags[DIVERGED] = diverged
        elif not lines:
            # a searcher needs the metric in the last result
            result |= {key: value for key, value in record.rounds()[-1].items() if isinstance(value, int | float)}
        record.append(lines)
        if scores is not None and len(scores):
            record.save_clients(scores)
        if table is not None:
            record.save_client_table(lines[-1]["round"], table)
        if ended:
            record.tags[ENDED] = f"after round {ended}"
            self.progress.note(f"{self._what(trial)}: ended {record.tags[ENDED]}")
        for line in lines:
            self.progress.update(trial.trial_id, line["round"], line)
            if "refusals" in line:
                self.progress.note(f"{record.label}: round {line['round']}: refused {line['refusals']}")

    def on_trial_complete(self, iteration: int, trials: list, trial, **info) -> None:
        record = self.trials[trial.trial_id]
        if diverged := record.tags.get(DIVERGED):
            self.progress.note(f"{self._what(trial)} diverged: {diverged}")
            self._end(trial, "failed", diverged)
            return
        if trial.checkpoint is not None:
            with trial.checkpoint.as_directory() as folder:
                checkpoints.copy(Path(folder), record.path / checkpoints.CHECKPOINTS)
        done = ENDED in record.tags or record.rounds()[-1]["round"] >= record.config["rounds"]
        self._end(trial, "finished" if done else "stopped")

    def on_trial_recover(self, iteration: int, trials: list, trial, **info) -> None:
        self._refuse(trial)
        self.progress.note(f"{self._what(trial)}: {self._news(trial)}. Restarting from its last checkpoint")

    def on_trial_error(self, iteration: int, trials: list, trial, **info) -> None:
        self._refuse(trial)
        record = self._opened(trial)
        if not self._is_wider(record):
            self.failures.append(
                f"{self._what(trial)}: {_reason(trial)}. See {record.path / 'run.json'} for the full error"
            )
        self.progress.note(f"{self._what(trial)} failed: {self._news(trial)}")
        self._end(trial, "failed", _text(trial))

    # records

    def _open(self, trial) -> RunFolder:
        """Return the trial's folder: an existing one, marked as running, or a new one."""
        row, seed, point = trial_of(trial.config)
        if seed != self.sweep.search.seeds[0] and not self.confirms:
            self.confirms = True
            self.progress.phase("running every row's best point on the other seeds")
        path = self.run.path / "trials" / folder_name(row, point, seed, trial.trial_id)
        if RunFolder.exists(path):
            # one of this process may have lines that are not written yet
            record = self.trials.get(trial.trial_id) or RunFolder.open(path)
            for tag in (ENDED, DIVERGED):
                record.tags.pop(tag, None)
            record.title = self.sweep.titles.get(row, "")
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

    def _is_wider(self, record: RunFolder) -> bool:
        """Return whether a trial has a point beyond the grids. Its failure is none of the sweep."""
        search = self.sweep.search
        first = record.config["seed"] == search.seeds[0]
        return search.widen > 0 and first and (record.label, record.tags["point"]) not in self.planned

    def _opened(self, trial) -> RunFolder:
        """Return the trial's folder; create it if its process never started."""
        return self.trials.get(trial.trial_id) or self._open(trial)

    def _show(self, trial_id: str, record: RunFolder) -> None:
        point, rounds = record.tags["point"], record.config["rounds"]
        if self._is_wider(record) and trial_id not in self.counted:
            self.counted.add(trial_id)
            self.progress.total_trials += 1
            self.progress.note(f"{record.label}: the best value is the outermost; also trying {point}")
        self.progress.start(trial_id, record.label, point, rounds, record.rounds())

    def _end(self, trial, status: Status, error: str | None = None) -> None:
        self.trials[trial.trial_id].finish(status, error)
        self.run.count_time()
        self.progress.done(trial.trial_id, status)

    # errors

    def _what(self, trial) -> str:
        row, seed, point = trial_of(trial.config)
        return called(row, point, seed)

    def _news(self, trial) -> str:
        """Return the sentence of a trial's error; of lack of memory, the numbers and the hint once per sweep."""
        reason = _reason(trial)
        if KILLED not in reason:
            return reason
        said, self.is_memory_said = self.is_memory_said, True
        return f"it was killed {KILLED} again" if said else reason

    def _refuse(self, trial) -> None:
        """Raise the trial's error if it is a ConfigError."""
        if isinstance(error := _cause(trial), ConfigError) and not self._is_wider(self._opened(trial)):
            self._opened(trial).finish("failed", _text(trial))
            self.refusal = ConfigError(f"{self._what(trial)}: {error}")
            raise self.refusal


def has_diverged(record: RunFolder) -> bool:
    return record.status == "failed" and DIVERGED in record.tags


def _cause(trial) -> BaseException | None:
    """Return the exception of a trial's code, without Ray's wrappers, or None if it is unknown."""
    error = None
    # the file can be missing, and unpickling a user's class can raise anything
    with suppress(Exception):
        error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
    while isinstance(error, RayTaskError):
        error = error.cause
    return error


def _text(trial) -> str:
    """Return Ray's tracebacks of all failures of a trial."""
    # Trial.get_error reads a copy that Tune makes later
    return ANSI.sub("", Path(trial.error_file).read_text("utf-8", "replace")).strip()


def _reason(trial) -> str:
    """Return the sentence of a trial's error."""
    if killed := by_ray(str(cause := _cause(trial))):
        return killed
    if isinstance(cause, ActorUnavailableError):
        return "its process or its node does not answer"
    if isinstance(cause, ActorDiedError) and BORN_DEAD in str(cause):
        return ANSI.sub("", str(cause)).strip().splitlines()[-1]
    return reason(cause).splitlines()[0] if isinstance(cause, Exception) else _text(trial).splitlines()[-1]


def _current_recorder() -> Recorder | None:
    return Recorder.current
