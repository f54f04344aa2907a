"""Steps: the state of a module between clients, and static steps compared with eager ones."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, bound, client_data, updated
from torch import nn
from torch.func import functional_call

import rayfl.methods.base as base
from rayfl.core.joined import call, descend, joined, parameters_of
from rayfl.core.net import Net, cached_module, load, params_of
from rayfl.core.seeds import torch_generator, torch_scope
from rayfl.core.tensors import as_vector
from rayfl.data.goal import Classes
from rayfl.methods import METHODS
from rayfl.models import MODELS
from rayfl.training import graphs
from rayfl.training.settings import Training
from rayfl.training.steps import Objective, StaticSteps, Steps, fit, static_steps

CPU = torch.device("cpu")
GOAL = Classes(4)
WAYS = {
    "plain": {},
    "clip": {"clip": 0.5},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "adamw and clip": {"optimizer": "adamw", "weight_decay": 0.1, "clip": 1.0, "lr": 0.01},
    "bf16": {"precision": "bf16"},
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def network(norm: str = "static_bn") -> nn.Module:
    """Return a new module with fixed initial values."""
    with torch_scope(5):
        return Net(MODELS["digits_cnn"](classes=4, norm=norm), 0.25).build()


def batches(seed: int, *sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch_generator(seed, "test:batches")
    return [
        (torch.randn(n, 8, 8, 1, generator=generator).permute(0, 3, 1, 2), torch.randint(4, (n,), generator=generator))
        for n in sizes
    ]


def objective(*absent: int) -> Objective:
    present = torch.ones(4, dtype=torch.bool)
    present[list(absent)] = False
    return Objective(GOAL, "zero" if absent else "none", present if absent else None)


def trained(module: nn.Module, start: dict, given, way: dict, loss: Objective, static: bool):
    load(module, start)
    rate = (lambda step: 0.1 / (step + 1)) if way.get("clip") else Training(**way).lr
    training = Training(batch_size=4, **way)
    metrics = fit(module, given, loss, training, rate, static=static)
    return {name: t.clone() for name, t in params_of(module).items()}, metrics


# --- what a module keeps ---


def test_descend_equals_torchs_fused_sgd():
    for i, n in enumerate([1, 7, 16, 33, 1000, 53_194]):
        generator = torch_generator(i, "test:sgd")
        p, g = torch.randn(2, n, generator=generator)
        rate, module = 0.037 * 10 ** (i - 3), nn.ParameterList([p.clone()])
        module[0].grad = g.clone()
        descend(module.parameters(), rate)
        expected = nn.Parameter(p.clone())
        expected.grad = g.clone()
        torch.optim.SGD([expected], rate, fused=True).step()
        assert torch.equal(module[0].data, expected.data)


@pytest.mark.parametrize("most", [1e-3, 0.5, 1e3])
@pytest.mark.parametrize("frozen", [(), ("head.bias",)])
def test_clipping_equals_torchs(most, frozen):
    module = network()
    for name in frozen:
        parameters_of(module)[name].requires_grad_(False)
    module(torch.randn(5, 1, 8, 8)).square().mean().backward()
    whole = joined(module)
    before = whole.gradient.clone()
    nn.utils.clip_grad_norm_(whole.parameters, most)
    expected = whole.gradient.clone()
    whole.gradient.copy_(before)
    whole.clip(most)
    assert torch.equal(whole.gradient, expected) and (most == 1e3) == torch.equal(expected, before)


@ways
def test_a_used_module_trains_like_a_new_one(way):
    used, start = network(), params_of(network())
    trained(used, start, batches(1, 4, 4, 2), way, objective(), False)
    trained(used, start, batches(2, 4), way | {"momentum": 0.5} if not way else {}, objective(1), False)
    again = trained(used, start, batches(3, 4, 4, 1), way, objective(), False)
    fresh = trained(network(), start, batches(3, 4, 4, 1), way, objective(), False)
    assert_same(again[0], fresh[0])
    assert again[1] == fresh[1]


def test_clients_share_vector_gradient_and_optimizer():
    module, training = network(), Training(momentum=0.9)
    steps = []
    for seed in range(2):
        steps.append(Steps(module, objective(), training))
        steps[-1].run(*batches(seed, 4)[0], 0.1)
    first, second = steps
    assert first.joined is second.joined and first.optimizer is second.optimizer
    vector, gradient = first.joined.vector.data, first.joined.gradient
    for p in module.parameters():
        assert p.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
        assert p.grad.untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr()


def test_parameters_that_were_joined_again_are_found():
    module, start = network(), params_of(network())
    first = Steps(module, objective(), Training(momentum=0.9))
    first.run(*batches(0, 4)[0], 0.1)
    before = first.joined
    extra = torch.zeros(3)
    as_vector([extra, *parameters_of(module).values()])
    assert not before.holds()
    for static in (False, True):
        found = trained(module, start, batches(1, 4, 4), {"momentum": 0.9}, objective(), static)
        assert_same(found[0], trained(network(), start, batches(1, 4, 4), {"momentum": 0.9}, objective(), False)[0])


def test_parameters_without_gradient_are_ignored_until_they_have_one():
    """Weight decay would change it."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.uses_b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3)), False

        def forward(self, x):
            return (self.a.sum() + (self.b.sum() if self.uses_b else 0)) * x

    module, training = Two(), Training(weight_decay=0.5)

    def step():
        fit(module, [(torch.ones(1), torch.zeros(1))] * 2, lambda out, y: out.mean(), training, 0.1)

    step()
    a = 0.95 * (0.95 - 0.1) - 0.1
    assert module.a.tolist() == pytest.approx([a] * 2) and module.b.tolist() == [1, 1, 1]
    module.uses_b = True
    step()
    assert module.b.tolist() == pytest.approx([a] * 3)


