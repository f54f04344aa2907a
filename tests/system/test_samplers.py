"""Samplers against the formulas of their papers, by hand, and in runs: the sampler's memory, resuming, plug-ins."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from helpers import assert_same, run, simulate, tiny

from rayfl import Sampler
from rayfl.config import ConfigError, PluginFailed
from rayfl.core.seeds import numpy_generator
from rayfl.system import SAMPLERS_KIND, Candidates, Visited

EQUAL = {"name": "classes", "classes": [{"name": "board", "gflops": 1}]}
BUFFER = {"name": "buffered", "concurrency": 5, "buffer": 2}


def sampler(given):
    return SAMPLERS_KIND.read(given, "sampler")


def candidates(count, draw=0, sizes=None, samples=None, seconds=None, busy=()):
    """Return candidates with their numbers of samples, in all and per visit, and seconds [count], 1 by default."""
    sizes, samples, seconds = sizes or [1] * count, samples or [1] * count, seconds or [1.0] * count
    return Candidates(
        count,
        numpy_generator(0, "test:samplers", draw),
        lambda id: id not in busy,
        sizes.__getitem__,
        samples.__getitem__,
        seconds.__getitem__,
        lambda: np.sort(seconds),
    )


def seen(**clients):
    """Return Oort's memory of clients by name c0, c1, ...: (utility, seconds, last round)."""
    return {"clients": {name[1:]: list(value) for name, value in clients.items()}}


def test_uniform_draws_are_uniform_and_free():
    counts = Counter(id for draw in range(2000) for id in candidates(10, draw, busy={3}).draw(3))
    # 2000 draws of 3 of 9: 5 standard deviations are 105
    assert set(counts) == set(range(10)) - {3} and all(abs(count - 667) < 105 for count in counts.values())
    assert candidates(10, busy={3}).draw(20) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    # few of many, which random draws miss
    assert candidates(10_000, busy=set(range(10_000)) - {5, 77, 9_000}).draw(3) == [5, 77, 9_000]


def test_power_of_choice_asks_the_largest_losses():
    rule = sampler({"name": "power_of_choice", "factor": 2.5})
    memory = rule.learned({}, 0, [Visited(id, 5, loss, 1.0) for id, loss in enumerate((0.1, 0.9, 0.5, 0.7))])
    memory = rule.learned(memory, 1, [Visited(1, 5, 0.2, 1.0)])
    # five candidates of five: client 4 has no loss yet, then come 0.7 and 0.5
    assert rule.choose(2, candidates(5), 2, memory)[0] == [3, 4]
    assert rule.choose(2, candidates(5, busy={4}), 2, memory)[0] == [2, 3]


def test_power_of_choice_draws_candidates_by_their_samples():
    rule = sampler({"name": "power_of_choice", "factor": 1})
    chosen = Counter(rule.choose(1, candidates(4, draw, sizes=[1, 2, 3, 4]), 0, {})[0][0] for draw in range(4000))
    # probabilities 0.1, 0.2, 0.3, 0.4; 5 standard deviations are at most 155
    assert all(abs(chosen[id] - 400 * (id + 1)) < 155 for id in range(4))


def test_oorts_scores():
    """In round 4 of 1, 2, ...; clients last took part in rounds 1, 2 and 3."""
    memory = seen(c0=(10, 1, 1), c1=(20, 2, 2), c2=(40, 8, 3))
    least = 0.999 * 10
    expected = {
        0: (10 - least) / (40 - least) + math.sqrt(0.1 * math.log(4) / 1),
        # T is the shortest of three durations (30 %)
        1: ((20 - least) / (40 - least) + math.sqrt(0.1 * math.log(4) / 2)) * (1 / 2) ** 2,
        2: ((40 - least) / (40 - least) + math.sqrt(0.1 * math.log(4) / 3)) * (1 / 8) ** 2,
    }
    assert sampler("oort").scores(memory, 3) == pytest.approx(expected)
    # at the median, utilities above 20 are clipped, and T is 2 seconds
    clipped = sampler({"name": "oort", "clip": 0.5, "percentile": 50}).scores(memory, 3)
    temporal = math.sqrt(0.1 * math.log(4) / 3)
    assert clipped[2] == pytest.approx(((20 - least) / (40 - least) + temporal) * (2 / 8) ** 2)
    assert clipped[1] == pytest.approx(expected[1] * 4)


