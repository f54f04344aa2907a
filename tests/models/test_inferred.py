"""Axes that are inferred from a forward pass: by hand, and against the whole network with zeros elsewhere."""

import io
import zipfile
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_cut_is_whole_with_zeros
from torch import nn

from rayfl.config import ConfigError
from rayfl.core import values
from rayfl.core.axes import Concat, segments
from rayfl.core.net import Net, check_axes
from rayfl.core.submodel import prefix
from rayfl.engine.inputs import inputs_of
from rayfl.engine.plugins import packed
from rayfl.models.inferred.module import Module, _plan
from rayfl.models.inferred.norms import replace_norms
from rayfl.models.inferred.trace import Untraceable
from rayfl.testing.tiny import Branches, run, simulate, tiny


class Looks(nn.Module):
    """A network whose path depends on its input."""

    def __init__(self, num_classes: int = 4):
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(x if x.sum() > 0 else -x)


class Attends(nn.Module):
    """Attention as users write it: queries, keys and values of one layer, with sizes kept beside the parameters."""

    def __init__(self, width: int = 12, heads: int = 3, num_classes: int = 4):
        super().__init__()
        self.heads, self.width, self.inside = heads, width, width // heads
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.places = nn.Parameter(torch.zeros(1, 4, width))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        q, k, v = self.qkv(x).view(len(x), 4, 3, self.heads, self.inside).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, scale=0.5).transpose(1, 2).reshape(len(x), 4, self.width)
        return self.head((x + self.out(y)).mean(1))


class Sorts(nn.Module):
    """Operations without a rule on one branch, whose channels stay whole."""

    def __init__(self, num_classes: int = 4):
        super().__init__()
        self.first, self.second = nn.Linear(64, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x):
        return self.head(F.relu(self.second(self.first(x.flatten(1)).sort(1).values)))


class Block(nn.Module):
    """A residual block that ends with the addition."""

    def __init__(self, channels: int):
        super().__init__()
        self.first, self.norm = nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.BatchNorm2d(2 * channels)
        self.second = nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x):
        return x + self.second(F.relu(self.norm(self.first(x))))


class Deep(nn.Module):
    """Residual blocks at two sizes, between them a concatenation of two halves."""

    def __init__(self, width: int = 8, num_classes: int = 4):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.early = nn.Sequential(Block(width), Block(width))
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.late = nn.ModuleList([Block(2 * width) for _ in range(3)])
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, x):
        x = self.early(self.stem(x))
        x = torch.cat([F.max_pool2d(x, 2), self.down(x)], 1)
        for block in self.late:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Rank(nn.Module):
    def forward(self, x):
        return x.flatten(2).msort().view_as(x)


class Ranked(nn.Module):
    """An operation without a rule, in a module of its own."""

    def __init__(self, num_classes: int = 4):
        super().__init__()
        self.first, self.rank, self.last = nn.Conv2d(1, 6, 3), Rank(), nn.Conv2d(6, 5, 3)
        self.head = nn.Linear(5, num_classes)

    def forward(self, x):
        return self.head(self.last(self.rank(self.first(x))).mean((2, 3)))


class Auxiliary(nn.Linear):
    """A network with a second output in training."""

    def __init__(self, num_classes: int = 4):
        super().__init__(64, num_classes)

    def forward(self, x):
        y = super().forward(x.flatten(1))
        return (y, y) if self.training else y


class Whole(nn.Module):
    def __init__(self, num_classes: int = 4):
        super().__init__()
        self.head = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.head(x.flatten(1))


def module(of, **given) -> Module:
    of = f"test_inferred:{of}" if ":" not in of else of
    return Module(**{"of": of, "input": (1, 8, 8), "classes": 4} | given)


BRANCHES = "rayfl.testing.tiny:Branches"


def parts(net, name):
    """Return (axis, groups, size, copies) of the parts of each dimension."""
    return [[(a.name, a.groups, a.size, a.copies) for _, a in segments(dim)] for dim in net.layout.dims[name]]


