"""What a listener is: told of a run, round by round, it may end it."""

from abc import ABC
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayfl.config import Named
from rayfl.metrics import Line


class Listener(Named, ABC):
    """Fields are its settings; what it remembers is in attributes that begin with an underscore (`PrivateAttr`)."""

    def on_phase(self, phase: str) -> None:
        """The run is busy with something else than rounds: "loading the data", "starting Ray"."""

    def on_start(self, config: dict[str, Any], folder: Path | None, round: int) -> None:
        """The run begins, or goes on after `round` rounds. `config`: the experiment, as a file would hold it. A trial
        of a sweep has no folder: its lines are written by another process."""

    def on_past(self, lines: Sequence[Line]) -> bool | None:
        """After `on_start`, where a run goes on in its folder: the rounds that it has made. True: one of them has ended
        it, as `on_round` says. A trial of a sweep that goes on is not told of them."""

    def on_round(self, line: Line) -> bool | None:
        """After every round, with its metrics. True ends the run: with this round if it was evaluated, else with the
        next one that is."""

    def on_note(self, text: str) -> None:
        """Something that a person should know."""

    def on_end(self, status: str) -> None:
        """finished, failed or stopped."""
