"""Distillation on the server: a student network learns from targets in place of labels, on public samples.

A student is a mapping of tensors. It is part of the server's state and can be resumed at any step, bit for bit:

    net.NAME     parameters, and running statistics of norms
    KEY.NAME     optimizer state of a parameter: momentum_buffer, or exp_avg, exp_avg_sq and step
    best.NAME    parameters and statistics of the step with the best validation score; the start is step 0
    mean.NAME    mean parameters and statistics of the averaged steps
    step, best, score, averaged, done    progress, as numbers
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import nn

from rayfl import costs
from rayfl.config import Config
from rayfl.core import norms
from rayfl.core.net import Net, cached_module, load, params_of
from rayfl.core.seeds import stream, torch_generator, torch_scope
from rayfl.core.tensors import Params, below, copied, prefixed
from rayfl.data.samples import Batch, ClientData
from rayfl.training.settings import answered

TASK_STEPS = 250
"""Steps per server task: between tasks a run can write a checkpoint or stop. It does not change results."""
AT_ONCE = 500
"""Samples per forward pass in inference."""

TargetLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits [B, C], targets [B, ...]) -> mean loss over the batch."""


class Distillation(Config):
    """Training of a student. Its length is set by `steps` or by `epochs`."""

    steps: int | None = Field(default=None, ge=0)
    """Steps per round. 0: students stay as they start. Default: computed from `epochs`."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the public samples per round, as an alternative to `steps`."""
    batch_size: int = Field(default=64, ge=1)
    """Samples per step."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """Optimizer; its state is reset every round."""
    lr: float = Field(default=0.1, gt=0)
    """Learning rate."""
    cosine: bool = False
    """True to decay the learning rate to 0 over the steps, as half a cosine."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of SGD."""
    weight_decay: float = Field(default=0.0, ge=0)
    """L2 penalty on all parameters."""
    clip: float | None = Field(default=None, gt=0)
    """Maximum L2 norm of the gradient of each step. Default: no clipping."""
    patience: int = Field(default=0, ge=0)
    """Early stopping: steps without a better score on the server's validation data (`evaluation.holdout`); the best
    student is used. 0, or no validation data: all steps are made, and the last student is used."""
    validate_every: int = Field(default=100, ge=1)
    """Steps between two validations."""
    keep_start: bool = False
    """Early stopping only: validate the start of a student too, and use it if no later step has a better score."""
    average_from: int | None = Field(default=None, ge=0)
    """First step of stochastic weight averaging; the mean of the parameters is used. Default: no averaging."""
    average_every: int = Field(default=25, ge=1)
    """Steps between two averaged steps."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("exactly one of steps and epochs")
        if self.patience and self.average_from is not None:
            raise ValueError("at most one of patience and average_from")
        if self.keep_start and not self.patience:
            raise ValueError("keep_start only with patience, the early stopping that it belongs to")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum only with optimizer: sgd; optimizer is {self.optimizer}")
        if self.steps is not None and self.average_from is not None and self.average_from > self.steps:
            raise ValueError(
                f"average_from of at most steps = {self.steps}, or null for no averaging; average_from is "
                f"{self.average_from}"
            )
        return self

    def completed(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """As for `Config`. A given `steps` replaces `epochs`, and vice versa, and another optimizer replaces
        `momentum`."""
        replaced: dict[str, Any] = {"steps": None, "epochs": None} if {"steps", "epochs"} & given.keys() else {}
        if given.get("optimizer", self.optimizer) != self.optimizer:
            replaced["momentum"] = 0.0
        return super().completed({**replaced, **given})

    def steps_of(self, samples: int) -> int:
        """Return the steps per round for this number of public samples."""
        return (self.epochs or 0) * -(-samples // self.batch_size) if self.steps is None else self.steps

    def new_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        parameters = list(module.parameters())
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, self.lr, weight_decay=self.weight_decay)
        return torch.optim.SGD(parameters, self.lr, self.momentum, weight_decay=self.weight_decay)

    def rate(self, step: int, steps: int) -> float:
        return self.lr * (1 + math.cos(math.pi * step / steps)) / 2 if self.cosine else self.lr


def beginning(params: Params) -> Params:
    """Return a new student with these parameters and statistics."""
    return prefixed("net", copied(params)) | {"step": torch.tensor(0), "done": torch.tensor(False)}


def is_done(student: Params) -> bool:
    """Return whether training has finished."""
    return bool(student["done"])


def is_validated(student: Params) -> bool:
    """Return whether validation data chose the step of `result`."""
    return "best" in student


def result(student: Params) -> Params:
    """Return the final parameters and statistics: the best, the mean, or the last."""
    return below("best", student) or below("mean", student) or below("net", student)


def go_on(
    student: Params,
    net: Net,
    data: ClientData,
    loss: TargetLoss,
    how: Distillation,
    seed: int,
    validation: ClientData | None = None,
    most: int | None = None,
) -> tuple[Params, dict[str, float]]:
    """Train a student for at most `most` steps; return it, and the metrics `server_flops` and `server_steps`.

    `data`: samples with targets as labels; `validation`: samples with labels; `most`: default `TASK_STEPS`. Batches
    depend on the seed and the step, and are not augmented.
    """
    device, names = data.device, net.layout.shapes
    module = cached_module(net, device)
    given = below("net", student)
    load(module, given)
    statistics = {name: t.to(device, copy=True) for name, t in given.items() if name not in names}
    optimizer = how.new_optimizer(module)
    load_optimizer_state(optimizer, module, student)
    student = {name: t for name, t in student.items() if not name.startswith("net.")}
    start, total = int(student["step"]), how.steps_of(len(data))
    stop, flops, done = min(start + (most or TASK_STEPS), total), 0.0, False
    best = how.patience and validation is not None and len(validation)
    with norms.tracked(module, statistics):
        if best and validation is not None and how.keep_start and not start:
            student, _ = _scored(student, module, params_of(module) | statistics, validation, 0, how)
            flops += costs.forward_flops(net, len(validation))
        for step, (x, y) in zip(range(start, stop), _batches(data, how.batch_size, seed, start), strict=False):
            module.train()
            with torch_scope(stream(seed, "dropout", step), device):
                _step(module, optimizer, loss(answered(module(x), "last"), y), how, how.rate(step, total))
            flops += costs.training_flops(net, len(y))
            reached = step + 1
            if how.average_from is not None and reached >= how.average_from:
                if (reached - how.average_from) % how.average_every == 0:
                    student = _averaged(student, params_of(module) | statistics)
            if best and validation is not None and (reached % how.validate_every == 0 or reached == total):
                student, done = _scored(student, module, params_of(module) | statistics, validation, reached, how)
                flops += costs.forward_flops(net, len(validation))
                if done:
                    stop = reached
                    break
    student |= prefixed("net", {n: t.detach().cpu().clone() for n, t in (params_of(module) | statistics).items()})
    student |= optimizer_state(optimizer, module)
    student |= {"step": torch.tensor(stop), "done": torch.tensor(done or stop == total)}
    return dict(sorted(student.items())), {"server_flops": flops, "server_steps": stop - start}


@torch.no_grad()
def predicted(module: nn.Module, params: Params, data: ClientData) -> torch.Tensor:
    """Return the logits [N, C] of all samples, in order. `params`: parameters and statistics to load."""
    load(module, params)
    norms.load(module, params)
    module.eval()
    return torch.cat([answered(module(x), "last").cpu() for x, _ in data.plain(AT_ONCE)])


def _batches(data: ClientData, batch_size: int, seed: int, start: int) -> Iterator[Batch]:
    """Yield batches from step `start`. Every epoch is shuffled; its last batch can be smaller."""
    epoch, place = divmod(start, -(-len(data) // batch_size))
    while True:
        order = torch.randperm(len(data), generator=torch_generator(seed, "student", epoch))
        for first in range(place * batch_size, len(data), batch_size):
            yield next(data.picked(order[first : first + batch_size]).plain(batch_size))
        epoch, place = epoch + 1, 0


def _step(
    module: nn.Module, optimizer: torch.optim.Optimizer, value: torch.Tensor, how: Distillation, lr: float
) -> None:
    optimizer.param_groups[0]["lr"] = lr
    optimizer.zero_grad()
    value.backward()
    if how.clip is not None:
        nn.utils.clip_grad_norm_(module.parameters(), how.clip)
    optimizer.step()


def _averaged(student: Params, params: Params) -> Params:
    """Return the student with one more step in the mean."""
    count = int(student.get("averaged", torch.tensor(0))) + 1
    mean = below("mean", student)
    new = {name: mean[name] + (t.cpu() - mean[name]) / count if mean else t.cpu().clone() for name, t in params.items()}
    return student | prefixed("mean", new) | {"averaged": torch.tensor(count)}


def _scored(
    student: Params, module: nn.Module, params: Params, validation: ClientData, step: int, how: Distillation
) -> tuple[Params, bool]:
    """Return the student with its best step so far, and whether to stop early."""
    score = score_of(module, params, validation)
    before = student.get("score")
    better = before is None or (score > before if validation.goal.scores[0].better == "max" else score < before)
    if better:
        best = {name: t.detach().cpu().clone() for name, t in params.items()}
        student = student | prefixed("best", best)
        student |= {"score": torch.tensor(score, dtype=torch.float64), "best": torch.tensor(step)}
    return student, step - int(student["best"]) >= how.patience


@torch.no_grad()
def score_of(module: nn.Module, params: Params, data: ClientData) -> float:
    """Return the first score of the data's goal."""
    norms.load(module, params)
    module.eval()
    score = data.goal.scores[0]
    counts = [
        score.counts(*data.goal.rows(answered(module(x), "last"), y, score.part)) for x, y in data.in_order(AT_ONCE)
    ]
    return score.value(torch.stack(counts).sum(0).cpu())


def optimizer_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> Params:
    """Return the state of an optimizer, by key and parameter."""
    return {
        f"{key}.{name}": t.detach().cpu().clone()
        for name, parameter in module.named_parameters()
        for key, t in optimizer.state.get(parameter, {}).items()
        if isinstance(t, torch.Tensor)
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, module: nn.Module, state: Params) -> None:
    """Restore the state of an optimizer from `state`."""
    for name, parameter in module.named_parameters():
        for key in ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"):
            if (t := state.get(f"{key}.{name}")) is not None:
                optimizer.state[parameter][key] = t.clone() if key == "step" else t.to(parameter.device, copy=True)
