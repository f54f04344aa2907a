"""What the methods share whose clients run different networks and exchange what these know.

A capacity stands for a network of any model (`models/mix.py`). What the server holds of one is a group of the state,
"net CAPACITY": its parameters and its norms' running statistics; capacities of equal networks share a group. A method
says what a client does and answers, what targets the server makes of the answers, and which of its networks learn from
them. The server's students are in the state too ("student CAPACITY", `rayfl.training.distillation`), beside their
"targets", as long as they learn.
"""

import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from pydantic import model_validator

from rayfl import costs
from rayfl.config import ConfigError
from rayfl.core.fold import ClientState, State, Update
from rayfl.core.net import Net, cached_module, load, params_of
from rayfl.core.norms import tracked
from rayfl.core.seeds import stream, torch_generator, torch_scope
from rayfl.core.submodel import Selection, prefix
from rayfl.core.tensors import Params, copied
from rayfl.data.samples import ClientData
from rayfl.methods.base import (
    Client,
    Deployment,
    Method,
    Payload,
    ServerTask,
    ServerTaskContext,
    ServerTaskResult,
    Visit,
)
from rayfl.metrics import label
from rayfl.training.distillation import TASK_STEPS, Distillation, beginning, go_on, is_done, predicted, result
from rayfl.training.settings import Loss, Training, answered

TARGETS = "targets"
STUDENT = "student "


class Unequal(Method):
    """Clients run different networks; the server has at most one of each."""

    mixes: ClassVar = True

    @model_validator(mode="before")
    @classmethod
    def _lay_over(cls, given: Any) -> Any:
        """What a section says of a student is laid over the paper's settings."""
        if not isinstance(given, Mapping):
            return given
        papers = {name: field.default for name, field in cls.model_fields.items() if name in given}
        papers = {name: how for name, how in papers.items() if isinstance(how, Distillation)}
        return {
            **given,
            **{name: how.with_(given[name]) for name, how in papers.items() if isinstance(given[name], Mapping)},
        }

    # networks

    def group(self, capacity: float) -> str:
        """The group of the state with the network of a capacity."""
        nets = self.task.nets
        return f"net {label(next(c for c in nets if nets[c] == nets[capacity]))}"

    @property
    def groups(self) -> dict[str, Net]:
        """Group -> network, of all capacities, largest first."""
        return {self.group(capacity): net for capacity, net in self.task.nets.items()}

    def initial(self, capacity: float) -> Params:
        """What the network of a capacity starts from, its statistics included. A client can draw it itself, from the
        run's seed."""
        net = self.task.nets[capacity]
        if net == self.task.server:
            return self.task.initial() | net.statistics()
        with torch_scope(stream(self.task.seed, "init", self.group(capacity))):
            return net.initial() | net.statistics()

    def own(self, client_state: ClientState | None, capacity: float) -> Params:
        """The network that a client of the capacity keeps as its "own"; before its first visit, where it starts."""
        return cast(Params, (client_state or {}).get("own")) or self.initial(capacity)

    def init(self) -> State:
        return {self.group(capacity): self.initial(capacity) for capacity in self.task.nets}

    def select(self, state: State, client: Client) -> Selection:
        """The whole network of the client's capacity."""
        net = self.task.nets[client.capacity]
        return prefix(net, net)

    def extract(self, state: State, selection: Selection) -> Payload:
        return {group: state[group] for group, net in self.groups.items() if net == selection.net}

    # a client's work

    def trained(
        self, given: Params, visit: Visit, *, loss: Loss | None = None, training: Training | None = None
    ) -> tuple[Params, dict[str, float]]:
        """Steps from parameters and statistics: these afterwards, which share the memory of the resident module, and
        the metrics of `fit`. `loss` in place of the client's; `training` in place of the task's, at one rate for all
        steps, because the task's warm-up and cosine are of its own steps."""
        names, device = visit.net.layout.shapes, visit.data.device
        module = cached_module(visit.net, device)
        load(module, given)
        statistics = {name: t.to(device, copy=True) for name, t in given.items() if name not in names}
        method = self
        if training is not None:
            steady = training.model_copy(update={"warmup": 0, "cosine_rounds": 0})
            method = self.model_copy(update={"task": replace(self.task, training=steady)})
        with tracked(module, statistics):
            metrics = method.fit(module, visit, loss=loss)
        return params_of(module) | statistics, metrics

    def answer(self, trained: Params, visit: Visit, metrics: dict[str, float]) -> Update:
        """The client's whole network, weighted."""
        weight = self.weight_of(visit.data)
        group = self.group(visit.client.capacity)
        return Update({group: copied(trained, weight)}, weight, metrics=metrics)

    def known(self, trained: Params, visit: Visit) -> tuple[torch.Tensor, float]:
        """The logits [N, C] of a trained network on all public samples, and the floating point operations of that."""
        return self.asked(trained, visit.net, public_of(visit))

    def asked(self, params: Params, net: Net, data: ClientData) -> tuple[torch.Tensor, float]:
        """The logits [N, C] of a network on samples, and the floating point operations of that."""
        return predicted(cached_module(net, data.device), net, params, data), costs.forward_flops(net, len(data))

    # what a device runs

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        """The server's network of the capacity; with what a client keeps as its "own" in place of it."""
        group, net = self.group(capacity), self.task.nets[capacity]
        given = cast(Params, (client_state or {}).get("own", {})) or state.get(group) or self.initial(capacity)
        names = net.layout.shapes
        statistics = {name: t for name, t in given.items() if name not in names}
        is_start = group not in state and not client_state
        return Deployment(group, net, {name: given[name] for name in names}, statistics or None, is_start=is_start)


