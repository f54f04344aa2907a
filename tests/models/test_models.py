"""Networks: they run, they are cut where their axes say, the Scaler, blocks that are left out."""

import functools
import math
import re
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
import torchvision
from helpers import COMPLETE
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.net import Net, cached_module, check_axes, load, params_of
from rayfl.core.norms import collect, finish, fresh, static_norms, tracked
from rayfl.core.norms import load as load_norms
from rayfl.core.seeds import torch_generator, torch_scope
from rayfl.core.submodel import prefix, rolling
from rayfl.models import MODELS, ImageModel
from rayfl.models.layers import Scaler, Step, scaler
from rayfl.testing.tiny import tiny

OF_IMAGES = [name for name, cls in COMPLETE.items() if issubclass(cls, ImageModel)]
WITH_NORM = [name for name, cls in COMPLETE.items() if "norm" in cls.model_fields]
RESNETS = [name for name in MODELS if "resnet" in name]
POST_ACT = [name for name in RESNETS if "exits" in MODELS[name].model_fields]
NO_TRANSFORMERS = [name for name in OF_IMAGES if not name.startswith("vit")]
"""A LayerNorm over fewer features is another function, and heads are cut one by one: see test_vit.py."""

DEPTHS = {
    "resnet8": (2, 1, 2),
    "resnet20": (1, 2, 2),
    "resnet32": (2, 2, 2),
    "resnet34": (1, 2, 1, 2),
    "resnet56": (2, 1, 2),
    "resnet110": (1, 1, 2),
    "wide_resnet101_2": (1, 2, 1, 2),
    "scalefl_resnet110": (1, 3, 2),
}
"""Fewer blocks for the deepest, and a second one for the shallowest."""
SMALL = {
    **dict.fromkeys(POST_ACT, {"channels": 16}),
    "scalefl_resnet110": {"exits": ("stage2.0", "stage2.2", "stage3.0")},
    "resnet8_gkt": {"depth": (2, 1, 2)},
    "resnet55_gkt": {"depth": (2, 1, 2)},
    "vit_b_16": {"input": (3, 16, 16), "layers": 2, "heads": 2, "head_width": 16, "patch": 4},
}
SMALLEST = {"mcmahan_cnn": 4, "lenet5_caffe": 16, "digits_cnn": 4, "liang_cnn": 16, "spafl_cnn": 28, "lenet5_gkt": 16}
"""Height and width of the smallest images, where these are not 8."""


@functools.cache
def family(name: str) -> type[ImageModel]:
    """The model, with fewer blocks if it has very many."""
    if name not in DEPTHS:
        return MODELS[name]

    class Short(MODELS[name]):
        depth: ClassVar[tuple[int, ...]] = DEPTHS[name]

    return Short


def make(name, **fields):
    """A small variant of a model, for small images, with 7 classes."""
    size = {"input": (3, 16, 16)} if name in RESNETS else {}
    return family(name)(**{"classes": 7} | size | SMALL.get(name, {}) | fields)


def without_norm(name):
    return make(name, **({"norm": "none"} if name in WITH_NORM else {}))


def built(model, width=1.0, **fields):
    with torch_scope(0):
        return Net(model, width, **fields).build()


def images(model, count=4):
    shape = model.input if model.takes == "input" else model.series
    return torch.randn(count, *shape, generator=torch_generator(0, "test:images"))


@pytest.mark.parametrize("name", COMPLETE)
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
    """Parameters and layers of the papers' networks."""
    params = Net(MODELS[name]()).initial()
    assert sum(p.numel() for p in params.values()) == Net(MODELS[name]()).parameters == count
    assert list(params) == [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]


@pytest.mark.parametrize(("depth", "count"), [(8, 78_042), (20, 272_474), (32, 466_906), (56, 855_770)])
def test_counts_of_resnets_for_small_images(depth, count):
    """So many layers with weights: a stem, two a block, a classifier."""
    net = Net(MODELS[f"resnet{depth}"]())
    weighted = [path for path in net.layers if "projection" not in path]
    assert net.parameters == count and len(weighted) == depth


