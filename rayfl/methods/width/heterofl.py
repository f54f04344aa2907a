"""HeteroFL: every client trains the first channels of every layer.

Paper: Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for
Heterogeneous Clients", ICLR 2021, https://arxiv.org/abs/2010.01264.

Symbols: K the width of an axis in the widest network, r a client's capacity, x the global parameters.

    S_k            positions 0 .. ceil(r_k K) - 1 of every axis; classes and image channels whole (Alg. 1)
    y_k            SGD from S_k x, with the Scaler x / (r_k / r_server) while training (section 3.3),
                   static batch norm (3.2), and logits of absent classes set to 0 in the loss (section 4)
    x  <-  sum_k S_k^T y_k / sum_k S_k^T 1, uniform weights, elsewhere unchanged (Eqs. 1-3); a client's
                   classifier rows count only for the classes that it has

    >>> from rayfl.methods import METHODS
    >>> METHODS["heterofl"]().scaler
    True

Departures:
1. The network built at a width decides its sizes, ceil(r K); attention heads are cut inside each head.
2. The authors' code does what `label_rows: present` does with `mask: none` too; here it is an option of its own.
3. `mask: neg_inf` is ours, `none` the paper's ablation. The paper says that absent classes get probability zero, and
   the code sets their logit to zero. The default follows the code, because the published numbers are the code's.
4. The Scaler stands after hidden linear layers too, as section 3.3 says of every parametric layer; HeteroFL's own
   networks have none. It scales a narrow client's gradients up: without gradient clipping, or without norms, such
   networks train worse with it, or not at all (digits, width 1/16: 0.71 with clipping at 1, 0.44 without).
5. A language model's classes are its tokens: rows of the token embedding, of the last layer and of its bias. The mask's
   embedding is nobody's in the authors' code, so that each client trains and loses it; here it is everybody's, unless
   `mask_row: nobody`.
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
    """With `label_rows: present`: whose the embedding of a masked language model's mask is, which is no client's label.
    nobody: it never moves on the server, as in the authors' code."""

    @model_validator(mode="after")
    def _of_present_rows(self) -> Self:
        if self.mask_row == "nobody" and self.label_rows == "all":
            raise ValueError("mask_row: nobody with label_rows: present only")
        return self

    def select(self, state: State, client: Client) -> Selection:
        return self.of_vocabulary(self.submodel(state, client.round, client.capacity), client)

    def contributed(self, present: torch.Tensor, rows: int) -> torch.Tensor:
        everybody = super().contributed(present, rows)
        everybody[len(present) :] &= self.mask_row == "everybody"
        return everybody