def test_oort_exploits_above_the_cut_off():
    rule = sampler({"name": "oort", "exploration": 0, "least": 0, "percentile": 100})
    memory = seen(c0=(10, 1, 1), c1=(20, 1, 1), c2=(40, 1, 1), c3=(39.9, 1, 1))
    asked = {rule.choose(1, candidates(100, draw), 3, memory)[0][0] for draw in range(50)}
    # within 95 % of the best score are clients 2 and 3
    assert asked == {2, 3}
    assert rule.choose(1, candidates(100, busy={2, 3}), 3, memory)[0] == [1]


def test_oort_explores_new_clients_by_size_and_speed():
    rule = sampler({"name": "oort", "exploration": 1, "decay": 1})
    memory = seen(c0=(10, 2, 1), c1=(10, 2, 1))
    new = {"samples": [9, 9, 1, 1, 2], "seconds": [1.0, 1.0, 2.0, 4.0, 2.0]}
    asked = Counter(rule.choose(1, candidates(5, draw, **new), 3, memory)[0][0] for draw in range(4000))
    # T is 2 seconds: 1 : 1/4 : 2; 5 standard deviations are at most 157
    assert set(asked) == {2, 3, 4}
    assert (
        abs(asked[3] - 4000 / 13) < 85 and abs(asked[2] - 4 * 4000 / 13) < 146 and abs(asked[4] - 8 * 4000 / 13) < 154
    )


def test_oorts_share_of_new_clients_decays():
    rule = sampler({"name": "oort", "exploration": 0.9, "decay": 0.5, "least": 0.2})
    memory = {"clients": {str(id): [10.0, 1.0, 1] for id in range(50)}}

    def explored(round):
        return sum(id >= 50 for id in rule.choose(10, candidates(100), round, memory)[0])

    # 0.9 and 0.2 of 10, 0.225 of 10 rounded at random
    assert explored(0) == 9 and explored(2) in (2, 3) and explored(30) == 2
    # everybody has taken part, or nobody has
    assert len(rule.choose(10, candidates(50), 0, memory)[0]) == len(rule.choose(10, candidates(100), 9, {})[0]) == 10


