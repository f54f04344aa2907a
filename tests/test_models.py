"""Networks: they run, they are cut where their axes say, the Scaler, blocks that are left out."""

import re

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import nn

from rayfl.axes import Net
from rayfl.config import ConfigError
from rayfl.models import MODELS, layout, load, params_of, resident
from rayfl.models.layers import Scaler, scaler
from rayfl.norms import static_norms
from rayfl.seeds import torch_generator, torch_scope
from rayfl.submodel import prefix, rolling

WITH_NORM = [name for name, cls in MODELS.items() if "norm" in cls.model_fields]
RESNETS = [name for name in MODELS if "resnet" in name]


def make(name, **fields):
    """A small-image variant of a model, with 7 classes."""
    size = {"input": (3, 16, 16)} if name in RESNETS else {}
    return MODELS[name](classes=7, **size, **fields)


def without_norm(name):
    return make(name, **({"norm": "none"} if name in WITH_NORM else {}))


def built(model, net=None):
    with torch_scope(0):
        return model.build(net or Net())


def images(model, count=4):
    return torch.randn(count, *model.input, generator=torch_generator(0, "images"))


@pytest.mark.parametrize("name", MODELS)
def test_the_registered_name_is_the_models(name):
    assert MODELS[name]().name == name


@pytest.mark.parametrize(
    ("name", "count", "layers"),
    [
        ("liang_mlp", 633_226, ["input", "hidden1", "hidden2", "hidden3", "head"]),
        ("liang_cnn", 64_102, ["conv1", "conv2", "hidden1", "hidden2", "head"]),
    ],
)
def test_published_counts(name, count, layers):
    """width.md section 6.5."""
    params = params_of(MODELS[name]().build(Net()))
    assert sum(p.numel() for p in params.values()) == count
    assert list(params) == [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]


def test_the_mlp_of_heterofls_accounting():
    """width.md trap 4: its Table 2 counts the MLP on 32x32 colour images for the baselines' CIFAR network."""
    params = params_of(MODELS["liang_mlp"](input=(3, 32, 32)).build(Net()))
    assert sum(p.numel() for p in params.values()) == 1_804_682


