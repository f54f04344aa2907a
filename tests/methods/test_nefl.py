"""NeFL against manual computations."""

import pickle

import pytest
import torch
from helpers import Shuffled, assert_same, folded, images, one_round, run, simulate, tiny, updated, visit
from torch import nn

from rayfl.config import ConfigError, parse
from rayfl.core.net import Net, cached_module
from rayfl.core.seeds import torch_generator
from rayfl.engine.files import checksum
from rayfl.engine.worker import Worker
from rayfl.methods import METHODS, Task
from rayfl.methods.depth.nefl import initial_steps
from rayfl.methods.sizes import Submodel, published
from rayfl.models import MODELS
from rayfl.models.base import Model
from rayfl.models.layers import Step
from rayfl.training.settings import Training

NeFL = METHODS["nefl"]

FIVE = (
    Submodel(capacity=0.2, width=0.2),
    Submodel(capacity=0.4, width=0.4, blocks="10 11 11 11"),
    Submodel(capacity=0.6, width=0.6),
    Submodel(capacity=0.8, width=0.8, blocks="10 11 11 11"),
    Submodel(capacity=1, width=1),
)
"""Submodels 1, 3 and 5 contain the second block of the first stage."""

TWO = (Submodel(capacity=0.5, width=0.5, blocks="10 10 10 00"), Submodel(capacity=1, width=1))
BLOCK = "stage1.1.residual"
CONV = f"{BLOCK}.conv1.weight"


def bound(method, model=None, *, norm="static_bn", **training):
    """Return the method bound to a narrow ResNet18 for images of one channel."""
    model = model or MODELS["resnet18"](channels=5, norm=norm, input=(1, 8, 8), classes=4)
    nets = {submodel.capacity: Net(model) for submodel in reversed(method.submodels)}
    return method.bind(Task(model, Training(**training), nets, 1.0, clients=10))


# NeFedAvg


def test_the_papers_example(clients_answer):
    """A block in the submodels 1, 3 and 5 with 2, 3 and 2 clients: the bands of its channels are divided by 7, 5 and
    2. Clients of submodels 2 and 4 count for the stem, not for the block."""
    method = bound(NeFL(submodels=FIVE), norm="none")
    state = method.init()
    answers = {0.2: 1, 0.4: 1000, 0.6: 10, 0.8: 1000, 1: 100}
    cohort = [0.2, 0.2, 0.6, 0.6, 0.6, 1, 1, 0.4, 0.8]
    clients_answer(*(answers[c] for c in cohort))
    new = one_round(method, state, *((c, images(0)) for c in cohort))["params"]
    bands = [(2 * 1 + 3 * 10 + 2 * 100) / 7, (3 * 10 + 2 * 100) / 5, 2 * 100 / 2]
    expected = torch.tensor([bands[0], bands[1], bands[1], bands[2], bands[2]])
    # an element of row o and column i is in the bands of both: in the outer one
    outer = torch.maximum(torch.arange(5)[:, None], torch.arange(5))
    for pixel in range(9):
        torch.testing.assert_close(new[CONV].flatten(2)[:, :, pixel], expected[outer], rtol=1e-6, atol=0)
    all_bands = [(232 + 2000) / 9, (230 + 2000) / 7, (230 + 1000) / 6, (200 + 1000) / 3, 200 / 2]
    torch.testing.assert_close(new["conv.weight"][:, 0, 0, 0], torch.tensor(all_bands), rtol=1e-6, atol=0)


