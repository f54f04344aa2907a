"""Low-rank methods by hand, in float64: rounds without training, exactness of means, traffic."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from helpers import assert_same, client_data, message, run, simulate, tiny

from rayfl import costs
from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core import factors as lowrank
from rayfl.core.fold import Fold
from rayfl.core.joined import parameters_of
from rayfl.core.net import Net, cached_module, load, params_of
from rayfl.core.seeds import torch_generator
from rayfl.core.submodel import Slice
from rayfl.core.tensors import leaves
from rayfl.experiment import read_experiment
from rayfl.methods import METHODS, Client, Task, Visit
from rayfl.methods.lowrank import LOWRANK
from rayfl.methods.lowrank.base import LowRank, part_of, rank_of
from rayfl.models import MODELS
from rayfl.testing.tiny import made_up_for, model_of
from rayfl.training.settings import Training
from rayfl.training.steps import at_rest

R = 8
VIT = model_of("lora").base
LORA = MODELS["lora"](base=VIT, targets=("q.linear", "v.linear"), rank=R, alpha=4.0)
"""s = 1/2, and 20 x 20 layers."""
MODELS_OF_RANKS = pytest.mark.parametrize(
    "model", [LORA, LORA.model_copy(update={"rank_pattern": (("v.linear", 4),)})], ids=["one rank", "by layer"]
)
"""All layers of one rank, and values of half the rank of queries, with twice the scale."""
RANKS = (2, 2, 4, 8)
WIDE = (8, 8, 8, 8)


def bound(name, ranks=RANKS, model=LORA, **options) -> LowRank:
    """The method, where clients 0, 1, ... have these ranks."""
    capacities = sorted({rank / R for rank in ranks} | {1.0}, reverse=True)
    nets = {capacity: Net(model, capacity) for capacity in capacities}
    method = METHODS[name](**options).bind(Task(model, Training(lr=0.1), nets, 1.0, clients=len(ranks)))
    assert isinstance(method, LowRank)
    return method


def drawn(shape, *address):
    return torch.randn(shape, generator=torch_generator(0, "test:adapters", *map(str, address)), dtype=torch.float64)


def started(method, purpose="start"):
    """The method's state with factors and cores that are not 0, in float64; what starts at 0 in every round stays 0."""
    state, resets = method.init(), method.name in ("flora", "florist")
    params = {n: t.double() for n, t in state["params"].items()}
    for name, t in params.items():
        if part_of(name) in ("A", "B", "M") and not resets:
            params[name] = drawn(t.shape, purpose, name)
    return state | {"params": params}


def one_round(method, state, ranks, trained, samples=None, round=0):
    """The state after a round in which client k answers trained(k, params); its weight is its number of samples."""
    fold = Fold(state)
    for k, rank in enumerate(ranks):
        client = Client(k, rank / R, round)
        selection = method.select(state, client)
        visit = Visit(client, selection, client_data(*[0] * (samples or [1] * len(ranks))[k]), None, k)
        payload = method.extract(state, selection)

        def answer(params, visit, k=k, **options):
            return {n: t.clone() for n, t in trained(k, params).items()}, {"train_samples": 1, "steps": 1}

        object.__setattr__(method, "train", answer)
        fold.add(selection, method.local_update(payload, visit))
        object.__delattr__(method, "train")
    return method.step(state, round, fold)


def product(method, params, path):
    """s B A, or s B M A, of a client or of the server."""
    a, b, m = (params.get(f"{path}.lora.{part}") for part in "ABM")
    return method.scale(path, len(a)) * (b @ a if m is None else b @ m @ a)


def function(method, state):
    """Return what the server's adapters add to W0, per layer."""
    params = state["params"]
    found = {path: product(method, params, path) for path in method.layers}
    return {path: t + params.get(f"{path}.lora.W", 0) for path, t in found.items()}


def untrained(k, params):
    return params


def noisy(method, round=0):
    """Client k adds to what it trains a number of its own everywhere."""

    def trained(k, params):
        mine = {n: t for n, t in params.items() if method.is_trained(n, round)}
        return params | {n: t.double() + drawn(t.shape, "client", k, n) for n, t in mine.items()}

    return trained


def answers_of(method, state, ranks, trained, round=0):
    """Return the clients' trained factors, as in `one_round`, and their P_k, per layer."""
    found = []
    for k, rank in enumerate(ranks):
        selection = method.select(state, Client(k, rank / R, round))
        found.append(trained(k, method.extract(state, selection)["params"]))
    return [{path: product(method, params, path) for path in method.layers} for params in found]


def close(found, expected, tolerance=1e-12):
    assert found.keys() == expected.keys() and found
    for path, t in expected.items():
        torch.testing.assert_close(found[path], t, rtol=tolerance, atol=tolerance)


# a round without any training


@pytest.mark.parametrize("name", sorted(LOWRANK.keys() - {"zero_padding", "hetlora", "flexlora", "fedrora"}))
@MODELS_OF_RANKS
def test_a_round_without_training_changes_no_function(name, model):
    """Three clients of ranks 2, 4 and 8, with any weights. LoRA-FAIR's descent stops at a cosine of 1."""
    method = bound(name, RANKS, model, **({"start": "seed"} if name == "fedsb" else {}))
    state = started(method)
    before = function(method, state)
    for round in range(3):
        state = one_round(method, state, RANKS, untrained, [1, 2, 3, 4], round)
    close(function(method, state), before, 1e-10)


