# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
# (ray.remote adds verbs to a class, and with_parameters arguments to a method, out of the type checker's sight)
"""The stages of a sweep, each one a Tuner: the search on the first seed, then every row's best point on the others.

Only the driver writes records. A trial is a server actor and its client actors inside the trial's own placement group.
The next trial takes over these processes.
"""

import logging
import os
import shutil
import signal
import socket
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from threading import Timer, current_thread, main_thread
from typing import Any

import cloudpickle
import ray
from pyarrow.fs import FileSystem, FileType
from ray import tune

from rayfl.config import ConfigError, RunFailed
from rayfl.data.base import Arrays
from rayfl.engine.on_ray import resources
from rayfl.engine.plugins import packed
from rayfl.engine.termination import Terminated
from rayfl.results.folder import RunFolder, records, runs
from rayfl.results.rows import Record, best_trials
from rayfl.tuning import snapshots, trust
from rayfl.tuning.following import Following
from rayfl.tuning.recorder import RayDied, Recorder, has_diverged
from rayfl.tuning.search import folder_name, scheduler_of, space_of, trial_config, trial_id_of, trial_of
from rayfl.tuning.space import Point, text_of
from rayfl.tuning.sweep import Sweep
from rayfl.tuning.trial import FederatedTrial, Shared
from rayfl.tuning.widening import beyond
from rayfl.tuning.within import searching

HEAD_BYTES = 64 * 2**20
PATIENCE_SECONDS = 60.0
"""Seconds without a trial after which a note says what a trial needs."""


def run_sweep(
    sweep: Sweep, run: RunFolder, arrays: Arrays, recorder: Recorder, storage: str | None = None
) -> list[Record]:
    """Run all stages of a sweep that are not done yet. Return the records of the best points on all seeds.

    `run` is the sweep's own folder. `storage`: a place that all nodes see, for what trials leave for each other.
    Default: `run`. Ray is running. Raises KeyboardInterrupt after a Ctrl-C, Terminated after a SIGTERM, a ConfigError
    if a trial raises one, and a RunFailed that names the trials that failed, or if no trial has the search metric. A
    trial that diverges has failed, but counts as tried; a note names the rows that lose seeds or all points by it.
    """
    recorder.recall()
    recorder.progress.place(f"per trial: {resources.described(_clients(sweep), sweep.first.run)}")
    for row in sweep.rows:
        if left_out := sweep.left_out(row):
            recorder.progress.note(f"{row}: outside search.budget: {'; '.join(map(text_of, left_out))}")
    stages = _Stages(sweep, run, ray.put(arrays), recorder, storage)
    search, first = sweep.search, sweep.search.seeds[0]
    if search.is_fair:
        is_search = any(len(points) > 1 for points in sweep.points.values())
        recorder.progress.phase(f"searching on seed {first}" if is_search else "training")
        stages.fair()
    else:
        for row in sweep.rows:
            recorder.progress.phase(f"searching for {row} on seed {first}")
            stages.of_row(f"search-{row}", row)
    ended = [record for record in runs(run.path) if record.status == "finished" or has_diverged(record)]
    done = {(record.label, record.seed) for record in ended if record.sweep == run.id}
    confirm = [trial for row in sweep.rows for trial in confirming_trials(sweep, run.path, run.id, row)]
    if missing := [trial for trial in confirm if (trial["row"], trial["seed"]) not in done]:
        stages.listed("confirm", missing)
    best = best_trials(_finished(run.path, run.id), search.metric, sweep.mode)
    seeds = Counter(record["label"] for record in best)
    if not seeds:
        raise RunFailed(
            f"no trial has a finite {search.metric}, so that no row can be ranked. See {run.path / 'trials'}"
        )
    for row in sweep.rows:
        if not seeds[row]:
            recorder.progress.note(f"{row}: not ranked, because no trial has a finite {search.metric}")
        elif seeds[row] < len(search.seeds):
            recorder.progress.note(
                f"{row}: {search.metric} is finite on {seeds[row]} of {len(search.seeds)} seeds only, which are its "
                "results"
            )
    return best


