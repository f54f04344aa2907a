"""Static batch norm (HeteroFL section 3.2): the model's own matter, calibrated in one generic way.

While training it always normalises by the batch and tracks nothing, so that only its weight and bias travel. Before a
network is evaluated its statistics are collected by a pass over training data: `collect(module, batches)` gives sums
that **add** over clients, workers and batches, `finish(sums)` turns them into means and variances, and
`load(module, ...)` puts those into a network.

How the sums are put together is `kind`:

| kind | what it is |
|---|---|
| exact | mean and variance of everything that the layer saw: from the count, the sum and the sum of squares |
| cumulative | the mean over batches of batch means and of unbiased variances, client by client (the paper's text) |
| pooled | the same mean, over batches of the pooled and shuffled training set (the authors' code, and their tables) |
| batch | no statistics: every test batch is normalised by its own (FedRolex's code) |

What a norm sees comes from the layers before it, which normalise by the batch while sums are collected. A norm that no
other norm precedes sees the same in any batches: there `exact` is exact. What a later norm sees depends on how the data
were cut into batches (in `exact` and `cumulative` those of single clients), and it sees something else once the norms
before it use their statistics. There `exact` is exact for what it saw alone.

A method may instead keep running statistics of its own (FjORD's per width): `tracked(module, ...)` updates them while
the network trains, `fresh(module)` is where they start.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.backends import cudnn

from rayfl.core.tensors import Params

MOMENTUM = 0.1
"""Share of a batch in running statistics: torch's default."""

VARIANCE = ".running_var"
STATISTICS = (".running_mean", VARIANCE)
"""How the names of a norm's running statistics end."""


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


def static_norms(module: nn.Module) -> dict[str, StaticBatchNorm]:
    """The static norms of a network, by path."""
    return {path: m for path, m in module.named_modules() if isinstance(m, StaticBatchNorm)}


def by_batch(module: nn.Module) -> bool:
    """Whether samples of a batch meet while the network trains: it has batch norms, ours or torch's."""
    return any(isinstance(m, (StaticBatchNorm, nn.modules.batchnorm._BatchNorm)) for m in module.modules())


def is_tracked(module: nn.Module) -> bool:
    """Whether it is inside `tracked` with statistics."""
    return any(norm.running for norm in static_norms(module).values())


def collect(module: nn.Module, batches: Iterable[torch.Tensor]) -> Params:
    """Sums of the inputs of every static norm over `batches` of [B, ...]: path -> [6, C] float64, rows
    (n, sum x, sum x^2; batches, sum of batch means, sum of unbiased batch variances).

    The network is in evaluation mode (Scaler and dropout are identities) but normalises by the batch.
    """
    norms = static_norms(module)
    module.eval()
    for norm in norms.values():
        norm.sums = torch.zeros(6, norm.weight.numel(), dtype=torch.float64, device=norm.weight.device)
    try:
        with torch.no_grad():
            for x in batches:
                module(x)
        return {path: norm.sums.cpu() for path, norm in norms.items() if norm.sums is not None}
    finally:
        for norm in norms.values():
            norm.sums = None


def fresh(module: nn.Module) -> Params:
    """Where running statistics start: mean 0 and variance 1, by the names of `finish`."""
    statistics = {}
    for path, norm in static_norms(module).items():
        statistics[f"{path}.running_mean"] = torch.zeros(norm.weight.numel())
        statistics[f"{path}.running_var"] = torch.ones(norm.weight.numel())
    return statistics


@contextlib.contextmanager
def tracked(module: nn.Module, statistics: Params) -> Iterator[None]:
    """Inside, every batch that the network normalises by updates `statistics` in place, as torch's BatchNorm
    does: with its mean and its unbiased variance. Without statistics nothing is tracked."""
    norms = static_norms(module) if statistics else {}
    for path, norm in norms.items():
        norm.running = statistics[f"{path}.running_mean"], statistics[f"{path}.running_var"]
    try:
        yield
    finally:
        for norm in norms.values():
            norm.running = None


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


def load(module: nn.Module, statistics: Params) -> None:
    """Puts statistics into a network; with none, it normalises by the batch also in evaluation."""
    for path, norm in static_norms(module).items():
        mean = statistics.get(f"{path}.running_mean")
        var = statistics.get(f"{path}.running_var")
        device = norm.weight.device
        norm.running_mean = None if mean is None else mean.to(device)
        norm.running_var = None if var is None else var.to(device)