@pytest.mark.parametrize("name", ["lora_fair", "fedex_lora", "raflora"])
@MODELS_OF_RANKS
def test_a_segment_without_holders_keeps_its_product(name, model):
    """Clients of ranks 2 and 4 answer, none of rank 8."""
    method = bound(name, RANKS, model)
    state = started(method)
    close(function(method, one_round(method, state, (2, 4), untrained)), function(method, state), 1e-10)


@pytest.mark.parametrize("name", ["zero_padding", "hetlora"])
def test_zero_padding_shrinks_components_with_few_holders(name):
    """Ranks 2, 2, 4, 8 of equal weights: components from 2 on are held by half, from 4 on by a quarter."""
    method = bound(name, **({"by_norm": False} if name == "hetlora" else {}))
    state = started(method)
    before = state["params"]
    for round in range(3):
        state = one_round(method, state, RANKS, untrained, round=round)
    factors = torch.tensor([1.0, 1, 0.125, 0.125, *[0.015625] * 4], dtype=torch.float64)
    for path in method.layers:
        a, b = (state["params"][f"{path}.lora.{part}"] for part in "AB")
        torch.testing.assert_close(a, before[f"{path}.lora.A"] * factors[:, None], rtol=1e-12, atol=0)
        torch.testing.assert_close(b, before[f"{path}.lora.B"] * factors, rtol=1e-12, atol=0)


def test_the_rank_of_flexlora_collapses_and_that_of_raflora_does_not():
    """Its singular values j shrink by the share of the clients whose rank is over j."""
    found = {}
    for name in ("flexlora", "raflora"):
        method = bound(name)
        state = started(method)
        # the first round turns the factors to singular directions
        state = one_round(method, state, WIDE, untrained)
        before = [lowrank.svd(t, None).s[:R] for t in function(method, state).values()]
        for round in range(3):
            state = one_round(method, state, RANKS, untrained, round=round)
        after = [lowrank.svd(t, None).s[:R] for t in function(method, state).values()]
        found[name] = [new / old for new, old in zip(after, before, strict=True)]
    shares = torch.tensor([1.0, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25], dtype=torch.float64) ** 3
    for ratio in found["flexlora"]:
        torch.testing.assert_close(ratio, shares, rtol=1e-10, atol=0)
    for ratio in found["raflora"]:
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-10, atol=0)


def test_padding_by_replication_is_the_holder_mean():
    """A client's missing components are filled with the mean of those who hold them; then everybody is averaged."""
    method, weights = bound("rbla"), [1, 2, 3, 4]
    state, trained = started(method), noisy(method)
    new = one_round(method, state, RANKS, trained, weights)["params"]
    for path in method.layers:
        sent = []
        for k, rank in enumerate(RANKS):
            selection = method.select(state, Client(k, rank / R, 0))
            sent.append(trained(k, method.extract(state, selection)["params"])[f"{path}.lora.A"])
        filled = torch.zeros(R, 20, dtype=torch.float64)
        for j in range(R):
            holders = [k for k, rank in enumerate(RANKS) if rank > j]
            mean = sum(weights[k] * sent[k][j] for k in holders) / sum(weights[k] for k in holders)
            filled[j] = sum(w * (sent[k][j] if k in holders else mean) for k, w in enumerate(weights)) / sum(weights)
        torch.testing.assert_close(new[f"{path}.lora.A"], filled, rtol=1e-12, atol=1e-12)


# which means are exact


def mean_product(method, state, ranks, trained, weights, round=0):
    answers = answers_of(method, state, ranks, trained, round)
    total = sum(weights)
    return {path: sum(w * p[path] for w, p in zip(weights, answers, strict=True)) / total for path in method.layers}


@pytest.mark.parametrize("ranks", [RANKS, WIDE], ids=["unequal", "equal"])
@MODELS_OF_RANKS
def test_flora_merges_the_mean_of_the_products(ranks, model):
    method, weights = bound("flora", ranks, model), [1, 2, 3, 4]
    state, trained = started(method), noisy(method)
    sent = []

    def kept(k, params):
        sent.append(trained(k, params))
        return sent[-1]

    new = one_round(method, state, ranks, kept, weights)
    products = [{path: product(method, params, path) for path in method.layers} for params in sent]
    expected = {p: sum(w * one[p] for w, one in zip(weights, products, strict=True)) / 10 for p in method.layers}
    close(function(method, new), expected)
    assert all(not torch.equal(sent[0][n][:1], sent[1][n][:1]) for n in sent[0] if part_of(n) == "A")
    assert not any(t.any() for n, t in new["params"].items() if part_of(n) == "B")


def test_florist_keeps_the_configured_energy():
    """With all of it FLoRA's round, and a smaller rank, that travels, the less it keeps."""
    ranks, found = {}, {}
    for tau in (0.5, 0.9, 1.0):
        method = bound("florist", tau=tau)
        state = started(method)
        new = one_round(method, state, RANKS, noisy(method), [1, 2, 3, 4])
        found[tau] = function(method, new)
        ranks[tau] = [int(rank) for rank in new["merged"].values()]
    flora = bound("flora")
    whole = function(flora, one_round(flora, started(flora), RANKS, noisy(flora), [1, 2, 3, 4]))
    close(found[1.0], whole, 1e-10)
    assert ranks[1.0] == [sum(RANKS)] * 4 and max(ranks[0.5]) < min(ranks[0.9]) < sum(RANKS)
    for tau in (0.5, 0.9):
        for i, (path, t) in enumerate(found[tau].items()):
            energies = torch.linalg.svdvals(whole[path]).square()
            kept = float(t.square().sum() / energies.sum())
            assert tau <= kept == pytest.approx(float(energies[: ranks[tau][i]].sum() / energies.sum()))


