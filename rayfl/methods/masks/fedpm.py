"""FedPM: clients learn which of a network's random weights to keep, and send one bit per weight.

Paper: Isik, Pase, Gunduz, Weissman, Zorzi, "Sparse Random Networks for Communication-Efficient Federated Learning",
ICLR 2023, https://arxiv.org/abs/2209.15328 (code: BerivanIsik/sparse-random-networks).

Symbols: $w$ the $n$ frozen weights, $theta$ the global probabilities, $s_k$ the scores of client $k$, $m ~ Bern(theta)$
a mask of 0 and 1, $L$ the loss, $K$ the clients that answer, $N$ the population, $epsilon = 0.01$.

    $w$           $-c$ or $c$, each with probability 1/2, for every convolution and linear layer and its bias; drawn
                once from the run's seed by server and clients, never sent; $c = sqrt(2/f)$ with $f$ the inputs of the
                layer's neurons
    $theta$       $= sigmoid(N(0, 1))$ at first
    $s_k$         $= logit(theta)$ at first; every step draws $m ~ Bern(sigmoid(s_k))$ anew, runs the network with
                $m w$, and takes the gradient:
                $grad_s L = grad_m L sigmoid(s) (1 - sigmoid(s))$ with $grad_m L = w grad_(m w) L$
    $m_k$         $~ Bern(sigmoid(s_k))$, one draw, sent in $n H(p) + log_2(n)$ bits, $p$ its share of ones
                (core/bitcodes.py)
    $alpha$       $<- alpha + sum_k m_k$;
                $beta <- beta + sum_k (1 - m_k)$; both 1 wherever the prior is reset
    $theta$       $= (alpha - 1)/(alpha + beta - 2)$, kept within $[epsilon, 1 - epsilon]$

Cost per round: $n$ float32 probabilities down, at most about one bit per weight up; the client's training, one draw of
a mask per step; one sum on the server.

With a reset in every round $theta$ is the mean of the received masks. Devices run $m w$ with one draw
$m ~ Bern(theta)$, the same for all.

    >>> from rayfl.methods import METHODS
    >>> alpha, beta = torch.tensor([3.0, 4.0]), torch.tensor([2.0, 1.0])  # masks (1, 1), (0, 1), (1, 1)
    >>> METHODS["fedpm"]().mode(alpha, beta)
    tensor([0.6667, 0.9900])
    >>> METHODS["fedpm"](soften=True).mode(alpha, beta)
    tensor([0.6633, 0.9900])

Departures:
1. `ste: identity` is the paper's derivative; the authors' code multiplies by theta once more (`official_p`). The code's
   constant is e / sqrt(fan_in) (`init_c: official`).
2. The authors' server reads a bit as .01 or .99, so that no score is infinite (`soften: true`). By default bits stay 0
   or 1, and eps bounds theta. The coded share of ones is the true one in both cases.
3. Parameters other than weights and biases of convolutions and linear layers (norms, tokens, positions) keep their
   initial values, unmasked; the paper's networks have none. Norms collect statistics as for other methods.
4. Optimisers are new in every round; in the code a client's Adam keeps its moments although its scores are replaced.
5. All clients have the server's network and equal weights.
6. The code resets the prior in every round. The paper keeps it for about N / K rounds if few clients take part.
7. A client's forward passes cost the multiply-adds of its last mask, layer by layer (SpaFL's count), also in training.
8. With `updates.transforms` masks are not coded: the bytes up are those of float32 after the transforms.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import nn

from rayfl import costs
from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.bitcodes import encode
from rayfl.core.fold import ClientState, Fold, State, Update
from rayfl.core.joined import call
from rayfl.core.net import Net, cached_module, params_of
from rayfl.core.seeds import stream, torch_generator, torch_scope
from rayfl.core.submodel import Mask, Selection
from rayfl.core.tensors import Params
from rayfl.methods.base import Client, Deployment, Method, Payload, Task, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.sizes import rows_are_neurons

Constant = Literal["kaiming", "official"]

EPSILON = 0.01
"""Smallest probability of a 0 or a 1, so that no score is infinite."""


class FedPM(Method):
    contract: ClassVar = Contract(mean="probabilities", answers="masks", exact=False, fedavg=None)

    name: Literal["fedpm"] = "fedpm"
    weight: Literal["uniform"] = "uniform"
    """Weight of a client. A mask is one observation, however many samples it was trained on."""
    init_c: Constant = "kaiming"
    """Magnitude of the frozen weights. kaiming: sqrt(2 / fan_in). official: e / sqrt(fan_in)."""
    ste: Literal["identity", "official_p"] = "identity"
    """Derivative of a drawn mask by its probability. identity: 1. official_p: the probability."""
    prior_reset: Annotated[int, Field(ge=1)] | Literal["ceil_inv_participation"] = 1
    """Rounds between resets of the prior, from round 0 on; 1: in every round. ceil_inv_participation: N / K rounds,
    rounded up (a reset as soon as the prior has seen as many masks as there are clients)."""
    soften: bool = False
    """Count a 0 as 0.01 and a 1 as 0.99 on the server."""
    deployed: Literal["sample", "mean", "threshold"] = "sample"
    """Deployed network: one draw of the mask, the expected weights theta w, or the weights with theta > 1/2."""

    def sizes(self, task: Task) -> Mapping[float, Net]:
        """Return the server's network for every capacity."""
        return dict.fromkeys(task.nets, task.server)

    def check(self, rounds: int, clients: Population) -> None:
        """Raise a ConfigError if the model is pretrained, or has layers without a weight of their own."""
        rows_are_neurons(self.name, self.task.server, self.task.server.layers)
        if self.task.model.blank != self.task.model:
            raise ConfigError(
                f"model.weights: not supported with method {self.name}, which draws its own weights. Allowed: leave "
                "it out"
            )

    def init(self) -> State:
        """Return `params`, the frozen weights; `probabilities`; `alpha` and `beta` if a prior lasts several rounds."""
        frozen = self.frozen("cpu")
        scores = torch.randn(len(frozen.weights), generator=torch_generator(self.task.seed, "scores"))
        theta = {name: _bounded(t.sigmoid()) for name, t in frozen.split(scores).items()}
        params = {name: t.clone() for name, t in frozen.params(frozen.weights).items()}
        state = {"params": params, "probabilities": theta}
        if self.prior_reset != 1:
            state |= {name: {n: torch.ones_like(t) for n, t in theta.items()} for name in ("alpha", "beta")}
        return state

    def select(self, state: State, client: Client) -> Selection:
        return Mask(self.task.server, "probabilities", {})

    def extract(self, state: State, selection: Selection) -> Payload:
        return {"probabilities": state["probabilities"]}

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        net, device = visit.net, visit.data.device
        frozen, theta = self.frozen(device), payload["probabilities"]
        scores = torch.cat([theta[name].reshape(-1) for name in frozen.shapes]).to(device).logit()
        generator = torch.Generator(device).manual_seed(stream(visit.seed, "masks"))
        drawn = Drawn(cached_module(net, device).train(), frozen, scores, generator, self.ste == "official_p")
        metrics = self.fit(drawn, visit)
        mask = drawn.draw()
        densities = costs.present(net, frozen.split(drawn.mask), frozen.shapes).layers
        metrics["train_flops"] = costs.training_flops(net, int(metrics["train_samples"]), densities)
        metrics["bytes_up"] = len(encode(mask))
        return Update({}, self.weight_of(visit.data), {"masks": frozen.split(mask.float().cpu())}, metrics=metrics)

    def step(self, state: State, round: int, fold: Fold) -> State:
        ones, count, theta = fold.sum("masks"), fold.weight, state["probabilities"]
        flat = {name: torch.ones_like(t) for name, t in theta.items()}
        alpha, beta = (flat, flat) if self._resets(state, round) else (state["alpha"], state["beta"])
        if count:
            alpha = {name: alpha[name] + t for name, t in ones.items()}
            beta = {name: beta[name] + (count - t) for name, t in ones.items()}
            theta = {name: self.mode(alpha[name], beta[name]) for name in ones}
        prior = {"alpha": alpha, "beta": beta} if "alpha" in state else {}
        return {"params": state["params"], "probabilities": theta} | prior

    def mode(self, alpha: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        """Return the mode of Beta(alpha, beta), within the bounds."""
        theta = (alpha - 1) / (alpha + beta - 2)
        return _bounded(0.01 + 0.98 * theta if self.soften else theta)

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        theta, params = state["probabilities"], dict(state["params"])
        generator = torch_generator(self.task.seed, "deployed", round)
        for name, t in theta.items():
            if self.deployed == "sample":
                t = (torch.rand(t.shape, generator=generator) < t).float()
            elif self.deployed == "threshold":
                t = (t > 0.5).float()
            params[name] = params[name] * t
        return Deployment((self.deployed, round), self.task.server, params, masked=tuple(theta))

    def frozen(self, device: torch.device | str) -> "Frozen":
        """Return the frozen weights, the same on server and clients."""
        return _frozen(self.task.server, self.init_c, self.task.seed, torch.device(device))

    def _resets(self, state: State, round: int) -> bool:
        """Return whether this round starts a new prior."""
        if isinstance(self.prior_reset, int):
            return round % self.prior_reset == 0
        alpha, beta = (next(iter(state[name].values())).reshape(-1)[0] for name in ("alpha", "beta"))
        return float(alpha + beta - 2) >= self.task.clients


def _bounded(theta: torch.Tensor) -> torch.Tensor:
    return theta.clamp(EPSILON, 1 - EPSILON)


@dataclass(frozen=True)
class Frozen:
    """Parameters that are never trained and never sent."""

    weights: torch.Tensor
    """w [n], the masked tensors concatenated."""
    shapes: Mapping[str, torch.Size]
    """Shapes of the masked parameters."""
    rest: Params
    """Parameters without a mask."""

    def split(self, flat: torch.Tensor) -> Params:
        """Return views of [n] in the shapes of the masked parameters, by name."""
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: t.view(shape) for (name, shape), t in zip(self.shapes.items(), parts, strict=True)}

    def params(self, flat: torch.Tensor) -> Params:
        """Return all of the network's parameters, the masked ones from [n]."""
        return self.split(flat) | self.rest


