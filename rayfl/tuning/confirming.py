# pyright: reportIncompatibleMethodOverride=false
"""The trials of a fair sweep in one Tuner: the search, then every row's best point on the other seeds."""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.search.basic_variant import BasicVariantGenerator

from rayfl.tuning.search import trial_of


class Confirming(BasicVariantGenerator):
    """Ray Tune's list of trials, which continues with a row's confirming trials once the row's search has ended.

    A second Tuner would start the processes of all trials again; here the next trial takes them over. Ray Tune stores
    this object's attributes with its snapshots and restores them.
    """

    def __init__(self, searched: Mapping[str, int], confirm: Callable[[str], Sequence[dict[str, Any]]]):
        """`searched`: the number of search trials of every row. `confirm`: a row's confirming trials; called when all
        search trials of the row have finished."""
        super().__init__()
        self.left = dict(searched)
        self.confirm = confirm
        self.ended: dict[str, set[str]] = defaultdict(set)
        """Row -> ids of its trials that ended without an error."""
        self.rows: dict[str, str] = {}
        """Id of a trial -> its row."""

    def add_configurations(self, experiments: Any) -> None:
        super().add_configurations(experiments)
        [self.experiment] = experiments

    def next_trial(self) -> Trial | None:
        trial = super().next_trial()
        if trial is None and (ready := [row for row, count in self.left.items() if len(self.ended[row]) == count]):
            more = copy.copy(self.experiment)
            more.spec = more.spec | {
                "config": {"trial": tune.grid_search([t for row in ready for t in self.confirm(row)])}
            }
            super().add_configurations(more)
            self.left = {row: count for row, count in self.left.items() if row not in ready}
            self._finished = False
            trial = super().next_trial()
        if trial is not None:
            self.rows[trial.trial_id] = trial_of(trial.config)[0]
        return trial

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        super().on_trial_complete(trial_id, result, error)
        if not error:
            self.ended[self.rows[trial_id]].add(trial_id)

    def is_finished(self) -> bool:
        """Return whether no trial will follow. A row with a failed trial is not confirmed."""
        running = {self.rows[trial_id] for trial_id in self._live_trials}
        waiting = any(row in running or len(self.ended[row]) == count for row, count in self.left.items())
        return self._finished and not waiting
