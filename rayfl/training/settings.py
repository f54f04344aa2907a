"""Local training: plain functions on tensors and modules, shared by all methods."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Annotated, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import nn
from torch.backends import mkldnn

from rayfl.config import Config
from rayfl.core.net import Answer

Rate = float | Callable[[int], float]
"""The learning rate of a round, or of each of its steps, counted from 0."""


class Training(Config):
    """How a client trains. The optimiser is new every round; its state dies with the round."""

    epochs: int = Field(default=1, ge=0)
    """Passes over the client's data a round. 0 with `steps` unset trains nothing."""
    steps: int | None = Field(default=None, ge=1)
    """Batches a round, instead of whole epochs; the data is reshuffled when it is used up."""
    batch_size: int = Field(default=20, ge=1, le=10**6)
    """Samples a step; the last incomplete batch of an epoch is kept."""
    lr: float = Field(default=0.05, gt=0)
    """Learning rate in round 0."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """adamw: Adam with decoupled weight decay."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """SGD momentum."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Adam's decay of the running means of gradients and of their squares."""
    weight_decay: float = Field(default=0.0, ge=0)
    """L2 on every parameter, norms and biases too."""
    clip: float | None = Field(default=None, gt=0)
    """Largest global L2 norm of the gradient, at every step."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Of multiplications and convolutions; parameters, gradients and sums are float32. tf32: 10 bits of a factor's
    mantissa, on GPUs that have it, elsewhere as fp32. bf16: autocast, on the CPU too."""
    milestones: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Rounds from which the rate is multiplied by `decay` once more: felt in the first round after the
    milestone's (HeteroFL steps its schedule after a round)."""
    decay: float = Field(default=0.1, gt=0)
    """Factor of a milestone."""
    round_decay: float = Field(default=1.0, gt=0)
    """Factor of every round (DepthFL 0.998, SpaFL 0.993)."""
    floor: float = Field(default=0.0, ge=0)
    """Rate below which decay does not go (SpaFL's CIFAR-100: 0.0001)."""
    warmup: int = Field(default=0, ge=0)
    """Steps of a client over which its rate rises linearly from 0, counted as if it took part in all rounds."""
    cosine_rounds: int = Field(default=0, ge=0)
    """Rounds at whose end the rate is 0: after the warm-up it falls along half a cosine, step by step. 0: it does
    not."""

    @model_validator(mode="after")
    def _of_its_optimizer(self) -> Self:
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum with optimizer: sgd only; {self.optimizer} has betas")
        if self.optimizer == "sgd" and self.betas != (0.9, 0.999):
            raise ValueError("betas with optimizer: adam or adamw only")
        return self

    @property
    def moves_at_rest(self) -> bool:
        """Whether a step may move a parameter whose gradient is 0."""
        return bool(self.momentum or self.weight_decay or self.optimizer != "sgd")

    @property
    def update_rule(self) -> tuple[str, float, tuple[float, float], float]:
        """What an optimizer is made of, but for its rate."""
        return self.optimizer, self.momentum, self.betas, self.weight_decay

    def new_optimizer(self, parameters: Sequence[nn.Parameter], lr: float | torch.Tensor) -> torch.optim.Optimizer:
        """One whose rate is read from a tensor at every step can be recorded on a GPU."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr, self.momentum, weight_decay=self.weight_decay, fused=True)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        recorded = isinstance(lr, torch.Tensor) and lr.is_cuda
        return kind(parameters, lr, self.betas, weight_decay=self.weight_decay, fused=True, capturable=recorded)

    def lr_at(self, round: int) -> float:
        """The learning rate of a round, counted from 0, before warm-up and cosine."""
        passed = sum(round >= milestone for milestone in self.milestones)
        return max(self.lr * self.decay**passed * self.round_decay**round, self.floor)

    def rate(self, round: int, samples: int) -> Rate:
        """What a client with so many samples trains at in a round."""
        lr = self.lr_at(round)
        if not (self.warmup or self.cosine_rounds):
            return lr
        steps = self.batches_of(samples)
        return lambda step: lr * self._factor(round * steps + step, self.cosine_rounds * steps)

    def _factor(self, step: int, end: int) -> float:
        """Of a step in the client's whole training, the cosine's last being `end` - 1."""
        if step < self.warmup:
            return step / self.warmup
        if not self.cosine_rounds:
            return 1.0
        return (1 + math.cos(math.pi * min((step - self.warmup) / max(end - self.warmup, 1), 1))) / 2

    def batches_of(self, samples: int) -> int:
        """Steps that a client with so many samples makes in a round."""
        return self.steps or self.epochs * -(-samples // self.batch_size)

    def samples_of(self, samples: int) -> int:
        """Samples that such a client processes in a round."""
        if self.steps is None:
            return self.epochs * samples
        per_epoch = -(-samples // self.batch_size)
        full, rest = divmod(self.steps, per_epoch)
        return full * samples + rest * self.batch_size


Logits = torch.Tensor | tuple[torch.Tensor, ...]
"""What a network answers: logits [B, ..., C], or those of all its early exits, the first exit's first."""


def every_exit(logits: Logits) -> tuple[torch.Tensor, ...]:
    """The logits of all exits, the head's own being the last."""
    return logits if isinstance(logits, tuple) else (logits,)


def answered(logits: Logits, answer: Answer) -> torch.Tensor:
    """The one answer [B, ..., C] of a network: its last exit's, or the mean over its exits."""
    exits = every_exit(logits)
    return exits[-1] if answer == "last" or len(exits) == 1 else torch.stack(exits).mean(0)


Loss = Callable[..., torch.Tensor]
"""(what the network answers, y) -> the mean over the batch."""
Fill = Literal["none", "zero", "neg_inf"]


def mask_logits(logits: torch.Tensor, present: torch.Tensor, fill: Fill) -> torch.Tensor:
    """logits [B, ..., C] with those of absent classes (`present` [C] bool) replaced (HeteroFL section 4):
    by 0 as its authors do, or by -inf; `none` leaves them."""
    if fill == "none":
        return logits
    return logits.masked_fill(~present, 0.0 if fill == "zero" else float("-inf"))


def divergence(teacher: torch.Tensor, student: torch.Tensor, temperature: float) -> torch.Tensor:
    """KL(softmax(teacher / T) || softmax(student / T)) of logits [n, C], the mean over the rows."""
    target, given = (F.log_softmax(logits / temperature, 1) for logits in (teacher, student))
    return F.kl_div(given, target, reduction="batchmean", log_target=True)


@contextmanager
def kernels(training: Training, macs: int, device: torch.device) -> Iterator[None]:
    """How a network of so many multiply-adds a sample is computed inside.

    On a CPU by torch's own convolutions where a step has so few multiply-adds that oneDNN's take longer to prepare than
    to compute; measured with networks of 8x8 to 32x32 pixels. Which ones is a matter of bits, so it depends on the
    network and on the batch size alone. On a GPU by `training.precision`.
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
    """How whatever else a worker computes for a run is computed inside: on a GPU by `training.precision`."""
    with _tf32(training.precision == "tf32") if device.type == "cuda" else nullcontext():
        yield


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before  # pyright: ignore[reportAttributeAccessIssue]