def test_inconsistent_parameters_are_averaged_inside_a_submodel(clients_answer):
    """Two clients of the small submodel return 1 and 3, one of the large returns 100."""
    method = bound(NeFL(submodels=TWO))
    clients_answer(1, 3, 100)
    new = one_round(method, method.init(), (0.5, images(0)), (0.5, images(1)), (1, images(0)))
    assert new.keys() == {"params", "submodel 1", "submodel 2"}
    assert "stage1.0.residual.step.scale" in new["submodel 1"]
    assert "stage1.1.residual.step.scale" in new["submodel 2"].keys() - new["submodel 1"].keys()
    for group, value in (("submodel 1", 2), ("submodel 2", 100)):
        parameters = [t for name, t in new[group].items() if "running" not in name]
        assert all((t == value).all() for t in parameters) and len(parameters) > 8
    assert not new["params"].keys() & new["submodel 2"].keys()
    assert {"norm" in name or "step" in name for name in new["params"]} == {False}
    assert {"norm" in name or "step" in name for name in new["submodel 2"]} == {True}


def test_an_untrained_submodel_is_unchanged():
    """Its norms, steps, statistics and blocks are unchanged bit for bit."""
    method = bound(NeFL(submodels=TWO), lr=0.5)
    state = method.init()
    new = one_round(method, state, (0.5, images(0, 1, 2)), (0.5, images(3)))
    assert_same(new["submodel 2"], state["submodel 2"])
    assert not torch.equal(new["submodel 1"]["norm.running_mean"], state["submodel 1"]["norm.running_mean"])
    exclusive = [name for name in state["params"] if name.startswith(("stage1.1.", "stage4.0.residual", "stage4.1."))]
    assert len(exclusive) == 6
    assert [name for name in exclusive if not torch.equal(new["params"][name], state["params"][name])] == []
    assert (new["params"]["conv.weight"][:3] != state["params"]["conv.weight"][:3]).all()
    assert torch.equal(new["params"]["conv.weight"][3:], state["params"]["conv.weight"][3:])


def test_a_block_without_holders_is_not_set_to_zero():
    """Unlike the authors' code: a 7 stays a 7."""
    method = bound(NeFL(submodels=TWO))
    state = method.init()
    seven = {name: torch.full_like(t, 7) for name, t in state["params"].items()}
    new = one_round(method, state | {"params": seven}, (0.5, images(0, 1)))["params"]
    assert (new[CONV] == 7).all() and (new["stage4.0.residual.conv1.weight"] == 7).all()


@pytest.mark.parametrize(("projections", "value"), [("held", 55), ("with_block", 100)])
def test_projections_of_omitted_blocks(projections, value, clients_answer):
    """The small submodel returns 10, the large one 100; the small one has the first block of stage 2, and of stage 4
    the projection alone. Its norm is its own."""
    method = bound(NeFL(submodels=TWO, projections=projections))
    clients_answer(10, 100)
    new = one_round(method, method.init(), (0.5, images(0)), (1, images(0)))
    assert (new["params"]["stage2.0.projection.conv.weight"][:5, :3] == 55).all()
    assert (new["params"]["stage4.0.projection.conv.weight"][:20, :10] == value).all()
    assert (new["submodel 1"]["stage4.0.projection.norm.weight"] == 10).all()


# step sizes


def test_initial_steps_of_the_papers_vectors():
    """NeFL-DO as in the authors' code, if it differs from the blocks."""
    expected = {
        ("resnet18", 0.2): "13 00 13 00",
        ("resnet18", 0.4): "11 13 00 20",
        ("resnet18", 0.6): "11 11 11 20",
        ("resnet18", 0.8): "20 13 00 11",
        ("resnet18", 1): "11 11 11 11",
        ("resnet34", 0.2): "300 4000 600000 300",
        ("resnet34", 0.4): "111 1111 140001 300",
        ("resnet34", 0.6): "111 1111 140001 201",
        ("resnet34", 0.8): "111 3001 140001 111",
        ("resnet56", 0.2): "180000000 180000000 180000000",
        ("resnet56", 0.4): "117000000 117000000 111600000",
        ("resnet56", 0.6): "111600000 111600000 111114000",
        ("resnet56", 0.8): "111111111 111111120 111111300",
        ("resnet110", 0.2): "111111111111111300 111f00000000000000 11g000000000000000",
        ("resnet110", 0.4): "111111111111150000 111111c00000000000 111111c00000000000",
        ("resnet110", 0.6): "111111111111111120 111111111111600000 111111111900000000",
        ("resnet110", 0.8): "111111111111111300 111111111111111300 111111111111150000",
    }
    for (name, capacity), text in expected.items():
        model = MODELS[name]()
        submodel = published(model, ("D",), (1.0, 0.8, 0.6, 0.4, 0.2))[capacity]
        steps = initial_steps(model.blocks, submodel.without(model))
        # f, g, c: 15, 16, 12
        assert [[steps.get(path, 0) for path in stage] for stage in model.blocks] == [
            [int(digit, 17) for digit in group] for group in text.split()
        ]


