"""The one way to run an experiment: the command line, a notebook and a script all call `run`.

    result = rayfl.run(rayfl.Experiment(model="digits_cnn", method="heterofl"))
    result.metrics                         # a pandas DataFrame, a row a round
    result.submodel(0.25)                  # what a device of this capacity runs, a plain torch.nn.Module

or round by round:

    with rayfl.start(experiment) as session:
        for line in session:
            print(line["round"], line["train_loss"])
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rayfl.config import ConfigError
from rayfl.data.base import Arrays
from rayfl.data.memory import InMemory
from rayfl.engine.checkpoints import BEST, Best, complete, forget_after, same_config
from rayfl.engine.locks import Temporary, clear_temporary, locked
from rayfl.engine.simulation import STEP_SECONDS, Simulation
from rayfl.engine.termination import heeded
from rayfl.experiment import Experiment, read_experiment
from rayfl.listeners import Listener, tell
from rayfl.methods.base import Deployment
from rayfl.metrics import EVALUATED, Line
from rayfl.results.folder import RunFolder

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import nn

CHECKPOINTS = "checkpoints"
LOADING, WRITING = "loading the data", "writing tables and plots"
STARTING = {"ray": "starting Ray and the client actors", "serial": "preparing the first round"}
"""Executor -> what a run is busy with before its first round."""
FREE = ("rounds", "run", "listeners", "published", "question", "titles")
"""Sections that a resumed run or sweep may change."""


class Verbs(Protocol):
    """What a simulation can do, in this process or in a server actor."""

    def step(self, seconds: float = STEP_SECONDS) -> list[Line] | None: ...
    def save(self, folder: Path) -> None: ...
    def restore(self, folder: Path) -> tuple[int, list[str]]: ...
    def deployment(self, capacity: float, client: int | None = None) -> Deployment: ...

    @property
    def client_scores(self) -> np.ndarray: ...


# a whole run


def run(
    experiment: Experiment | Mapping[str, Any],
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    address: str | None = None,
    listeners: Sequence[Listener] = (),
    arrays: Arrays | None = None,
) -> "Result":
    """Runs an experiment to its end, or until a listener ends it.

    `folder` gets the configuration, a line of metrics a round, the result and checkpoints; without one they are in a
    temporary folder that goes with the result. `resume` goes on from the folder's last checkpoint, with the same bits
    as a run that was never stopped. `address`: a running Ray cluster, else RAY_ADDRESS, else one of its own that ends
    with the run; a process that is connected to a cluster already uses that one. `arrays`: the data, where they are
    loaded already.

    A ConfigError says what is wrong before anything is started or written.
    """
    experiment = as_experiment(experiment)
    temporary = Temporary() if folder is None else None
    # a server actor may have another working folder
    path = temporary.path / "run" if temporary else Path(str(folder)).resolve()
    listeners = [*experiment.all_listeners(), *listeners]
    with claimed(path, experiment.plain(), resume):
        if arrays is None:
            _in_phase(listeners, LOADING)
            arrays = load_data(experiment)
        said = _with_metrics(path) if resume else []
        _in_phase(listeners, STARTING[experiment.run.executor])
        # what Ray refuses leaves no folder behind
        with opened(experiment, arrays, path, address) as simulation:
            record = _open_folder(path, experiment)
            status, error = "stopped", None
            try:
                round, more = simulation.restore(path / CHECKPOINTS)
                record.truncate_after(round)
                for listener in listeners:
                    listener.on_start(experiment.plain(), path, round)
                    for text in [*said, *more]:
                        listener.on_note(text)
                _loop(simulation, record, experiment, listeners, _has_ended(record.rounds(), listeners))
                status = "finished"
            except Exception as failure:
                status, error = "failed", str(failure)
                raise
            finally:
                record.finish(status, error)
                for listener in listeners:
                    listener.on_end(status)
    return Result(experiment, record, temporary)


def _in_phase(listeners: Sequence[Listener], phase: str) -> None:
    for listener in listeners:
        listener.on_phase(phase)


def _has_ended(past: list[Line], listeners: Sequence[Listener]) -> bool:
    """Whether one of the listeners ends a run that goes on after these rounds."""
    return bool(past) and any([listener.on_past(past) for listener in listeners])


def _loop(
    simulation: Verbs, record: RunFolder, experiment: Experiment, listeners: Sequence[Listener], ended: bool
) -> None:
    """Rounds to the end or to a SIGTERM, with a checkpoint every so often and at the end. `ended`: a listener ends the
    run with the next round that is evaluated, which may have been made."""
    folder, past = record.path / CHECKPOINTS, record.rounds()
    best = (
        Best(folder, experiment.chosen_by, experiment.scores[0].better) if experiment.run.checkpoint == BEST else None
    )
    over = ended and EVALUATED in past[-1]
    saved = time.monotonic()
    seconds = min(STEP_SECONDS, experiment.run.checkpoint_seconds)
    with heeded() as notice:
        while not over and not notice.given and (lines := simulation.step(seconds)) is not None:
            record.append(lines)
            is_evaluated = bool(lines) and EVALUATED in lines[-1]
            if is_evaluated and experiment.evaluation.clients:
                record.save_clients(simulation.client_scores)
            ended |= tell(listeners, lines)
            over = ended and is_evaluated
            if is_evaluated and best is not None and best.is_better(lines[-1]):
                simulation.save(folder)
                best.keep(lines[-1])
                saved = time.monotonic()
            elif time.monotonic() - saved > experiment.run.checkpoint_seconds:
                simulation.save(folder)
                saved = time.monotonic()
        simulation.save(folder)


@dataclass(frozen=True)
class Result:
    """A run that ended: its folder is the truth about it."""

    experiment: Experiment
    folder: RunFolder
    _temporary: Temporary | None = field(default=None, repr=False)

    @property
    def lines(self) -> list[Line]:
        """One a round."""
        return self.folder.rounds()

    @property
    def metrics(self) -> "pd.DataFrame":
        """A row a round, a column a metric; NaN where a round was not evaluated."""
        return _table(self.lines)

    @property
    def summary(self) -> dict[str, Any]:
        """result.json."""
        return self.folder.result

    @property
    def plots(self) -> "dict[str, Figure]":
        """Name -> figure, of all plots that the run has."""
        from rayfl.results.report import figures

        return figures([self.folder.record()], self.experiment)

    def submodel(self, capacity: float, client: int | None = None, *, best: bool = False) -> "nn.Module":
        """What a device of this capacity runs, or the client's own network: [B, ...] -> logits [B, C]. `best`: after
        the best round in place of the last, if `run.checkpoint` was best."""
        from rayfl.exporting.submodels import as_module

        place = _place(self.folder.path, best)
        return as_module(_at_checkpoint(self.experiment, place, capacity, client, print)[1])


# round by round


@contextmanager
def start(
    experiment: Experiment | Mapping[str, Any], address: str | None = None, *, arrays: Arrays | None = None
) -> Iterator["Session"]:
    """A run, round by round; nothing of it stays on disk. `address` and `arrays`: as for `run`."""
    experiment = as_experiment(experiment)
    arrays = load_data(experiment) if arrays is None else arrays
    with Temporary() as folder, opened(experiment, arrays, folder, address) as simulation:
        yield Session(experiment, simulation)


@dataclass
class Session:
    """A run in progress: iterate over its rounds, as many at a time as you like."""

    experiment: Experiment
    simulation: Verbs
    lines: list[Line] = field(default_factory=list)
    """The rounds so far."""

    def __iter__(self) -> Iterator[Line]:
        while (made := self.simulation.step(0.0)) is not None:
            self.lines += made
            yield from made

    @property
    def metrics(self) -> "pd.DataFrame":
        """As of a `Result`."""
        return _table(self.lines)

    def submodel(self, capacity: float, client: int | None = None) -> "nn.Module":
        """What a device of this capacity runs now, or the client's own network: [B, ...] -> logits [B, C]."""
        from rayfl.exporting.submodels import as_module

        _check_device(self.experiment, capacity, client)
        return as_module(self.simulation.deployment(capacity, client))


