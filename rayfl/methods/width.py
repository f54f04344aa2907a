"""What the width-heterogeneous methods share: everything but which coordinates a client holds."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal

import torch.nn.functional as F

from rayfl.axes import Net
from rayfl.methods.base import Client, Deployment, Method, Payload, State, Update
from rayfl.models.base import load, params_of, resident
from rayfl.seeds import stream, torch_generator, torch_scope
from rayfl.submodel import NestedMean, Selection
from rayfl.training import ClientData, Fill, mask_logits, sgd, weighted


class WidthMethod(Method):
    """Train a narrow dense network, average over holders. A final class defines `select` and `window`."""

    scaler: bool = False
    """Divide activations by (client width / server width) during training (HeteroFL section 3.3)."""
    mask: Fill = "none"
    """Logits of classes that a client does not have, in its loss (HeteroFL section 4): left alone, 0, -inf."""
    label_rows: Literal["all", "present"] = "all"
    """Classifier rows that a client contributes: all, or those of its own classes (HeteroFL's code)."""
    weight: Literal["samples", "uniform"] = "uniform"
    """A client's weight in the mean: its number of training samples, or 1."""

    @abstractmethod
    def window(self, round: int, capacity: float) -> Selection:
        """What a device of this capacity runs outside training."""

    def init(self, seed: int) -> State:
        with torch_scope(stream(seed, "init")):
            net = self.task.model.build(self.task.server)
        return {"params": params_of(net)}

    def extract(self, state: State, selection: Selection) -> Payload:
        return {"params": selection.take(state["params"])}

    def local_update(
        self,
        payload: Payload,
        selection: Selection,
        client: Client,
        data: ClientData,
        round: int,
        seed: int,
    ) -> Update:
        training, present = self.task.training, data.present
        net = resident(self.task.model, selection.net, data.device)
        load(net, payload["params"])
        with torch_scope(stream(seed, "dropout"), data.device):
            metrics = sgd(
                net,
                data.batches(training, torch_generator(seed, "batches")),
                lambda logits, y: F.cross_entropy(mask_logits(logits, present, self.mask), y),
                training,
                training.lr_at(round),
            )
        weight = float(len(data)) if self.weight == "samples" else 1.0
        update = Update({"params": weighted(params_of(net), weight)}, weight, metrics=metrics)
        if self.label_rows == "present":
            self._keep_present_rows(update, selection.net, present.float().cpu())
        return update

    def _keep_present_rows(self, update: Update, net: Net, present) -> None:
        """A client holds the rows of the `classes` axis that are in its label set (width.md section 5)."""
        layout = self.task.layout(net)
        for name, dims in layout.dims.items():
            if dims[0] is not None and dims[0].name == "classes":
                rows = present.view(-1, *[1] * (len(dims) - 1))
                update.sums["params"][name].mul_(rows)
                update.held[name] = rows * update.weight

    def aggregate(self, state: State, round: int, updates: Iterator[tuple[Selection, Update]]) -> State:
        mean = NestedMean(state["params"])
        for selection, update in updates:
            mean.add(selection, update.sums["params"], update.weight, update.held)
        return {"params": mean.mean()}

    def deploy(self, state: State, round: int, capacity: float, client: Client | None = None) -> Deployment:
        selection = self.window(round, capacity)
        params = selection.take(state["params"])
        return Deployment(selection.key, self.task.model, selection.net, params)

    def net_at(self, capacity: float) -> Net:
        """The client network of a capacity, with its Scaler."""
        width = self.task.widths[capacity]
        return Net(width, scale=width / self.task.server.width if self.scaler else 1.0)
