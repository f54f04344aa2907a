# pyright: reportIncompatibleMethodOverride=false
"""The trials of a fair sweep in one Tuner: the search, wider grids, then every row's best point on the other seeds."""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.search.basic_variant import BasicVariantGenerator

from rayfl.tuning.search import trial_of

Trials = Callable[[str, Set[str]], Sequence[dict[str, Any]]]
"""Row, ids of its search trials that have ended -> configurations of trials."""


class Following(BasicVariantGenerator):
    """Ray Tune's list of trials. Once a row's search has ended, it continues with wider grids, if the best value is at
    the end of one, and then with the row's confirming trials.

    A second Tuner would start the processes of all trials again; here the next trial takes them over. Ray Tune stores
    this object's attributes with its snapshots and restores them, except for the functions: the sweep's folder,
    which they read, may have been moved.
    """

    current: "Following | None" = None

    def __init__(
        self, searched: Mapping[str, int], settled: Callable[[Set[str]], bool], widened: Trials, confirming: Trials
    ):
        """`searched`: number of search trials of every row. Called when all search trials of a row have finished:
        `settled`, for whether their records have too, then `widened`, for further ones, and if there are none,
        `confirming`, for trials on other seeds."""
        super().__init__()
        self.left = dict(searched)
        self.settled, self.widened, self.confirming = settled, widened, confirming
        self.ended: dict[str, set[str]] = defaultdict(set)
        """Row -> ids of its trials that ended without an error, and of those of wider grids that ended."""
        self.rows: dict[str, str] = {}
        """Id of a trial -> its row."""
        self.outer: list[dict[str, Any]] = []
        """Configurations of the trials of wider grids."""
        self.optional: set[str] = set()
        """Their ids."""
        Following.current = self

    def __reduce__(self):
        # Tune pickles its searcher; unpickling returns the current process's
        return _current, ()

    def set_state(self, state: dict[str, Any]) -> None:
        functions = {"settled": self.settled, "widened": self.widened, "confirming": self.confirming}
        super().set_state(state | functions)

    def add_configurations(self, experiments: Any) -> None:
        super().add_configurations(experiments)
        [self.experiment] = experiments

    def next_trial(self) -> Trial | None:
        trial = super().next_trial()
        if trial is None and (ready := [row for row in self.left if self._has_ended(row)]):
            if following := [trial for row in ready for trial in self._following(row)]:
                more = copy.copy(self.experiment)
                more.spec = more.spec | {"config": {"trial": tune.grid_search(following)}}
                super().add_configurations(more)
                self._finished = False
                trial = super().next_trial()
        if trial is not None:
            self.rows[trial.trial_id] = trial_of(trial.config)[0]
            if trial.config["trial"] in self.outer:
                self.optional.add(trial.trial_id)
        return trial

    def _has_ended(self, row: str) -> bool:
        return len(self.ended[row]) == self.left[row] and self.settled(self.ended[row])

    def _following(self, row: str) -> Sequence[dict[str, Any]]:
        if widened := self.widened(row, self.ended[row]):
            self.left[row] += len(widened)
            self.outer += widened
            return widened
        del self.left[row]
        return self.confirming(row, self.ended[row])

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        super().on_trial_complete(trial_id, result, error)
        ended = self.ended[self.rows[trial_id]]
        if not error or trial_id in self.optional:
            ended.add(trial_id)
        else:
            # it may have ended before, without a record
            ended.discard(trial_id)

    def is_finished(self) -> bool:
        """Return whether no trial will follow. A row with a failed trial is not confirmed."""
        running = {self.rows[trial_id] for trial_id in self._live_trials}
        waiting = any(row in running or len(self.ended[row]) == count for row, count in self.left.items())
        return self._finished and not waiting


def _current() -> Following | None:
    return Following.current
