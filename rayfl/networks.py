"""Networks of finished runs: from a checkpoint, and as files."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rayfl.config import ConfigError, shown
from rayfl.data.base import Arrays
from rayfl.data.datasets import Datasets
from rayfl.data.instructions import Instructions
from rayfl.data.memory import InMemory
from rayfl.engine.checked import Checked
from rayfl.engine.checkpoints import BEST, CHECKPOINTS, complete, latest
from rayfl.engine.files import absolute, beside, check_place
from rayfl.engine.locks import Temporary
from rayfl.engine.simulation import Simulation, load_data
from rayfl.experiment import Experiment, read_experiment
from rayfl.exporting.preparation import Preparation
from rayfl.methods.base import Deployment
from rayfl.metrics import label
from rayfl.results.folder import RunFolder

if TYPE_CHECKING:
    from torch import nn


def export(
    folder: str | Path,
    capacity: float,
    to: str | Path,
    client: int | None = None,
    *,
    row: str | None = None,
    best: bool = False,
    raw: bool = False,
    data: InMemory | Datasets | None = None,
    notify: Callable[[str], None] = print,
) -> "nn.Module":
    """Write the network deployed at this capacity, or a client's personal network, as files; return it. It takes
    samples as the data set stores them, and predicts numbers in the units of the targets.

    `folder`: a run with a checkpoint, or a sweep, of which the best trial of `row` is exported. `best`: of the best
    round instead of the last, if `run.checkpoint` was best. `raw`: the bare network, which takes prepared samples.
    `data`: the arrays or Datasets, if they were objects; only needed for norms without statistics, and for tables and
    series. See `rayfl.exporting.submodels` for the list of files.

    >>> import tempfile, rayfl, torch
    >>> clients = {"count": 2, "capacities": [1, 0.25]}
    >>> given = {"rounds": 1, "model": "digits_cnn", "clients": clients, "run": {"executor": "serial"}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = rayfl.run(given, f"{folder}/run")
    ...     network = export(f"{folder}/run", 0.25, f"{folder}/submodel", notify=lambda text: None)
    >>> network(torch.zeros(3, 1, 8, 8, dtype=torch.uint8)).shape
    torch.Size([3, 10])
    """
    from rayfl.exporting.submodels import export_submodel

    absolute(to, "to")
    folder, to = absolute(folder), Path(to)
    record = RunFolder.open(folder)
    if record.kind == "sweep" or row is not None:
        record = _best_trial(record, row)
        folder = record.path
        notify(f"exporting {folder}")
    experiment = read_experiment(record.config, str(folder / "config.json"))
    if isinstance(experiment.data, InMemory | Datasets) and isinstance(data, type(experiment.data)):
        experiment = experiment.with_(data=experiment.data.holding(data))
    place = place_of(folder, best)
    check_place(to)
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"{to}: the folder is not empty. Allowed: a new or empty folder")
    round, deployed = at_checkpoint(experiment, place, capacity, client, notify)
    if deployed.is_start:
        owner = "no client is given" if client is None else f"client {client} has not taken part yet"
        notify(
            f"this network is untrained: method {experiment.method.name} trains a personal network per client, and "
            f"{owner}"
        )
    about = {"capacity": capacity, "client": client, "round": round, "method": experiment.method.name}
    around = Preparation.of(experiment, experiment.data.arrays)
    about |= {"samples": around.plain()}
    with beside(absolute(to), "the exported submodel") as partial:
        return export_submodel(deployed, partial, about, notify, experiment.data.attached, None if raw else around)


def generate(
    folder: str | Path,
    prompts: Sequence[str],
    capacity: float,
    client: int | None = None,
    *,
    best: bool = False,
    max_new_tokens: int = 128,
    notify: Callable[[str], None] = print,
) -> list[str]:
    """Return what the language model deployed at this capacity, or a client's personal one, answers to each prompt.

    A prompt is a user's message, put into the template of the run's data (data set instructions). Tokens are the most
    likely ones. `folder`, `best`: as for `export`.

    >>> generate("/none", ["Who are you?"], capacity=1)
    Traceback (most recent call last):
    rayfl.config.errors.ConfigError: /none: the folder contains no run. Allowed: a folder with a run.json
    """
    from rayfl.exporting.submodels import as_module

    folder = absolute(folder)
    experiment = read_experiment(RunFolder.open(folder).config, str(folder / "config.json"))
    data = experiment.data
    if not isinstance(data, Instructions):
        raise ConfigError(f"generate: the run has data set {data.name}. Allowed: a run with data set instructions")
    _, deployed = at_checkpoint(experiment, place_of(folder, best), capacity, client, notify)
    network: Any = as_module(deployed)
    if not hasattr(network, "generate"):
        raise ConfigError(
            f"generate: model {deployed.net.model.name} does not generate. Allowed: causal_lm, llama or gpt2, also as "
            "the base of lora"
        )
    system = [] if data.system is None else [{"role": "system", "content": data.system}]
    tokens = [data.chat.prompt([*system, {"role": "user", "content": prompt}]) for prompt in prompts]
    found = network.generate(tokens, max_new_tokens, data.chat.ends)
    return [data.chat.text(ids) for ids in found]


def deployments(
    folder: str | Path, *, arrays: Arrays | None = None, notify: Callable[[str], None] = print
) -> dict[float, Deployment]:
    """Return the network of every capacity at a run's newest valid checkpoint, with its norms' statistics, largest
    capacity first. `arrays`: the data, if they are already loaded."""
    record = RunFolder.open(folder)
    experiment = read_experiment(record.config, str(record.path / "config.json"))
    with _restored(experiment, place_of(record.path, best=False), notify, arrays) as (_, simulation):
        return {capacity: simulation.deployment(capacity) for capacity in experiment.clients.all_capacities}


def _best_trial(sweep: RunFolder, row: str | None) -> RunFolder:
    """Return the trial with the best point of a sweep's row; of several seeds, the first."""
    from rayfl.results.findings import found_in

    if sweep.kind != "sweep":
        raise ConfigError(f"--row: {sweep.path} has no rows. Allowed: only with the folder of a sweep")
    paths = {record["label"]: record["path"] for record in reversed(found_in(sweep.path).best)}
    if row not in paths:
        problem = "the folder is a sweep" if row is None else f"row {row!r} has no evaluated trial"
        raise ConfigError(f"{sweep.path}: {problem}. Allowed: --row with one of {', '.join(sorted(paths))}")
    return RunFolder.open(paths[row])


def place_of(folder: Path, best: bool) -> Path:
    """Return the folder of a run's checkpoints, or of the best one."""
    checkpoints = folder / CHECKPOINTS
    if not complete(checkpoints):
        raise ConfigError(f"{folder}: the folder has no checkpoint. Allowed: the folder of a run or a sweep")
    if best and not complete(checkpoints / BEST):
        raise ConfigError(f"{folder}: the run has no best checkpoint. Allowed: a run with `run.checkpoint: best`")
    return checkpoints / BEST if best else checkpoints


def at_checkpoint(
    experiment: Experiment, place: Path, capacity: float, client: int | None, notify: Callable[[str], None]
) -> tuple[int, Deployment]:
    """Return the round of the newest valid checkpoint in a folder, and the network of a capacity or client. Load the
    data only if norms need statistics from it."""
    capacity = check_device(experiment, capacity, client)
    found = latest(place, experiment.result_config(), notify)
    assert found is not None
    if found.partial_round:
        notify(_note_inside(place, found.round))
    personal = None if client is None else found.client_states.personal(client)
    deployed = Checked(experiment.bound()).deploy(found.state, found.round, capacity, personal)
    if deployed.has_statistics or experiment.evaluation.statistics == "batch":
        return found.round, deployed
    with _restored(experiment, place, lambda note: None) as (round, simulation):
        return round, simulation.deployment(capacity, client)


@contextmanager
def _restored(
    experiment: Experiment, place: Path, notify: Callable[[str], None], arrays: Arrays | None = None
) -> Iterator[tuple[int, Simulation]]:
    """Yield the round of the newest valid checkpoint in a folder, and the simulation at that round."""
    with Temporary() as scratch:
        simulation = Simulation(experiment, load_data(experiment) if arrays is None else arrays, scratch)
        round, notes = simulation.restore(place)
        for note in [*notes, *([_note_inside(place, round)] if simulation.partial_round else [])]:
            notify(note)
        yield round, simulation


def _note_inside(place: Path, round: int) -> str:
    """Return a note on a checkpoint of a round whose server tasks are not done."""
    return (
        f"{place}: the newest checkpoint is inside round {round + 1}, whose server tasks are not done. Hint: resume "
        "the run for the network of a whole round"
    )


def check_device(experiment: Experiment, capacity: float, client: int | None, arrays: Arrays | None = None) -> float:
    """Return the experiment's capacity of this name (`metrics.label`). Raise a ConfigError for an unknown capacity or
    client. `arrays`: as for `deployments`."""
    levels, clients = {label(c): c for c in experiment.clients.all_capacities}, experiment.clients.count
    if isinstance(capacity, bool) or not isinstance(capacity, int | float):
        raise ConfigError(f"capacity: {shown(capacity)} is not valid. Allowed: {', '.join(levels)}")
    if client is not None and (isinstance(client, bool) or not isinstance(client, int)):
        raise ConfigError(f"client: {shown(client)} is not valid. Allowed: 0 to {clients - 1}")
    if label(capacity) not in levels:
        raise ConfigError(f"capacity: {label(capacity)} is not valid. Allowed: {', '.join(levels)}")
    if client is not None and not 0 <= client < clients:
        raise ConfigError(f"client: {client} is not valid. Allowed: 0 to {clients - 1}")
    if client is not None and experiment.clients.assignment == "fixed":
        own = label(_capacity(experiment, client, arrays))
        if own != label(capacity):
            raise ConfigError(f"capacity: {label(capacity)} is not valid with client {client}. Allowed: {own}, its own")
    return levels[label(capacity)]


def _capacity(experiment: Experiment, client: int, arrays: Arrays | None) -> float:
    """Return the fixed capacity of a client: that of its block of ids, or the one that its device can train."""
    if experiment.system is None or not experiment.system.gives_capacities:
        return experiment.clients.capacity(client, experiment.seed, 0)
    with Temporary() as scratch:
        simulation = Simulation(experiment, load_data(experiment) if arrays is None else arrays, scratch)
        return float(simulation.schedule.capacities(np.array([client]), 0)[0])
