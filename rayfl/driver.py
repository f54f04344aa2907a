"""Running an experiment: the command line, notebooks and scripts all call `run` or, round by round, `start`."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from pydantic import PrivateAttr

from rayfl.config import ConfigError, differences, shown
from rayfl.data.base import Arrays
from rayfl.engine.checked import Diverged
from rayfl.engine.checkpoints import (
    BEST,
    CHECKPOINTS,
    Best,
    complete,
    forget_after,
    remove_damaged_best,
    round_of,
    same_config,
)
from rayfl.engine.devices import of_serial
from rayfl.engine.files import absolute, check_place, remove
from rayfl.engine.inputs import Inputs, Resume, check_same, inputs_of
from rayfl.engine.locks import Temporary, clear_temporary, locked
from rayfl.engine.simulation import STEP_SECONDS, Simulation, load_data
from rayfl.engine.termination import deferred, reason
from rayfl.experiment import Experiment, load_experiment, read_experiment
from rayfl.exporting.preparation import Preparation
from rayfl.listeners import Listener, call, end, note, tell, tell_past
from rayfl.methods.base import Deployment
from rayfl.metrics import ANSWERS, EVALUATED, MATRICES, Line
from rayfl.networks import at_checkpoint, place_of
from rayfl.results import clients
from rayfl.results.folder import Kind, RunFolder, Status

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import nn

LOADING, WRITING = "loading the data", "writing tables and plots"
STARTING = {"ray": "starting Ray and the client actors", "serial": "preparing the first round"}
"""Executor -> phase of a run before its first round."""
Given = Experiment | Mapping[str, Any] | str | Path
"""An experiment, its plain data, or its YAML file."""
FREE = ("rounds", "run", "listeners", "published", "question", "titles")
"""Sections of a run's or a sweep's file that may change on resume. Not `experiment` of a sweep: Ray Tune restores the
resources of its trials."""


class Running(Protocol):
    """A simulation in this process or in a server actor."""

    place: str
    """Its resources, for the user: "2 actors on CPUs; no GPU found"."""

    def step(self, seconds: float = STEP_SECONDS) -> list[Line] | None: ...
    def save(self, folder: Path) -> None: ...
    def restore(self, folder: Path) -> tuple[int, list[str]]: ...
    def deployment(self, capacity: float, client: int | None = None) -> Deployment: ...

    @property
    def client_scores(self) -> np.ndarray: ...
    @property
    def client_table(self) -> np.ndarray: ...


# a whole run


def run(
    experiment: Given,
    folder: str | Path | None = None,
    *,
    resume: Resume = False,
    address: str | None = None,
    listeners: Sequence[Listener] = (),
    arrays: Arrays | None = None,
) -> "Result":
    """Run an experiment (an object, plain data, or the path of a YAML file) to its end, or until a listener ends it.

    `folder` receives the configuration, a line of metrics per round, the result and checkpoints. Default: a temporary
    folder that is deleted with the result. `resume`: continue from the folder's last checkpoint; the result equals that
    of an uninterrupted run bit for bit. It is refused if the data, files or code have changed, unless it is "changed".
    `address`: Ray cluster to connect to. Default: the cluster that this process is
    connected to, otherwise RAY_ADDRESS, otherwise a new local cluster that ends with the run. `arrays`: the data, if
    they are already loaded.

    Raises a ConfigError for invalid input before anything is started or written.

    >>> clients = {"count": 4, "capacities": [1, 0.25]}
    >>> result = run({"rounds": 1, "model": "digits_cnn", "clients": clients, "run": {"executor": "serial"}})
    >>> len(result.metrics), type(result.submodel(0.25)).__name__
    (1, 'Sequential')
    """
    experiment = as_experiment(experiment)
    if resume and folder is None:
        raise ConfigError(f"resume: {resume} is not valid without a folder. Allowed: the folder of the run")
    temporary = Temporary() if folder is None else None
    path = temporary.path / "run" if temporary else absolute(folder)
    heard = _Heard()
    if not isinstance(listeners, Sequence):
        raise ConfigError(f"listeners: {shown(listeners)} is not valid. Allowed: a list of objects of rayfl.Listener")
    listeners = experiment.all_listeners([*listeners, heard])
    with claimed(path, experiment.plain(), resume):
        _in_phase(listeners, LOADING)
        arrays = loaded(experiment, arrays)
        inputs = inputs_of([experiment], arrays)
        notes = check_same(path, RunFolder.open(path).inputs, inputs, resume) if resume else []
        notes += _with_metrics(path) if resume else []
        _in_phase(listeners, STARTING[experiment.run.executor])
        # the run's folder is made after Ray has accepted the run
        with opened(experiment, arrays, path, address) as simulation:
            round, more = simulation.restore(path / CHECKPOINTS) if resume else (0, [])
            record = _open_folder(path, experiment, inputs)
            with ending(record, lambda status: _tell_end(record, listeners, status)):
                if not round and (made := record.count()):
                    more.append(f"{path / CHECKPOINTS}: there is no checkpoint; rounds 1 to {made} are repeated")
                record.truncate_after(round)
                for listener in listeners:
                    call(listener, "on_start", experiment.plain(), path, round)
                    call(listener, "on_place", simulation.place)
                if not resume:
                    more += [*experiment.notes, *arrays.notes]
                else:
                    done = round >= experiment.rounds
                    more.append(f"all {round} rounds are done" if done else f"resuming at round {round + 1}")
                note(listeners, *notes, *more)
                past = record.rounds()
                _loop(simulation, record, experiment, listeners, bool(past) and tell_past(listeners, past))
                # under privacy, the noise changes the model in every round
                without = [] if experiment.privacy else [line for line in record.rounds() if not line.get("clients")]
                stuck = Counter("refusals" in line for line in without)
                for refused, why in ((True, "all updates were refused"), (False, "too few updates arrived")):
                    if stuck[refused]:
                        note(listeners, f"rounds in which {why}, and the model did not change: {stuck[refused]}")
    return Result(experiment, record, tuple(heard._notes), temporary)


def loaded(experiment: Experiment, given: Arrays | None) -> Arrays:
    if given is not None and not isinstance(given, Arrays):
        raise ConfigError(
            f"arrays: {shown(given)} is not valid. Allowed: an object of rayfl.Arrays, such as the answer of "
            "`data.arrays()` of an experiment; data of your own are a section: data: rayfl.InMemory(x, y)"
        )
    return load_data(experiment, given)


class _Heard(Listener):
    """Keeps the notes of a run."""

    _notes: list[str] = PrivateAttr(default_factory=list)

    def on_note(self, text: str) -> None:
        self._notes.append(text)


def _in_phase(listeners: Sequence[Listener], phase: str) -> None:
    for listener in listeners:
        call(listener, "on_phase", phase)


def _tell_end(record: RunFolder, listeners: Sequence[Listener], status: Status) -> None:
    if status == "stopped":
        note(listeners, _stopped_at(record))
    end(listeners, status)


def _stopped_at(record: RunFolder) -> str:
    """Return a note on the last round, and on the checkpoint from which `--resume` continues."""
    rounds, saved = len(record.rounds()), [round_of(path) for path in complete(record.path / CHECKPOINTS)]
    if not saved:
        return f"stopped after round {rounds}, without a checkpoint"
    return f"stopped after round {rounds}, with a checkpoint" + (
        f" of round {saved[-1]}" if saved[-1] != rounds else ""
    )


def _loop(
    simulation: Running, record: RunFolder, experiment: Experiment, listeners: Sequence[Listener], ended: bool
) -> None:
    """Run rounds to the end or to a signal, with regular checkpoints and one at the end. `ended`: a listener ends the
    run with the next evaluated round, which may be the last one made."""
    folder, past = record.path / CHECKPOINTS, record.rounds()
    best = None
    if experiment.run.checkpoint == BEST:
        note(listeners, *remove_damaged_best(folder, past))
        best = Best(folder, experiment.chosen_by, experiment.scores[0].better, past)
        if past and EVALUATED in past[-1]:
            best.resume(past[-1])
    elif complete(folder / BEST):
        note(listeners, f"{folder / BEST}: removed, because run.checkpoint is {experiment.run.checkpoint} now")
        remove(folder / BEST)
    over = ended and EVALUATED in past[-1]
    saved = time.monotonic()
    seconds = min(STEP_SECONDS, experiment.run.checkpoint_seconds)
    with deferred(lambda: note(listeners, "stopping after this step; a second signal stops at once")) as notice:
        while not over and notice.given is None:
            try:
                lines = simulation.step(seconds)
            except Diverged as error:
                record.append(error.lines)
                tell(listeners, error.lines)
                raise
            if lines is None:
                break
            record.append(lines)
            is_evaluated = bool(lines) and EVALUATED in lines[-1]
            if is_evaluated and experiment.evaluation.clients:
                record.save_clients(simulation.client_scores)
                if experiment.run.client_scores == "all":
                    record.save_client_table(lines[-1]["round"], simulation.client_table)
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
    if best is not None and not complete(folder / BEST):
        note(listeners, f"no best checkpoint: no evaluation has a better {experiment.chosen_by} than earlier ones")


@dataclass(frozen=True)
class Result:
    """A finished run, read from its folder.

    >>> result = run({"rounds": 1, "model": "digits_cnn", "clients": {"count": 2}, "run": {"executor": "serial"}})
    >>> len(result.lines), "accuracy_mean" in result.summary
    (1, True)
    """

    experiment: Experiment
    folder: RunFolder
    notes: tuple[str, ...] = ()
    """Messages for the user: warnings on the experiment, refused updates, why a listener ended the run."""
    _temporary: Temporary | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        judge = self.folder.facts.judge
        value = self.summary.get(judge)
        parts = [self.experiment.method.name, f"{len(self.lines)} rounds"]
        parts += [] if value is None else [f"{judge}={value:.4f}"]
        parts += [f"notes={list(self.notes)}"] if self.notes else []
        return f"Result({', '.join(parts)}, folder={str(self.folder.path)!r})"

    @property
    def lines(self) -> list[Line]:
        """The metrics of each round."""
        return self.folder.rounds()

    @property
    def metrics(self) -> "pd.DataFrame":
        """The metrics as a table: one row per round, one column per metric, NaN where a round was not evaluated."""
        return table_of(self.lines)

    @property
    def clients(self) -> "pd.DataFrame":
        """The scores of clients on their own test data, one row per evaluated round and client: `round`, `client`,
        `capacity`, `samples` and every score with `run.client_scores: all`; otherwise of the last evaluation, and only
        the first score."""
        return clients.frame(self.folder.path, self.folder.facts, self.lines)

    @property
    def matrices(self) -> dict[str, dict[float, np.ndarray]]:
        """Matrices of the test set at the last evaluation: score ("confusion") -> capacity -> [label, prediction]."""
        from rayfl.results.matrices import last_matrices

        return last_matrices(self.lines)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of result.json."""
        return self.folder.result

    @property
    def plots(self) -> "dict[str, Figure]":
        """All plots of the run, by name."""
        from rayfl.results.report import figures

        return figures([self.folder.record()], self.experiment)

    def submodel(
        self, capacity: float, client: int | None = None, *, best: bool = False, raw: bool = False
    ) -> "nn.Module":
        """Return the network deployed at this capacity, or the client's personal network: samples [B, ...] as the data
        set stores them -> logits [B, C], or numbers in the units of the targets. `best`: of the best round instead of
        the last, if `run.checkpoint` was best. `raw`: the bare network, which takes prepared samples."""
        from rayfl.exporting.submodels import as_module

        place = place_of(self.folder.path, best)
        _, deployed = at_checkpoint(self.experiment, place, capacity, client, print)
        return as_module(deployed, None if raw else Preparation.of(self.experiment, self.experiment.data.arrays))