def test_axes_by_hand():
    """A residual addition, a depthwise convolution, a concatenation, a flatten."""
    net = Net(module(BRANCHES))
    assert {name: axis.size for name, axis in net.layout.axes.items()} == {"stem": 8, "inner.0": 16, "branch": 7}
    assert parts(net, "stem.weight") == [[("stem", 1, 8, 1)], [], [], []]
    assert parts(net, "outer.weight")[:2] == [[("stem", 1, 8, 1)], [("inner.0", 1, 16, 1)]]
    assert parts(net, "depthwise.weight") == [[("inner.0", 1, 16, 1)], [], [], []]
    assert parts(net, "norm.weight") == [[("stem", 1, 8, 1), ("branch", 1, 7, 1)]]
    assert parts(net, "head.weight") == [[("classes", 1, 4, 1)], [("stem", 1, 8, 16), ("branch", 1, 7, 16)]]
    assert isinstance(net.layout.dims["norm.weight"][0], Concat)


def test_a_narrow_network_is_really_narrow():
    """4 of 8, 8 of 16 and 4 of 7 channels: every layer's parameters and attributes."""
    net = Net(module(BRANCHES), 0.5)
    built = net.build()
    assert (built.depthwise.in_channels, built.depthwise.groups, built.head.in_features) == (8, 8, 8 * 16)
    by_hand = (4 * 9 + 4) + (8 * 4 + 8) + 2 * 8 + 8 * 9 + (4 * 8 + 4) + (4 * 4 * 9 + 4) + 2 * 8 + (4 * 128 + 4)
    assert net.parameters == by_hand
    macs = 64 * (4 * 9 + 8 * 4 + 8 * 9 + 4 * 8) + 16 * 4 * 4 * 9 + 4 * 128
    assert net.macs == macs
    check_axes(Net(module(BRANCHES)), 0.5)


def test_a_concatenation_is_cut_in_each_part():
    whole = Net(module(BRANCHES))
    norm = {"norm.weight": torch.arange(15.0)}
    assert prefix(whole, replace(whole, width=0.5)).take(norm)["norm.weight"].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


def test_queries_keys_and_values_share_the_positions_of_a_head():
    net = Net(module("Attends"), 0.5)
    assert parts(Net(module("Attends")), "qkv.weight") == [[("qkv", 9, 4, 1)], [("places", 1, 12, 1)]]
    built = net.build()
    assert (built.inside, built.width, built.heads, built.qkv.weight.shape) == (2, 6, 3, (18, 6))


@pytest.mark.parametrize(
    ("of", "given"),
    [
        ("Attends", {}),
        ("torchvision.models:squeezenet1_1", {"input": (3, 32, 32)}),
        ("torchvision.models:mobilenet_v3_small", {"input": (3, 32, 32)}),
        (
            "torchvision.models:DenseNet",
            {"input": (3, 32, 32), "options": {"growth_rate": 4, "block_config": [2, 2], "num_init_features": 6}},
        ),
    ],
)
def test_a_narrow_network_is_the_whole_one_with_zeros_elsewhere(of, given, float64):
    """At random positions of every axis."""
    whole = Net(module(of, **given))
    assert len(whole.layout.axes) > 1 and whole.output.shape == (1, 4)
    assert replace(whole, width=0.4).parameters < 0.5 * whole.parameters
    assert_cut_is_whole_with_zeros(whole, torch.randn(2, *whole.model.input))


def test_torch_s_attention_keeps_its_heads():
    options = {"image_size": 8, "patch_size": 4, "num_layers": 1, "num_heads": 2, "hidden_dim": 12, "mlp_dim": 10}
    net = Net(module("torchvision.models:VisionTransformer", input=(3, 8, 8), options=options), 0.5)
    attention = net.build().encoder.layers[0].self_attention
    assert (attention.embed_dim, attention.num_heads, attention.head_dim) == (6, 2, 3)
    assert net.build()(torch.zeros(2, 3, 8, 8)).shape == (2, 4)


def test_what_has_no_rule_stays_whole():
    net = Net(module("Sorts"), 0.5)
    assert net.layout.axes.keys() == {"second"}
    assert net.build().first.weight.shape == (8, 64)


