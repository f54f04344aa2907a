"""Training steps of several clients as one computation: `torch.vmap` over their stacked parameters.

A step of a narrow network on a CPU spends its time on calls of operations, not on their work, and C stacked clients
share the calls. Each client keeps its own samples, number of steps, learning rates, label set, running statistics,
dropout, optimizer, clipping and hooks. Batches of different sizes are different calls, so that norms and means are
those of the client's own batch. Gradients differ from those of a client alone in the last bits, because sums have
another order.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rayfl.core import norms
from rayfl.core.compiler import without_compiler
from rayfl.core.joined import call, parameters_of
from rayfl.core.net import Net
from rayfl.core.seeds import PROCESS
from rayfl.core.tensors import Params, split_as
from rayfl.data.samples import Batch
from rayfl.training.channels import Channels, side_by_side
from rayfl.training.dropout import Dropout
from rayfl.training.passes import Passes
from rayfl.training.settings import Training, mask_logits
from rayfl.training.steps import Hook, Objective
from rayfl.training.together import Ask

MOST = 64
"""Clients that train together, at most: the gain of more is small (`scripts/bench_step.py`)."""
LEAST = 6
"""Clients that train together, at least: a stacked step takes as long as two to four steps of one client, and when some
have no more batches of this size, the others make theirs one by one."""
LAYER_MACS = 5e6
"""Multiply-adds of a client's step in a layer, on average, at most: calls with more work gain nothing from company."""
GROUP_MACS = 1.28e8
"""Multiply-adds of a step of all clients together, at most, unless these are `FEW`: larger groups gain little more, and
fewer groups keep fewer processes busy."""
FEW = 8
"""Clients that train together in spite of `GROUP_MACS`."""
GROUP_ELEMENTS = 2**25
"""Elements of parameters, gradients and activations of all clients together, at most: 128 MB."""

Inside = Callable[[Sequence[torch.Generator]], AbstractContextManager[Any]]
"""What forward passes run in, from the clients' generators."""

_known: WeakKeyDictionary[nn.Module, dict[Hashable, Inside | None]] = WeakKeyDictionary()
"""Module -> key of asks -> what `vmap` answers them in. None: it cannot."""


def most(net: Net, training: Training) -> int:
    """Return the number of clients with this network that train together. 1: each alone."""
    step = max(training.batch_size * net.macs, 1)
    if step > LAYER_MACS * max(len(net.layer_macs), 1):
        return 1
    elements = 4 * net.parameters + training.batch_size * net.activations + 1
    group = 1 << int(math.log2(max(min(MOST, max(GROUP_MACS / step, FEW), GROUP_ELEMENTS / elements), 1)))
    return group if group >= LEAST else 1


def train(asks: Sequence[Ask]) -> None:
    """Answer asks with equal keys. They stay as they are if the network or the loss cannot be stacked: it draws random
    numbers but for dropout, reads values, or has operations that `vmap` does not know."""
    known, key = _known.setdefault(asks[0].module, {}), asks[0].key
    if len(asks) < LEAST or (key in known and known[key] is None):
        return
    stacked = Stacked(asks)
    try:
        with PROCESS, _strict():
            inside = known.get(key) or stacked.probe()
            stacked.train(inside)
    except Exception as error:
        # an error of the visit itself is raised again when it trains alone
        if any(stacked.steps) or isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        known[key] = None
    else:
        known[key] = inside


