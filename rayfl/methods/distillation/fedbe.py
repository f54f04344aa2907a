"""FedBE: the server's networks learn the predictions of networks sampled from a distribution over the clients'.

Paper: Chen and Chao, "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning", ICLR 2021,
https://arxiv.org/abs/2009.01974 (Algorithm 1; code: hongyouc/FedBE).

Symbols: $p$ an architecture, $w_p$ its network, $S_p$ the clients of the round that run it, $n_k$ a client's samples,
$P(x, w)$ the softmax of a network's logits, $C$ classes, $M$ samples, $T$ the temperature of targets, $U$ the public
samples, without labels.

    $y_k$         for $k in S_p$: SGD on its own data from $w_p$
    $m_p$         $= (sum_(k in S_p) n_k y_k)/(sum_(k in S_p) n_k)$, running statistics too, for every $p$ of the round
    gaussian    $v_(p j) ~ N(m_p, diag(s_p))$, $j = 1 ... M$,
                $s_p = (sum_(k in S_p) n_k (y_k - m_p)^2)/(sum_(k in S_p) n_k)$
    dirichlet   $v_(p j) = (sum_(k in S_p) g_(j k) y_k)/(sum_(k in S_p) g_(j k))$, $g_(j k) ~ Gamma(alpha, 1)$
    $q(x)$        the mean of $P(x, w)$ over all $w$ = $m_p$, $v_(p j)$ and $y_k$
    $t_c$         $= (q_c^(1/T))/(sum_i q_i^(1/T))$
    $w_p$         $<-$ SGD from $m_p$ on $1/C KL(t(x) || P(x, w_p))$, $x$ in batches of $U$; the mean of every 25th
                step; then its running statistics are recomputed on $U$

Cost per round: networks down and up; the client's training; on the server passes of all clients' networks, means and
samples over $U$, and the training of one student per architecture.

An architecture without clients in a round keeps its network. With one client its variance is 0: its mean and samples
are, but for rounding, the client's network, so that all its $M + 2$ teachers are alike. The clients' networks are never
in memory together: they are summed, in addition to the sums for the samples. These are $sum n_k (y_k - w_p)$ and
$sum n_k (y_k - w_p)^2$, to avoid cancellation in the variance, or the $M$ sums of the Dirichlet averages. Every mean
and sample is evaluated in its own server task, where Gaussian samples are also drawn.

Departures:
1. The paper has one architecture. Here every architecture of the round has its own mean, samples and student; the
   teachers of all architectures are averaged.
2. The code's Gaussian is over the directions (y_k - w) / |y_k - w| of every tensor, running statistics included, with
   0.1 of their deviation and their mean length. Here it is the paper's. Samples have the running statistics of the
   mean.
3. g_jk does not depend on the client's data, as in the code.
4. The rate is constant, as in the code; the paper's is cyclical during averaging. The code's first average is at step
   525. If `epochs` are fewer steps, the last network is kept; fewer `steps` are refused.
5. Running statistics are computed in batches of 500, for every network with norms that track them, except for the best
   step by validation data (`patience`), which was validated with its own; in the code in batches of 1,024, for averaged
   ResNets.
6. With `updates.transforms` samples and teachers are of the networks before the transforms; with a server optimizer the
   mean, and the centre of the Gaussian, is its result.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from rayfl import costs
from rayfl.clients import Population
from rayfl.core import norms
from rayfl.core.fold import Fold, State, Update
from rayfl.core.net import Net, cached_module, load
from rayfl.core.seeds import numpy_generator, torch_generator
from rayfl.core.tensors import Params
from rayfl.data.samples import ClientData
from rayfl.methods.base import Payload, ServerTask, ServerTaskContext, ServerTaskResult, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.base import STUDENT, Distilling, check_public, public_of
from rayfl.training.distillation import AT_ONCE, Distillation, is_done, is_validated, result

TEACHERS = "teachers"
ENSEMBLE = "ensemble "
"""Prefix of a group's sampling state: variance of the Gaussian, or Dirichlet averages."""
STATISTICS = "statistics"

