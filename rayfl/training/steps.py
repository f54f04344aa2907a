"""Training steps of a client: executed one by one on a CPU, recorded once and replayed on a GPU.

`Steps` is the specification. `StaticSteps` are the same steps in memory with fixed addresses, as CUDA graphs need; on a
CPU they are not recorded, and match `Steps` bit for bit. The recording has not been tested on a GPU.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from rayfl.core import norms
from rayfl.core.compiler import without_compiler
from rayfl.core.joined import Joined, descend, joined, parameters_of
from rayfl.core.net import in_training, net_of
from rayfl.core.tensors import Params
from rayfl.data.goal import Goal
from rayfl.data.samples import Batch
from rayfl.training.graphs import Recorded
from rayfl.training.passes import current
from rayfl.training.settings import Fill, Loss, Rate, Training, mask_logits

KEPT = 16
"""Maximum number of static steps in the cache of a process: one per network, loss and training settings."""

Hook = Callable[[nn.Module], None]


@dataclass(frozen=True, eq=False)
class Objective:
    """The loss of a goal, with masked logits of the classes that a client lacks: (logits [B, ..., C], y [B, ...]) ->
    mean over the batch. Its parts are public, so that static steps can switch to another client's."""

    goal: Goal
    fill: Fill
    present: torch.Tensor | None
    """Label set of the client, [C] bool; None: no mask."""

    def __call__(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.goal.loss(logits if self.present is None else mask_logits(logits, self.present, self.fill), y)


@contextmanager
def at_rest(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Disable the gradients of these parameters inside the block, because networks are shared within a process."""
    frozen = list(parameters)
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def fit(
    module: nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    training: Training,
    lr: Rate,
    adjust: Hook | None = None,
    project: Hook | None = None,
    momentum: Params | None = None,
    static: bool = False,
    goal: Goal | None = None,
) -> dict[str, float]:
    """Train a module in place and return sums: train_loss (over samples), train_samples, steps.

    `adjust` can change the gradients after the backward pass and before clipping (proximal term, control variate),
    `project` the parameters after every step (bounds). `momentum`: initial momentum of SGD by parameter name, replaced
    by the final one; default 0. `static`: use `StaticSteps`, if clients of the module differ only in parameters,
    samples and `Objective`. `goal`: weighs the parts of a batch with `training.accumulate`; default: by samples.
    """
    passes, net = current(), net_of(module)
    if passes is None or net is None:
        return _fit(module, batches, loss, training, lr, adjust, project, momentum, static, goal)
    with passes.known(net) as metrics:
        loss = loss if type(loss) is Objective else passes.around(loss)
        adjust, project = (hook and passes.around(hook) for hook in (adjust, project))
        metrics |= _fit(module, batches, loss, training, lr, adjust, project, momentum, static, goal)
    return metrics


def _fit(
    module: nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    training: Training,
    lr: Rate,
    adjust: Hook | None,
    project: Hook | None,
    momentum: Params | None,
    static: bool,
    goal: Goal | None,
) -> dict[str, float]:
    in_training(module)
    hooked = adjust is not None or project is not None or momentum is not None
    if static and isinstance(loss, Objective) and not hooked and not norms.is_tracked(module):
        steps = static_steps(module, loss, training)
    else:
        steps = Steps(module, loss, training, adjust, project, momentum, goal)
    for i, (x, y) in enumerate(batches):
        steps.run(x, y, lr(i) if callable(lr) else lr)
    return steps.finish()


class Steps:
    """Steps of one client on a module; see `fit` for the arguments."""

    is_static = False

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        training: Training,
        adjust: Hook | None = None,
        project: Hook | None = None,
        momentum: Params | None = None,
        goal: Goal | None = None,
    ):
        self.module, self.loss, self.training, self.goal = module, loss, training, goal
        self.adjust, self.project, self.momentum = adjust, project, momentum
        self.joined: Joined | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.total = next(iter(parameters_of(module).values())).new_zeros(())
        self.samples = self.steps = 0
        # on a GPU every step reads the learning rate from a tensor, recorded or not, for equal bits
        self.by_tensor = self.is_static or self.total.is_cuda
        self.is_plain = not (self.by_tensor or training.moves_at_rest)

    def run(self, x: torch.Tensor, y: torch.Tensor, lr: float) -> None:
        """Make one step on inputs [B, ...] and labels [B]."""
        self.set_rate(lr)
        self.step(x, y, len(y))
        self.samples += len(y)
        self.steps += 1

    def finish(self) -> dict[str, float]:
        """Return the client's sums."""
        if self.momentum is not None and self.joined is not None and self.optimizer is not None:
            self.momentum |= self.joined.momentum(self.optimizer)
        if self.joined is None:
            self.forget_gradients()
        return {"train_loss": float(self.total), "train_samples": self.samples, "steps": self.steps}

    def step(self, x: torch.Tensor, y: torch.Tensor, count: int | torch.Tensor) -> None:
        """Make one step at the current learning rate; `count`: weight of its loss, without padded samples."""
        if self.joined is None:
            self.forget_gradients()
        else:
            self.joined.zero_grad()
        value = self.backward(x, y)
        if self.adjust is not None:
            self.adjust(self.module)
        self.descend()
        if self.project is not None:
            self.project(self.module)
        self.total += value * count

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add the gradient of the loss, and return the loss []."""
        if self.training.accumulate == 1:
            value = self.value(x, y)
            value.backward()
            return value.detach()
        weight = len if self.goal is None else self.goal.weight
        total = torch.zeros_like(self.total)
        # a batch may consist of padding only
        whole = torch.as_tensor(weight(y)).to(total).clamp(min=1)
        parts = (t.tensor_split(min(self.training.accumulate, len(y))) for t in (x, y))
        for some, of in zip(*parts, strict=True):
            value = self.value(some, of) * (weight(of) / whole)
            value.backward()
            total += value.detach()
        return total

    def forget_gradients(self) -> None:
        """Free the memory of gradients that are not joined."""
        for parameter in parameters_of(self.module).values():
            parameter.grad = None

    def descend(self) -> None:
        """Change the parameters by their gradients."""
        if self.is_plain and self.training.clip is None:
            descend(parameters_of(self.module).values(), self.lr)
            return
        if self.joined is None:
            self.joined = joined(self.module)
            self.optimizer = self.new_optimizer(self.joined)
        if self.training.clip is not None:
            self.joined.clip(self.training.clip)
        if self.optimizer is None:
            descend(self.joined.parameters, self.lr)
        else:
            with without_compiler:
                self.optimizer.step()

    def value(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss []."""
        if self.training.precision != "bf16":
            return self.loss(self.module(x), y)
        # cached casts of parameters would be missing in a recording
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            return self.loss(self.module(x), y)

    def set_rate(self, lr: float) -> None:
        self.lr = lr
        if self.optimizer is not None:
            group = self.optimizer.param_groups[0]
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def new_optimizer(self, joined: Joined) -> torch.optim.Optimizer | None:
        """Return the optimizer; None for plain SGD on a CPU, where `descend` is equal and faster."""
        if self.is_plain:
            return None
        device, by_tensor = joined.vector.device, self.by_tensor
        # torch's GPU kernels support float32 only
        dtype = torch.float32 if device.type == "cuda" else torch.float64

        def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            rate = torch.tensor(self.lr, dtype=dtype, device=device) if by_tensor else self.lr
            with without_compiler:
                return self.training.new_optimizer(parameters, rate)

        made = joined.optimizer((*self.training.update_rule, by_tensor), make)
        self.optimizer = made
        self.set_rate(self.lr)
        joined.set_momentum(made, self.momentum or {})
        return made


@functools.lru_cache(maxsize=KEPT)
def _static_steps(
    module: nn.Module, goal: Goal, fill: Fill, training: Training, trained: tuple[bool, ...]
) -> "StaticSteps":
    device = next(module.parameters()).device
    present = None if fill == "none" else torch.zeros(goal.classes, dtype=torch.bool, device=device)
    return StaticSteps(module, Objective(goal, fill, present), training)


def static_steps(module: nn.Module, loss: Objective, training: Training) -> "StaticSteps":
    """Return the static steps of the module, ready for its next client."""
    # a method can freeze parameters
    trained = tuple(parameter.requires_grad for parameter in parameters_of(module).values())
    steps = _static_steps(module, loss.goal, loss.fill, training, trained)  # pyright: ignore[reportArgumentType]
    steps.start(loss)
    return steps


class StaticSteps(Steps):
    """Steps of all clients of a module, one client after another: parameters, label set and batches of each client are
    copied into the same memory.

    A smaller batch is padded with samples whose label the loss ignores, which changes the order of sums, and the random
    numbers of dropout. Networks with batch norm, losses without such a label and batches in parts run smaller batches
    as separate steps, without recording.
    """

    is_static = True
    loss: Objective  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, module: nn.Module, loss: Objective, training: Training):
        super().__init__(module, loss, training, goal=loss.goal)
        self.count = torch.zeros_like(self.total)
        # a part of a batch may not be padding only
        padded = training.accumulate == 1 and not norms.batch_norms(module)
        self.padding = loss.goal.padding if padded else None
        self.batch: Batch | None = None
        self.again = self._recorded()

    def start(self, loss: Objective) -> None:
        """Start the next client."""
        if self.loss.present is not None and loss.present is not None:
            self.loss.present.copy_(loss.present)
        self.total.zero_()
        self.samples = self.steps = 0
        if self.joined is None:
            return
        if self.joined.holds():
            self.joined.attach()
            self.new_optimizer(self.joined)
        else:
            self.joined, self.optimizer, self.again = None, None, self._recorded()

    def step(self, x: torch.Tensor, y: torch.Tensor, count: int | torch.Tensor) -> None:
        if self.batch is None:
            self.batch = _like(x, self.training.batch_size), _like(y, self.training.batch_size)
        fits = x.shape[1:] == self.batch[0].shape[1:] and (len(y) == len(self.batch[1]) or self.padding is not None)
        self.count.fill_(count)
        if not fits:
            super().step(x, y, self.count)
            return
        for place, t in zip(self.batch, (x, y), strict=True):
            place[: len(t)].copy_(t)
        if self.padding is not None and len(y) < len(self.batch[1]):
            self.batch[0][len(y) :].zero_()
            self.batch[1][len(y) :].fill_(self.padding)
        self.again()

    def body(self) -> None:
        """Make the step on the copied batch; independent of the caller's data."""
        x, y = cast(Batch, self.batch)
        super().step(x, y, self.count)

    def _recorded(self) -> Callable[[], None]:
        return Recorded(self.body, self.total.device) if self.total.is_cuda else self.body


def _like(t: torch.Tensor, batch: int) -> torch.Tensor:
    """Return zeros for `batch` samples with the strides of t [B, ...], because strides select the kernels."""
    return torch.empty_strided((batch, *t.shape[1:]), t.stride(), dtype=t.dtype, device=t.device).zero_()
