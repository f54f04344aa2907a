"""Thresholds against torch.sort, exact traffic, and the mean over holders by hand."""

import itertools
import math

import pytest
import torch
from helpers import (
    RESNET,
    Perceptron,
    assert_same,
    bound,
    client_data,
    folded,
    one_round,
    sent,
    simulate,
    tiny,
    updated,
    visit,
)

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.bitcodes import encode_places
from rayfl.core.net import Net
from rayfl.core.tensors import nbytes, pack
from rayfl.costs import macs
from rayfl.methods import METHODS, Client, Task, Update
from rayfl.methods.base import Affordable
from rayfl.methods.masks.thresholds import groups, threshold_for, unit_costs
from rayfl.models import MODELS
from rayfl.training.settings import Training

Greedy = METHODS["pruning_greedy"]
ALL = (1.0, 1 / 4, 1 / 16, 1 / 64)


def task(model, metric="params", capacities=ALL):
    return Task(model, Training(), Affordable(model, metric, capacities), max(capacities), clients=10, metric=metric)


def on_resnet(method=None, metric="params", capacities=ALL, channels=4, **fields):
    model = MODELS["resnet18"](input=(1, 8, 8), classes=4, channels=channels, **fields)
    return (method or Greedy()).bind(task(model, metric, capacities))


def maskable(net):
    return list(itertools.chain(*groups(net, "model")))


# thresholds


def named(*tensors):
    return {f"t{i}": t for i, t in enumerate(tensors)}


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
    found = [threshold_for(named(*tensors), share) for share in shares]
    assert found == [sorted_threshold(tensors, share) for share in shares]
    assert found == sorted(found)


@pytest.mark.parametrize("seed", range(5))
def test_equal_elements_are_kept_together(seed):
    """Draw from six numbers, including 0 and -0, so that most are equal."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -2.0000002])
    generator = torch.Generator().manual_seed(seed)
    tensors = [values[torch.randint(6, (n,), generator=generator)] for n in (50, 3)]
    for share in (0.1, 0.3, 0.6, 0.95):
        theta = threshold_for(named(*tensors), share)
        assert theta == sorted_threshold(tensors, share)
        held = sum(int((t.abs() >= theta).sum()) for t in tensors)
        above = sum(int((t.abs() > theta).sum()) for t in tensors)
        assert above < math.floor(share * 53) <= held


def test_a_ratio_of_counts_buys_that_count():
    x = torch.arange(1.0, 50)
    for k in range(1, 50):
        assert threshold_for(named(x), k / 49) == 50 - k


@pytest.mark.parametrize("seed", range(5))
def test_costly_elements(seed):
    """Within the budget, and the next element would not be; where nothing fits, the largest alone. The threshold is the
    smallest element that is kept."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(n, generator=generator) for n in (300, 40, 7)]
    units = {"t0": 64, "t1": 9, "t2": 0}
    params, total = named(*tensors), 64 * 300 + 9 * 40
    order = sorted((-abs(float(v)), units[name]) for name, t in params.items() for v in t)
    for share in (0.7, 0.2, 0.05):
        theta = threshold_for(params, share, units)
        spent = sum(unit * int((params[name].abs() >= theta).sum()) for name, unit in units.items())
        left = [unit for minus, unit in order if -minus < theta]
        assert spent <= share * total < spent + left[0]
        assert theta == min(-minus for minus, _ in order if -minus >= theta)
    assert threshold_for(named(tensors[0]), 1e-9, {"t0": 5}) == float(tensors[0].abs().max())
    assert threshold_for(named(tensors[2]), 0.5, {"t0": 0}) == float(tensors[2].abs().min())