def test_a_contiguous_payload_is_loaded_like_any_other():
    module, flat = network(), torch.randn(sum(p.numel() for p in network().parameters()))
    parts = flat.split([p.numel() for p in module.parameters()])
    given = {n: part.view(p.shape) for (n, p), part in zip(module.named_parameters(), parts, strict=True)}
    load(module, given)
    assert_same(params_of(module), given)
    assert (
        not torch.equal(flat, torch.zeros_like(flat)) and module.head.bias.data_ptr() != given["head.bias"].data_ptr()
    )
    scattered = {name: t.clone() + 1 for name, t in reversed(given.items())}
    load(module, scattered)
    assert_same(params_of(module), {name: scattered[name] for name in given})


def test_parts_of_a_module_that_were_evaluated_train_again():
    """Every client has a new wrapper around the same module, which was in evaluation mode."""
    inner = network()
    inner.eval()
    outer = nn.Sequential(inner)
    assert outer.training
    fit(outer, batches(0, 2), objective(), Training(), 0.1)
    assert all(m.training for m in inner.modules())


# --- static steps ---


@ways
@pytest.mark.parametrize("norm", ["static_bn", "group"])
def test_static_steps_equal_steps_bit_for_bit(way, norm):
    """Three clients of one module with different masks; with batch norm also smaller batches, which are not padded."""
    sizes = [(4, 4), (4, 4, 4), (4,)] if norm == "group" else [(4, 4, 1), (3,), (4, 2)]
    module, other, start = network(norm), network(norm), params_of(network(norm))
    kept = set()
    for seed, (given, absent) in enumerate(zip(sizes, ([3], [0, 1], [2]), strict=True)):
        work = batches(seed, *given), way, objective(*absent)
        expected, found = trained(other, start, *work, False), trained(module, start, *work, True)
        assert_same(found[0], expected[0])
        assert found[1] == expected[1]
        kept.add(static_steps(module, work[2], Training(batch_size=4, **way)))
    assert len(kept) == 1


@ways
def test_a_padded_batch_equals_the_smaller_one_up_to_rounding(way):
    """Old contents of the memory have no effect, even if they are not finite."""
    start = params_of(network("group"))
    module = network("group")
    trained(module, start, [(torch.full_like(x, float("inf")), y) for x, y in batches(9, 4)], way, objective(), True)
    expected = trained(network("group"), start, batches(1, 4, 4, 1), way, objective(), False)
    found = trained(module, start, batches(1, 4, 4, 1), way, objective(), True)
    # Adam's first steps are the rate times the sign of the gradient, whatever its size
    tolerance = 2e-2 if way.get("precision") == "bf16" or "optimizer" in way else 1e-6
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=tolerance)
    assert found[1]["train_samples"] == 9 and found[1]["train_loss"] == pytest.approx(expected[1]["train_loss"], 1e-2)


