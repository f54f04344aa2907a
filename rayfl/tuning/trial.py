# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
# (ray.remote adds methods to a class, and with_parameters adds arguments, which the type checker does not see)
"""One federated run as a trial of Ray Tune, on the trial's node."""

import math
import os
import pickle
import time
from contextlib import AbstractContextManager, chdir, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import ray
from pyarrow.fs import FileSelector, FileSystem
from ray import tune
from ray.exceptions import RayError
from ray.tune.trainable.trainable import _DICT_CHECKPOINT_FILE_NAME
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayfl.engine.checked import Diverged
from rayfl.engine.checkpoints import (
    BEST,
    CHECKPOINTS,
    Best,
    DamagedCheckpoint,
    complete,
    copy_best,
    require_whole_best,
    round_of,
)
from rayfl.engine.files import remove
from rayfl.engine.locks import Temporary
from rayfl.engine.on_ray.actors import Crew
from rayfl.engine.on_ray.server import ServerActor
from rayfl.engine.on_ray.shared import require_seen
from rayfl.engine.on_ray.status import About, server_name
from rayfl.engine.plugins import install
from rayfl.experiment import Experiment, Resources
from rayfl.listeners import call, end, tell, tell_past
from rayfl.metrics import EVALUATED, Line
from rayfl.results import files
from rayfl.results.folder import Status
from rayfl.tuning.search import called, folder_name, trial_of
from rayfl.tuning.sweep import Sweep

ENDED = "ended"
"""Key in the result of a trial that a listener ended: the round."""
DIVERGED = "diverged"
"""Key in the result of a trial that diverged: why."""
CLIENT_TABLE = "client_table"
"""Key in the result of an evaluated round: the scores of all clients."""
LINES = "metrics.jsonl"
"""File in a checkpoint: the lines of all rounds before."""


@dataclass(frozen=True)
class Shared:
    """Arguments shared by all trials of a stage."""

    packages: bytes
    """The user's own packages (`plugins.packed`)."""
    sweep: bytes
    """Pickled sweep, which may need these packages."""
    arrays: ray.ObjectRef
    """Arrays of the data set."""
    places: list[int]
    """Bundle of each client actor in a trial's placement group."""
    run: Resources
    home: str
    """Working folder of the driver, to which the sweep's relative paths refer."""
    study: str
    """Folder of the sweep."""
    is_shared: bool
    """True if every node must see the folder."""


