"""Vocabulary submodels: clients of a language model that train only the rows of their own tokens, in the token
embedding, the output layer and its bias.

In HeteroFL's code every client holds the whole vocabulary, but its loss uses only its own tokens: other logits are 0,
and other rows are not aggregated (`label_rows: present`). So other rows need not be sent. A client with n of V tokens
has the network of n tokens, renumbered 0 ... n - 1, and the loss

    log(sum over its own tokens of e^z + V - n) - z_y

which equals the whole network's loss up to rounding. The server must know a client's tokens, which the returned rows
reveal anyway. With `data.mask_rule: bert`, the random tokens that replace hidden ones are the client's own, not any of
the vocabulary, so that results differ.
"""

import math
from dataclasses import replace
from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import model_validator

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.axes import CLASSES
from rayfl.core.fold import Update
from rayfl.core.submodel import Picks, Slice
from rayfl.data.samples import ClientData
from rayfl.methods.base import Client, Payload, Visit
from rayfl.methods.dense import Dense
from rayfl.models.base import TokenModel
from rayfl.models.transformer import Transformer
from rayfl.training.settings import Loss


class OwnVocabulary(Dense):
    """Base class of methods with vocabulary submodels. Their `select` applies `of_vocabulary`."""

    vocab: Literal["full", "own"] = "full"
    """Token rows of a language model that a client receives, trains and sends: all, or those of its own tokens, with
    equal results up to rounding except with `data.mask_rule: bert`."""

    @model_validator(mode="after")
    def _same_result(self) -> Self:
        if self.vocab == "own" and (self.mask == "none" or self.label_rows == "all"):
            raise ValueError("vocab: own only with mask: zero or neg_inf and label_rows: present")
        return self

    def check(self, rounds: int, clients: Population) -> None:
        super().check(rounds, clients)
        model = self.task.model
        if self.vocab == "own" and not (isinstance(model, Transformer) and _is_renumbered(model)):
            raise ConfigError(
                f"method.vocab: 'own' is not valid. Allowed: 'full', because model {model.name} is not one of rayfl's "
                "own transformers, predicts no tokens here, or its mask is a token of its vocabulary"
            )

    def of_vocabulary(self, selection: Slice, client: Client) -> Slice:
        """Return the part of a selection that a client receives: all of it if the client's label set is unknown."""
        if self.vocab == "full" or client.present is None:
            return selection
        return with_tokens(selection, client.present)

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        if visit.net.model != self.task.model:
            visit = replace(visit, data=renumbered(visit.data))
        return super().local_update(payload, visit)

    def loss(self, visit: Visit) -> Loss:
        goal, absent = visit.data.goal, self._absent(visit)
        if not absent or self.mask == "neg_inf":
            return super().loss(visit)

        def of_own_tokens(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            # one more logit, which replaces the absent tokens' logits of 0
            return goal.loss(F.pad(logits, (0, 1), value=math.log(absent)), y)

        return of_own_tokens

    def _absent(self, visit: Visit) -> int:
        """Return the number of tokens that the client's network lacks."""
        model = self.task.model
        return model.classes - visit.data.goal.classes if isinstance(model, TokenModel) else 0


def _is_renumbered(model: Transformer) -> bool:
    """Return whether tokens can be renumbered: a mask must not be one of the classes."""
    return model.task == "next_token" or (model.task == "masked_lm" and model.ids > model.classes)


def with_tokens(selection: Slice, present: torch.Tensor) -> Slice:
    """Return the selection with only the rows of the tokens in `present`, [C] bool."""
    tokens = tuple(present.nonzero().flatten().tolist())
    model = selection.net.model
    assert isinstance(model, TokenModel)
    sizes = {"classes": len(tokens), "ids": model.ids - model.classes + len(tokens)}
    net = replace(selection.net, model=model.model_copy(update=sizes))
    return replace(selection, net=net, positions={**selection.positions, CLASSES: Picks(tokens, len(present))})


def renumbered(data: ClientData) -> ClientData:
    """Return a client's data with its own tokens renumbered 0, 1, ..., in their order."""
    present = data.present
    numbers, x = present.cumsum(0) - 1, data.samples["x"]
    own = torch.where(x >= 0, numbers[x.clamp(min=0).long()].to(x.dtype), x)
    classes = int(present.sum())
    goal = replace(data.goal, classes=classes)  # pyright: ignore[reportArgumentType]
    return ClientData(data.samples | {"x": own}, data.prepare.renumbered(classes), goal)