def test_notes_name_axes_blocks_and_what_is_not_counted():
    """Two heads of six features, five tokens: 2 * 5 * 5 * 12 products of attention, and 5 * 12 * 48 of its layers."""
    options = {"image_size": 8, "patch_size": 4, "num_layers": 1, "num_heads": 2, "hidden_dim": 12, "mlp_dim": 10}
    model = module("torchvision.models:VisionTransformer", input=(3, 8, 8), options=options)
    block = "encoder.layers.encoder_layer_0"
    assert model.notes()[1:] == [
        f"Axis {block}.mlp.0: 10 positions of {block}.mlp.0, {block}.mlp.3",
        f"Blocks that can be left out: {block}",
        "Not counted: 600 multiply-adds per sample outside of convolutions and linear layers, in "
        f"{block}.self_attention",
    ]
    assert Net(model).layer_macs[f"{block}.self_attention"] == 5 * 12 * 48
    assert "Not cut: rank: no rule for sort. Hint: model.axes declares" in "\n".join(module("Ranked").notes())


def test_declared_axes():
    """Sorting along pixels has no rule: the channels before and after it are one axis only if they are declared."""
    assert Net(module("Ranked")).layout.axes.keys() == {"last"}
    net = Net(module("Ranked", axes={"first": "stage", "rank": "stage"}))
    assert {name: axis.size for name, axis in net.layout.axes.items()} == {"stage": 6, "last": 5}
    assert parts(net, "last.weight") == [[("last", 1, 5, 1)], [("stage", 1, 6, 1)], [], []]
    assert replace(net, width=0.5).build()(torch.zeros(2, 1, 8, 8)).shape == (2, 4)


