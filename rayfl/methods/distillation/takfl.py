"""TAKFL: each kind of network learns from every kind separately, and the changes are added with chosen coefficients.

Paper: Morafah et al., "Towards Diverse Device Heterogeneous Federated Learning via Task Arithmetic Knowledge
Integration", NeurIPS 2024, https://arxiv.org/abs/2409.18461 (code: hojinchangucsd/TAKFL, `--alg fedhd`). Of the paper
only the abstract could be read: the equations are those of the code, the defaults those of its cv/run.sh.

Symbols: $i$, $k$ architectures ("device prototypes"), $S_k$ the clients of the round that run $k$, $K$ the number of
$k$ with clients, $n_c$ a client's samples, $f(x, w)$ logits, $U$ the public samples, without labels, $T$ `temperature`,
$R$ `self_temperature`, $gamma$ `self_weight`, $KL_T(a || b) = KL(softmax(a/T) || softmax(b/T))$.

    $y_c$            for $c in S_i$: training on its own data from $w_i$
    $m_i$            $= (sum_(c in S_i) n_c y_c)/(sum_(c in S_i) n_c)$, running statistics too
    targets        $z_k(x) = 1/|S_k| sum_(c in S_k) f(x, y_c)$, $s_i(x) = f(x, m_i)$
    student        $w_(i k)$ = Adam from $m_i$, $x$ in batches of $U$, for all $i$ and $k$, also $k = i$, on:
                   $T^2 KL_T(z_k(x) || f(x, w_(i k))) + gamma R^2 KL_R(s_i(x) || f(x, w_(i k)))$
    task vector    $t_(i k) = w_(i k) - m_i$, running statistics too
    merge          $w_i <- m_i + sum_k l_(i k) t_(i k)$
    coefficients   $l_i$ = the first of the best candidates on validation data
    candidates     $1/K$ for all $k$; then, for $e = 1, 5, 10$, $n$ times: $b_j ~ Beta(1, 100)$, $j = 1 ... K$, and
                   $b_j^e/(sum_j b_j^e)$, ascending from the smallest capacity $k$ to the largest

Cost per round: networks down and up; the client's training; on the server a pass of all clients' networks over $U$, the
training of $K^2$ students, and an evaluation of every candidate.

With one candidate (`candidates: 0`, or $K = 1$) or without validation data (`evaluation.holdout: 0`) $l_(i k)$ is
$1/K$. An architecture without clients in a round keeps its network and teaches nobody. The clients' networks are never
in memory together, but $K^2$ students are, in the server's state. They train in parallel.

Departures:
1. The code's `tune`, which learns l_i and a scale of the logits by AdamW on validation data, is not implemented.
2. In the code every architecture has clients in each round. gamma and the weight decay are one number for all
   architectures, in the code one each. All students of a round see the public samples in the same order.
3. No client holds validation data, which are `evaluation.holdout`. The code's image branch confuses the two parts that
   `split_val` returns, so that clients share 1 % of the training set and 99 % choose l_i; `split_val` itself fails,
   because there is no `torch.utils.Data`. Its text branch has validation data, but `backprop` learns l_i on test data.
4. The code orders k as its arguments, in its scripts by ascending share of the data. Its candidates that favour one
   architecture, which its call does not ask for, are not implemented.
5. Merged running variances are at least 0. In the code, coefficients of a sum above 1 can make them negative.
6. With `updates.transforms` teachers are the networks before the transforms; with a server optimizer m_i is its result.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, FiniteFloat

from rayfl import costs
from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.fold import Fold, State, Update
from rayfl.core.net import cached_module, load
from rayfl.core.norms import VARIANCE
from rayfl.core.seeds import numpy_generator
from rayfl.core.tensors import Params
from rayfl.methods.base import Payload, ServerTask, ServerTaskContext, ServerTaskResult, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.base import STUDENT, TARGETS, Distilling, check_public, public_of
from rayfl.training.distillation import TASK_STEPS, Distillation, beginning, is_done, result, score_of
from rayfl.training.settings import divergence

TEACHERS = "teachers"
"""Group of the state: architecture k -> z_k [N, C]. A client's answer is the group "teachers k"."""
STARTS = "starts"
"""Group of the state: architecture i -> s_i [N, C]."""
TASK = "task "
MERGE = "merge "
FROM = " from "
"""The student w_ik is the group "student i from k", its task vector "task i from k"."""
EXPONENTS = (1, 5, 10)


