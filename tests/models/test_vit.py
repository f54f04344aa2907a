"""The vision transformer: torchvision's network, and what a narrow or shallow one keeps of it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import run, simulate, tiny
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.axes import Axis, axes_of
from rayfl.core.net import Net, check_axes, load, params_of
from rayfl.core.seeds import torch_generator, torch_scope
from rayfl.core.submodel import prefix
from rayfl.models import MODELS
from rayfl.models.layers import Scaler
from rayfl.models.pretrained import VIT, translated
from rayfl.models.vit import Attention

FULL = MODELS["vit_b_16"]()
SMALL = {"layers": 3, "heads": 3, "head_width": 8, "patch": 4}
TINY = MODELS["vit_b_16"](input=(3, 12, 8), classes=5, **SMALL)


def built(model=TINY, width=1.0, **fields):
    with torch_scope(0):
        return Net(model, width, **fields).build()


def images(count=4, shape=TINY.input):
    return torch.randn(count, *shape, generator=torch_generator(0, "test:images"))


def published(model):
    """torchvision's network, square images, with nothing at zero."""
    from torchvision.models import VisionTransformer

    width = model.heads * model.head_width
    with torch_scope(0):
        module = VisionTransformer(
            model.input[1], model.patch, model.layers, model.heads, width, 4 * width, num_classes=model.classes
        )
        for p in module.parameters():
            nn.init.normal_(p, std=0.3)
    return module.eval()


# --- the network ---


@pytest.mark.parametrize(
    ("ratio", "blocks", "hidden", "count"),
    [
        (1, 12, 768, 85_806_346),
        (1, 9, 768, 64_542_730),  # NeFL-D
        (1, 6, 768, 43_279_114),
        (0.75, 12, 672, 65_790_826),  # NeFL-W
        (0.5, 12, 552, 44_503_906),
        (0.898744459091891, 10, 732, 65_110_678),  # NeFL-WD
        (0.747389751896896, 8, 672, 44_079_850),
    ],
)
def test_published_counts(ratio, blocks, hidden, count):
    """NeFL's submodels: widths are square roots of parameter ratios, blocks are left out from the end."""
    [paths] = FULL.blocks
    net = Net(FULL, ratio**0.5, without=paths[blocks:])
    assert net.parameters == count
    assert net.layout.shapes["norm.weight"] == (hidden,)
    assert replace(net, steps=True).parameters == count


def test_operations_of_the_full_network():
    """Convolution and linear layers: 196 patches, 197 tokens through 12 blocks, a head; no attention products."""
    patches, block = 196 * 768 * 768, 197 * 12 * 768 * 768
    assert Net(FULL).macs == patches + 12 * block + 7680


def test_the_axes_of_two_widths():
    check_axes(Net(FULL))
    check_axes(Net(TINY))


def test_every_head_keeps_its_own_axis_in_every_block():
    axes = Net(FULL).layout.axes
    blocks = [f"encoder.{i}.{part}" for i in range(12) for part in ("inner", "mlp")]
    assert sorted(axes) == sorted(["hidden", *blocks])
    assert axes["encoder.3.inner"] == Axis("encoder.3.inner", 64, groups=12)
    assert axes["encoder.3.mlp"] == Axis("encoder.3.mlp", 64, copies=48)


def test_the_same_output_as_torchvisions():
    model = TINY.model_copy(update={"input": (3, 8, 8)})
    theirs, ours = published(model), built(model)
    params = translated(theirs.state_dict(), VIT)
    assert params.keys() == params_of(ours).keys()
    load(ours, params)
    x = images(shape=model.input)
    torch.testing.assert_close(ours.eval()(x), theirs(x))


def test_it_starts_as_torchvisions_but_for_the_head():
    from torchvision.models import VisionTransformer

    model = MODELS["vit_b_16"](input=(3, 32, 32), layers=1, heads=4, head_width=32, patch=16)
    theirs = translated(VisionTransformer(32, 16, 1, 4, 128, 512).state_dict(), VIT)
    for name, p in params_of(built(model)).items():
        if name.startswith("head"):
            assert p.std() > 0.04
        else:
            torch.testing.assert_close(p.std(), theirs[name].std(), rtol=0.15, atol=1e-9, msg=name)
            torch.testing.assert_close(p.mean(), theirs[name].mean(), rtol=0.05, atol=0.01, msg=name)


def test_images_that_patches_do_not_divide_are_refused():
    with pytest.raises(ConfigError) as error:
        tiny(model="vit_b_16", data={"shape": [3, 32, 24]})
    assert str(error.value) == (
        "test: model vit_b_16: images have 32x24 pixels. Allowed: multiples of 16, its patches; "
        "set data.size (224 as published)"
    )


