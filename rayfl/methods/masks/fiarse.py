"""FIARSE: clients train the largest elements of the global parameters, with larger gradients near the threshold.

Paper: Wu, Wang, Wang, Liu, Su, Gao, "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel
Extraction", NeurIPS 2024, https://arxiv.org/abs/2407.19389.

Symbols: x the global parameters, g_k a client's capacity, d the number of maskable elements, F_k client k's loss.

    theta_k  =  the floor(g_k d)-th largest |x|                                                     (section 3.1)
    S_k         the elements of |x| >= theta_k, and everything that is not maskable
    M(w)     =  1 where |w| >= theta_k, else 0
    y_k         SGD from w = S_k x, theta_k fixed, each step on the gradient
                F_k'(w M(w)) M(w) [1 + 2 theta_k |w| / (|w| + theta_k)^2]                           (Eq. 3, TCB-GD)
    x  <-    sum_k S_k^T y_k / sum_k S_k^T 1, elsewhere unchanged                                   (Eq. 12, eta_s = 1)

The bracket is the product rule for w M(w), with the derivative of the hard mask replaced by that of the probability to
be kept, p = (|w| - theta) / (|w| + theta), which is 0 at the threshold and 1 far above it (Appendix B). The bracket
falls from 1.5 at the threshold to 1. An element that falls below theta_k counts as 0 for the rest of the round; the
client sends the value below the threshold.

    >>> import torch
    >>> from rayfl.methods.masks.fiarse import bracket
    >>> bracket(torch.tensor([-2.0, 4.0, 8.0]), torch.tensor(2.0))
    tensor([1.5000, 1.4444, 1.3200])

Departures:
1. g_k is the share of maskable parameters, as in the authors' code; parameters that are not maskable come on top. The
   paper says FLOPs: `clients.metric: flops`. By parameters a small submodel has more than its share of FLOPs, because
   early layers have large elements.
2. The authors' code uses a boolean mask, so PyTorch never calls its backward rule and there is no bracket:
   `biased_term: false`.
3. The paper does not say how momentum, weight decay and Adam treat an element below the threshold. Here the element
   does not move; with `mask_update: false` the optimiser moves it, possibly back above the threshold.
4. The code divides by the number of clients with a nonzero update of an element, norms included: `count: nonzero`.
5. The tables' "layerwise" is one threshold per stage in the code: `threshold: shard`. Here `layer` is per layer.
6. The code sends all of x. Here a client receives, trains and sends only its elements. It also receives their
   positions, per tensor in the shorter of two codes: a bit per element, or a byte per held one (`rayfl.core.bitcodes`).
7. The code evaluates norms with statistics of the test batch: `evaluation.statistics: batch`.
8. With `clients.metric: width`, g_k is the share of parameters that the dense network of this width has.
9. Convolutions and linear layers can be masked, including the head. For text the code masks word embeddings, position
   embeddings and the encoder's linear layers, with one threshold each, but not the head: `embeddings: true`, `whole`
   and `shards` (`tune_configs/fiarse_table1_ag_news.yaml`).
"""

from typing import Literal, cast

import torch
from torch import nn

from rayfl.core.fold import State, Update
from rayfl.core.submodel import Mask, Selection
from rayfl.core.tensors import Params
from rayfl.methods.base import Payload, Visit
from rayfl.methods.masks.base import Largest, Masked, Part


class FIARSE(Masked):
    name: Literal["fiarse"] = "fiarse"
    biased_term: bool = True
    """Multiply gradients by the bracket of Eq. 3."""
    mask_update: bool = True
    """Keep momentum, weight decay and Adam from moving elements below the threshold."""
    count: Literal["holders", "nonzero"] = "holders"
    """Clients in the mean of an element. holders: those that hold it. nonzero: the holders that changed it."""

    def extract(self, state: State, selection: Selection) -> Payload:
        payload = super().extract(state, selection)
        if places := cast(Mask, selection).places:
            payload["thresholds"] = cast(Largest, places).thresholds
        return payload

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        part = self.part(payload, visit)
        above = Above(part, payload.get("thresholds", {}))
        freezes = self.mask_update and self.task.training.moves_at_rest

        def adjust(module: nn.Module) -> None:
            if self.biased_term:
                above.scale_gradients()
            if freezes:
                above.remember()

        def project(module: nn.Module) -> None:
            if freezes:
                above.restore()

        update = self.answer(part, visit, self.fit(above, visit, adjust=adjust, project=project))
        if self.count == "nonzero":
            for name, t in part.params.items():
                changed = (t.cpu() != payload["params"][name]).float()
                update.sums["params"][name].mul_(changed)
                update.row_weights[name] = changed * update.weight
        return update


class Above(nn.Module):
    """Client's part with elements below the threshold set to 0, w M(w). M is computed anew at every step."""

    def __init__(self, part: Part, thresholds: Params):
        """Build with the thresholds [] of the masked tensors, by name."""
        super().__init__()
        self.part = part
        none = torch.zeros(())
        each = [thresholds.get(name, none).expand(t.numel()) for name, t in part.params.items()]
        self.thresholds = torch.cat(each).to(part.vector)
        """Threshold of every element [k]. 0: none, and no bracket."""
        self.of_bracket = self.thresholds.masked_fill(self.thresholds == 0, torch.inf)
        self.kept = self.before = part.vector.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.part.vector
        self.kept = w.detach().abs() >= self.thresholds
        return self.part.run_with(torch.where(self.kept, w, 0.0), x)

    def scale_gradients(self) -> None:
        """Multiply the gradients, which are 0 below the threshold, by the bracket of Eq. 3."""
        w = self.part.vector
        if w.grad is not None:
            w.grad.mul_(bracket(w.detach(), self.of_bracket))

    def remember(self) -> None:
        self.before = self.part.vector.detach().clone()

    def restore(self) -> None:
        """Restore the values of the elements that were below the threshold in the step."""
        w = self.part.vector.detach()
        w.copy_(torch.where(self.kept, w, self.before))


def bracket(w: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """Return 1 + 2 theta |w| / (|w| + theta)^2 elementwise for w and theta > 0 of one shape; 1 for theta = inf."""
    # as 1 + 2 r (1 - r), r = |w| / (|w| + theta): squares of numbers below 1e-19 underflow
    r = w.abs()
    r.div_(r + theta)
    return (1 - r).mul_(r).mul_(2).add_(1)