class FederatedTrial(tune.Trainable):
    """One federated run as a trial. The next trial reuses its processes.

    The first step loads the run, so that a failure is an error of the trial; an error in `setup` would appear as the
    death of a process. A listener that ends the run ends the trial, which counts as finished. A trial that diverges
    ends too, because it would do so again. Checkpoints contain the lines of all rounds before, for the listeners of a
    trial that continues.
    """

    def setup(self, config: dict[str, Any], shared: Shared) -> None:
        group, run = get_current_placement_group(), shared.run
        assert group is not None
        # bundle 0 holds this process and the server, the clients' bundles follow
        here = PlacementGroupSchedulingStrategy(group, 0)
        # of the group, because Tune restores the groups of trials that it resumes
        gpus = group.bundle_specs[shared.places[0]].get("GPU", 0.0)
        crew = Crew(group, shared.places, run.cpus, gpus, run.threads, shared.packages, shared.home)
        self.server = ServerActor.options(scheduling_strategy=here, name=server_name()).remote(crew)
        install(shared.packages)
        self.sweep: Sweep = pickle.loads(shared.sweep)
        self.arrays, self.home, self.study, self.is_shared = shared.arrays, shared.home, shared.study, shared.is_shared
        self.folder = Temporary()
        self.experiment, self.listeners = None, ()
        self.reset_config(config)

    def reset(self, new_config: dict[str, Any], storage: Any = None) -> bool:
        # Tune changes to the next trial's folder before it calls `reset_config`
        self._leave("stopped")
        return super().reset(new_config, storage)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.experiment, self.round, self.past = None, 0, []
        if self.is_shared:
            assert self._storage is not None
            # for trials made after a resume, Tune names the folder of the first start, which may have been moved
            self._storage.storage_fs_path = str(Path(self.study, "tune"))
        remove(self.checkpoints)
        return True

    def _load(self) -> Experiment:
        """Return the trial's experiment; load it on the server at the first call."""
        if self.experiment is None:
            row, seed, point = trial_of(self.config)
            with _inside(self.home):
                experiment = self.sweep.experiment(row, point, seed)
            if self.is_shared:
                # the node may have joined later
                require_seen(Path(self.study, "run.json"))
                # listeners' relative paths are in the trial's folder
                folder = Path(self.study, "trials", folder_name(row, point, seed, self.trial_id))
                folder.mkdir(parents=True, exist_ok=True)
                os.chdir(folder)
            about = About(called(row, point, seed), self.study, self.sweep.trials)
            ray.get(self.server.load.remote(experiment, [self.arrays], str(self.folder.path), about))
            self.experiment, self.started, self.ended, self.saved = experiment, False, False, time.monotonic()
            self.listeners = experiment.all_listeners()
        return self.experiment

    def step(self) -> dict[str, Any]:
        if self.experiment is None:
            self.restore()
        experiment = self._load()
        if not self.started:
            self.started = True
            for listener in self.listeners:
                call(listener, "on_start", experiment.plain() | {"trial": self.trial_id}, None, self.round)
            self.ended = bool(self.past) and tell_past(self.listeners, self.past)
            if self.ended and EVALUATED in self.past[-1]:
                return self._finished_before(experiment)
        lines: list[Line] = []
        # schedulers and searchers need their metric in every result
        while not lines or not self.sweep.search.is_fair and EVALUATED not in lines[-1]:
            try:
                more = ray.get(self.server.step.remote())
            except Diverged as error:
                return self._diverged(error, lines + error.lines)
            if more is None:
                return self._finished_before(experiment)
            lines += more
        self.round = lines[-1]["round"]
        self.past += lines if self.listeners else []
        result = {key: v for key, v in lines[-1].items() if isinstance(v, int | float)} | {"lines": lines}
        self.ended |= tell(self.listeners, lines)
        if self.ended and EVALUATED in lines[-1] and self.round < experiment.rounds:
            result[ENDED] = self.round
        if EVALUATED in lines[-1] and experiment.evaluation.clients and experiment.run.client_scores == "all":
            result[CLIENT_TABLE] = ray.get(self.server.client_table.remote())
        result["done"] = ENDED in result or self.round >= experiment.rounds
        if result["done"]:
            result["client_scores"] = ray.get(self.server.client_scores.remote())
            self._leave("finished")
        if experiment.run.checkpoint == BEST and EVALUATED in lines[-1]:
            self._keep_if_best(experiment, lines[-1])
        if time.monotonic() - self.saved > experiment.run.checkpoint_seconds:
            self.saved = time.monotonic()
            result["should_checkpoint"] = True
        return result

    def _finished_before(self, experiment: Experiment) -> dict[str, Any]:
        """Return the result of a trial whose newest checkpoint is of its last round, reported before."""
        self._leave("finished")
        ended = {ENDED: self.round} if self.round < experiment.rounds else {}
        return {"lines": [], "round": self.round, "done": True} | ended

    def _diverged(self, error: Diverged, lines: list[Line]) -> dict[str, Any]:
        """Return the last result of a trial that diverged, with the worst score for schedulers and searchers."""
        tell(self.listeners, lines)
        self._leave("failed")
        self.round = lines[-1]["round"] if lines else self.round
        worst = -math.inf if self.sweep.mode == "max" else math.inf
        # Ray raises the error of another process with its cause
        reason = str(getattr(error, "cause", error))
        return {"lines": lines, "round": self.round, "done": True, DIVERGED: reason, self.sweep.search.metric: worst}

    def _keep_if_best(self, experiment: Experiment, line: Line) -> None:
        """Keep the best checkpoint in the trial's own folder, which is copied with its checkpoints."""
        best = Best(self.checkpoints, experiment.chosen_by, experiment.scores[0].better)
        if best.is_better(line):
            ray.get(self.server.save.remote(str(self.checkpoints)))
            best.keep(line)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        ray.get(self.server.save.remote(checkpoint_dir))
        copy_best(self.checkpoints, Path(checkpoint_dir))
        if self.past:
            files.write_lines(Path(checkpoint_dir, LINES), self.past)

    def load_checkpoint(self, checkpoint: str) -> None:
        self._load()
        require_whole_best(Path(checkpoint))
        past = _past(Path(checkpoint))
        self.round, _ = ray.get(self.server.restore.remote(checkpoint))
        self.past = past[: self.round]
        copy_best(Path(checkpoint), self.checkpoints)

    @property
    def checkpoints(self) -> Path:
        return self.folder.path / CHECKPOINTS

    def restore(self, result: Any = None) -> None:
        """Restore the trial's newest valid checkpoint, or start again if there is none.

        Tune passes the checkpoint of its last snapshot, and does not call this if it has none. A driver that was
        stopped may have left newer ones, which replaced it.
        """
        storage = self._storage
        assert storage is not None
        for folder in _newest_first(storage.storage_filesystem, storage.trial_fs_path):
            if storage.storage_filesystem.get_file_info(f"{folder}/{_DICT_CHECKPOINT_FILE_NAME}").type:
                continue  # a pickle, which is not rayfl's
            checkpoint = tune.Checkpoint(folder, storage.storage_filesystem)
            with suppress(DamagedCheckpoint):
                super().restore(checkpoint if result is None else type(result)(checkpoint, result.metrics))
                return

    def _leave(self, status: Status) -> None:
        """Tell the listeners of a trial that has started that it ends."""
        if self.experiment is not None and self.started:
            end(self.listeners, status)
        self.listeners = ()

    def cleanup(self) -> None:
        self._leave("stopped")
        with suppress(RayError):
            ray.get(self.server.close.remote())
        self.folder.remove()


def _past(checkpoint: Path) -> list[Line]:
    """Return the lines of all rounds before a checkpoint; none of one without listeners. Raise DamagedCheckpoint if
    lines are missing."""
    file = checkpoint / LINES
    past, wrong = files.read_whole_lines(file)
    if file.exists() and any(round_of(saved) > len(past) for saved in complete(checkpoint)):
        raise DamagedCheckpoint(wrong or f"{file}: the file ends after round {len(past)}")
    return past


def _newest_first(filesystem: FileSystem, trial: str) -> list[str]:
    """Return the folders of the checkpoints in a trial's folder, newest first."""
    found = filesystem.get_file_info(FileSelector(trial, allow_not_found=True, recursive=True))
    paths = [PurePosixPath(file.path) for file in found]
    rounds = {str(path.parent): path.name for path in sorted(paths) if path.match("checkpoint_*/round-*")}
    return sorted(rounds, key=lambda folder: rounds[folder], reverse=True)


def _inside(folder: str) -> AbstractContextManager[Any]:
    """Return a context with this working folder, or with the present one on a node that does not have it."""
    return chdir(folder) if os.path.isdir(folder) else nullcontext()
