"""A client of a language model that has the rows of its own tokens alone: in the token embedding, in the layer that
answers and in its bias.

In HeteroFL's code every client holds the whole vocabulary, of which its loss sees its own tokens: the logits of all
others are 0, and their rows stay behind (`label_rows: present`). So nothing is lost if they are never sent. With n of V
tokens its own, a client has the network of n tokens, in which they are 0 ... n - 1, and the loss

    log(sum over its own tokens of e^z + V - n) - z_y

which is the whole network's, to rounding. The server has to know which tokens a client has, as it does anyway once
their rows come back.
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
from rayfl.training.settings import Loss


class OwnVocabulary(Dense):
    """A method whose clients may do so; it passes what a client holds through `of_vocabulary`."""

    vocab: Literal["full", "own"] = "full"
    """Of a language model, which tokens' rows a client is sent, trains and sends: all, or those of the tokens that it
    has, with the same result to rounding."""

    @model_validator(mode="after")
    def _same_result(self) -> Self:
        if self.vocab == "own" and (self.mask == "none" or self.label_rows == "all"):
            raise ValueError("vocab: own with mask: zero or neg_inf and label_rows: present only")
        return self

    def check(self, rounds: int, clients: Population) -> None:
        super().check(rounds, clients)
        model = self.task.model
        if self.vocab == "own" and not (isinstance(model, TokenModel) and _is_renumbered(model)):
            raise ConfigError(
                f"method.vocab: given own; allowed: full with model {model.name}, because it answers no tokens here, "
                "or hides them by one of its vocabulary"
            )

    def of_vocabulary(self, selection: Slice, client: Client) -> Slice:
        """What a client is sent of a selection: all of it where nobody knows its label set, as of a made-up client."""
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
            # one more logit, which stands for as many of 0
            return goal.loss(F.pad(logits, (0, 1), value=math.log(absent)), y)

        return of_own_tokens

    def _absent(self, visit: Visit) -> int:
        """Tokens that the client's network does not know."""
        model = self.task.model
        return model.classes - visit.data.goal.classes if isinstance(model, TokenModel) else 0


def _is_renumbered(model: TokenModel) -> bool:
    """Whether its tokens can have other numbers: where there is a mask, it is none of them."""
    return model.task == "next_token" or (model.task == "masked_lm" and model.ids > model.classes)


def with_tokens(selection: Slice, present: torch.Tensor) -> Slice:
    """The selection with the rows of the tokens of a label set, [C] bool, alone."""
    tokens = tuple(present.nonzero().flatten().tolist())
    model = selection.net.model
    assert isinstance(model, TokenModel)
    sizes = {"classes": len(tokens), "ids": model.ids - model.classes + len(tokens)}
    net = replace(selection.net, model=model.model_copy(update=sizes))
    return replace(selection, net=net, positions={**selection.positions, CLASSES: Picks(tokens, len(present))})


def renumbered(data: ClientData) -> ClientData:
    """A client's data in which its own tokens are 0, 1, ..., in their order."""
    present = data.present
    numbers, x = present.cumsum(0) - 1, data.samples["x"]
    own = torch.where(x >= 0, numbers[x.clamp(min=0).long()].to(x.dtype), x)
    classes = int(present.sum())
    goal = replace(data.goal, classes=classes)  # pyright: ignore[reportArgumentType]
    return ClientData(data.samples | {"x": own}, data.prepare.renumbered(classes), goal)