@pytest.mark.parametrize("width", [1.0, 0.3, 1 / 16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_at_every_width(name, width):
    model = make(name)
    net = built(model, Net(width, scale=0.5))
    logits = net(images(model))
    F.cross_entropy(logits, torch.arange(4)).backward()
    assert logits.shape == (4, 7)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("kind", ["static_bn", "group", "instance", "layer", "none"])
@pytest.mark.parametrize("name", WITH_NORM)
def test_every_norm(name, kind):
    model = make(name, norm=kind)
    assert built(model, Net(0.5))(images(model)).isfinite().all()


def test_an_unknown_norm_is_refused():
    with pytest.raises(ValidationError, match="'static_bn', 'group', 'instance', 'layer' or 'none'"):
        MODELS["digits_cnn"](norm="batch")


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_one_image_that_is_pooled_to_one_pixel_trains(name):
    smallest = {"mcmahan_cnn": 4, "lenet5_caffe": 16, "digits_cnn": 4, "liang_cnn": 16}.get(name, 8)
    model = MODELS[name](input=(1, smallest, smallest))
    F.cross_entropy(built(model, Net(1 / 16))(images(model, 1)), torch.tensor([3])).backward()


@pytest.mark.parametrize(
    ("name", "smallest"),
    [("digits_cnn", 4), ("mcmahan_cnn", 4), ("lenet5_caffe", 16), ("heterofl_cnn", 8), ("liang_cnn", 16)],
)
def test_images_that_pooling_makes_vanish_are_refused(name, smallest):
    MODELS[name](input=(1, smallest, smallest)).build(Net())
    with pytest.raises(ConfigError) as error:
        MODELS[name](input=(1, 28, smallest - 1)).build(Net())
    assert str(error.value) == (
        f"model {name}: given images of 28x{smallest - 1} pixels, of which its convolutions and "
        f"pooling leave nothing; allowed: at least {smallest}x{smallest}; "
        "take another model or data set"
    )


@pytest.mark.parametrize("name", ["heterofl_cnn", "preact_resnet18", "preact_resnet18_heterofl"])
def test_classifier_biases_of_heterofl_start_at_zero(name):
    assert not params_of(built(make(name)))["head.bias"].any()


@pytest.mark.parametrize("name", MODELS)
def test_load_copies_and_never_aliases(name):
    model, net = make(name), Net(1 / 16)
    source, target = params_of(built(model, net)), resident(model, net, torch.device("cpu"))
    load(target, source)
    assert resident(model, net, torch.device("cpu")) is target
    for parameter, t in params_of(target).items():
        assert torch.equal(t, source[parameter])
        assert t.data_ptr() != source[parameter].data_ptr()


# --- submodels ---


@pytest.mark.parametrize("offset", [0, 40], ids=["prefix", "a window that wraps"])
@pytest.mark.parametrize("name", MODELS)
def test_a_sliced_network_is_the_full_one_with_dropped_channels_zeroed(name, offset):
    """width.md A7, without norm: the values of the submodel put into zeros give the same logits."""
    model, net = without_norm(name), Net(0.55)
    whole, part = layout(model, Net()), layout(model, net)
    selection = rolling(whole, part, net, offset) if offset else prefix(whole, part, net)
    full = built(model).double()
    sliced = model.build(net).double()
    params = {n: p * 0.5 + 0.01 for n, p in params_of(full).items()}
    load(sliced, selection.take(params))
    zeroed = {n: torch.zeros_like(p) for n, p in params.items()}
    selection.put(selection.take(params), zeroed)
    load(full, zeroed)
    x = images(model).double()
    assert sliced(x).std() > 0
    torch.testing.assert_close(sliced(x), full(x))


@pytest.mark.parametrize("name", MODELS)
def test_a_prefix_is_the_first_entries_of_every_tensor(name):
    model, net = make(name), Net(0.5)
    params = params_of(built(model))
    selection = prefix(layout(model, Net()), layout(model, net), net)
    for parameter, t in selection.take(params).items():
        corner = params[parameter][tuple(slice(size) for size in t.shape)]
        assert torch.equal(t, corner), parameter


# --- Scaler ---


def test_scaler_divides_while_training_and_is_the_identity_in_evaluation():
    layer, x = Scaler(0.25), torch.tensor([1.0, -2.0])
    assert layer(x).tolist() == [4.0, -8.0]
    assert layer.eval()(x) is x


def test_a_scale_of_one_adds_no_module():
    assert isinstance(scaler(1.0), nn.Identity)
    for name in MODELS:
        kinds = {type(module) for module in make(name).build(Net()).modules()}
        assert not kinds & {Scaler, nn.Identity}


@pytest.mark.parametrize(
    ("name", "fields", "count"),
    [
        ("digits_cnn", {}, 2),
        ("mcmahan_cnn", {}, 2),
        ("lenet5_caffe", {}, 2),
        ("heterofl_cnn", {}, 4),
        ("liang_mlp", {}, 4),
        ("liang_cnn", {}, 4),
        ("resnet18", {}, 1 + 8 * 2 + 3),  # stem, two a block, projections
        ("preact_resnet18", {}, 8 * 2 + 1),  # two norms a block, the last norm
        ("preact_resnet18", {"scaler_site": "post_conv"}, 1 + 8 * 2 + 3),
        ("preact_resnet18_heterofl", {}, 5 * 2 + 1),
    ],
)
def test_where_scalers_stand(name, fields, count):
    scalers = [m for m in make(name, **fields).build(Net(scale=0.5)).modules() if type(m) is Scaler]
    assert len(scalers) == count
    assert {m.scale for m in scalers} == {0.5}


def training_step(model, net):
    """Loss and gradients of one batch in float64, without the eps of norms."""
    network = built(model, net).double()
    for module in static_norms(network).values():
        module.eps = 0.0
    loss = F.cross_entropy(network(images(model, 8).double()), torch.arange(8) % 7)
    loss.backward()
    return loss, {n: p.grad for n, p in network.named_parameters()}


@pytest.mark.parametrize("name", WITH_NORM)
def test_scaler_before_batch_norm_changes_nothing(name):
    """width.md A11 and trap 5."""
    model = make(name, norm="static_bn")
    loss, gradients = training_step(model, Net(0.25))
    scaled_loss, scaled_gradients = training_step(model, Net(0.25, scale=0.25))
    torch.testing.assert_close(scaled_loss, loss)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(scaled_gradients[parameter], gradient, atol=1e-9, rtol=1e-6, msg=parameter)


@pytest.mark.parametrize("name", MODELS)
def test_scaler_is_inert_in_evaluation(name):
    model = without_norm(name)
    plain, scaled = (built(model, Net(0.25, scale=s)).eval() for s in (1.0, 0.25))
    x = images(model)
    assert torch.equal(plain(x), scaled(x))
    assert not torch.equal(plain.train()(x), scaled.train()(x))


@pytest.mark.parametrize("site", ["pre_norm", "post_conv"])
def test_the_identity_skip_of_a_preactivation_block_is_not_scaled(site):
    model = make("preact_resnet18", norm="none", scaler_site=site)
    plain = built(model, Net(1 / 16)).double()
    scaled = built(model, Net(1 / 16, scale=0.5)).double()
    block, scaled_block = plain.stage1[0], scaled.stage1[0]
    x = torch.randn(2, 4, 5, 5, generator=torch_generator(0, "x")).double()
    residual, scaled_residual = block(x) - x, scaled_block(x) - x
    torch.testing.assert_close(scaled_residual, 4 * residual)  # two convolutions, / 0.5 each


# --- blocks that are left out ---


@pytest.mark.parametrize("name", RESNETS)
def test_a_left_out_block_loses_its_residual_branch_and_keeps_its_projection(name):
    model = make(name)
    last = max(p.split(".residual")[0] for p in layout(model, Net()).dims if ".residual" in p)
    whole = layout(model, Net()).dims.keys()
    part = layout(model, Net(without=("stage2.0", last))).dims.keys()
    gone = whole - part
    assert part < whole
    assert {n for n in whole if re.match(rf"(stage2\.0|{last})\.residual", n)} <= gone
    assert all(n.startswith(("stage2.0.residual", f"{last}.")) for n in gone)
    assert {n for n in whole if n.startswith("stage2.0.projection")} <= part
    assert not any(n.startswith(last) for n in part)


@pytest.mark.parametrize("name", ["resnet18", "preact_resnet18"])
def test_a_left_out_identity_block_passes_its_input_on(name):
    model = make(name)
    block = built(model, Net(1 / 16, without=("stage1.1",))).stage1[1]
    x = torch.rand(2, 4, 5, 5, generator=torch_generator(0, "x"))
    assert torch.equal(block(x), x)
    assert not list(block.parameters())


@pytest.mark.parametrize("name", RESNETS)
def test_a_network_without_any_residual_branch_still_runs(name):
    model = make(name)
    paths = {p.split(".residual")[0] for p in layout(model, Net()).dims if ".residual" in p}
    net = built(model, Net(1 / 16, without=tuple(sorted(paths))))
    logits = net(images(model))
    logits.sum().backward()
    assert logits.shape == (4, 7)
    assert all(p.grad is not None for p in net.parameters())


def test_unknown_blocks_are_refused():
    with pytest.raises(ValueError, match="no block 'stage2.2' can be left out .* did you mean"):
        make("resnet18").build(Net(without=("stage2.2",)))
    with pytest.raises(ValueError, match="no block 'conv1' can be left out .*; it has none"):
        make("digits_cnn").build(Net(without=("conv1",)))
