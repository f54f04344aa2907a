"""A client's steps: on a CPU one after another as they come, on a GPU recorded once and replayed.

`Steps` is the specification. `StaticSteps` are the same in memory that stays where it is, which is what a CUDA graph
needs; on a CPU they are not recorded, and equal to `Steps` to the bit. The recording was never run on a GPU.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from rayfl.core import norms
from rayfl.core.joined import Joined, joined, parameters_of
from rayfl.core.tensors import Params
from rayfl.data.goal import Goal
from rayfl.data.samples import Batch
from rayfl.training.graphs import Recorded
from rayfl.training.settings import Fill, Loss, Rate, Training, mask_logits

KEPT = 16
"""Static steps that a process keeps: one a network, a loss and a way to train."""

Hook = Callable[[nn.Module], None]


@dataclass(frozen=True, eq=False)
class Objective:
    """A task's own loss, with the logits of classes that a client does not have masked: (logits [B, ..., C],
    y [B, ...]) -> the mean over the batch. It says what it is made of, so that static steps can take over another
    client's."""

    goal: Goal
    fill: Fill
    present: torch.Tensor | None
    """The client's label set, [C] bool; None where nothing is masked."""

    def __call__(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.goal.loss(logits if self.present is None else mask_logits(logits, self.present, self.fill), y)


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
) -> dict[str, float]:
    """Trains a module in place and returns sums: train_loss (over samples), train_samples, steps.

    `adjust` may change the gradients after the backward pass and before clipping (a proximal term, a control
    variate); `project` the parameters after every step (bounds). `momentum`: SGD's by parameter name, to start from,
    and replaced by what is left; without it SGD starts anew. `static`: by `StaticSteps`, where clients of the module
    differ in nothing but their parameters, samples and `Objective`.
    """
    # a module sets it slowly
    if not all(m.training for m in module.modules()):
        module.train()
    hooked = adjust is not None or project is not None or momentum is not None
    if static and isinstance(loss, Objective) and not hooked and not norms.is_tracked(module):
        steps = static_steps(module, loss, training)
    else:
        steps = Steps(module, loss, training, adjust, project, momentum)
    for i, (x, y) in enumerate(batches):
        steps.run(x, y, lr(i) if callable(lr) else lr)
    return steps.finish()


class Steps:
    """One client's steps on a module; `fit` says what the arguments are."""

    is_static = False

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        training: Training,
        adjust: Hook | None = None,
        project: Hook | None = None,
        momentum: Params | None = None,
    ):
        self.module, self.loss, self.training = module, loss, training
        self.adjust, self.project, self.momentum = adjust, project, momentum
        self.joined: Joined | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.total = next(iter(parameters_of(module).values())).new_zeros(())
        self.samples = self.steps = 0

    def run(self, x: torch.Tensor, y: torch.Tensor, lr: float) -> None:
        """One step on inputs [B, ...] and labels [B]."""
        self.set_rate(lr)
        self.step(x, y, len(y))
        self.samples += len(y)
        self.steps += 1

    def finish(self) -> dict[str, float]:
        """The client's sums."""
        if self.momentum is not None and self.joined is not None and self.optimizer is not None:
            self.momentum |= self.joined.momentum(self.optimizer)
        return {"train_loss": float(self.total), "train_samples": self.samples, "steps": self.steps}

    def step(self, x: torch.Tensor, y: torch.Tensor, count: int | torch.Tensor) -> None:
        """At the rate that is set; `count` samples of the batch count."""
        if self.joined is None:
            for parameter in parameters_of(self.module).values():
                parameter.grad = None
        else:
            self.joined.zero_grad()
        value = self.value(x, y)
        value.backward()
        if self.adjust is not None:
            self.adjust(self.module)
        if self.joined is None:
            self.joined = joined(self.module)
            self.optimizer = self.new_optimizer(self.joined)
        if self.training.clip is not None:
            nn.utils.clip_grad_norm_(self.joined.parameters, self.training.clip)
        if self.optimizer is None:
            self.joined.descend(self.lr)
        else:
            self.optimizer.step()
        if self.project is not None:
            self.project(self.module)
        self.total += value.detach() * count

    def value(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss []."""
        if self.training.precision != "bf16":
            return self.loss(self.module(x), y)
        # casts of parameters that are kept would be missing in a recording
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
        """None: plain SGD on a CPU, for which `Joined.descend` is the same and faster."""
        device = joined.vector.device
        # on a GPU every step reads its rate there, recorded or not, for the same bits
        by_tensor = self.is_static or device.type == "cuda"
        if not by_tensor and not self.training.moves_at_rest:
            return None
        # torch's kernels for GPUs take float32 alone
        dtype = torch.float32 if device.type == "cuda" else torch.float64

        def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            rate = torch.tensor(self.lr, dtype=dtype, device=device) if by_tensor else self.lr
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
    """Those of the module, for its next client."""
    # a method may let some of the parameters rest
    trained = tuple(parameter.requires_grad for parameter in parameters_of(module).values())
    steps = _static_steps(module, loss.goal, loss.fill, training, trained)  # pyright: ignore[reportArgumentType]
    steps.start(loss)
    return steps


class StaticSteps(Steps):
    """The steps of all clients of a module, one client after another: a client's parameters, label set and batches are
    copied to where the first one's were.

    A smaller batch is filled up with samples whose label the loss passes over: equal but for the order of sums. Where
    that would change what the others get, because they meet in a batch norm, or where the loss has no such label, a
    smaller batch is a step of its own that is not recorded.
    """

    is_static = True
    loss: Objective  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, module: nn.Module, loss: Objective, training: Training):
        super().__init__(module, loss, training)
        self.count = torch.zeros_like(self.total)
        self.padding = None if norms.by_batch(module) else loss.goal.padding
        self.batch: Batch | None = None
        self.again = self._recorded()

    def start(self, loss: Objective) -> None:
        """A new client."""
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
        """The step on what was copied; nothing in it depends on where it is called."""
        x, y = cast(Batch, self.batch)
        super().step(x, y, self.count)

    def _recorded(self) -> Callable[[], None]:
        return Recorded(self.body, self.total.device) if self.total.is_cuda else self.body


def _like(t: torch.Tensor, batch: int) -> torch.Tensor:
    """Zeros for so many samples, laid out as those of t [B, ...] are, because kernels are chosen by that."""
    return torch.empty_strided((batch, *t.shape[1:]), t.stride(), dtype=t.dtype, device=t.device).zero_()
