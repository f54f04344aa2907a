"""What the methods share whose clients train some components of every adapter, which need not be the first.

What a client does not train it folds into its frozen base, W = s sum of b_j a_j over the others: then nothing is cut
off the function that it trains, and any device runs the server's. Or it has none of the others, and trains, as a device
runs, the part.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch

from rayfl.core.fold import State, Update
from rayfl.core.net import Net
from rayfl.core.submodel import Selection, Slice
from rayfl.core.tensors import Params, nbytes
from rayfl.methods.base import Payload, Task, Visit
from rayfl.methods.lowrank.base import LowRank, adapters, part_of


class Components(LowRank):
    others: Literal["folded", "left_out"] = "folded"
    """The components that a client does not train: part of its frozen base, which it is sent for that, or not there."""

    @abstractmethod
    def submodel(self, state: State, round: int, capacity: float) -> Slice:
        """What a device of this capacity holds after so many rounds."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return adapters(task, merged=True) if self.others == "folded" else adapters(task)

    def extract(self, state: State, selection: Selection) -> Payload:
        params = state["params"]
        sent: Payload = {"params": selection.take(params)}
        if self.others == "folded":
            sent["all"] = {name: t for name, t in params.items() if part_of(name) in ("A", "B")}
        return sent

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        params = payload["params"]
        if self.others == "folded":
            params = self.folded(params, payload["all"], visit.selection)
        trained, metrics = self.train(params, visit)
        return self.answer(trained, payload, visit, metrics)

    def down(self, payload: Payload, round: int) -> int:
        if self.others == "left_out":
            return super().down(payload, round)
        head = {name: t for name, t in payload["params"].items() if not part_of(name)}
        return nbytes(payload["all"]) + nbytes(head)

    def part(self, state: State, selection: Selection) -> Params:
        part = selection.take(state["params"])
        return self.folded(part, state["params"], selection) if self.others == "folded" else part

    def folded(self, part: Params, whole: Params, selection: Selection) -> Params:
        """The parameters of a client's network, with the components that it does not hold in W."""
        assert isinstance(selection, Slice)
        found = dict(part)
        for path in self.layers:
            a, b = whole[f"{path}.lora.A"], whole[f"{path}.lora.B"]
            rest = torch.ones(len(a), dtype=torch.bool)
            rest[list(selection.positions[f"{path}.rank"].positions)] = False
            if rest.any():
                found[f"{path}.lora.W"] = part[f"{path}.lora.W"] + self.scale(self.rank) * b[:, rest] @ a[rest]
        return found