# what remains of it


def export(
    folder: str | Path,
    capacity: float,
    to: str | Path,
    client: int | None = None,
    *,
    best: bool = False,
    data: InMemory | None = None,
    notify: Callable[[str], None] = print,
) -> "nn.Module":
    """Writes what a device of this capacity runs, or a client's own network, for the world outside; returns it.

    `folder` is a run's, with a checkpoint; `best`: after its best round in place of the last, if `run.checkpoint` was
    best; `data`: its arrays, if they were in memory. See
    `rayfl.exporting.submodels` for the list of files.
    """
    from rayfl.exporting.submodels import export_submodel

    folder, to = Path(folder), Path(to)
    record = RunFolder.open(folder)
    record.require_version()
    experiment = read_experiment(record.config, str(folder / "config.json"))
    if isinstance(experiment.data, InMemory) and data is not None:
        experiment = experiment.with_(data=experiment.data.holding(data))
    place = _place(folder, best)
    _check_place(to)
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"{to}: given a folder that is not empty; allowed: a new folder")
    round, deployed = _at_checkpoint(experiment, place, capacity, client, notify)
    if deployed.is_start:
        who = "no client" if client is None else f"client {client}, who has not taken part yet"
        notify(
            f"{who}: with method {experiment.method.name} every client has a network of its own, and nobody has "
            "trained this one"
        )
    about = {"capacity": capacity, "client": client, "round": round, "method": experiment.method.name}
    about |= {"samples": experiment.data.prepare.plain()}
    return export_submodel(deployed, to, about, notify, experiment.data.attached)


def deployments(
    folder: str | Path, *, arrays: Arrays | None = None, notify: Callable[[str], None] = print
) -> dict[float, Deployment]:
    """What a device of every capacity runs after a run's newest whole checkpoint, with its norms' statistics, largest
    capacity first. `arrays`: the data, where they are loaded already."""
    record = RunFolder.open(folder)
    record.require_version()
    experiment = read_experiment(record.config, str(record.path / "config.json"))
    with _restored(experiment, record.path / CHECKPOINTS, notify, arrays) as (_, simulation):
        return {capacity: simulation.deployment(capacity) for capacity in experiment.clients.all_capacities}


