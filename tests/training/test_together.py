"""Clients that train side by side: equal to clients alone, whatever a visit has, and independent of each other."""

from contextlib import contextmanager
from typing import cast

import numpy as np
import pytest
import torch
from helpers import assert_same

from rayfl.config import RunFailed
from rayfl.core.fold import aligned
from rayfl.core.joined import parameters_of
from rayfl.core.net import Net, cached_module, load
from rayfl.core.seeds import torch_generator, torch_scope
from rayfl.core.submodel import prefix
from rayfl.core.tensors import leaves
from rayfl.data.goal import Classes
from rayfl.engine.cohort import Division
from rayfl.methods.base import Client
from rayfl.models import MODELS
from rayfl.testing.tiny import run, simulate, tiny
from rayfl.training import stacked
from rayfl.training.passes import Passes
from rayfl.training.settings import Training
from rayfl.training.steps import Objective, at_rest, fit
from rayfl.training.together import Ask, answer, together

CPU = torch.device("cpu")
GOAL = Classes(4)


@pytest.fixture
def few(monkeypatch):
    """Let two clients be company."""
    monkeypatch.setattr(stacked, "LEAST", 2)


@contextmanager
def double():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


# one training


def module_of(norm: str = "static_bn") -> torch.nn.Module:
    return cached_module(Net(MODELS["digits_cnn"](classes=4, norm=norm), 0.25), CPU)