def steps_of(state, group):
    return {name: float(t) for name, t in state[group].items() if name.endswith("step.scale")}


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, [1, 1, 1]),
        ({"skipping_steps": True}, [2, 2, 4]),
        ({"skipping_steps": True, "learn_steps": False}, [2, 2, 4]),
        ({"learn_steps": False}, []),
    ],
)
def test_initial_step_sizes(fields, steps):
    """Blocks 10 10 10 00. Constant steps of 1 are left out."""
    method = bound(NeFL(submodels=TWO, **fields))
    state = method.init()
    assert list(steps_of(state, "submodel 1").values()) == steps
    assert list(steps_of(state, "submodel 2").values()) == [1] * 8 * bool(steps)


@pytest.mark.parametrize("learn_steps", [True, False])
def test_steps_are_trained_if_learn_steps(learn_steps):
    """Also with weight decay and momentum; the cached module can be trained again."""
    training = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "epochs": 2, "batch_size": 2}
    method = bound(NeFL(submodels=TWO, skipping_steps=True, learn_steps=learn_steps), **training)
    state = method.init()
    new = one_round(method, state, (0.5, images(0, 1, 2)), (0.5, images(0, 3)), (0.5, images(1)))
    before, after = steps_of(state, "submodel 1"), steps_of(new, "submodel 1")
    assert len(before) == 3 and [after[name] != before[name] for name in before] == [learn_steps] * 3
    assert (new["params"]["conv.weight"][:3] != state["params"]["conv.weight"][:3]).all()
    module = cached_module(method.net_at(0.5), torch.device("cpu"))
    assert all(p.requires_grad for p in module.parameters())


def test_a_step_size_multiplies_its_branch():
    """Half a step is a branch of half the size; a network of steps 1 is the plain one."""
    model = MODELS["resnet18"](channels=4, norm="none", input=(1, 8, 8), classes=4)
    module, x = Net(model, steps=True).build(), torch.randn(2, 1, 8, 8, generator=torch_generator(0, "test:x"))
    plain = Net(model).build()
    plain.load_state_dict({name: t for name, t in module.state_dict().items() if not name.endswith("step.scale")})
    assert torch.equal(module(x), plain(x))
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, Step):
                layer.scale.fill_(0.5)
        for name, p in plain.named_parameters():
            if "conv2" in name:
                p.mul_(0.5)
    torch.testing.assert_close(module(x), plain(x))


# norms


def test_own_norms():
    """A submodel deploys its own norms and statistics, which follow its batches, and a prefix of all other tensors."""
    method = bound(NeFL(submodels=TWO), lr=0.1)
    state = one_round(method, method.init(), (0.5, images(0, 1, 2)), (1, images(2, 3)))
    for capacity, group, channels in ((0.5, "submodel 1", 3), (1.0, "submodel 2", 5)):
        deployed = method.deploy(state, 1, capacity)
        own = state[group]
        assert torch.equal(deployed.params["norm.weight"], own["norm.weight"])
        assert torch.equal(deployed.params["conv.weight"], state["params"]["conv.weight"][:channels])
        assert deployed.params.keys() | deployed.statistics.keys() >= own.keys()
        assert deployed.statistics["norm.running_mean"].shape == (channels,)
        assert deployed.statistics.keys() == {name for name in own if "running" in name}
    data = images(0, 1, 2)
    [(x, _)] = data.in_order(3)
    seen = nn.functional.conv2d(x, method.init()["params"]["conv.weight"][:3], padding=1)
    by_hand = 0.9 * torch.ones(3) + 0.1 * seen.var((0, 2, 3))
    torch.testing.assert_close(state["submodel 1"]["norm.running_var"], by_hand)


