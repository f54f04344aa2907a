"""Static batch norm (HeteroFL section 3.2): the model's own matter, calibrated in one generic way.

While training it always normalises by the batch and tracks nothing, so that only its weight and bias
travel. Before a network is evaluated its statistics are collected by a pass over training data:
`collect(net, batches)` gives sums that **add** over clients, workers and batches, `finish(sums)` turns
them into means and variances, and `load(net, ...)` puts those into a network.

How the sums are put together is `kind`:

| kind | what it is |
|---|---|
| exact | count, sum of x, sum of x^2 over everything that the layer saw: the statistics of the pooled activations |
| cumulative | the mean over batches of batch means and of unbiased variances, client by client (the paper's text) |
| pooled | the same mean, over batches of the pooled and shuffled training set (the authors' code) |
| batch | no statistics: every test batch is normalised by its own (FedRolex's code) |

In all of them a layer's input is what the layers before it give when they normalise by the batch.

A method may instead keep running statistics of its own (FjORD's per width): `tracked(net, ...)` updates
them while the network trains, `fresh(net)` is where they start.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.backends import cudnn

from rayfl.tensors import Params

MOMENTUM = 0.1
"""Share of a batch in running statistics: torch's default."""


class StaticBatchNorm(nn.Module):
    """Batch norm over [B, C, ...] with affine [C] and no statistics of its own."""

    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None

    def __init__(self, channels: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps
        self.register_buffer("running_mean", None)
        self.register_buffer("running_var", None)
        self.sums: torch.Tensor | None = None
        self.running: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sums is not None:
            self.sums += _moments(x)
        by_batch = self.training or self.running_mean is None or self.sums is not None
        if by_batch:
            # F.batch_norm refuses a single value a channel, which a batch of one image may leave; it has no variance
            mean, var = self.running if self.running and x.numel() > x.shape[1] else (None, None)
            return torch.batch_norm(x, self.weight, self.bias, mean, var, True, MOMENTUM, self.eps, cudnn.enabled)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


def _moments(x: torch.Tensor) -> torch.Tensor:
    """What one batch [B, C, ...] adds to the sums [6, C]."""
    var, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
    var, mean = var.double(), mean.double()
    count = x.numel() // x.shape[1]
    ones = torch.ones_like(mean)
    unbiased = var * (count / max(count - 1, 1))
    return torch.stack([ones * count, mean * count, (var + mean * mean) * count, ones, mean, unbiased])


def static_norms(net: nn.Module) -> dict[str, StaticBatchNorm]:
    return {path: m for path, m in net.named_modules() if isinstance(m, StaticBatchNorm)}


def collect(net: nn.Module, batches: Iterable[torch.Tensor]) -> Params:
    """Sums of the inputs of every static norm over `batches` of [B, ...]: path -> [6, C] float64, rows
    (n, sum x, sum x^2; batches, sum of batch means, sum of unbiased batch variances).

    The network is in evaluation mode (Scaler and dropout are identities) but normalises by the batch.
    """
    norms = static_norms(net)
    net.eval()
    for module in norms.values():
        module.sums = torch.zeros(6, module.weight.numel(), dtype=torch.float64, device=module.weight.device)
    try:
        with torch.no_grad():
            for x in batches:
                net(x)
        return {path: module.sums.cpu() for path, module in norms.items() if module.sums is not None}
    finally:
        for module in norms.values():
            module.sums = None


def fresh(net: nn.Module) -> Params:
    """Where running statistics start: mean 0 and variance 1, by the names of `finish`."""
    statistics = {}
    for path, module in static_norms(net).items():
        statistics[f"{path}.running_mean"] = torch.zeros(module.weight.numel())
        statistics[f"{path}.running_var"] = torch.ones(module.weight.numel())
    return statistics


@contextlib.contextmanager
def tracked(net: nn.Module, statistics: Params) -> Iterator[None]:
    """Inside, every batch that the network normalises by updates `statistics` in place, as torch's BatchNorm
    does: with its mean and its unbiased variance. Without statistics nothing is tracked."""
    norms = static_norms(net) if statistics else {}
    for path, module in norms.items():
        module.running = statistics[f"{path}.running_mean"], statistics[f"{path}.running_var"]
    try:
        yield
    finally:
        for module in norms.values():
            module.running = None


def finish(sums: Params, kind: str) -> Params:
    """Means and variances of all norms, float32: `path.running_mean`, `path.running_var` -> [C]."""
    statistics = {}
    for path, (n, x, xx, batches, means, variances) in sums.items():
        if kind == "exact":
            mean = x / n
            var = (xx / n - mean * mean).clamp_min(0)
        else:
            mean, var = means / batches, variances / batches
        statistics[f"{path}.running_mean"] = mean.float()
        statistics[f"{path}.running_var"] = var.float()
    return statistics


def load(net: nn.Module, statistics: Params) -> None:
    """Puts statistics into a network; with none, it normalises by the batch also in evaluation."""
    for path, module in static_norms(net).items():
        mean = statistics.get(f"{path}.running_mean")
        var = statistics.get(f"{path}.running_var")
        device = module.weight.device
        module.running_mean = None if mean is None else mean.to(device)
        module.running_var = None if var is None else var.to(device)