# shared


def as_experiment(given: Given) -> Experiment:
    if isinstance(given, str | Path):
        return load_experiment(given)
    if not isinstance(given, Experiment | Mapping):
        raise ConfigError(
            f"experiment: {shown(given)} is not valid. Allowed: an Experiment, a mapping of its sections, or a YAML "
            "file's path"
        )
    return given if isinstance(given, Experiment) else read_experiment(given, "experiment")


@contextmanager
def opened(experiment: Experiment, arrays: Arrays, folder: Path, address: str | None = None) -> Iterator[Running]:
    """Open the experiment's simulation in this process or on Ray. `folder` is for the states of clients."""
    if experiment.run.executor == "serial":
        if address is not None:
            raise ConfigError(f"address: {address} is not valid with run.executor: serial. Allowed: run.executor: ray")
        device, place = of_serial(experiment.run.gpus)
        simulation = Simulation(experiment, arrays, folder, device=device)
        simulation.place = place
        yield simulation
        return
    from rayfl.engine.on_ray.cluster import running

    with running(experiment, arrays, folder, address) as simulation:
        yield simulation


@contextmanager
def claimed(path: Path, config: Mapping[str, Any], resume: Resume, kind: Kind = "run") -> Iterator[None]:
    """Lock a folder that `check_folder` allows."""
    check_folder(path, config, resume, kind)
    clear_temporary()
    with locked(path):
        # another process may have used it meanwhile
        check_folder(path, config, resume, kind)
        yield