def test_equal_costly_elements_are_in_or_out_together():
    x = torch.tensor([3.0, -1.0, 1.0, 0.5])
    for share, theta, held in ((0.25, 3, 1), (0.5, 3, 1), (0.75, 1, 3), (1, 0.5, 4)):
        assert threshold_for(named(x), share, {"t0": 1}) == theta
        assert int((x.abs() >= theta).sum()) == held


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("units", [None, {"t0": 3, "t1": 0}])
def test_elements_that_are_not_finite_are_refused(value, units):
    """By name, wherever they are and whatever the share is."""
    params = named(torch.ones(9), torch.tensor([1.0, value, 2.0]))
    for share in (0.01, 0.9):
        with pytest.raises(ValueError, match="^parameter t1: some elements are not finite. Allowed: finite numbers$"):
            threshold_for(params, share, units)
    largest = torch.tensor([torch.finfo(torch.float32).max, -1.0])
    assert threshold_for(named(largest), 0.5) == float(largest[0])


# which elements


@pytest.mark.parametrize(("classes", "size"), [(10, 11_164_362), (100, 11_210_532)])
def test_the_maskable_elements_of_resnet18(classes, size):
    net = Net(MODELS["resnet18"](classes=classes))
    shapes = {name: net.layout.shapes[name] for name in maskable(net)}
    assert sum(map(math.prod, shapes.values())) == size
    assert not any("norm" in name for name in shapes) and {"head.weight", "head.bias", "conv.weight"} <= shapes.keys()


def test_a_transformer_masks_its_linear_layers_alone():
    net = Net(MODELS["vit_b_16"](input=(1, 8, 8), layers=2, heads=2, head_width=4, patch=4))
    names = set(maskable(net))
    whole = {name for name in net.layout.shapes if name not in names}
    assert all("norm" in name or name.startswith("tokens.") for name in whole)
    assert {"patches.weight", "encoder.0.attention.attend.q.linear.bias", "head.bias"} <= names


def test_costs_of_elements_are_the_networks():
    net = Net(MODELS["resnet18"](input=(1, 8, 8), channels=4))
    units, shapes = unit_costs(net), net.layout.shapes
    assert sum(units[name] * math.prod(shapes[name]) for name in units) == net.macs
    assert (units["conv.weight"], units["stage4.1.residual.conv2.weight"], units["head.weight"]) == (64, 1, 1)
    assert units["head.bias"] == 0


def test_groups():
    net = Net(MODELS["resnet18"](channels=4))
    assert list(groups(net, "layer")) == list(net.layers.values())
    stages = groups(net, "shard")
    assert [names[0] for names in stages] == [
        "conv.weight",
        *(f"stage{s}.0.residual.conv1.weight" for s in (1, 2, 3, 4)),
        "head.weight",
    ]
    assert sum(map(len, stages)) == len(net.layers) + 1
    halves = groups(net, "shard", (("conv", "stage1", "stage2"), ("stage3", "stage4", "head")))
    assert halves == [sum(stages[:3], ()), sum(stages[3:], ())]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (("conv", "stage1"),),
            "layer 'stage2.0.residual.conv1' is in 0 shards. Allowed: each layer in one shard: conv, ",
        ),
        (
            (("conv",), ("conv", "stage1", "stage2", "stage3", "stage4", "head")),
            "layer 'conv' is in 2 shards. Allowed: each",
        ),
        ((("con",),), "'con' is neither a layer nor a parent of one. Allowed: the layers conv, stage1.0.residual."),
    ],
)
def test_shards_that_do_not_fit(given, message):
    method = on_resnet(Greedy(threshold="shard", shards=given))
    with pytest.raises(ConfigError, match=f"^method.shards: {message}"):
        method.check(1, Population())


def test_models_without_stages_need_shards():
    with pytest.raises(
        ConfigError, match="has no stages. Allowed: method.shards with lists of the layers hidden0, head;"
    ):
        bound(Greedy(threshold="shard"), 1.0, 0.5).check(1, Population())
    method = bound(Greedy(threshold="shard", shards=(("head",), ("hidden0",))), 1.0, 0.5)
    method.check(1, Population())
    params = method.init()["params"]
    assert method.thresholds(params, 0.5).keys() == params.keys()
    with pytest.raises(ValueError, match="shards requires threshold: shard"):
        Greedy(shards=(("head",),))


