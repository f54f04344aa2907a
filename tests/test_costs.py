"""Published counts, matched exactly."""

import functools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from helpers import COMPLETE
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.net import Net
from rayfl.core.operations import CONVENTIONS
from rayfl.costs import cost_of, partial_flops, present, space_mb, training_flops, width_for
from rayfl.models import MODELS
from rayfl.testing.tiny import model_of, tiny

LEVELS = dict(zip("abcde", (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16), strict=True))
"""HeteroFL's capacity levels."""

CIFAR = (557_656_064, 140_416_000, 35_604_992, 9_151_744, 2_413_184)
CIFAR_MACS = (555_422_720, 139_299_328, 35_046_656, 8_872_576, 2_273_600)


def parameters(net):
    return net.parameters


def operations(convention):
    """Return the function that counts operations by this convention."""
    return lambda net: net.operations(convention)


def of_levels(count, model):
    return tuple(count(Net(model, width)) for width in LEVELS.values())


@pytest.mark.parametrize(
    ("name", "classes", "params", "official", "macs"),
    [
        (
            "heterofl_cnn",
            10,
            (1_556_874, 391_370, 98_922, 25_274, 6_594),
            (80_504_320, 20_493_056, 5_306_752, 1_418_432, 400_480),
            (39_974_912, 10_107_904, 2_584_064, 674_560, 182_912),
        ),
        (
            "preact_resnet18_heterofl",
            10,
            (9_622_090, 2_408_746, 603_802, 151_762, 38_350),
            (330_246_144, 83_334_144, 21_219_840, 5_498_112, 1_471_104),
            (328_930_304, 82_676_224, 20_890_880, 5_333_632, 1_388_864),
        ),
        ("preact_resnet18", 10, (11_172_170, 2_796_714, 701_018, 176_178, 44_510), CIFAR, CIFAR_MACS),
    ],
)
def test_heterofl_tables_1_and_2(name, classes, params, official, macs):
    model = MODELS[name](classes=classes)
    assert of_levels(parameters, model) == params
    assert of_levels(operations("heterofl_official"), model) == official
    assert of_levels(operations("macs"), model) == macs


def test_preact_resnet18_with_100_classes():
    model = MODELS["preact_resnet18"](classes=100)
    assert of_levels(parameters, model) == (11_218_340, 2_819_844, 712_628, 182_028, 47_480)
    # a wider classifier: 90 more rows of 512, 256, ... each counted once, or twice with its bias
    rows = tuple(90 * features for features in (512, 256, 128, 64, 32))
    wider = zip(CIFAR_MACS, rows, strict=True)
    assert of_levels(operations("macs"), model) == tuple(n + r for n, r in wider)
    wider = zip(CIFAR, rows, strict=True)
    assert of_levels(operations("heterofl_official"), model) == tuple(n + 2 * r for n, r in wider)


@pytest.mark.parametrize(
    ("name", "mode", "params", "millions"),
    [
        ("heterofl_cnn", "ae", 781_734, 40.452),
        ("heterofl_cnn", "abcde", 415_807, 21.625),
        ("heterofl_cnn", "be", 198_982, None),
        ("heterofl_cnn", "bcde", 130_540, None),
        ("heterofl_cnn", "ce", 52_758, None),
        ("heterofl_cnn", "cde", 43_597, None),
        ("heterofl_cnn", "de", 15_934, None),
        ("preact_resnet18_heterofl", "ae", 4_830_220, 165.859),
        ("preact_resnet18_heterofl", "abcde", 2_564_950, 88.354),
        ("preact_resnet18_heterofl", "be", 1_223_548, 42.403),
        ("preact_resnet18_heterofl", "bcde", 800_665, 27.881),
        ("preact_resnet18_heterofl", "ce", 321_076, 11.345),
        ("preact_resnet18_heterofl", "cde", 264_638, 9.396),
        ("preact_resnet18_heterofl", "de", 95_056, 3.485),
    ],
)
def test_heterofl_mixtures_are_means_over_levels(name, mode, params, millions):
    nets = [Net(MODELS[name](), LEVELS[level]) for level in mode]
    assert sum(net.parameters for net in nets) / len(nets) == pytest.approx(params, abs=0.5)
    if millions is not None:
        mean = sum(net.operations("heterofl_official") for net in nets) / len(nets)
        assert round(mean / 1e6, 3) == pytest.approx(millions, abs=1.1e-3)