@pytest.mark.parametrize("name", ["ffa_lora", "rolora", "fedsvd", "fedsb", "fedex_lora", "lora_a2"])
@MODELS_OF_RANKS
def test_with_equal_ranks_the_mean_is_exact(name, model):
    """In a round that trains B, and in one that trains A where there is one."""
    method, weights = bound(name, WIDE, model, **({"start": "seed"} if name == "fedsb" else {})), [1, 2, 3, 4]
    for round in (0, 1):
        state, trained = started(method), noisy(method, round)
        expected = mean_product(method, state, WIDE, trained, weights, round)
        close(function(method, one_round(method, state, WIDE, trained, weights, round)), expected, 1e-10)


def test_averaging_factors_is_not_exact_and_corrections_help():
    """The relative error of the server's function to the mean of the products, equal ranks, new factors of clients'
    own: FedIT's is large, LoRA-FAIR takes a part of it away, FedEx-LoRA all."""
    errors = {}
    for name, options in (
        ("fedit", {}),
        ("lora_fair", {"by": "ridge", "strength": 1e-9}),
        ("lora_fair", {"by": "cosine", "lr": 1.0, "steps": 300, "strength": 1e-6}),
        ("fedex_lora", {}),
    ):
        method = bound(name, WIDE, **options)
        state, trained = started(method), noisy(method)
        expected = mean_product(method, state, WIDE, trained, [1] * 4)
        found = function(method, one_round(method, state, WIDE, trained))
        key = options.get("by", name)
        errors[key] = max(float((found[p] - expected[p]).norm() / expected[p].norm()) for p in expected)
    assert errors["fedit"] > 0.3 and errors["fedex_lora"] < 1e-12
    assert 0.05 < errors["ridge"] < 0.8 * errors["fedit"]
    assert errors["ridge"] <= errors["cosine"]


def test_the_cosine_of_lora_fair_grows():
    cosines = {}
    for steps in (1, 300):
        method = bound("lora_fair", WIDE, lr=0.5, steps=steps, strength=1e-6)
        state, trained = started(method), noisy(method)
        expected = mean_product(method, state, WIDE, trained, [1] * 4)
        found = function(method, one_round(method, state, WIDE, trained))
        cosines[steps] = [float((found[p] * expected[p]).sum() / found[p].norm() / expected[p].norm()) for p in found]
    assert all(few < many < 1 for few, many in zip(cosines[1], cosines[300], strict=True))