def counts(net):
    """Weights and rows of all convolutions and linear layers, multiply-adds; each without the classifier too."""
    shapes = {name.removesuffix(".weight"): s for name, s in net.layout.shapes.items() if len(s) > 1}
    macs, without = net.layer_macs, [path for path in shapes if path != "head"]

    def of(paths):
        weights = sum(math.prod(shapes[path]) for path in paths)
        return weights, sum(shapes[path][0] for path in paths), sum(macs[path] for path in paths)

    return net.parameters, of(shapes), of(without)


@pytest.mark.parametrize(
    ("name", "fields", "parameters", "is_head_masked", "masked"),
    [
        ("lenet5_caffe", {}, 430_500, True, (430_500, 580, 2_293_000)),
        ("spafl_cnn", {}, 806_080, True, (804_800, 650, 82_489_600)),
        ("spafl_resnet18", {"classes": 100}, 2_819_396, False, (2_790_240, 2_400, 139_296_768)),
        ("spafl_resnet18", {"classes": 100, "channels": 64}, 11_217_444, False, (11_159_232, 4_800, 555_417_600)),
    ],
)
def test_what_spafl_counts(name, fields, parameters, is_head_masked, masked):
    """Weights, thresholds and multiply-adds of what it masks."""
    found, whole, without_head = counts(Net(MODELS[name](**fields)))
    assert found == parameters
    assert (whole if is_head_masked else without_head) == masked


def test_the_state_that_spafl_counts_as_parameters():
    """807,366: with the norms' running statistics, and torch's counter of batches of each."""
    module = Net(MODELS["spafl_cnn"]()).build()
    norms = fresh(module)
    assert sum(t.numel() for t in [*module.parameters(), *norms.values()]) + len(static_norms(module)) == 807_366


@pytest.mark.parametrize(("classes", "size"), [(10, 11_164_362), (100, 11_210_532)])
def test_what_fiarse_masks(classes, size):
    """All convolutions and the classifier with its bias."""
    (weights, _, macs), _ = counts(Net(MODELS["resnet18"](classes=classes)))[1:]
    assert weights + classes == size and macs == 555_417_600 + 512 * classes


def test_norms_of_neurons():
    """Static batch norms of activations [B, C]: as torch's while training, and with collected statistics after."""
    module = built(MODELS["spafl_cnn"]())
    layer, theirs = module.hidden1_norm, nn.BatchNorm1d(128)
    x = torch.randn(9, 128, generator=torch_generator(0, "test:x")) * 3 + 1
    torch.testing.assert_close(layer(x), theirs(x))
    statistics = finish(collect(module, [images(MODELS["spafl_cnn"](), 5), images(MODELS["spafl_cnn"](), 3)]), "exact")
    assert {name: t.shape for name, t in statistics.items()} == {name: t.shape for name, t in fresh(module).items()}
    load_norms(module.eval(), statistics)
    one, many = images(MODELS["spafl_cnn"](), 1), images(MODELS["spafl_cnn"](), 6)
    torch.testing.assert_close(module(many)[:1], module(one))


def test_spafls_blocks_and_its_last_stage():
    """A block is conv2(relu(norm(conv1(a)))) + skip, a = relu(norm(x)); the skip is x, or a projection of a. What the
    last one gives is averaged as it is."""
    module = built(make("spafl_resnet18", channels=4)).double()
    x = torch.randn(2, 4, 6, 6, generator=torch_generator(0, "test:x")).double()

    def batch_norm(x):
        return (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), keepdim=True, correction=0) + 1e-5).sqrt()

    same, wider = module.stage1[0], module.stage2[0]
    a = batch_norm(x).relu()
    torch.testing.assert_close(same(x), same.residual.conv2(batch_norm(same.residual.conv1(a)).relu()) + x)
    expected = wider.residual.conv2(batch_norm(wider.residual.conv1(a)).relu()) + wider.projection(a)
    torch.testing.assert_close(wider(x), expected)
    assert [name for name, _ in module.named_children()][-4:] == ["stage4", "average", "flatten", "head"]