@functools.lru_cache(maxsize=4)
def _frozen(net: Net, constant: Constant, seed: int, device: torch.device) -> Frozen:
    with torch_scope(stream(seed, "init")):
        rest = params_of(net.build())
    weights, shapes = [], {}
    for path, names in net.layers.items():
        fan_in = rest[f"{path}.weight"][0].numel()
        c = math.sqrt(2 / fan_in) if constant == "kaiming" else math.e / math.sqrt(fan_in)
        for name in names:
            shapes[name] = rest.pop(name).shape
            heads = torch.randint(2, (shapes[name].numel(),), generator=torch_generator(seed, "frozen", name))
            weights.append(c * (2.0 * heads - 1))
    return Frozen(torch.cat(weights).to(device), shapes, {name: t.to(device) for name, t in rest.items()})


class Drawn(nn.Module):
    """Network with a new mask in every forward pass: [B, ...] -> logits. Its parameters are the scores [n]."""

    mask: torch.Tensor
    """Mask [n] bool of the last pass, all False before the first."""

    def __init__(
        self, module: nn.Module, frozen: Frozen, scores: torch.Tensor, generator: torch.Generator, twice: bool
    ):
        """Build on `module`, whose own parameter values are not used. `twice`: see `Keep`."""
        super().__init__()
        self.scores = nn.Parameter(scores)
        # not a submodule, whose own parameters would be trained
        self.run: Callable[..., torch.Tensor] = functools.partial(call, module)
        self.frozen, self.generator, self.twice = frozen, generator, twice
        self.mask = torch.zeros_like(scores, dtype=torch.bool)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        theta = self.scores.detach().sigmoid()
        self.mask = self._drawn(theta)
        weights = cast(torch.Tensor, Keep.apply(self.scores, theta, self.mask, self.frozen.weights, self.twice))
        return self.run(self.frozen.params(weights), x)

    def draw(self) -> torch.Tensor:
        """Return a mask [n] drawn from the current scores."""
        return self._drawn(self.scores.detach().sigmoid())

    def _drawn(self, theta: torch.Tensor) -> torch.Tensor:
        return torch.rand(theta.shape, generator=self.generator, device=theta.device) < theta


class Keep(torch.autograd.Function):
    """Product m w with the gradient to the scores as if m were sigmoid(s); with `twice`, times sigmoid(s) again."""

    @staticmethod
    def forward(ctx, scores, theta, mask, weights, twice):
        ctx.save_for_backward(theta, weights)
        ctx.twice = twice
        return weights * mask

    @staticmethod
    def backward(ctx, *grads):
        theta, weights = ctx.saved_tensors
        gradient = grads[0] * weights * theta * (1 - theta)
        return (gradient * theta if ctx.twice else gradient), None, None, None, None
