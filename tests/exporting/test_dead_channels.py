"""Channels that are not there: what may be taken out, what is left, and that the answers stay."""

import pytest
import torch

from rayfl.core import norms
from rayfl.core.net import Net, load
from rayfl.core.seeds import torch_generator, torch_scope
from rayfl.core.tensors import Params
from rayfl.exporting.dead_channels import filters, shrunk, survivors
from rayfl.methods.base import Deployment
from rayfl.models import MODELS, ImageModel
from rayfl.training.settings import every_exit


class Bottlenecks(MODELS["wide_resnet101_2"]):
    """Network whose channels are copies of positions."""

    depth = (1, 1)


class PostAct(MODELS["resnet18"]):
    depth = (1, 2)


class PreAct(MODELS["preact_resnet18"]):
    depth = (1, 2)
    channels = 6


KINDS = {
    "lenet": (MODELS["lenet5_caffe"], {}),
    "digits": (MODELS["digits_cnn"], {}),
    "mlp": (MODELS["liang_mlp"], {"input": (1, 8, 8)}),
    "postact": (PostAct, {"channels": 6, "input": (3, 8, 8)}),
    "preact": (PreAct, {"input": (3, 8, 8)}),
    "bottlenecks": (Bottlenecks, {"channels": 4, "input": (3, 16, 16)}),
    "exits": (PostAct, {"channels": 4, "input": (3, 8, 8), "exits": ("stage1.0", "stage2.0"), "exit": "depthfl"}),
    "transformer": (MODELS["vit_b_16"], {"input": (3, 8, 8), "layers": 2, "heads": 2, "head_width": 4, "patch": 4}),
}


def built(kind: str, **fields) -> ImageModel:
    family, given = KINDS[kind]
    return family(**given | fields)


def deployed(model: ImageModel, width: float = 1.0, exits: int = 0) -> Deployment:
    """All parameters drawn, the norms' too; the weights of convolutions and linear layers are masked."""
    net = Net(model, width, exits=exits)
    with torch_scope(0):
        params = {name: torch.randn(shape) * 0.3 for name, shape in net.layout.shapes.items()}
    return Deployment("whole", net, params, masked=tuple(f"{path}.weight" for path in net.layers))


def statistics_of(d: Deployment) -> Params:
    """Drawn."""
    generator = torch_generator(0, "statistics")
    return {n: torch.rand(t.shape, generator=generator) + 0.5 for n, t in d.net.statistics().items()}


def answers(d: Deployment, statistics: Params) -> torch.Tensor:
    """The logits of all exits, one under the other."""
    module = d.net.build()
    load(module, d.params)
    norms.load(module, statistics)
    with torch.no_grad():
        x = d.net.model.example(4, "cpu").normal_(generator=torch_generator(0, "test:x"))
        return torch.cat(every_exit(module.eval()(x)))


def along(d: Deployment, axis: str, written: bool = True) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters with rows (columns) on the axis: (parameter, view [positions, ...])."""
    found = []
    for name, dims in d.net.layout.dims.items():
        for i, other in enumerate(dims):
            if other is not None and other.name == axis and (i == 0) == written:
                found.append((name, d.params[name].movedim(i, 0).unflatten(0, (other.groups, other.size, -1))))
    return found


def clear(d: Deployment, axis: str, positions, written: bool = True, spare: str = "") -> None:
    """Zeros in all rows (columns) of these positions, but in the parameter `spare`."""
    for name, rows in along(d, axis, written):
        if name != spare:
            rows[:, positions] = 0


def left(d: Deployment, axis: str) -> list[int]:
    return list(survivors(d).positions[axis].positions)


def same_answers(d: Deployment) -> Deployment:
    """The smaller network, which answers as `d` does."""
    statistics = statistics_of(d)
    small, kept = shrunk(d, statistics)
    shapes = {name: p.shape for name, p in small.net.build().named_parameters()}
    assert {name: t.shape for name, t in small.params.items()} == shapes
    assert kept.keys() == statistics.keys()
    whole = answers(d, statistics)
    torch.testing.assert_close(answers(small, kept), whole, rtol=0, atol=1e-5 * float(whole.abs().max()))
    return small


def test_lenet_by_hand():
    """17, 48 and 490 of 20, 50 and 500 rows stay. The classifier's, which are not cut, stay even if they are 0."""
    d = deployed(built("lenet"))
    clear(d, "conv1", [0, 3, 7])
    clear(d, "conv2", [1, 49])
    clear(d, "hidden", range(100, 110))
    d.params["head.weight"][2] = 0
    assert filters(d) == (580, 16)
    small = same_answers(d)
    count = 17 * 25 + 48 * 17 * 25 + 490 * 48 * 16 + 10 * 490
    assert small.net.parameters == sum(t.numel() for t in small.params.values()) == count
    assert small.net.sizes == (("conv1", 17), ("conv2", 48), ("hidden", 490))
    assert filters(small) == (565, 1) and small.key != d.key
    assert torch.equal(small.params["conv1.weight"], d.params["conv1.weight"][[1, 2, 4, 5, 6, *range(8, 20)]])


def test_a_row_of_which_some_elements_are_zero_stays():
    d = deployed(built("lenet"))
    d.params["conv2.weight"][3, 1:] = 0
    d.params["conv2.weight"][4, :, 1:] = 0
    assert shrunk(d, {})[0].net == d.net


