"""Networks as values: derived values, caching of equal networks, the two-width check."""

import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Literal

import cloudpickle
import pytest
import torch
from torch import nn

from rayfl.core.axes import Axis, conv, embedding, linear, norm
from rayfl.core.net import Net, cached_module, check_axes, load, params_of
from rayfl.core.norms import static_norms
from rayfl.core.seeds import torch_scope
from rayfl.costs import width_for
from rayfl.models import MODELS, ImageModel, Model


class Small(ImageModel):
    """A convolution [a, image, 3, 3] over images of 4x4 pixels, its norm, and a classifier of the 2x2 pixels left."""

    name: Literal["small"] = "small"
    input: tuple[int, int, int] = (1, 4, 4)
    classes: int = 3
    norm: Literal["static_bn", "layer"] = "static_bn"

    def build(self, net: Net) -> nn.Module:
        a = net.axis("a", 4)
        layers = [conv(self.image, a, 3), norm(self.norm, a), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*layers, linear(a.repeat(4), self.labels, bias=False))


class Words(Model):
    """Sentences of 5 words; the prediction is the mean of the words' features."""

    vocabulary: int = 7

    def build(self, net: Net) -> nn.Module:
        features = net.axis("features", 6)
        return nn.Sequential(
            embedding(Axis.fixed("words", self.vocabulary), features), Mean(), linear(features, CLASSES)
        )

    def example(self, batch: int, device: torch.device | str) -> torch.Tensor:
        return torch.zeros(batch, 5, dtype=torch.long, device=device)


CLASSES = Axis.fixed("classes", 2)


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


FULL, HALF = Net(Small()), Net(Small(), 0.5)
NETS = {
    "full": FULL,
    "half": HALF,
    "blocks, exits and steps": Net(
        MODELS["resnet18"](exits=("stage1.0",)), 0.3, without=("stage2.1",), exits=1, steps=True, rounding="down"
    ),
    "of words": Net(Words(), 0.5),
    "sizes": Net(Small(), sizes=(("a", 3),)),
}
nets = pytest.mark.parametrize("net", NETS.values(), ids=NETS)


# --- a value ---


@nets
def test_equal_values_are_one_network(net):
    twin = replace(net, model=net.model.model_copy())
    assert twin == net and hash(twin) == hash(net) and twin.model is not net.model
    assert twin.layout is net.layout and twin.full_layout is net.full_layout
    assert twin.layer_macs is net.layer_macs and twin.layers is net.layers
    assert cached_module(twin, torch.device("cpu")) is cached_module(net, torch.device("cpu"))
    others = [*(n for n in NETS.values() if n is not net), replace(net, scale=0.5), replace(net, width=0.9)]
    assert net not in others and len({*others, net, twin}) == len(others) + 1


@nets
@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_a_network_is_pickled_as_a_value(net, dumps):
    """Cached values are not pickled."""
    before = len(dumps(net))
    assert net.layout.shapes and net.macs and net.parameters
    received = pickle.loads(dumps(net))
    assert received == net and hash(received) == hash(net) and received.layout is net.layout
    assert len(dumps(net)) == before < 1000


def test_it_is_frozen():
    with pytest.raises(FrozenInstanceError):
        FULL.width = 0.5  # pyright: ignore[reportAttributeAccessIssue]


def test_networks_of_several_families():
    """Networks with equal fields but different models differ."""
    families = [Small(), Small(classes=4), Words(), MODELS["digits_cnn"](), MODELS["liang_mlp"]()]
    found = {Net(model, 0.5): Net(model, 0.5).parameters for model in families}
    assert list(found.values()) == [18 + 2 + 4 + 24, 18 + 2 + 4 + 32, 7 * 3 + 2 * 3 + 2, 13_802, 259_274]
    assert [net.layout.shapes.keys() & {"0.weight"} for net in found] == [{"0.weight"}] * 3 + [set()] * 2


# --- sizes ---