def test_the_mlp_of_heterofls_accounting():
    """Its Table 2 counts the MLP on 32x32 colour images for the baselines' CIFAR network."""
    params = Net(MODELS["liang_mlp"](input=(3, 32, 32))).initial()
    assert sum(p.numel() for p in params.values()) == 1_804_682


@pytest.mark.parametrize("width", [1.0, 0.3, 1 / 16])
@pytest.mark.parametrize("name", OF_IMAGES)
def test_logits_and_gradients_at_every_width(name, width):
    model = make(name)
    module = built(model, width, scale=0.5)
    logits = module(images(model))
    F.cross_entropy(logits, torch.arange(4)).backward()
    assert logits.shape == (4, 7)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("kind", ["static_bn", "group", "instance", "layer", "none"])
@pytest.mark.parametrize("name", WITH_NORM)
def test_every_norm(name, kind):
    # its last maps of images of 32x32 are single pixels
    large = {"input": (3, 64, 64)} if name == "wide_resnet101_2" else {}
    model = make(name, norm=kind, **large)
    assert built(model, 0.5)(images(model)).isfinite().all()


def test_an_instance_norm_of_single_pixels_is_refused_before_a_run():
    """It would make 0 of everything. Images of 8x8 reach 1x1 in the last stage."""
    with pytest.raises(ConfigError, match="norm 'instance' needs maps of more than one pixel, but the network has"):
        tiny(model={"name": "resnet18", "channels": 8, "norm": "instance"})


def test_an_unknown_norm_is_refused():
    with pytest.raises(ConfigError, match="static_bn, group, instance, layer, none"):
        MODELS["digits_cnn"](norm="batch")


@pytest.mark.parametrize("name", OF_IMAGES)
def test_a_batch_of_one_image_that_is_pooled_to_one_pixel_trains(name):
    smallest = SMALLEST.get(name, 8)
    model = make(name, input=(1, smallest, smallest))
    F.cross_entropy(built(model, 1 / 16)(images(model, 1)), torch.tensor([3])).backward()


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        ("digits_cnn", 4),
        ("mcmahan_cnn", 4),
        ("lenet5_caffe", 16),
        ("heterofl_cnn", 8),
        ("liang_cnn", 16),
        ("spafl_cnn", 28),
    ],
)
def test_images_that_pooling_makes_vanish_are_refused(name, smallest):
    Net(MODELS[name](input=(1, smallest, smallest))).build()
    with pytest.raises(ConfigError) as error:
        Net(MODELS[name](input=(1, 28, smallest - 1))).build()
    assert str(error.value) == (
        f"model {name}: images of 28x{smallest - 1} pixels are too small for its convolutions and pooling. "
        f"Allowed: at least {smallest}x{smallest}; take another model or data set"
    )


@pytest.mark.parametrize("name", ["heterofl_cnn", "preact_resnet18", "preact_resnet18_heterofl"])
def test_classifier_biases_of_heterofl_start_at_zero(name):
    assert not params_of(built(make(name)))["head.bias"].any()


@pytest.mark.parametrize("name", OF_IMAGES)
def test_load_copies_and_never_aliases(name):
    net = Net(make(name), 1 / 16)
    source, target = params_of(built(net.model, 1 / 16)), cached_module(net, torch.device("cpu"))
    load(target, source)
    assert cached_module(Net(make(name), 1 / 16), torch.device("cpu")) is target
    for parameter, t in params_of(target).items():
        assert torch.equal(t, source[parameter])
        assert t.data_ptr() != source[parameter].data_ptr()