def test_exported_networks_answer_alike():
    """Also those that end at an exit, or lack blocks."""
    model, x = module("Deep", exits=EXITS), torch.randn(3, 1, 8, 8)
    for net in (Net(model, exits=2), Net(model, 0.5, without=("late.0",), exits=3, steps=True)):
        network = net.build().eval()
        program = torch.export.export(network, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        for given, expected in zip(program.module()(x[:2]), network(x[:2]), strict=True):
            torch.testing.assert_close(given, expected)


def test_blocks_and_exits_of_transformers():
    """BERT adds inside of two modules of a layer, each to another input."""
    options = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    layers = ("bert.encoder.layer.0", "bert.encoder.layer.1")
    given = {"of": "transformers:BertForSequenceClassification", "options": options, "exits": layers[:1]}
    model = Module(**given, ids=20, length=6, pad=20, classes=4)
    assert model.blocks == (layers,)
    x = torch.zeros(3, 6, dtype=torch.int64)
    for net in (Net(model, exits=1), Net(model, 0.5, exits=2, steps=True, without=layers[1:])):
        assert [tuple(y.shape) for y in net.build()(x)] == [(3, 4)] * net.exits
    assert not [name for name in Net(model, exits=1).layout.shapes if name.startswith((layers[1], "classifier"))]


def test_grey_images_for_a_network_of_three_channels():
    model = module(BRANCHES, options={"channels": 3}, channels=3)
    whole, x = Net(model).build().eval(), torch.randn(2, 1, 8, 8)
    plain = Branches(channels=3).eval()
    plain.load_state_dict(whole.state_dict(), strict=False)
    plain.norm, plain.inner[1] = whole.norm, whole.inner[1]
    assert torch.equal(whole(x), plain(x.repeat(1, 3, 1, 1)))
    assert Net(model, 0.5).build()(x).shape == (2, 4)


def test_named_modules_are_never_cut():
    net = Net(module(BRANCHES, fixed=("branch",)))
    assert net.layout.axes.keys() == {"inner.0"}


def test_the_classes_and_options_reach_the_constructor():
    net = Net(module(BRANCHES, options={"width": 4}, classes=7))
    assert net.output.shape == (1, 7) and net.layout.axes["stem"].size == 4
    assert net.layout.classifier == ("head.weight", "head.bias")


DEEP = "test_inferred:Deep"
BLOCKS = (("early.0", "early.1"), ("late.0", "late.1", "late.2"))


def test_residual_blocks_are_found():
    assert module("Deep").blocks == BLOCKS
    assert module("Deep", skippable=("late.1", "early.0")).blocks == (("early.0",), ("late.1",))
    # a sequence of blocks, a norm and a ReLU are none
    assert module(BRANCHES).blocks == ()


def test_the_network_without_blocks():
    """It is the network whose blocks add nothing, at any width."""
    whole = Net(module("Deep"), 0.5)
    short = replace(whole, without=("early.1", "late.0"))
    missing = whole.layout.shapes.keys() - short.layout.shapes.keys()
    assert {name.rpartition(".")[0].rpartition(".")[0] for name in missing} == {"early.1", "late.0"}
    with torch.no_grad():
        networks = [net.build().eval() for net in (short, whole)]
        kept = dict(networks[0].named_parameters())
        for name, parameter in networks[1].named_parameters():
            parameter.copy_(kept.get(name, torch.zeros(())))
        x = torch.randn(3, 1, 8, 8)
        assert torch.equal(networks[0](x), networks[1](x))


def test_step_sizes_scale_what_a_block_adds():
    net = Net(module("Deep"), steps=True)
    network, plain = net.build().eval(), replace(net, steps=False).build().eval()
    steps = {name for name in net.layout.shapes if name.endswith(".step.scale")}
    assert (
        steps == {f"{path}.step.scale" for path in (*BLOCKS[0], *BLOCKS[1])}
        and net.parameters == Net(net.model).parameters
    )
    plain.load_state_dict({name: t for name, t in network.state_dict().items() if name not in steps})
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(network(x), plain(x))
        network.get_submodule("late.2.step").scale.fill_(0.5)
        plain.get_parameter("late.2.second.weight").mul_(0.5)
        plain.get_parameter("late.2.second.bias").mul_(0.5)
        torch.testing.assert_close(network(x), plain(x))


EXITS = ("early.0", "late.1")


def test_early_exits_end_the_network():
    """Each is a linear classifier of the mean of its features; what lies behind the last one is absent."""
    model = module("Deep", exits=EXITS)
    plain, every, first = Net(model), Net(model, exits=3), Net(model, exits=1)
    assert model.exit_count == 3 and plain.parameters == Net(module("Deep")).parameters
    assert every.parameters == plain.parameters + 4 * (8 + 1) + 4 * (16 + 1)
    assert {name.partition(".")[0] for name in first.layout.shapes} == {"stem", "early", "exit1"}
    assert not [name for name in first.layout.shapes if name.startswith("early.1")]
    assert parts(every, "exit2.head.weight") == [[("classes", 1, 4, 1)], parts(every, "head.weight")[1]]
    check_axes(every, 0.5)
    x, networks = torch.randn(2, 1, 8, 8), [net.build().eval() for net in (every, replace(every, exits=2), first)]
    state = networks[0].state_dict()
    with torch.no_grad():
        answers = networks[0](x)
        for count, network in zip((2, 1), networks[1:], strict=True):
            network.load_state_dict({name: state[name] for name in network.state_dict()})
            assert all(map(torch.equal, network(x), answers[:count])) and len(network(x)) == count
        features = networks[0].early[0](networks[0].stem(x))
        assert torch.equal(networks[0].exit1.head(features.mean((2, 3))), answers[0])


def norm_of(kind):
    return module("Deep", norm=kind)


def test_norms():
    """Batch norms become static, group norms, or a scale and a shift with the statistics of the start."""
    assert [len(Net(norm_of(kind)).norms) for kind in ("static_bn", "group", "keep")] == [6, 0, 0]
    group = Net(norm_of("group"), 0.5).build().stem[1]
    assert (group.num_groups, group.num_channels) == (4, 4)
    network = nn.Sequential(nn.BatchNorm2d(3))
    network[0].running_mean += 2
    network[0].running_var += 3
    nn.init.constant_(network[0].weight, 5)
    x = torch.randn(2, 3, 4, 4)
    expected = network.eval()(x)
    torch.testing.assert_close(replace_norms(network, "keep")(x), expected)


class Activated(nn.BatchNorm2d):
    """A batch norm as timm's: its children run after it."""

    def __init__(self, channels: int):
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(super().forward(x))


class Shifted(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 1


def test_batch_norms_of_other_libraries():
    network, x = nn.Sequential(Activated(3)), torch.randn(5, 3, 4, 4)
    expected = network(x)
    assert expected.min() == 0 and torch.equal(replace_norms(network, "static_bn")(x), expected)
    with pytest.raises(Untraceable, match=r"0 \(Shifted\) computes more than a batch norm"):
        replace_norms(nn.Sequential(Shifted(3)), "group")


@pytest.mark.parametrize(
    "method",
    [
        "depthfl",
        "scalefl",
        {"name": "nefl", "variant": "WD"},
        {"name": "nefl", "variant": "D", "skipping_steps": True},
        "fedra",
        "inclusivefl",
    ],
)
def test_methods_leave_blocks_out(method, tmp_path):
    clients = {"capacities": [1, 0.4], "metric": "params"}
    exits = ["early.1"] if method in ("depthfl", "scalefl") else []
    experiment = tiny(model={"name": "module", "of": DEEP, "exits": exits}, method=method, clients=clients, rounds=1)
    simulation = simulate(experiment, tmp_path)
    parts = {(net.without, net.exits) for net in simulation.method.task.nets.values()}
    assert len(parts) == 2 and (() in {without for without, _ in parts})
    [line] = run(simulation)
    assert line["refused"] == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"of": DEEP, "skippable": ["down"]}, "test: model.skippable: 'down' is not valid. Allowed: modules that"),
        ({"of": DEEP, "skippable": ["early.2"]}, "test: model.skippable: 'early.2' is not valid. Allowed: modules of"),
        ({"of": DEEP, "exits": ["late.0", "early.0"]}, "model.exits: late.0, early.0 is not valid. Allowed: modules"),
        ({"of": DEEP, "axes": {"stem": "a", "late.0": "a"}}, "model.axes: 'late.0' has 16 channels. Allowed: 8, as"),
        ({"of": DEEP, "axes": {"steam": "a"}}, "test: model.axes: 'steam' is not valid. Allowed: modules of"),
        ({"of": DEEP, "fixed": ["late.9"]}, "test: model.fixed: 'late.9' is not valid. Allowed: modules of"),
        ({"of": "nowhere:Net"}, "test: model.of: 'nowhere:Net' cannot be imported (ModuleNotFoundError"),
        ({"of": BRANCHES, "options": {"wide": 3}}, "test: model.options: {'wide': 3, 'num_classes': 4} is not valid"),
        ({"of": BRANCHES, "options": {"num_classes": 3}}, "returns outputs of shape [3] per sample. Allowed: [4]"),
        ({"of": "test_inferred:Looks"}, "do not look at the values of tensors"),
        ({"of": BRANCHES, "options": {"channels": 3}}, "stem does not run on the meta device"),
        ({"of": BRANCHES, "options": {"channels": 3}}, "Hint: channels: 3 repeats the channel of these images. Or"),
        ({"of": "test_inferred:Auxiliary"}, "in training it returns tensors of shape [[2, 4], [2, 4]], in evaluation"),
        (
            {"of": "collections:OrderedDict"},
            "model.of: collections:OrderedDict returned OrderedDict. Allowed: a torch.nn.Module",
        ),
    ],
)
def test_networks_that_do_not_fit(given, message):
    with pytest.raises(ConfigError) as error:
        tiny(model={"name": "module", **given})
    assert message in str(error.value)