@pytest.mark.parametrize("threshold", ["model", "layer", "shard"])
@pytest.mark.parametrize("metric", ["params", "flops"])
def test_masks_are_nested_and_as_large_as_their_share(threshold, metric):
    """Group by group, of parameters or of multiply-adds; capacities that no client has have thresholds too."""
    method = on_resnet(Greedy(threshold=threshold), metric, capacities=(1.0, 0.4, 0.1, 0.001))
    state, net = method.init(), method.task.server
    covers = [method.submodel(state, 0, c).cover(state["params"]) for c in (0.4, 0.1, 0.001)]
    for large, small in itertools.pairwise(covers):
        assert all((large[name] >= t).all() for name, t in small.items())
    units = unit_costs(net) if metric == "flops" else dict.fromkeys(state["params"], 1)
    for capacity, cover in zip((0.4, 0.1, 0.001), covers, strict=True):
        for names in groups(net, threshold):
            total = sum(units[name] * cover[name].numel() for name in names)
            held = sum(units[name] * float(cover[name].sum()) for name in names)
            if metric == "params":
                assert held == max(1, math.floor(capacity * total))
            else:
                most = max(units[name] for name in names)
                assert capacity * total - most < held <= max(capacity * total, most)
        assert all(t.all() for name, t in cover.items() if "norm" in name)


@pytest.mark.parametrize("metric", ["params", "flops"])
@pytest.mark.parametrize("threshold", ["model", "layer"])
def test_a_threshold_is_the_smallest_element_that_is_held(threshold, metric):
    """So FIARSE's bracket is the same at the threshold, whatever a capacity is a share of."""
    method = on_resnet(METHODS["fiarse"](threshold=threshold), metric)
    state = method.init()
    payload = method.extract(state, method.select(state, Client(0, 1 / 16, 0)))
    for names in groups(method.task.server, threshold):
        smallest = min(float(payload["params"][name].abs().min()) for name in names if len(payload["params"][name]))
        assert {float(payload["thresholds"][name]) for name in names} == {smallest}


def test_multiply_adds_stay_within_a_budget_by_flops():
    method = on_resnet(metric="flops")
    state, full = method.init(), method.task.server.macs
    for capacity in (1 / 4, 1 / 16, 1 / 64):
        present = method.deploy(state, 0, capacity).present
        assert capacity - 64 / full < present.macs / full <= capacity


def test_by_parameters_small_submodels_compute_more_than_their_share():
    """Masks of a newly drawn resnet18: the stem is nearly whole, stage 4 nearly empty. As many elements as in FIARSE's
    code, and the specification's multiply-adds."""
    shares = {1: 1, 1 / 4: 0.478, 1 / 16: 0.272, 1 / 64: 0.104, 0.64: 0.75, 0.36: 0.555, 0.16: 0.416, 0.04: 0.232}
    model = MODELS["resnet18"]()
    method = Greedy().bind(task(model, capacities=tuple(shares)))
    state, elements = method.init(), {1 / 4: 2_791_090, 1 / 16: 697_772, 1 / 64: 174_443}
    for capacity, share in shares.items():
        deployed = method.deploy(state, 0, capacity)
        present = deployed.present
        assert present.macs / Net(model).macs == pytest.approx(share, abs=0.002)
        if capacity in elements:
            assert sum(int(deployed.params[name].count_nonzero()) for name in deployed.masked) == elements[capacity]
        if capacity == 1 / 64:
            assert present.layers["conv"] == pytest.approx(0.86, abs=0.01)
            assert present.layers["stage1.0.residual.conv1"] == pytest.approx(0.3, abs=0.005)


def test_by_width_a_capacity_has_the_parameters_of_the_dense_network():
    """So a HeteroFL client of the same capacity has as many."""
    model = Perceptron(hidden=(8, 8))
    method = bound(Greedy(), 1.0, 0.5, hidden=(8, 8))
    share = Net(model, 0.5).parameters / Net(model).parameters
    assert method.budget(0.5) == share < 0.4 and method.budget(1.0) == 1
    state = method.init()
    held = method.submodel(state, 0, 0.5).cover(state["params"])
    assert sum(float(t.sum()) for t in held.values()) == Net(model, 0.5).parameters


