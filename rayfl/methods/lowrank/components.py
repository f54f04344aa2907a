"""Base of the methods whose clients train a subset of every adapter's components, not necessarily the first ones.

With `others: folded` a client folds the other components into its frozen base, W = s sum of b_j a_j over the others, so
that it trains within the server's full function, and every device runs that function. With `others: left_out` clients
and devices run the subset alone.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from rayfl.core.fold import State, Update
from rayfl.core.net import Net
from rayfl.core.submodel import Selection, Slice
from rayfl.core.tensors import Params, nbytes
from rayfl.methods.base import Payload, Task, Visit
from rayfl.methods.lowrank.base import LowRank, adapters, part_of


class Components(LowRank):
    one_scale: ClassVar = True

    others: Literal["folded", "left_out"] = "folded"
    """Components that a client does not train. folded: sent, and part of its frozen base. left_out: absent."""

    @abstractmethod
    def submodel(self, state: State, round: int, capacity: float) -> Slice: ...

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
        """Return the client's parameters with the components that it does not train folded into W."""
        assert isinstance(selection, Slice)
        found = dict(part)
        for path in self.layers:
            a, b = whole[f"{path}.lora.A"], whole[f"{path}.lora.B"]
            rest = torch.ones(len(a), dtype=torch.bool)
            rest[list(selection.positions[f"{path}.rank"].positions)] = False
            if rest.any():
                found[f"{path}.lora.W"] = part[f"{path}.lora.W"] + self.scale(path) * b[:, rest] @ a[rest]
        return found
