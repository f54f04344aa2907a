# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
# (ray.remote adds verbs to a class, and with_parameters arguments to a method, out of the type checker's sight)
"""The stages of a sweep, each one a Tuner: the search on the first seed, then every row's best point on the others.

The driver alone writes records. A trial is a server actor and its client actors inside the trial's own placement group,
and those processes are used again by the next trial.
"""

import logging
import shutil
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import PurePosixPath
from typing import Any

import cloudpickle
import ray
from pyarrow.fs import FileSelector, FileSystem, FileType
from ray import tune
from ray.tune import TuneError

from rayfl.config import ConfigError
from rayfl.data.base import Arrays
from rayfl.engine.on_ray import cluster
from rayfl.engine.plugins import packed
from rayfl.engine.termination import Terminated
from rayfl.results.folder import RunFolder, records
from rayfl.results.rows import Record, best_trials
from rayfl.tuning import trust
from rayfl.tuning.recorder import RayDied, Recorder
from rayfl.tuning.search import scheduler_of, space_of, trial_config
from rayfl.tuning.space import Point, text_of
from rayfl.tuning.sweep import Sweep
from rayfl.tuning.trial import FederatedTrial, Shared
from rayfl.tuning.within import searching

HEAD_BYTES = 64 * 2**20


class Interrupted(Exception):
    """The user stopped the sweep; `--resume` goes on."""


def run_sweep(
    sweep: Sweep, run: RunFolder, arrays: Arrays, recorder: Recorder, storage: str | None = None
) -> list[Record]:
    """All stages of a sweep, those that are done passed over. Returns the records of the best points, all seeds.

    `run` is the sweep's own folder. `storage`: where all nodes find what trials leave for each other, if not there.
    Ray is running. Raises Interrupted after a Ctrl-C, Terminated after a SIGTERM, a
    ConfigError if a trial's code does, and a RuntimeError that names the trials that failed.
    """
    recorder.recall()
    for row in sweep.rows:
        if left_out := sweep.left_out(row):
            recorder.progress.note(f"{row}: outside search.budget: {'; '.join(map(text_of, left_out))}")
    stages = _Stages(sweep, run, ray.put(arrays), recorder, storage)
    search, first = sweep.search, sweep.search.seeds[0]
    if search.is_fair:
        tried = zip_longest(*(sweep.points[row] for row in sweep.rows))
        recorder.progress.phase(f"searching on seed {first}")
        stages.listed("search", _configs(sweep.rows, first, tried))
    else:
        for row in sweep.rows:
            recorder.progress.phase(f"searching for {row} on seed {first}")
            stages.of_row(f"search-{row}", row)
    tuned = [record for record in _finished(run) if record["seed"] == first]
    best = best_trials(tuned, search.metric, sweep.mode)
    confirm = [
        trial_config(record["label"], seed, sweep.point(RunFolder.open(record["path"]).config))
        for seed in search.seeds[1:]
        for record in best
    ]
    if confirm:
        recorder.progress.phase("running every row's best point on the other seeds")
        stages.listed("confirm", confirm)
        best = best_trials(_finished(run), search.metric, sweep.mode)
    return best


def _configs(rows: Iterable[str], seed: int, tried: Iterable[Iterable[Point | None]]) -> list[dict[str, Any]]:
    """The trials of all rows by turns."""
    return [
        trial_config(row, seed, p) for points in tried for row, p in zip(rows, points, strict=True) if p is not None
    ]


def _finished(run: RunFolder) -> list[Record]:
    """The trials that ran to their end: one that a scheduler stopped early is no candidate. One that its own listener
    ended is."""
    return [record for record in records(run.path, run.id) if record["status"] == "finished"]


