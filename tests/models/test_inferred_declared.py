"""Networks of other libraries have the axes and holder means of rayfl's networks that declare theirs."""

from dataclasses import replace

import pytest
import torch

from rayfl.core.axes import segments
from rayfl.core.net import Net
from rayfl.core.submodel import prefix
from rayfl.core.tensors import Params
from rayfl.models.huggingface import GPT2, Llama, Roberta
from rayfl.models.inferred.module import Module
from rayfl.models.pretrained import RESNET, VIT, translated
from rayfl.models.resnet import ResNet18
from rayfl.models.vit import ViTB16
from rayfl.testing.tiny import spread

HEADS, INSIDE = 4, 4
SIZES = {"hidden_size": HEADS * INSIDE, "num_attention_heads": HEADS, "num_hidden_layers": 2}
OURS = {"hidden": HEADS * INSIDE, "heads": HEADS, "layers": 2, "ffn": 12, "ids": 20, "length": 8}


def holder_mean(net: Net, numbers: Params) -> tuple[Params, Params]:
    """Return the holder mean of clients of three widths, and the number of holders. `numbers`: by coordinate."""
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in net.layout.shapes.items()}
    cover = dict(total)
    for factor, width in enumerate((1, 0.5, 0.25), start=1):
        selection = prefix(net, replace(net, width=width))
        part = {name: factor * t for name, t in selection.take(numbers).items()}
        total = {name: total[name] + t for name, t in spread(selection, part, total).items()}
        ones = {name: torch.ones_like(t) for name, t in part.items()}
        cover = {name: cover[name] + t for name, t in spread(selection, ones, cover).items()}
    return {name: t / cover[name] for name, t in total.items()}, cover


def numbered(net: Net) -> Params:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(-9, 10, shape, generator=generator, dtype=torch.float64)
        for name, shape in net.layout.shapes.items()
    }


@pytest.mark.parametrize(
    ("ours", "name", "options"),
    [
        (
            Roberta(**OURS, task="classes", classes=4, pad=20, vocabulary=21),
            "RobertaForSequenceClassification",
            {"intermediate_size": 12, "max_position_embeddings": 514, "type_vocab_size": 1},
        ),
        (GPT2(**OURS, task="next_token", classes=20), "GPT2LMHeadModel", {"n_inner": 12}),
        (
            Llama(**OURS, groups=4, task="next_token", classes=20),
            "LlamaForCausalLM",
            {"intermediate_size": 12, "num_key_value_heads": 4},
        ),
        (
            Llama(**OURS | {"heads": 8}, groups=4, head_width=2, task="next_token", classes=20),
            "LlamaForCausalLM",
            {"intermediate_size": 12, "num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 2},
        ),
    ],
    ids=["roberta", "gpt2", "llama", "llama-grouped"],
)
def test_networks_of_transformers(ours, name, options):
    """Names are the same. A declared stream has its features in as many copies as there are heads, because a
    configuration has one number for both; an inferred one has single features. Their sizes are equal where the share of
    a head is a whole number."""
    samples = {"task": ours.task, "ids": 20, "length": 8, "classes": ours.classes, "pad": ours.pad}
    theirs = Net(Module(of=f"transformers:{name}", options=SIZES | options, **samples))
    declared = Net(ours)
    assert theirs.layout.shapes == declared.layout.shapes
    assert len(theirs.layout.axes) == len(declared.layout.axes)
    # an input embedding counts as rows of the classes there, tied or not
    assert {*declared.layout.classifier} >= {*theirs.layout.classifier} > set()
    for width in (0.5, 0.25):
        assert replace(theirs, width=width).layout.shapes == replace(declared, width=width).layout.shapes
    for one, other in zip(*(holder_mean(net, numbered(declared)) for net in (theirs, declared)), strict=True):
        assert all(torch.equal(one[path], other[path]) for path in other)


def test_torchvision_s_resnet18():
    """Our stem is 3x3 instead of 7x7."""
    declared = Net(ResNet18(classes=4, input=(3, 32, 32)))
    theirs = Net(Module(of="torchvision.models:resnet18", input=(3, 32, 32), classes=4))
    assert len(theirs.layout.axes) == len(declared.layout.axes) == 12
    numbers = numbered(theirs)
    renamed = translated(numbers, RESNET)
    renamed["conv.weight"] = renamed["conv.weight"][:, :, :3, :3]
    assert {name: tuple(t.shape) for name, t in renamed.items()} == declared.layout.shapes
    for width in (0.5, 0.25, 0.1):
        stem = 3 * (49 - 9) * replace(theirs, width=width).layout.shapes["conv1.weight"][0]
        assert replace(theirs, width=width).parameters == replace(declared, width=width).parameters + stem
    for found, wanted in zip(holder_mean(theirs, numbers), holder_mean(declared, renamed), strict=True):
        found = translated(found, RESNET)
        found["conv.weight"] = found["conv.weight"][:, :, :3, :3]
        assert all(torch.equal(found[name], t) for name, t in wanted.items())


def test_torchvision_s_vision_transformer():
    """torch's attention has one number for the stream and its heads. So both are one axis here: the stream has the
    first features of every head's block, where ours has its first features, and the layers' heads are cut together.
    The rest is equal, with the stream in another order."""
    sizes = {"image_size": 8, "patch_size": 4, "num_layers": 2, "num_heads": HEADS, "mlp_dim": 4 * HEADS * INSIDE}
    options = sizes | {"hidden_dim": HEADS * INSIDE}
    theirs = Net(Module(of="torchvision.models:VisionTransformer", options=options, input=(3, 8, 8), classes=4))
    declared = Net(ViTB16(layers=2, heads=HEADS, head_width=INSIDE, patch=4, input=(3, 8, 8), classes=4))
    assert len(theirs.layout.axes) == 3 and len(declared.layout.axes) == 5
    for width in (1, 0.5, 0.25):
        assert replace(theirs, width=width).parameters == replace(declared, width=width).parameters
    order = torch.arange(HEADS * INSIDE).view(HEADS, INSIDE).T.flatten()

    def ours(tensors: Params) -> Params:
        found = translated(tensors, VIT)
        for name, dims in declared.layout.dims.items():
            for d, dim in enumerate(dims):
                if any(axis.name == "hidden" for _, axis in segments(dim)):
                    found[name] = found[name].index_select(d, order)
        return found

    numbers = numbered(theirs)
    assert {name: tuple(t.shape) for name, t in ours(numbers).items()} == declared.layout.shapes
    for found, wanted in zip(holder_mean(theirs, numbers), holder_mean(declared, ours(numbers)), strict=True):
        assert all(torch.equal(ours(found)[name], t) for name, t in wanted.items())
