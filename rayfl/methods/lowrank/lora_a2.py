"""LoRA-A2: rounds alternate between the factors, and clients train the components most important to them.

Paper: Koo, Jang, Ok, "LoRA-A2: Towards Robust and Efficient LoRA-based Federated Fine-Tuning of Large Language Models",
ACL 2025, https://arxiv.org/abs/2410.22815.

Symbols: as in `base`; $N$ the number of layers with adapters, $t$ the round, $D_k$ the change of a factor.

    $t$ even      $B$ is trained and $A$ frozen, with 5 times the learning rate
    $t$ odd       $A$ is trained and $B$ frozen
    probing     one epoch gives $D_k[i]$ of component $i$ of each layer, $i < R$
    $S_k[i]$      $= norm(D_k[i])$ times the norm of the other factor's $i$-th, of all $R$ components of all $N$ layers
    $J_k$         the $r_k N$ largest $S_k$ over all layers, with unequal $r_k$ their sum
    $B_k$         the client's steps from $B$, with columns not in $J_k$ unchanged; $A_k$ likewise
    $B$           $<- B + sum_k w_k (B_k - B)$, over all clients; columns that a client did not select count as
                unchanged

Cost per round: $R o$ or $R d$ numbers per layer down, the factor changed in the last round; the $r_k N$ selected
columns up, with an index of 4 bytes each; the client's training and one more epoch; one sum on the server.

Ranks differ between clients, and between the layers of a client.

Departures:
1. The steps of a round start from the received parameters, not from the result of probing; the paper does not specify.
2. A client has the r_k that its capacity affords, as with other methods, and runs all R components: the paper's budget
   is for uploads.
3. The paper freezes the random head: `model.head: frozen`. A trained head has the rate of the round.
4. A trained head is sent up whole.
5. If rounds are counted in steps, probing takes the same number of steps in place of one epoch.
6. With `updates.transforms` the bytes up are those of the whole trained factor.
7. If round 0 has no updates (`system:`), round 1 trains A while B is 0, so that A has no gradient.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn

from rayfl import costs
from rayfl.core.factors import importance
from rayfl.core.fold import Update
from rayfl.core.joined import parameters_of
from rayfl.core.net import Net
from rayfl.core.seeds import stream
from rayfl.core.tensors import Params, nbytes
from rayfl.methods.base import Affordable, Payload, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.lowrank.base import LowRank, Part, adapters, part_of, rank_of


class LoRAA2(LowRank):
    contract: ClassVar = Contract(wants="adapters", fedavg=None)

    name: Literal["lora_a2"] = "lora_a2"
    rate_of_b: float = Field(default=5.0, gt=0)
    """Learning rate of rounds that train B, as a multiple of `training.lr`."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        """Return the server's network for every capacity: clients run all components."""
        return dict.fromkeys(adapters(task), task.server)

    def budget(self, capacity: float) -> int:
        """Return the components that a capacity trains in all layers: as many as other methods give it."""
        net = Affordable(self.task.model, self.task.metric, (capacity,))[capacity]
        return sum(rank_of(net, path) for path in self.layers)

    def has_trained(self, capacity: float) -> bool:
        return self.budget(capacity) > 0 or any(not part_of(name) for name in self.task.server.layout.shapes)

    def trains(self, round: int) -> tuple[Part, ...]:
        return ("A",) if round % 2 else ("B",)

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        received, at_rate = payload["params"], self._at_rate(visit.round)
        probe = self.task.training.model_copy(update={"epochs": 1})
        there = replace(visit, seed=stream(visit.seed, "scores"))
        probed, spent = at_rate.train(received, there, training=probe)
        chosen = self.chosen(received, probed, visit)

        def restore(module: nn.Module) -> None:
            for name, parameter in parameters_of(module).items():
                if name in chosen:
                    t = parameter.detach()
                    t.copy_(torch.where(chosen[name].to(t.device), t, received[name].to(t.device)))

        trained, metrics = at_rate.train(received, visit, project=restore)
        update = self.answer(trained, payload, visit, metrics)
        seen = int(metrics["train_samples"] + spent["train_samples"])
        update.metrics["train_flops"] = costs.training_flops(visit.net, seen)
        update.metrics["bytes_up"] = nbytes({name: t for name, t in received.items() if not part_of(name)})
        for name, columns in chosen.items():
            count = int(columns.sum())
            update.metrics["bytes_up"] += 4 * count * (received[name].numel() // columns.numel() + 1)
        return update

    def chosen(self, received: Params, probed: Params, visit: Visit) -> dict[str, torch.Tensor]:
        """Return J_k of every trained factor, as [1, r] or [r, 1] bool."""
        part, scores = self.trains(visit.round)[0], {}
        for path in self.layers:
            change = {n: probed[n].cpu() - received[n] for n in [f"{path}.lora.{part}"]}
            b, a = (change.get(n, received[n]) for n in (f"{path}.lora.B", f"{path}.lora.A"))
            scores[f"{path}.lora.{part}"] = importance(b, a)
        flat = torch.cat(list(scores.values()))
        kept = torch.zeros_like(flat, dtype=torch.bool)
        kept[torch.sort(flat, descending=True, stable=True).indices[: self.budget(visit.client.capacity)]] = True
        parts = zip(scores, kept.split([len(s) for s in scores.values()]), strict=True)
        return {name: t[:, None] if part == "A" else t[None] for name, t in parts}

    def _at_rate(self, round: int) -> "LoRAA2":
        training = self.task.training
        factor = self.rate_of_b if self.trains(round) == ("B",) else 1.0
        training = training.model_copy(update={"lr": training.lr * factor})
        return self.model_copy(update={"task": replace(self.task, training=training)})
