"""Client selection: the choice among available clients.

A sampler is a pure function: it receives a memory of plain JSON values, which a checkpoint contains, and returns the
next one. Its cost does not grow with idle clients, unless fewer are available than wanted: it draws from a few random
candidates and from clients that have taken part.
"""

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.config import Kind, Named

Memory = dict[str, Any]
"""Memory of a sampler between rounds: JSON values with text keys, empty at the start."""

POOL = 8
"""Random candidates per client in weighted draws."""


@dataclass(frozen=True)
class Candidates:
    """The clients that the server can ask at one moment."""

    count: int
    """Number of clients in the population."""
    generator: np.random.Generator
    is_free: Callable[[int], bool]
    """Function of a client: True if it is available and not training."""
    size: Callable[[int], int]
    """Function of a client: its number of training samples."""
    samples: Callable[[int], int]
    """Function of a client: training samples per visit."""
    seconds: Callable[[int], float]
    """Function of a client: seconds of a visit at mean speeds."""
    profile: Callable[[], np.ndarray]
    """Function that returns the ascending seconds of visits of at most 1,000 clients."""
    usual: Callable[[int], list[int]] | None = None
    """Function of a number that returns the draw of a run without a system; None if that draw was used."""

    def draw(self, wanted: int, accept: Callable[[int], bool] = lambda id: True) -> list[int]:
        """Return up to `wanted` different free clients that are accepted, uniformly, ascending."""
        if self.usual is not None and wanted <= self.count:
            first = self.usual(wanted)
            if all(accept(id) and self.is_free(id) for id in first):
                return first
        found: set[int] = set()
        seen: set[int] = set()
        stream = self._stream(16 * wanted)
        while len(found) < wanted and (id := next(stream, None)) is not None:
            if id not in seen:
                seen.add(id)
                if accept(id) and self.is_free(id):
                    found.add(id)
        return sorted(found)

    def _stream(self, some: int) -> Iterator[int]:
        """Yield `some` random clients with repetitions, then all clients in random order."""
        yield from self.generator.integers(self.count, size=some).tolist()
        yield from self.generator.permutation(self.count).tolist()

    def weighted(self, pool: Sequence[int], weights: Sequence[float], wanted: int) -> list[int]:
        """Draw up to `wanted` different clients of a pool in proportion to their weights."""
        if not pool or wanted <= 0:
            return []
        weight = np.maximum(weights, 1e-12)
        chosen = self.generator.choice(len(pool), min(wanted, len(pool)), replace=False, p=weight / weight.sum())
        return [pool[i] for i in chosen]


@dataclass(frozen=True)
class Visited:
    """A visit whose update was aggregated."""

    client: int
    samples: int
    loss: float
    """Mean training loss."""
    seconds: float
    """Duration of the visit."""


class Sampler(Named, ABC):
    """Base class of rules that choose the clients to ask. `round` counts from 0.

    >>> class First(Sampler):
    ...     def choose(self, wanted, free, round, memory):
    ...         return [client for client in range(free.count) if free.is_free(client)][:wanted], memory
    >>> from types import SimpleNamespace
    >>> First().choose(2, SimpleNamespace(count=5, is_free=lambda client: client != 1), round=0, memory={})
    ([0, 2], {})
    """

    synchronous: ClassVar[bool] = False
    """True if the rule needs synchronous rounds."""

    @abstractmethod
    def choose(self, wanted: int, free: Candidates, round: int, memory: Memory) -> tuple[list[int], Memory]:
        """Return up to `wanted` different clients of `free`, and the new memory. Random draws use `free.generator`."""

    def learned(self, memory: Memory, round: int, visits: Sequence[Visited]) -> Memory:
        """Return the memory after a round with these visits, at least one."""
        return memory


class Uniform(Sampler):
    """Uniform choice among available clients."""

    name: Literal["uniform"] = "uniform"

    def choose(self, wanted: int, free: Candidates, round: int, memory: Memory) -> tuple[list[int], Memory]:
        return free.draw(wanted), memory