@pytest.mark.parametrize("norms_init", ["sliced", "fresh"])
def test_initial_norms_are_the_models(norms_init, monkeypatch):
    """Norms of a pre-trained model: a prefix of its channels, or discarded."""
    method = bound(NeFL(submodels=TWO, norms_init=norms_init))
    model: type[Model] = type(method.task.model)
    initial, statistics = model.initial, model.statistics

    def numbered(tensors):
        return {name: torch.arange(t.numel()).float().reshape(t.shape) for name, t in tensors.items()}

    monkeypatch.setattr(model, "initial", lambda self, net: numbered(initial(self, net)))
    monkeypatch.setattr(model, "statistics", lambda self, net: numbered(statistics(self, net)))
    own = method.init()["submodel 1"]
    for kind, fresh in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
        expected = torch.arange(3.0) if norms_init == "sliced" else torch.full((3,), float(fresh))
        assert torch.equal(own[f"norm.{kind}"], expected)
    assert float(own["stage1.0.residual.step.scale"]) == 1


@pytest.mark.parametrize("layer_norms", ["shared", "own"])
def test_layer_norms_of_a_transformer(layer_norms):
    model = MODELS["vit_b_16"](layers=2, heads=2, head_width=4, patch=4, input=(1, 8, 8), classes=4)
    submodels = (Submodel(capacity=0.5, width=0.5, blocks="10"), Submodel(capacity=1, width=1))
    method = bound(NeFL(submodels=submodels, layer_norms=layer_norms, skipping_steps=True), model, lr=0.1)
    state = method.init()
    assert steps_of(state, "submodel 1") == {f"encoder.0.{part}.step.scale": 2 for part in ("attention", "mlp")}
    assert ("norm.weight" in state["params"]) == (layer_norms == "shared")
    if layer_norms == "own":
        assert state["submodel 1"]["norm.weight"].shape == (4,)
    new = one_round(method, state, (0.5, images(0, 1)), (1, images(2, 3)))
    deployed = method.deploy(new, 1, 0.5)
    assert deployed.statistics is None
    assert deployed.params.keys() == deployed.net.layout.shapes.keys()


def test_own_group_norms():
    names = []
    for layer_norms in ("shared", "own"):
        model = MODELS["resnet18"](channels=8, norm="group", input=(1, 8, 8), classes=4)
        state = bound(NeFL(submodels=TWO, layer_norms=layer_norms), model).init()
        names.append({name for name in state["submodel 1"] if "step" not in name})
        assert ("norm.weight" in state["params"]) == (layer_norms == "shared")
    assert not names[0] and {"norm.weight", "norm.bias"} < names[1]


@pytest.mark.parametrize("name", ["nefl", "depthfl", "depthfl_nefl", "scalefl_nefl"])
def test_no_scaler_with_running_statistics(name):
    with pytest.raises(ConfigError) as error:
        parse(METHODS[name], {"name": name, "scaler": True}, "test: method")
    assert str(error.value) == "test: method.scaler: True is not valid. Allowed: False"


# identities


def trained(tmp_path, method, model, **clients):
    """The state after two rounds."""
    simulation = simulate(tiny(method=method, model=model, clients=clients), tmp_path / method["name"])
    run(simulation, 2)
    return simulation.state


