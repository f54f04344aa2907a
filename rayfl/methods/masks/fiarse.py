"""FIARSE: a client trains the largest elements of the global parameters, and pushes those near the threshold away.

Paper: Wu, Wang, Wang, Liu, Su, Gao, "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel
Extraction", NeurIPS 2024, https://arxiv.org/abs/2407.19389.

Symbols: x the global parameters, g_k a client's capacity, d the number of maskable elements, F_k client k's loss.

    theta_k  =  the floor(g_k d)-th largest |x|                                                     (section 3.1)
    S_k         the elements of |x| >= theta_k, and whatever is not maskable
    M(w)     =  1 where |w| >= theta_k, else 0
    y_k         SGD from w = S_k x, theta_k fixed, each step on the gradient
                F_k'(w M(w)) M(w) [1 + 2 theta_k |w| / (|w| + theta_k)^2]                           (Eq. 3, TCB-GD)
    x  <-    sum_k S_k^T y_k / sum_k S_k^T 1, elsewhere unchanged                                   (Eq. 12, eta_s = 1)

The bracket is the product rule for w M(w) where the derivative of the hard mask is replaced by that of the probability
to be kept, p = (|w| - theta) / (|w| + theta), which is 0 at the threshold and 1 far above it (Appendix B). The bracket
falls from 1.5 at the threshold to 1. An element that falls below theta_k counts as 0 for the rest of the round; the
client answers the value that the element fell to.

    >>> import torch
    >>> from rayfl.methods.masks.fiarse import bracket
    >>> bracket(torch.tensor([-2.0, 4.0, 8.0]), torch.tensor(2.0))
    tensor([1.5000, 1.4444, 1.3200])

Departures:
1. g_k is the share of maskable parameters, as in the authors' code, and what is not maskable comes on top. The paper
   says FLOPs: `clients.metric: flops`. By parameters a small submodel has more than its share of FLOPs, because early
   layers have large elements.
2. The authors' code hands PyTorch a boolean mask, whose backward rule is never called: it has no bracket. That is
   `biased_term: false`.
3. The paper does not say what momentum, weight decay or Adam do with an element that fell below the threshold. Here
   the element does not move; `mask_update: false` leaves it to the optimiser, which may bring it back.
4. The code divides by the number of clients whose update of an element is not 0: `count: nonzero`. In norms too.
5. The tables' "layerwise" is one threshold a stage in the code: `threshold: shard`. `layer` is what the name says.
6. The code sends all of x. Here a client is sent, trains and answers the elements that it holds. It is also sent their
   places, tensor by tensor in the shorter of two codes: a bit an element, or a byte a held one (`rayfl.core.bitcodes`).
7. The code evaluates norms with statistics of the test batch: `evaluation.statistics: batch`.
8. With `clients.metric: width`, g_k is the share of parameters that the dense network of this width has.
9. Convolutions and linear layers can be masked, the head too. For text the code masks word embeddings, position
   embeddings and the encoder's linear layers, with a threshold each, and not the head: `embeddings: true`, `whole` and
   `shards` (`tune_configs/fiarse_table1_ag_news.yaml`).
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
    """The bracket of Eq. 3."""
    mask_update: bool = True
    """An element below the threshold is not moved by momentum, weight decay or Adam either."""
    count: Literal["holders", "nonzero"] = "holders"
    """Whose values an element's mean is over: the clients that hold it, or only those of them that changed it."""

    def extract(self, state: State, selection: Selection) -> Payload:
        payload = super().extract(state, selection)
        if places := cast(Mask, selection).places:
            payload["thresholds"] = cast(Largest, places).thresholds
        return payload

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        part = self.part(payload, visit)
        above = Above(part, payload.get("thresholds", {}))
        held_back = self.mask_update and self.task.training.moves_at_rest

        def adjust(module: nn.Module) -> None:
            if self.biased_term:
                above.scale_gradients()
            if held_back:
                above.remember()

        def project(module: nn.Module) -> None:
            if held_back:
                above.restore()

        update = self.answer(part, visit, self.fit(above, visit, adjust=adjust, project=project))
        if self.count == "nonzero":
            for name, t in part.params.items():
                changed = (t.cpu() != payload["params"][name]).float()
                update.sums["params"][name].mul_(changed)
                update.row_weights[name] = changed * update.weight
        return update


class Above(nn.Module):
    """Runs what a client holds with 0 for what is below the threshold: w M(w), M anew at every step."""

    def __init__(self, part: Part, thresholds: Params):
        """`thresholds`: name -> [], of the masked tensors."""
        super().__init__()
        self.part = part
        none = torch.zeros(())
        each = [thresholds.get(name, none).expand(t.numel()) for name, t in part.params.items()]
        self.thresholds = torch.cat(each).to(part.vector)
        """Of every element [k]; 0: it has none, and then no bracket either."""
        self.of_bracket = self.thresholds.masked_fill(self.thresholds == 0, torch.inf)
        self.kept = self.before = part.vector.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.part.vector
        self.kept = w.detach().abs() >= self.thresholds
        return self.part.run_with(torch.where(self.kept, w, 0.0), x)

    def scale_gradients(self) -> None:
        """Multiplies the gradients, which are 0 below the threshold, by the bracket of Eq. 3."""
        w = self.part.vector
        if w.grad is not None:
            w.grad.mul_(bracket(w.detach(), self.of_bracket))

    def remember(self) -> None:
        """The values before a step."""
        self.before = self.part.vector.detach().clone()

    def restore(self) -> None:
        """What was below the threshold in a step is as it was before it."""
        w = self.part.vector.detach()
        w.copy_(torch.where(self.kept, w, self.before))


def bracket(w: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """1 + 2 theta |w| / (|w| + theta)^2, element by element of w and theta > 0, of one shape; 1 for theta = inf."""
    # 1 + 2 r (1 - r) of a ratio, because the square of a number below 1e-19 is 0
    r = w.abs()
    r.div_(r + theta)
    return (1 - r).mul_(r).mul_(2).add_(1)