def test_oorts_pacer():
    rule = sampler({"name": "oort", "window": 2})

    def percentile(*losses):
        memory = {}
        for round, loss in enumerate(losses):
            memory = rule.learned(memory, round, [Visited(0, 10, loss, 1.0)])
        return memory["percentile"]

    # the first visit is not of a client that was asked again: sums of windows 0 + 1, then 1 + 1 and so on
    assert percentile(1, 1, 1, 1, 1, 1) == 35
    assert percentile(1, 1, 0.5, 0.45) == 35
    assert percentile(1, 1, 0.9, 0.9) == 30
    assert percentile(1, 1, 2.9, 2.9) == 30
    assert percentile(1, 1, 3, 3) == 25
    # never below one step
    assert percentile(*(6 ** (round // 2) for round in range(20))) == 5


def test_oort_remembers_visits():
    memory = sampler("oort").learned({}, 4, [Visited(7, 10, 0.5, 3.0)])
    assert memory["clients"] == {"7": [5.0, 3.0, 5]}


def test_tifl_draws_one_tier():
    seconds = [float(10 ** (id % 3)) for id in range(30)]
    rule, memory, tiers = sampler({"name": "tifl", "tiers": 3, "interval": 0, "credits": 2}), {}, []
    for round in range(6):
        ids, memory = rule.choose(5, candidates(30, round, seconds=seconds), round, memory)
        assert len(ids) == 5 and len({id % 3 for id in ids}) == 1
        assert memory == json.loads(json.dumps(memory))
        tiers.append(ids[0] % 3)
    # two credits a tier
    assert sorted(tiers) == [0, 0, 1, 1, 2, 2] and memory["credits"] == [0, 0, 0]


def test_tifls_probabilities():
    """Algorithm 2 after round 20: the last tier, 0, has not become better; tier 1 has the largest loss."""
    rule = sampler({"name": "tifl", "tiers": 3, "interval": 20})
    free = candidates(30, seconds=[float(10 ** (id % 3)) for id in range(30)])
    start = rule.choose(1, free, 0, {})[1]
    memory = start | {"tier": 0, "losses": [1.0, 3.0, 2.0], "before": [0.9, 1.0, 1.0]}
    changed = rule.choose(1, free, 20, memory)[1]
    assert changed["probabilities"] == pytest.approx([1 / 6, 3 / 6, 2 / 6]) and changed["before"] == [1.0, 3.0, 2.0]
    better = rule.choose(1, free, 20, memory | {"before": [1.1, 1.0, 1.0]})[1]
    assert better["probabilities"] == start["probabilities"]
    # a tier without credits has no probability: two tiers are left
    left = rule.choose(1, free, 20, memory | {"credits": [5, 0, 5]})[1]
    assert left["probabilities"] == pytest.approx([1 / 3, 0, 2 / 3])
    # a tier with credits is drawn before one without, whatever its probability
    only = memory | {"credits": [5, 0, 0], "probabilities": [0.0, 0.0, 1.0]}
    assert {rule.choose(1, candidates(30, draw), 1, only)[1]["tier"] for draw in range(5)} == {0}
    # a tier that was not drawn before is the worst; one whose clients do not report is the best
    fresh = rule.choose(1, free, 20, memory | {"losses": [1.0, None, 2.0]})[1]
    assert fresh["probabilities"] == pytest.approx([1 / 6, 3 / 6, 2 / 6])
    assert start["losses"].count(0.0) == 1
    visits = [Visited(3, 1, 2.0, 1.0), Visited(6, 3, 1.0, 1.0)]
    learned = rule.learned(memory, 20, visits)
    assert learned["losses"] == [1.25, 3.0, 2.0] and learned["before"] == memory["before"]
    # the first loss of a tier is what later ones are compared with
    assert rule.learned(memory | {"before": [None, 1.0, 1.0]}, 20, visits)["before"] == [1.25, 1.0, 1.0]


def test_equally_fast_clients_are_one_tier():
    ids, memory = sampler("tifl").choose(5, candidates(30), 0, {})
    assert len(ids) == 5 and memory["bounds"] == [] and memory["probabilities"] == [1.0]


def test_clients_that_do_not_report_are_not_preferred():
    """They have the mean of known values, where they had none and came first."""
    power, oort = sampler({"name": "power_of_choice", "factor": 9}), sampler({"name": "oort", "percentile": 100})
    visits = [Visited(0, 1, 4.0, 1.0), Visited(1, 1, 2.0, 1.0)]
    ids, memory = power.choose(1, candidates(3), 1, power.learned({}, 0, visits))
    assert ids == [2] and memory == {"0": 4.0, "1": 2.0, "2": 3.0}
    assert power.choose(1, candidates(3), 2, memory)[0] == [0]
    ids, memory = oort.choose(3, candidates(3, seconds=[1.0, 1.0, 5.0]), 1, oort.learned({}, 0, visits))
    assert memory["clients"]["2"] == [3.0, 5.0, 2]


@pytest.mark.parametrize("name", ["uniform", "power_of_choice", "oort", "tifl"])
def test_nobody_is_free(name):
    rule = sampler(name)
    memory = {} if name == "tifl" else rule.learned({}, 0, [Visited(0, 1, 4.0, 1.0)])
    assert rule.choose(4, candidates(3, busy={0, 1, 2}), 1, memory)[0] == []


def test_oort_exploits_when_nobody_is_new():
    memory = {"clients": {str(id): [100.0 if id < 10 else 1.0, 1.0, 1] for id in range(100)}}
    assert sampler("oort").choose(10, candidates(100), 30, memory)[0] == list(range(10))


@pytest.mark.parametrize("name", ["power_of_choice", "oort", "tifl"])
def test_runs_resume_with_the_samplers_memory(tmp_path, name):
    mode = "sync" if name == "tifl" else BUFFER
    experiment = tiny(method="heterofl", rounds=6, system={"devices": "phones", "mode": mode, "sampler": name})
    whole = simulate(experiment, tmp_path / "whole")
    lines = run(whole)
    first = simulate(experiment, tmp_path / "first")
    before = run(first, 3)
    first.save(tmp_path / "saved")
    second = simulate(experiment, tmp_path / "second")
    assert second.restore(tmp_path / "saved") == (3, [])
    assert second.past == first.past and first.past.memory
    assert before + run(second) == lines
    assert_same(second.state, whole.state)


def test_a_sampler_learns_the_losses_of_clients(tmp_path):
    system = {"devices": EQUAL, "sampler": "power_of_choice"}
    simulation = simulate(tiny(method="fedavg", rounds=1, system=system), tmp_path)
    [line] = run(simulation)
    losses = simulation.past.memory
    sizes = {id: simulation.method.task.training.samples_of(int(simulation.data.train.sizes[int(id)])) for id in losses}
    assert len(losses) == line["clients"]
    mean = sum(losses[id] * size for id, size in sizes.items()) / sum(sizes.values())
    assert mean == pytest.approx(line["train_loss"])


class First(Sampler):
    """The first free clients."""

    def choose(self, wanted, free, round, memory):
        return [id for id in range(free.count) if free.is_free(id)][:wanted], memory


def test_a_users_own_sampler(tmp_path):
    system = {"devices": EQUAL, "sampler": f"{__name__}:First"}
    simulation = simulate(tiny(method="fedavg", rounds=2, system=system), tmp_path)
    cohort = simulation.clients.cohort
    assert [id for _, id in simulation.schedule.plan(simulation.past, 0).visits] == list(range(cohort))


class Same(Sampler):
    """The same client again and again."""

    client: int = 3

    def choose(self, wanted, free, round, memory):
        return [self.client], memory


@pytest.mark.parametrize("client", [3, 100, -1])
def test_a_sampler_that_asks_a_busy_or_unknown_client(tmp_path, client):
    system = {"devices": "phones", "mode": BUFFER, "sampler": Same(client=client)}
    simulation = simulate(tiny(method="fedavg", system=system), tmp_path)
    with pytest.raises(PluginFailed) as error:
        simulation.run_round()
    assert str(error.value).startswith("system.sampler: test_samplers:Same, choose, round 1: chose [")
    assert "Allowed: " in str(error.value)


@pytest.mark.parametrize("wanted", [1, 10])
@pytest.mark.parametrize("known", [0, 50])
@pytest.mark.parametrize("name", ["uniform", "power_of_choice", "oort"])
def test_idle_clients_cost_nothing(name, known, wanted):
    """A permutation of a million million clients could not be allocated."""
    memory = sampler(name).learned({}, 0, [Visited(id, 1, 1.0, 1.0) for id in range(known)]) if known else {}
    asked, one = [], candidates(1)
    free = Candidates(
        10**12, one.generator, lambda id: not asked.append(id), lambda id: 1, lambda id: 1, lambda id: 1.0, one.profile
    )
    for round in (0, 5):
        assert len(sampler(name).choose(wanted, free, round, memory)[0]) == wanted
    assert len(asked) < 600


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ({"sampler": "ort"}, "no client sampler is called 'ort'. Did you mean 'oort'?"),
        ({"sampler": {"name": "power_of_choice", "factor": 0.5}}, "factor: 0.5 is not valid. Allowed: at least 1"),
        ({"sampler": "tifl", "mode": BUFFER}, "sync with sampler: tifl"),
    ],
)
def test_bad_input(system, expected):
    with pytest.raises(ConfigError) as error:
        tiny(system=system)
    assert str(error.value).startswith("test: system") and expected in str(error.value)
