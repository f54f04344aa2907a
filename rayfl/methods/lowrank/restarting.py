"""Base of the methods that merge trained adapters into the base; every round starts with new adapters.

W is the update merged so far. Clients draw A_k themselves, and B_k = 0, so neither is sent down.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from rayfl.core.fold import State, Update
from rayfl.core.net import Net
from rayfl.core.submodel import Selection
from rayfl.methods.base import Payload, Task, Visit
from rayfl.methods.lowrank.base import LowRank, Part, adapters, fresh, merged


class Restarting(LowRank):
    products_sent: ClassVar = "whole"
    factors_sent: ClassVar = False

    def sizes(self, task: Task) -> Mapping[float, Net]:
        return adapters(task, merged=True)

    def init(self) -> State:
        """Return the state with the initial adapters merged. `merged`: rank of the last merged update, by layer."""
        params, nothing = super().init()["params"], {path: torch.tensor(0) for path in self.layers}
        b = {path: params[f"{path}.lora.B"] for path in self.layers}
        params = merged(params, {path: self.scale(path) * t @ params[f"{path}.lora.A"] for path, t in b.items()})
        return {"params": params | {f"{path}.lora.B": torch.zeros_like(t) for path, t in b.items()}, "merged": nothing}

    def changed(self, round: int) -> tuple[Part, ...]:
        return ()

    def extract(self, state: State, selection: Selection) -> Payload:
        return {"params": self.part(state, selection), "merged": state["merged"]}

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        trained, metrics = self.train(payload["params"] | fresh(visit.net, visit.seed), visit)
        return self.answer(trained, payload, visit, metrics)