@dataclass(frozen=True)
class _Stages:
    """Runs Tuners, one after another, each in a folder of its own below the sweep's."""

    sweep: Sweep
    run: RunFolder
    arrays: ray.ObjectRef
    recorder: Recorder
    storage: str | None = None
    """Where Tune keeps its snapshots and the trials' checkpoints, as s3://BUCKET/FOLDER; else in the sweep's folder."""

    def listed(self, name: str, trials: list[dict[str, Any]]) -> None:
        """These trials, each to its end."""
        self._run(name, {"trial": tune.grid_search(trials)})

    def of_row(self, name: str, row: str) -> None:
        """What a searcher or a scheduler makes of a row's trials."""
        sweep, search = self.sweep, self.sweep.search
        scheduler = scheduler_of(search, sweep.example(row).rounds, sweep.where)
        if search.searcher == "random":
            trials = [trial_config(row, search.seeds[0], point) for point in sweep.points[row]]
            self._run(name, {"trial": tune.grid_search(trials)}, scheduler=scheduler)
        else:
            config = {"scheduler": scheduler, "search_alg": searching(sweep, row), "num_samples": search.trials}
            self._run(name, space_of(search, row), **config)

    def _run(self, name: str, space: dict[str, Any], **config: Any) -> None:
        """One Tuner, from its start, from where it was stopped, or not at all if it is done."""
        path = self.run.path / "tune" / name
        marker = path / "done"
        if marker.exists():
            return
        place = str(path) if self.storage is None else f"{self.storage}/{self.run.id}/{name}"
        if tune.Tuner.can_restore(place):
            trust.require(path, self.run.id)
            _fill_gaps(place)
            tuner = tune.Tuner.restore(place, self._trainable(), resume_errored=True, param_space=space)
        else:
            shutil.rmtree(path, ignore_errors=True)
            trust.make(path, self.run.id)
            tuner = self._tuner(place, space, config)
        with _interrupts() as received, _hushed():
            try:
                results = tuner.fit()
            except TuneError:
                if self.recorder.refusal is not None:
                    raise self.recorder.refusal from None
                raise
            except RayDied as died:
                raise RuntimeError(str(died)) from None
            finally:
                self.recorder.leave()
            signals = received()
            if signal.SIGTERM in signals:
                raise Terminated
            if signal.SIGINT in signals:
                raise Interrupted
        if failures := self.recorder.failures:
            raise RuntimeError(
                f"{len(failures)} of {len(results)} trials failed; --resume tries them again. The first: {failures[0]}"
            )
        marker.touch()
        trust.forget(path, self.run.id)

    def _trainable(self) -> Any:
        sweep, run = self.sweep, self.sweep.first.run
        clients, places = cluster.bundles(_actors(sweep), run.cpus, run.gpus)
        # the trial and its server in the first bundle, clients in the others
        head = {"memory": HEAD_BYTES} | ({"CPU": run.server_cpus} if run.server_cpus else {})
        shared = Shared(
            packed([sweep, *map(sweep.example, sweep.rows)]),
            cloudpickle.dumps(sweep.described()),
            self.arrays,
            [place + 1 for place in places],
            run,
            str(self.run.path),
            self.storage is None,
        )
        return tune.with_resources(
            tune.with_parameters(FederatedTrial, shared=shared),
            tune.PlacementGroupFactory([head, *clients]),
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
    return trial.trial_id


def _fill_gaps(stage: str) -> None:
    """Empty folders for checkpoints that were removed after Tune's last snapshot: it removes them again, and
    an absent one is an error to it."""
    files, path = FileSystem.from_uri(stage)
    found = (PurePosixPath(file.path) for file in files.get_file_info(FileSelector(path, recursive=True)))
    newest: dict[PurePosixPath, int] = {}
    for folder in found:
        if folder.match("*/checkpoint_*") and folder.parent.parent == PurePosixPath(path):
            newest[folder.parent] = max(newest.get(folder.parent, 0), int(folder.name.removeprefix("checkpoint_")))
    for trial, number in newest.items():
        for gone in range(number):
            files.create_dir(str(trial / f"checkpoint_{gone:06d}"))


@contextmanager
def _interrupts() -> Iterator[Callable[[], bytes]]:
    """Which signals there were. Tune handles a Ctrl-C itself, and its `fit` then returns as if all were well; a SIGTERM
    is made one.

    Tune takes the place of any handler, but Python also writes the number of a signal to a descriptor.
    """
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


@contextmanager
def _hushed() -> Iterator[None]:
    """Keeps back what Tune logs of trials that failed: pages of Ray's tracebacks, which their run.json has too."""

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
    """Refuses a sweep whose trials can never start."""
    run = sweep.first.run
    cluster.require_room(_actors(sweep), run.cpus, run.gpus, address, run.server_cpus)


def _actors(sweep: Sweep) -> int:
    """Client actors of a trial. auto: trials side by side first."""
    experiment, run = sweep.first, sweep.first.run
    if run.actors != "auto":
        return run.actors
    share = cluster.room(run.cpus, run.gpus, run.server_cpus * sweep.trials) // sweep.trials
    return max(1, min(share, experiment.jobs))


def checked(storage: str) -> str:
    """A place for what trials leave, without the last slash. A ConfigError if nothing can be written there."""
    try:
        files, path = FileSystem.from_uri(storage)
        files.create_dir(path)
        if files.get_file_info(path).type != FileType.Directory:
            raise OSError("it is no folder")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--storage: given {storage!r} ({str(error).splitlines()[0]}); allowed: s3://BUCKET/FOLDER of a bucket "
            "that this machine and all nodes may write, as by an instance profile"
        ) from None
    return storage.rstrip("/")
