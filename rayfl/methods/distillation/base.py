"""Base of the methods whose clients run different networks and exchange knowledge.

A capacity stands for a network of any model (`models/mix.py`). The server's network of a capacity is the group "net
CAPACITY" of the state: parameters and running statistics of norms. Capacities of equal networks share a group. A method
defines the client's work and answer, the targets that the server computes from the answers, and the networks that learn
from them. During their training the server's students ("student CAPACITY", `rayfl.training.distillation`) and their
"targets" are part of the state.
"""

import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, cast

import torch

from rayfl import costs
from rayfl.config import ConfigError
from rayfl.core.fold import ClientState, State, Update
from rayfl.core.net import Net, cached_module, load, params_of
from rayfl.core.norms import tracked
from rayfl.core.seeds import stream, torch_generator, torch_scope
from rayfl.core.submodel import Selection, prefix
from rayfl.core.tensors import Params, copied, nbytes
from rayfl.data.base import LABEL
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
    """Base class of methods whose clients run different networks; the server has at most one of each."""

    mixes: ClassVar = True

    # networks

    def group(self, capacity: float) -> str:
        """Return the state's group with the network of a capacity."""
        nets = self.task.nets
        return f"net {label(next(c for c in nets if nets[c] == nets[capacity]))}"

    @property
    def groups(self) -> dict[str, Net]:
        """Networks of all capacities by group, largest first."""
        return {self.group(capacity): net for capacity, net in self.task.nets.items()}

    def initial(self, capacity: float) -> Params:
        """Return the initial parameters and statistics of a capacity's network, drawn from the run's seed."""
        net = self.task.nets[capacity]
        if net == self.task.server:
            return self.task.initial() | net.statistics()
        with torch_scope(stream(self.task.seed, "init", self.group(capacity))):
            return net.initial() | net.statistics()

    def own(self, client_state: ClientState | None, capacity: float) -> Params:
        """Return the client's personal network, or the initial one before its first visit."""
        return cast(Params, (client_state or {}).get("own")) or self.initial(capacity)

    def init(self) -> State:
        return {self.group(capacity): self.initial(capacity) for capacity in self.task.nets}

    def select(self, state: State, client: Client) -> Selection:
        net = self.task.nets[client.capacity]
        return prefix(net, net)

    def extract(self, state: State, selection: Selection) -> Payload:
        return {group: state[group] for group, net in self.groups.items() if net == selection.net}

    # clients

    def trained(
        self, given: Params, visit: Visit, *, loss: Loss | None = None, training: Training | None = None
    ) -> tuple[Params, dict[str, float]]:
        """Train from the given parameters and statistics. Return the new ones, which share the cached module's memory,
        and the metrics of `fit`. `loss` replaces the client's. `training` replaces the task's, at a constant rate,
        because the task's warm-up and cosine refer to its own steps."""
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
        weight = self.weight_of(visit.data)
        group = self.group(visit.client.capacity)
        return Update({group: copied(trained, weight)}, weight, metrics=metrics)

    def known(self, trained: Params, visit: Visit) -> tuple[torch.Tensor, float]:
        """Return a trained network's logits [N, C] on all public samples, and the FLOPs."""
        return self.asked(trained, visit.net, public_of(visit))

    def asked(self, params: Params, net: Net, data: ClientData) -> tuple[torch.Tensor, float]:
        """Return a network's logits [N, C] on samples, and the FLOPs."""
        return predicted(cached_module(net, data.device), params, data), costs.forward_flops(net, len(data))

    # deployment

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        """Return the client's personal network if there is one, otherwise the server's of this capacity."""
        group, net = self.group(capacity), self.task.nets[capacity]
        given = cast(Params, (client_state or {}).get("own", {})) or state.get(group) or self.initial(capacity)
        return Deployment.of(group, net, given, is_start=group not in state and not client_state)


class Distilling(Unequal):
    """Base class of methods whose server networks are students."""

    distillation: Distillation
    """Training of the server's students."""

    # the server's students

    @abstractmethod
    def loss_of_student(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss [] over a batch of logits [B, C] and targets [B, ...]."""

    def taught(self, state: State, students: Sequence[str], targets: Params) -> State:
        """Return the state in which the networks of these groups start training. `targets`: "targets", one row per
        sample of `refine`."""
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
    """Return the public samples, which `check_public` has required."""
    assert work.public is not None
    return work.public


def public_bytes(visit: Visit, labels: bool = False) -> int:
    """Return the bytes of the public samples, as stored and with labels of 4 bytes, that a client needs for its first
    visit; 0 for later visits."""
    if visit.client_state:
        return 0
    public = public_of(visit)
    inputs = {name: t for name, t in public.samples.items() if name != LABEL}
    return nbytes({"public": inputs}) + costs.BYTES * labels * len(public)


def opened(public: ClientData, samples: int, seed: int, round: int) -> torch.Tensor:
    """Return the rows [n] of a round's open public samples, in random order: `samples`, or all if there are fewer.
    `seed`: the run's."""
    return torch.randperm(len(public), generator=torch_generator(seed, "open", round))[:samples]


def check_public(method: Method, labeled: bool = False) -> None:
    """Raise a ConfigError if there are no public samples, or if labels are needed and must not be used."""
    if not all(map(_answers_samples, method.task.nets.values())):
        raise ConfigError(
            f"method: {method.name} does not support networks with outputs per token. Allowed: networks with one row "
            "of class logits per sample"
        )
    public = method.task.public
    if public is None:
        raise ConfigError(
            f"data.public: method {method.name} needs public data. Allowed: a share of the training set, e.g. "
            "{share: 0.1}, another data set, or noise"
        )
    if labeled and not public.labeled:
        raise ConfigError(f"data.public.labeled: method {method.name} needs the labels of public data. Allowed: true")


@functools.lru_cache(maxsize=512)
def _answers_samples(net: Net) -> bool:
    """Return whether the logits are [B, C], not [B, T, C] per token."""
    with torch.no_grad():
        return answered(net.blank().eval()(net.model.example(1, "meta")), "last").dim() == 2