@contextmanager
def _strict() -> Iterator[None]:
    """Raise an error where `vmap` would run an operation client by client."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="There is a performance drop")
        yield


class Client(NamedTuple):
    """What the loss of a step depends on. Of k stacked clients, every tensor has a first dimension k."""

    params: Params
    x: torch.Tensor
    y: torch.Tensor
    present: torch.Tensor
    """Label set, [classes] bool; [0]: logits are not masked."""
    running: list[tuple[torch.Tensor, ...]]
    """Per tracked norm, running mean and variance."""


class Stacked:
    """The training of C clients. Rows are clients, and the first columns are the trained parameters."""

    def __init__(self, asks: Sequence[Ask]):
        self.asks, self.module, self.training = asks, asks[0].module, asks[0].training
        self.everyone = list(range(len(asks)))
        self.objective = cast(Objective, asks[0].loss)
        self.named = parameters_of(self.module)
        trained = dict(zip(self.named, asks[0].trained, strict=True))
        self.trained = {name: p for name, p in self.named.items() if trained[name]}
        self.columns = {**self.trained, **self.named}
        """Name -> parameter, in the order of the columns."""
        self.values = self._reordered(torch.stack([ask.values for ask in asks]), self.named, self.columns)
        """Parameters of all clients [C, P]."""
        width = sum(p.numel() for p in self.trained.values())
        self.trained_values = self.values[:, :width]
        """Trained parameters of all clients."""
        self.gradients = self.values.new_zeros(len(asks), width)
        self.optimizer: torch.optim.Optimizer | None = None
        none = self.values.new_empty(0, dtype=torch.bool)
        sets = [cast(Objective, ask.loss).present for ask in asks]
        self.present = torch.stack([none if present is None else present for present in sets])
        """Label sets of all clients, as in `Client`."""
        static = norms.static_norms(self.module).values()
        self.norms = [norm for norm, pair in zip(static, asks[0].running, strict=True) if pair]
        running = [[pair for pair in ask.running if pair] for ask in asks]
        self.running = [tuple(map(torch.stack, zip(*pairs, strict=True))) for pairs in zip(*running, strict=True)]
        """Per tracked norm, running means and variances of all clients [C, channels]."""
        self.views: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        """Client with hooks -> its parameters and gradients, for the module."""
        self.inside: Inside = nullcontext
        self.generators = self._generators()
        self.steps, self.samples = [0] * len(asks), [0] * len(asks)
        self.total = self.values.new_zeros(len(asks))

    @staticmethod
    def _reordered(
        values: torch.Tensor, given: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return values [C, P] with the columns of `given` in the order of `wanted`."""
        if list(given) == list(wanted):
            return values
        parts = dict(zip(given, values.split([t.numel() for t in given.values()], 1), strict=True))
        return torch.cat([parts[name] for name in wanted], 1)

    def _generators(self) -> list[torch.Generator]:
        return [torch.Generator(self.values.device).manual_seed(ask.seed) for ask in self.asks]

    def probe(self) -> Inside:
        """Return what steps run in. Raise an error if `vmap` cannot compute the loss, which a batch of a single client
        would not show."""
        generators, inside = self._generators()[:2], nullcontext
        for x, y in itertools.islice(self.asks[0].batches(), 1):
            with Dropout(None, generators[:1]) as alone:
                self._loss(_first(self._clients([0], x[None], y[None])))
            inside = partial(Dropout, alone.seen) if alone.seen else nullcontext
            with inside(generators):
                self._losses(self._clients([0, 0], side_by_side([x, x]), torch.stack([y, y])))
        return inside

    def train(self, inside: Inside) -> None:
        """Make all steps of all clients and answer them."""
        self.inside = inside
        batches = {i: iter(ask.batches()) for i, ask in enumerate(self.asks)}
        while batches:
            for rows, x, y in self._next(batches):
                self.step(rows, x, y)
        ends = self._reordered(self.values, self.columns, self.named)
        for i, ask in enumerate(self.asks):
            ask.values = ends[i]
            ask.sums = {"train_loss": float(self.total[i]), "train_samples": self.samples[i], "steps": self.steps[i]}
            for pair, stacked in zip(filter(None, ask.running), self.running, strict=True):
                for statistic, all_of_them in zip(pair, stacked, strict=True):
                    statistic.copy_(all_of_them[i])

    def _next(self, batches: dict[int, Iterator[Batch]]) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
        """Yield the next batches of all clients, those of one shape together: clients, x [k, B, ...], y [k, B, ...].
        Clients without another batch leave `batches`."""
        alike: dict[tuple[torch.Size, torch.Size], list[tuple[int, Batch]]] = {}
        for i, iterator in list(batches.items()):
            if (batch := next(iterator, None)) is None:
                del batches[i]
            else:
                alike.setdefault((batch[0].shape, batch[1].shape), []).append((i, batch))
        for some in alike.values():
            for part in [some] if len(some) >= LEAST else [[one] for one in some]:
                x, y = zip(*(batch for _, batch in part), strict=True)
                yield [i for i, _ in part], side_by_side(x), torch.stack(y)

    def step(self, rows: list[int], x: torch.Tensor, y: torch.Tensor) -> None:
        """Make a step of these clients on inputs [k, B, ...] and labels [k, B, ...]."""
        losses = self._backward(rows, x, y)
        rates: dict[float, list[int]] = {}
        for i in rows:
            lr = self.asks[i].lr
            rates.setdefault(lr(self.steps[i]) if callable(lr) else lr, []).append(i)
        for i in rows:
            self._hooked(i, self.asks[i].adjust)
        self._clip(rows)
        for lr, some in rates.items():
            self._descend(some, lr)
        for i in rows:
            self._hooked(i, self.asks[i].project)
            self.steps[i] += 1
            self.samples[i] += y.shape[1]
        self.total[self._places(rows)] += losses * y.shape[1]

    def _backward(self, rows: list[int], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Compute the gradients of these clients, and return their losses [k]."""
        clients = self._clients(rows, x, y)
        trained = [clients.params[name].requires_grad_() for name in self.trained]
        with self.inside([self.generators[i] for i in rows]):
            # a single one without the calls of vmap
            losses = self._losses(clients) if len(rows) > 1 else self._loss(_first(clients))[None]
        # plain SGD leaves parameters without a gradient as they are; other optimizers would move them by zeros
        unused = not self.training.moves_at_rest
        found = torch.autograd.grad(losses.sum(), trained, materialize_grads=unused)
        some = self._places(rows)
        out = self.gradients if isinstance(some, slice) else None
        # a copy to itself costs nothing
        self.gradients[some] = torch.cat([gradient.flatten(1) for gradient in found], 1, out=out)
        for pair, new in zip(self.running, clients.running, strict=True):
            for stacked, statistic in zip(pair, new, strict=True):
                stacked[some] = statistic
        return losses.detach()

    def _places(self, rows: list[int]) -> list[int] | slice:
        """Return the index of these clients' rows: without a copy if they are all clients."""
        return slice(None) if rows == self.everyone else rows

    def _clients(self, rows: list[int], x: torch.Tensor, y: torch.Tensor) -> Client:
        """Return these clients, stacked. Parameters and statistics may share the memory of all clients."""
        some = self._places(rows)
        parts = self.values.detach()[some].split([p.numel() for p in self.columns.values()], 1)
        params = {n: t.view(len(rows), *p.shape) for (n, p), t in zip(self.columns.items(), parts, strict=True)}
        return Client(params, x, y, self.present[some], [tuple(t[some] for t in pair) for pair in self.running])

    def _losses(self, clients: Client) -> torch.Tensor:
        """Return the losses [k] of clients, as `_loss`."""
        with Channels():
            return torch.vmap(self._loss)(clients)

    def _loss(self, client: Client) -> torch.Tensor:
        """Return the loss [] of a client, and update its running statistics."""
        for norm, pair in zip(self.norms, client.running, strict=True):
            norm.running = cast(tuple[torch.Tensor, torch.Tensor], pair)
        try:
            logits = call(self.module, client.params, client.x)
        finally:
            for norm in self.norms:
                norm.running = None
        if client.present.numel():
            logits = mask_logits(logits, client.present, self.objective.fill)
        return self.objective.goal.loss(logits, client.y)

    def _hooked(self, i: int, hook: Hook | None) -> None:
        """Call a hook of a client with its parameters and gradients in the module."""
        if hook is None:
            return
        if i not in self.views:
            views = split_as(self.values[i], list(self.columns.values()))
            self.views[i] = views, split_as(self.gradients[i], list(self.trained.values()))
        values, gradients = self.views[i]
        own = [p.data for p in self.columns.values()]
        for p, value in zip(self.columns.values(), values, strict=True):
            p.data = value
        for p, gradient in zip(self.trained.values(), gradients, strict=True):
            p.grad = gradient
        with Passes() as passes:
            hook(self.module)
        if (counted := self.asks[i].passes) is not None:
            counted.flops += passes.flops
        for p, value in zip(self.columns.values(), own, strict=True):
            p.data = value
        for p, gradient in zip(self.trained.values(), gradients, strict=True):
            if p.grad is not gradient:
                gradient.copy_(cast(torch.Tensor, p.grad))
            p.grad = None

    def _clip(self, rows: list[int]) -> None:
        if self.training.clip is None:
            return
        some = self._places(rows)
        norm = torch.linalg.vector_norm(self.gradients[some], dim=1, keepdim=True)
        self.gradients[some] *= (self.training.clip / (norm + 1e-6)).clamp_(max=1.0)

    def _descend(self, rows: list[int], lr: float) -> None:
        """Change the parameters of these clients by their gradients."""
        if not self.training.moves_at_rest:
            some = self._places(rows)
            self.trained_values[some] = self.trained_values[some].add_(self.gradients[some], alpha=-lr)
            return
        with without_compiler:
            if self.optimizer is None:
                self.optimizer = self.training.new_optimizer([nn.Parameter(row) for row in self.trained_values], lr)
            group = self.optimizer.param_groups[0]
            group["lr"] = lr
            for i in rows:
                group["params"][i].grad = self.gradients[i]
            self.optimizer.step()
        for i in rows:
            group["params"][i].grad = None


def _first(clients: Client) -> Client:
    params, x, y, present, running = clients
    return Client(
        {name: t[0] for name, t in params.items()}, x[0], y[0], present[0], [(mean[0], var[0]) for mean, var in running]
    )