# --- submodels ---


@pytest.mark.parametrize("offset", [0, 40], ids=["prefix", "a window that wraps"])
@pytest.mark.parametrize("name", NO_TRANSFORMERS)
def test_a_sliced_network_is_the_full_one_with_dropped_channels_zeroed(name, offset):
    """Without norm: the values of the submodel put into zeros give the same logits."""
    model = without_norm(name)
    whole, net = Net(model), Net(model, 0.55)
    selection = rolling(whole, net, offset) if offset else prefix(whole, net)
    full = built(model).double()
    sliced = net.build().double()
    params = {n: p * 0.5 + 0.01 for n, p in params_of(full).items()}
    load(sliced, selection.take(params))
    zeroed = {n: torch.zeros_like(p) for n, p in params.items()}
    selection.put(selection.take(params), zeroed)
    load(full, zeroed)
    x = images(model).double()
    assert sliced(x).std() > 0
    torch.testing.assert_close(sliced(x), full(x))


@pytest.mark.parametrize("name", NO_TRANSFORMERS)
def test_a_prefix_is_the_first_entries_of_every_tensor(name):
    model = make(name)
    params = params_of(built(model))
    for parameter, t in prefix(Net(model), Net(model, 0.5)).take(params).items():
        corner = params[parameter][tuple(slice(size) for size in t.shape)]
        assert torch.equal(t, corner), parameter


# --- Scaler ---


def test_scaler_divides_while_training_and_is_the_identity_in_evaluation():
    layer, x = Scaler(0.25), torch.tensor([1.0, -2.0])
    assert layer(x).tolist() == [4.0, -8.0]
    assert layer.eval()(x) is x


def test_a_scale_of_one_adds_no_module():
    assert isinstance(scaler(1.0), nn.Identity)
    for name in OF_IMAGES:
        kinds = {type(module) for module in Net(make(name)).build().modules()}
        assert not kinds & {Scaler, nn.Identity}


@pytest.mark.parametrize(
    ("name", "fields", "count"),
    [
        ("digits_cnn", {}, 3),  # two convolutions, the hidden layer
        ("mcmahan_cnn", {}, 3),
        ("lenet5_caffe", {}, 3),
        ("heterofl_cnn", {}, 4),
        ("liang_mlp", {}, 4),
        ("liang_cnn", {}, 4),
        ("resnet18", {}, 1 + 8 * 2 + 3),  # stem, two a block, projections
        ("preact_resnet18", {}, 8 * 2 + 1),  # two norms a block, the last norm
        ("preact_resnet18", {"scaler_site": "post_conv"}, 1 + 8 * 2 + 3),
        ("preact_resnet18_heterofl", {}, 5 * 2 + 1),
        ("spafl_cnn", {}, 6),
        ("spafl_resnet18", {}, 1 + 8 * 2),  # the stem's norm, two a block
        ("wide_resnet101_2", {}, 1 + 6 * 3 + 4),  # three a block, and every stage projects
    ],
)
def test_where_scalers_stand(name, fields, count):
    scalers = [m for m in Net(make(name, **fields), scale=0.5).build().modules() if type(m) is Scaler]
    assert len(scalers) == count
    assert {m.scale for m in scalers} == {0.5}


def training_step(module, x):
    """Loss and gradients of one batch in float64, without the eps of norms."""
    module.double()
    for norm in static_norms(module).values():
        norm.eps = 0.0
    loss = F.cross_entropy(module(x.double()), torch.arange(len(x)) % 7)
    loss.backward()
    return loss, {n: p.grad for n, p in module.named_parameters()}


