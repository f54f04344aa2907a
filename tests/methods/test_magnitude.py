"""Thresholds against torch.sort, what a client is sent to the byte, and the mean over holders, by hand."""

import math
import pickle

import pytest
import torch
from helpers import RESNET, Perceptron, assert_same, bound, client_data, one_round, tiny, updated

from rayfl import costs
from rayfl.axes import Net
from rayfl.coding import decode_places
from rayfl.config import ConfigError
from rayfl.methods import METHODS, Client, Task, Update
from rayfl.methods.base import Affordable
from rayfl.methods.magnitude import groups, threshold_for, unit_costs
from rayfl.models import MODELS
from rayfl.models.base import layers_of
from rayfl.tensors import nbytes, pack, unpack
from rayfl.training import Training

Greedy = METHODS["pruning_greedy"]


def on_resnet(method=None, metric="params", capacities=(1.0, 1 / 4, 1 / 16, 1 / 64), channels=4, **fields):
    model = MODELS["resnet18"](input=(1, 8, 8), classes=4, channels=channels, **fields)
    task = Task(model, Training(), Affordable(model, metric, capacities), max(capacities), clients=10, metric=metric)
    return (method or Greedy()).bind(task)


# thresholds


def sorted_threshold(tensors, share):
    magnitudes = torch.cat([t.abs().flatten() for t in tensors]).sort(descending=True).values
    return float(magnitudes[max(1, math.floor(share * len(magnitudes))) - 1])


@pytest.mark.parametrize("seed", range(5))
def test_thresholds_are_those_of_a_sort(seed):
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** -torch.randint(0, 30, (4,), generator=generator)
    drawn = [torch.randn(n, generator=generator) * s for n, s in zip((700, 1, 30, 6), scale, strict=True)]
    tensors = [t.view(-1, 1) if len(t) > 100 else t for t in drawn]
    shares = [0.9, 0.5, 1 / 64, 1 / 700, 1e-6]
    found = [threshold_for(tensors, share) for share in shares]
    assert found == [sorted_threshold(tensors, share) for share in shares]
    assert found == sorted(found)


@pytest.mark.parametrize("seed", range(5))
def test_equal_elements_are_all_in(seed):
    """Of six numbers, so that almost everything is equal; 0 and -0 among them."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -2.0000002])
    generator = torch.Generator().manual_seed(seed)
    tensors = [values[torch.randint(6, (n,), generator=generator)] for n in (50, 3)]
    for share in (0.1, 0.3, 0.6, 0.95):
        theta = threshold_for(tensors, share)
        assert theta == sorted_threshold(tensors, share)
        held = sum(int((t.abs() >= theta).sum()) for t in tensors)
        above = sum(int((t.abs() > theta).sum()) for t in tensors)
        assert above < math.floor(share * 53) <= held


def test_a_ratio_of_counts_buys_that_count():
    x = torch.arange(1.0, 50)
    for k in range(1, 50):
        assert threshold_for([x], k / 49) == 50 - k


@pytest.mark.parametrize("seed", range(5))
def test_costly_elements(seed):
    """Within the budget, and the next element would not be; where nothing fits, the largest alone."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(n, generator=generator) for n in (300, 40, 7)]
    units = [64, 9, 0]
    total = 64 * 300 + 9 * 40
    order = sorted((-abs(float(v)), unit) for t, unit in zip(tensors, units, strict=True) for v in t)
    for share in (0.7, 0.2, 0.05):
        theta = threshold_for(tensors, share, units)
        spent = [sum(unit * int((t.abs() >= theta).sum()) for t, unit in zip(tensors, units, strict=True))]
        left = [unit for minus, unit in order if -minus < theta]
        assert spent[0] <= share * total < spent[0] + left[0]
    assert threshold_for(tensors[:1], 1e-9, [5]) == float(tensors[0].abs().max())
    assert threshold_for(tensors[2:], 0.5, [0]) == 0


def test_equal_costly_elements_are_in_or_out_together():
    x = [torch.tensor([3.0, -1.0, 1.0, 0.5])]
    for share, held in ((0.25, 1), (0.5, 1), (0.75, 3)):
        theta = threshold_for(x, share, [1])
        assert int((x[0].abs() >= theta).sum()) == held


# which elements


@pytest.mark.parametrize(("classes", "size"), [(10, 11_164_362), (100, 11_210_532)])
def test_the_maskable_elements_of_resnet18(classes, size):
    model = MODELS["resnet18"](classes=classes)
    shapes = {
        n: s
        for names in groups(model, Net(), "model")
        for n, s in costs.layout(model, Net()).shapes.items()
        if n in names
    }
    assert sum(map(math.prod, shapes.values())) == size
    assert not any("norm" in name for name in shapes) and {"head.weight", "head.bias", "conv.weight"} <= shapes.keys()