class PowerOfChoice(Sampler):
    """Clients with the largest loss among candidates (Cho, Wang and Joshi, "Towards Understanding Biased Client
    Selection in Federated Learning", AISTATS 2022, variant rpow-d).

    d candidates are drawn in proportion to their samples p_k; those with the largest F_k are asked, where F_k is the
    mean loss of the client's last local training, and infinite before it.

    Departures:
    1. Candidates come from a pool of 8 d uniform draws, so that the cost does not grow with idle clients.
    2. A client that was asked and has not reported (late, lost) has the mean of all losses. It would be asked again and
       again.
    """

    name: Literal["power_of_choice"] = "power_of_choice"
    factor: float = Field(default=2.0, ge=1, le=100)
    """Candidates per client asked (d over m)."""

    def choose(self, wanted: int, free: Candidates, round: int, memory: Memory) -> tuple[list[int], Memory]:
        some = math.ceil(self.factor * wanted - 1e-9)
        pool = free.draw(POOL * some)
        drawn = free.weighted(pool, [free.size(id) for id in pool], some)
        asked = sorted(drawn, key=lambda id: -memory.get(str(id), math.inf))[:wanted]
        mean = statistics.fmean(memory.values() or [math.inf])
        return sorted(asked), _tried(asked, memory, lambda id: mean)

    def learned(self, memory: Memory, round: int, visits: Sequence[Visited]) -> Memory:
        return memory | {str(one.client): one.loss for one in visits}


