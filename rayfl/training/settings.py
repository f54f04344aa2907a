"""Settings of local training, and functions on logits and losses that all methods share."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import nn
from torch.backends import mkldnn

from rayfl.config import Config
from rayfl.core.net import Answer

Count = TypeVar("Count", int, np.ndarray)
Rate = float | Callable[[int], float]
"""Learning rate of a round, or of each of its steps, counted from 0."""


class Training(Config):
    """Local training of clients. The state of the optimizer is reset every round."""

    epochs: int = Field(default=1, ge=0)
    """Passes over the client's data per round. 0 without `steps`: no training."""
    steps: int | None = Field(default=None, ge=1)
    """Steps per round, in place of `epochs`; the data are reshuffled after each pass, or, with `data.order: stored`, a
    part of a pass starts at a random batch. Default: use `epochs`."""
    batch_size: int = Field(default=20, ge=1, le=10**6)
    """Samples per step; the last batch of an epoch can be smaller."""
    accumulate: int = Field(default=1, ge=1)
    """Parts of a batch that pass through the network one after another, a setting of memory: a step has the gradient of
    the whole batch, up to rounding. Norms over a batch see its parts."""
    lr: float = Field(default=0.05, gt=0)
    """Learning rate in round 0."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Optimizer. adamw: Adam with decoupled weight decay."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of SGD."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of Adam's running means of gradients and of squared gradients."""
    weight_decay: float = Field(default=0.0, ge=0)
    """L2 penalty on all parameters, including norms and biases."""
    clip: float | None = Field(default=None, gt=0)
    """Maximum global L2 norm of the gradient of each step. Default: no clipping."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Precision of matrix products and convolutions; parameters, gradients and sums are float32. tf32: 10 bits of
    mantissa, on GPUs that support it, otherwise fp32. bf16: autocast, also on the CPU."""
    milestones: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Numbers of rounds after which the learning rate is multiplied by `decay` (as in HeteroFL)."""
    decay: float = Field(default=0.1, gt=0)
    """Factor of the learning rate per milestone."""
    round_decay: float = Field(default=1.0, gt=0)
    """Factor of the learning rate per round (DepthFL 0.998, SpaFL 0.993)."""
    floor: float = Field(default=0.0, ge=0)
    """Minimum learning rate after decay (SpaFL on CIFAR-100: 0.0001)."""
    warmup: int = Field(default=0, ge=0)
    """Warm-up steps with a linear rise from 0. A client's steps are counted over all rounds, also those without it."""
    cosine_rounds: int = Field(default=0, ge=0)
    """Rounds of cosine decay: the learning rate falls to 0 step by step, after the warm-up. 0: no cosine decay."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum only with optimizer: sgd; {self.optimizer} has betas")
        if self.optimizer == "sgd" and self.betas != (0.9, 0.999):
            raise ValueError("betas only with optimizer: adam or adamw")
        if self.floor > self.lr:
            raise ValueError(f"a floor of at most lr = {self.lr:g}; floor is {self.floor:g}")
        if self.floor and self.cosine_rounds:
            raise ValueError("floor without cosine_rounds, whose learning rate falls to 0")
        return self

    @property
    def at_once(self) -> int:
        """Maximum number of samples in a forward pass."""
        return -(-self.batch_size // self.accumulate)

    @property
    def moments(self) -> int:
        """Number of tensors that the optimizer keeps per parameter."""
        return 2 if self.optimizer != "sgd" else int(self.momentum > 0)

    @property
    def moves_at_rest(self) -> bool:
        """True if a step can change a parameter with zero gradient."""
        return bool(self.momentum or self.weight_decay or self.optimizer != "sgd")

    @property
    def update_rule(self) -> tuple[str, float, tuple[float, float], float]:
        """Settings of the optimizer except its learning rate."""
        return self.optimizer, self.momentum, self.betas, self.weight_decay

    def new_optimizer(self, parameters: Sequence[nn.Parameter], lr: float | torch.Tensor) -> torch.optim.Optimizer:
        """Return a new optimizer. With `lr` as a tensor on a GPU, its steps can be recorded as a CUDA graph."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr, self.momentum, weight_decay=self.weight_decay, fused=True)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        recorded = isinstance(lr, torch.Tensor) and lr.is_cuda
        return kind(parameters, lr, self.betas, weight_decay=self.weight_decay, fused=True, capturable=recorded)

    def lr_at(self, round: int) -> float:
        """Return the learning rate of a round, counted from 0, before warm-up and cosine."""
        passed = sum(round >= milestone for milestone in self.milestones)
        return max(self.lr * self.decay**passed * self.round_decay**round, self.floor)

    def rate(self, round: int, samples: int, made: int = 0) -> Rate:
        """Return the learning rate of a client with `samples` samples in a round. `made`: the number of steps that are
        made in the round, if they are more than those of these settings; the schedule of the round is spread over
        them."""
        lr = self.lr_at(round)
        if not (self.warmup or self.cosine_rounds):
            return lr
        steps = self.batches_of(samples)
        part = min(1.0, steps / made) if made else 1.0
        return lambda step: lr * self._factor(round * steps + step * part, self.cosine_rounds * steps)

    def _factor(self, step: float, end: int) -> float:
        """Return the factor of the learning rate at a step of the client's whole training, of `end` steps."""
        if step < self.warmup:
            return step / self.warmup
        if not self.cosine_rounds:
            return 1.0
        return (1 + math.cos(math.pi * min((step - self.warmup) / max(end - self.warmup, 1), 1))) / 2

    def batches_of(self, samples: Count) -> Count:
        """Return the steps per round of a client with `samples` samples, or of each of several clients."""
        return 0 * samples + self.steps if self.steps else self.epochs * -(-samples // self.batch_size)

    def for_epochs(self, epochs: int) -> Self:
        """Return these settings with so many epochs, in place of `steps`."""
        return self.model_copy(update={"epochs": epochs, "steps": None})

    def samples_of(self, samples: Count) -> Count:
        """Return the samples that a client with `samples` samples, or each of several clients, processes per round."""
        if self.steps is None:
            return self.epochs * samples
        per_epoch = -(-samples // self.batch_size)
        full, rest = self.steps // per_epoch, self.steps % per_epoch
        return full * samples + rest * self.batch_size


Logits = torch.Tensor | tuple[torch.Tensor, ...]
"""Output of a network: logits [B, ..., C], or the logits of all its exits, in order."""


def every_exit(logits: Logits) -> tuple[torch.Tensor, ...]:
    """Return the logits of all exits; the last are those of the head."""
    return logits if isinstance(logits, tuple) else (logits,)


def answered(logits: Logits, answer: Answer) -> torch.Tensor:
    """Return the prediction [B, ..., C] of a network: logits of the last exit, or the mean over all exits."""
    exits = every_exit(logits)
    return exits[-1] if answer == "last" or len(exits) == 1 else torch.stack(exits).mean(0)


Loss = Callable[..., torch.Tensor]
"""(output of the network, y) -> mean loss over the batch."""


def over_exits(loss: Loss) -> Loss:
    """Return the sum of a loss over all exits."""
    return lambda logits, y: torch.stack([loss(z, y) for z in every_exit(logits)]).sum()


Fill = Literal["none", "zero", "neg_inf"]


def mask_logits(logits: torch.Tensor, present: torch.Tensor, fill: Fill) -> torch.Tensor:
    """Return logits [B, ..., C] with those of absent classes (`present` [C] bool) replaced (HeteroFL section 4):
    by 0, as in the authors' code, or by -inf. `none`: no change."""
    if fill == "none":
        return logits
    return logits.masked_fill(~present, 0.0 if fill == "zero" else float("-inf"))


def divergence(teacher: torch.Tensor, student: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return KL(softmax(teacher / T) || softmax(student / T)) of logits [n, C], the mean over the rows; 0 without rows,
    because a batch of texts may consist of padding only."""
    target, given = (F.log_softmax(logits / temperature, 1) for logits in (teacher, student))
    return F.kl_div(given, target, reduction="sum", log_target=True) / max(len(given), 1)


@contextmanager
def kernels(training: Training, macs: int, device: torch.device) -> Iterator[None]:
    """Select the kernels for a network of `macs` multiply-adds per sample inside the block.

    On a CPU, steps with few multiply-adds use torch's own convolutions, because oneDNN's need longer to prepare than to
    compute (measured with networks of 8x8 to 32x32 pixels). The kernels affect the bits of results, so the choice
    depends on the network and the batch size only. On a GPU, `training.precision` decides.
    """
    if device.type == "cuda":
        with _tf32(training.precision == "tf32"):
            yield
        return
    before = mkldnn.enabled
    mkldnn.enabled = before and not (training.batch_size <= 20 and macs * training.batch_size <= 600_000)
    try:
        yield
    finally:
        mkldnn.enabled = before


@contextmanager
def precise(training: Training, device: torch.device) -> Iterator[None]:
    """Select the kernels of all other computations inside the block: on a GPU, those of `training.precision` that
    repeat their bits. Operations without such kernels warn. `rayfl.engine` sets the variable that cuBLAS needs."""
    if device.type != "cuda":
        yield
        return
    with _tf32(training.precision == "tf32"), _repeatable():
        yield


@contextmanager
def _repeatable() -> Iterator[None]:
    # modules whose attributes are properties
    cudnn, memory = cast(Any, torch.backends.cudnn), cast(Any, torch.utils.deterministic)
    attention = torch.backends.cuda
    before = cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory
    mode, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fast, faster = attention.mem_efficient_sdp_enabled(), attention.cudnn_sdp_enabled()
    # otherwise every torch.empty is filled with NaN
    cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = True, False, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    # the backward passes of these two do not repeat their bits
    attention.enable_mem_efficient_sdp(False)
    attention.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(mode, warn_only=warns)
        attention.enable_mem_efficient_sdp(fast)
        attention.enable_cudnn_sdp(faster)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before  # pyright: ignore[reportAttributeAccessIssue]