def test_a_transformer_masks_its_linear_layers_alone():
    model = MODELS["vit_b_16"](input=(1, 8, 8), layers=2, heads=2, head_width=4, patch=4)
    names = {name for group in groups(model, Net(), "model") for name in group}
    whole = {n for n in costs.layout(model, Net()).shapes if n not in names}
    assert all("norm" in name or name.startswith("tokens.") for name in whole)
    assert {"patches.weight", "encoder.0.attention.attend.q.linear.bias", "head.bias"} <= names


def test_costs_of_elements_are_the_networks():
    model = MODELS["resnet18"](input=(1, 8, 8), channels=4)
    units, shapes = unit_costs(model, Net()), costs.layout(model, Net()).shapes
    assert sum(units[name] * math.prod(shapes[name]) for name in units) == costs.flops(model, Net())
    assert (units["conv.weight"], units["stage4.1.residual.conv2.weight"], units["head.weight"]) == (64, 1, 1)
    assert units["head.bias"] == 0


def test_groups():
    model = MODELS["resnet18"](channels=4)
    layers = layers_of(model, Net())
    assert list(groups(model, Net(), "layer")) == list(layers.values())
    stages = groups(model, Net(), "shard")
    assert [names[0] for names in stages] == [
        "conv.weight",
        *(f"stage{s}.0.residual.conv1.weight" for s in (1, 2, 3, 4)),
        "head.weight",
    ]
    assert sum(map(len, stages)) == len(layers) + 1
    halves = groups(model, Net(), "shard", (("conv", "stage1", "stage2"), ("stage3", "stage4", "head")))
    assert halves == [sum(stages[:3], ()), sum(stages[3:], ())]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((("conv", "stage1"),), "method.shards: layer 'stage2.0.residual.conv1' is in 0 shards; allowed: every layer"),
        ((("conv",), ("conv", "stage1", "stage2", "stage3", "stage4", "head")), "method.shards: layer 'conv' is in 2"),
        ((("con",),), "method.shards: 'con' is no layer and above none; the layers: conv, stage1.0.residual.conv1,"),
    ],
)
def test_shards_that_do_not_fit(given, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        on_resnet(Greedy(threshold="shard", shards=given))


def test_models_without_stages_need_shards():
    with pytest.raises(ConfigError, match="has no stages; allowed: method.shards, lists of its layers: hidden0, head;"):
        bound(Greedy(threshold="shard"), 1.0, 0.5)
    method = bound(Greedy(threshold="shard", shards=(("head",), ("hidden0",))), 1.0, 0.5)
    params = method.init(0)["params"]
    assert method.thresholds(params, 0.5).keys() == params.keys()
    with pytest.raises(ValueError, match="shards with threshold: shard only"):
        Greedy(shards=(("head",),))


@pytest.mark.parametrize("threshold", ["model", "layer", "shard"])
@pytest.mark.parametrize("metric", ["params", "flops"])
def test_masks_are_nested_and_as_large_as_their_share(threshold, metric):
    """Group by group, of parameters or of multiply-adds; there is a threshold for capacities that no client has."""
    method = on_resnet(Greedy(threshold=threshold), metric, capacities=(1.0, 0.4, 0.1, 0.001))
    state, model = method.init(0), method.task.model
    covers = [method.window(state, 0, c).cover(state["params"]) for c in (0.4, 0.1, 0.001)]
    for large, small in zip(covers, covers[1:], strict=False):
        assert all((large[name] >= t).all() for name, t in small.items())
    units = unit_costs(model, Net()) if metric == "flops" else dict.fromkeys(state["params"], 1)
    for capacity, cover in zip((0.4, 0.1, 0.001), covers, strict=True):
        for names in groups(model, Net(), threshold):
            total = sum(units[name] * cover[name].numel() for name in names)
            held = sum(units[name] * float(cover[name].sum()) for name in names)
            if metric == "params":
                assert held == max(1, math.floor(capacity * total))
            else:
                most = max(units[name] for name in names)
                assert capacity * total - most < held <= max(capacity * total, most)
        assert all(t.all() for name, t in cover.items() if "norm" in name)


def test_multiply_adds_stay_within_a_budget_by_flops():
    method = on_resnet(metric="flops")
    state = method.init(0)
    for capacity in (1 / 4, 1 / 16, 1 / 64):
        held = method.deploy(state, 0, capacity).held
        full = costs.flops(method.task.model, Net())
        assert capacity - 64 / full < held.macs / full <= capacity


def test_by_parameters_small_submodels_compute_more_than_their_share():
    """Of resnet18 as torch draws it: the stem is nearly whole, stage 4 nearly empty. As many elements as in FIARSE's
    code, and the specification's multiply-adds."""
    shares = {1: 1, 1 / 4: 0.478, 1 / 16: 0.272, 1 / 64: 0.104, 0.64: 0.75, 0.36: 0.555, 0.16: 0.416, 0.04: 0.232}
    model = MODELS["resnet18"]()
    method = Greedy().bind(Task(model, Training(), Affordable(model, "params", tuple(shares)), 1, 10, "params"))
    state, elements = method.init(0), {1 / 4: 2_791_090, 1 / 16: 697_772, 1 / 64: 174_443}
    for capacity, share in shares.items():
        deployed = method.deploy(state, 0, capacity)
        held = deployed.held
        assert held.macs / costs.flops(model, Net()) == pytest.approx(share, abs=0.002)
        if capacity in elements:
            assert sum(int(deployed.params[name].count_nonzero()) for name in deployed.masked) == elements[capacity]
        if capacity == 1 / 64:
            assert held.layers["conv"] == pytest.approx(0.86, abs=0.01)
            assert held.layers["stage1.0.residual.conv1"] == pytest.approx(0.3, abs=0.005)


def test_by_width_a_capacity_has_the_parameters_of_the_dense_network():
    """So a HeteroFL client of the same capacity has as many."""
    model = Perceptron(hidden=(8, 8))
    method = bound(Greedy(), 1.0, 0.5, hidden=(8, 8))
    share = costs.parameters(model, Net(0.5)) / costs.parameters(model, Net())
    assert method.budget(0.5) == share < 0.4 and method.budget(1.0) == 1
    held = method.window(method.init(0), 0, 0.5).cover(method.init(0)["params"])
    assert sum(float(t.sum()) for t in held.values()) == costs.parameters(model, Net(0.5))


def test_a_server_smaller_than_the_model_holds_everything():
    """And a smaller capacity what it would have of the whole model."""
    method = on_resnet(capacities=(0.5, 0.1), channels=16)
    state, model = method.init(0), method.task.model
    assert method.budget(0.5) >= 1 and method.window(state, 0, 0.5).key == "whole"
    assert method.window(state, 0, 0.1).key == (0, 0.1)
    assert method.budget(0.1) * costs.parameters(model, method.task.server) == pytest.approx(
        0.1 * costs.parameters(model, Net())
    )
    assert set(method.task.nets.values()) == {method.task.server}


# what travels


def bytes_of(places, size):
    """Of the shorter code: a bit an element, or a byte a place and 255 zeros before it."""
    gaps = [place - before - 1 for before, place in zip([-1, *places], places, strict=False)]
    return 1 + min(-(-size // 8), sum(1 + gap // 255 for gap in gaps))


@pytest.mark.parametrize("name", ["fiarse", "pruning_greedy"])
def test_a_payload_to_the_byte(name):
    """Four bytes an element that is held, and, for FIARSE alone, a threshold; and the places. Large clients: none."""
    method = on_resnet(METHODS[name](), channels=8)
    state = method.init(0)
    masked = [name for names in groups(method.task.model, Net(), "model") for name in names]
    d = sum(state["params"][name].numel() for name in masked)
    norms = sum(t.numel() for name, t in state["params"].items() if name not in masked)
    for capacity in (1 / 4, 1 / 16, 1 / 64):
        selection = method.select(state, 0, Client(0, capacity), 0)
        payload = method.extract(state, selection)
        held, thresholds = math.floor(d * capacity), len(masked) if name == "fiarse" else 0
        cover = {n: t.flatten().nonzero().flatten() for n, t in selection.cover(state["params"]).items() if n in masked}
        places = sum(bytes_of(t.tolist(), state["params"][n].numel()) for n, t in cover.items())
        assert nbytes(payload) == 4 * (held + norms) + places + 4 * thresholds
        assert sum(t.numel() for t in payload["params"].values()) == held + norms
        decoded = {n: decode_places(code, state["params"][n].numel()) for n, code in payload["places"].items()}
        assert_same(decoded, cover)
        assert_same(unpack(pack(payload)), payload)
    whole = method.extract(state, method.select(state, 0, Client(0, 1.0), 0))
    assert list(whole) == ["params"] and all(whole["params"][n] is t for n, t in state["params"].items())


def test_places_cost_little_beside_values():
    """On a whole ResNet-18; a bit an element alone would be 1.4 MB."""
    model = MODELS["resnet18"]()
    method = Greedy().bind(Task(model, Training(), Affordable(model, "params", (1, 1 / 64)), 1, 10, "params"))
    state = method.init(0)
    payload = method.extract(state, method.select(state, 0, Client(0, 1 / 64), 0))
    assert nbytes(payload["places"]) < 0.1 * nbytes(payload["params"]) < 75_000


def test_a_selection_travels_without_its_tensors():
    method = on_resnet(channels=16)
    state = method.init(0)
    selection = method.select(state, 3, Client(0, 0.25), 0)
    selection.take(state["params"])
    sent = pickle.dumps(selection)
    assert len(sent) < 1000
    assert (pickle.loads(sent).key, pickle.loads(sent).net) == ((3, 0.25), Net())
    assert len({method.select(state, r, Client(i, 1.0), 0).key for r in range(3) for i in range(3)}) == 1


# a round


def held_by(method, state, capacity):
    return {n: t.bool() for n, t in method.window(state, 0, capacity).cover(state["params"]).items()}


def test_the_mean_is_over_holders():
    """The large client answers 3, the small one 1; with weights 2 and 1 where both are."""
    method = bound(Greedy(), 1.0, 0.5, 0.25, hidden=(5,))
    state = method.init(0)
    updates = []
    for capacity, value, weight in ((0.5, 3.0, 2.0), (0.25, 1.0, 1.0)):
        selection = method.select(state, 0, Client(0, capacity), 0)
        part = selection.take(state["params"])
        updates.append((selection, Update({"params": {n: t * 0 + value * weight for n, t in part.items()}}, weight)))
    new = method.aggregate(state, 0, iter(updates))
    large, small = held_by(method, state, 0.5), held_by(method, state, 0.25)
    for name, old in state["params"].items():
        expected = torch.where(small[name], 7 / 3, torch.where(large[name], 3.0, old))
        torch.testing.assert_close(new["params"][name], expected, rtol=1e-6, atol=0)
        assert torch.equal(new["params"][name][~large[name]], old[~large[name]])
    for capacity in (0.5, 0.25):
        everything = torch.cat([t.flatten() for t in new["params"].values()])
        theta = method.thresholds(new["params"], capacity)["head.bias"]
        assert float(theta) == sorted_threshold([everything], method.budget(capacity))


@pytest.mark.parametrize("name", ["fiarse", "pruning_greedy"])
def test_nobody_moves_what_nobody_holds(name):
    """To the bit, over rounds, with momentum and weight decay."""
    method = bound(METHODS[name](), 1.0, 0.6, 0.3, hidden=(9,), lr=0.3, momentum=0.9, weight_decay=0.1, epochs=3)
    state = method.init(0)
    for round in range(3):
        held = held_by(method, state, 0.6)
        new = one_round(method, state, (0.6, client_data(0, 1, 2)), (0.3, client_data(3, 1)), round=round)
        for parameter, old in state["params"].items():
            out = ~held[parameter]
            assert torch.equal(new["params"][parameter][out], old[out])
            assert (new["params"][parameter] != old)[~out].all()
        assert any(out.any() for out in map(torch.logical_not, held.values()))
        state = new


@pytest.mark.parametrize("threshold", ["model", "layer"])
@pytest.mark.parametrize("name", ["fiarse", "pruning_greedy"])
def test_at_full_capacity_it_is_fedavg(name, threshold):
    """To the bit, with small submodels that nobody trains beside."""
    training = dict(lr=0.3, momentum=0.9, weight_decay=0.01, clip=1.0, epochs=2, batch_size=2)
    method = bound(METHODS[name](threshold=threshold), 1.0, 0.2, hidden=(6,), **training)
    fedavg = bound(METHODS["fedavg"](weight="uniform"), 1.0, hidden=(6,), **training)
    mine, theirs = method.init(0), fedavg.init(0)
    for round in range(3):
        clients = [(1.0, client_data(0, 1, 2)), (1.0, client_data(3, 1))]
        mine, theirs = (one_round(m, s, *clients, round=round) for m, s in ((method, mine), (fedavg, theirs)))
        assert_same(mine["params"], theirs["params"])
    deployed = method.deploy(mine, 3, 0.2)
    # a layer's share is rounded down
    fewer = {"model": 0, "layer": 1}[threshold]
    assert deployed.held.parameters == costs.parameters(method.task.model, Net(0.2)) - fewer


def test_training_is_of_so_many_multiply_adds_and_is_counted():
    """6 an element of a weight that is there, a sample: of biases, and of what is not there, none."""
    method = bound(Greedy(), 1.0, 0.5, hidden=(7,), epochs=2, batch_size=2)
    state = method.init(0)
    held = held_by(method, state, 0.5)
    weights = sum(int(held[f"{layer}.weight"].sum()) for layer in ("hidden0", "head"))
    small = updated(method, state, 0.5, client_data(0, 1, 2))
    assert small.metrics["train_flops"] == 6 * weights * 6
    assert small.metrics["coverage_min"] == 0
    large = updated(method, state, 1.0, client_data(0, 1, 2))
    assert "train_flops" not in large.metrics and large.metrics["coverage_min"] == 1
    assert {n: t.shape for n, t in small.sums["params"].items()} == {n: (int(t.sum()),) for n, t in held.items()}


@pytest.mark.parametrize("name", ["fiarse", "pruning_greedy"])
def test_nothing_is_changed_in_place(name):
    method = bound(METHODS[name](), 1.0, 0.3, hidden=(9,), lr=0.5)
    state = method.init(0)
    selection = method.select(state, 0, Client(0, 0.3), 0)
    payload = method.extract(state, selection)
    before = pickle.loads(pickle.dumps((payload, state)))
    first = method.local_update(payload, selection, Client(0, 0.3), client_data(0, 1), 0, 5)
    second = method.local_update(
        unpack(pack(payload)), pickle.loads(pickle.dumps(selection)), Client(0, 0.3), client_data(0, 1), 0, 5
    )
    method.aggregate(state, 0, iter([(selection, first)]))
    assert_same((payload | state), before[0] | before[1])
    assert_same(first.sums, second.sums)


def test_a_group_of_zeros_is_held_whole():
    """Its threshold is 0, at every capacity; it is trained, and counts where it is not 0 any more."""
    for name in ("fiarse", "pruning_greedy"):
        method = bound(METHODS[name](threshold="layer"), 1.0, 0.5, 0.25, hidden=(6,), lr=0.1)
        params = {n: t * ("head" not in n) for n, t in method.init(0)["params"].items()}
        state = {"params": params}
        for capacity in (0.5, 0.25):
            held = held_by(method, state, capacity)
            assert held["head.weight"].all() and held["head.bias"].all() and not held["hidden0.weight"].all()
            assert method.deploy(state, 0, capacity).held.layers["head"] == 0
        new = one_round(method, state, (0.25, client_data(0, 1, 2)))
        assert new["params"]["head.bias"].all() and method.thresholds(new["params"], 0.25)["head.bias"] > 0


def test_a_device_may_have_a_capacity_that_the_task_has_not():
    method = on_resnet(channels=16)
    state = method.init(0)
    masked = [name for names in groups(method.task.model, Net(), "model") for name in names]
    d = sum(state["params"][name].numel() for name in masked)
    for capacity in (0.7, 0.123, 0.003):
        deployed = method.deploy(state, 0, capacity)
        assert sum(int(deployed.params[name].count_nonzero()) for name in masked) == math.floor(capacity * d)


def test_a_deployment_is_zero_outside_its_mask():
    method = on_resnet()
    state = method.init(0)
    for capacity in (1.0, 1 / 16):
        deployed, held = method.deploy(state, 4, capacity), held_by(method, state, capacity)
        for name, t in state["params"].items():
            assert torch.equal(deployed.params[name], torch.where(held[name], t, 0.0))
    assert method.deploy(state, 4, 1.0).masked == ()
    assert deployed.key == (4, 1 / 16)


def test_a_capacity_may_be_smaller_than_the_narrowest_network():
    clients = {"metric": "params", "capacities": [1, 0.3, 0.001]}
    given = {"method": {"name": "fiarse", "threshold": "shard"}, "model": RESNET | {"channels": 4}, "clients": clients}
    method = tiny(**given).bound_method()
    state = method.init(0)
    assert 0 < method.deploy(state, 0, 0.001).held.macs < method.deploy(state, 0, 0.3).held.macs
    with pytest.raises(ConfigError, match="whose narrowest network already is"):
        tiny(**given | {"method": "heterofl"})


@pytest.mark.parametrize("metric", ["params", "flops"])
def test_a_capacity_that_buys_no_element_is_refused(metric):
    with pytest.raises(ConfigError, match=r"clients.capacities: given 1e-06 by (params|flops); .*what buys an element"):
        tiny(method="fiarse", clients={"capacities": [1, 1e-6], "metric": metric}).bound_method()
