"""What happens to clients' updates before they are averaged, and which are not averaged in."""

import math
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, field_validator
from torch import nn

from rayfl.config import Config
from rayfl.core.fold import Update
from rayfl.core.tensors import Tensors, leaves
from rayfl.training.transforms import TRANSFORMS_KIND, Transform


class Updates(Config):
    """The `updates:` section: what is done to client updates, and which are not averaged in."""

    policy: Literal["refuse", "stop"] = "refuse"
    """refuse: left out, counted and logged. stop: the run ends with the client's id."""
    growth: float = Field(default=1000.0, gt=0)
    """An update explodes if its norm, or that of what the client keeps, is over growth * (1 + norm of what the
    client was sent, or kept before)."""
    transforms: tuple[Any, ...] = ()
    """What is done to an update on its way to the server, in this order (`rayfl.training.transforms`), e.g.
    [{name: clip, norm: 1}, {name: topk, share: 0.1}], or a class of your own as "package.module:Class"."""

    @field_validator("transforms")
    @classmethod
    def _read(cls, given: tuple[Any, ...]) -> tuple[Transform, ...]:
        return tuple(TRANSFORMS_KIND.read(transform, f"transforms.{i}") for i, transform in enumerate(given))

    def unfit(self, update: Update, before: float) -> str | None:
        """Why one client's update must not be averaged in, or None. `before`: the norm of what the client started from;
        0 where it drew that itself, because then nothing says what it may have grown to."""
        products = {name: factors.tensors for name, factors in update.products.items()}
        answered = norm([*update.sums.values(), *update.whole.values(), products]) / (update.weight or 1.0)
        norms = [answered, *(norm([client_state]) for client_state in update.client_states.values())]
        if not all(map(math.isfinite, [*norms, norm(update.derived.values())])):
            return "not finite"
        after, limit = max(norms), self.growth * (1 + before)
        return f"norm {after:.3g} over the limit {limit:.3g}" if before and after > limit else None


def norm(tensors: Iterable[Tensors]) -> float:
    """The L2 norm of all floating point tensors together."""
    floats = [t for some in tensors for _, t in leaves(some) if t.is_floating_point()]
    return float(nn.utils.get_total_norm(floats)) if floats else 0.0
