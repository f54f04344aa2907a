"""Submodels cut in width and depth: capacity -> network."""

import itertools
import math
from pathlib import Path

import pytest
import yaml

from rayfl import costs
from rayfl.config import ConfigError, parse
from rayfl.core.net import Net
from rayfl.experiment import read_experiment
from rayfl.methods import METHODS, Task
from rayfl.methods.sizes import Submodel, published
from rayfl.models import MODELS
from rayfl.training.settings import Training

NeFL = METHODS["nefl"]

FIVE = (1.0, 0.8, 0.6, 0.4, 0.2)


def bound(method, model, capacities=FIVE, metric="params"):
    nets = {c: Net(model, costs.width_for(Net(model), c, metric)) for c in capacities}
    return method.bind(Task(model, Training(), nets, max(capacities), 10, metric)).task


def bits(net):
    return " ".join("".join("01"[path not in net.without] for path in stage) for stage in net.model.blocks)


def resnet18(**fields):
    return MODELS["resnet18"](maxpool=True, **fields)


# one submodel


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("11 00 11 10", "11 00 11 10"),
        ([[1, 1], [0, 0], [1, 1], [1, 0]], "11 00 11 10"),
        ([1, 1, 0], "110"),
        ("all", "all"),
    ],
)
def test_notations_of_blocks(given, kept):
    assert Submodel(capacity=0.5, blocks=given).blocks == kept


BITS = 'all, or bits grouped by stage, in quotes: "11 00 11 10"'
RATIO = 'a number in (0, 1], the root of one, e.g. "sqrt(0.2)", or auto'


@pytest.mark.parametrize(
    ("field", "given", "allowed"),
    [
        ("blocks", "12", BITS),
        ("blocks", 111100, BITS),
        ("width", 1.5, RATIO),
        ("width", "root", RATIO),
        ("width", "sqrt(2)", RATIO),
    ],
)
def test_invalid_submodels(field, given, allowed):
    with pytest.raises(ConfigError) as error:
        parse(Submodel, {"capacity": 0.5, field: given}, "x: s")
    assert str(error.value) == f"x: s.{field}: {given!r} is not valid. Allowed: {allowed}"


def test_bits_are_blocks():
    submodel = Submodel(capacity=0.2, blocks="11 00 11 10")
    assert submodel.without(resnet18()) == ("stage2.0", "stage2.1", "stage4.1")
    assert Submodel(capacity=0.2).without(MODELS["digits_cnn"]()) == ()


@pytest.mark.parametrize(
    ("model", "blocks", "allowed"),
    [
        ("resnet18", "11 00 11", "4 groups of bits, one per stage of [2, 2, 2, 2] blocks"),
        ("resnet18", "11 00 1 10", '2 bits for stage 3, not "1"'),
        ("digits_cnn", "11", "all, because the model has no residual blocks"),
    ],
)
def test_bits_that_do_not_fit_the_model(model, blocks, allowed):
    with pytest.raises(ConfigError) as error:
        Submodel(capacity=0.2, blocks=blocks).without(MODELS[model]())
    problem = f'method.submodels: blocks "{blocks}" of capacity 0.2 do not fit model {model}'
    assert str(error.value) == f"{problem}. Allowed: {allowed}"


# a list of submodels


def test_a_list():
    """An exact root, and the widest network of these blocks within a capacity."""
    submodels = (
        Submodel(capacity=0.2, width="sqrt(0.2)", blocks="11 11 11 10"),
        Submodel(capacity=0.4, width="auto", blocks="11 11 10 10"),
        Submodel(capacity=1, width=1),
    )
    model = resnet18(channels=16)
    task = bound(NeFL(submodels=submodels), model, (1.0, 0.4, 0.2))
    assert list(task.nets) == [1.0, 0.4, 0.2]
    assert task.server == Net(model, steps=True)
    assert task.nets[0.2] == Net(model, math.sqrt(0.2), ("stage4.1",), steps=True)
    net, full = task.nets[0.4], Net(model).parameters
    assert bits(net) == "11 11 10 10" and net.width < 1
    wider = Net(model, net.width + 1 / 128, net.without)
    assert net.parameters <= 0.4 * full < wider.parameters


def test_auto_width_by_width_is_the_capacity():
    submodels = (Submodel(capacity=0.3, blocks="10 10 10 10"), Submodel(capacity=1))
    task = bound(NeFL(submodels=submodels), resnet18(), (1.0, 0.3), "width")
    assert [net.width for net in task.nets.values()] == [1.0, 0.3]


@pytest.mark.parametrize("capacities", [(1, 0.5), (1,), (1, 0.2, 0.2)])
def test_a_list_must_have_every_capacity_once(capacities):
    submodels = tuple(Submodel(capacity=c, width=1) for c in capacities)
    with pytest.raises(ConfigError) as error:
        bound(NeFL(submodels=submodels), resnet18(), (1.0, 0.2))
    given = ", ".join(f"{c:g}" for c in capacities)
    assert str(error.value) == (
        f"method.submodels: the capacities {given} do not match clients.capacities. Allowed: 1, 0.2, each once"
    )


