"""What the methods share whose clients train a network by gradient steps on their own data."""

from collections.abc import Callable, Iterator
from typing import Literal

import torch.nn.functional as F
from torch import nn

from rayfl.axes import Net
from rayfl.methods.base import Method, State, Update
from rayfl.models.base import load, resident
from rayfl.seeds import stream, torch_generator, torch_scope
from rayfl.submodel import NestedMean, Selection
from rayfl.tensors import Params
from rayfl.training import ClientData, Fill, Loss, Training, fit, mask_logits


class LocalMethod(Method):
    mask: Fill = "none"
    """Logits of classes that a client does not have, in its loss (HeteroFL section 4): left alone, 0, -inf."""
    weight: Literal["samples", "uniform"] = "uniform"
    """A client's weight in the mean: its number of training samples, or 1."""

    def init(self, seed: int) -> State:
        with torch_scope(stream(seed, "init")):
            return {"params": self.task.model.initial(self.task.server)}

    def network(self, params: Params, net: Net, data: ClientData) -> nn.Module:
        """The network with `params`, on the device of `data`. It is shared: used until the answer."""
        network = resident(self.task.model, net, data.device)
        load(network, params)
        return network

    def train(
        self,
        net: nn.Module,
        data: ClientData,
        round: int,
        seed: int,
        *,
        training: Training | None = None,
        adjust: Callable[[nn.Module], None] | None = None,
        project: Callable[[nn.Module], None] | None = None,
        momentum: Params | None = None,
    ) -> dict[str, float]:
        """Steps on the client's loss, in place; the metrics of `fit`, which says what the last three are. `training` in
        place of the task's, but at its rates."""
        training, rate = training or self.task.training, self.task.training.rate(round, len(data))
        with torch_scope(stream(seed, "dropout"), data.device):
            batches = data.batches(training, torch_generator(seed, "batches"))
            return fit(net, batches, self.loss(data, round), training, rate, adjust, project, momentum)

    def loss(self, data: ClientData, round: int) -> Loss:
        """A client's loss in a round: cross-entropy, with the logits of classes that it does not have masked."""
        present = data.present
        return lambda logits, y: F.cross_entropy(mask_logits(logits, present, self.mask), y)

    def weight_of(self, data: ClientData) -> float:
        """The client's weight."""
        return float(len(data)) if self.weight == "samples" else 1.0

    def aggregate(self, state: State, round: int, updates: Iterator[tuple[Selection, Update]]) -> State:
        """The holder mean of the parameters."""
        mean = NestedMean(state["params"])
        for selection, update in updates:
            mean.add(selection, update.sums["params"], update.weight, update.held)
        return {"params": mean.mean()}
