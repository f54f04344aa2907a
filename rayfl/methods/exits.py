"""What the methods share whose submodels end at early exits: how deep the network of a capacity is."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Self

import torch
from pydantic import PositiveInt, field_validator

from rayfl.axes import Net
from rayfl.config import ConfigError
from rayfl.methods.base import Task
from rayfl.methods.width import PrefixMethod


class ExitMethod(PrefixMethod):
    """A device runs the network up to an exit, and answers at this one and at all before it."""

    exits: tuple[PositiveInt, ...] = ()
    """The last exit of every capacity, smallest capacity first, counted from 1. Unless given 1, 2, ... if there is a
    capacity for every exit of the model, and for one capacity alone the model's last."""

    @field_validator("exits")
    @classmethod
    def _ascending_exits(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(value):
            raise ValueError("ascending, for a larger capacity has the exits of a smaller one too")
        return value

    @abstractmethod
    def nets(self, task: Task, exits: Mapping[float, int]) -> dict[float, Net]:
        """The network of every capacity, in the order of `exits`: capacity -> how many exits it has, 0 where the
        model has none but its head."""

    def bind(self, task: Task) -> Self:
        return super().bind(replace(task, nets=self.nets(task, self._depths(task))))

    def _depths(self, task: Task) -> dict[float, int]:
        """Capacity -> number of exits, largest first."""
        model, count, capacities = task.model, task.model.exit_count, sorted(task.nets)
        default = tuple(range(1, count + 1))[-len(capacities) :] if len(capacities) in (1, count) else ()
        last = self.exits or default
        if len(last) != len(capacities) or max(last) > count:
            if count == 1:
                raise ConfigError(
                    f"model: given {model.name}, which has no early exits; allowed: one for every of the "
                    f"{len(capacities)} capacities but the last, by model.exits of a ResNet, or a model such as "
                    "depthfl_resnet18"
                )
            raise ConfigError(
                f"method.exits: given {list(self.exits) or 'none'}; allowed: {len(capacities)} exits of 1 to {count}, "
                f"the last of every capacity, smallest capacity first; model {model.name} answers at {count}"
            )
        depths = dict(zip(capacities, last, strict=True))
        return {capacity: depths[capacity] if count > 1 else 0 for capacity in task.nets}


def every_exit(logits: torch.Tensor) -> torch.Tensor:
    """The logits of all exits [E, B, C]: of one where a network gives those of its head alone [B, C]."""
    return logits if logits.dim() == 3 else logits.unsqueeze(0)