def test_the_padding_label_is_not_part_of_the_mean():
    logits = torch.randn(3, 4, generator=torch_generator(0, "test:logits"))
    mean = GOAL.loss(logits, torch.tensor([1, GOAL.padding, 2]))
    assert mean == F.cross_entropy(logits[[0, 2]], torch.tensor([1, 2]))


@ways
def test_static_steps_with_frozen_parameters(way):
    """Clients of one module that train different parts of it, or all."""
    module = network("group")
    start = {name: t.clone() for name, t in params_of(module).items()}
    first, *_, last = parameters_of(module)
    for resting in (first, last, None, first):
        for name, parameter in parameters_of(module).items():
            parameter.requires_grad_(name != resting)
        (plain, numbers), (static, counted) = (
            trained(module, start, batches(3, 4, 4), way, objective(), static) for static in (False, True)
        )
        assert_same(static, plain)
        assert counted == numbers
        assert {name for name in start if torch.equal(plain[name], start[name])} == {resting} - {None}


def test_conditions_of_static_steps(monkeypatch):
    made = []
    monkeypatch.setattr("rayfl.training.steps.static_steps", lambda *given: made.append(given) or Steps(*given))
    module, training = network(), Training()

    def steps(loss=None, **given):
        made.clear()
        fit(module, batches(0, 2), loss or objective(), training, 0.1, static=True, **given)
        return bool(made)

    assert steps()
    assert not steps(adjust=lambda module: None)
    assert not steps(project=lambda module: None)
    assert not steps(momentum={})
    assert not steps(loss=lambda logits, y: logits.mean())
    norm = module.norm1
    norm.running = torch.zeros(8), torch.ones(8)
    assert not steps()


@pytest.mark.parametrize("name", ["fedavg", "heterofl", "fedrolex", "lg_fedavg", "standalone", "fedprox", "scaffold"])
def test_a_method_with_static_steps_gives_the_same_update(name, monkeypatch):
    method = bound(METHODS[name](), 1.0, 0.5, steps=3, batch_size=2)
    state, work = method.init(), [client_data(0, 1, 1, 2), client_data(3, 3, 0, 2)]
    eager = [updated(method, state, 0.5, data, seed=i) for i, data in enumerate(work)]
    calls = []

    def static(*given, goal):
        calls.append(given)
        return fit(*given[:-1], True, goal=goal)

    monkeypatch.setattr(base, "fit", static)
    found = [updated(method, state, 0.5, data, seed=i) for i, data in enumerate(work)]
    assert len(calls) == 2 and all(call[-1] is False for call in calls)
    for a, b in zip(found, eager, strict=True):
        assert_same(a.sums, b.sums)
        assert a.metrics == b.metrics


def test_bf16_changes_the_result():
    start = params_of(network())
    full, half = (trained(network(), start, batches(0, 4, 4), way, objective(), False) for way in ({}, WAYS["bf16"]))
    assert not all(torch.equal(t, half[0][name]) for name, t in full[0].items())
    torch.testing.assert_close(half[0], full[0], rtol=0, atol=2e-2)
    assert {t.dtype for t in half[0].values()} == {torch.float32}


@pytest.mark.parametrize("static", [False, True])
def test_parts_of_a_batch_add_up_to_its_gradient(static):
    start, given = params_of(network("none")), batches(0, 4, 3)
    way = {"momentum": 0.9}
    whole, said = trained(network("none"), start, given, way, objective(), static)
    for accumulate in (2, 3, 5):
        parts, metrics = trained(network("none"), start, given, way | {"accumulate": accumulate}, objective(), static)
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
        assert metrics["steps"] == said["steps"] and abs(metrics["train_loss"] - said["train_loss"]) < 1e-5


# --- a recording ---