def test_what_nobody_reads_goes():
    """A neuron whose column is 0, and then the filter that only that neuron read."""
    d = deployed(built("lenet"))
    clear(d, "hidden", [9], written=False)
    [(_, read)] = along(d, "conv2", written=False)
    read[:, 4, :, :9] = read[:, 4, :, 10:] = 0
    small = same_answers(d)
    assert dict(small.net.sizes) == {"conv2": 49, "hidden": 499}


def test_what_reads_only_what_is_gone_goes():
    """A filter of the second layer that reads the first filter alone, and a neuron that reads that one alone."""
    d = deployed(built("lenet"))
    clear(d, "conv1", [0])
    d.params["conv2.weight"][5, 1:] = 0
    hidden = d.params["hidden.weight"].view(500, 50, 16)
    hidden[7, :5] = hidden[7, 6:] = 0
    assert dict(same_answers(d).net.sizes) == {"conv1": 19, "conv2": 49, "hidden": 499}


def test_a_bias_keeps_its_neuron():
    d = deployed(built("mlp"))
    clear(d, "hidden1", [3, 4])
    d.params["hidden1.bias"][4] = 0.1
    assert 3 not in left(d, "hidden1") and 4 in left(d, "hidden1")
    assert filters(same_answers(d))[1] == 1


def test_one_position_stays():
    d = deployed(built("lenet"))
    for axis in ("conv1", "hidden"):
        clear(d, axis, slice(None))
    small = same_answers(d)
    assert set(small.net.sizes) == {("conv1", 1), ("conv2", 1), ("hidden", 1)}
    assert not answers(small, {}).any()


@pytest.mark.parametrize("kind", ["postact", "preact"])
def test_a_residual_stream_is_cut_where_all_that_is_added_is_zero(kind):
    """One of them, or the weight or bias of a norm that has it, keeps the channel."""
    d = deployed(built(kind))
    writers = [name for name, _ in along(d, "stage2")]
    assert len(writers) == (9 if kind == "postact" else 7)
    for spare in writers:
        d = deployed(built(kind))
        clear(d, "stage2", [1, 3], spare=spare)
        assert left(d, "stage2")[:4] == [0, 1, 2, 3], spare
    clear(d, "stage2", [1, 3])
    assert left(d, "stage2")[:4] == [0, 2, 4, 5]
    assert [a for a, _ in same_answers(d).net.sizes] == ["stage2"]


def test_a_filter_before_a_norm_that_makes_it_a_constant_stays():
    """Six are pruned; only the one whose norm is 0 too can go."""
    d = deployed(built("postact"))
    d.params["stage1.0.residual.conv1.weight"][:] = 0
    for part in ("weight", "bias"):
        d.params[f"stage1.0.residual.norm1.{part}"][2] = 0
    assert left(d, "stage1.0.inner") == [0, 1, 3, 4, 5]
    small = same_answers(d)
    assert filters(d)[1] - filters(small)[1] == 1 and filters(small)[1] == 5


@pytest.mark.parametrize("norm", ["group", "layer", "instance"])
def test_norms_that_mix_positions_keep_them(norm):
    d = deployed(built("digits", norm=norm))
    for axis in ("conv1", "conv2", "hidden"):
        clear(d, axis, [0])
    assert dict(same_answers(d).net.sizes) == {"hidden": 127}


def test_a_transformer_loses_neurons_alone():
    """No features of its stream, which LayerNorm mixes, nor of its heads, whose number scales the softmax."""
    d = deployed(built("transformer"))
    clear(d, "hidden", [0])
    clear(d, "encoder.0.inner", [0])
    clear(d, "encoder.1.mlp", [0])
    clear(d, "encoder.0.mlp", [1, 2], written=False)
    assert dict(same_answers(d).net.sizes) == {"encoder.0.mlp": 2, "encoder.1.mlp": 3}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1.0, 0.75])
def test_answers_stay(kind, width):
    """Where rows and columns, of a third of the positions each, are 0, and single weights."""
    model = built(kind)
    d = deployed(model, width, exits=model.exit_count if model.exit_count > 1 else 0)
    generator = torch_generator(0, "test:zeros", kind)
    for axis, size in [(a.name, a.size) for a in d.net.layout.axes.values()]:
        for written in (True, False):
            clear(d, axis, (torch.rand(size, generator=generator) < 0.3).nonzero().flatten(), written)
    for masked in d.masked:
        t = d.params[masked]
        t[torch.rand(t.shape, generator=generator) < 0.5] = 0
    small = same_answers(d)
    assert small.net.parameters < (0.8 if kind != "transformer" else 1) * d.net.parameters
    assert shrunk(small, {})[0].net == small.net


def test_sizes_of_single_axes():
    model = built("lenet")
    shapes = Net(model, 0.5, sizes=(("conv2", 50),)).layout.shapes
    assert (shapes["conv1.weight"], shapes["conv2.weight"]) == ((10, 1, 5, 5), (50, 10, 5, 5))
    for size in (0, 51):
        with pytest.raises(ValueError, match=f"Net.sizes: {size} is not valid for the axis 'conv2'. Allowed: 1 to 50"):
            Net(model, sizes=(("conv2", size),)).build()
