"""What stands around a network so that it takes samples as the data set stores them, and answers in its units."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from rayfl.core.net import Net
from rayfl.data.base import Arrays
from rayfl.data.goal import Goal
from rayfl.data.samples import Prepare
from rayfl.experiment import Experiment


@dataclass(frozen=True)
class Preparation:
    """Preparation of the samples of an experiment, fitted, and its goal."""

    prepare: Prepare
    goal: Goal
    shape: tuple[int, ...]
    """Shape of one sample x as stored."""
    names: Mapping[str, Any]
    """`columns`: names of the input columns, each with its categories; `class_names`; if there are any."""

    @classmethod
    def of(cls, experiment: Experiment, arrays: Callable[[], Arrays]) -> Self:
        """Return the preparation of an experiment. `arrays` loads its data, if values are computed from them."""
        data = experiment.data
        prepare, goal = data.prepare, data.goal
        if prepare.learns or goal.learns:
            federation = experiment.federate(arrays())
            prepare, goal = federation.prepare, federation.goal
        names = {"columns": data.input_columns, "class_names": data.offers.get("class_names")}
        names = {name: value for name, value in names.items() if value}
        return cls(prepare, goal, data.sample, names)

    def around(self, network: nn.Module) -> nn.Module:
        """Return a network from samples x [B, ...] as stored to logits, or to numbers in the units of the targets."""
        parts = {"prepare": self.prepare.module(), "network": network, "outputs": self.goal.module()}
        parts = OrderedDict((name, part) for name, part in parts.items() if not isinstance(part, nn.Identity))
        return nn.Sequential(parts).eval() if len(parts) > 1 else network

    def example(self, net: Net, batch: int) -> torch.Tensor:
        """Return synthetic samples as stored."""
        if isinstance(self.prepare.module(), nn.Identity):
            return net.model.example(batch, "cpu")
        return torch.zeros(batch, *self.shape)

    def plain(self) -> dict[str, Any]:
        """Return the preparation as plain JSON."""
        return {**self.prepare.plain(), **self.goal.plain(), **self.names}