@contextmanager
def ending(record: RunFolder, told: Callable[[Status], None]) -> Iterator[None]:
    """Record how the block ends, and then tell it: a run, sweep or scale study is finished, failed by an exception, or
    stopped by a signal."""
    status: Status = "stopped"
    error = None
    try:
        yield
        status = "finished"
    except Exception as failure:
        status, error = "failed", reason(failure)
        raise
    finally:
        record.finish(status, error)
        told(status)


def check_folder(path: Path, config: Mapping[str, Any], resume: Resume, kind: Kind = "run") -> None:
    """Raise a ConfigError unless a folder is new or, with `resume`, holds a run or sweep of the same configuration."""
    if not resume:
        check_place(path)
        RunFolder.require_new(path, kind)
        if complete(path / CHECKPOINTS):
            raise ConfigError(f"{path}: the folder has checkpoints of another run. Allowed: a new folder")
        return
    record = RunFolder.open(path)
    if record.kind != kind:
        raise ConfigError(f"{path}: the folder is of `rayfl {record.kind}`. Allowed: a folder of `rayfl {kind}`")
    old, new = ({k: v for k, v in c.items() if k not in FREE} | _threads(c) for c in (record.config, config))
    if record.kind == "sweep" and (changed := differences(old, json.loads(json.dumps(new)))):
        raise ConfigError(
            f"{path}: the sweep was started with other settings: {'; '.join(changed)}. Allowed: the same settings, "
            "because a sweep cannot be continued with more rounds, points, rows or seeds. Hint: run the changed file "
            "in a new folder (--name NAME), and `rayfl compare` the two"
        )
    same_config(path / "config.json", old, new)
    if record.kind == "run" and config["rounds"] < (done := record.whole_rounds()[0]):
        raise ConfigError(f"{path}: rounds: {config['rounds']} is not valid. Allowed: at least the {done} rounds done")