@pytest.mark.parametrize("largest", [{"width": 0.5}, {"width": 1, "blocks": "11 11 11 10"}])
def test_the_largest_submodel_must_contain_all(largest):
    submodels = (Submodel(capacity=0.2, width=0.6), Submodel(capacity=1, **largest))
    with pytest.raises(ConfigError) as error:
        bound(NeFL(submodels=submodels), resnet18(), (1.0, 0.2))
    assert str(error.value) == (
        "method.submodels: the submodel of capacity 0.2 has channels or blocks that the largest, of capacity 1, "
        "lacks. Allowed: a part of the largest submodel"
    )


def test_a_list_in_a_file():
    given = {
        "model": {"name": "resnet18", "channels": 4},
        "clients": {"count": 2, "cohort": 1, "capacities": [1, 0.2]},
        "method": {
            "name": "nefl",
            "submodels": [
                {"capacity": 0.2, "width": "sqrt(0.2)", "blocks": [[1, 1], [1, 0], [0, 0], [1, 0]]},
                {"capacity": 1, "width": 1},
            ],
        },
    }
    experiment = read_experiment(given, "test")
    assert experiment.bound().task.nets[0.2].without == ("stage2.1", "stage3.0", "stage3.1", "stage4.1")
    plain = experiment.plain()
    assert plain["method"]["submodels"][0] == {"capacity": 0.2, "width": "sqrt(0.2)", "blocks": "11 10 00 10"}
    assert read_experiment(plain, "test").method == experiment.method


# auto


def test_auto_in_width_is_the_widest_within_a_capacity():
    task = bound(NeFL(variant="W", learn_steps=False), MODELS["digits_cnn"](), (1.0, 0.3))
    assert task.nets == {c: Net(task.model, costs.width_for(Net(task.model), c, "params")) for c in (1.0, 0.3)}


def test_auto_in_depth_of_resnet18():
    """At 0.6 and 0.4 of the parameters the paper's own blocks; at 0.2 the last stage costs too much."""
    model = resnet18()
    task = bound(NeFL(variant="D"), model)
    assert [bits(net) for net in task.nets.values()] == [
        "11 11 11 11",
        "11 10 00 11",
        "11 11 11 10",
        "11 11 00 10",
        "11 11 10 00",
    ]
    assert {net.width for net in task.nets.values()} == {1.0}


def firsts(net):
    """The first omitted block of every stage that has one."""
    omitted = [[path for path in stage if path in net.without] for stage in net.model.blocks]
    return [paths[0] for paths in omitted if paths]


@pytest.mark.parametrize(("metric", "capacities"), [("params", FIVE), ("flops", (1.0, 0.4))])
@pytest.mark.parametrize("variant", ["D", "WD"])
def test_auto_uses_the_capacity(variant, metric, capacities):
    """No submodel costs more than its capacity; D cannot add a block, WD cannot add a channel, and WD's
    blocks are the most balanced ones at the capacities' roots."""
    model = resnet18(channels=8)
    cost = costs.cost_of(metric)
    task = bound(NeFL(variant=variant), model, capacities, metric)
    for capacity, net in task.nets.items():
        budget = capacity * cost(Net(model))
        assert cost(net) <= budget
        if variant == "D":
            assert net.width == 1
            fuller = [Net(model, without=tuple(path for path in net.without if path != more)) for more in firsts(net)]
            assert all(cost(more) > budget for more in fuller)
        elif capacity < 1:
            root = costs.width_for(Net(model), math.sqrt(capacity), metric)
            assert net.without == costs.depth_for(Net(model), capacity, metric, root, slack=1.0).without
            assert net.width == min(costs.width_for(net, capacity, metric), 1) >= root
        assert all(group == "".join(sorted(group, reverse=True)) for group in bits(net).split())


def test_auto_finds_the_optimum():
    """Among all 81 block counts, none within the capacity costs 1 % of the network more, and none of equal cost is more
    balanced."""
    model = resnet18(channels=8)
    full = Net(model).parameters
    net = bound(NeFL(variant="D"), model, (1.0, 0.45)).nets[0.45]

    def found(counts):
        left = itertools.chain(*(stage[n:] for n, stage in zip(counts, model.blocks, strict=True)))
        return Net(model, without=tuple(left)).parameters

    every = {counts: found(counts) for counts in itertools.product(range(3), repeat=4)}
    affordable = {counts: cost for counts, cost in every.items() if cost <= 0.45 * full}
    chosen = tuple(group.count("1") for group in bits(net).split())
    near = [counts for counts, cost in affordable.items() if cost >= max(affordable.values()) - 0.01 * full]
    assert sorted(chosen) == max(map(sorted, near))
    assert affordable[chosen] == max(affordable[counts] for counts in near if sorted(counts) == sorted(chosen))


def test_auto_is_nested_in_a_largest_that_is_not_full():
    model = resnet18(channels=8)
    task = bound(NeFL(variant="D"), model, (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1))
    assert all({*net.without} >= {*task.server.without} for net in task.nets.values())
    assert task.server.without