def start(module: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch_generator(seed, "test:start")
    return {n: torch.randn(p.shape, generator=generator).mul(0.3) for n, p in parameters_of(module).items()}


def batches(seed: int, *sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch_generator(seed, "test:batches")
    images = (torch.randn(n, 1, 8, 8, generator=generator) for n in sizes)
    # channels last, as images of data sets
    last = (torch.empty(len(x), 8, 8, 1).permute(0, 3, 1, 2).copy_(x) for x in images)
    return [(x, torch.randint(4, (len(x),), generator=generator)) for x in last]


def objective(*absent: int) -> Objective:
    present = torch.ones(4, dtype=torch.bool)
    present[list(absent)] = False
    return Objective(GOAL, "zero", present)


SIZES = [(5, 5, 5), (5, 2), (5, 5, 1), (3,), (5, 5, 5, 5)]
"""Batches of five clients: unequal steps, smaller last batches, one of a single sample."""
WAYS = {
    "plain": {},
    "clip": {"clip": 0.5},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.01},
    "adam and clip": {"optimizer": "adam", "clip": 1.0},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
}


def side_by_side(module, training, sizes=SIZES, seeds=None, adjust=None, rest=(), seen=None, rate=None):
    """Return the parameters and sums of clients that train a module together, where they can."""

    def visit(i: int, given):
        def trained():
            load(module, start(module, i))
            names = parameters_of(module)
            lr = rate(i) if rate else 0.1 / (i + 1)
            hook = adjust and adjust(i)
            with at_rest(names[name] for name in rest), Passes() as passes:
                loss = objective(i % 4)
                sums = answer(Ask(module, lambda: given, loss, training, lr, hook, None, seed=i))
                if seen is not None:
                    seen.append(sums is not None)
                with torch_scope(i):
                    sums = sums or fit(module, given, loss, training, lr, hook)
            return {n: p.detach().clone() for n, p in names.items()}, sums, passes.flops

        return trained

    given = [batches(seed, *some) for seed, some in zip(seeds or range(len(sizes)), sizes, strict=True)]
    return together([visit(i, some) for i, some in enumerate(given)], stacked.train)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_unequal_clients_train_as_with_torch_alone(way, few):
    with double():
        module = module_of("none").double()
        training, seen = Training(**way), []
        found = side_by_side(module, training, seen=seen)
        assert seen == [True] * 5
        for i, (params, sums, _) in enumerate(found):
            load(module, start(module, i))
            own = list(parameters_of(module).values())
            kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
            more = {"momentum": way["momentum"]} if "momentum" in way else {}
            lr, decay = 0.1 / (i + 1), training.weight_decay
            optimizer = kinds[training.optimizer](own, lr, weight_decay=decay, **more)
            total = 0.0
            for x, y in batches(i, *SIZES[i]):
                optimizer.zero_grad()
                value = objective(i % 4)(module(x), y)
                value.backward()
                if training.clip:
                    torch.nn.utils.clip_grad_norm_(own, training.clip)
                optimizer.step()
                total += value.item() * len(y)
            assert sums["train_samples"] == sum(SIZES[i]) and sums["steps"] == len(SIZES[i])
            assert sums["train_loss"] == pytest.approx(total, abs=1e-10)
            for name, p in parameters_of(module).items():
                torch.testing.assert_close(params[name], p.detach(), rtol=0, atol=1e-10)
    cached_module.cache_clear()


def test_flops_are_those_of_clients_alone(few):
    module, training = module_of(), Training()
    together_, alone = side_by_side(module, training), [side_by_side(module, training, [sizes])[0] for sizes in SIZES]
    assert [flops for *_, flops in together_] == [flops for *_, flops in alone]


def test_a_client_does_not_change_the_bits_of_the_others(few):
    module, training = module_of(), Training(momentum=0.9)
    before = side_by_side(module, training)
    after = side_by_side(module, training, seeds=[0, 1, 99, 3, 4])
    for i in (0, 1, 3, 4):
        assert_same(before[i][0], after[i][0])
        assert before[i][1] == after[i][1]
    assert any((before[2][0][name] != after[2][0][name]).any() for name in before[2][0])


def test_a_client_alone_has_the_bits_of_before():
    module, training = module_of(), Training(momentum=0.9)
    ((params, sums, _),) = side_by_side(module, training, [(5, 3)])
    load(module, start(module, 0))
    assert sums == fit(module, batches(0, 5, 3), objective(0), training, 0.1)
    assert_same(params, {n: p.detach() for n, p in parameters_of(module).items()})


def test_frozen_layers_stay_and_are_trained_again_afterwards(few):
    module, training = module_of(), Training(momentum=0.9, weight_decay=0.1)
    names = list(parameters_of(module))
    rest, seen = names[:2], []
    for i, (params, *_) in enumerate(side_by_side(module, training, rest=rest, seen=seen)):
        first = start(module, i)
        assert all(torch.equal(params[name], first[name]) for name in rest)
        assert not torch.equal(params[names[-1]], first[names[-1]])
    assert all(seen) and all(p.requires_grad for p in parameters_of(module).values())


def test_hooks_may_keep_what_they_see(few):
    """As SCAFFOLD's, which sums the gradients."""
    module, training = module_of(), Training()

    def kept(into):
        def adjust(i):
            def hook(module):
                for name, p in parameters_of(module).items():
                    into.setdefault((i, name), torch.zeros_like(p)).add_(gradient := cast(torch.Tensor, p.grad))
                    gradient.mul_(0.5).add_(p.detach(), alpha=0.1)

            return hook

        return adjust

    sums, alone = {}, {}
    found = side_by_side(module, training, adjust=kept(sums), seen=(seen := []))
    with_one = [side_by_side(module, training, [SIZES[0]], adjust=kept(alone))[0]]
    assert all(seen)
    for name, t in with_one[0][0].items():
        torch.testing.assert_close(found[0][0][name], t)
        torch.testing.assert_close(sums[0, name], alone[0, name])


def test_learning_rates_of_each_step(few):
    module, training = module_of("none"), Training()
    rates = side_by_side(module, training, rate=lambda i: lambda step: 0.1 / (1 + step + i))
    for i, sizes in enumerate(SIZES):
        load(module, start(module, i))
        fit(module, batches(i, *sizes), objective(i % 4), training, lambda step, i=i: 0.1 / (1 + step + i))
        for name, p in parameters_of(module).items():
            torch.testing.assert_close(rates[i][0][name], p.detach(), rtol=1e-4, atol=1e-6)


EACH_ITS_OWN = [(2,), (3,), (4,), (5,), (6,)]


@pytest.fixture
def drawing():
    """Return a function that lets a new module draw: in all convolutions' outputs, or in its input."""
    cached_module.cache_clear()

    def made(draw, convolutions: bool = True):
        module = module_of().double()
        for layer in module.modules() if convolutions else ():
            if isinstance(layer, torch.nn.Conv2d):
                layer.register_forward_hook(lambda _, inputs, output: draw(output))
        if not convolutions:
            module.register_forward_pre_hook(lambda _, inputs: draw(inputs[0]))
        return module

    with double():
        yield made
    cached_module.cache_clear()


@pytest.mark.parametrize(
    ("convolutions", "inplace"), [(True, True), (True, False), (False, False)], ids=["in place", "a copy", "input"]
)
@pytest.mark.parametrize("sizes", [SIZES, EACH_ITS_OWN], ids=["stacked", "each its own size"])
def test_dropout_is_that_of_clients_alone(few, drawing, sizes, convolutions, inplace):
    module, seen = drawing(torch.nn.Dropout(0.3, inplace), convolutions), []
    found = side_by_side(module, Training(momentum=0.9), sizes, seen=seen)
    assert seen == [True] * 5
    for i, (params, sums, _) in enumerate(found):
        load(module, start(module, i))
        with torch_scope(i):
            alone = fit(module, batches(i, *sizes[i]), objective(i % 4), Training(momentum=0.9), 0.1 / (i + 1))
        assert sums["train_loss"] == pytest.approx(alone["train_loss"], abs=1e-10)
        for name, p in parameters_of(module).items():
            torch.testing.assert_close(params[name], p.detach(), rtol=0, atol=1e-10)


class SameForAll(torch.nn.Module):
    """Draws what does not depend on samples or parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.nn.functional.dropout(torch.ones(1), 0.5, self.training)


@pytest.mark.parametrize("draw", [torch.nn.Dropout2d(), torch.nn.RReLU(), SameForAll()], ids=["2d", "relu", "same"])
@pytest.mark.parametrize("sizes", [SIZES, EACH_ITS_OWN], ids=["stacked", "each its own size"])
def test_networks_that_draw_otherwise_train_alone(few, drawing, draw, sizes):
    seen = []
    side_by_side(drawing(draw), Training(), sizes, seen=seen)
    assert seen == [False] * 5


def test_fewer_clients_than_company_train_alone():
    seen = []
    side_by_side(module_of(), Training(), SIZES[: stacked.LEAST - 1], seen=seen)
    assert seen == [False] * (stacked.LEAST - 1)


# the order of visits


def test_contexts_end_in_reverse_order_and_results_keep_theirs(few):
    module, order = module_of(), []

    def visit(i):
        def run():
            load(module, start(module, i))
            order.append(f"{i} begins")
            for k in range(2):
                assert answer(Ask(module, lambda: batches(i, 4), objective(), Training(), 0.1, None, None, 0))
                order.append(f"{i} trained {k}")
            return i

        return run

    assert together([visit(i) for i in range(3)], stacked.train) == [0, 1, 2]
    first, then = [f"{i} begins" for i in range(3)], [f"{i} trained 0" for i in (2, 1, 0)]
    assert order == first + then + [f"{i} trained 1" for i in (0, 1, 2)]


def test_an_error_of_one_visit_ends_the_others_and_frees_the_module(few):
    module, ended = module_of(), []

    def visit(i):
        def run():
            try:
                with at_rest(parameters_of(module).values()):
                    if i == 2:
                        raise RunFailed("the third")
                    answer(Ask(module, lambda: [], objective(), Training(), 0.1, None, None, 0))
            finally:
                ended.append(i)

        return run

    with pytest.raises(RunFailed, match="the third"):
        together([visit(i) for i in range(4)], stacked.train)
    assert ended == [2, 1, 0]
    assert all(p.requires_grad for p in parameters_of(module).values())


# rounds

CLIENTS = {"count": 14, "cohort": 12, "capacities": [0.3, 0.1]}
METHODS = (
    {"name": "heterofl", "mask": "zero", "label_rows": "present"},
    {"name": "nefl", "variant": "W"},
    {"name": "fedrep"},
    {"name": "scaffold"},
    {"name": "ditto"},
    {"name": "pfedme", "inner_steps": 2},
    {"name": "fiarse"},
    {"name": "pruning_greedy"},
)


def started(tmp_path, together_: int, chunk: int = 1, **sections):
    training = {"steps": None, "epochs": 2, "batch_size": 3, "momentum": 0.9, "clip": 1}
    given = {
        "rounds": 2,
        "clients": CLIENTS,
        "training": training,
        "run": {"together": together_, "chunk": chunk},
        "partition": {"name": "dirichlet", "alpha": 0.5, "min_samples": 1},
        "data": {"samples": 140},
    }
    return simulate(tiny(**given | sections), tmp_path / f"{together_}-{chunk}")


def rounds(*arguments, **sections):
    simulation = started(*arguments, **sections)
    lines = run(simulation)
    return dict(leaves(simulation.state)), lines


@pytest.mark.parametrize("method", METHODS, ids=[method["name"] for method in METHODS])
def test_rounds_equal_those_of_clients_alone(method, few, tmp_path):
    # float32: rounding of other sums, through 2 rounds
    clients = {**CLIENTS, "capacities": [0.3]} if method["name"] in ("scaffold", "ditto", "pfedme") else CLIENTS
    a, first = rounds(tmp_path, 1, method=method, clients=clients)
    b, second = rounds(tmp_path, 8, method=method, clients=clients)
    assert any((a[path] != b[path]).any() for path in a), "nothing was trained together"
    for path, t in a.items():
        torch.testing.assert_close(b[path], t, rtol=1e-3, atol=2e-5)
    assert first[-1]["train_flops"] == second[-1]["train_flops"]
    assert first[-1]["train_loss"] == pytest.approx(second[-1]["train_loss"], rel=1e-3)


def test_groups_do_not_depend_on_jobs(few, tmp_path):
    (a, first), (b, second) = (rounds(tmp_path, 8, chunk) for chunk in (1, 100))
    assert_same(a, b)
    assert first == second


def test_a_resumed_run_has_the_same_groups(few, tmp_path):
    """Of clients that keep layers."""
    state, lines = rounds(tmp_path / "straight", 4, method={"name": "fedrep"})
    first, second = (
        started(tmp_path / name, 4, chunk, method={"name": "fedrep"}) for name, chunk in (("a", 1), ("b", 8))
    )
    run(first, 1)
    first.save(tmp_path / "saved")
    second.restore(tmp_path / "saved")
    assert run(second) == lines[1:]
    assert_same(dict(leaves(second.state)), state)


def test_the_number_is_part_of_a_result():
    assert tiny(run={"together": 1}).result_config() != tiny(run={"together": 8}).result_config()


@pytest.mark.parametrize("count", [1, 5, 8, 11, 40])
@pytest.mark.parametrize("chunk", [8, 16, 64])
def test_groups_of_jobs_are_groups_of_the_cohort(count, chunk):
    whole = [(part.start, part.stop) for part in aligned(count, 8)]
    jobs = [
        (job.start + part.start, job.start + part.stop)
        for job in aligned(count, chunk)
        for part in aligned(job.stop - job.start, 8)
    ]
    assert jobs == whole


# the choice


def test_narrow_networks_have_company_and_wide_ones_none():
    training = Training(batch_size=20)
    resnet = MODELS["resnet18"]()
    assert stacked.most(Net(resnet), training) == 1
    assert stacked.most(Net(MODELS["digits_cnn"](), 0.0625), training) == stacked.MOST
    # few calls with much work each
    assert stacked.most(Net(MODELS["mcmahan_cnn"]()), training) == 1
    # eight gain what more would, up to a step that gains nothing
    many = Net(MODELS["resnet8"](input=(1, 28, 28)), 0.25)
    assert {stacked.most(many, Training(batch_size=size)) for size in range(1, 80)} == {8, 16, 32, 64}
    assert stacked.most(many, Training(batch_size=90)) == 1


@pytest.mark.parametrize("group", [1, 16])
def test_jobs_cost_calls_too_and_company_shares_them(group):
    net, sizes = Net(MODELS["digits_cnn"](), 0.0625), np.array([100, 30] * 16)
    cohort = {(0, "narrow"): (prefix(net, net), [Client(i, 0.0625, 0) for i in range(32)])}
    training = Training(batch_size=20, steps=None, epochs=2)
    chunks = Division(training, sizes, 2, "auto", lambda net: group).chunks(cohort)
    samples, steps = 2 * 130 * 16, 2 * (5 + 2) * 16
    assert sum(chunk.cost for chunk in chunks) == samples * net.macs + steps * 1e7 / group
    assert sum(chunk.cost for chunk in chunks) == pytest.approx(chunks[0].cost * len(chunks))