def have_ended(folder: Path, id: str, trials: Set[str]) -> bool:
    """Return whether the records of these trials have ended too. Tune tells its searcher of an end before the record is
    written, and runs a trial again if that fails."""
    return not any(
        run.status == "running" for run in runs(folder) if run.sweep == id and trial_id_of(run.path) in trials
    )


def widened_trials(sweep: Sweep, folder: Path, id: str, row: str, ended: Set[str]) -> list[dict[str, Any]]:
    """Return further search trials of a row, from the records of its search (`search.widen`). `ended`: their ids."""
    search = sweep.search.of(row)
    tried, best = _searched(sweep, folder, id, row, ended) if search.widen else ([], None)
    points = beyond(search, tried, best) if best is not None else []
    return [trial_config(row, search.seeds[0], point) for point in points if sweep.allows(row, point)]


def confirming_trials(
    sweep: Sweep, folder: Path, id: str, row: str, ended: Set[str] | None = None
) -> list[dict[str, Any]]:
    """Return the trials of a row's best point on all seeds but the first, from the records of its search. `ended`: the
    ids of its trials. Default: all that have finished."""
    others = sweep.search.seeds[1:]
    best = _searched(sweep, folder, id, row, ended)[1] if others else None
    return [trial_config(row, seed, best) for seed in others if best is not None]


def _searched(
    sweep: Sweep, folder: Path, id: str, row: str, ended: Set[str] | None
) -> tuple[list[Point], Point | None]:
    """Return the points of a row's search trials, and the best of the finished ones, if any has a finite metric. Of
    trials in `ended` that have failed, the point counts as tried."""
    tried = [
        run.record()
        for run in runs(folder / "trials")
        if (run.sweep, run.label, run.seed) == (id, row, sweep.search.seeds[0])
        if (run.status == "finished" if ended is None else trial_id_of(run.path) in ended)
    ]
    points = {record["path"]: sweep.point(row, RunFolder.open(record["path"]).config) for record in tried}
    finished = [record for record in tried if record["status"] == "finished"]
    best = best_trials(finished, sweep.search.metric, sweep.mode)
    return list(points.values()), points[best[0]["path"]] if best else None


def _by_turns(sweep: Sweep, seed: int) -> list[dict[str, Any]]:
    """Return the search trials of all rows on a seed: the first of every row, the second of every row, ..."""
    tried = zip_longest(*(sweep.points[row] for row in sweep.rows))
    return [
        trial_config(row, seed, point)
        for points in tried
        for row, point in zip(sweep.rows, points, strict=True)
        if point is not None
    ]


def _finished(folder: Path, id: str) -> list[Record]:
    """Return the records of trials that ran to their end, or that their own listener ended. A trial that a scheduler
    stopped is no candidate."""
    return [record for record in records(folder, id) if record["status"] == "finished"]


