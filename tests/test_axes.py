"""Axes: sizes, what a model must declare, and that every model of rayfl declares it."""

from dataclasses import replace

import pytest
from torch import nn

from rayfl.axes import Axis, Net, axes_of, check_axes, conv, layout_of, linear, norm, size_at
from rayfl.models import MODELS, layout

CLASSES = Axis.fixed("classes", 10)
IMAGE = Axis.fixed("image", 3)


def test_sizes_are_rounded_up_without_binary_noise():
    assert [size_at(width, 64) for width in (1, 0.5, 0.2, 0.01, 1e-3)] == [64, 32, 13, 1, 1]
    assert size_at(0.6000000000000001, 5) == 3


def test_a_width_without_a_channel_is_refused():
    with pytest.raises(ValueError, match="width 0.0 leaves no channel of 64; the smallest is 0.0156"):
        size_at(0.0, 64)


def test_length_counts_groups_and_copies():
    assert Net(0.5).axis("heads", 8, groups=3).repeat(2).repeat(5).length == 3 * 4 * 10


def test_layers_record_their_axes():
    a, b = Axis("a", 4), Axis("b", 6)
    net = nn.Sequential(conv(a, b, 3), norm("static_bn", b), linear(b.repeat(9), CLASSES, bias=False))
    assert axes_of(net) == {
        "0.weight": (b, a, None, None),
        "0.bias": (b,),
        "1.weight": (b,),
        "1.bias": (b,),
        "2.weight": (CLASSES, b.repeat(9)),
    }
    assert layout_of(net).shapes["2.weight"] == (10, 54)
    assert layout_of(net).axes.keys() == {"a", "b"}


def test_an_undeclared_parameter_is_named():
    net = nn.Sequential(conv(IMAGE, Axis("a", 4), 3), nn.Linear(4, 10))
    with pytest.raises(ValueError, match=r"'1.weight' \[10, 4\] of a Linear declares no axes; build it with"):
        axes_of(net)


def test_a_wrong_declaration_is_named():
    layer = linear(Axis("a", 4), CLASSES)
    layer.axes["weight"] = (Axis("a", 4), CLASSES)  # pyright: ignore
    with pytest.raises(
        ValueError,
        match=r"'weight' is \[10, 4\] but its axes \['a', 'classes'\] say \[4, 10\]",
    ):
        axes_of(layer)


@pytest.mark.parametrize(("kind", "channels"), [("group", 6), ("group", 2)], ids=["no multiple", "fewer than groups"])
def test_group_norm_that_does_not_divide_is_refused(kind, channels):
    with pytest.raises(ValueError, match=f"divide by 4, but axis 'a' has {channels} at this width"):
        norm(kind, Axis("a", channels))


def test_groups_of_the_group_norms():
    groups = {kind: norm(kind, Axis("a", 12)).num_groups for kind in ("group", "instance", "layer")}
    assert groups == {"group": 4, "instance": 12, "layer": 1}


def two_linears(hidden):
    """A network whose hidden axis is `hidden(net)`."""
    return lambda net: nn.Sequential(linear(IMAGE, hidden(net)), linear(hidden(net), CLASSES))


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (lambda net: Axis("hidden", 8), "'hidden' has 8 positions at width 1.0 and 8 at 0.5"),
        (lambda net: Axis.fixed("hidden", int(8 * net.width)), "fixed axis 'hidden' is 8, then 4"),
        (lambda net: net.axis(f"of{net.width}", 8), "'of1.0' becomes 'of0.5' at another width"),
    ],
    ids=["hard-coded size", "fixed axis that is cut", "another name"],
)
def test_two_widths_tell_a_wrong_axis(hidden, message):
    with pytest.raises(ValueError, match=message):
        check_axes(two_linears(hidden))


def test_two_widths_tell_parameters_that_come_and_go():
    def build(net):
        return linear(IMAGE, CLASSES, bias=net.width == 1)

    with pytest.raises(ValueError, match=r"parameters differ between widths: \['bias'\]"):
        check_axes(build)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_passes_the_two_width_check(name):
    model = MODELS[name]()
    check_axes(model.build)
    check_axes(model.build, (1.0, 1 / 16))


@pytest.mark.parametrize("name", MODELS)
def test_image_channels_and_classes_are_never_cut(name):
    model = MODELS[name](classes=7)
    narrow = layout(model, Net(1 / 16))
    dims = list(narrow.dims.values())
    assert replace(dims[0][1], copies=1) == model.image
    assert next(d for d in reversed(dims) if len(d) == 2)[0] == Axis.fixed("classes", 7)
    assert not {"image", "classes"} & narrow.axes.keys()


@pytest.mark.parametrize("name", [name for name in MODELS if "resnet" in name])
def test_what_is_added_along_a_residual_stream_shares_its_axis(name):
    """The tying rule: at every addition both operands are on one axis."""
    dims = layout(MODELS[name](), Net(0.3)).dims
    stream = dims["conv.weight"][0].name
    blocks = dict.fromkeys(path.rpartition(".residual.")[0] for path in dims if "residual" in path)
    for block in blocks:
        skip = dims.get(f"{block}.projection.conv.weight")
        if skip is not None:
            assert skip[1].name == stream
            stream = skip[0].name
        else:
            assert dims[f"{block}.residual.conv1.weight"][1].name == stream
        last = max(path for path in dims if path.startswith(f"{block}.residual.conv"))
        assert dims[last][0].name == stream == block.partition(".")[0]
    assert dims["head.weight"][1].name == stream
