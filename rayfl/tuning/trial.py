# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
# (ray.remote adds verbs to a class, and with_parameters arguments to a method, out of the type checker's sight)
"""One federated run as Ray Tune sees it, on the trial's node."""

import pickle
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import ray
from pyarrow.fs import FileSelector
from ray import tune
from ray.exceptions import RayError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayfl.engine.checkpoints import BEST, Best, DamagedCheckpoint, copy_best
from rayfl.engine.files import remove
from rayfl.engine.locks import Temporary
from rayfl.engine.on_ray.actors import Crew
from rayfl.engine.on_ray.server import ServerActor
from rayfl.engine.on_ray.shared import require_seen
from rayfl.engine.on_ray.status import About, server_name
from rayfl.engine.plugins import install
from rayfl.experiment import Experiment, Resources
from rayfl.listeners import tell
from rayfl.metrics import EVALUATED, Line
from rayfl.tuning.search import called, trial_of
from rayfl.tuning.sweep import Sweep

ENDED = "ended"
"""In the result of a trial that one of its listeners ended: the round."""


@dataclass(frozen=True)
class Shared:
    """What all trials of a stage have in common."""

    packages: bytes
    """The user's own (`plugins.packed`)."""
    sweep: bytes
    """The pickled sweep, which may be made of these packages."""
    arrays: ray.ObjectRef
    """The data set's."""
    places: list[int]
    """The bundle of each client actor in a trial's placement group."""
    run: Resources
    study: str
    """The sweep's folder."""
    is_shared: bool
    """Whether every node has to see it."""


class FederatedTrial(tune.Trainable):
    """One federated run as Ray Tune sees it. The next trial takes over its processes.

    The run is loaded by its first step: what fails there is an error of the trial. An error of `setup` would come out
    as the death of a process. A listener that ends the run ends the trial, which then counts as finished; listeners
    start anew where a run goes on from a checkpoint.
    """

    def setup(self, config: dict[str, Any], shared: Shared) -> None:
        group, run = get_current_placement_group(), shared.run
        assert group is not None
        # bundle 0 holds this process and the server, the clients' bundles follow
        here = PlacementGroupSchedulingStrategy(group, 0)
        crew = Crew(group, shared.places, run.cpus, run.gpus, run.threads, shared.packages)
        self.server = ServerActor.options(scheduling_strategy=here, name=server_name()).remote(crew)
        install(shared.packages)
        self.sweep: Sweep = pickle.loads(shared.sweep)
        self.arrays, self.study, self.is_shared = shared.arrays, shared.study, shared.is_shared
        self.folder = Temporary()
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.experiment, self.round = None, 0
        remove(self.checkpoints)
        return True

    def _load(self) -> Experiment:
        """What the trial runs; the server takes it up when it is asked for first."""
        if self.experiment is None:
            if self.is_shared:
                # this node may have joined later
                require_seen(Path(self.study, "run.json"))
            row, seed, point = trial_of(self.config)
            experiment = self.sweep.experiment(row, point, seed)
            about = About(called(row, point, seed), self.study, self.sweep.trials)
            ray.get(self.server.load.remote(experiment, [self.arrays], str(self.folder.path), about))
            self.experiment, self.started, self.ended, self.saved = experiment, False, False, time.monotonic()
            self.listeners = experiment.all_listeners()
        return self.experiment

    def step(self) -> dict[str, Any]:
        experiment = self._load()
        if not self.started:
            self.started = True
            for listener in self.listeners:
                listener.on_start(experiment.plain(), None, self.round)
        lines: list[Line] = []
        # schedulers and searchers want their metric in every result
        while not lines or not self.sweep.search.is_fair and EVALUATED not in lines[-1]:
            if (more := ray.get(self.server.step.remote())) is None:
                # restored from its last checkpoint: what it says here was said before
                return {"lines": [], "done": True}
            lines += more
        self.round = lines[-1]["round"]
        result = {key: v for key, v in lines[-1].items() if isinstance(v, int | float)} | {"lines": lines}
        self.ended |= tell(self.listeners, lines)
        if self.ended and EVALUATED in lines[-1] and self.round < experiment.rounds:
            result[ENDED] = self.round
        result["done"] = ENDED in result or self.round >= experiment.rounds
        if result["done"]:
            result["client_scores"] = ray.get(self.server.client_scores.remote())
            for listener in self.listeners:
                listener.on_end("finished")
        if experiment.run.checkpoint == BEST and EVALUATED in lines[-1]:
            self._keep_if_best(experiment, lines[-1])
        if time.monotonic() - self.saved > experiment.run.checkpoint_seconds:
            self.saved = time.monotonic()
            result["should_checkpoint"] = True
        return result

    def _keep_if_best(self, experiment: Experiment, line: Line) -> None:
        """In a folder of the trial's own, which travels with its checkpoints."""
        best = Best(self.checkpoints, experiment.chosen_by, experiment.scores[0].better)
        if best.is_better(line):
            ray.get(self.server.save.remote(str(self.checkpoints)))
            best.keep(line)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        ray.get(self.server.save.remote(checkpoint_dir))
        copy_best(self.checkpoints, Path(checkpoint_dir))

    def load_checkpoint(self, checkpoint: str) -> None:
        self._load()
        self.round, _ = ray.get(self.server.restore.remote(checkpoint))
        copy_best(Path(checkpoint), self.checkpoints)

    @property
    def checkpoints(self) -> Path:
        return self.folder.path / "checkpoints"

    def restore(self, result) -> None:  # pyright: ignore
        """From the trial's newest whole checkpoint, or from the start if there is none.

        Tune names the one of its last snapshot. A driver that was killed may have left newer ones, which
        replaced that.
        """
        named = result.checkpoint
        for folder in _newest_first(named):
            with suppress(DamagedCheckpoint):
                super().restore(type(result)(tune.Checkpoint(folder, named.filesystem), result.metrics))
                return

    def cleanup(self) -> None:
        with suppress(RayError):
            ray.get(self.server.close.remote())
        self.folder.remove()


def _newest_first(checkpoint: tune.Checkpoint) -> list[str]:
    """The folders of a trial's checkpoints on its storage, by falling round."""
    trial = PurePosixPath(checkpoint.path).parent
    assert checkpoint.filesystem is not None
    files = checkpoint.filesystem.get_file_info(FileSelector(str(trial), allow_not_found=True, recursive=True))
    paths = [PurePosixPath(file.path) for file in files]
    rounds = {str(path.parent): path.name for path in sorted(paths) if path.match("checkpoint_*/round-*")}
    return sorted(rounds, key=lambda folder: rounds[folder], reverse=True)