def test_space_as_heterofl_prints_it():
    spaces = [space_mb(n) for n in of_levels(parameters, MODELS["heterofl_cnn"]())]
    assert [round(s, 4) for s in spaces] == [5.9390, 1.4930, 0.3774, 0.0964, 0.0252]
    spaces = [space_mb(n) for n in of_levels(parameters, MODELS["preact_resnet18_heterofl"]())]
    assert [round(s, 4) for s in spaces] == [36.7054, 9.1886, 2.3033, 0.5789, 0.1463]


@pytest.mark.parametrize(
    ("width", "params", "macs"),
    [
        (0.2, 457_578, 23_106_102),
        (0.4, 1_803_314, 91_085_522),
        (0.6, 4_049_352, 202_961_160),
        (0.8, 7_175_586, 360_362_820),
        (1.0, 11_173_962, 555_422_720),
    ],
)
def test_fjord_table_1b(width, params, macs):
    net = Net(MODELS["resnet18"](), width)
    assert (net.parameters, net.macs) == (params, macs)


@pytest.mark.parametrize(
    ("name", "ratio", "params", "macs"),
    [
        ("resnet18", 0.2, 2_248_349, 28_941_638),
        ("resnet18", 0.4, 4_480_350, 56_965_608),
        ("resnet18", 0.6, 6_736_490, 85_379_894),
        ("resnet18", 0.8, 8_951_340, 113_450_292),
        ("resnet18", 1.0, 11_173_962, 140_186_624),
        ("resnet34", 0.2, 4_284_065, 59_578_574),
        ("resnet34", 0.4, 8_530_640, 117_619_560),
        ("resnet34", 0.6, 12_835_496, 176_908_094),
        ("resnet34", 0.8, 17_046_144, 234_937_044),
        ("resnet34", 1.0, 21_282_122, 291_181_568),
    ],
)
def test_nefl_width_submodels(name, ratio, params, macs):
    net = Net(MODELS[name](maxpool=True), ratio**0.5)
    assert (net.parameters, net.macs) == (params, macs)


@pytest.mark.parametrize(
    ("name", "without", "params", "macs"),
    [
        ("resnet18", "stage2.0 stage2.1 stage4.0 stage4.1", 2_395_210, 74_126_336),
        ("resnet18", "stage3.0 stage3.1 stage4.1", 4_386_890, 88_282_112),
        ("resnet18", "stage4.1", 6_453_322, 121_312_256),
        ("resnet18", "stage1.1 stage3.0 stage3.1", 9_033_546, 88_282_112),
        ("resnet34", "stage3.2 stage3.3 stage3.4 stage4.1", 13_019_466, 215_684_096),
    ],
)
def test_nefl_depth_submodels(name, without, params, macs):
    """NeFL's Tables XII and XIII: an omitted block keeps its projection."""
    net = Net(MODELS[name](maxpool=True), without=tuple(without.split()))
    assert (net.parameters, net.macs) == (params, macs)


DEEPEST = ("resnet110", "scalefl_resnet110", "wide_resnet101_2", "vit_b_16", "lora")
"""Networks with long rows of blocks, for the tables below."""
NEFL = yaml.safe_load(Path(__file__).with_name("nefl_counts.yaml").read_text())


def nefl_net(row):
    """Return the network of a row of NeFL's tables."""
    small = row["arch"] in ("resnet56", "resnet110")
    # how weights are drawn takes time and costs nothing
    model = MODELS[row["arch"]](maxpool=not small, init="torch")
    stages = zip(model.blocks, row["blocks"].split(), strict=True)
    without = [path for paths, kept in stages for path, bit in zip(paths, kept, strict=True) if bit == "0"]
    return Net(model, row["gamma_W"] ** 0.5, without=tuple(without))


@functools.cache
def pixels(model):
    """Return the output pixels per convolution and linear layer of the full network, by weight."""
    module, found = Net(model).blank().eval(), {}
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(lambda _, x, y, name=f"{path}.weight": found.update({name: y[0, 0].numel()}))
    module(model.example(1, "meta"))
    return found


