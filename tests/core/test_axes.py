"""Axes: sizes, and declarations of axes in all models of rayfl."""

from dataclasses import replace

import pytest
from helpers import COMPLETE
from torch import nn

from rayfl.core.axes import (
    Axis,
    Layout,
    axes_of,
    conv,
    declare,
    embedding,
    layer_norm,
    layout_of,
    linear,
    norm,
    size_at,
)
from rayfl.core.net import Net, check_axes
from rayfl.models import MODELS, ImageModel

CLASSES = Axis.fixed("classes", 10)
IMAGE = Axis.fixed("image", 3)


def test_sizes_are_rounded_up_without_binary_noise():
    assert [size_at(width, 64) for width in (1, 0.5, 0.2, 0.01, 1e-3)] == [64, 32, 13, 1, 1]
    assert size_at(0.6000000000000001, 5) == 3


def test_sizes_are_rounded_down_without_binary_noise():
    assert [size_at(width, 64, "down") for width in (1, 0.5, 0.2, 0.02)] == [64, 32, 12, 1]
    assert size_at(0.29, 100, "down") == 29 != int(0.29 * 100)


def test_a_width_without_a_channel_is_refused():
    with pytest.raises(ValueError, match="width 0.0 leaves no channel of 64. Allowed: at least 0.0156"):
        size_at(0.0, 64)


def test_length_counts_groups_and_copies():
    assert Axis("heads", 4, groups=3).repeat(2).repeat(5).length == 3 * 4 * 10


def test_layers_record_their_axes():
    a, b = Axis("a", 4), Axis("b", 6)
    module = nn.Sequential(conv(a, b, 3), norm("static_bn", b), linear(b.repeat(9), CLASSES, bias=False))
    assert axes_of(module) == {
        "0.weight": (b, a, None, None),
        "0.bias": (b,),
        "1.weight": (b,),
        "1.bias": (b,),
        "2.weight": (CLASSES, b.repeat(9)),
    }
    assert layout_of(module).shapes["2.weight"] == (10, 54)
    assert layout_of(module).axes.keys() == {"a", "b"}


def test_layers_of_a_transformer_record_their_axes():
    rows, features = Axis.fixed("positions", 5), Axis("features", 4)
    module = nn.Sequential(embedding(rows, features), layer_norm(features))
    assert axes_of(module) == {"0.weight": (rows, features), "1.weight": (features,), "1.bias": (features,)}
    assert layout_of(module).shapes["0.weight"] == (5, 4)


def test_any_module_may_declare_its_axes():
    channels = Axis("channels", 8)
    layer = nn.PReLU(8)
    assert declare(layer, weight=(channels,)) is layer
    assert axes_of(layer) == {"weight": (channels,)}


def test_the_classifier_has_one_row_per_class():
    hidden = Axis("hidden", 4)
    module = nn.Sequential(linear(IMAGE, hidden), linear(hidden, CLASSES), linear(CLASSES, hidden))
    assert layout_of(module).classifier == ("1.weight", "1.bias")
    assert Layout({"scale": (), "kernel": (None, hidden)}, {"scale": (), "kernel": (3, 4)}).classifier == ()


def test_an_undeclared_parameter_is_named():
    module = nn.Sequential(conv(IMAGE, Axis("a", 4), 3), nn.Linear(4, 10))
    with pytest.raises(ValueError) as error:
        axes_of(module)
    assert str(error.value) == (
        "Sequential: the parameter '1.weight' [10, 4] of a Linear has no axes. Hint: create the layer with rayfl.conv, "
        "rayfl.linear, rayfl.norm, ..., or call `declare(module, parameter=(Axis, ...))`"
    )


def test_a_wrong_declaration_is_named():
    layer = linear(Axis("a", 4), CLASSES)
    layer.axes["weight"] = (Axis("a", 4), CLASSES)  # pyright: ignore
    with pytest.raises(
        ValueError, match=r"'weight' has shape \[10, 4\], but its axes \['a', 'classes'\] have shape \[4, 10\]"
    ):
        axes_of(layer)


@pytest.mark.parametrize(("kind", "channels"), [("group", 6), ("group", 2)], ids=["no multiple", "fewer than groups"])
def test_group_norm_that_does_not_divide_is_refused(kind, channels):
    with pytest.raises(ValueError, match=f"multiple of 4 channels, but axis 'a' has {channels} at this width"):
        norm(kind, Axis("a", channels))


def test_groups_of_the_group_norms():
    groups = {kind: norm(kind, Axis("a", 12)).num_groups for kind in ("group", "instance", "layer")}
    assert groups == {"group": 4, "instance": 12, "layer": 1}


@pytest.mark.parametrize("name", COMPLETE)
def test_every_model_passes_the_two_width_check(name):
    """At half its width an experiment checks it."""
    check_axes(Net(MODELS[name]()), narrow=1 / 16)


@pytest.mark.parametrize("name", [name for name, cls in COMPLETE.items() if issubclass(cls, ImageModel)])
def test_image_channels_and_classes_are_never_cut(name):
    model = MODELS[name](classes=7)
    narrow = Net(model, 1 / 16).layout
    dims = list(narrow.dims.values())
    assert replace(dims[0][1], copies=1) == model.image
    assert next(d for d in reversed(dims) if len(d) == 2)[0] == Axis.fixed("classes", 7)
    assert not {"image", "classes"} & narrow.axes.keys()


@pytest.mark.parametrize("name", [name for name in MODELS if "resnet" in name])
def test_layers_of_a_residual_stream_share_an_axis(name):
    """Tying rule: both operands of every addition have the same axis."""
    dims = Net(MODELS[name](), 0.3).layout.dims
    stream = next(iter(dims.values()))[0].name
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
