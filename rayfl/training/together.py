"""Clients of one submodel that train side by side: what they ask of `Method.fit` is answered for all of them at once.

Methods do not know. Each visit of a group runs until it asks to train a module, and waits there. When all of them wait,
those whose asks differ only in parameters, samples, learning rates and label sets are trained together
(`rayfl.training.stacked`), and each visit goes on with its own result. The others train alone, one after another.

Visits share modules, so a visit's parameters, norms and frozen layers are taken out of the module when it waits, and
put back when it goes on. The last visit goes on first, so that contexts that visits have entered end in reverse order.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from rayfl.core import norms
from rayfl.core.joined import parameters_of
from rayfl.core.net import in_training, net_of
from rayfl.core.tensors import as_vector
from rayfl.data.samples import Batch
from rayfl.training.passes import Passes, apart, current
from rayfl.training.settings import Loss, Rate, Training
from rayfl.training.steps import Hook, Objective

R = TypeVar("R")


@dataclass(eq=False)
class Ask:
    """What a visit asks to train: arguments as for `steps.fit`."""

    module: nn.Module
    batches: Callable[[], Iterable[Batch]]
    loss: Loss
    training: Training
    lr: Rate
    adjust: Hook | None
    project: Hook | None
    seed: int
    """Seed of dropout."""
    key: Hashable = None
    """Equal for asks that can be answered together."""
    trained: tuple[bool, ...] = ()
    """Per parameter, whether it has gradients."""
    running: Sequence[tuple[torch.Tensor, torch.Tensor] | None] = ()
    """Per static norm, its running statistics."""
    values: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """The parameters as one vector, before or after training."""
    passes: Passes | None = None
    """What counts the visit's passes."""
    sums: dict[str, float] | None = None
    """What `fit` returns. None: not trained."""

    @property
    def can_be_shared(self) -> bool:
        """Whether the training is the common one, of a network that visits share."""
        plain = self.training.precision != "bf16" and self.training.accumulate == 1
        return plain and type(self.loss) is Objective and net_of(self.module) is not None

    def take_out(self) -> None:
        """Take the visit's state out of the module."""
        in_training(self.module)
        parameters, objective = list(parameters_of(self.module).values()), cast(Objective, self.loss)
        self.trained = tuple(p.requires_grad for p in parameters)
        self.values = as_vector(parameters).clone()
        static = norms.static_norms(self.module).values()
        self.running = [norm.running for norm in static]
        tracked = tuple(running is not None for running in self.running)
        self.key = id(self.module), self.training, objective.goal, objective.fill, self.trained, tracked
        for parameter in parameters:
            parameter.requires_grad_(True)
        for norm in static:
            norm.running = None

    def put_back(self) -> None:
        """Put the visit's state back into the module."""
        in_training(self.module)
        parameters = list(parameters_of(self.module).values())
        as_vector(parameters).copy_(self.values)
        for parameter, trains in zip(parameters, self.trained, strict=True):
            parameter.requires_grad_(trains)
        for norm, running in zip(norms.static_norms(self.module).values(), self.running, strict=True):
            norm.running = running


class _Visit(greenlet):
    """A visit of a group. `switch` runs it until it asks or ends."""

    ask: Ask | None = None
    """What it waits for."""
    result: Any = None

    def __init__(self, visit: Callable[[], Any]):
        super().__init__(self._end)
        self._visit = visit

    def _end(self) -> None:
        self.result = self._visit()


def answer(ask: Ask) -> dict[str, float] | None:
    """Return the sums of a training that was made together with other visits, with the trained parameters in the
    module. None: the visit trains alone."""
    visit = getcurrent()
    if not isinstance(visit, _Visit) or not ask.can_be_shared:
        return None
    ask.passes, visit.ask = current(), ask
    ask.take_out()
    with apart():
        cast(greenlet, visit.parent).switch()
    visit.ask = None
    ask.put_back()
    if ask.sums is not None and ask.passes is not None:
        ask.passes.trained(cast(Any, net_of(ask.module)), ask.sums)
    return ask.sums


def together(runs: Sequence[Callable[[], R]], train: Callable[[Sequence[Ask]], None]) -> list[R]:
    """Return the results of visits. `train` answers asks with equal keys, or leaves them as they are."""
    visits = turns = [_Visit(run) for run in runs]
    try:
        while turns:
            for visit in turns:
                visit.switch()
            groups: dict[Hashable, list[Ask]] = {}
            for ask in (visit.ask for visit in visits if visit.ask is not None):
                groups.setdefault(ask.key, []).append(ask)
            for asks in groups.values():
                if len(asks) > 1:
                    train(asks)
            turns = [visit for visit in reversed(turns) if visit.ask is not None]
    finally:
        # of visits that still wait after an error
        for visit in reversed(visits):
            if visit:
                visit.throw(GreenletExit)
    return [visit.result for visit in visits]
