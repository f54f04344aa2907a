# pyright: reportIncompatibleMethodOverride=false
# (the type of Searcher.suggest lacks FINISHED)
"""Searcher of Ray Tune that respects the budget of networks."""

from typing import Any

from ray.tune.search import Searcher

from rayfl.tuning.search import point_of, searcher_of
from rayfl.tuning.space import Excess, Point
from rayfl.tuning.sweep import DRAWS, Sweep


class Within(Searcher):
    """Asks a searcher of Ray Tune until its point is within the budget, and reports the other points to it as failed.
    They become no trials."""

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

    # Tune saves the state of `searcher` itself

    def get_state(self) -> dict:
        return {"asked": dict(self.asked)}

    def set_state(self, state: dict) -> None:
        self.asked = state["asked"]


def searching(sweep: Sweep, row: str) -> Any:
    """Return Tune's searcher of a row, within the budget; None for the random one."""
    searcher = searcher_of(sweep.search, sweep.mode, sweep.where)
    return searcher if sweep.search.budget is None or searcher is None else Within(searcher, sweep, row)
