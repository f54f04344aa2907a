"""SpaFL: clients train thresholds that prune whole filters and neurons, and exchange nothing but these.

Paper: Kim, Saad, Debbah, Hong, "SpaFL: Communication-Efficient Federated Learning with Sparse Models and Low
Computational Overhead", NeurIPS 2024, https://arxiv.org/abs/2406.00431 (Algorithm 1; code:
news-vt/SpaFL_NeruIPS_2024).

Symbols: w_i the n weights of a filter or neuron i (a row), tau_i its threshold, mu_i the mean of |w_i|, S the unit
step, g_i the gradient of the loss by the pruned weights, t the round, eta the learning rate, alpha the regularisation.

    p_i      =   S(mu_i - tau_i);   a client runs w~_i = p_i w_i (Eq. 1)
    tau_i   <-   the server's tau_i(t)
    w_i     <-   w_i - (tau_i(t) - tau_i(t - 1)) / n  sgn(sum_j w_ij) (Eq. 13)
    E epochs of SGD, on all w and tau together:
    w_i     <-   w_i - eta p_i g_i (Eq. 3)
    tau_i   <-   tau_i + eta (sum_j g_ij w_ij + alpha exp(-tau_i)) (Eqs. 4 to 6, 8, 9), the sum over pruned rows too
    tau(t+1) =   the mean of the cohort's tau (Eq. 7)

The weights never leave their client, all clients start from the same ones, and thresholds start at 0. A client is
evaluated with the thresholds that it ended its own training with.

    >>> from rayfl.methods import METHODS
    >>> METHODS["spafl"]().ramp(0), METHODS["spafl"](alpha_ramp=1).ramp(1)
    (1.0, 0.9933071490757153)

Departures:
1. mu_i - tau_i = 0 prunes, as in the code.
2. The paper keeps weights and thresholds within bounds, the code does not. Here there are none unless `clamp_weights`
   and `clamp_thresholds` are given.
3. A layer of which at most 1 % is left gets its thresholds back to 0 before the forward pass that would meet it; the
   code looks at the pass before, so that one pass runs through the empty layer. What a client sends is not reset.
4. The optimiser is new every round, as in the code for CIFAR; that for Fashion-MNIST keeps one for ever
   (`persistent_momentum`), momentum of thresholds that were overwritten since included.
5. A bias belongs to its row: it is pruned and it counts in sum_j g_ij w_ij, but not in mu, n and Eq. 13. The paper's
   masked layers have none.
6. To form tau(t) - tau(t - 1) a client would have to know both; one that was not there in the round before does not.
   It is sent, and counted apart as `bytes_delta`; `bytes_down` is tau(t) alone, as in the paper.
7. Eq. 13 is for the cohort alone, as in Algorithm 1; the code for CIFAR-10 does it for all clients, who never hear of
   the thresholds otherwise.
8. `train_flops` are of the whole network, every masked layer's by its density at the last forward pass of the client's
   round, and 2 a multiply-add. The paper counts a multiply-add once, and masked layers alone.
9. `train_loss` is without the regularisation. Gradient clipping is of weights and thresholds together, as in the code.
10. The norms' running statistics are a client's own, as in the code: `evaluation.statistics` has no effect.
11. `target_density` is ours, for the paper leaves it to alpha what density comes out. With rho(t) the density of the
    cohort after its round, alpha(t+1) = alpha(t) + alpha (gain (rho(t) - target) + damping (rho(t) - rho(t - 1))),
    from alpha(0) = alpha and rho(-1) = 1; below 0 it lowers thresholds. A client is sent alpha and sends its density,
    which `bytes_down` and `bytes_up` count.
"""

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self, cast

import torch
from pydantic import AfterValidator, Field, model_validator
from torch import nn
from torch.func import functional_call

from rayfl import costs
from rayfl.axes import Net
from rayfl.config import ConfigError
from rayfl.methods.base import Client, Deployment, Payload, State, Task, Update
from rayfl.methods.local import LocalMethod
from rayfl.models.base import layers_of, params_of
from rayfl.norms import tracked
from rayfl.submodel import Mask, NestedMean, Selection
from rayfl.tensors import Params, nbytes
from rayfl.training import ClientData, weighted