@dataclass(frozen=True)
class _Stages:
    """Tuners that run one after another, each in its own folder under the sweep's."""

    sweep: Sweep
    run: RunFolder
    arrays: ray.ObjectRef
    recorder: Recorder
    storage: str | None = None
    """Place of Tune's snapshots and of the trials' checkpoints, s3://BUCKET/FOLDER. Default: the sweep's folder."""

    def fair(self) -> None:
        """Run the search of all rows; wider grids and confirming trials of each row that has finished its search."""
        sweep, seeds = self.sweep, self.sweep.search.seeds
        counts = {row: len(sweep.points[row]) for row in sweep.rows}
        if not sweep.search.widen and (len(seeds) == 1 or max(counts.values()) == 1):
            # no trial depends on the result of another
            self.listed("search", [trial for seed in seeds for trial in _by_turns(sweep, seed)])
            return
        known = sweep.described(), self.run.path, self.run.id
        trials = Following(
            counts,
            partial(have_ended, self.run.path, self.run.id),
            partial(widened_trials, *known),
            partial(confirming_trials, *known),
        )
        self._run("search", {"trial": tune.grid_search(_by_turns(sweep, seeds[0]))}, search_alg=trials)

    def listed(self, name: str, trials: list[dict[str, Any]]) -> None:
        """Run these trials, each to its end."""
        self._run(name, {"trial": tune.grid_search(trials)})

    def of_row(self, name: str, row: str) -> None:
        """Run a row's trials by its searcher and scheduler."""
        sweep, search = self.sweep, self.sweep.search.of(row)
        scheduler = scheduler_of(search, sweep.example(row).rounds, sweep.where)
        if search.searcher == "random":
            trials = [trial_config(row, search.seeds[0], point) for point in sweep.points[row]]
            self._run(name, {"trial": tune.grid_search(trials)}, scheduler=scheduler)
        else:
            config = {"scheduler": scheduler, "search_alg": searching(sweep, row), "num_samples": search.trials}
            self._run(name, space_of(search, row), **config)

    def _run(self, name: str, space: dict[str, Any], **config: Any) -> None:
        """Run one Tuner from its start or from where it was stopped, unless it is done."""
        path = self.run.path / "tune" / name
        marker = path / "done"
        if marker.exists():
            return
        place = str(path) if self.storage is None else f"{self.storage}/{self.run.id}/{name}"
        snapshots.require_place(path, place)
        if snapshots.exist(path, place) and trust.has_begun(path, self.run.id):
            trust.require(path, self.run.id)
            snapshots.fill_gaps(place)
            try:
                snapshots.restore(path, place)
                tuner = tune.Tuner.restore(place, self._trainable(), resume_errored=True, param_space=space)
            except (ImportError, AttributeError) as error:
                raise ConfigError(
                    f"{path}: the state of the sweep was written by another version of rayfl or of Ray ({error}). "
                    "Allowed: --resume with that version, or a new folder"
                ) from None
        else:
            snapshots.clear(place)
            shutil.rmtree(path, ignore_errors=True)
            trust.make(path, self.run.id)
            snapshots.note_place(path, place)
            tuner = self._tuner(place, space, config)
        self.recorder.keep_snapshot = partial(trust.keep, path, self.run.id, place)
        waiting = Timer(PATIENCE_SECONDS, self._note_waiting)
        with _interrupts() as received, _hushed():
            try:
                waiting.start()
                results = tuner.fit()
            except RayDied as died:
                raise RunFailed(str(died)) from None
            except Exception as error:
                raise self.recorder.refusal or _stopped(error) from None
            finally:
                waiting.cancel()
                self.recorder.leave()
            signals = received()
            if signal.SIGTERM in signals:
                raise Terminated
            if signal.SIGINT in signals:
                raise KeyboardInterrupt
        if failures := self.recorder.failures:
            raise RunFailed(
                f"{len(failures)} of {len(results)} trials failed. Run the same command with --resume to "
                f"retry them. The first: {failures[0]}"
            )
        marker.touch()
        trust.forget(path, self.run.id)

    def _note_waiting(self) -> None:
        if not self.recorder.trials:
            run = self.sweep.first.run
            gpus = resources.gpus_of(run)
            asked, found = resources.compared(_actors(self.sweep), run.cpus, gpus, run.server_cpus)
            self.recorder.progress.note(
                f"no trial has started within {PATIENCE_SECONDS:.0f} s: each needs {asked}; the cluster has {found}. "
                "Waiting for its processes to start, for other jobs to end, or for more nodes"
            )

    def _trainable(self) -> Any:
        sweep, run = self.sweep, self.sweep.first.run
        clients = _clients(sweep)
        # the trial and its server in the first bundle, clients in the others
        head = {"memory": HEAD_BYTES} | ({"CPU": run.server_cpus} if run.server_cpus else {})
        shared = Shared(
            packed([sweep, *map(sweep.example, sweep.rows)]),
            cloudpickle.dumps(sweep.described()),
            self.arrays,
            list(range(1, len(clients) + 1)),
            run,
            os.getcwd(),
            str(self.run.path),
            self.storage is None,
        )
        return tune.with_resources(
            tune.with_parameters(FederatedTrial, shared=shared), tune.PlacementGroupFactory([head, *clients])
        )

    def _tuner(self, place: str, space: dict[str, Any], config: dict[str, Any]) -> tune.Tuner:
        return tune.Tuner(
            self._trainable(),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric=self.sweep.search.metric,
                mode=self.sweep.mode,
                reuse_actors=True,
                trial_dirname_creator=_folder_of,
                **config,
            ),
            run_config=tune.RunConfig(
                name=place.rpartition("/")[2],
                storage_path=place.rpartition("/")[0],
                callbacks=[self.recorder],
                verbose=0,
                failure_config=tune.FailureConfig(max_failures=self.sweep.search.max_failures),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=2, checkpoint_at_end=True),
            ),
        )


