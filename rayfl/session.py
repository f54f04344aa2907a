"""Running an experiment round by round, in notebooks and scripts (`rayfl.start`)."""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Self

from rayfl.data.base import Arrays
from rayfl.driver import Given, as_experiment, loaded, opened, table_of
from rayfl.engine.locks import Temporary
from rayfl.experiment import Experiment
from rayfl.exporting.preparation import Preparation
from rayfl.listeners import call, end, note, tell
from rayfl.metrics import EVALUATED, Line
from rayfl.networks import check_device

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


def start(experiment: Given, *, address: str | None = None, arrays: Arrays | None = None) -> "Session":
    """Start a run that is controlled round by round. It leaves no files, so unlike `run` it takes no folder. `address`
    and `arrays`: as for `run`.

    The session is an iterator over rounds, and a context manager that keeps the run open between them:

        with rayfl.start(experiment) as session:
            line = next(iter(session))
            session.submodel(0.25)

    >>> with start({"model": "digits_cnn", "clients": {"count": 2}, "run": {"executor": "serial"}}) as session:
    ...     line = next(iter(session))
    >>> line["round"], line["clients"]
    (1, 2)
    """
    return Session(as_experiment(experiment), address, arrays)


class Session:
    """A run in progress: iterate over its rounds, as many at a time as you like. Outside a `with` block the run ends
    with the loop. The experiment's listeners are told and may end it.

    >>> session = start({"rounds": 1, "model": "digits_cnn", "clients": {"count": 2}, "run": {"executor": "serial"}})
    >>> [line["steps"] for line in session]
    [66]
    """

    def __init__(self, experiment: Experiment, address: str | None = None, arrays: Arrays | None = None):
        self.experiment, self.address, self.arrays = experiment, address, arrays
        self.lines: list[Line] = []
        """The metrics of each round so far."""
        self.listeners = experiment.all_listeners()
        self._open: ExitStack | None = None
        self._has_ended = self._is_stopped = self._is_over = False

    def __enter__(self) -> Self:
        if self._has_ended:
            raise RuntimeError("the run has ended. Hint: `rayfl.start` starts another one")
        self._arrays = arrays = loaded(self.experiment, self.arrays)
        with ExitStack() as stack:
            folder = stack.enter_context(Temporary())
            self.simulation = stack.enter_context(opened(self.experiment, arrays, folder, self.address))
            for listener in self.listeners:
                call(listener, "on_start", self.experiment.plain(), None, 0)
                call(listener, "on_place", self.simulation.place)
            note(self.listeners, *self.experiment.notes, *arrays.notes)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._has_ended = True
        stack, self._open = self._open, None
        if stack is not None:
            stack.__exit__(*error)
        is_done = self._is_over or len(self.lines) == self.experiment.rounds
        end(self.listeners, "failed" if isinstance(error[1], Exception) else "finished" if is_done else "stopped")

    def __iter__(self) -> Iterator[Line]:
        with nullcontext() if self._open else self:
            while not self._is_over and (made := self.simulation.step(0.0)) is not None:
                self.lines += made
                self._is_stopped |= tell(self.listeners, made)
                self._is_over = self._is_stopped and bool(made) and EVALUATED in made[-1]
                yield from made

    @property
    def metrics(self) -> "pd.DataFrame":
        """The metrics as a table, like those of a `Result`."""
        return table_of(self.lines)

    def submodel(self, capacity: float, client: int | None = None, *, raw: bool = False) -> "nn.Module":
        """Return the network now deployed at this capacity, or the client's personal network, as a `Result` does.
        Within a `with` block."""
        from rayfl.exporting.submodels import as_module

        if self._open is None:
            raise RuntimeError("the run has ended. Hint: `with rayfl.start(...) as session` keeps it open")
        capacity = check_device(self.experiment, capacity, client, self.arrays)
        around = None if raw else Preparation.of(self.experiment, lambda: self._arrays)
        return as_module(self.simulation.deployment(capacity, client), around)
