"""Sweeps, for the command line and for notebooks.

found = rayfl.sweep("tune_configs/quickstart.yaml", "runs/quickstart")
found.table                            # pandas DataFrame: one row per run of the best points
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayfl.config import ConfigError
from rayfl.data.base import Arrays
from rayfl.data.notes import notes_on
from rayfl.driver import LOADING, WRITING, claimed, ending
from rayfl.engine.files import absolute
from rayfl.engine.inputs import Inputs, Resume, check_same, inputs_of
from rayfl.engine.on_ray.cluster import cluster
from rayfl.engine.on_ray.shared import require_shared
from rayfl.engine.simulation import check_with
from rayfl.experiment import Experiment
from rayfl.results.console import SweepProgress
from rayfl.results.findings import findings
from rayfl.results.folder import RunFolder, records
from rayfl.results.report import figures, write_labels, write_report
from rayfl.results.rows import Record
from rayfl.results.tuned import Best
from rayfl.tuning.load import load_sweep, read_sweep
from rayfl.tuning.recorder import Recorder
from rayfl.tuning.stages import check_room, checked, run_sweep
from rayfl.tuning.sweep import Sweep

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Comparison:
    """A finished sweep: its folder, the runs of every row's best point, and the tuned values.

    >>> run = {"method": "heterofl", "seed": 0, "accuracy_mean": 0.9, "path": "runs/a/trials/b"}
    >>> Comparison(folder=None, best=[run], tuned={}).table.to_dict("records")
    [{'method': 'heterofl', 'seed': 0, 'accuracy_mean': 0.9}]
    """

    folder: RunFolder
    best: list[Record]
    tuned: Mapping[str, Best]

    @property
    def table(self) -> "pd.DataFrame":
        """One row per run: the label as `method`, the seed, and the numbers of its result.json."""
        import pandas as pd

        hidden = {"params", "facts", "path", "id", "sweep", "status", "error", "label"}
        return pd.DataFrame([{key: v for key, v in run.items() if key not in hidden} for run in self.best])

    @property
    def plots(self) -> "dict[str, Figure]":
        """All plots of the comparison, by name."""
        return figures(self.best)


def sweep(
    plan: Sweep | Mapping[str, Any] | str | Path,
    folder: str | Path,
    *,
    resume: Resume = False,
    address: str | None = None,
    storage: str | None = None,
    progress: SweepProgress | None = None,
    follow: Callable[[Path], None] = lambda path: None,
    arrays: Arrays | None = None,
) -> Comparison:
    """Tune every row of a comparison with the same budget on Ray, and write tables and plots into a folder.

    `plan`: a sweep's file, or its content, which may contain objects. `storage`: s3://BUCKET/FOLDER for the checkpoints
    of trials, if the nodes of a cluster share no folder. `follow` is called with the folder of the sweep and of every
    trial when it starts. Raise ConfigError for invalid input before anything is started or written, and
    KeyboardInterrupt if the user stopped the sweep.

    >>> sweep({"experiment": {"model": "digits_cnn", "rounds": 0}, "rows": {"a": {}}}, "runs/a")
    Traceback (most recent call last):
    rayfl.config.errors.ConfigError: sweep: experiment.rounds: 0 is not valid. Allowed: at least 1
    """
    if not isinstance(plan, Sweep):
        plan = load_sweep(plan) if isinstance(plan, str | Path) else read_sweep(plan)
    folder, storage = absolute(folder), None if storage is None else checked(storage)
    with claimed(folder, plan.plain(), resume, "sweep"):
        progress = progress or SweepProgress(plan.trials, plan.first.rounds, plan.search.metric, plan.mode)
        if arrays is None:
            progress.phase(LOADING)
            arrays = plan.first.data.arrays()
        inputs = inputs_of(list(map(plan.example, plan.rows)), arrays)
        changes = check_same(folder, RunFolder.open(folder).inputs, inputs, resume) if resume else []
        splits, notes = _splits(plan, arrays)
        # before Ray starts, and again with what a running cluster has
        check_room(plan, address)
        progress.phase("starting Ray")
        with cluster(address):
            check_room(plan, address)
            if storage is None:
                require_shared(folder)
            record = _open_sweep(folder, plan, inputs)
            follow(record.path)
            progress.begin(plan.name, record.path)
            for text in changes if resume else [*plan.notes, *notes]:
                progress.note(text)
            with ending(record, progress.end):
                best = run_sweep(plan, record, arrays, Recorder(plan, record, progress, follow), storage)
                progress.phase(WRITING)
                found = findings(folder, best, records(folder, record.id))
                write_report(found, progress.note)
                for name, experiment in splits.items():
                    write_labels(folder / "plots" / name, experiment, arrays)
    return Comparison(record, best, found.tuned)


def _open_sweep(folder: Path, plan: Sweep, inputs: Inputs) -> RunFolder:
    if RunFolder.exists(folder):
        record = RunFolder.open(folder)
        record.resume(plan.plain(), inputs=inputs)
        return record
    tags = {"config": plan.where, "rows": ", ".join(plan.rows)}
    return RunFolder.create(folder, plan.name, plan.plain(), tags, plan.facts(), inputs=inputs, kind="sweep")


def _splits(plan: Sweep, arrays: Arrays) -> tuple[dict[str, Experiment], list[str]]:
    """Return plot name -> experiment, one for each different split of the data in the rows, and notes on the data.
    Raise a ConfigError, with the row, for what a row's data and files show."""
    splits: dict[str, tuple[str, Experiment]] = {}
    notes: dict[str, None] = {}
    for row in plan.rows:
        experiment = plan.example(row)
        evaluation = experiment.evaluation
        key = repr((experiment.partition, experiment.clients.count, evaluation.holdout, evaluation.local_holdout))
        try:
            if key not in splits:
                notes |= dict.fromkeys(notes_on(experiment.data, arrays, experiment.federate(arrays)))
            check_with(experiment, arrays)
        except ConfigError as error:
            raise ConfigError(f"{plan.place(row)}: {error}") from None
        splits.setdefault(key, (f"labels-{row}" if splits else "labels", experiment))
    return dict(splits.values()), list(notes)
