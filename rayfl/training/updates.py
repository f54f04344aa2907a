"""Processing of client updates before aggregation: transforms, and rejection of diverged updates."""

import math
from typing import Any, Literal

from pydantic import Field, field_validator

from rayfl.config import Config
from rayfl.core.fold import Update
from rayfl.core.tensors import norm
from rayfl.training.secure import SecureAggregation
from rayfl.training.transforms import TRANSFORMS_KIND, Transform, check_order


class Updates(Config):
    """The `updates:` section: transforms of client updates, and rejection of diverged ones."""

    policy: Literal["refuse", "stop"] = "refuse"
    """Handling of diverged updates. refuse: exclude, count and log them. stop: end the run with the client's id."""
    growth: float = Field(default=1000.0, gt=0)
    """An update diverges if its norm, or that of the client state, exceeds growth * (1 + norm before training)."""
    transforms: tuple[Any, ...] = ()
    """Transforms of an update before it is sent, applied in this order (`rayfl.training.transforms`), e.g.
    [{name: clip, norm: 1}, {name: topk, share: 0.1}], or your own class as "package.module:Class"."""
    secure_aggregation: SecureAggregation | None = Field(default=None, exclude_if=lambda secure: secure is None)
    """Simulated secure aggregation, after the transforms and clipping (`rayfl.training.secure`). Default: none."""

    @field_validator("transforms")
    @classmethod
    def _read(cls, given: tuple[Any, ...]) -> tuple[Transform, ...]:
        transforms = tuple(TRANSFORMS_KIND.read(transform, f"transforms.{i}") for i, transform in enumerate(given))
        check_order(transforms)
        return transforms

    def unfit(self, update: Update, before: float) -> str | None:
        """Return the reason to exclude one client's update, or None. `before`: norm of the client's starting point; 0
        if the client initialised it, which disables the limit. Groups in `update.as_is`, such as counts of labels, only
        have to be finite."""
        products = {name: factors.tensors for name, factors in update.products.items()}
        groups = [*update.sums.items(), *update.whole.items()]
        counted = [params for group, params in groups if group in update.as_is]
        trained = [params for group, params in groups if group not in update.as_is]
        answered = norm([*trained, products]) / (update.weight or 1.0)
        norms = [answered, *(norm([client_state]) for client_state in update.client_states.values())]
        if not all(map(math.isfinite, [*norms, norm([*counted, *update.derived.values()])])):
            return "not finite"
        after, limit = max(norms), self.growth * (1 + before)
        return f"norm {after:.3g} over the limit {limit:.3g}" if before and after > limit else None