def nefl_counts(row):
    """Return (parameters, multiply-adds) of a submodel's layers, at the full network's image sizes."""
    net = nefl_net(row)
    shapes, sizes = net.layout.shapes, pixels(net.model)
    return net.parameters, sum(math.prod(shapes[name]) * sizes[name] for name in shapes if name in sizes)


@pytest.mark.parametrize("row", NEFL, ids=lambda row: f"{row['arch']}-{row['variant']}-{row['params']}")
def test_nefl_submodels(row):
    assert nefl_counts(row) == (row["params"], row["macs"])


@pytest.mark.parametrize("name", ["resnet56", "wide_resnet101_2"])
def test_nefl_submodels_as_flops_are_counted(name):
    """The smallest submodel of NeFL-D, without most blocks."""
    row = next(row for row in NEFL if (row["arch"], row["variant"]) == (name, "D"))
    assert nefl_net(row).macs == row["macs"]


@pytest.mark.parametrize(
    ("name", "variant", "millions", "printed"),
    [
        ("resnet18", "WD", (6.711, 87.68), ("6.71", "87.8")),
        ("resnet18", "W", (6.718, 84.98), ("6.71", "85")),
        ("resnet18", "D", (6.689, 102.44), ("6.68", "102")),
        ("resnet34", "WD", (12.611, 180.87), ("12.6", "181")),
        ("resnet34", "W", (12.796, 176.04), ("12.8", "176")),
        ("resnet34", "D", (12.931, 193.03), ("12.9", "193")),
        ("resnet56", "WD", (0.521, 78.27), ("0.51", None)),
        ("resnet56", "W", (0.525, 78.85), ("0.52", None)),
        ("resnet56", "D", (0.517, 74.79), ("0.51", None)),
        ("resnet110", "WD", (1.057, 157.72), ("1.05", "158")),
        ("resnet110", "W", (1.062, 158.62), ("1.06", "159")),
        ("resnet110", "D", (1.041, 178.60), ("1.04", None)),
    ],
)
def test_nefl_table_v(name, variant, millions, printed):
    """Means over the submodels, in millions, and what the paper prints, some of it cut off instead of rounded. None:
    ResNet56's 530, 534 and 526 and ResNet110's 234 (D) million multiply-adds come out by no way of counting."""
    rows = [nefl_counts(row) for row in NEFL if (row["arch"], row["variant"]) == (name, variant)]
    params, macs = (sum(counts) / len(rows) / 1e6 for counts in zip(*rows, strict=True))
    assert (round(params, 3), round(macs, 2)) == millions
    for value, text in zip((params, macs), printed, strict=True):
        if text is not None:
            digits = len(text.partition(".")[2])
            assert abs(value - float(text)) < 1.2 * 10**-digits


def test_depthfl_depths():
    """The parameters of the network in the authors' baseline; the multiply-adds in millions, 165.2 to 582.1."""
    hundred, ten = ([Net(MODELS["depthfl_resnet18"](classes=c), exits=n) for n in (1, 2, 3, 4)] for c in (100, 10))
    assert [net.parameters for net in hundred] == [479_652, 1_347_336, 3_838_316, 12_283_344]
    assert [net.macs for net in hundred] == [165_160_960, 308_187_136, 447_846_400, 582_115_328]
    assert [net.parameters for net in ten] == [433_482, 1_254_996, 3_699_806, 12_098_664]


def test_scalefl_levels():
    """ScaleFL's widths and exits of ResNet110, as a share of the whole: parameters and multiply-adds."""
    model = MODELS["scalefl_resnet110"]()
    nets = [Net(model, width, exits=n, rounding="down") for n, width in enumerate((0.7, 0.7, 0.75, 1), start=1)]
    params, macs = [net.parameters for net in nets], [net.macs for net in nets]
    assert params == [157_453, 325_631, 783_402, 1_982_136]
    assert macs == [70_062_300, 90_754_708, 133_190_832, 274_385_088]
    assert [round(n / params[-1], 3) for n in params] == [0.079, 0.164, 0.395, 1]
    assert [round(n / macs[-1], 3) for n in macs] == [0.255, 0.331, 0.485, 1]