LEAST = 1e-30
"""Smallest weight in a Dirichlet average, so that products are still representable in float32."""


class FedBE(Distilling):
    needs_classes: ClassVar = "it averages class probabilities of sampled networks"
    contract: ClassVar = Contract(wants="networks", short={"samples": 2})

    name: Literal["fedbe"] = "fedbe"
    weight: Literal["samples", "uniform"] = "samples"
    """Weight of a client in the mean and the variance: its number of training samples, or 1."""
    distillation: Distillation = Distillation(
        epochs=20, batch_size=128, momentum=0.9, lr=1e-3, weight_decay=1e-5, average_from=525, average_every=25
    )
    """Training of students."""
    sampling: Literal["gaussian", "dirichlet"] = "gaussian"
    """Distribution of sampled networks: a normal distribution per parameter, or randomly weighted means of clients."""
    samples: int = Field(default=10, ge=1)
    """M, sampled networks per architecture of a round."""
    alpha: float = Field(default=1.0, gt=0)
    """Concentration of the Dirichlet distribution. At small values one client has nearly all the weight."""
    sharpen: float = Field(default=0.5, gt=0)
    """T, the temperature of targets. Below 1, targets are sharper than the mean of the teachers."""

    def check(self, rounds: int, clients: Population) -> None:
        check_public(self)

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        [(group, given)] = payload.items()
        trained, metrics = self.trained(given, visit)
        update = self.answer(trained, visit, metrics)
        found = {name: trained[name].cpu() for name in visit.net.layout.shapes}
        if self.sampling == "gaussian":
            update.derived[f"{ENSEMBLE}{group}"] = moments(found, given, update.weight)
        else:
            update.derived[f"{ENSEMBLE}{group}"] = shares(found, self._weights(visit.seed))
        logits, flops = self.known(trained, visit)
        update.derived[TEACHERS] = {"sum": logits.softmax(1), "count": torch.ones(())}
        update.metrics["server_flops"] = flops
        return update

    def _weights(self, seed: int) -> list[float]:
        """Return g_jk of a client for all j."""
        draws = (numpy_generator(seed, "ensemble", j).gamma(self.alpha) for j in range(self.samples))
        return [max(float(g), LEAST) for g in draws]

    def step(self, state: State, round: int, fold: Fold) -> State:
        new = {group: fold.mean(group) for group in state}
        if not (answers := fold.sum(TEACHERS)):
            return new
        for group in state:
            name = f"{ENSEMBLE}{group}"
            if sums := fold.sum(name):
                weight = next(iter(fold.weights(name).values()))
                new[name] = variance(sums, weight) if self.sampling == "gaussian" else averages(sums)
        return new | {TEACHERS: answers}

    def plan(self, state: State, round: int) -> Sequence[ServerTask]:
        """Evaluate every mean and every sample, then train the students."""
        if TEACHERS not in state:
            return super().plan(state, round)
        # a forward pass costs a third of a training step
        cost = -(-len(state[TEACHERS]["sum"]) // 3)
        return [
            ServerTask(f"{which} {group}", self.groups[group], cost, payload)
            for group in self._ran(state)
            for which, payload in {"mean": {"net": state[group]}, **self._drawn(state, group)}.items()
        ]

    def _ran(self, state: State) -> list[str]:
        """Return the groups with clients in the round, before its students start."""
        return [group for group in self.groups if f"{ENSEMBLE}{group}" in state]

    def _drawn(self, state: State, group: str) -> dict[str, Payload]:
        """Return the payloads from which a group's samples are drawn, by name."""
        net, ensemble = state[group], state[f"{ENSEMBLE}{group}"]
        if self.sampling == "gaussian":
            return {f"sample {j}": {"net": net, "variance": ensemble} for j in range(self.samples)}
        names = self.groups[group].layout.shapes
        return {
            f"sample {j}": {"net": net | {name: ensemble[f"{j}.{name}"] for name in names}} for j in range(self.samples)
        }

    def refine(self, server_task: ServerTask, context: ServerTaskContext) -> ServerTaskResult:
        public = public_of(context)
        if server_task.name.startswith(STUDENT):
            refined = super().refine(server_task, context)
            student = refined.groups["student"]
            if is_done(student) and server_task.net.norms and not is_validated(student):
                refined.groups[STATISTICS] = statistics(server_task.net, result(student), public)
                refined.metrics["server_flops"] += costs.forward_flops(server_task.net, len(public))
            return refined
        given = server_task.payload["net"]
        if spread := server_task.payload.get("variance"):
            given = given | gaussian(given, spread, torch_generator(context.seed, "ensemble", server_task.name))
        logits, flops = self.asked(given, server_task.net, public)
        return ServerTaskResult({TEACHERS: {"sum": logits.softmax(1)}}, {"server_flops": flops})

    def absorb(self, state: State, round: int, refined: Mapping[str, ServerTaskResult]) -> State:
        if TEACHERS in state:
            answers = [found.groups[TEACHERS]["sum"] for found in refined.values()]
            total = torch.stack([state[TEACHERS]["sum"], *answers]).sum(0) / (state[TEACHERS]["count"] + len(answers))
            new = {group: t for group, t in state.items() if group != TEACHERS and not group.startswith(ENSEMBLE)}
            return self.taught(new, self._ran(state), {"targets": sharpened(total, self.sharpen)})
        new = super().absorb(state, round, refined)
        for name, found in refined.items():
            if STATISTICS in found.groups:
                group = name.removeprefix(STUDENT)
                new[group] = new[group] | found.groups[STATISTICS]
        return new

    def loss_of_student(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.kl_div(F.log_softmax(logits, 1), targets, reduction="batchmean") / logits.shape[1]


# the distribution


def moments(found: Params, given: Params, weight: float) -> Params:
    """Return a client's terms in the sums of a Gaussian: n (y - w) as "first.NAME", n (y - w)^2 as "second.NAME"."""
    apart = {name: t - given[name] for name, t in found.items()}
    first = {f"first.{name}": t * weight for name, t in apart.items()}
    return first | {f"second.{name}": t.square() * weight for name, t in apart.items()}


def variance(sums: Params, weight: float) -> Params:
    """Return the variances by name from the sums of `moments`. `weight`: sum n_k."""
    names = [name.removeprefix("first.") for name in sums if name.startswith("first.")]
    return {n: (sums[f"second.{n}"] / weight - (sums[f"first.{n}"] / weight).square()).clamp_min(0.0) for n in names}


def gaussian(mean: Params, variance: Params, generator: torch.Generator) -> Params:
    """Draw a network around the mean, for the names with a variance."""
    return {
        name: mean[name] + t.sqrt() * torch.randn(t.shape, generator=generator, dtype=t.dtype)
        for name, t in variance.items()
    }


def shares(found: Params, weights: Sequence[float]) -> Params:
    """Return a client's terms in the sums of Dirichlet averages: g_j y as "j.NAME", and g_j as "j"."""
    return {f"{j}": torch.tensor(g) for j, g in enumerate(weights)} | {
        f"{j}.{name}": t * g for j, g in enumerate(weights) for name, t in found.items()
    }


def averages(sums: Params) -> Params:
    """Return the averages "j.NAME" from the sums of `shares`."""
    return {name: t / sums[name.partition(".")[0]] for name, t in sums.items() if "." in name}


# targets and statistics


def sharpened(probabilities: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return q^(1/T), normalised in every row [N, C]."""
    return (probabilities.log() / temperature).softmax(1)


def statistics(net: Net, params: Params, data: ClientData) -> Params:
    """Return the running statistics of a network's norms on samples."""
    module = cached_module(net, data.device)
    load(module, params)
    found = norms.finish(norms.collect(module, (x for x, _ in data.plain(AT_ONCE))), "exact")
    return {name: t.to(params[name].dtype) for name, t in found.items()}