def test_a_server_smaller_than_the_model_holds_everything():
    """And a smaller capacity what it would have of the whole model."""
    method = on_resnet(capacities=(0.5, 0.1), channels=16)
    state, server = method.init(), method.task.server
    assert method.budget(0.5) >= 1 and method.submodel(state, 0, 0.5).key == "whole"
    assert method.submodel(state, 0, 0.1).key == (0, 0.1)
    assert method.budget(0.1) * server.parameters == pytest.approx(0.1 * Net(server.model).parameters)
    assert set(method.task.nets.values()) == {server}


# what travels


@pytest.mark.parametrize("name", ["fiarse", "pruning_greedy"])
def test_traffic_to_the_byte(name):
    """Four bytes a held element and, for FIARSE alone, a threshold; and the codes of their places. A client that holds
    everything needs neither."""
    method = on_resnet(METHODS[name](), channels=8)
    state = method.init()
    masked = maskable(method.task.server)
    d = sum(state["params"][name].numel() for name in masked)
    norms = sum(t.numel() for name, t in state["params"].items() if name not in masked)
    for capacity in (1 / 4, 1 / 16, 1 / 64):
        selection = method.select(state, Client(0, capacity, 0))
        payload = method.extract(state, selection)
        held, thresholds = math.floor(d * capacity), len(masked) if name == "fiarse" else 0
        assert nbytes(payload) == 4 * (held + norms + thresholds)
        assert sum(t.numel() for t in payload["params"].values()) == held + norms
        cover = {n: t.flatten().nonzero().flatten() for n, t in selection.cover(state["params"]).items() if n in masked}
        assert selection.nbytes == sum(len(encode_places(t, state["params"][n].numel())) for n, t in cover.items())
        received_payload, received = sent((payload, selection))
        assert_same(received_payload, payload)
        assert_same({name: received.places[name] for name in received.places}, cover)
        assert (received.key, received.net, received.nbytes) == (selection.key, selection.net, selection.nbytes)
    whole = method.select(state, Client(0, 1.0, 0))
    payload = method.extract(state, whole)
    assert whole.nbytes == 0 and list(payload) == ["params"]
    assert all(payload["params"][n] is t for n, t in state["params"].items())


def test_places_cost_little_beside_values():
    """On a whole ResNet-18; a bit an element alone would be 1.4 MB."""
    method = Greedy().bind(task(MODELS["resnet18"](), capacities=(1, 1 / 64)))
    state = method.init()
    selection = method.select(state, Client(0, 1 / 64, 0))
    payload = method.extract(state, selection)
    assert selection.nbytes < 0.1 * nbytes(payload["params"]) < 75_000


def test_a_selection_travels_as_its_codes():
    method = on_resnet(channels=16)
    state = method.init()
    selection = method.select(state, Client(0, 0.25, 3))
    selection.take(state["params"])
    packed = pack(selection)
    assert sum(buffer.nbytes for buffer in packed.buffers.values()) == selection.nbytes
    assert len(packed.header) < 4000
    assert len({method.select(state, Client(i, 1.0, r)).key for r in range(3) for i in range(3)}) == 1


# a round


def held_by(method, state, capacity):
    return {n: t.bool() for n, t in method.submodel(state, 0, capacity).cover(state["params"]).items()}


def test_the_mean_is_over_holders():
    """The large client answers 3, the small one 1; with weights 2 and 1 where both are."""
    method = bound(Greedy(), 1.0, 0.5, 0.25, hidden=(5,))
    state = method.init()
    answers = []
    for capacity, value, weight in ((0.5, 3.0, 2.0), (0.25, 1.0, 1.0)):
        selection = method.select(state, Client(0, capacity, 0))
        part = selection.take(state["params"])
        answers.append((selection, Update({"params": {n: t * 0 + value * weight for n, t in part.items()}}, weight)))
    new = method.step(state, 0, folded(state, *answers))
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
def test_elements_without_holders_do_not_move(name):
    """To the bit, over rounds, with momentum and weight decay."""
    method = bound(METHODS[name](), 1.0, 0.6, 0.3, hidden=(9,), lr=0.3, momentum=0.9, weight_decay=0.1, epochs=3)
    state = method.init()
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
    mine, theirs = method.init(), fedavg.init()
    for round in range(3):
        clients = [(1.0, client_data(0, 1, 2)), (1.0, client_data(3, 1))]
        mine, theirs = (one_round(m, s, *clients, round=round) for m, s in ((method, mine), (fedavg, theirs)))
        assert_same(mine["params"], theirs["params"])
    deployed = method.deploy(mine, 3, 0.2)
    # a layer's share is rounded down
    fewer = {"model": 0, "layer": 1}[threshold]
    assert deployed.present.parameters == Net(method.task.model, 0.2).parameters - fewer