@pytest.mark.parametrize("name", ["depthfl_resnet18", "scalefl_resnet110"])
def test_without_exits_nothing_is_counted_of_them(name):
    net, plain = Net(MODELS[name]()), Net(MODELS[name](exits=()))
    assert net.layout == plain.layout
    assert net.macs == plain.macs


@pytest.mark.parametrize("name", ["resnet18", "preact_resnet18"])
def test_step_sizes_are_not_counted(name):
    net, stepping = (Net(MODELS[name](), steps=steps) for steps in (False, True))
    assert stepping.parameters == net.parameters
    assert stepping.macs == net.macs


@pytest.mark.parametrize(
    ("name", "width", "params", "macs"),
    [
        ("mcmahan_cnn", 1, 1_663_370, 12_273_152),
        ("mcmahan_cnn", 0.5, 417_482, 3_226_368),
        ("lenet5_caffe", 1, 430_500, 2_293_000),
    ],
)
def test_mnist_networks(name, width, params, macs):
    net = Net(MODELS[name](), width)
    assert (net.parameters, net.macs) == (params, macs)


def test_flops2_by_hand():
    """digits_cnn with one channel everywhere: 8x8 -> 4x4 -> 2x2 -> 1 hidden -> 10 classes."""
    net = Net(MODELS["digits_cnn"](), 1 / 128)
    conv1 = 2 * 9 * 64 + 64 + 4 * 64 + 64 + 16  # multiply-adds, bias, norm, pooling, activation
    conv2 = 2 * 9 * 16 + 16 + 4 * 16 + 16 + 4
    hidden = 2 * 4 + 1 + 1
    head = 2 * 10 + 10
    assert net.operations("flops2") == conv1 + conv2 + hidden + head
    assert net.operations("macs") == 9 * 64 + 9 * 16 + 4 + 10


def test_layers_cost_by_hand():
    """As above; and layers in parallel, or in early exits, each have their own."""
    assert Net(MODELS["digits_cnn"](), 1 / 128).layer_macs == {
        "conv1": 9 * 64,
        "conv2": 9 * 16,
        "hidden": 4,
        "head": 10,
    }
    for name in ("lenet5_caffe", "resnet18", "vit_b_16"):
        assert sum(Net(MODELS[name]()).layer_macs.values()) == Net(MODELS[name]()).macs
    exits = Net(MODELS["depthfl_resnet18"](), exits=2)
    assert sum(exits.layer_macs.values()) == exits.macs and exits.layer_macs["exit2.head"] == 512 * 10


def test_a_masked_network_is_what_is_not_zero():
    """3 of 9 weights of conv1, 1 of 4 weights of hidden and its only bias are zero. Zeros outside masks count as
    parameters."""
    net = Net(MODELS["digits_cnn"](), 1 / 128)
    params = {name: torch.ones(shape) for name, shape in net.layout.shapes.items()}
    params["conv1.weight"].view(-1)[[0, 4, 8]] = 0
    params["hidden.weight"][0, 2] = -0.0
    params["hidden.bias"].zero_()
    params["conv2.weight"].zero_()
    found = present(net, params, ("conv1.weight", "hidden.weight", "hidden.bias"))
    assert found.parameters == net.parameters - 3 - 1 - 1
    assert found.layers == {"conv1": 2 / 3, "hidden": 3 / 4}
    assert found.macs == pytest.approx(9 * 64 * 2 / 3 + 9 * 16 + 4 * 3 / 4 + 10)
    everything = present(net, params, ())
    assert (everything.parameters, everything.macs) == (net.parameters, net.macs)
    assert everything.layers == {}


def test_step_sizes_are_not_counted_of_a_masked_network_either():
    net = Net(MODELS["resnet18"](channels=2), steps=True)
    params = {name: torch.ones(shape) for name, shape in net.layout.shapes.items()}
    assert present(net, params, ("head.weight",)).parameters == net.parameters