class Distilling(Unequal):
    """The server's networks are students."""

    distillation: Distillation
    """How a student of the server is trained."""

    # the server's students

    @abstractmethod
    def loss_of_student(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """(logits [B, C], targets [B, ...]) -> the mean over the batch."""

    def taught(self, state: State, students: Sequence[str], targets: Params) -> State:
        """The state in which the networks of some groups begin to learn. `targets`: "targets", a row a sample of
        `refine`."""
        return {**state, TARGETS: targets} | {f"{STUDENT}{group}": beginning(state[group]) for group in students}

    def plan(self, state: State, round: int) -> Sequence[ServerTask]:
        nets, steps = self.groups, {group: t for group, t in state.items() if group.startswith(STUDENT)}
        return [
            ServerTask(
                name,
                nets[name.removeprefix(STUDENT)],
                TASK_STEPS * self.distillation.batch_size,
                {"student": student, TARGETS: state[TARGETS]},
            )
            for name, student in steps.items()
        ]

    def refine(self, server_task: ServerTask, context: ServerTaskContext) -> ServerTaskResult:
        """The next steps of a student."""
        data = public_of(context).labeled(server_task.payload[TARGETS][TARGETS])
        student, metrics = go_on(
            server_task.payload["student"],
            server_task.net,
            data,
            self.loss_of_student,
            self.distillation,
            context.seed,
            context.validation,
        )
        return ServerTaskResult({"student": student}, metrics)

    def absorb(self, state: State, round: int, refined: Mapping[str, ServerTaskResult]) -> State:
        new = dict(state)
        for name, found in refined.items():
            student = found.groups["student"]
            if is_done(student):
                new[name.removeprefix(STUDENT)] = result(student)
                del new[name]
            else:
                new[name] = student
        if not any(group.startswith(STUDENT) for group in new):
            new.pop(TARGETS, None)
        return new


def public_of(work: Visit | ServerTaskContext) -> ClientData:
    """The public samples. Whoever asks has checked that there are some (`check_public`)."""
    assert work.public is not None
    return work.public


def opened(public: ClientData, samples: int, seed: int, round: int) -> torch.Tensor:
    """Rows [n] of the public samples that are open in a round, in random order: so many, all where there are fewer.
    `seed`: the run's."""
    return torch.randperm(len(public), generator=torch_generator(seed, "open", round))[:samples]


def check_public(method: Method, labeled: bool = False) -> None:
    """A ConfigError if there are no public samples, or if their labels are wanted and may not be used."""
    if not all(map(_answers_samples, method.task.nets.values())):
        raise ConfigError(
            f"method: given {method.name}, with networks that answer every token; allowed: networks that give samples "
            "classes, because targets are a row a sample"
        )
    public = method.task.public
    if public is None:
        raise ConfigError(
            f"data.public: missing; allowed: a share of the training set, e.g. {{share: 0.1}}, another data set or "
            f"noise, because method {method.name} learns from public data"
        )
    if labeled and not public.labeled:
        raise ConfigError(
            f"data.public.labeled: given false; allowed: true, because method {method.name} learns from the labels of "
            "public data"
        )


@functools.lru_cache(maxsize=512)
def _answers_samples(net: Net) -> bool:
    """Whether it has logits [B, C], and not [B, T, C] of tokens."""
    with torch.no_grad():
        return answered(net.blank().eval()(net.model.example(1, "meta")), "last").dim() == 2