@pytest.mark.parametrize("name", WITH_NORM)
def test_scaler_before_batch_norm_changes_nothing(name):
    """But for the Scaler behind a hidden linear layer, which no norm follows."""
    model = make(name, norm="static_bn")
    plain, scaled = built(model, 0.25), built(model, 0.25, scale=0.25)
    for layer in (m for path, m in scaled.named_modules() if path == "hidden_scaler"):
        layer.scale = 1.0
    loss, gradients = training_step(plain, images(model, 8))
    scaled_loss, scaled_gradients = training_step(scaled, images(model, 8))
    torch.testing.assert_close(scaled_loss, loss)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(scaled_gradients[parameter], gradient, atol=1e-9, rtol=1e-6, msg=parameter)


@pytest.mark.parametrize("name", ["digits_cnn", "mcmahan_cnn", "lenet5_caffe"])
def test_a_scaler_stands_between_a_hidden_layer_and_its_activation(name):
    """y = relu(Scaler(W x + b)), HeteroFL's equation 4 without a norm."""
    module = built(make(name), 0.25, scale=0.25)
    names = [path for path, _ in module.named_children()]
    assert names[names.index("flatten") :] == ["flatten", "hidden", "hidden_scaler", "hidden_relu", "head"]
    x = torch.randn(3, module.hidden.in_features, generator=torch_generator(0, "test:x"))
    behind = module[names.index("hidden") : names.index("head")]
    assert torch.equal(behind(x), (4 * module.hidden(x)).relu())
    assert torch.equal(behind.eval()(x), module.hidden(x).relu())


@pytest.mark.parametrize("name", OF_IMAGES)
def test_scaler_is_inert_in_evaluation(name):
    model = without_norm(name)
    plain, scaled = (built(model, 0.25, scale=s).eval() for s in (1.0, 0.25))
    x = images(model)
    assert torch.equal(plain(x), scaled(x))
    assert not torch.equal(plain.train()(x), scaled.train()(x))


@pytest.mark.parametrize("site", ["pre_norm", "post_conv"])
def test_the_identity_skip_of_a_preactivation_block_is_not_scaled(site):
    model = make("preact_resnet18", norm="none", scaler_site=site)
    plain = built(model, 1 / 16).double()
    scaled = built(model, 1 / 16, scale=0.5).double()
    block, scaled_block = plain.stage1[0], scaled.stage1[0]
    x = torch.randn(2, 4, 5, 5, generator=torch_generator(0, "test:x")).double()
    residual, scaled_residual = block(x) - x, scaled_block(x) - x
    torch.testing.assert_close(scaled_residual, 4 * residual)  # two convolutions, / 0.5 each


# --- blocks that are left out ---


@pytest.mark.parametrize("name", RESNETS)
def test_a_left_out_block_loses_its_residual_branch_and_keeps_its_projection(name):
    model = make(name)
    last = max(p.split(".residual")[0] for p in Net(model).layout.dims if ".residual" in p)
    whole = Net(model).layout.dims.keys()
    part = Net(model, without=("stage2.0", last)).layout.dims.keys()
    assert last == model.blocks[-1][-1]
    gone = whole - part
    assert part < whole
    assert {n for n in whole if re.match(rf"(stage2\.0|{last})\.residual", n)} <= gone
    assert all(n.startswith(("stage2.0.residual", f"{last}.")) for n in gone)
    assert {n for n in whole if n.startswith("stage2.0.projection")} <= part
    assert not any(n.startswith(last) for n in part)


@pytest.mark.parametrize("name", ["resnet18", "preact_resnet18"])
def test_a_left_out_identity_block_passes_its_input_on(name):
    model = make(name)
    block = built(model, 1 / 16, without=("stage1.1",)).stage1[1]
    x = torch.rand(2, 4, 5, 5, generator=torch_generator(0, "test:x"))
    assert torch.equal(block(x), x)
    assert not list(block.parameters())


@pytest.mark.parametrize("name", RESNETS)
def test_a_network_without_any_residual_branch_still_runs(name):
    model = make(name)
    module = built(model, 1 / 16, without=tuple(path for paths in model.blocks for path in paths))
    logits = module(images(model))
    logits.sum().backward()
    assert logits.shape == (4, 7)
    assert not any("residual" in path for path in params_of(module))
    assert all(p.grad is not None for p in module.parameters())


