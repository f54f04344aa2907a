# pyright: reportIncompatibleMethodOverride=false
# (Searcher.suggest is typed without the word that it may answer)
"""A searcher of Ray Tune that keeps to the budget of networks."""

from typing import Any

from ray.tune.search import Searcher

from rayfl.tuning.search import point_of, searcher_of
from rayfl.tuning.space import Excess, Point
from rayfl.tuning.sweep import DRAWS, Sweep


class Within(Searcher):
    """A searcher of Ray Tune that is asked again until its point is within the budget. It is told that the others
    failed, and no trial is made of them."""

    def __init__(self, searcher: Searcher, sweep: Sweep, row: str):
        super().__init__(searcher.metric, searcher.mode)
        self.searcher, self.sweep, self.row = searcher, sweep, row
        self.asked: dict[str, str] = {}

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict, **spec) -> bool:
        return self.searcher.set_search_properties(metric, mode, config, **spec)

    def suggest(self, trial_id: str) -> dict | str | None:
        outside: list[tuple[Excess, Point]] = []
        while len(outside) < DRAWS:
            asked = f"{trial_id}.{len(outside)}"
            config = self.searcher.suggest(asked)
            if config is None or config == Searcher.FINISHED:
                return config
            point = point_of(config)
            excess = self.sweep.excess(self.row, point)
            if not excess.by:
                self.asked[trial_id] = asked
                return config
            self.searcher.on_trial_complete(asked, error=True)
            outside.append((excess, point))
        raise self.sweep.too_few(self.row, len(self.asked), outside)

    def on_trial_result(self, trial_id: str, result: dict) -> None:
        self.searcher.on_trial_result(self.asked[trial_id], result)

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        self.searcher.on_trial_complete(self.asked[trial_id], result=result, error=error)

    # Tune saves what `searcher` knows by itself

    def get_state(self) -> dict:
        return {"asked": dict(self.asked)}

    def set_state(self, state: dict) -> None:
        self.asked = state["asked"]


def searching(sweep: Sweep, row: str) -> Any:
    """Tune's searcher of a row, which keeps to the budget; None for the random one."""
    searcher = searcher_of(sweep.search, sweep.mode, sweep.where)
    return searcher if sweep.search.budget is None or searcher is None else Within(searcher, sweep, row)