class Oort(Sampler):
    """Clients with large losses and short visits (Lai et al., "Oort: Efficient Federated Learning via Guided
    Participant Selection", OSDI 2021, Algorithm 1; normalisation and constants of the authors' code).

        U_i      =  samples x loss                                                statistical utility of the last visit
        score_i  =  (min(U_i, clip) - U_min) / (U_max - U_min) + sqrt(0.1 ln R / L_i)      R: round, L_i: last round
        score_i *=  (T / t_i)^penalty  if t_i > T             t_i: seconds of the last visit; T: percentile of all t_i

    A share epsilon of the clients is explored: new ones, in proportion to samples x (T / t)^penalty. The others are
    drawn in proportion to their scores, among those with at least `cut` times the last score that would be asked.
    Pacer: every `window` rounds, the percentile rises by `step` if the sum of the rounds' mean utilities of known
    clients changed by less than 10 % from the window before, and falls by `step` if it changed by more than five times.

    Departures:
    1. U_i has the mean of the training losses, not their root mean square over samples: clients report sums.
    2. New clients come from a pool of 8 random draws each, and T from clients that have taken part, so that the cost
       does not grow with idle clients. The t of a new client is that of mean speeds.
    3. The number of explored clients is rounded at random: asynchronous servers ask one client at a time.
    4. A client that was asked and has not reported (late, lost) has the mean utility and the t of mean speeds.
    5. No list of clients that took part too often.
    6. Clients below the cut-off are left out, as in the paper; the code admits ten times as many as are asked.
    """

    name: Literal["oort"] = "oort"
    exploration: float = Field(default=0.9, ge=0, le=1)
    """Share of new clients in the first round."""
    decay: float = Field(default=0.98, gt=0, le=1)
    """Factor of `exploration` per round."""
    least: float = Field(default=0.3, ge=0, le=1)
    """Lower bound of the share."""
    percentile: float = Field(default=30.0, gt=0, le=100)
    """Percentile of T at the start. 100: visits of any length."""
    penalty: float = Field(default=2.0, ge=0)
    """Exponent for long visits (alpha in the paper)."""
    clip: float = Field(default=0.9, gt=0, le=1)
    """Quantile at which utilities are clipped."""
    cut: float = Field(default=0.95, gt=0, le=1)
    """Fraction of the cut-off score."""
    window: int = Field(default=20, ge=1)
    """Rounds per window of the pacer."""
    step: float = Field(default=5.0, ge=0, le=100)
    """Change of the percentile."""

    def choose(self, wanted: int, free: Candidates, round: int, memory: Memory) -> tuple[list[int], Memory]:
        known, slowest = memory.get("clients", {}), self._slowest(memory)
        share = max(self.exploration * self.decay**round, self.least)
        explored = int(wanted * share + free.generator.random())
        pool = free.draw(POOL * explored, lambda id: str(id) not in known)
        promise = [free.samples(id) * self._penalty(free.seconds(id), slowest) for id in pool]
        asked = free.weighted(pool, promise, explored)
        asked += self._exploited(wanted - len(asked), free, self.scores(memory, round))
        asked += free.draw(wanted - len(asked), lambda id: id not in asked)
        mean = statistics.fmean([utility for utility, _, _ in known.values()] or [math.inf])
        tried = _tried(asked, known, lambda id: [mean, free.seconds(id), round + 1])
        return sorted(asked), memory | {"clients": tried}

    def _exploited(self, wanted: int, free: Candidates, scores: Mapping[int, float]) -> list[int]:
        pool: list[int] = []
        for id in sorted(scores, key=lambda id: -scores[id]) if wanted else ():
            if len(pool) >= wanted and scores[id] < self.cut * scores[pool[wanted - 1]]:
                break
            if free.is_free(id):
                pool.append(id)
        return free.weighted(pool, [scores[id] for id in pool], wanted)

    def scores(self, memory: Memory, round: int) -> dict[int, float]:
        """Return the score of every client that has taken part."""
        if not (known := memory.get("clients", {})):
            return {}
        utility, seconds, last = np.array(list(known.values())).T
        ordered = np.sort(utility)
        clipped = np.minimum(utility, ordered[min(int(len(ordered) * self.clip), len(ordered) - 1)])
        least = 0.999 * ordered[0]
        score = (clipped - least) / max(ordered[-1] - least, 1e-4) + np.sqrt(0.1 * math.log(round + 1) / last)
        score *= self._penalty(seconds, self._slowest(memory))
        return dict(zip(map(int, known), score.tolist(), strict=True))

    def _slowest(self, memory: Memory) -> float:
        """Return T, the preferred duration of a visit."""
        percentile, known = memory.get("percentile", self.percentile), memory.get("clients", {})
        if percentile >= 100 or not known:
            return math.inf
        seconds = sorted(seconds for _, seconds, _ in known.values())
        return seconds[min(int(len(seconds) * percentile / 100), len(seconds) - 1)]

    def _penalty(self, seconds: Any, slowest: float) -> Any:
        return np.maximum(seconds / max(slowest, 1e-9), 1.0) ** -self.penalty

    def learned(self, memory: Memory, round: int, visits: Sequence[Visited]) -> Memory:
        known, percentile = memory.get("clients", {}), memory.get("percentile", self.percentile)
        utility = {str(one.client): one.samples * one.loss for one in visits}
        again = [value for id, value in utility.items() if id in known and known[id][2] <= round]
        window = self.window
        sums = [*memory.get("sums", []), sum(again) / max(len(again), 1)][-2 * window :]
        if len(sums) == 2 * window and (round + 1) % window == 0:
            before, now = sum(sums[:window]), sum(sums[window:])
            if abs(now - before) <= 0.1 * before:
                percentile = min(percentile + self.step, 100.0)
            elif abs(now - before) >= 5 * before:
                percentile = max(percentile - self.step, self.step)
        news = {str(one.client): [utility[str(one.client)], one.seconds, round + 1] for one in visits}
        return {"clients": known | news, "sums": sums, "percentile": percentile}


