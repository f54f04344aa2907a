"""Listeners: what is told of a run, round by round, and may end it. Loggers, early stopping, whatever a user needs.

A listener of a user's package is named in the `listeners:` section as "package.module:Class", or given as an object to
`rayfl.run`. In a sweep every trial has its own, in the trial's process.
"""

from collections.abc import Iterable, Sequence

from rayfl.config import Kind
from rayfl.listeners.base import Listener as Listener
from rayfl.listeners.early_stopping import EarlyStopping as EarlyStopping
from rayfl.listeners.tensorboard import TensorBoard
from rayfl.listeners.wandb import WeightsAndBiases
from rayfl.metrics import NOTE, Line

LISTENERS: dict[str, type[Listener]] = {
    "early_stopping": EarlyStopping,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}

LISTENERS_KIND = Kind("listener", Listener, LISTENERS, "rayfl.listeners")


def tell(listeners: Sequence[Listener], lines: Iterable[Line]) -> bool:
    """Tells all listeners of some rounds; whether one of them ends the run."""
    stop = False
    for line in lines:
        for listener in listeners:
            stop |= bool(listener.on_round(line))
            if "refusals" in line:
                listener.on_note(f"round {line['round']}: refused {line['refusals']}")
            if NOTE in line:
                listener.on_note(line[NOTE])
    return stop