@pytest.fixture
def simulated(monkeypatch):
    """What a simulated CUDA does, by words: "record" and "end" of a recording, "side" for another stream."""
    log: list[str] = []

    class Stream:
        def __init__(self, device=None):
            log.append("new stream")

        def wait_stream(self, other):
            log.append("wait")

    class Within:
        def __init__(self, *given, **options):
            self.recording = bool(options)

        def __enter__(self):
            log.append("record" if self.recording else "side")

        def __exit__(self, *error):
            log.append("end")

    own = object.__new__(Stream)
    generator = SimpleNamespace(
        clone_state=lambda: "copy", graphsafe_set_state=lambda state: log.append(f"{state} of the generator")
    )
    cuda = SimpleNamespace(
        Stream=Stream,
        stream=Within,
        graph=Within,
        device=Within,
        current_stream=lambda device: own,
        set_stream=lambda stream: log.append("own stream" if stream is own else "another stream"),
        default_generators=[generator],
        graph_pool_handle=lambda: (0, 1),
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: log.append("replay")),
    )
    monkeypatch.setattr(graphs.torch, "cuda", cuda)
    for cached in (graphs._pool, graphs._stream):
        cached.cache_clear()
    yield log
    for cached in (graphs._pool, graphs._stream):
        cached.cache_clear()


GPU = torch.device("cuda", 0)


def test_a_recording_follows_warm_up_runs(simulated):
    """Every call is one run or one replay; recording does not run. All recordings share a stream."""
    again = graphs.Recorded(lambda: simulated.append("body"), GPU)
    for i in range(graphs.WARMUP):
        again()
        assert simulated == ["new stream"] * (i == 0) + ["wait", "side", "body", "end", "wait"]
        simulated.clear()
    again()
    assert [word for word in simulated if word != "side"][-4:] == ["record", "body", "end", "replay"]
    simulated.clear()
    again()
    assert simulated == ["replay"]
    simulated.clear()
    graphs.Recorded(lambda: None, GPU)()
    assert "new stream" not in simulated


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not permitted")])
def test_a_recording_that_fails_leaves_none_and_steps_run_eagerly(simulated, error):
    """Not a replay of a graph that was never recorded."""
    steps = []

    def body():
        if simulated[-1] == "record":
            raise error
        steps.append(len(steps))

    again = graphs.Recorded(body, GPU)
    for _ in range(graphs.WARMUP):
        again()
    with pytest.warns(UserWarning, match=f"cannot be recorded as a CUDA graph, and runs eagerly .*: {error}"):
        again()
    assert again.graph is None and len(steps) == graphs.WARMUP + 1
    simulated.clear()
    again()
    assert len(steps) == graphs.WARMUP + 2 and simulated == ["wait", "side", "end", "wait"]


def test_after_a_recording_that_fails_others_have_a_stream_a_pool_and_a_generator(simulated):
    again = graphs.Recorded(lambda: simulated.append("body"), GPU)
    again.runs = graphs.WARMUP
    again.body = lambda: (_ for _ in ()).throw(RuntimeError("not permitted"))
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="not permitted"):
        again()
    assert simulated[simulated.index("record") :][:4] == ["record", "end", "own stream", "copy of the generator"]
    assert graphs._pool.cache_info().currsize == 0


def test_cached_modules_are_recorded():
    """Static steps are cached per module."""
    net = Net(MODELS["digits_cnn"](), 0.125)
    a, b = (static_steps(cached_module(net, CPU), Objective(Classes(10), "none", None), Training()) for _ in range(2))
    assert a is b and isinstance(a, StaticSteps)
    other = static_steps(cached_module(net, CPU), Objective(Classes(10), "none", None), Training(clip=1.0))
    assert other is not a


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def test_a_call_with_other_parameters_equals_torchs():
    module, x = Tied(), torch.randn(2, 3)
    given = {"first.weight": torch.randn(3, 3, requires_grad=True)}
    own = dict(module.named_parameters(remove_duplicate=False))
    y = call(module, given, x)
    assert torch.equal(y, functional_call(module, given, (x,)))
    y.sum().backward()
    assert given["first.weight"].grad is not None and module.first.weight.grad is None
    after = dict(module.named_parameters(remove_duplicate=False))
    assert own.keys() == after.keys() and all(own[name] is after[name] for name in own)
    with pytest.raises(RuntimeError):
        call(module, given, x[:, :2])
    assert module.second.weight is module.first.weight is own["first.weight"]