def test_a_program_of_it_takes_any_number_of_images():
    module = built(width=0.5, steps=True).eval()
    program = torch.export.export(module, (images(2),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.testing.assert_close(program.module()(images(5)), module(images(5)))


# --- depth ---


def test_a_block_that_is_left_out_leaves_nothing():
    whole, part = (set(Net(TINY, without=without).layout.dims) for without in ((), ("encoder.1",)))
    assert whole - part == {name for name in whole if name.startswith("encoder.1.")}
    assert part < whole
    module, shallow = built(), built(without=("encoder.1",))
    load(shallow, params_of(module))
    module.encoder[1] = nn.Identity()
    assert torch.equal(shallow(images()), module(images()))


def test_without_any_block_it_still_runs():
    [paths] = TINY.blocks
    assert built(without=paths)(images()).shape == (4, 5)
    with pytest.raises(ValueError, match="no block 'encoder.3' can be left out"):
        Net(TINY, without=("encoder.3",)).build()


def test_a_step_of_one_changes_nothing_and_of_zero_leaves_the_block_out():
    plain, stepping = built(), built(steps=True)
    steps = {name for name, p in stepping.named_parameters() if not p.dim()}
    assert steps == {f"encoder.{i}.{branch}.step.scale" for i in range(3) for branch in ("attention", "mlp")}
    load(stepping, params_of(stepping) | params_of(plain))
    assert torch.equal(stepping(images()), plain(images()))
    load(stepping, params_of(stepping) | {f"encoder.1.{b}.step.scale": torch.zeros(()) for b in ("attention", "mlp")})
    plain.encoder[1] = nn.Identity()
    assert torch.equal(stepping(images()), plain(images()))


# --- width ---


def taken(width):
    """Every parameter of the full tiny network numbered, and the prefix of this width of it."""
    numbered = {n: torch.arange(p.numel()).reshape(p.shape) for n, p in params_of(Net(TINY).blank()).items()}
    return numbered, prefix(Net(TINY), Net(TINY, width)).take(numbered)


@pytest.mark.parametrize(("width", "kept"), [(0.75, 6), (0.55, 5), (1 / 8, 1)])
def test_no_head_and_no_projection_is_mixed_with_another(width, kept):
    """3 heads of 8 features: row 8 h + i of a projection is feature i of head h, and stays that."""
    whole, part = taken(width)
    rows = torch.tensor([8 * head + i for head in range(3) for i in range(kept)])
    stream = torch.arange(3 * kept)
    for i in range(3):
        path = f"encoder.{i}.attention.attend"
        for projection in ("q", "k", "v"):
            name = f"{path}.{projection}.linear"
            assert torch.equal(part[f"{name}.weight"], whole[f"{name}.weight"][rows][:, stream])
            assert torch.equal(part[f"{name}.bias"], whole[f"{name}.bias"][rows])
        assert torch.equal(part[f"{path}.out.linear.weight"], whole[f"{path}.out.linear.weight"][stream][:, rows])
    assert torch.equal(part["tokens.positions"], whole["tokens.positions"][..., stream])
    assert torch.equal(part["encoder.0.mlp.up.weight"], whole["encoder.0.mlp.up.weight"][: 12 * kept, stream])


def masked_and_narrow(build, width=0.55):
    """A wide module with all outside of the prefix at zero, and the narrow module; float64."""
    wide, narrow = (built_part(build, w) for w in (1.0, width))
    part = dict(narrow.named_parameters())
    with torch.no_grad():
        for name, dims in axes_of(wide).items():
            parameter, mask = wide.get_parameter(name), torch.ones(())
            nn.init.normal_(parameter, generator=torch_generator(0, "test:parameter", name))
            for d, (axis, kept) in enumerate(zip(dims, axes_of(narrow)[name], strict=True)):
                along = torch.zeros(axis.groups, axis.size, axis.copies)
                along[:, : kept.size] = 1
                mask = mask * along.view([-1 if i == d else 1 for i in range(len(dims))])
            part[name].copy_(parameter[mask.expand(parameter.shape) > 0].view(part[name].shape))
            parameter.mul_(mask)
    return wide, narrow


def built_part(build, width):
    net = Net(TINY, width)
    return build(net, net.axis("hidden", 8).repeat(3)).double()


def streams(kept=5):
    """x [B, N, C] of the wide network, zero behind its first `kept` positions, and of the narrow one."""
    x = torch.randn(2, 7, 24, generator=torch_generator(0, "test:x")).double()
    x[..., 3 * kept :] = 0
    return x, x[..., : 3 * kept]


def test_a_narrow_perceptron_is_the_wide_one_masked():
    """Without the LayerNorm before it, whose mean over a masked stream is another one."""

    def mlp(net, stream):
        return TINY._block(net, "encoder.0", stream).mlp[1:]

    wide, narrow = masked_and_narrow(mlp)
    x, part = streams()
    y = wide(x)
    torch.testing.assert_close(narrow(part), y[..., :15])
    assert not y[..., 15:].any()


def test_a_narrow_attention_is_the_wide_one_masked(monkeypatch):
    """Without the LayerNorm before it; and where the wide one divides its products by the root of the 5 features
    that are left of a head's 8, as the narrow one does."""

    def attention(net, stream):
        return Attention(stream, net.axis("inner", 8, groups=3), scale=1.0)

    wide, narrow = masked_and_narrow(attention)
    x, part = streams()
    y = narrow(part)
    monkeypatch.setattr(F, "scaled_dot_product_attention", partial(F.scaled_dot_product_attention, scale=5**-0.5))
    masked = wide(x)
    torch.testing.assert_close(y, masked[..., :15])
    assert not masked[..., 15:].any() and y.std() > 0


@pytest.mark.parametrize("width", [1.0, 0.3, 1 / 8])
def test_logits_and_gradients_at_every_width(width):
    module = built(width=width, scale=0.5, steps=True)
    logits = module(images())
    F.cross_entropy(logits, torch.arange(4)).backward()
    assert logits.shape == (4, 5)
    # keys with one bias more give the same softmax
    assert all(p.grad.any() for n, p in module.named_parameters() if not n.endswith("k.linear.bias"))


def test_a_scaler_behind_every_layer_but_the_head():
    scalers = [m for m in built(scale=0.5).modules() if type(m) is Scaler]
    assert len(scalers) == 1 + 3 * 6
    kinds = {type(m) for m in built().modules()}
    assert not kinds & {Scaler, nn.Identity}
    plain, scaled = built().eval(), built(scale=0.5).eval()
    assert torch.equal(plain(images()), scaled(images()))


@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
def test_it_learns_in_a_federation(method, tmp_path):
    spec = tiny(method=method, model={"name": "vit_b_16", **SMALL}, rounds=1)
    [line] = run(simulate(spec, tmp_path))
    assert line["train_loss"] > 0