def test_a_capacity_that_is_a_ratio_of_counts_buys_that_count():
    model = resnet18(channels=8)
    wanted = Net(model, without=("stage4.1",))
    share = wanted.parameters / Net(model).parameters
    assert bound(NeFL(variant="D", learn_steps=False), model, (1.0, share)).nets[share] == wanted


def test_depth_needs_costs_and_blocks():
    with pytest.raises(ConfigError) as error:
        bound(NeFL(variant="D"), resnet18(), (1.0, 0.5), "width")
    assert str(error.value) == (
        "clients.metric: width is not valid. Allowed: params or flops, because method.submodels is auto and cuts in "
        "depth (D)"
    )
    with pytest.raises(ConfigError) as error:
        bound(NeFL(variant="WD"), MODELS["digits_cnn"](), (1.0, 0.5))
    assert str(error.value) == (
        "model: digits_cnn has no residual blocks. Allowed: a model with residual blocks, because method.submodels "
        "cuts in depth (WD)"
    )
    model = resnet18(channels=8)
    with pytest.raises(
        ConfigError, match="capacity 0.01 by params: the layers of model resnet18 outside residual blocks exceed it"
    ):
        bound(NeFL(variant="D"), model, (1.0, 0.01))
    submodels = (Submodel(capacity=0.0001), Submodel(capacity=1))
    nets = {1.0: Net(model), 0.0001: Net(model, 0.1)}
    with pytest.raises(
        ConfigError,
        match="capacity 0.0001 by params: the narrowest network of model resnet18 exceeds it. Allowed: 0.00133",
    ):
        NeFL(submodels=submodels).bind(Task(model, Training(), nets, 1.0, 10, "params"))


def test_full_capacity_is_the_whole_network():
    for metric in ("width", "params"):
        for name in ("nefl", "depthfl_nefl"):
            assert bound(METHODS[name](), MODELS["digits_cnn"](), (1.0,), metric).server.width == 1


# published


COUNTS = yaml.safe_load((Path(__file__).parents[1] / "nefl_counts.yaml").read_text())


@pytest.mark.parametrize(
    ("name", "variant"), [key for key, _ in itertools.groupby(COUNTS, lambda row: (row["arch"], row["variant"]))]
)
def test_published_submodels(name, variant):
    """Widths and blocks of every table have the known parameters and multiply-adds."""
    rows = [row for row in COUNTS if (row["arch"], row["variant"]) == (name, variant)]
    capacities = (0.5, 0.75, 1.0) if len(rows) == 3 else (0.04, 0.16, 0.36, 0.64, 1.0) if "-" in variant else FIVE
    # like the counts of other tests, without the time to draw weights
    model = MODELS[name](init="torch", maxpool=name not in ("resnet56", "resnet110"))
    cut = variant.partition("-")[0].removesuffix("O")
    task = bound(NeFL(variant=cut, submodels="published", learn_steps=False), model, capacities, "width")
    for row, capacity in zip(rows, sorted(capacities), strict=True):
        net = task.nets[capacity]
        assert net.width == pytest.approx(math.sqrt(row["gamma_W"]))
        assert bits(net) == str(row["blocks"])
    assert task.nets[min(capacities)].parameters == rows[0]["params"]


@pytest.mark.parametrize(
    ("variant", "counts"),
    [
        ("D", [43_279_114, 64_542_730, 85_806_346]),
        ("W", [44_503_906, 65_790_826, 85_806_346]),
        ("WD", [44_079_850, 65_110_678, 85_806_346]),
    ],
)
def test_published_submodels_of_a_transformer(variant, counts):
    model = MODELS["vit_b_16"]()
    task = bound(NeFL(variant=variant, submodels="published"), model, (1.0, 0.75, 0.5), "width")
    assert [task.nets[c].parameters for c in (0.5, 0.75, 1.0)] == counts


def test_published_capacities_have_a_tolerance():
    """ResNet18's third submodel, at 0.57, is valid for 0.6 and not for 0.63."""
    model = resnet18()
    assert published(model, ("D",), FIVE)[0.6].blocks == "11 11 11 10"
    with pytest.raises(ConfigError):
        published(model, ("D",), (1.0, 0.8, 0.63, 0.4, 0.2))


def test_unpublished_submodels():
    with pytest.raises(ConfigError) as error:
        published(resnet18(), ("D",), (1.0, 0.5))
    assert str(error.value) == (
        "method.submodels: no published submodels D of model resnet18 for clients.capacities 1, 0.5. Allowed: W (0.2, "
        "0.4, 0.6, 0.8, 1); D (0.2, 0.38, 0.57, 0.81, 1); WD (0.2, 0.4, 0.6, 0.8, 1); or auto, or a list of submodels"
    )
    with pytest.raises(ConfigError, match=r"D or W of model digits_cnn .* Allowed: the models resnet18, resnet34, "):
        published(MODELS["digits_cnn"](), ("D", "W"), (1.0,))
