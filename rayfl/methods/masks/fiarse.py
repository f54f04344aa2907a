"""FIARSE: clients train the largest elements of the global parameters, with larger gradients near the threshold.

Paper: Wu, Wang, Wang, Liu, Su, Gao, "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel
Extraction", NeurIPS 2024, https://arxiv.org/abs/2407.19389.

Symbols: $x$ the global parameters, $g_k$ a client's capacity, $d$ the number of maskable elements, $F_k$ client $k$'s
loss.

    $theta_k$     the $floor(g_k d)$-th largest $|x|$ (section 3.1)
    $S_k$         the elements with $|x| >= theta_k$, and everything that is not maskable
    $M(w)$        1 where $|w| >= theta_k$, otherwise 0
    $y_k$         SGD from $w = S_k x$, $theta_k$ fixed, each step on the gradient (Eq. 3, TCB-GD);
                $F_k'(w M(w)) M(w) [1 + (2 theta_k |w|)/(|w| + theta_k)^2]$
    $x$           $<- (sum_k S_k^T y_k)/(sum_k S_k^T 1)$, elsewhere unchanged (Eq. 12, $eta_s = 1$)

Cost per round: the elements of $S_k$, their positions and $theta_k$ down, the elements up; the client's training, whose
operations are counted by density; one sum on the server.

The bracket is the product rule for $w M(w)$, with the derivative of the hard mask replaced by that of the probability
to be kept, $p = (|w| - theta)/(|w| + theta)$, which is 0 at the threshold and 1 far above it (Appendix B). The bracket
falls from 1.5 at the threshold to 1. An element that falls below $theta_k$ counts as 0 for the rest of the round; the
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

    def new_part(self, module: nn.Module, mask: Mask, payload: Payload) -> Part:
        return Above(module, mask, payload)

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        part = cast(Above, self.part(payload, visit))
        freezes, before = self.mask_update and self.task.training.moves_at_rest, part.vector.detach()

        def adjust(module: nn.Module) -> None:
            nonlocal before
            if self.biased_term:
                part.scale_gradients()
            if freezes:
                before = part.vector.detach().clone()

        def project(module: nn.Module) -> None:
            if freezes:
                part.restore(before)

        update = self.answer(part, visit, self.fit(part, visit, adjust=adjust, project=project))
        if self.count == "nonzero":
            for name, t in part.params.items():
                changed = (t.cpu() != payload["params"][name]).float()
                update.sums["params"][name].mul_(changed)
                update.row_weights[name] = changed * update.weight
        return update


class Above(Part):
    """Client's part with elements below the threshold set to 0, w M(w). M is computed anew at every step."""

    def __init__(self, module: nn.Module, mask: Mask, payload: Payload):
        super().__init__(module, mask, payload)
        thresholds, none = payload.get("thresholds", {}), torch.zeros(())
        each = [thresholds.get(name, none).expand(self.held[name].numel()) for name in mask.net.layout.shapes]
        self.thresholds = torch.cat(each).to(self.vector)
        """Threshold of every element [k]. 0: none, and no bracket."""
        self.of_bracket = self.thresholds.masked_fill(self.thresholds == 0, torch.inf)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run_with(torch.where(self.kept(self.vector.detach()), self.vector, 0.0), x)

    def kept(self, w: torch.Tensor) -> torch.Tensor:
        """Return M(w), [k] bool."""
        return w.abs() >= self.thresholds

    def scale_gradients(self) -> None:
        """Multiply the gradients, which are 0 below the threshold, by the bracket of Eq. 3."""
        w = self.vector
        if w.grad is not None:
            w.grad.mul_(bracket(w.detach(), self.of_bracket))

    def restore(self, before: torch.Tensor) -> None:
        """Restore the values [k] of the elements that were below the threshold before the step."""
        w = self.vector.detach()
        w.copy_(torch.where(self.kept(before), w, before))


def bracket(w: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """Return 1 + 2 theta |w| / (|w| + theta)^2 elementwise for w and theta > 0 of one shape; 1 for theta = inf."""
    # as 1 + 2 r (1 - r), r = |w| / (|w| + theta): squares of numbers below 1e-19 underflow
    r = w.abs()
    r.div_(r + theta)
    return (1 - r).mul_(r).mul_(2).add_(1)
