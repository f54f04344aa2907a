"""Listeners receive the events of a run and can end it, such as loggers and early stopping.

A listener of another package is set in the `listeners:` section as "package.module:Class", or passed as an object to
`rayfl.run`. In a sweep every trial has its own listeners, in the process of the trial.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from rayfl.config import Kind, ask
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


def call(listener: Listener, verb: str, *arguments: Any) -> Any:
    """Return the answer of a listener. Its errors name its class and the verb."""
    return ask(f"listeners: {listener.name}, {verb}", partial(getattr(listener, verb), *arguments))


def tell(listeners: Sequence[Listener], lines: Iterable[Line]) -> bool:
    """Call all listeners for a copy of each line. Return whether one of them ends the run."""
    stop = False
    for line in lines:
        ends = [call(listener, "on_round", dict(line)) for listener in listeners]
        stop |= any(ends)
        notes = [f"round {line['round']}: {reason}" for reason in ends if isinstance(reason, str)]
        if "refusals" in line:
            notes.append(f"round {line['round']}: refused {line['refusals']}")
        note(listeners, *notes, *([line[NOTE]] if NOTE in line else []))
    return stop


def tell_past(listeners: Sequence[Listener], lines: Sequence[Line]) -> bool:
    """Call all listeners for the earlier rounds of a resumed run, as `tell`."""
    ends = [call(listener, "on_past", [dict(line) for line in lines]) for listener in listeners]
    note(listeners, *(reason for reason in ends if isinstance(reason, str)))
    return any(ends)


def end(listeners: Sequence[Listener], status: str) -> None:
    """Tell all listeners that the run ends, in their order; if some raise an error, the others are told too."""
    with ExitStack() as stack:
        for listener in reversed(listeners):
            stack.callback(call, listener, "on_end", status)


def note(listeners: Sequence[Listener], *notes: str) -> None:
    for listener in listeners:
        for text in notes:
            call(listener, "on_note", text)
