"""Local training and evaluation: plain functions on tensors and networks, shared by all methods."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import nn

from rayfl.config import Config
from rayfl.tensors import Params

Rate = float | Callable[[int], float]
"""The learning rate of a round, or of each of its steps, counted from 0."""


class Training(Config):
    """How a client trains. The optimiser is new every round; its state dies with the round."""

    epochs: int = Field(default=1, ge=0)
    """Passes over the client's data a round. 0 with `steps` unset trains nothing."""
    steps: int | None = Field(default=None, ge=1)
    """Batches a round, instead of whole epochs; the data is reshuffled when it is used up."""
    batch_size: int = Field(default=20, ge=1)
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
    milestones: tuple[int, ...] = ()
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

    def new_optimizer(self, parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr, self.momentum, weight_decay=self.weight_decay, fused=True)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, lr, self.betas, weight_decay=self.weight_decay, fused=True)

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


@dataclass(frozen=True)
class Preprocessing:
    """From stored pixels [.., C, H, W] to what a network sees: x / scale, normalised, resized, perhaps augmented."""

    scale: float = 255.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    crop: int = 0
    """Random crops after padding by so many stored pixels a side with the stored pixel 0."""
    flip: bool = False
    """Random horizontal flips."""
    size: int | None = None
    """Height and width that images are resized to, bilinearly, a batch at a time. Random crops have this size: they
    are of images that are larger by 8 / 7 (256 for 224), in a border that grows with the image."""

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] float32, normalised and resized, not augmented; channels last where that is faster."""
        return _resized(self.normalised(pixels), self.size)

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] float32 of the stored size."""
        mean = torch.tensor(self.mean, device=pixels.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(-1, 1, 1)
        batch, channels, height, width = pixels.shape
        # by its strides: `contiguous` leaves images of one channel as they are, and so pooling on its slow path
        x = torch.empty(batch, height, width, channels, device=pixels.device).permute(0, 3, 1, 2)
        return x.copy_(pixels).div_(self.scale).sub_(mean).div_(std)

    def augment(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Resizes, and crops and flips at random, every image of a normalised batch [B, C, H, W] of the stored
        size."""
        if self.crop:
            black = -torch.tensor(self.mean, device=x.device) / torch.tensor(self.std, device=x.device)
            border, window = self.crop, x.shape[2:]
            if self.size is not None:
                border, window = round(border * self.size / x.shape[2]), (self.size, self.size)
                x = _resized(x, round(self.size * 8 / 7))
            x = _random_crop(x, border, window, black, generator)
        else:
            x = _resized(x, self.size)
        if self.flip:
            flipped = torch.rand(len(x), generator=generator).to(x.device) < 0.5
            x = torch.where(flipped.view(-1, 1, 1, 1), x.flip(-1), x)
        return x


def _resized(x: torch.Tensor, size: int | None) -> torch.Tensor:
    return x if size is None else F.interpolate(x, (size, size), mode="bilinear")


def _random_crop(
    x: torch.Tensor, border: int, window: Sequence[int], fill: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """A window, of so many rows and columns, of every image of x [B, C, H, W] inside a border of `fill` [C]."""
    batch, channels, height, width = x.shape
    padded = fill.view(1, -1, 1, 1).repeat(batch, 1, height + 2 * border, width + 2 * border)
    padded[:, :, border : border + height, border : border + width] = x
    places = 2 * border + height - window[0] + 1
    top, left = torch.randint(0, places, (2, batch), generator=generator).to(x.device)
    rows = top[:, None] + torch.arange(window[0], device=x.device)
    columns = left[:, None] + torch.arange(window[1], device=x.device)
    image = torch.arange(batch, device=x.device)[:, None, None]
    cropped = padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2)


@dataclass(frozen=True)
class ClientData:
    """What one client (or one piece of a test set) holds, on the device that computes.

    `pixels` [n, C, H, W] as stored and `labels` [n] int64 are this process's own memory.
    """

    pixels: torch.Tensor
    labels: torch.Tensor
    classes: int
    preprocess: Preprocessing = field(default_factory=Preprocessing)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    @property
    def present(self) -> torch.Tensor:
        """The client's label set as [classes] bool."""
        return torch.bincount(self.labels, minlength=self.classes) > 0

    def batches(self, training: Training, generator: torch.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Shuffled, augmented training batches of one round: (x [B, C, H, W], y [B])."""
        x, left = self.preprocess.normalised(self.pixels), training.batches_of(len(self))
        while left:
            order = torch.randperm(len(self), generator=generator).to(self.device)
            for picked in order.split(training.batch_size)[:left]:
                yield self.preprocess.augment(x[picked], generator), self.labels[picked]
                left -= 1

    def in_order(
        self, batch_size: int, augment: torch.Generator | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """All samples once, in order: as for evaluation, or augmented."""
        prepare = self.preprocess
        for pixels, labels in zip(self.pixels.split(batch_size), self.labels.split(batch_size), strict=True):
            x = prepare(pixels) if augment is None else prepare.augment(prepare.normalised(pixels), augment)
            yield x, labels


Answer = Literal["last", "mean"]


def answered(logits: torch.Tensor, answer: Answer) -> torch.Tensor:
    """The logits [B, C] of a network, or of one that gives those of its early exits [E, B, C]: its last exit's, or
    the mean over its exits."""
    if logits.dim() == 2:
        return logits
    return logits[-1] if answer == "last" else logits.mean(0)


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Fill = Literal["none", "zero", "neg_inf"]


def mask_logits(logits: torch.Tensor, present: torch.Tensor, fill: Fill) -> torch.Tensor:
    """logits [B, C] with those of absent classes (`present` [C] bool) replaced (HeteroFL section 4):
    by 0 as its authors do, or by -inf; `none` leaves them."""
    if fill == "none":
        return logits
    return logits.masked_fill(~present, 0.0 if fill == "zero" else float("-inf"))


def divergence(teacher: torch.Tensor, student: torch.Tensor, temperature: float) -> torch.Tensor:
    """KL(softmax(teacher / T) || softmax(student / T)) of logits [B, C], the mean over the batch."""
    target, given = (F.log_softmax(logits / temperature, 1) for logits in (teacher, student))
    return F.kl_div(given, target, reduction="batchmean", log_target=True)


def fit(
    net: nn.Module,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    loss: Loss,
    training: Training,
    lr: Rate,
    adjust: Callable[[nn.Module], None] | None = None,
    project: Callable[[nn.Module], None] | None = None,
    momentum: Params | None = None,
) -> dict[str, float]:
    """Trains `net` in place and returns sums: train_loss (over samples), train_samples, steps.

    `loss` maps (logits [B, C], y [B]) to a mean over the batch; logits [E, B, C] are those of early exits.
    `adjust` may change the gradients after the backward pass and before clipping (a proximal term, a control
    variate); `project` the parameters after every step (bounds). `momentum`: SGD's by parameter name, to start from,
    and replaced by what is left; without it SGD starts anew.
    """
    net.train()
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    parameters = list(trained.values())
    optimizer = training.new_optimizer(parameters, lr(0) if callable(lr) else lr)
    for name, buffer in (momentum or {}).items():
        optimizer.state[trained[name]]["momentum_buffer"] = buffer.to(parameters[0].device, copy=True)
    total, samples, steps = torch.zeros((), device=parameters[0].device), 0, 0
    for x, y in batches:
        value = loss(net(x), y)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        if adjust is not None:
            adjust(net)
        if training.clip is not None:
            nn.utils.clip_grad_norm_(parameters, training.clip)
        if callable(lr):
            optimizer.param_groups[0]["lr"] = lr(steps)
        optimizer.step()
        if project is not None:
            project(net)
        total += value.detach() * len(y)
        samples += len(y)
        steps += 1
    if momentum is not None:
        momentum |= {name: optimizer.state[p]["momentum_buffer"] for name, p in trained.items() if optimizer.state[p]}
    return {"train_loss": total.item(), "train_samples": samples, "steps": steps}


@dataclass
class Evaluated:
    """Sums over samples."""

    correct: int = 0
    loss: float = 0.0
    count: int = 0
    exits: tuple[int, ...] = ()
    """What each early exit alone has right, if there are some."""


@torch.no_grad()
def evaluate(
    net: nn.Module,
    data: ClientData,
    batch_size: int,
    answer: Answer = "last",
    fill: Fill = "none",
    present: torch.Tensor | None = None,
) -> Evaluated:
    """`answer`: which early exits count. `present` [C] with `fill` masks the logits of absent classes."""
    net.eval()
    correct = torch.zeros((), dtype=torch.int64, device=data.device)
    exits: list[torch.Tensor] = []
    loss = torch.zeros((), dtype=torch.float64, device=data.device)
    for x, y in data.in_order(batch_size):
        logits = net(x)
        if present is not None:
            logits = mask_logits(logits, present, fill)
        if logits.dim() == 3:
            exits.append((logits.argmax(2) == y).sum(1))
        logits = answered(logits, answer)
        correct += (logits.argmax(1) == y).sum()
        loss += F.cross_entropy(logits, y, reduction="sum")
    right = torch.stack(exits).sum(0).tolist() if exits else ()
    return Evaluated(int(correct), float(loss), len(data), tuple(right))


def weighted(params: Params, weight: float) -> Params:
    """weight * params, in fresh CPU tensors."""
    return {name: (p * weight).cpu() if weight != 1 else p.cpu().clone() for name, p in params.items()}