def test_counted_flops():
    """6 operations an element of a weight that is held, a sample: none of biases, none of what is not held."""
    method = bound(Greedy(), 1.0, 0.5, hidden=(7,), epochs=2, batch_size=2)
    state = method.init()
    held = held_by(method, state, 0.5)
    weights = sum(int(held[f"{layer}.weight"].sum()) for layer in ("hidden0", "head"))
    small = updated(method, state, 0.5, client_data(0, 1, 2))
    assert small.metrics["train_flops"] == 6 * weights * 6
    large = updated(method, state, 1.0, client_data(0, 1, 2))
    assert large.metrics["train_flops"] == 6 * (2 * 7 + 7 * 4) * 6
    assert (small.metrics["full_clients"], large.metrics["full_clients"]) == (0, 1)
    assert {n: t.shape for n, t in small.sums["params"].items()} == {n: (int(t.sum()),) for n, t in held.items()}


def test_full_clients_are_the_minimum_coverage_index():
    """How many clients hold the least covered element: by counting covers."""
    method = bound(Greedy(), 1.0, 0.5, 0.2, hidden=(7,))
    state = method.init()
    for cohort in ((1.0, 1.0, 0.5), (0.5, 0.2), (1.0,), (1.0, 0.2, 0.2)):
        covers = [method.submodel(state, 0, capacity).cover(state["params"]) for capacity in cohort]
        least = min(int(sum(cover[name] for cover in covers).min()) for name in state["params"])
        counted = [updated(method, state, capacity, client_data(0, 1)).metrics["full_clients"] for capacity in cohort]
        assert sum(counted) == least


@pytest.mark.parametrize("name", ["fiarse", "pruning_greedy"])
def test_nothing_is_changed_in_place(name):
    method = bound(METHODS[name](), 1.0, 0.3, hidden=(9,), lr=0.5)
    state = method.init()
    work = visit(method, state, 0.3, client_data(0, 1), seed=5)
    payload = method.extract(state, work.selection)
    before = {
        "payload": {group: {n: t.clone() for n, t in tensors.items()} for group, tensors in payload.items()},
        "state": {group: {n: t.clone() for n, t in tensors.items()} for group, tensors in state.items()},
    }
    first = method.local_update(payload, work)
    received, selection = sent((payload, work.selection))
    second = method.local_update(received, type(work)(work.client, selection, work.data, None, 5))
    method.step(state, 0, folded(state, (work.selection, first)))
    assert_same({"payload": payload, "state": state}, before)
    assert_same(first.sums, second.sums)


def test_a_group_of_zeros_is_held_whole():
    """Its threshold is 0, at every capacity; it is trained, and counts where it is not 0 any more."""
    for name in ("fiarse", "pruning_greedy"):
        method = bound(METHODS[name](threshold="layer"), 1.0, 0.5, 0.25, hidden=(6,), lr=0.1)
        state = {"params": {n: t * ("head" not in n) for n, t in method.init()["params"].items()}}
        for capacity in (0.5, 0.25):
            held = held_by(method, state, capacity)
            assert held["head.weight"].all() and held["head.bias"].all() and not held["hidden0.weight"].all()
            assert method.deploy(state, 0, capacity).present.layers["head"] == 0
        new = one_round(method, state, (0.25, client_data(0, 1, 2)))
        assert new["params"]["head.bias"].all() and method.thresholds(new["params"], 0.25)["head.bias"] > 0