def test_unknown_blocks_are_refused():
    with pytest.raises(ValueError, match="no block 'stage2.2' can be left out .* Did you mean"):
        Net(make("resnet18"), without=("stage2.2",)).build()
    with pytest.raises(ValueError, match="no block 'conv1' can be left out .*; it has none"):
        Net(make("digits_cnn"), without=("conv1",)).build()


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("resnet34", (3, 4, 6, 3)),
        ("resnet8", (1, 1, 1)),
        ("resnet20", (3, 3, 3)),
        ("resnet32", (5, 5, 5)),
        ("resnet56", (9, 9, 9)),
        ("scalefl_resnet110", (18, 18, 18)),
        ("wide_resnet101_2", (3, 4, 23, 3)),
        ("preact_resnet18_heterofl", (1, 1, 1, 2)),
    ],
)
def test_blocks_by_stage(name, depth):
    blocks = MODELS[name]().blocks
    assert tuple(map(len, blocks)) == depth
    assert blocks[1][0] == "stage2.0" and blocks[-1][-1] == f"stage{len(depth)}.{depth[-1] - 1}"


# --- step sizes ---


@pytest.mark.parametrize("name", RESNETS)
def test_every_residual_branch_has_a_step_size(name):
    model = make(name)
    left_out = model.blocks[1][0]
    plain, stepped = (Net(model, 0.5, without=(left_out,), steps=steps).layout.dims for steps in (False, True))
    kept = [path for paths in model.blocks for path in paths if path != left_out]
    assert {n: stepped[n] for n in stepped.keys() - plain.keys()} == {f"{b}.residual.step.scale": () for b in kept}


@pytest.mark.parametrize("name", RESNETS)
def test_step_sizes_of_one_change_no_bit(name):
    model = make(name)
    plain, stepped = built(model, 0.5), built(model, 0.5, steps=True)
    assert torch.equal(plain(images(model)), stepped(images(model)))


@pytest.mark.parametrize("name", ["resnet18", "wide_resnet101_2"])
def test_a_step_size_multiplies_the_residual_branch_alone(name):
    """out = relu(skip(x) + s * residual(x)), the residual with its last norm (NeFL section IV)."""
    block = built(make(name), 1 / 16, steps=True).double().stage2[0]
    x = torch.rand(2, next(block.parameters()).shape[1], 6, 6, generator=torch_generator(0, "test:x")).double()
    branch, skip = block.residual(x), block.projection(x)
    nn.init.constant_(block.residual.step.scale, 3.0)
    torch.testing.assert_close(block(x), (skip + 3 * branch).relu())
    nn.init.constant_(block.residual.step.scale, 0.0)
    assert torch.equal(block(x), skip.relu())


def test_a_step_size_is_trained():
    step = Step()
    step(torch.tensor([2.0, 3.0])).sum().backward()
    assert step.scale.shape == () and step.scale.item() == 1
    assert step.scale.grad == 5


# --- initialisation, and torchvision's network ---


@pytest.mark.parametrize(
    ("init", "conv", "head"),
    [
        # torch: uniform in +-1 / sqrt(fan in)
        ("torch", (3 * 9 * 3) ** -0.5, (3 * 64) ** -0.5),
        ("kaiming", (2 / 27) ** 0.5, (2 / 64) ** 0.5),
        ("kaiming_fan_out", (2 / (64 * 9)) ** 0.5, (3 * 64) ** -0.5),
    ],
)
def test_how_weights_start(init, conv, head):
    params = params_of(built(make("resnet110", init=init, channels=64, classes=600)))
    assert params["conv.weight"].std().item() == pytest.approx(conv, rel=0.05)
    assert params["head.weight"].std().item() == pytest.approx(head * 0.5, rel=0.05)  # 256 features: 4 times 64