def _threads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the one setting of a run's section `run` that changes the last bits of results."""
    run = config.get("run") or {}
    return {"run": {"threads": run["threads"]}} if "threads" in run else {}


def _with_metrics(path: Path) -> list[str]:
    """Remove checkpoints of rounds whose metrics are missing or damaged; return notes on it."""
    whole, wrong = RunFolder.open(path).whole_rounds()
    why = wrong or f"{path / 'metrics.jsonl'}: ends after round {whole}"
    if forget_after(path / CHECKPOINTS, whole, why):
        return [f"{why}; resuming from an earlier checkpoint"]
    return [f"{why}; this round and later ones are repeated"] if wrong else []


def _open_folder(path: Path, experiment: Experiment, inputs: Inputs) -> RunFolder:
    """Open the folder's run and mark it as running, or make a new one."""
    if RunFolder.exists(path):
        record = RunFolder.open(path)
        record.resume(experiment.plain(), experiment.facts(), inputs)
        return record
    return RunFolder.create(
        path,
        experiment.method.name,
        experiment.plain(),
        experiment.tags(),
        experiment.facts(),
        costs=experiment.costs(),
        inputs=inputs,
    )


def table_of(lines: Sequence[Line]) -> "pd.DataFrame":
    import pandas as pd

    numbers = [{name: value for name, value in line.items() if name not in (MATRICES, ANSWERS)} for line in lines]
    return pd.DataFrame(numbers, columns=None if lines else ["round"]).set_index("round")
