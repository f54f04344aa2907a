"""SpaFL: clients train thresholds that prune whole filters and neurons, and exchange only these thresholds.

Paper: Kim, Saad, Debbah, Hong, "SpaFL: Communication-Efficient Federated Learning with Sparse Models and Low
Computational Overhead", NeurIPS 2024, https://arxiv.org/abs/2406.00431 (Algorithm 1; code:
news-vt/SpaFL_NeruIPS_2024).

Symbols: $w_i$ the $n$ weights of a filter or neuron $i$ (a row), $tau_i$ its threshold, $mu_i$ the mean of $|w_i|$, $S$
the unit step, $g_i$ the gradient of the loss by the pruned weights, $t$ the round, $eta$ the learning rate, $alpha$ the
regularisation.

    $p_i$          $= S(mu_i - tau_i)$; a client runs $tilde w_i = p_i w_i$ (Eq. 1)
    $tau_i$        $<- tau_i(t)$ of the server
    $w_i$          $<- w_i - (tau_i(t) - tau_i(t - 1))/n sgn(sum_j w_(i j))$ (Eq. 13)
    training     $E$ epochs of SGD, on all $w$ and $tau$ together:
                 $w_i <- w_i - eta p_i g_i$ (Eq. 3);
                 $tau_i <- tau_i + eta (sum_j g_(i j) w_(i j) + alpha exp(-tau_i))$ (Eqs. 4 to 6, 8, 9), the sum over
                 pruned rows too
    $tau(t + 1)$   the mean of the cohort's $tau$ (Eq. 7)

Cost per round: the thresholds down and up, one number per filter or neuron; the client's training of weights and
thresholds; one sum on the server.

Weights never leave their client. All clients start from the same weights and from thresholds 0. A client is evaluated
with the thresholds of the end of its own training.

    >>> from rayfl.methods import METHODS
    >>> METHODS["spafl"]().ramp(0), METHODS["spafl"](alpha_ramp=1).ramp(1)
    (1.0, 0.9933071490757153)

Departures:
1. mu_i - tau_i = 0 prunes, as in the code.
2. The paper keeps weights and thresholds within bounds, the code does not. Here they have no bounds unless
   `clamp_weights` and `clamp_thresholds` are given.
3. The thresholds of a layer with at most 1 % of its rows left are reset to 0 before the forward pass. The code checks
   the previous pass, so one of its passes runs through the empty layer. Sent thresholds are not reset.
4. The optimiser is new in every round, as in the code for CIFAR. The code for Fashion-MNIST keeps it over all rounds
   (`persistent_momentum`), including the momentum of thresholds that the server has replaced.
5. A bias belongs to its row: it is pruned and counts in sum_j g_ij w_ij, but not in mu, n and Eq. 13. The paper's
   masked layers have no biases.
6. A client that missed the previous round does not know tau(t - 1), so tau(t) - tau(t - 1) is sent. It is counted
   separately as `bytes_delta`; `bytes_down` is tau(t) alone, as in the paper.
7. Eq. 13 applies to the cohort only, as in Algorithm 1. The code for CIFAR-10 applies it to all clients, although those
   outside the cohort do not receive the thresholds.
8. `train_flops` counts the whole network, each masked layer by its density in the last forward pass of the client's
   round, and 2 per multiply-add. The paper counts a multiply-add once, and masked layers only.
9. `train_loss` excludes the regularisation. Gradients of weights and thresholds are clipped together, as in the code.
10. Running statistics of norms are personal, as in the code: `evaluation.statistics` is ignored.
11. `target_density` is an extension; in the paper the density follows from alpha. With rho(t) the density of the cohort
    after its round, alpha(t+1) = alpha(t) + alpha (5 (rho(t) - target) + 20 (rho(t) - rho(t - 1))), from
    alpha(0) = alpha and rho(-1) = 1; a negative alpha lowers thresholds. A client receives alpha and sends its density;
    `bytes_down` and `bytes_up` count both.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import torch
from pydantic import AfterValidator, Field, model_validator
from torch import nn

from rayfl import costs
from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import ClientState, Fold, State, Update
from rayfl.core.joined import call, parameters_of
from rayfl.core.net import Net, cached_module, load, params_of
from rayfl.core.norms import tracked
from rayfl.core.submodel import Mask, Selection
from rayfl.core.tensors import Params, copied, nbytes
from rayfl.methods.base import Client, Deployment, Method, Payload, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.sizes import rows_are_neurons
from rayfl.training.steps import at_rest

RESET = 0.01
"""Share of a layer's rows at or below which the layer is empty (departure 3)."""
GAIN, DAMPING = 5, 20
"""Factors of the density's excess over its target and of its last growth in the change of alpha (departure 11)."""