def test_how_published_networks_start():
    inits = {name: MODELS[name].model_fields["init"].default for name in POST_ACT}
    assert inits == {
        "resnet18": "torch",
        "resnet34": "torch",
        "resnet8": "kaiming",
        "resnet20": "kaiming",
        "resnet32": "kaiming",
        "resnet56": "kaiming",
        "resnet110": "kaiming",
        "wide_resnet101_2": "kaiming_fan_out",
        "depthfl_resnet18": "kaiming_fan_out",
        "scalefl_resnet110": "torch",
    }


def test_the_wide_resnet_has_torchvisions_parameters():
    with torch.device("meta"):
        theirs = torchvision.models.wide_resnet101_2(num_classes=10)
    shapes = Net(MODELS["wide_resnet101_2"]()).layout.shapes
    assert list(shapes.values()) == [tuple(p.shape) for p in theirs.parameters()]


# --- early exits ---


def exit_nets(model):
    return [Net(model, exits=n) for n in range(1, model.exit_count + 1)]


EXITS = [
    ("depthfl_resnet18", {}),
    ("scalefl_resnet110", {}),
    # every kind on every kind of block, behind the first and the last, and with pooling
    ("wide_resnet101_2", {"exits": ("stage1.0", "stage3.0"), "exit": "scalefl"}),
    ("wide_resnet101_2", {"exits": ("stage2.1", "stage4.1"), "exit": "depthfl"}),
    ("resnet18", {"exits": ("stage2.0", "stage2.1"), "exit": "depthfl", "maxpool": True}),
]
with_exits = pytest.mark.parametrize(
    ("name", "fields"), EXITS, ids=lambda v: v if isinstance(v, str) else v.get("exit", "as published")
)


@with_exits
def test_logits_and_gradients_of_every_exit(name, fields):
    model = make(name, **fields)
    for net in exit_nets(model):
        module = built(model, exits=net.exits)
        logits = module(images(model))
        assert isinstance(logits, tuple) and [one.shape for one in logits] == [(4, 7)] * net.exits
        sum(F.cross_entropy(one, torch.arange(4)) for one in logits).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
        assert [one.shape for one in module.eval()(images(model))] == [(4, 7)] * net.exits


@with_exits
def test_fewer_exits_are_a_part_of_the_network_with_the_same_answers(name, fields):
    """Nothing is built behind the last one; with the same statistics of norms, outputs are equal to the bit."""
    model = make(name, **fields)
    *nets, whole_net = exit_nets(model)
    whole = built(model, exits=whole_net.exits)
    statistics = fresh(whole)
    with torch.no_grad(), tracked(whole, statistics):
        whole(images(model))
    load_norms(whole.eval(), statistics)
    outputs = whole(images(model))
    assert min(one.std(0).min() for one in outputs) > 0
    for net in nets:
        part = built(model, exits=net.exits)
        names = params_of(part).keys()
        assert names < params_of(whole).keys()
        assert {n.split(".")[0] for n in names if n.startswith("exit")} == {f"exit{i + 1}" for i in range(net.exits)}
        stages = {".".join(n.split(".")[:2]) for n in names if n.startswith("stage")}
        order = [path for paths in model.blocks for path in paths]
        assert stages == set(order[: order.index(model.exits[net.exits - 1]) + 1])
        load(part, params_of(whole))
        load_norms(part.eval(), statistics)
        assert all(map(torch.equal, part(images(model)), outputs[: net.exits]))


@with_exits
def test_the_trunk_is_the_plain_network(name, fields):
    """Without exits a network has no parameters of them; its logits are those of the last one."""
    model = make(name, **fields)
    plain, whole = built(model), built(model, exits=model.exit_count)
    params = params_of(whole)
    assert params_of(plain).keys() == {n for n in params if not n.startswith("exit")}
    load(plain, params)
    assert torch.equal(plain(images(model)), whole(images(model))[-1])


