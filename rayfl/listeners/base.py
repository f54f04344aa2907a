"""Base class of listeners, which receive the events of a run."""

from abc import ABC
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from rayfl.config import Named
from rayfl.metrics import Line

Directions = Mapping[str, Literal["max", "min"]]
"""Metric of an evaluation -> its better direction."""


class Listener(Named, ABC):
    """Receiver of events. Fields are settings; state is in attributes with a leading underscore (`PrivateAttr`).

    >>> class Enough(Listener):
    ...     def on_round(self, line):
    ...         return line["train_loss"] < 0.1
    >>> Enough().on_round({"round": 3, "train_loss": 0.05})
    True
    """

    def fitted(self, metrics: Directions, judge: str, where: str) -> Self:
        """Return the listener for a run with these metrics, of which `judge` chooses the best round. Raise a
        ConfigError that begins with `where` if it does not fit."""
        return self

    def on_phase(self, phase: str) -> None:
        """Handle the start of a phase outside of rounds, such as "loading the data" or "starting Ray"."""

    def on_start(self, config: dict[str, Any], folder: Path | None, round: int) -> None:
        """Handle the start of the run, or its resumption after `round` rounds. `config`: the experiment as plain data.
        Trials of a sweep have no folder, because another process writes their lines; their `config` contains the id of
        the trial as `trial`."""

    def on_place(self, place: str) -> None:
        """Handle the resources of the run, such as "2 actors on CPUs; no GPU found", after `on_start`. Trials of a
        sweep do not call it."""

    def on_past(self, lines: Sequence[Line]) -> bool | str | None:
        """Handle the earlier rounds of a resumed run, after `on_start`. Return True, or the reason, if one of them
        ended the run (see `on_round`)."""

    def on_round(self, line: Line) -> bool | str | None:
        """Handle the metrics of a round. Return True, or the reason, to end the run after this round if it was
        evaluated, otherwise after the next evaluated round. The reason becomes a note."""

    def on_note(self, text: str) -> None:
        """Handle a message for the user."""

    def on_end(self, status: str) -> None:
        """Handle the end of the run; `status` is finished, failed or stopped. Trials of a sweep that a scheduler pauses
        stop, and start again."""