@MODELS_OF_RANKS
def test_flexlora_has_the_best_approximation_of_the_mean(model):
    """Rank 8 on the server, and rank 2 for a client of rank 2; half of it in layers of half the rank."""
    method, weights = bound("flexlora", RANKS, model), [1, 2, 3, 4]
    state, trained = started(method), noisy(method)
    expected = mean_product(method, state, RANKS, trained, weights)
    new = one_round(method, state, RANKS, trained, weights)
    small = method.extract(new, method.select(new, Client(0, 2 / R, 1)))["params"]
    for path, whole in expected.items():
        assert torch.linalg.matrix_rank(whole) > method.rank(path)
        best = lowrank.svd(whole, None)
        for share, params in ((1, new["params"]), (2 / R, small)):
            u, s, vt = best.truncated(int(method.rank(path) * share))
            assert len(s) == len(params[f"{path}.lora.A"])
            torch.testing.assert_close(product(method, params, path), u * s @ vt, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scaling", ["alpha_over_r", "rslora"])
def test_flexlora_makes_up_for_a_scale_that_depends_on_the_rank(scaling):
    method = bound("flexlora", model=LORA.model_copy(update={"scaling": scaling}))
    state = one_round(method, started(method), RANKS, noisy(method))
    for rank in (2, 4, 8):
        params = method.extract(state, method.select(state, Client(0, rank / R, 1)))["params"]
        for path, whole in function(method, state).items():
            u, s, vt = lowrank.svd(whole, None).truncated(rank)
            torch.testing.assert_close(product(method, params, path), u * s @ vt, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["fedex_lora", "lora_fair", "fed_plora", "rolling_lora", "important_lora"])
def test_methods_that_need_one_scale_for_all_ranks(name):
    model = LORA.model_copy(update={"scaling": "rslora"})
    with pytest.raises(ConfigError, match="model.scaling: rslora is not valid. Allowed: constant, because method"):
        bound(name, model=model).check(1, Population())
    for ranks, same in ((WIDE, model), (RANKS, LORA)):
        bound(name, ranks, same).check(1, Population())


@pytest.mark.parametrize("name", ["fedit", "flora", "flexlora", "raflora", "fedex_lora", "florist"])
def test_methods_that_depend_on_a_client_s_gauge(name):
    """(B / 3, 3 A) of one client is the same function. Whoever averages factors alone comes to another one."""
    method = bound(name, WIDE)
    state = started(method)

    def turned(k, params, factor):
        found = dict(noisy(method)(k, params))
        for n in found if k == 1 else ():
            found[n] = {"A": found[n] * factor, "B": found[n] / factor}.get(part_of(n), found[n])
        return found

    plain, other = (
        function(method, one_round(method, state, WIDE, functools.partial(turned, factor=factor))) for factor in (1, 3)
    )
    if name == "fedit":
        assert all((plain[p] - other[p]).norm() > 0.1 * plain[p].norm() for p in plain)
    else:
        close(other, plain, 1e-10)


def test_hetlora_with_one_rank_and_equal_norms_is_fedit():
    """Clients turn their components by orthogonal matrices of their own, which change no product."""

    def turned(k, params):
        q = torch.linalg.qr(drawn((R, R), "turn", k)).Q
        found = dict(params)
        for n in [n for n in params if part_of(n) == "A"]:
            found |= {n: q.T @ params[n], f"{n[:-1]}B": params[f"{n[:-1]}B"] @ q}
        return found

    states = []
    for name, options in (("hetlora", {"gamma": 1.0}), ("fedit", {})):
        method = bound(name, WIDE, **options)
        states.append(one_round(method, started(method), WIDE, turned)["params"])
    close(*states)
    assert all((t - started(method)["params"][n]).norm() > 1 for n, t in states[0].items() if part_of(n))


# HetLoRA


@pytest.mark.parametrize("scaling", ["constant", "alpha_over_r"])
def test_hetlora_weighs_by_norms(scaling):
    method = bound("hetlora", (2, 8), LORA.model_copy(update={"scaling": scaling}), gamma=1.0)
    state, trained = started(method), noisy(method)
    norms = [
        sum(float(p.square().sum()) for p in one.values()) ** 0.5 for one in answers_of(method, state, (2, 8), trained)
    ]
    new = one_round(method, state, (2, 8), trained)["params"]
    sent = [
        trained(k, method.extract(state, method.select(state, Client(k, r / R, 0)))["params"])
        for k, r in ((0, 2), (1, 8))
    ]
    for name in [n for n in new if part_of(n) == "A"]:
        expected = norms[1] * sent[1][name]
        expected[:2] += norms[0] * sent[0][name]
        torch.testing.assert_close(new[name], expected / sum(norms), rtol=1e-10, atol=1e-10)


def test_hetlora_prunes_a_rank_whose_tail_shrinks():
    """From rank 8, the factor 0.75 gives 6, then 4, the minimum; a growing tail keeps the rank."""
    method = bound("hetlora", (8,), gamma=0.75, rank_min=4)
    state, client = started(method), Client(0, 1.0, 0)
    selection = method.select(state, client)
    payload = method.extract(state, selection)

    def update(client_state, factor):
        def answer(params, visit, **options):
            seen = {int(t.abs().sum(1).count_nonzero()) for n, t in params.items() if part_of(n) == "A"}
            return {n: t * (factor if part_of(n) else 1) for n, t in params.items()}, {"train_samples": 1, "seen": seen}

        object.__setattr__(method, "train", answer)
        return method.local_update(payload, Visit(client, selection, client_data(0), client_state, 0))

    client_state, ranks = None, [8]
    for factor in (2.0, 0.5, 0.5, 0.5, 0.5):
        found = update(client_state, factor)
        client_state = found.client_states[0]
        # it runs what the round before has left, and sends what this one leaves
        assert found.metrics["seen"] == {ranks[-1]}
        ranks.append(int(client_state["rank"]["rank"]))
        assert found.metrics["bytes_down"] == 8 * (84 + 4 * 40 * ranks[-2])
        assert found.metrics["bytes_up"] == 8 * (84 + 4 * 40 * ranks[-1])
        assert not any(t[ranks[-1] :].any() for n, t in found.sums["params"].items() if part_of(n) == "A")
    assert ranks == [8, 8, 6, 4, 4, 4]


def test_the_tail_of_hetlora_has_the_gradient_of_its_norms():
    method = bound("hetlora", (8,), gamma=0.5, tail_weight=0.3)
    module = Net(LORA).build().double()
    load(module, started(method)["params"])
    params = parameters_of(module)
    for parameter in params.values():
        parameter.grad = torch.zeros_like(parameter)
    method._adjust(4)(module)
    total = sum(params[f"{path}.lora.B"][:, 4:].norm() * params[f"{path}.lora.A"][4:].norm() for path in method.layers)
    names = [n for n in params if part_of(n)]
    expected = torch.autograd.grad(0.3 * total, [params[n] for n in names])
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(params[name].grad, gradient)


# what travels


HEAD = 84
"""A base with 20 features and 4 classes."""
LAYERS = 4
D = 40


def traffic(name, capacities, rounds, **options):
    """Floats down and up of every round in which one client of each capacity takes part."""
    data = made_up_for(LORA) | {"samples": 80, "test_samples": 24, "classes": 4, "name": "synthetic"}
    clients = {"count": len(capacities), "cohort": len(capacities), "capacities": [1.0, *capacities[1:]]}
    given = {"model": LORA, "data": data, "clients": clients, "partition": "iid", "rounds": rounds}
    return tiny(method={"name": name} | options, evaluation={"every": 9}, **given)


@pytest.mark.parametrize(
    ("name", "options", "down", "up"),
    [
        ("fedit", {}, [(8 + 8) * D] * 3, [(8 + 8) * D] * 3),
        ("zero_padding", {}, [(8 + 2) * D] * 3, [(8 + 2) * D] * 3),
        ("rbla", {}, [(8 + 2) * D] * 3, [(8 + 2) * D] * 3),
        ("flexlora", {}, [(8 + 2) * D] * 3, [(8 + 2) * D] * 3),
        ("raflora", {}, [(8 + 2) * D] * 3, [(8 + 2) * D] * 3),
        ("fedrora", {}, [(8 + 2) * D] * 3, [(8 + 2) * D] * 3),
        ("lora_fair", {}, [(8 + 2) * D] * 3, [(8 + 2) * D] * 3),
        ("ffa_lora", {}, [(8 + 2) * 20] * 3, [(8 + 2) * 20] * 3),
        ("rolora", {}, [(8 + 2) * 20] * 3, [(8 + 2) * 20] * 3),
        ("fedsvd", {}, [(8 + 2) * D] * 3, [(8 + 2) * 20] * 3),
        # a stack of rank 10 is as large as the product, of which each of two clients gets one
        ("flora", {}, [0, 2 * 400, 2 * 400], [(8 + 2) * D] * 3),
        ("fedex_lora", {}, [(8 + 2) * D, (8 + 2) * D + 2 * 400, (8 + 2) * D + 2 * 400], [(8 + 2) * D] * 3),
        ("fed_plora", {}, [2 * 8 * D] * 3, [(8 + 2) * D] * 3),
        ("rolling_lora", {}, [2 * 8 * D] * 3, [(8 + 2) * D] * 3),
        ("rolling_lora", {"others": "left_out"}, [(8 + 2) * D] * 3, [(8 + 2) * D] * 3),
        ("important_lora", {}, [2 * 8 * D] * 3, [(8 + 2) * D] * 3),
        # the columns that are chosen, and a number each
        ("lora_a2", {}, [2 * 8 * 20] * 3, [(8 + 2) * 21] * 3),
        ("fedsb", {"start": "seed"}, [64 + 4] * 3, [64 + 4] * 3),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_traffic_is_that_of_the_papers(name, options, down, up, tmp_path):
    """Floats a layer of 20 x 20, of a client of rank 8 and of one of rank 2; beside them the head, four bytes each."""
    lines = run(simulate(traffic(name, (1.0, 0.25), 3, **options), tmp_path))
    assert [line["bytes_down"] for line in lines] == [4 * (LAYERS * n + 2 * HEAD) for n in down]
    assert [line["bytes_up"] for line in lines] == [4 * (LAYERS * n + 2 * HEAD) for n in up]


def test_a_small_stack_travels_as_it_is(tmp_path):
    """Ranks 2 and 2 in 20 x 20: 4 x 40 floats, less than 400."""
    experiment = traffic("flora", (1.0,), 2)
    clients = {"count": 2, "cohort": 2, "capacities": [1.0, 0.25], "assignment": "dynamic", "weights": [0, 1]}
    lines = run(simulate(experiment.with_(clients=clients), tmp_path))
    assert [line["bytes_down"] for line in lines] == [4 * 2 * HEAD, 4 * 2 * (LAYERS * 4 * D + HEAD)]


@pytest.mark.parametrize(("server", "rank"), [({}, 4), ({"optimizer": "sgd", "lr": 0.5}, 4 + 8)])
def test_a_residual_has_the_rank_of_what_clients_sent(server, rank, tmp_path):
    """Clients of ranks 2 and 2 under a server of rank 8: its other components have no residual. A step of a server
    optimizer starts from all old components. The product has 400 floats."""
    experiment = traffic("fedex_lora", (1.0,), 2)
    clients = {"count": 2, "cohort": 2, "capacities": [1.0, 0.25], "assignment": "dynamic", "weights": [0, 1]}
    first, second = run(simulate(experiment.with_(clients=clients, server=server), tmp_path))
    assert first["bytes_down"] == 4 * 2 * (LAYERS * 2 * D + HEAD)
    assert second["bytes_down"] - first["bytes_down"] == 4 * 2 * LAYERS * min(rank * D, 400)


@pytest.mark.parametrize("method", ["flora", "flexlora", "lora_fair", "fedsb"])
@pytest.mark.parametrize(
    "sections",
    [
        {"updates": {"transforms": [{"name": "clip", "norm": 1.0}]}},
        {"privacy": {"clip": 1.0, "noise": 1.0, "delta": 0.01}},
    ],
)
def test_products_are_neither_transformed_nor_private(method, sections):
    experiment = traffic(method, (1.0,), 2)
    with pytest.raises(ConfigError, match=f"clients of method {method} send low-rank products. Allowed: no "):
        experiment.with_(**sections)


def test_the_gradient_round_of_fedsb_sends_directions(tmp_path):
    """Up come 8 directions of the gradient, and nothing of the head; down go the factors, once."""
    lines = run(simulate(traffic("fedsb", (1.0, 0.25), 3), tmp_path))
    cores, ranks = 64 + 4, 8 + 2
    assert [line["bytes_up"] for line in lines] == [4 * LAYERS * 2 * 8 * D] + [4 * (LAYERS * cores + 2 * HEAD)] * 2
    sent = [LAYERS * cores, LAYERS * (cores + ranks * D), LAYERS * cores]
    assert [line["bytes_down"] for line in lines] == [4 * (n + 2 * HEAD) for n in sent]


# Fed-SB


@pytest.mark.parametrize("abandoned", [0, 2])
def test_fedsb_starts_from_the_gradient_of_full_fine_tuning(abandoned):
    """One client, rank 8: s B M A is -lr times the best approximation of the gradient of W0 by rank 8. Also after
    rounds without updates."""
    method = bound("fedsb", (8,))
    state, client, data = method.init(), Client(0, 1.0, abandoned), client_data(0, 1, 2, 3, 1, shape=(1, 8, 8))
    for round in range(abandoned):
        state = method.step(state, round, Fold(state))
    selection = method.select(state, client)
    visit = Visit(client, selection, data, None, 5)
    fold = Fold(state)
    update = method.local_update(method.extract(state, selection), visit)
    fold.add(selection, update)
    new = method.step(state, abandoned, fold)
    # the gradients by W0 [20, 20] of all targets, over 5 samples of 5 tokens
    more = update.metrics["train_flops"] - costs.training_flops(selection.net, 5)
    assert more == 2 * (5 * 5) * LAYERS * 20 * 20

    module = selection.net.build().train()
    load(module, state["params"])
    [(x, y)] = data.in_order(5)
    weights = {path: module.get_submodule(path).weight.clone().requires_grad_() for path in method.layers}
    named = {f"{path}.weight": t for path, t in weights.items()}
    value = method.loss(visit)(torch.func.functional_call(module, named, (x,)), y)
    gradients = torch.autograd.grad(value, list(weights.values()))
    assert all(t.norm() > 1e-6 for t in gradients)
    for (path, found), gradient in zip(function(method, new).items(), gradients, strict=True):
        u, s, vt = lowrank.svd(gradient, None).truncated(R)
        torch.testing.assert_close(found.double(), -0.1 * (u * s @ vt), rtol=1e-3, atol=1e-7)
        b = new["params"][f"{path}.lora.B"]
        torch.testing.assert_close(b.T @ b, torch.eye(R), rtol=0, atol=1e-5)


def test_a_narrow_client_of_fedsb_has_a_corner_of_the_core():
    method = bound("fedsb", start="seed")
    state, trained = started(method), noisy(method)
    new = one_round(method, state, (2, 8), trained)["params"]
    for name in [n for n in new if part_of(n) == "M"]:
        small = state["params"][name][:2, :2] + drawn((2, 2), "client", 0, name)
        large = state["params"][name] + drawn((8, 8), "client", 1, name)
        expected = large.clone()
        expected[:2, :2] = (small + large[:2, :2]) / 2
        torch.testing.assert_close(new[name], expected, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(new[n], state["params"][n]) for n in new if part_of(n) in ("A", "B"))


# what is trained


@pytest.mark.parametrize("name", sorted(LOWRANK))
def test_a_round_moves_only_trained_parameters(name, tmp_path):
    """With weight decay, which moves whatever has a gradient."""
    simulation = simulate(traffic(name, (1.0, 0.25), 2).with_(training={"weight_decay": 0.1, "steps": 2}), tmp_path)
    method = simulation.method
    for round in range(2):
        before = simulation.state["params"]
        run(simulation, 1)
        after = simulation.state["params"]
        moved = {part_of(n) for n in before if not torch.equal(before[n], after[n])}
        expected = {"", *method.trains(round)}
        if name in ("flora", "florist"):
            expected = {"", "W"}
        if name == "fedex_lora":
            expected |= {"W"}
        if name == "fedsb" and round == 0:
            expected = {"A", "B", "M"}
        if name == "fedsvd":
            expected |= {"A"}
        assert moved == expected
    resided = cached_module(method.task.server, torch.device("cpu"))
    assert all(p.requires_grad for p in resided.parameters()), "flags are put back"


def test_flags_are_put_back_after_an_error():
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(ArithmeticError), at_rest([layer.weight]):
        assert (layer.weight.requires_grad, layer.bias.requires_grad) == (False, True)
        raise ArithmeticError
    assert layer.weight.requires_grad


def test_rolora_alternates():
    method = bound("rolora")
    assert [method.trains(t) for t in range(4)] == [("B",), ("A",), ("B",), ("A",)]
    assert [method.changed(t) for t in range(4)] == [("B",), ("B",), ("A",), ("B",)]


@pytest.mark.parametrize("name", sorted(LOWRANK.keys() - {"fedit"}))
def test_a_client_of_rank_zero_trains_the_head(name, tmp_path):
    """And what it answers changes nobody's adapters, but where it counts as 0."""
    simulation = simulate(traffic(name, (1.0, 0.1), 2), tmp_path)
    net = simulation.method.task.nets[0.1]
    assert {rank_of(net, path) for path in simulation.method.layers} == ({8} if name == "lora_a2" else {0})
    lines = run(simulation)
    assert all(line["refused"] == 0 and line["clients"] == 2 for line in lines)
    assert all(t.isfinite().all() for _, t in leaves(simulation.state))


@pytest.mark.parametrize("name", ["rbla", "lora_a2"])
def test_rank_zero_and_a_frozen_head_is_nothing_to_train(name):
    model = LORA.model_copy(update={"head": "frozen"})
    experiment = traffic(name, (1.0, 0.25), 1).with_(model=model)
    found = message(experiment.with_, clients={"count": 2, "cohort": 2, "capacities": [1.0, 0.1]})
    assert (
        "clients.capacities: 0.1 is rank 0 of 8, with a frozen head. Allowed with model.head: frozen: at least 0.125"
        in found
    )


def test_a_model_without_adapters_is_refused():
    found = message(read_experiment, {"model": "digits_cnn", "method": "flora"}, "exp.yaml")
    assert found.startswith("exp.yaml: model: digits_cnn has no adapters. Allowed with a low-rank method")


# components


def positions(method, state, capacity, round=0, id=0):
    selection = method.select(state, Client(id, capacity, round))
    assert isinstance(selection, Slice)
    return {path: selection.positions[f"{path}.rank"].positions for path in method.layers}


def test_rolling_trains_every_component_equally_often():
    method = bound("rolling_lora")
    held = [positions(method, {}, 0.25, round)[method.layers[0]] for round in range(8)]
    assert held == [(t, (t + 1) % 8) for t in range(8)]


def test_fed_plora_draws_by_layer_client_and_round():
    method = bound("fed_plora")
    drawn = [positions(method, {}, 0.25, round, id) for round in range(3) for id in range(3)]
    assert all(len(set(held)) == 2 for one in drawn for held in one.values())
    assert len({tuple(one.values()) for one in drawn}) == 9 and any(len(set(one.values())) > 1 for one in drawn)
    assert positions(method, {}, 0.25, 1, 1) == drawn[4]


def test_the_most_important_components_are_trained():
    method = bound("important_lora")
    state = started(method)
    for path in method.layers:
        a, b = (state["params"][f"{path}.lora.{part}"] for part in "AB")
        sizes = [float(torch.outer(b[:, j], a[j]).norm()) for j in range(R)]
        largest = sorted(sorted(range(R), key=lambda j: -sizes[j])[:2])
        assert positions(method, state, 0.25)[path] == tuple(largest)
    assert set(positions(method, method.init(), 0.25).values()) == {(0, 1)}, "of equal ones the first"


@pytest.mark.parametrize("name", ["fed_plora", "rolling_lora", "important_lora"])
@MODELS_OF_RANKS
def test_folding_the_others_truncates_nothing(name, model):
    """Clients start from, and devices run, the server's function; without the option, a part of it."""
    method = bound(name, RANKS, model)
    state = started(method)
    whole, path = function(method, state), method.layers[0]
    for capacity in (1.0, 0.5, 0.25):
        selection = method.select(state, Client(3, capacity, 5))
        payload = method.extract(state, selection)
        there = method.folded(payload["params"], payload["all"], selection)
        deployed = method.deploy(state, 6, capacity).params
        for params in (there, deployed):
            close({p: product(method, params, p) + params[f"{p}.lora.W"] for p in method.layers}, whole)
    if name != "fed_plora":
        part = bound(name, RANKS, model, others="left_out")
        params = part.extract(state, part.select(state, Client(3, 0.25, 5)))["params"]
        assert f"{path}.lora.W" not in params and not torch.allclose(product(part, params, path), whole[path])


# FedRoRA


def test_fedrora_starts_clients_from_directions_of_their_own():
    """The two of eight singular directions of the mean that the client's own product has most of."""
    method = bound("fedrora")
    state, kept = started(method), started(bound("fedrora"), "kept")["params"]
    whole = method.task.nets[1.0]
    for name in [n for n in state["params"] if part_of(n) == "A"]:
        found = lowrank.svd(state["params"][f"{name[:-1]}B"], state["params"][name])
        state["params"] |= {name: found.vt, f"{name[:-1]}B": found.u * found.s}
    small = {n: t[:2] if part_of(n) == "A" else t[:, :2] for n, t in kept.items() if part_of(n)}
    start = method.chosen(state["params"], method.task.nets[0.25], {"own": small})
    for path in method.layers:
        v, u = (
            state["params"][f"{path}.lora.A"],
            torch.nn.functional.normalize(state["params"][f"{path}.lora.B"], dim=0),
        )
        own = small[f"{path}.lora.B"] @ small[f"{path}.lora.A"]
        coefficients = torch.stack([u[:, j] @ own @ v[j] for j in range(R)])
        best = sorted(range(R), key=lambda j: -abs(coefficients[j]))[:2]
        expected = sum(coefficients[j] * torch.outer(u[:, j], v[j]) for j in best)
        torch.testing.assert_close(start[f"{path}.lora.B"] @ start[f"{path}.lora.A"], expected)
        # all directions of a product are all of it
        everything = method.chosen(state["params"], whole, {"own": {n: t for n, t in state["params"].items()}})
        torch.testing.assert_close(
            everything[f"{path}.lora.B"] @ everything[f"{path}.lora.A"],
            state["params"][f"{path}.lora.B"] @ state["params"][f"{path}.lora.A"],
        )
    assert method.chosen(state["params"], whole, None) == {}


# LoRA-A2


def test_lora_a2_chooses_among_all_layers():
    """Rank 2 of 8 in 4 layers: the 8 components of 32 whose change weighs most, all others stay as they are."""
    method = bound("lora_a2", (2,))
    state, client = started(method), Client(0, 0.25, 0)
    received = state["params"]
    visit = Visit(client, method.select(state, client), client_data(0), None, 0)
    probed = {n: t + drawn(t.shape, "probe", n) for n, t in received.items()}
    chosen = method.chosen(received, probed, visit)
    assert set(chosen) == {f"{path}.lora.B" for path in method.layers}
    scores = {
        (n, j): float((probed[n] - received[n])[:, j].norm() * received[f"{n[:-1]}A"][j].norm())
        for n in chosen
        for j in range(R)
    }
    expected = set(sorted(scores, key=lambda key: -scores[key])[:8])
    assert {(n, int(j)) for n, t in chosen.items() for j in t[0].nonzero()[:, 0]} == expected


def test_lora_a2_has_the_ranks_that_other_methods_have():
    """Also by parameters, with a trained head, and if the largest capacity is below 1."""
    clients = {"count": 2, "cohort": 2, "capacities": [0.9, 0.5], "metric": "params"}
    one, other = (traffic(name, (1.0, 0.5), 1).with_(clients=clients).bound() for name in ("lora_a2", "rbla"))
    ranks = {c: rank_of(net, other.layers[0]) for c, net in other.task.nets.items()}
    assert {c: one.budget(c) for c in one.task.nets} == {c: 4 * rank for c, rank in ranks.items()}
    assert ranks[0.5] != math.ceil(0.5 * R)


def test_lora_a2_moves_only_selected_components(tmp_path):
    """One client of rank 2, with weight decay: of 32 columns of B eight change, in the next round rows of A."""
    experiment = traffic("lora_a2", (1.0,), 2)
    clients = {"count": 2, "cohort": 1, "capacities": [1.0, 0.25], "assignment": "dynamic", "weights": [0, 1]}
    training = {"weight_decay": 0.1, "momentum": 0.9, "steps": 3}
    simulation = simulate(experiment.with_(clients=clients, training=training), tmp_path)
    for part, dim in (("B", 0), ("A", 1)):
        before = simulation.state["params"]
        run(simulation, 1)
        after = simulation.state["params"]
        # what is weighted and divided by the weight again may lose its last bit
        same = {n: torch.isclose(before[n], after[n], rtol=1e-6, atol=0) for n in before if part_of(n)}
        changed = {n: (~t).any(dim) for n, t in same.items()}
        assert sum(int(t.sum()) for n, t in changed.items() if part_of(n) == part) == 8
        assert not any(t.any() for n, t in changed.items() if part_of(n) != part)


def test_lora_a2_has_a_larger_rate_for_b():
    method = bound("lora_a2")
    assert [method._at_rate(t).task.training.lr for t in range(2)] == [0.5, 0.1]


# what a device runs


def test_a_merged_network_answers_as_the_adapters_do():
    """W in place of s B A, at every rank: the same logits."""
    merged = LORA.model_copy(update={"merged": True})
    net, x = Net(merged), drawn((3, *VIT.input), "x").float()
    params = {n: drawn(t.shape, n).float() * 0.1 for n, t in params_of(net.build()).items()}
    for path in LORA.target_paths:
        params[f"{path}.lora.W"].zero_()
    other = dict(params)
    for path in LORA.target_paths:
        a, b = params[f"{path}.lora.A"], params[f"{path}.lora.B"]
        other |= {f"{path}.lora.W": LORA.scale(path, R) * b @ a, f"{path}.lora.B": torch.zeros_like(b)}
    logits = []
    for given in (params, other):
        module = net.build().eval()
        load(module, given)
        logits.append(module(x).detach())
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits[0], logits[0].mean(0))


@pytest.mark.parametrize("name", ["flora", "florist"])
def test_adapters_that_a_model_starts_with_are_merged(name, monkeypatch):
    """As `model.adapter` reads them."""
    method = bound(name)
    given = {n: drawn(t.shape, n).float() for n, t in method.task.initial().items() if part_of(n) in ("A", "B")}
    start = method.task.initial() | given
    monkeypatch.setattr(Task, "initial", lambda self: start)
    state = method.init()
    close(function(method, state), {path: product(method, start, path) for path in method.layers}, 1e-6)
    assert not any(t.any() for n, t in state["params"].items() if part_of(n) == "B")


@pytest.mark.parametrize("name", ["flora", "florist"])
def test_every_device_runs_the_merged_base(name, tmp_path):
    simulation = simulate(traffic(name, (1.0, 0.25), 2), tmp_path)
    run(simulation)
    x = drawn((3, *VIT.input), "x").float()
    answers = []
    for capacity in (1.0, 0.25):
        deployed = simulation.deployment(capacity)
        module = deployed.net.build().eval()
        load(module, deployed.params)
        answers.append(module(x).detach())
    torch.testing.assert_close(*answers)
    assert any(t.any() for n, t in simulation.state["params"].items() if part_of(n) == "W")


def test_fedit_has_one_rank():
    for size, rank in (("largest", 8), ("smallest", 2)):
        method = bound("fedit", size=size)
        assert {rank_of(net, path) for net in method.task.nets.values() for path in method.layers} == {rank}


def test_a_core_between_frozen_factors_starts_at_zero():
    """And moves at once, because neither factor is 0."""
    net = Net(LORA.model_copy(update={"core": True}), 0.5)
    module = net.build()
    shapes = {part_of(n): tuple(t.shape) for n, t in params_of(module).items() if part_of(n)}
    assert shapes == {"A": (4, 20), "B": (20, 4), "M": (4, 4)}
    module(torch.randn(2, *VIT.input)).sum().backward()
    for n, parameter in module.named_parameters():
        if part_of(n) == "M":
            assert not parameter.any() and parameter.grad is not None and parameter.grad.any()
    assert net.macs == replace(net, model=LORA).macs + 4 * 16 * tokens()


def tokens():
    _, height, width = VIT.input
    return 1 + height * width // VIT.patch**2


def test_two_methods_share_a_process(tmp_path):
    """A network that one has frozen in part is whole for the next: RoLoRA between two runs of RBLA."""
    runs = []
    for i, name in enumerate(("rbla", "rolora", "rbla")):
        simulation = simulate(traffic(name, (1.0, 0.25), 2), tmp_path / str(i))
        run(simulation)
        runs.append(simulation.state)
    assert_same(runs[0], runs[2])