def _folder_of(trial: Any) -> str:
    """Return the name of a trial's folder in Tune's. Not its id alone, which another trial may get after a resume."""
    row, seed, point = trial_of(trial.config)
    return folder_name(row, point, seed, trial.trial_id)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bytes]]:
    """Yield a function that returns the signals received so far. Tune handles a Ctrl-C itself, and its `fit` then
    returns normally; a SIGTERM is handled like a Ctrl-C.

    Tune replaces any handler, but Python also writes the number of a signal to a descriptor. Outside the main thread
    there are no signals.
    """
    if current_thread() is not main_thread():
        yield bytes
        return
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        handler = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))

        def received() -> bytes:
            with suppress(BlockingIOError):
                return reader.recv(4096)
            return b""

        try:
            yield received
        finally:
            signal.signal(signal.SIGTERM, handler)
            signal.set_wakeup_fd(before)


def _stopped(error: Exception) -> Exception:
    """Return the error of a sweep that Tune could not continue. Tune cleans up after an error; if that fails too, it
    raises the second error."""
    first: BaseException = error
    while first.__context__ is not None and not first.__suppress_context__:
        first = first.__context__
    if isinstance(first, ConfigError):
        return first
    return RunFailed(
        f"Ray Tune stopped: {type(first).__name__}: {first}. Run the same command with --resume to continue\n"
        + "".join(traceback.format_exception(error)).rstrip()
    )


@contextmanager
def _hushed() -> Iterator[None]:
    """Suppress Tune's log of failed trials: pages of Ray's tracebacks, which are in run.json too."""

    def is_news(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(("Trial task failed", "Trials did not complete"))

    loggers = [logging.getLogger(name) for name in ("ray.tune.tune", "ray.tune.execution.tune_controller")]
    for logger in loggers:
        logger.addFilter(is_news)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_news)


def check_room(sweep: Sweep, address: str | None) -> None:
    """Raise a ConfigError for a sweep whose trials can never start."""
    run = sweep.first.run
    memory = 0.0 if run.memory == "auto" else _memory(sweep)
    resources.require_room(_actors(sweep), run.cpus, resources.gpus_of(run), address, run.server_cpus, memory)


def _clients(sweep: Sweep) -> list[dict[str, float]]:
    """Return the bundles of a trial's client actors."""
    run, actors, gpus = sweep.first.run, _actors(sweep), resources.gpus_of(sweep.first.run)
    if run.actors == "auto":
        server_cpus = run.server_cpus * sweep.trials
        running = min(actors * sweep.trials, resources.room(run.cpus, gpus, server_cpus))
        gpus = resources.spread(max(actors, running), run.cpus, gpus, server_cpus)
    return resources.bundles(
        actors, run.cpus, gpus, max(resources.reserved(sweep.example(row), actors, gpus) for row in sweep.rows)
    )


def _actors(sweep: Sweep) -> int:
    """Return the number of client actors of a trial. "auto" prefers concurrent trials to more actors per trial."""
    experiment, run = sweep.first, sweep.first.run
    if run.actors != "auto":
        return run.actors
    server_cpus = run.server_cpus * sweep.trials
    share = resources.room(run.cpus, resources.gpus_of(run), server_cpus, _memory(sweep)) // sweep.trials
    return max(1, min(share, experiment.jobs))


def _memory(sweep: Sweep) -> float:
    """Return the bytes of memory per client actor: the largest of all rows."""
    return max(resources.memory_of(sweep.example(row)) for row in sweep.rows)


def checked(storage: str) -> str:
    """Return a place for what trials leave, without a final slash. Raises a ConfigError if it cannot be written."""
    try:
        files, path = FileSystem.from_uri(storage)
        files.create_dir(path)
        if files.get_file_info(path).type != FileType.Directory:
            raise OSError("not a folder")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--storage: {storage!r} cannot be written ({str(error).splitlines()[0]}). Allowed: s3://BUCKET/FOLDER of "
            "a bucket that this machine and all nodes can write"
        ) from None
    return storage.rstrip("/")
