"""Static batch norm (HeteroFL section 3.2).

In training it normalises by the batch and tracks no statistics, so that only its weight and bias are sent. Before an
evaluation, statistics are collected by a pass over training data: `collect(module, batches)` returns sums that can be
added over clients, workers and batches, `finish(sums)` computes means and variances, `load(module, ...)` loads them
into a network.

`kind` defines the statistics:

| kind | statistics |
|---|---|
| exact | mean and variance of all inputs of the layer, from the count, the sum and the sum of squares |
| cumulative | mean over batches of batch means and of unbiased variances, client by client (the paper's text) |
| pooled | as cumulative, over batches of all clients' samples, augmented (the authors' code, and their tables) |
| batch | none: every test batch is normalised by its own statistics (FedRolex's code) |

Batches have `evaluation.statistics_batch` samples: by default 100 for `exact`, otherwise those of
`training.batch_size`, as in HeteroFL's code, which passes over the shuffled training set in training batches after
every round. Samples are shuffled over all clients, for `cumulative` within each client (`rayfl.engine.collecting`), so
a client with few samples is not a batch of its own. `evaluation.batch_size` has no influence.

While sums are collected, all norms normalise by the batch. The inputs of the first norm do not depend on the batches,
so its `exact` statistics are exact. Inputs of later norms differ from those of one batch of all samples, because the
norms before them use the statistics of a shuffled batch. The difference falls with the size of the batch.

Methods can also keep running statistics (FjORD: per width): `tracked(module, ...)` updates them in training, and
`fresh(module)` returns their initial values.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.backends import cudnn

from rayfl.core.joined import modules_of
from rayfl.core.tensors import Params

MOMENTUM = 0.1
"""Weight of a batch in running statistics: torch's default."""

VARIANCE = ".running_var"
STATISTICS = (".running_mean", VARIANCE)
"""Suffixes of the names of running statistics."""


def is_statistic(name: str) -> bool:
    """Return whether a tensor is a running statistic of a norm, not a parameter."""
    return name.endswith(STATISTICS)


class StaticBatchNorm(nn.Module):
    """Batch norm over [B, C, ...] with affine parameters [C], without running statistics."""

    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    eps = 1e-5

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", None)
        self.register_buffer("running_var", None)
        self.sums: torch.Tensor | None = None
        self.running: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sums is not None:
            # running statistics with momentum 1 are those of the batch; a single value per channel leaves them
            mean, var = x.flatten() if x.numel() == x.shape[1] else x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
            y = self._by_batch(x, (mean, var), 1.0)
            self.sums += _moments(x, mean, var)
            return y
        if self.training or self.running_mean is None:
            return self._by_batch(x, self.running, MOMENTUM)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)

    def _by_batch(
        self, x: torch.Tensor, running: tuple[torch.Tensor, torch.Tensor] | None, momentum: float
    ) -> torch.Tensor:
        """Normalise by the batch, and update `running` means and unbiased variances."""
        # a single value per channel, e.g. of a batch of one image, has no variance
        mean, var = running if running and x.numel() > x.shape[1] else (None, None)
        return torch.batch_norm(x, self.weight, self.bias, mean, var, True, momentum, self.eps, cudnn.enabled)


def _moments(x: torch.Tensor, mean: torch.Tensor, unbiased: torch.Tensor) -> torch.Tensor:
    """Return the sums [6, C] of one batch [B, C, ...] with these means and variances [C]."""
    count = x.numel() // x.shape[1]
    mean, unbiased = mean.double(), unbiased.double()
    ones, var = torch.ones_like(mean), unbiased * ((count - 1) / count)
    return torch.stack([ones * count, mean * count, (var + mean * mean) * count, ones, mean, unbiased])


def static_norms(module: nn.Module) -> dict[str, StaticBatchNorm]:
    """Return the static norms of a network, by path."""
    return {path: m for path, m in modules_of(module).items() if isinstance(m, StaticBatchNorm)}


def batch_norms(module: nn.Module) -> list[StaticBatchNorm | nn.modules.batchnorm._BatchNorm]:
    """Return the batch norms of rayfl and of torch: in training, and without statistics also in evaluation, samples of
    a batch interact in them."""
    return [m for m in module.modules() if isinstance(m, (StaticBatchNorm, nn.modules.batchnorm._BatchNorm))]


def has_statistics(module: nn.Module) -> bool:
    """Return whether no norm normalises by the batch in evaluation, where samples of a batch would interact."""
    return all(norm.running_mean is not None for norm in batch_norms(module))


def is_tracked(module: nn.Module) -> bool:
    """Return whether the module is inside `tracked` with statistics."""
    return any(norm.running for norm in static_norms(module).values())


def collect(module: nn.Module, batches: Iterable[torch.Tensor]) -> Params:
    """Return sums of the inputs of every static norm over `batches` of [B, ...]: path -> [6, C] float64, rows
    (n, sum x, sum x^2; batches, sum of batch means, sum of unbiased batch variances). The network is in evaluation mode
    (Scaler and dropout are identities) but normalises by the batch."""
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
    """Return initial running statistics: mean 0 and variance 1, by the names of `finish`."""
    statistics = {}
    for path, norm in static_norms(module).items():
        statistics[f"{path}.running_mean"] = torch.zeros(norm.weight.numel())
        statistics[f"{path}.running_var"] = torch.ones(norm.weight.numel())
    return statistics


@contextlib.contextmanager
def tracked(module: nn.Module, statistics: Params) -> Iterator[None]:
    """Update `statistics` in place with every batch inside the block, as torch's BatchNorm. If empty: no tracking."""
    norms = static_norms(module) if statistics else {}
    for path, norm in norms.items():
        norm.running = statistics[f"{path}.running_mean"], statistics[f"{path}.running_var"]
    try:
        yield
    finally:
        for norm in norms.values():
            norm.running = None


def finish(sums: Params, kind: str) -> Params:
    """Return means and variances of all norms in torch's default type: `path.running_mean`, `path.running_var` ->
    [C]. A single value has no variance: 1, as in `fresh`."""
    statistics, dtype = {}, torch.get_default_dtype()
    for path, (n, x, xx, batches, means, variances) in sums.items():
        if kind == "exact":
            mean = x / n
            var = (xx / n - mean * mean).clamp_min(0)
        else:
            mean, var = means / batches, variances / batches
        statistics[f"{path}.running_mean"] = mean.to(dtype)
        statistics[f"{path}.running_var"] = torch.where(n > 1, var, 1.0).to(dtype)
    return statistics


def load(module: nn.Module, tensors: Params) -> None:
    """Load the statistics among `tensors` into a network. Without them, it also normalises by the batch in
    evaluation."""
    for path, norm in static_norms(module).items():
        mean = tensors.get(f"{path}.running_mean")
        var = tensors.get(f"{path}.running_var")
        device = norm.weight.device
        norm.running_mean = None if mean is None else mean.to(device)
        norm.running_var = None if var is None else var.to(device)
