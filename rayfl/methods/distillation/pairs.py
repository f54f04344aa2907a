"""Shared parts of the methods whose clients train a personal network and a common one together.

The network of a capacity is a `Pair`: its part "own" stays on the client, its part "common" is sent down and up, and
averaged. The state's group "common" is the common network: parameters and running statistics of norms.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field, SerializeAsAny
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.axes import Axis, declare
from rayfl.core.fold import ClientState, Fold, State, Update
from rayfl.core.net import Net, params_of
from rayfl.core.seeds import stream, torch_scope
from rayfl.core.tensors import Params, below, copied, prefixed
from rayfl.methods.base import Deployment, Payload, Task, Visit
from rayfl.methods.distillation.kept import Keeping
from rayfl.metrics import label
from rayfl.models.base import Model
from rayfl.models.features import classifier_path, tapped
from rayfl.models.mix import Wrapper
from rayfl.training.settings import Loss, divergence

COMMON = "common"
OWN = "own"


class Both(nn.Module):
    """Two networks on one input: x [B, ...] -> logits of the common and of the personal one, [B, C] each."""

    def __init__(self, own: nn.Module, common: nn.Module):
        super().__init__()
        self.own, self.common = own, common

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = self.own(x)
        return self.common(x), own


class Featured(Both):
    """Two networks with linear classifiers at these paths, and a linear layer `project` between their features."""

    def __init__(self, own: nn.Module, common: nn.Module, paths: tuple[str, str], project: nn.Linear):
        super().__init__(own, common)
        self.paths, self.project = paths, project

    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the logits of the common and of the personal network, and their features in the same order."""
        with tapped(self.own, self.paths[0]) as own, tapped(self.common, self.paths[1]) as common:
            mine = self.own(x)
            return self.common(x), mine, common.features, own.features


class Pair(Wrapper):
    """Network of another model, `of`, as "own", beside a common network. A subclass can add layers of its own."""

    common: SerializeAsAny[Model]
    """Model of the common network."""
    common_width: float = 1.0
    """Width of the common network."""

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(f"{OWN}.{path}" for path in stage) for stage in self.of.blocks)

    @property
    def head_paths(self) -> tuple[str, ...]:
        return tuple(f"{OWN}.{path}" for path in self.of.head_paths)

    @property
    def common_net(self) -> Net:
        return Net(self.common, self.common_width)

    def own_net(self, net: Net) -> Net:
        return self._within(net)

    def build(self, net: Net) -> nn.Module:
        return Both(self.own_net(net).build(), self.common_net.build())

    def featured(self, net: Net, inputs: int, outputs: int, bias: bool, kind: type[Featured]) -> nn.Module:
        """Return the pair as a module of this kind, with a projection from `inputs` to `outputs` features."""
        own, common = self.own_net(net), self.common_net
        axes = Axis.fixed("projected", outputs), Axis.fixed("projecting", inputs)
        project = declare(nn.Linear(inputs, outputs, bias), weight=axes, bias=axes[:1])
        return kind(own.build(), common.build(), (classifier_path(own), classifier_path(common)), project)

    def initial(self, net: Net) -> Params:
        """Return initial parameters. The personal network's are drawn first, as without a common network."""
        own = prefixed(OWN, self.own_net(net).initial())
        return params_of(net.build()) | own | prefixed(COMMON, self.common_net.initial())

    def statistics(self, net: Net) -> Params:
        return prefixed(OWN, self.own_net(net).statistics()) | prefixed(COMMON, self.common_net.statistics())


class WithCommon(Keeping):
    """Base class of methods with a `Pair` for every capacity. Devices run their own network, which is judged."""

    pair: ClassVar[type[Pair]] = Pair

    common: float | None = Field(default=None, gt=0, le=1)
    """Capacity whose network is the architecture of the common one. Default: the smallest."""

    def paired(self, net: Net, common: Net) -> Net:
        """Return the network of a capacity beside the common one."""
        return replace(
            net, model=self.pair(of=cast(Model, net.model), common=cast(Model, common.model), common_width=common.width)
        )

    def sizes(self, task: Task) -> Mapping[float, Net]:
        capacity = min(task.nets) if self.common is None else self.common
        if capacity not in task.nets:
            raise ConfigError(
                f"method.common: {label(capacity)} is not valid. Allowed: a capacity of the clients: "
                f"{', '.join(map(label, task.nets))}"
            )
        return {c: self.paired(net, task.nets[capacity]) for c, net in task.nets.items()}

    def own_net(self, net: Net) -> Net:
        return cast(Pair, net.model).own_net(net)

    @property
    def common_net(self) -> Net:
        return cast(Pair, self.task.server.model).common_net

    def init(self) -> State:
        with torch_scope(stream(self.task.seed, "init", COMMON)):
            return {COMMON: self.common_net.initial() | self.common_net.statistics()}

    def own(self, client_state: ClientState | None, capacity: float) -> Params:
        """Return what stays on the client: all of the pair but the common network."""
        return {n: t for n, t in super().own(client_state, capacity).items() if not n.startswith(f"{COMMON}.")}

    @abstractmethod
    def pair_loss(self, visit: Visit) -> Loss:
        """Return the loss of a pair: (outputs of the pair, y) -> mean over the batch."""

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        given = self.own(visit.client_state, visit.client.capacity) | prefixed(COMMON, payload[COMMON])
        trained, metrics = self.trained(given, visit, loss=self.pair_loss(visit))
        own = {name: t for name, t in trained.items() if not name.startswith(f"{COMMON}.")}
        return self.kept(own, {COMMON: copied(below(COMMON, trained), self.weight_of(visit.data))}, visit, metrics)

    def step(self, state: State, round: int, fold: Fold) -> State:
        return {COMMON: fold.mean(COMMON)}

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        """Return the client's own network, or the initial one of this capacity."""
        net = self.own_net(self.task.nets[capacity])
        return Deployment.of(
            self.group(capacity), net, below(OWN, self.own(client_state, capacity)), client_state is None
        )


class Mutual(WithCommon):
    """Base class of methods in which the two networks learn from each other's logits."""

    needs_classes: ClassVar = "the two networks compare class probabilities"
    detach: bool = True
    """Treat the other network's output as constant in a network's loss. false: HtFLlib's code, in which the gradients
    of both losses reach both networks."""
    reduction: Literal["batchmean", "mean"] = "batchmean"
    """Divergence: the mean over samples, or also divided by the number of classes (published code)."""

    def divergence(self, teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
        """Return KL(softmax(teacher) || softmax(student)) of logits [B, C]."""
        value = divergence(teacher.detach() if self.detach else teacher, student, 1.0)
        return value / teacher.shape[1] if self.reduction == "mean" else value