def test_the_size_of_an_axis():
    def sizes(**fields):
        net = Net(Small(), **fields)
        return [net.axis(name, full).size for name, full in (("a", 10), ("b", 7))]

    assert sizes() == [10, 7]
    assert sizes(width=0.25) == [3, 2]
    assert sizes(width=0.25, rounding="down") == [2, 1]
    assert sizes(width=0.25, sizes=(("a", 9),)) == [9, 2]
    assert Net(Small(), 0.5).axis("heads", 8, groups=3) == Axis("heads", 4, groups=3)


def test_widths_and_sizes_without_a_channel_are_refused():
    with pytest.raises(ValueError, match="width 0.1 leaves no channel of 4. Allowed: at least 0.25"):
        Net(Small(), 0.1, rounding="down").build()
    for size in (0, 5):
        with pytest.raises(ValueError, match=f"Net.sizes: {size} is not valid for the axis 'a'. Allowed: 1 to 4"):
            Net(Small(), sizes=(("a", size),)).build()


# --- what follows from it ---


def test_layouts_by_hand():
    a, image, classes = Axis("a", 2), Axis.fixed("image", 1), Axis.fixed("classes", 3)
    layout = HALF.layout
    assert layout.dims == {
        "0.weight": (a, image, None, None),
        "0.bias": (a,),
        "1.weight": (a,),
        "1.bias": (a,),
        "4.weight": (classes, a.repeat(4)),
    }
    assert list(layout.shapes.values()) == [(2, 1, 3, 3), (2,), (2,), (2,), (3, 8)]
    assert {name: axis.size for name, axis in layout.axes.items()} == {"a": 2}
    assert layout.classifier == ("4.weight",)
    assert HALF.full_layout.dims == layout.dims | {"1.running_mean": (a,), "1.running_var": (a,)}
    assert HALF.full_layout.shapes == dict(layout.shapes) | {"1.running_mean": (2,), "1.running_var": (2,)}


def test_layers_and_norms_by_hand():
    assert HALF.layers == {"0": ("0.weight", "0.bias"), "4": ("4.weight",)}
    assert HALF.norms == ("1",)
    without = Net(Small(norm="layer"))
    assert without.norms == () and without.statistics() == {}
    assert without.full_layout == without.layout


def test_counts_by_hand():
    assert HALF.parameters == 2 * 9 + 2 + 2 * 2 + 3 * 8
    assert HALF.layer_macs == {"0": 2 * 9 * 4, "4": 3 * 8}
    assert HALF.macs == HALF.operations("macs") == 72 + 24
    assert HALF.operations("flops2") == 2 * 96 + 8 + 4 * 8 + 8
    assert HALF.operations("heterofl_official") == 2 * (72 + 8) + 2 * (2 * 8) + 24


def test_counts_without_images():
    """An embedding has no multiply-adds."""
    net = Net(Words())
    assert (net.parameters, net.macs) == (7 * 6 + 2 * 6 + 2, 12)
    assert width_for(net, 29 / 56, "params") == 0.5


def test_step_sizes_are_not_counted():
    plain, stepping = (Net(MODELS["resnet18"](channels=4), steps=steps) for steps in (False, True))
    assert stepping.parameters == plain.parameters
    assert len(stepping.layout.shapes) == len(plain.layout.shapes) + 8


# --- modules ---


def test_build_and_initial_parameters():
    with torch_scope(3):
        expected = params_of(Small().build(FULL))
    with torch_scope(3):
        assert all(torch.equal(t, expected[name]) for name, t in FULL.initial().items())
    with torch_scope(3):
        assert all(torch.equal(t, expected[name]) for name, t in params_of(FULL.build()).items())
    statistics = HALF.statistics()
    assert {name: t.tolist() for name, t in statistics.items()} == {"1.running_mean": [0, 0], "1.running_var": [1, 1]}
    HALF.statistics()["1.running_mean"].fill_(5)
    assert not HALF.statistics()["1.running_mean"].any()