def test_in_width_with_steps_of_one_it_is_heterofl(tmp_path):
    """W (N/L) with norms that are shared, equals HeteroFL without Scaler and masks, bit for bit."""
    nefl = {"name": "nefl", "learn_steps": False}
    heterofl = {"name": "heterofl", "scaler": False, "mask": "none", "label_rows": "all"}
    model = {"name": "resnet18", "channels": 6, "norm": "layer"}
    assert_same(*(trained(tmp_path, method, model, capacities=[1, 0.5, 0.3]) for method in (nefl, heterofl)))


def test_one_submodel_is_fedavg(tmp_path):
    """Equal bit for bit, on a network without norms and residual blocks."""
    methods = {"name": "nefl"}, {"name": "fedavg", "weight": "uniform"}
    assert_same(*(trained(tmp_path, method, "mcmahan_cnn", capacities=[1.0]) for method in methods))


def test_traffic():
    """A client receives and sends its submodel's parameters, its norms' statistics, and one scalar per block."""
    method = bound(NeFL(submodels=TWO))
    state = method.init()
    selection = visit(method, state, 0.5, images(0, 1)).selection
    update = updated(method, state, 0.5, images(0, 1))
    for sent in (method.extract(state, selection), update.sums | update.whole):
        assert sent.keys() == {"params", "submodel 1"}
        tensors = sent["params"] | sent["submodel 1"]
        statistics = sum(t.numel() for name, t in tensors.items() if "running" in name)
        scalars = sum(t.dim() == 0 for t in tensors.values())
        assert scalars == 3
        counted = sum(t.numel() for t in tensors.values())
        assert counted - statistics - scalars == selection.net.parameters


def test_a_run_of_five_submodels(tmp_path):
    """Every submodel is evaluated with its own norms."""
    spec = {
        "method": {"name": "nefl", "variant": "WD"},
        "model": {"name": "resnet18", "channels": 4},
        "clients": {"capacities": [1, 0.5, 0.2], "assignment": "tiers", "reach": 1, "metric": "params"},
    }
    lines = run(simulate(tiny(**spec), tmp_path))
    assert {f"accuracy_{c:g}" for c in (1, 0.5, 0.2)} < lines[-1].keys()


# the same bits

BLOCKS = {
    "model": {"name": "resnet18", "channels": 3},
    "clients": {"capacities": [1, 0.5, 0.2], "assignment": "dynamic", "metric": "params"},
}
METHOD = [{"name": "nefl", "variant": "WD", "skipping_steps": True}, {"name": "depthfl_nefl"}]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHOD, ids=lambda method: method["name"])
def test_resumed_and_shuffled_runs_equal_the_uninterrupted_run(method, tmp_path):
    spec = tiny(method=method, rounds=3, evaluation={"every": 3}, **BLOCKS)
    arrays = spec.data.arrays()
    straight = simulate(spec, tmp_path / "straight")
    lines = run(straight)
    first = simulate(spec, tmp_path / "first", lambda recipe: Shuffled(Worker(recipe, arrays)))
    assert run(first, 2) == lines[:2]
    first.save(tmp_path / "checkpoints")
    second = simulate(spec, tmp_path / "second")
    assert second.restore(tmp_path / "checkpoints") == (2, [])
    assert run(second) == lines[2:]
    assert_same(second.state, straight.state)


@pytest.mark.parametrize("method", METHOD, ids=lambda method: method["name"])
def test_functions_are_pure(method):
    method, data = pickle.loads(pickle.dumps(tiny(method=method, **BLOCKS).bound())), images(0, 1, 2, 3)
    state = method.init()
    before = checksum(state)
    for capacity in (1.0, 0.5, 0.2):
        first, second = (updated(method, state, capacity, data, seed=1) for _ in range(2))
        assert_same(first.sums | first.whole, second.sums | second.whole)
        method.step(state, 0, folded(state, (visit(method, state, capacity, data).selection, first)))
        method.deploy(state, 0, capacity)
    assert checksum(state) == before