def test_training_costs_three_forward_passes_of_two_operations_a_multiply_add():
    net = Net(MODELS["lenet5_caffe"]())
    assert training_flops(net, 600) == 6 * 2_293_000 * 600
    without = 2_293_000 - net.layer_macs["conv2"]
    assert training_flops(net, 600, {"conv2": 0.25}) == 6 * (without + net.layer_macs["conv2"] / 4) * 600


@pytest.mark.parametrize("name", [name for name in COMPLETE if name not in DEEPEST])
def test_counts_are_those_of_the_network(name):
    net, scaled = (Net(MODELS[name](), 1 / 16, scale=scale) for scale in (1, 0.5))
    assert scaled.parameters == sum(p.numel() for p in scaled.blank().parameters())
    assert all(scaled.operations(c) == net.operations(c) for c in CONVENTIONS)


@pytest.mark.parametrize("metric", ["params", "flops"])
@pytest.mark.parametrize("name", ["digits_cnn", "lenet5_caffe", "mcmahan_cnn"])
def test_width_for_is_the_largest_that_the_budget_buys(name, metric):
    net, cost = Net(MODELS[name]()), cost_of(metric)
    for capacity in (0.04, 0.16, 0.5, 0.9):
        width = width_for(net, capacity, metric)
        bought, next_one = replace(net, width=width), replace(net, width=width + 1e-6)
        assert cost(bought) <= capacity * cost(net) < cost(next_one)


def test_width_for_everything_needs_no_narrower_network():
    """Whose norm of groups of four channels could not be built."""
    net = Net(model_of("resnet18").model_copy(update={"norm": "group"}))
    assert width_for(net, 1.0, "params") == 1.0


@pytest.mark.parametrize("metric", ["params", "flops"])
def test_width_for_inverts_the_costs_of_the_levels(metric):
    net, cost = Net(MODELS["preact_resnet18_heterofl"]()), cost_of(metric)
    for level in LEVELS.values():
        assert width_for(net, cost(replace(net, width=level)) / cost(net), metric) == level


def test_width_is_its_own_metric():
    assert width_for(Net(MODELS["resnet18"]()), 0.3, "width") == 0.3


def test_a_budget_below_one_channel_is_refused():
    net = Net(MODELS["lenet5_caffe"]())
    # 25 + 25 weights of the convolutions, 16 of the hidden layer, 10 of the classifier
    smallest = (25 + 25 + 16 + 10) / 430_500
    assert width_for(net, smallest, "params") == 1 / 500
    with pytest.raises(ConfigError) as error:
        width_for(net, 0.0001, "params")
    assert str(error.value) == (
        "capacity 0.0001 by params: the narrowest network of model lenet5_caffe exceeds it. Allowed: 0.000177 to 1"
    )


def test_training_an_embedding_goes_back_through_the_whole_network():
    """Its own gradient costs nothing. Norms alone: back to the first layer after them."""
    text = {"name": "synthetic_text", "task": "next_token"}
    net = tiny(method="fedavg", model="heterofl_transformer", data=text, partition="iid").bound().task.server
    head = net.layer_macs["head.layers.answer"]
    embedding = net.embeddings["embedded.tokens"]
    assert partial_flops(net, ["head.layers.answer.weight"], 3) == 3 * 2 * (net.macs + 2 * head)
    assert partial_flops(net, [*embedding, "head.layers.answer.weight"], 3) == 3 * 2 * (2 * net.macs + head)
    cnn = Net(MODELS["digits_cnn"]())
    after = cnn.macs - cnn.layer_macs["conv1"]
    norms = [name for name in cnn.layout.shapes if name.startswith("norm1.")]
    assert norms and partial_flops(cnn, norms, 1) == 2 * (cnn.macs + after)
    gpt2 = {"name": "gpt2", "hidden": 16, "heads": 2, "layers": 1, "positions": 16}
    tied = tiny(method="fedavg", model=gpt2, data=text, partition="iid").bound().task.server
    assert partial_flops(tied, ["transformer.ln_f.weight"], 1) == 2 * (tied.macs + tied.layer_macs["lm_head"])
    adapted = Net(model_of("lora"))
    last = [*adapted.layer_macs][-1]
    expected = 2 * (adapted.macs + 2 * adapted.layer_macs[last])
    assert partial_flops(adapted, [f"{last}.weight", f"{last}.bias"], 1) == expected