Kept = dict[str, Params]
"""Client state: "own" weights and "thresholds", and "statistics" of norms and "momentum" if there are any."""


def _ascending(bounds: tuple[float, float]) -> tuple[float, float]:
    low, high = bounds
    if low >= high:
        raise ValueError("the lower bound must come first and be less than the upper bound")
    return bounds


Bounds = Annotated[tuple[float, float], AfterValidator(_ascending)]


class SpaFL(Method):
    judged_on: ClassVar = "clients"
    contract: ClassVar = Contract(mean="thresholds", answers="thresholds", fedavg=None)

    name: Literal["spafl"] = "spafl"
    alpha: float = Field(default=0.002, ge=0)
    """Weight of the regularisation sum exp(-tau), which raises thresholds. Published: 0.002 (Fashion-MNIST), 0.00015
    (CIFAR-10), 0.0007 (CIFAR-100)."""
    alpha_ramp: float = Field(default=0.0, ge=0)
    """Rounds P over which alpha rises, as 1 / (1 + exp(5 - 10 t / P)); 1 in the code for Fashion-MNIST and CIFAR-100.
    0: alpha is constant."""
    exchange: bool = True
    """Exchange thresholds. false: the baseline "Local", in which clients train alone."""
    eq13: bool = True
    """Move weights by the change of the shared thresholds (Eq. 13). false: the row "w.o. (13)"."""
    eq13_divisor: Literal["n_in", "official"] = "n_in"
    """n of Eq. 13. n_in: number of weights in a row. official: for a filter, its height times its width."""
    train_weights: bool = True
    """Train weights. false: train only thresholds and keep the initial weights (Table 2); requires eq13: false."""
    classifier: bool = True
    """Give the classifier thresholds, as in LeNet and the CIFAR-10 network, but not in the ResNet-18."""
    w_grad: Literal["paper", "official_fmnist"] = "paper"
    """Gradient of the weights. paper: p g. official_fmnist: adds the gradient through mu, which moves pruned rows."""
    step_backward: Literal["identity", "official_cifar"] = "identity"
    """Gradient of the unit step S. identity: 1. official_cifar: 1 if |mu - tau| > 1, otherwise 0, so that the loss
    hardly ever moves thresholds."""
    persistent_momentum: bool = False
    """Keep a client's momentum between rounds, as in the code for Fashion-MNIST, including that of thresholds."""
    clamp_weights: Bounds | None = None
    """Lower and upper bound of the weights of masked layers, applied after every step. Default: no bounds."""
    clamp_thresholds: Bounds | None = None
    """Lower and upper bound of thresholds, applied after every step. Default: no bounds."""
    target_density: float | None = Field(default=None, gt=0, lt=1)
    """Target for the cohort's density (mean over clients of the mean over masked layers). The server adapts alpha in
    every round to reach it. Default: alpha does not change."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.eq13 and not self.train_weights:
            raise ValueError("train_weights: false requires eq13: false, because Eq. 13 moves weights")
        if self.target_density is not None and not (self.exchange and self.alpha):
            raise ValueError(
                "target_density requires exchange: true and an alpha over 0, because the server adapts alpha"
            )
        return self

    def sizes(self, task: Task) -> Mapping[float, Net]:
        """Return the server's network for every capacity, because all clients train the same thresholds."""
        return dict.fromkeys(task.nets, task.server)

    def check(self, rounds: int, clients: Population) -> None:
        """Raise a ConfigError if there is no momentum to keep, no layer with thresholds, or a layer without neurons."""
        if self.persistent_momentum and not self.task.training.momentum:
            raise ConfigError("method.persistent_momentum: true requires momentum. Allowed: training.momentum over 0")
        if not self.paths:
            raise ConfigError(
                f"method.classifier: false leaves no layer of model {self.task.model.name} with thresholds. Allowed: "
                "true"
            )
        rows_are_neurons(self.name, self.task.server, self.paths)

    @property
    def paths(self) -> list[str]:
        """Layers with thresholds: all convolutions and linear layers, with or without the classifier."""
        net = self.task.server
        return [path for path in net.layers if self.classifier or f"{path}.weight" not in net.layout.classifier]

    def init(self) -> State:
        """Return `params`, the initial weights of all clients; `thresholds`; and `delta`, their last change."""
        shapes = self.task.server.layout.shapes
        state = super().init()
        for group in ("thresholds", "delta"):
            state[group] = {path: torch.zeros(shapes[f"{path}.weight"][0]) for path in self.paths}
        if self.target_density:
            state["control"] = {"alpha": torch.tensor(self.alpha), "density": torch.ones(())}
        return state

    def select(self, state: State, client: Client) -> Selection:
        return Mask(self.task.server, "everything", {})

    def extract(self, state: State, selection: Selection) -> Payload:
        if not self.exchange:
            return {}
        payload = {"thresholds": state["thresholds"]} | ({"delta": state["delta"]} if self.eq13 else {})
        return payload | ({"control": {"alpha": state["control"]["alpha"]}} if self.target_density else {})

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        kept = cast(Kept, visit.client_state) or self.start()
        tau = payload.get("thresholds", kept["thresholds"])
        w = self.moved(kept["own"], payload.get("delta", {}))  # Eq. 13
        client = self.pruned(w, tau, visit)  # Eq. 1
        metrics, kept = self.trained(client, kept, self.alpha_in(visit.round, payload), visit)  # Eqs. 3 to 6
        weight = self.weight_of(visit.data)
        sent = {group: copied(tensors, weight) for group, tensors in self.sent(client).items()}
        metrics |= self.counted(client, int(metrics["train_samples"]), payload)
        return Update({}, weight, sent, metrics=metrics, client_states={visit.client.id: kept})

    def step(self, state: State, round: int, fold: Fold) -> State:
        old, new = state["thresholds"], fold.mean("thresholds")  # Eq. 7
        state = state | {"thresholds": new, "delta": {path: t - old[path] for path, t in new.items()}}
        return state | ({"control": self.steered(state["control"], fold)} if self.target_density else {})

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        """Return the client's personal network; without a client state, the unpruned initial one."""
        net = self.task.server
        kept = cast(Kept, client_state) or {"own": state["params"], "statistics": net.statistics()}
        params = dict(kept["own"])
        for path, tau in kept.get("thresholds", {}).items():
            rows = self.rows_left(params[f"{path}.weight"], tau)
            params |= {name: params[name] * _rows(rows, params[name]) for name in net.layers[path]}
        masked = tuple(itertools.chain(*(net.layers[path] for path in self.paths)))
        key = "own" if client_state else "initial"
        return Deployment(key, net, params, kept.get("statistics") or None, masked=masked, is_start=not client_state)

    # a client's round

    def start(self) -> Kept:
        """Return the initial client state. A client draws it from the run's seed."""
        state, statistics = self.init(), self.task.server.statistics()
        return {"own": state["params"], "thresholds": state["thresholds"], "statistics": statistics}

    def moved(self, params: Params, delta: Params) -> Params:
        """Return the weights moved by the change of each layer's thresholds [rows] (Eq. 13)."""
        moved = dict(params)
        for path, change in delta.items():
            w = params[f"{path}.weight"]
            n = w[0].numel() if self.eq13_divisor == "n_in" or w.dim() == 2 else w[0, 0].numel()
            moved[f"{path}.weight"] = w - _rows(change / n * w.flatten(1).sum(1).sign(), w)
        return moved

    def pruned(self, weights: Params, thresholds: Params, visit: Visit) -> "Pruned":
        """Return the client's network. It is a cached module: use it only until the client answers."""
        module = cached_module(visit.net, visit.data.device)
        load(module, weights)
        return Pruned(self, module, thresholds)

    def trained(self, client: "Pruned", kept: Kept, alpha: float, visit: Visit) -> tuple[dict[str, float], Kept]:
        """Train weights and thresholds in place. Return the metrics of `fit` and the new client state."""
        statistics = {name: t.to(visit.data.device, copy=True) for name, t in kept.get("statistics", {}).items()}
        momentum = dict(kept.get("momentum", {})) if self.persistent_momentum else None
        frozen = () if self.train_weights else client.whole.parameters()
        with tracked(client.whole, statistics), at_rest(frozen):
            metrics = self.fit(
                client,
                visit,
                adjust=lambda _: client.regularise(alpha),
                project=lambda _: client.clamp(),
                momentum=momentum,
            )
        own = {"own": params_of(client.whole), "thresholds": client.taus}
        rest = {"statistics": statistics, "momentum": momentum or {}}
        return metrics, {group: copied(tensors) for group, tensors in (own | rest).items() if tensors}

    def sent(self, client: "Pruned") -> dict[str, Params]:
        """Return the client's answer: its thresholds and, with a target density, its density."""
        if not self.target_density:
            return {"thresholds": client.taus} if self.exchange else {}
        left = [self.rows_left(client.weight(path), tau) for path, tau in client.taus.items()]
        density = torch.stack([rows.float().mean() for rows in left]).mean()
        return {"thresholds": client.taus, "control": {"density": density}}

    def counted(self, client: "Pruned", samples: int, payload: Payload) -> dict[str, float]:
        """Return the metrics of costs. `delta` is counted separately."""
        delta = nbytes(payload.get("delta", {}))
        return {
            "train_flops": costs.training_flops(self.task.server, samples, client.densities),
            "resets": int(client.resets),
            "bytes_down": nbytes(payload) - delta,
            "bytes_delta": delta,
        }

    # regularisation

    def ramp(self, round: int) -> float:
        """Return the share of alpha applied in a round."""
        return 1 / (1 + math.exp(5 - 10 * round / self.alpha_ramp)) if self.alpha_ramp else 1.0

    def alpha_in(self, round: int, payload: Payload) -> float:
        """Return alpha of a round: the server's with a target density, otherwise the configured one."""
        return self.ramp(round) * (payload["control"]["alpha"].item() if "control" in payload else self.alpha)

    def steered(self, control: Params, fold: Fold) -> Params:
        """Return alpha of the next round, from the cohort's density."""
        if not fold.weight:
            return control
        density = fold.sum("control")["density"] / fold.weight
        change = GAIN * (density - cast(float, self.target_density)) + DAMPING * (density - control["density"])
        return {"alpha": control["alpha"] + self.alpha * change, "density": density}

    # rows

    def is_empty(self, mu: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
        """Return whether a layer is empty, so that its thresholds are reset: [] bool."""
        return (mu > tau).sum() <= math.floor(RESET * len(mu) + 1e-9)

    def rows_left(self, weight: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
        """Return the mask [rows] bool of the rows of a weight [rows, ...] that are not pruned."""
        mu = _magnitudes(weight.detach())
        return mu > tau.masked_fill(self.is_empty(mu, tau), 0)


class Pruned(nn.Module):
    """Client's network on the rows that its thresholds leave: [B, ...] -> logits."""

    def __init__(self, method: SpaFL, whole: nn.Module, thresholds: Params):
        super().__init__()
        device = next(whole.parameters()).device
        self.whole, self.method = whole, method
        self.thresholds = nn.ParameterList(t.to(device, copy=True) for t in thresholds.values())
        self.paths = list(thresholds)
        self.gates: list[torch.Tensor] = []
        """Rows used in the last forward pass, by layer: 1, otherwise 0."""
        layers = {path: whole.get_submodule(path) for path in self.paths}
        self.linears = {path: layer for path, layer in layers.items() if type(layer) is nn.Linear}
        """Linear layers, computed as p (w x + b) in place of (p w) x + p b: they have fewer outputs than weights."""
        self.resets = torch.zeros((), dtype=torch.int64, device=device)
        """Number of times that a layer's thresholds were reset."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = {
            path: self._gate(self.weight(path), tau) for path, tau in zip(self.paths, self.thresholds, strict=True)
        }
        self.gates = [gate.detach() for gate in gates.values()]
        out, reached = self._run(gates, x)
        if reached != self.linears.keys():
            # a parent module uses the layer's weight directly, as attention does
            self.linears = {path: layer for path, layer in self.linears.items() if path in reached}
            out, _ = self._run(gates, x)
        return out

    def _run(self, gates: Params, x: torch.Tensor) -> tuple[torch.Tensor, set[str]]:
        """Return the logits and the layers with pruned outputs."""
        reached: set[str] = set()

        def prune(path: str, layer: nn.Module, given: Any, out: torch.Tensor) -> torch.Tensor:
            reached.add(path)
            return out * gates[path]

        own = parameters_of(self.whole)
        params: Params = {}
        for path, gate in gates.items():
            for name in () if path in self.linears else (f"{path}.weight", f"{path}.bias"):
                if name in own:
                    params[name] = own[name] * _rows(gate, own[name])
        hooks = [layer.register_forward_hook(functools.partial(prune, path)) for path, layer in self.linears.items()]
        try:
            return call(self.whole, params, x), reached
        finally:
            for hook in hooks:
                hook.remove()

    def _gate(self, weight: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
        """Return S(mu - tau) per row: [rows], with the estimator's gradient. Reset an empty layer's thresholds to 0."""
        with torch.set_grad_enabled(self.method.w_grad != "paper"):
            mu = _magnitudes(weight)
        with torch.no_grad():
            self.resets += (empty := self.method.is_empty(mu, tau))
            tau.masked_fill_(empty, 0)
        return cast(torch.Tensor, Step.apply(mu, tau, self.method.step_backward == "identity"))

    def regularise(self, alpha: float) -> None:
        """Add the gradient of alpha sum exp(-tau)."""
        for tau in self.thresholds:
            cast(torch.Tensor, tau.grad).sub_(tau.detach().neg().exp_(), alpha=alpha)

    @torch.no_grad()
    def clamp(self) -> None:
        if self.method.clamp_weights:
            for path in self.paths:
                self.weight(path).clamp_(*self.method.clamp_weights)
        if self.method.clamp_thresholds:
            for tau in self.thresholds:
                tau.clamp_(*self.method.clamp_thresholds)

    def weight(self, path: str) -> torch.Tensor:
        """Return the weight [rows, ...] of a layer."""
        return parameters_of(self.whole)[f"{path}.weight"]

    @property
    def taus(self) -> Params:
        """Thresholds [rows] by layer, detached; they share the parameters' memory."""
        return dict(zip(self.paths, (tau.detach() for tau in self.thresholds), strict=True))

    @property
    def densities(self) -> dict[str, float]:
        """Density of each layer in the last forward pass; empty before the first."""
        return {path: gate.mean().item() for path, gate in zip(self.paths, self.gates, strict=False)}


class Step(torch.autograd.Function):
    """S(mu - tau): 1 above 0, otherwise 0. Its gradient is that of mu - tau; without `identity` only where this is
    above 1 or below -1."""

    @staticmethod
    def forward(ctx: Any, mu: torch.Tensor, tau: torch.Tensor, identity: bool) -> torch.Tensor:
        s = mu - tau
        ctx.slope = None if identity else (s.abs() > 1).to(s.dtype)
        return (s > 0).to(s.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # pyright: ignore
        passed = grad if ctx.slope is None else grad * ctx.slope
        return passed, -passed, None


def _magnitudes(weight: torch.Tensor) -> torch.Tensor:
    """Return mu, the mean magnitude of each row of a weight [rows, ...]."""
    return weight.flatten(1).abs().mean(1)


def _rows(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshape [rows] so that it broadcasts to `like` [rows, ...]."""
    return t.view(-1, *[1] * (like.dim() - 1))