def _place(folder: Path, best: bool) -> Path:
    """Where a run's checkpoints are, or the best one."""
    checkpoints = folder / CHECKPOINTS
    if not complete(checkpoints):
        raise ConfigError(f"{folder}: has no checkpoint; allowed: the folder of a run, below trials/ in a sweep's")
    if best and not complete(checkpoints / BEST):
        raise ConfigError(f"{folder}: has no best checkpoint; allowed: a run of `run.checkpoint: best`")
    return checkpoints / BEST if best else checkpoints


def _at_checkpoint(
    experiment: Experiment, place: Path, capacity: float, client: int | None, notify: Callable[[str], None]
) -> tuple[int, Deployment]:
    """The round of the newest whole checkpoint in a folder, and what a device of a capacity, or a client, runs then."""
    _check_device(experiment, capacity, client)
    with _restored(experiment, place, notify) as (round, simulation):
        return round, simulation.deployment(capacity, client)


@contextmanager
def _restored(
    experiment: Experiment, place: Path, notify: Callable[[str], None], arrays: Arrays | None = None
) -> Iterator[tuple[int, Simulation]]:
    """The round of the newest whole checkpoint in a folder, and the run as it stood there."""
    with Temporary() as scratch:
        simulation = Simulation(experiment, load_data(experiment) if arrays is None else arrays, scratch)
        round, said = simulation.restore(place)
        for text in said:
            notify(text)
        yield round, simulation


# what all of these need


def as_experiment(given: Experiment | Mapping[str, Any]) -> Experiment:
    return given if isinstance(given, Experiment) else read_experiment(given, "experiment")


def load_data(experiment: Experiment) -> Arrays:
    """The arrays, after every check that only they allow; nothing else is started before."""
    arrays = experiment.data.arrays()
    experiment.federate(arrays)
    experiment.model.prepare()
    return arrays


@contextmanager
def opened(experiment: Experiment, arrays: Arrays, folder: Path, address: str | None = None) -> Iterator[Verbs]:
    """The experiment's simulation, in this process or on Ray. `folder` is for what clients keep."""
    if experiment.run.executor == "serial":
        yield Simulation(experiment, arrays, folder)
        return
    from rayfl.engine.on_ray.cluster import running

    with running(experiment, arrays, folder, address) as simulation:
        yield simulation


@contextmanager
def claimed(path: Path, config: Mapping[str, Any], resume: bool) -> Iterator[None]:
    """A folder that `check_folder` allows, for this process alone."""
    check_folder(path, config, resume)
    clear_temporary()
    with locked(path):
        # another process may have been here in between
        check_folder(path, config, resume)
        yield


def check_folder(path: Path, config: Mapping[str, Any], resume: bool) -> None:
    """A folder is new, or with `resume` it holds a run, or a sweep, of the same plain configuration."""
    if not resume:
        _check_place(path)
        if RunFolder.exists(path):
            raise ConfigError(f"{path}: holds a run already; resume it, or give another folder")
        return
    record = RunFolder.open(path)
    record.require_version()
    old, new = ({k: v for k, v in c.items() if k not in FREE} for c in (record.config, config))
    same_config(path / "config.json", old, new)


def _check_place(path: Path) -> None:
    """Whether a folder can be there."""
    try:
        above = next(place for place in (path, *path.parents) if place.exists())
        reason = "" if above.is_dir() else f"{above} is a file"
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise ConfigError(f"{path}: given a folder that cannot be made: {reason}; allowed: a folder, or a new one")


def _with_metrics(path: Path) -> list[str]:
    """A run goes on from a checkpoint whose rounds all have their line of metrics: later ones go. What to say."""
    whole, wrong = RunFolder.open(path).whole_rounds()
    why = wrong or f"{path / 'metrics.jsonl'}: ends after round {whole}"
    if forget_after(path / CHECKPOINTS, whole, why):
        return [f"{why}; going back to a checkpoint before it"]
    return [f"{why}; it and what follows are made again"] if wrong else []


def _open_folder(path: Path, experiment: Experiment) -> RunFolder:
    """The run that is there, marked as running again, or a new one."""
    if RunFolder.exists(path):
        record = RunFolder.open(path)
        record.resume(experiment.plain(), experiment.facts())
        return record
    return RunFolder.create(
        path,
        experiment.method.name,
        experiment.plain(),
        experiment.tags(),
        experiment.facts(),
        costs=experiment.costs(),
    )


def _check_device(experiment: Experiment, capacity: float, client: int | None) -> None:
    levels, clients = experiment.clients.all_capacities, experiment.clients.count
    if capacity not in levels:
        raise ConfigError(f"capacity: given {capacity:g}; allowed: {', '.join(f'{level:g}' for level in levels)}")
    if client is not None and not 0 <= client < clients:
        raise ConfigError(f"client: given {client}; allowed: 0 to {clients - 1}")


def _table(lines: Sequence[Line]) -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame(list(lines), columns=None if lines else ["round"]).set_index("round")