class TAKFL(Distilling):
    needs_classes: ClassVar = "distillation compares class probabilities"
    contract: ClassVar = Contract(wants="networks", short={"candidates": 2})

    name: Literal["takfl"] = "takfl"
    weight: Literal["samples", "uniform"] = "samples"
    """Weight of a client in the mean that students start from: its number of training samples, or 1."""
    distillation: Distillation = Distillation(epochs=5, batch_size=128, optimizer="adam", lr=1e-5, weight_decay=5e-5)
    """Training of every student."""
    temperature: float = Field(default=3.0, gt=0)
    """T, the temperature of the teachers' targets."""
    self_weight: float = Field(default=0.01, ge=0)
    """gamma, the weight of a student's own initial outputs as targets."""
    self_temperature: float = Field(default=20.0, gt=0)
    """R, the temperature of these targets."""
    candidates: int = Field(default=15, ge=0)
    """n, random candidates per exponent, drawn for each architecture in each round. 0: coefficients are 1 / K."""
    coefficients: tuple[tuple[FiniteFloat, ...], ...] | None = None
    """Fixed coefficients l_ik, one row per learning architecture i, one column per teaching architecture k, both from
    the largest capacity to the smallest. Default: the best candidate."""

    def check(self, rounds: int, clients: Population) -> None:
        check_public(self)
        count = len(self.groups)
        if self.coefficients is not None and {len(self.coefficients), *map(len, self.coefficients)} != {count}:
            raise ConfigError(
                f"method.coefficients: rows of {[*map(len, self.coefficients)]} numbers. Allowed: {count} rows "
                f"of {count} numbers, one for each different network of the clients"
            )

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        [(group, given)] = payload.items()
        trained, metrics = self.trained(given, visit)
        update = self.answer(trained, visit, metrics)
        logits, flops = self.known(trained, visit)
        update.derived[f"{TEACHERS} {group}"] = {"sum": logits, "count": torch.ones(())}
        update.metrics["server_flops"] = flops
        return update

    def step(self, state: State, round: int, fold: Fold) -> State:
        found = {group: fold.sum(f"{TEACHERS} {group}") for group in self.groups}
        teachers = {group: sums["sum"] / sums["count"] for group, sums in found.items() if sums}
        return {group: fold.mean(group) for group in state} | ({TEACHERS: teachers} if teachers else {})

    def plan(self, state: State, round: int) -> Sequence[ServerTask]:
        nets, teachers = self.groups, state.get(TEACHERS, {})
        ran = [group for group in nets if group in teachers]
        # a forward pass costs a third of a training step
        cost = -(-sum(map(len, teachers.values())) // 3)
        if ran and STARTS not in state:
            return [ServerTask(f"{STARTS} {i}", nets[i], cost, {"net": state[i]}) for i in ran]
        if students := {name: name.removeprefix(STUDENT).split(FROM) for name in state if name.startswith(STUDENT)}:
            targets = {name: torch.stack([teachers[k], state[STARTS][i]], 1) for name, (i, k) in students.items()}
            cost = TASK_STEPS * self.distillation.batch_size
            payloads = {name: {"student": state[name], TARGETS: {TARGETS: t}} for name, t in targets.items()}
            return [ServerTask(name, nets[i], cost, payloads[name]) for name, (i, _) in students.items()]
        tasks = {i: {k: state[f"{TASK}{i}{FROM}{k}"] for k in ran} for i in ran}
        return [ServerTask(f"{MERGE}{i}", nets[i], cost, {"mean": state[i], **tasks[i]}) for i in ran]

    def loss_of_student(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        teachers, start = targets.unbind(1)
        own = self.self_temperature**2 * divergence(start, logits, self.self_temperature)
        return self.temperature**2 * divergence(teachers, logits, self.temperature) + self.self_weight * own

    def refine(self, server_task: ServerTask, context: ServerTaskContext) -> ServerTaskResult:
        if server_task.name.startswith(STUDENT):
            return super().refine(server_task, context)
        if server_task.name.startswith(MERGE):
            return self._merge(server_task, context)
        logits, flops = self.asked(server_task.payload["net"], server_task.net, public_of(context))
        return ServerTaskResult({STARTS: {"logits": logits}}, {"server_flops": flops})

    def _merge(self, server_task: ServerTask, context: ServerTaskContext) -> ServerTaskResult:
        mean, net, validation = server_task.payload["mean"], server_task.net, context.validation
        group, order = server_task.name.removeprefix(MERGE), list(self.groups)
        tasks = {k: server_task.payload[k] for k in reversed(order) if k in server_task.payload}
        if self.coefficients is not None:
            rows = [tuple(self.coefficients[order.index(group)][order.index(k)] for k in tasks)]
        else:
            rows = drawn(len(tasks), self.candidates, numpy_generator(context.seed, "coefficients", group))
        best, flops = 0, 0.0
        if len(rows) > 1 and len(validation):
            module, scores = cached_module(net, validation.device), []
            for row in rows:
                candidate = merged(mean, tasks.values(), row)
                load(module, candidate)
                scores.append(score_of(module, candidate, validation))
            best = scores.index(max(scores) if validation.goal.scores[0].better == "max" else min(scores))
            flops = len(rows) * costs.forward_flops(net, len(validation))
        return ServerTaskResult({"net": merged(mean, tasks.values(), rows[best])}, {"server_flops": flops})

    def absorb(self, state: State, round: int, refined: Mapping[str, ServerTaskResult]) -> State:
        if STARTS not in state:
            starts = {name.removeprefix(f"{STARTS} "): t.groups[STARTS]["logits"] for name, t in refined.items()}
            students = {f"{STUDENT}{i}{FROM}{k}": beginning(state[i]) for i in starts for k in starts}
            return {**state, STARTS: starts} | students
        new = dict(state)
        for name, found in refined.items():
            if name.startswith(MERGE):
                new[name.removeprefix(MERGE)] = found.groups["net"]
                continue
            new[name] = student = found.groups["student"]
            if is_done(student):
                pair = name.removeprefix(STUDENT)
                mean = state[pair.partition(FROM)[0]]
                new[f"{TASK}{pair}"] = {key: t - mean[key] for key, t in result(student).items()}
                del new[name]
        if any(name.startswith(MERGE) for name in refined):
            return {g: t for g, t in new.items() if g not in (TEACHERS, STARTS) and not g.startswith(TASK)}
        return new


def drawn(sources: int, count: int, generator: np.random.Generator) -> list[tuple[float, ...]]:
    """Return the different candidates: 1 / K for all K = `sources`, then `count` random rows per exponent, which ascend
    and have the sum 1."""
    rows = [(1 / sources,) * sources]
    for exponent in EXPONENTS:
        for _ in range(count):
            shares = np.sort(generator.beta(1, 100, sources) ** exponent)
            rows.append(tuple((shares / shares.sum()).tolist()))
    return list(dict.fromkeys(rows))


def merged(mean: Params, tasks: Iterable[Params], row: Iterable[float]) -> Params:
    """Return m + sum_k l_k t_k of parameters and statistics. Running variances are at least 0."""
    found = dict(mean)
    for share, task in zip(row, tasks, strict=True):
        found = {name: t + share * task[name] for name, t in found.items()}
    return {name: t.clamp_min(0) if name.endswith(VARIANCE) else t for name, t in found.items()}
