"""FedRoRA: clients share singular directions, and select among them by personal coefficients.

Paper: Wang, Bian et al., "FedRoRA", 2026.

Symbols: as in `base`; $u_j$, $v_j$ the singular directions of $P$, $j < R$; $c_(k j)$ client $k$'s coefficient of
direction $j$.

    $A_k, B_k$     steps from the start of $k$
    $U S V^T$      the singular value decomposition of $P = sum_k w_k P_k$
    $c_(k j)$      $= u_j^T P_k v_j$, with $P_k$ of client $k$'s last visit
    $J_k$          the $r_k$ directions with the largest $|c_(k j)|$, of every layer
    start of $k$   $B = [u_j c_(k j)/s]$, $A = [v_j^T]$ for $j in J_k$

Cost per round: $r_k (d + o)$ numbers per layer down and up, the client's training, one decomposition per layer on the
server.

A new client starts from the first directions with the server's coefficients $S_j$. Evaluated on the clients' own data.

Departures:
1. The paper's adapter is P_k = B S A with unit columns and rows, and its server computes the coefficients. Here the
   client keeps P_k, receives all R directions and computes its coefficients; only the r_k used directions are counted.
2. The paper does not define its "top" directions. Here they have the largest |u_j^T P_k v_j|.
3. Signs, missing directions and the decomposition are as for FlexLoRA; a trained head is averaged.
"""

from typing import ClassVar, Literal, cast

import torch

from rayfl.clients import Population
from rayfl.core.fold import ClientState, State, Update
from rayfl.core.net import Net
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params, copied
from rayfl.methods.base import Deployment, Payload, Visit
from rayfl.methods.lowrank.base import part_of, rank_of
from rayfl.methods.lowrank.flexlora import FlexLoRA
from rayfl.methods.sizes import fixed_capacities


class FedRoRA(FlexLoRA):
    judged_on: ClassVar = "clients"

    name: Literal["fedrora"] = "fedrora"  # pyright: ignore[reportIncompatibleVariableOverride]

    def check(self, rounds: int, clients: Population) -> None:
        super().check(rounds, clients)
        fixed_capacities(self.name, self.task.nets, clients, "one capacity for all clients")

    def extract(self, state: State, selection: Selection) -> Payload:
        directions = {name: t for name, t in state["params"].items() if part_of(name)}
        return super().extract(state, selection) | {"directions": directions}

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        start = payload["params"] | self.chosen(payload["directions"], visit.net, visit.client_state)
        trained, metrics = self.train(start, visit)
        update = self.answer(trained, payload, visit, metrics)
        kept = copied({name: t for name, t in trained.items() if part_of(name)})
        update.client_states[visit.client.id] = {"own": kept}
        return update

    def chosen(self, directions: Params, net: Net, client_state: ClientState | None) -> Params:
        """Return the client's chosen directions, with its coefficients; {} for a new client."""
        found: Params = {}
        for path in self.layers if client_state else ():
            kept, rank = cast(Params, client_state["own"]), rank_of(net, path)  # type: ignore[index]
            a, b = f"{path}.lora.A", f"{path}.lora.B"
            v, u = directions[a], unit(directions[b])
            # neither factor includes s
            coefficients = ((u.T @ kept[b]) * (v @ kept[a].T)).sum(1)
            largest = torch.sort(coefficients.abs(), descending=True, stable=True).indices[:rank].sort().values
            found |= {a: v[largest], b: u[:, largest] * coefficients[largest]}
        return found

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        """Return the client's personal adapters if it has a client state, otherwise the server's."""
        deployed = super().deploy(state, round, capacity)
        own = self.chosen(state["params"], deployed.net, client_state)
        return Deployment(deployed.key, deployed.net, deployed.params | own)


def unit(b: torch.Tensor) -> torch.Tensor:
    """Normalise the columns to length 1, except those that are 0."""
    lengths = b.norm(dim=0)
    return b / torch.where(lengths > 0, lengths, 1.0)