def test_a_network_without_axes_is_refused_by_methods_that_cut():
    with pytest.raises(ConfigError) as error:
        tiny(model={"name": "module", "of": "test_inferred:Whole"}, method="heterofl")
    assert str(error.value).endswith(
        "Allowed with method heterofl: a model whose layers have axes to cut, or clients.capacities: [1]. Hint: "
        "model.axes declares what is not cut: head: addmm, the network: output"
    )
    tiny(model={"name": "module", "of": "test_inferred:Whole"}, method="fedavg")


def test_a_class_of_an_importable_module_is_its_name():
    assert Module(nn.Linear).of == "torch.nn.modules.linear:Linear"
    assert Module(nn.Linear, bias=False) == Module(of=nn.Linear, options={"bias": False})


def local():
    class Local(Branches):
        """A class without an import path."""

    return Local


def test_what_has_no_import_path_is_sent_by_value(tmp_path, monkeypatch):
    """Another process finds the class and its plan in the archive of the run, and infers nothing."""
    given = [local(), lambda num_classes: Branches(num_classes=num_classes), Branches()]
    models = [Module(of, input=(1, 8, 8), classes=4) for of in given]
    assert [model.of.partition("@")[0].rpartition(".")[2] for model in models] == ["Local", "<lambda>", "Branches"]
    assert Module(local(), input=(1, 8, 8), classes=4) == models[0]
    shapes = [Net(model, 0.5).layout.shapes for model in models]
    with zipfile.ZipFile(io.BytesIO(packed(models))) as archive:
        archive.extractall(tmp_path)
    monkeypatch.setattr(values, "_KEPT", {})
    for model in models:
        with pytest.raises(ConfigError, match="is an object of another Python program"):
            model.constructor()
    monkeypatch.setattr(values, "FOLDERS", [tmp_path])
    monkeypatch.setattr("rayfl.models.inferred.module.plan_of", None)
    _plan.cache_clear()
    assert [Net(model, 0.5).build().stem.out_channels for model in models] == [4, 4, 4]
    assert [Net(model, 0.5).layout.shapes for model in models] == shapes