def test_a_broken_state_is_refused_by_name():
    """Where a client would be sent an empty part of it."""
    method = bound(Greedy(), 1.0, 0.5, hidden=(6,))
    state = method.init()
    state["params"]["head.bias"][1] = float("nan")
    selection = method.select(state, Client(0, 0.5, 0))
    with pytest.raises(ValueError, match="^parameter head.bias: some elements are not finite"):
        method.extract(state, selection)


def test_a_device_may_have_a_capacity_that_the_task_has_not():
    method = on_resnet(channels=16)
    state, masked = method.init(), maskable(method.task.server)
    d = sum(state["params"][name].numel() for name in masked)
    for capacity in (0.7, 0.123, 0.003):
        deployed = method.deploy(state, 0, capacity)
        assert sum(int(deployed.params[name].count_nonzero()) for name in masked) == math.floor(capacity * d)


def test_a_deployment_is_zero_outside_its_mask():
    method = on_resnet()
    state = method.init()
    for capacity in (1.0, 1 / 16):
        deployed, held = method.deploy(state, 4, capacity), held_by(method, state, capacity)
        for name, t in state["params"].items():
            assert torch.equal(deployed.params[name], torch.where(held[name], t, 0.0))
    assert method.deploy(state, 4, 1.0).masked == ()
    assert deployed.key == (4, 1 / 16) and deployed.net == method.task.server


def test_a_capacity_may_be_smaller_than_the_narrowest_network():
    clients = {"metric": "params", "capacities": [1, 0.3, 0.001]}
    given = {"method": {"name": "fiarse", "threshold": "shard"}, "model": RESNET | {"channels": 4}, "clients": clients}
    method = tiny(**given).bound()
    state = method.init()
    assert 0 < method.deploy(state, 0, 0.001).present.macs < method.deploy(state, 0, 0.3).present.macs
    with pytest.raises(ConfigError, match="the narrowest network of model "):
        tiny(**given | {"method": "heterofl"})


@pytest.mark.parametrize("metric", ["params", "flops"])
def test_a_capacity_that_buys_no_element_is_refused(metric):
    with pytest.raises(
        ConfigError, match=r"clients.capacities: 1e-06 by (params|flops) does not buy one element .*at least"
    ):
        tiny(method="fiarse", clients={"capacities": [1, 1e-6], "metric": metric})


def test_a_round_counts_the_masks_it_sends(tmp_path):
    simulation, expected, masks = simulate(tiny(method="fiarse"), tmp_path), 0, 0
    for selection, clients in simulation.cohort().values():
        payload = simulation.method.extract(simulation.state, selection)
        expected += len(clients) * (nbytes(payload) + selection.nbytes)
        masks += selection.nbytes
    assert simulation.train()["bytes_down"] == expected and masks > 0


def test_a_tied_output_layer_costs_and_is_masked_with_the_embedding():
    gpt2 = {"name": "gpt2", "hidden": 16, "heads": 2, "layers": 1, "positions": 16}
    clients = {"count": 2, "cohort": 2, "capacities": [1.0, 0.3], "metric": "flops"}
    text = {"name": "synthetic_text", "task": "next_token"}
    method = {"name": "pruning_greedy", "embeddings": True}
    method = tiny(method=method, model=gpt2, data=text, partition="iid", clients=clients).bound()
    net, embedding = method.task.server, "transformer.wte.weight"
    assert method.units[embedding] * math.prod(net.layout.shapes[embedding]) == net.layer_macs["lm_head"]
    assert macs(net, {"transformer.wte": 0.25}) == net.macs - 0.75 * net.layer_macs["lm_head"]
    deployed = method.deploy(method.init(), 0, 0.3)
    assert deployed.present.macs <= 0.3 * net.macs * (1 + 1e-9)


def test_a_method_without_anything_to_mask_is_refused():
    every = ["conv1", "conv2", "hidden", "head"]
    with pytest.raises(ConfigError, match="no layer of model digits_cnn outside of method.whole .* can be masked"):
        tiny(model="digits_cnn", method={"name": "fiarse", "whole": every}, data={"shape": [1, 8, 8]})
