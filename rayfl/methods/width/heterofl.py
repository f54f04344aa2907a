"""HeteroFL: every client trains the first channels of every layer.

Paper: Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021, https://arxiv.org/abs/2010.01264.

Symbols: $K$ the width of an axis in the widest network, $r_k$ the width of client $k$'s capacity, $r$ the server's, $x$
the global parameters.

    $S_k$         positions $0 ... ceil(r_k K) - 1$ of every axis; classes and image channels whole (Alg. 1)
    $y_k$         SGD from $S_k x$, with the Scaler, activations divided by $r_k/r$ while training (section 3.3), static
                batch norm (3.2), and logits of absent classes set to 0 in the loss (section 4)
    $x$           $<- (sum_k S_k^T y_k)/(sum_k S_k^T 1)$, uniform weights, elsewhere unchanged (Eqs. 1-3); a client's
                classifier rows count only for its own classes

Cost per round: the client's narrow network down and up, its training, one sum on the server.

Departures:
1. Sizes are ceil(r K); attention is cut within each head.
2. The authors' code applies `label_rows: present` with `mask: none` too; here it is a separate option.
3. `mask: neg_inf` is ours, `none` is the paper's ablation. The paper gives absent classes probability zero; the code
   sets their logit to zero. The default follows the code, which produced the published numbers.
4. The Scaler also follows hidden linear layers, because section 3.3 applies it to every parametric layer; HeteroFL's
   networks have none. It increases the gradients of narrow clients: without gradient clipping or norms, such networks
   train worse with it, or not at all (digits, width 1/16: 0.71 with clipping at 1, 0.44 without).
5. The classes of a language model are its tokens: rows of the token embedding, of the last layer and of its bias. In
   the authors' code the mask's embedding belongs to no client: clients train it and the update is lost. Here it belongs
   to all clients, unless `mask_row: nobody`.
"""

from typing import Literal, Self

import torch
from pydantic import model_validator

from rayfl.core.fold import State
from rayfl.core.submodel import Selection
from rayfl.methods.base import Client
from rayfl.methods.width.vocabulary import OwnVocabulary
from rayfl.training.settings import Fill


class HeteroFL(OwnVocabulary):
    name: Literal["heterofl"] = "heterofl"
    scaler: bool = True
    mask: Fill = "zero"
    label_rows: Literal["all", "present"] = "present"
    mask_row: Literal["everybody", "nobody"] = "everybody"
    """With `label_rows: present`: clients that contribute the mask embedding of a masked language model, which is no
    client's label. nobody: the server's row never changes, as in the authors' code."""

    @model_validator(mode="after")
    def _of_present_rows(self) -> Self:
        if self.mask_row == "nobody" and self.label_rows == "all":
            raise ValueError("mask_row: nobody only with label_rows: present")
        return self

    def select(self, state: State, client: Client) -> Selection:
        return self.of_vocabulary(self.submodel(state, client.round, client.capacity), client)

    def contributed(self, present: torch.Tensor, rows: int) -> torch.Tensor:
        selected = super().contributed(present, rows)
        selected[len(present) :] &= self.mask_row == "everybody"
        return selected