def test_the_code_of_a_network_is_an_input_of_the_run():
    experiment = tiny(model={"name": "module", "of": DEEP})
    assert "code test_inferred" in inputs_of([experiment], experiment.data.arrays())
    ours = tiny(model={"name": "module", "of": BRANCHES})
    assert not [name for name in inputs_of([ours], ours.data.arrays()) if name.startswith("code")]


def test_a_network_is_its_own_start():
    network = Branches()
    network.norm.running_mean.fill_(3)
    model = Module(network, input=(1, 8, 8), classes=4)
    state = network.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in Net(model).initial().items())
    narrow = Net(model, 0.5)
    assert torch.equal(narrow.initial()["branch.weight"], state["branch.weight"][:4, :4])
    assert torch.equal(narrow.statistics()["norm.running_mean"], torch.full((8,), 3.0))
    # later changes of the network are none of the model's
    nn.init.zeros_(network.stem.weight)
    assert not torch.equal(Net(model).initial()["stem.weight"], network.stem.weight)
    assert Module(network).of != model.of
    with pytest.raises(ConfigError, match=r"options: \{'width': 3\} is not valid with a network"):
        Module(network, width=3).constructor()


def published(num_classes: int = 7, weights: str | None = None):
    """A network of seven classes with published weights, as torchvision's."""
    if weights and num_classes != 7:
        raise ValueError("these weights have 7 classes")
    network = Deep(num_classes=num_classes)
    for t in network.state_dict().values() if weights else ():
        t.fill_(2)
    return network


@pytest.mark.parametrize(("norm", "scale"), [("static_bn", 2), ("group", 2), ("keep", 2 * (2 + 1e-5) ** -0.5)])
def test_weights_of_the_constructor_are_the_start(norm, scale):
    """Of the whole network but its classifier, whose classes are those of the data."""
    model = module("published", options={"weights": "PUBLISHED"}, norm=norm)
    net = Net(model)
    params, statistics = net.initial(), net.statistics()
    assert (params["late.1.first.weight"] == 2).all() and not (params["head.weight"] == 2).any()
    torch.testing.assert_close(params["stem.1.weight"], torch.full((8,), float(scale)))
    assert all((t == 2).all() for t in statistics.values()) and bool(statistics) == (norm == "static_bn")
    new = Net(model.blank)
    assert not (new.initial()["late.1.first.weight"] == 2).any() and new.layout == net.layout