def _ascending(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    if low >= high:
        raise ValueError("the lower bound first")
    return bounds


Bounds = Annotated[tuple[float, float], AfterValidator(_ascending)]


class SpaFL(LocalMethod):
    is_personal: ClassVar[bool] = True

    name: Literal["spafl"] = "spafl"
    alpha: float = Field(default=0.002, ge=0)
    """Weight of the regularisation sum exp(-tau), which raises thresholds. Published: 0.002 (Fashion-MNIST), 0.00015
    (CIFAR-10), 0.0007 (CIFAR-100)."""
    alpha_ramp: float = Field(default=0.0, ge=0)
    """Rounds P over which alpha rises to its value, as 1 / (1 + exp(5 - 10 t / P)); 1 in the code for Fashion-MNIST
    and CIFAR-100. 0: it is there from round 0 on."""
    exchange: bool = True
    """Whether thresholds travel. false: the baseline "Local", in which every client is alone with its own."""
    eq13: bool = True
    """Whether clients move their weights by the change of the shared thresholds; false: the row "w.o. (13)"."""
    eq13_divisor: Literal["n_in", "official"] = "n_in"
    """By what: a row's number of weights, or for a filter its height times its width alone, as in the code."""
    train_weights: bool = True
    """false: thresholds alone are trained, and weights stay where everybody started (Table 2). With eq13: false."""
    classifier: bool = True
    """Whether the classifier has thresholds: it has in LeNet and in the CIFAR-10 network, not in the ResNet-18."""
    w_grad: Literal["paper", "official_fmnist"] = "paper"
    """Gradient of the weights. paper: p g. official_fmnist: and that through mu, by which pruned rows move too."""
    step_backward: Literal["identity", "official_cifar"] = "identity"
    """Gradient of the unit step S. identity: 1. official_cifar: 1 where |mu - tau| > 1 and else 0, so that the loss
    hardly ever moves thresholds."""
    reset_density: float = Field(default=0.01, ge=0, lt=1)
    """Share of a layer's rows at or below which its thresholds start at 0 again. The metric `resets` counts."""
    persistent_momentum: bool = False
    """A client's momentum outlives its round, as in the code for Fashion-MNIST; that of thresholds which the server's
    have replaced, too."""
    clamp_weights: Bounds | None = None
    """Lower and upper bound of the weights of masked layers, after every step."""
    clamp_thresholds: Bounds | None = None
    """Lower and upper bound of thresholds, after every step."""
    target_density: float | None = Field(default=None, gt=0, lt=1)
    """The density that the server steers its cohorts to, by an alpha of every round's own: the mean over clients of the
    mean over masked layers, as it is evaluated. Unless given, `alpha` stays."""
    gain: float = Field(default=5.0, gt=0)
    """With `target_density`: by how many times `alpha` the next round's grows, for each 1 that the density is above."""
    damping: float = Field(default=20.0, ge=0)
    """With `target_density`: by how many times `alpha` it grows, for each 1 that the density grew since the last."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.eq13 and not self.train_weights:
            raise ValueError("eq13: false with train_weights: false, for Eq. 13 moves weights")
        if self.target_density is None and (self.gain, self.damping) != (5, 20):
            raise ValueError("gain and damping with target_density only")
        if self.target_density is not None and not (self.exchange and self.alpha):
            raise ValueError("target_density with exchange: true and an alpha over 0 only: the server steers by alpha")
        return self

    def bind(self, task: Task) -> Self:
        """All clients run the server's network, for all train the same thresholds."""
        bound = super().bind(task.everywhere(task.server))
        if self.persistent_momentum and not task.training.momentum:
            raise ConfigError("method.persistent_momentum: given true; allowed: with a training.momentum over 0")
        if not bound.layers(task.server):
            raise ConfigError(f"method.classifier: given false with model {task.model.name}, which has no other layer")
        return bound

    def init(self, seed: int) -> State:
        """`params`: what every client starts from. `delta`: the last change of the thresholds."""
        state, net = super().init(seed), self.task.server
        rows = {path: state["params"][f"{path}.weight"].shape[0] for path in self.layers(net)}
        zeros = {name: {path: torch.zeros(n) for path, n in rows.items()} for name in ("thresholds", "delta")}
        control = {"alpha": torch.tensor(self.alpha), "density": torch.ones(())}
        return state | zeros | ({"control": control} if self.target_density else {})

    def layers(self, net: Net) -> list[str]:
        """The paths of the layers that have thresholds: all convolutions and linear layers."""
        dims, labels = self.task.layout(net).dims, self.task.model.labels
        return [
            path for path in layers_of(self.task.model, net) if self.classifier or dims[f"{path}.weight"][0] != labels
        ]

    def select(self, state: State, round: int, client: Client, seed: int) -> Selection:
        return Mask(self.task.server, "everything", {})

    def extract(self, state: State, selection: Selection) -> Payload:
        if not self.exchange:
            return {}
        payload = {"thresholds": state["thresholds"]} | ({"delta": state["delta"]} if self.eq13 else {})
        return payload | ({"control": {"alpha": state["control"]["alpha"]}} if self.target_density else {})

    def local_update(
        self, payload: Payload, selection: Selection, client: Client, data: ClientData, round: int, seed: int
    ) -> Update:
        own = cast(dict[str, Params], client.carry) or self._initial()
        thresholds, delta = payload.get("thresholds", own["thresholds"]), payload.get("delta", {})
        net = self.network(self.moved(own["params"], delta), selection.net, data)
        statistics = {name: t.to(data.device, copy=True) for name, t in own.get("statistics", {}).items()}
        pruned = _Pruned(self, net, {path: t.to(data.device, copy=True) for path, t in thresholds.items()})
        alpha = self.ramp(round) * (payload["control"]["alpha"].item() if self.target_density else self.alpha)

        def regularise(_: nn.Module) -> None:
            for tau in pruned.thresholds:
                cast(torch.Tensor, tau.grad).sub_(tau.detach().neg().exp_(), alpha=alpha)
            if not self.train_weights:
                for parameter in net.parameters():
                    cast(torch.Tensor, parameter.grad).zero_()

        def clamp(_: nn.Module) -> None:
            self.clamp(pruned)

        momentum = dict(own.get("momentum", {})) if self.persistent_momentum else None
        with tracked(net, statistics):
            metrics = self.train(pruned, data, round, seed, adjust=regularise, project=clamp, momentum=momentum)
        samples = int(metrics["train_samples"])
        metrics["train_flops"] = costs.training_flops(self.task.model, selection.net, samples, pruned.densities)
        metrics["resets"] = int(pruned.resets)
        metrics["bytes_down"] = nbytes(payload) - nbytes(delta)
        metrics["bytes_delta"] = nbytes(delta)
        trained = dict(zip(pruned.paths, (tau.detach() for tau in pruned.thresholds), strict=True))
        carry = {"params": params_of(net), "thresholds": trained}
        if statistics:
            carry["statistics"] = statistics
        if momentum:
            carry["momentum"] = momentum
        carry = {group: weighted(tensors, 1.0) for group, tensors in carry.items()}
        weight = self.weight_of(data)
        sums = {"thresholds": weighted(trained, weight) if self.exchange else {}}
        if self.target_density:
            left = [self.kept(net.get_parameter(f"{path}.weight"), tau) for path, tau in trained.items()]
            sums["control"] = weighted({"density": torch.stack([rows.float().mean() for rows in left]).mean()}, weight)
        return Update(sums, weight, metrics=metrics, carries={client.id: carry})

    def moved(self, params: Params, delta: Params) -> Params:
        """Eq. 13, by the change of the thresholds [rows] of every layer."""
        moved = dict(params)
        for path, change in delta.items():
            w = params[f"{path}.weight"]
            n = w[0].numel() if self.eq13_divisor == "n_in" or w.dim() == 2 else w[0, 0].numel()
            moved[f"{path}.weight"] = w - _rows(change / n * w.flatten(1).sum(1).sign(), w)
        return moved

    def ramp(self, round: int) -> float:
        """What part of alpha is there in a round."""
        return 1 / (1 + math.exp(5 - 10 * round / self.alpha_ramp)) if self.alpha_ramp else 1.0

    @torch.no_grad()
    def clamp(self, pruned: "_Pruned") -> None:
        """Puts weights and thresholds between their bounds, in place."""
        if self.clamp_weights:
            for path in pruned.paths:
                pruned.whole.get_parameter(f"{path}.weight").clamp_(*self.clamp_weights)
        if self.clamp_thresholds:
            for tau in pruned.thresholds:
                tau.clamp_(*self.clamp_thresholds)

    def is_empty(self, mu: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
        """Whether so little of a layer with these rows is left that its thresholds start again: a bool."""
        return (mu > tau).sum() <= math.floor(self.reset_density * len(mu) + 1e-9)

    def kept(self, weight: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
        """Which rows of a weight [rows, ...] a device has: [rows] bool."""
        mu = _magnitudes(weight.detach())
        return mu > tau.masked_fill(self.is_empty(mu, tau), 0)

    def aggregate(self, state: State, round: int, updates: Iterator[tuple[Selection, Update]]) -> State:
        old, control = state["thresholds"], state.get("control", {})
        means = {"thresholds": NestedMean(old), "control": NestedMean(control)}
        weight = 0.0
        for selection, update in updates:
            for group, sums in update.sums.items():
                means[group].add(selection, sums, update.weight)
            weight += update.weight
        new = means["thresholds"].mean()
        state = state | {"thresholds": new, "delta": {path: t - old[path] for path, t in new.items()}}
        if self.target_density is None or not weight:
            return state
        density = means["control"].mean()["density"]
        change = self.gain * (density - self.target_density) + self.damping * (density - control["density"])
        return state | {"control": {"alpha": control["alpha"] + self.alpha * change, "density": density}}

    def deploy(self, state: State, round: int, capacity: float, client: Client | None = None) -> Deployment:
        """A client's own; for others what everybody started from, which nothing has pruned."""
        net, model = self.task.server, self.task.model
        if client is None or client.carry is None:
            key, own = "initial", {"params": state["params"], "statistics": model.statistics(net)}
        else:
            key, own = ("own", client.id), cast(dict[str, Params], client.carry)
        params = dict(own["params"])
        for path, tau in own.get("thresholds", {}).items():
            rows = self.kept(params[f"{path}.weight"], tau)
            for name in _of(path, params):
                params[name] = params[name] * _rows(rows, params[name])
        masked = tuple(name for path in self.layers(net) for name in _of(path, params))
        return Deployment(key, model, net, params, own.get("statistics") or None, masked=masked)

    def _initial(self) -> dict[str, Params]:
        """What a client starts from. It draws it itself: the run's seed is all that it has to know."""
        state = self.init(self.task.seed)
        statistics = self.task.model.statistics(self.task.server)
        return {"params": state["params"], "thresholds": state["thresholds"], "statistics": statistics}


class _Pruned(nn.Module):
    """A client's network, which runs on the rows that its thresholds leave."""

    def __init__(self, method: SpaFL, whole: nn.Module, thresholds: Params):
        super().__init__()
        self.whole, self.method, self.paths = whole, method, list(thresholds)
        self.thresholds = nn.ParameterList(thresholds.values())
        self.gates: list[torch.Tensor] = []
        """1 for the rows that the last forward pass ran on, else 0, by layer."""
        self.resets = torch.zeros((), dtype=torch.int64, device=self.thresholds[0].device)
        """How often a layer's thresholds started again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        params: Params = dict(self.whole.named_parameters())
        gates = [
            self._gate(params[f"{path}.weight"], tau) for path, tau in zip(self.paths, self.thresholds, strict=True)
        ]
        self.gates = [gate.detach() for gate in gates]
        for path, gate in zip(self.paths, gates, strict=True):
            for name in _of(path, params):
                params[name] = params[name] * _rows(gate, params[name])
        return functional_call(self.whole, params, (x,))

    def _gate(self, weight: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
        """S(mu - tau) of every row: [rows], with the estimator's gradient. Thresholds of an empty layer become 0."""
        with torch.set_grad_enabled(self.method.w_grad != "paper"):
            mu = _magnitudes(weight)
        with torch.no_grad():
            self.resets += (empty := self.method.is_empty(mu, tau))
            tau.masked_fill_(empty, 0)
        s = mu - tau
        slope = 1.0 if self.method.step_backward == "identity" else (s.detach().abs() > 1).float()
        return (s.detach() > 0).float() + slope * (s - s.detach())

    @property
    def densities(self) -> dict[str, float]:
        """The share of every layer that the last forward pass ran on; nothing before the first."""
        return {path: gate.mean().item() for path, gate in zip(self.paths, self.gates, strict=False)}


def _of(path: str, params: Params) -> list[str]:
    """The parameters of a layer."""
    return [name for name in (f"{path}.weight", f"{path}.bias") if name in params]


def _magnitudes(weight: torch.Tensor) -> torch.Tensor:
    """mu: the mean magnitude of every row of a weight [rows, ...]."""
    return weight.flatten(1).abs().mean(1)


def _rows(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A number a row [rows], in so many dimensions that it broadcasts to `like` [rows, ...]."""
    return t.view(-1, *[1] * (like.dim() - 1))