@with_exits
def test_a_sliced_network_with_exits_is_the_full_one_with_dropped_channels_zeroed(name, fields):
    model = make(name, **fields, norm="none")
    full = built(model, exits=model.exit_count).double()
    params = {n: p * 0.5 + 0.01 for n, p in params_of(full).items()}
    for exits in (1, model.exit_count):
        net = Net(model, 0.6, exits=exits, rounding="down")
        selection = prefix(Net(model, exits=model.exit_count), net)
        sliced = net.build().double()
        load(sliced, selection.take(params))
        zeroed = {n: torch.zeros_like(p) for n, p in params.items()}
        selection.put(selection.take(params), zeroed)
        load(full, zeroed)
        x = images(model).double()
        assert min(one.std() for one in sliced(x)) > 0
        torch.testing.assert_close(sliced(x), full(x)[:exits])


@with_exits
def test_two_widths_of_exits(name, fields):
    model = make(name, **fields)
    for exits in (1, model.exit_count):
        check_axes(Net(model, exits=exits))
        check_axes(Net(model, exits=exits, rounding="down"), narrow=0.3)


def test_depthfls_gate():
    """f' = sigmoid(upsampled(gate(f))) * f: where the gate's last ReLU gives 0, half of every pixel."""
    model = make("depthfl_resnet18", norm="none", channels=2)
    exit = built(model, exits=1).exit1
    for parameter in exit.gate.parameters():
        nn.init.zeros_(parameter)
    x = torch.rand(3, 2, 8, 8, generator=torch_generator(0, "test:x"))
    assert torch.equal(exit(x), exit.head(exit.features(x / 2)))


def test_depthfls_gate_fits_odd_images():
    model = make("depthfl_resnet18", input=(1, 7, 5), channels=4)
    assert [one.shape for one in built(model, exits=4)(images(model))] == [(4, 7)] * 4


@pytest.mark.parametrize(("name", "more"), [("scalefl_resnet110", 3 * 3), ("depthfl_resnet18", 2 * (4 + 3 + 2))])
def test_where_scalers_of_exits_stand(name, more):
    """Between a norm and the convolution before it: three a ScaleFL exit, two a halving of a DepthFL exit."""
    model = make(name)
    plain, whole = (Net(model, 0.5, exits=n, scale=0.5).build() for n in (0, model.exit_count))
    count = {module: sum(type(m) is Scaler for m in module.modules()) for module in (plain, whole)}
    assert count[whole] == count[plain] + more


@pytest.mark.parametrize(
    ("exits", "message"),
    [
        (("stage2.9",), "blocks of the network; 'stage2.9' is none. Did you mean 'stage2.1'"),
        (("stage2.0", "stage1.1"), "every block once, in the order of the network"),
        (("stage2.0", "stage2.0"), "every block once, in the order of the network"),
    ],
)
def test_exits_that_are_no_blocks_in_order_are_refused(exits, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        MODELS["resnet18"](exits=exits)


@pytest.mark.parametrize(
    ("name", "exits", "message"),
    [
        ("depthfl_resnet18", 5, "this network cannot answer at 5 exits; take 0 (its head alone) to 4"),
        ("resnet18", 2, "this network cannot answer at 2 exits; take 0 (its head alone) to 1"),
        ("preact_resnet18", 1, "this network cannot answer at 1 exits; take 0: it has no early exits"),
        ("digits_cnn", 1, "this network cannot answer at 1 exits; take 0: it has no early exits"),
    ],
)
def test_exits_that_a_network_has_not_are_refused(name, exits, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Net(make(name), exits=exits).build()


def test_a_network_without_early_exits_answers_at_its_head_as_its_only_one():
    model = make("resnet18")
    assert model.exit_count == 1
    [only] = built(model, exits=1)(images(model))
    assert torch.equal(only, built(model)(images(model)))