def test_blank_networks_use_no_memory_and_no_random_numbers():
    with torch_scope(0):
        before = torch.get_rng_state()
        assert {p.device.type for p in FULL.blank().parameters()} == {"meta"}
        assert torch.equal(torch.get_rng_state(), before)


def test_a_cached_module_is_loaded_and_never_aliased():
    module, params = cached_module(HALF, torch.device("cpu")), HALF.initial()
    load(module, params)
    for name, t in params_of(module).items():
        assert torch.equal(t, params[name]) and t.data_ptr() != params[name].data_ptr()
        assert t.data_ptr() == module.get_parameter(name).data_ptr() and not t.requires_grad
    assert [*static_norms(module)] == ["1"]
    assert cached_module(HALF, torch.device("cpu")) is module is not cached_module(FULL, torch.device("cpu"))


# --- the two-width check ---


class TwoLinears(ImageModel):
    """A network whose hidden axis is `hidden(net)`."""

    hidden: Callable[[Net], Axis]
    bias: Callable[[Net], bool] = lambda net: True

    def build(self, net: Net) -> nn.Module:
        hidden = self.hidden(net)
        return nn.Sequential(linear(self.image, hidden, bias=self.bias(net)), linear(hidden, self.labels))


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (
            lambda net: Axis("hidden", 8),
            "0.weight: the axis 'hidden' has 8 positions at width 1.0 and 8 at 0.5. Hint: use the size of "
            "`net.axis(name, full)`",
        ),
        (
            lambda net: Axis.fixed("hidden", int(8 * net.width)),
            "0.weight: the size of the fixed axis 'hidden' changes from 8 to 4",
        ),
        (
            lambda net: net.axis(f"of{net.width}", 8),
            "0.weight: the axis 'of1.0' has another name, groups or copies at another width",
        ),
        (
            lambda net: net.axis("hidden", 8, groups=int(2 * net.width)),
            "0.weight: the axis 'hidden' has another name, groups or copies at another width",
        ),
    ],
    ids=["hard-coded size", "fixed axis that is cut", "another name", "other groups"],
)
def test_two_width_check_of_axes(hidden, message):
    with pytest.raises(ValueError) as error:
        check_axes(Net(TwoLinears(hidden=hidden)))
    assert str(error.value) == message


def test_two_width_check_of_parameters():
    model = TwoLinears(hidden=lambda net: net.axis("hidden", 8), bias=lambda net: net.width == 1)
    with pytest.raises(ValueError) as error:
        check_axes(Net(model))
    assert str(error.value) == "parameters differ between widths: ['0.bias']"


def test_two_width_check_of_dimensions():
    class Kernel(ImageModel):
        def build(self, net: Net) -> nn.Module:
            layer = linear(net.axis("hidden", 8), self.labels, bias=False)
            layer.axes = {"weight": (self.labels, net.axis("hidden", 8) if net.width == 1 else None)}  # pyright: ignore
            return layer

    with pytest.raises(ValueError) as error:
        check_axes(Net(Kernel()))
    assert str(error.value) == "weight: a dimension is an axis at one width only"


def test_an_axis_has_one_size():
    class Twice(ImageModel):
        def build(self, net: Net) -> nn.Module:
            some = Axis.fixed("some", 4)
            return nn.Sequential(linear(some, net.axis("hidden", 8)), linear(some, net.axis("hidden", 16)))

    with pytest.raises(ValueError) as error:
        check_axes(Net(Twice()))
    assert str(error.value) == "1.weight: the axis 'hidden' has 16 positions, but 8 in 0.weight. Hint: another name"


def test_two_width_check_with_rounding():
    model = TwoLinears(hidden=lambda net: net.axis("hidden", 10))
    for rounding in ("up", "down"):
        check_axes(Net(model, rounding=rounding), narrow=0.25)
    check_axes(Net(Words()))
    check_axes(Net(Small()), narrow=0.25)