class TiFL(Sampler):
    """Clients of similar speed together (Chai et al., "TiFL: A Tier-based Federated Learning System", HPDC 2020).

    Clients are in `tiers` by the duration of a visit. Every round draws one tier, and its clients from it. Every
    `interval` rounds (Algorithm 2), if the last tier has not become better, the probabilities follow the order of all:
    with n tiers that have credits, the i-th worst, counted from 0, gets (n - i) / (n (n + 1) / 2).

    Departures:
    1. Worse is a larger training loss of the tier's last round, not a lower accuracy on test data. Tiers that were not
       drawn are the worst; tiers whose clients do not report are the best.
    2. Bounds of tiers are quantiles of at most 1,000 clients. There are fewer tiers if clients are equally fast.
    3. Probabilities as in public implementations; those of the paper's text could not be checked.
    """

    name: Literal["tifl"] = "tifl"
    synchronous: ClassVar = True
    tiers: int = Field(default=5, ge=1, le=100)
    """Number of tiers, of equal numbers of clients."""
    interval: int = Field(default=20, ge=0)
    """Rounds between changes of the probabilities. 0: tiers are equally probable."""
    credits: int | None = Field(default=None, ge=1)
    """Number of rounds for which a tier can be drawn. Default: no limit; without credits left, all tiers can be."""

    def choose(self, wanted: int, free: Candidates, round: int, memory: Memory) -> tuple[list[int], Memory]:
        memory = memory or self._start(free.profile())
        if self.interval and round and round % self.interval == 0:
            memory = self._changed(memory)
        left = np.array(memory["credits"]) > 0
        able = next(some for some in (memory["probabilities"] * left, left, np.ones(len(left))) if some.any())
        tier = int(free.generator.choice(len(left), p=able / able.sum()))
        credits = [left - (i == tier) for i, left in enumerate(memory["credits"])]
        ids = free.draw(wanted, lambda id: np.searchsorted(memory["bounds"], free.seconds(id), side="left") == tier)
        losses = [0.0 if i == tier and loss is None else loss for i, loss in enumerate(memory["losses"])]
        return ids, memory | {"tier": tier, "credits": credits, "losses": losses}

    def _start(self, profile: np.ndarray) -> Memory:
        bounds = np.unique(np.quantile(profile, np.arange(1, self.tiers) / self.tiers, method="inverted_cdf"))
        bounds = bounds[bounds < profile[-1]].tolist()
        tiers, credits = len(bounds) + 1, 10**9 if self.credits is None else self.credits
        nothing = {"losses": [None] * tiers, "before": [None] * tiers}
        return {"bounds": bounds, "probabilities": [1 / tiers] * tiers, "credits": [credits] * tiers, **nothing}

    def _changed(self, memory: Memory) -> Memory:
        losses, before, tier = memory["losses"], memory["before"], memory["tier"]
        probabilities = memory["probabilities"]
        able = [i for i in range(len(losses)) if memory["credits"][i] > 0]
        if before[tier] is not None and losses[tier] >= before[tier] and len(able) > 1:
            order = sorted(able, key=lambda i: -(math.inf if losses[i] is None else losses[i]))
            total = len(able) * (len(able) + 1) / 2
            probabilities = [0.0] * len(losses)
            for rank, i in enumerate(order):
                probabilities[i] = (len(able) - rank) / total
        return memory | {"probabilities": probabilities, "before": losses}

    def learned(self, memory: Memory, round: int, visits: Sequence[Visited]) -> Memory:
        losses, before, tier = list(memory["losses"]), list(memory["before"]), memory["tier"]
        losses[tier] = sum(one.loss * one.samples for one in visits) / sum(one.samples for one in visits)
        before[tier] = losses[tier] if before[tier] is None else before[tier]
        return memory | {"losses": losses, "before": before}


def _tried(asked: Sequence[int], known: Memory, expected: Callable[[int], Any]) -> Memory:
    """Return `known` with expected values of clients that were asked for the first time; without known ones, none."""
    return {str(id): expected(id) for id in asked if str(id) not in known} | known if known else known


SAMPLERS: dict[str, type[Sampler]] = {"uniform": Uniform, "power_of_choice": PowerOfChoice, "oort": Oort, "tifl": TiFL}

SAMPLERS_KIND = Kind("client sampler", Sampler, SAMPLERS, "rayfl.samplers")
