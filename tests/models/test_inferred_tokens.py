"""Networks for tokens without declarations: axes by hand, and against the whole network with zeros elsewhere."""

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_cut_is_whole_with_zeros
from test_inferred import parts
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.net import Net, check_axes, load
from rayfl.models.inferred.module import Module
from rayfl.testing import ModelContract
from rayfl.testing.tiny import run, simulate, tiny

SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2}


class Decoder(nn.Module):
    """A decoder of a user: rotary embeddings, two heads of keys and values for four of queries, a norm of queries
    without statistics, and tied embeddings."""

    def __init__(self, vocab_size: int, heads: int = 4, shared: int = 2, inside: int = 6, angles: bool = True):
        super().__init__()
        self.shared, self.inside, self.ratio, self.angles = shared, inside, heads // shared, angles
        width = heads * inside
        self.embed = nn.Embedding(vocab_size, width)
        self.q, self.k, self.v = (nn.Linear(width, n * inside) for n in (heads, shared, shared))
        self.scale = nn.Parameter(torch.ones(inside))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 10), nn.Linear(10, width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("speeds", 2.0 ** -torch.arange(inside // 2))

    def turned(self, x):
        if not self.angles:
            return x
        angles = torch.arange(x.shape[2], device=x.device)[:, None] * torch.cat([self.speeds, self.speeds])
        half = x.shape[-1] // 2
        return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin()

    def forward(self, x):
        x = self.embed(x)
        q, k, v = (part(x).unflatten(-1, (-1, self.inside)).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.ratio, 1) for t in (k, v))
        scores = self.turned(q * self.scale) @ self.turned(k).transpose(-1, -2)
        x = x + self.out((scores.tril().softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.silu(self.up(x))))


class Sums(nn.Module):
    """Sums over channels: exact for those that are 0 where they are cut, and not after a sigmoid."""

    def __init__(self, num_classes: int = 4):
        super().__init__()
        self.exact, self.other = nn.Linear(64, 8), nn.Linear(64, 8)
        self.head = nn.Linear(2, num_classes)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(torch.stack([self.exact(x).relu().sum(1), self.other(x).sigmoid().sum(1)], 1))


def tokens(of, task="next_token", **given) -> Module:
    of = of if ":" in of else f"test_inferred_tokens:{of}"
    return Module(**{"of": of, "task": task, "ids": 20, "classes": 20, "length": 8} | given)


def of_transformers(name, task="next_token", **options) -> Module:
    classes = {"classes": 4, "pad": 20} if task == "classes" else {}
    return tokens(f"transformers:{name}", task, options=SIZES | options, **classes)


def test_heads_with_rotary_embeddings_are_cut_whole():
    """In groups that share keys and values; the norm's weights and the vocabulary are never cut."""
    net = Net(tokens("Decoder"))
    assert {name: axis.size for name, axis in net.layout.axes.items()} == {"embed": 24, "q": 2, "up": 10}
    assert parts(net, "q.weight") == [[("q", 1, 2, 12)], [("embed", 1, 24, 1)]]
    assert parts(net, "k.weight")[0] == parts(net, "v.weight")[0] == [("q", 1, 2, 6)]
    assert parts(net, "out.weight")[1] == [("q", 1, 2, 12)]
    assert parts(net, "scale") == [[]]
    assert parts(net, "embed.weight") == [[("classes", 1, 20, 1)], [("embed", 1, 24, 1)]]
    check_axes(net, 0.4)


def test_heads_without_rotary_embeddings_are_cut_inside():
    net = Net(tokens("Decoder", options={"angles": False}))
    assert parts(net, "scale") == [[("scale", 1, 6, 1)]]
    assert parts(net, "q.weight")[0] == parts(net, "out.weight")[1] == [("scale", 4, 6, 1)]
    assert parts(net, "k.weight")[0] == parts(net, "v.weight")[0] == [("scale", 2, 6, 1)]


@pytest.mark.parametrize("angles", [True, False])
def test_a_narrow_decoder_is_the_whole_one_with_zeros_elsewhere(angles, float64):
    net = Net(tokens("Decoder", options={"angles": angles}))
    assert_cut_is_whole_with_zeros(net, torch.arange(16).view(2, 8))


def test_sums_over_channels_that_are_not_0_where_they_are_cut_keep_them(float64):
    net = Net(Module(of="test_inferred_tokens:Sums", input=(1, 8, 8), classes=4))
    assert net.layout.axes.keys() == {"exact"}
    assert_cut_is_whole_with_zeros(net, torch.randn(2, 1, 8, 8))


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "GPTNeoXForCausalLM", "PhiForCausalLM", "GemmaForCausalLM"])
def test_decoders_keep_whole_groups_of_heads(name):
    """With norms of queries and keys, queries, keys and values of one layer, or rotations of a part of a head."""
    known = {"num_key_value_heads": 2} if "NeoX" not in name and "Phi" not in name else {}
    head = {"head_dim": 4} if name in ("Qwen3ForCausalLM", "GemmaForCausalLM") else {}
    net = Net(of_transformers(name, intermediate_size=12, **known, **head))
    stream, *rest = net.layout.axes.values()
    assert stream.size == 16 and [axis.size for axis in rest] == [2 if known else 4, 12] * 2
    check_axes(net, 0.5)


def test_padding_is_masked(float64):
    """A sequence has the logits that it has without padding. A network of a user gets the token `pad`."""
    net = Net(of_transformers("BertForSequenceClassification", "classes", intermediate_size=12), 0.5)
    module = net.build().eval()
    x = torch.tensor([[3, 4, 5, -1, -1]])
    torch.testing.assert_close(module(x), module(x[:, :3]), rtol=0, atol=1e-12)
    plain = Net(tokens("Decoder", "masked_lm", pad=20)).build().eval()
    assert torch.equal(plain(x), plain(torch.tensor([[3, 4, 5, 20, 20]]))) and plain(x).shape == (1, 5, 20)


def test_methods_train_a_decoder(tmp_path):
    data = {"name": "synthetic_text", "task": "next_token", "length": 12}
    model = {"name": "module", "of": "test_inferred_tokens:Decoder"}
    for method in ("heterofl", "fedrolex"):
        experiment = tiny(model=model, data=data, partition="iid", method={"name": method}, rounds=1)
        [line] = run(simulate(experiment, tmp_path / method))
        assert line["refused"] == 0 and line["train_flops"] > 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Bert", {"hidden": 16}, "test: model.options: no field of BertConfig is called 'hidden'"),
        ("Bert", {"vocab_size": 9}, "test: model.options: vocab_size 9 is not valid. Allowed: at least 51"),
        ("Bert", {"max_position_embeddings": 9}, "bert.embeddings does not run on the meta device"),
        (
            "Roberta",
            {"max_position_embeddings": 62},
            "options: roberta.embeddings.position_embeddings has 62 positions",
        ),
    ],
)
def test_options_that_do_not_fit(name, options, message):
    sizes = SIZES if "hidden" not in options else {}
    model = {"name": "module", "of": f"transformers:{name}ForSequenceClassification", "options": sizes | options}
    with pytest.raises(ConfigError) as error:
        tiny(model=model, data={"name": "synthetic_text", "task": "classes", "length": 12})
    assert message in str(error.value)


class Rows(nn.Module):
    """A network for tables or series."""

    def __init__(self, num_classes: int, inputs: int):
        super().__init__()
        self.hidden, self.head = nn.Linear(inputs, 12), nn.Linear(12, num_classes)

    def forward(self, x):
        return self.head(torch.relu(self.hidden(x.flatten(1))))


@pytest.mark.parametrize("shape", [[6], [2, 8]])
def test_tables_and_series(shape, tmp_path):
    model = {"name": "module", "of": "test_inferred_tokens:Rows", "options": {"inputs": math.prod(shape)}}
    experiment = tiny(model=model, data={"shape": shape}, method="heterofl", rounds=1)
    assert experiment.model.takes == ("variables" if len(shape) == 1 else "series")
    [line] = run(simulate(experiment, tmp_path))
    assert line["refused"] == 0 and Net(experiment.model).layout.axes["hidden"].size == 12


def test_a_whole_network_of_transformers_is_written_for_from_pretrained(tmp_path):
    from transformers import LlamaForCausalLM

    model = of_transformers("LlamaForCausalLM", intermediate_size=12, num_key_value_heads=2)
    net, x = Net(model), torch.arange(16).view(2, 8)
    params = net.initial()
    for one in (net, replace(net, width=0.5)):
        model.write(one, params, "last", (), tmp_path / str(one.width))
    module = net.build().eval()
    load(module, params)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "1.0" / "transformers")
    assert torch.equal(module(x), theirs(x).logits)
    assert not (tmp_path / "0.5").exists()


def test_a_narrow_decoder_is_exported_for_any_number_and_length_of_sequences():
    module = Net(of_transformers("LlamaForCausalLM", intermediate_size=12, num_key_value_heads=2), 0.5).build().eval()
    x = torch.arange(24).view(3, 8) % 20
    x[0, 5:] = -1
    any_size = torch.export.Dim.DYNAMIC
    program = torch.export.export(module, (x,), dynamic_shapes=({0: any_size, 1: any_size},))
    torch.testing.assert_close(program.module()(x[:2, :6]), module(x[:2, :6]))


class TestDecoder(ModelContract):
    model: ClassVar = {"name": "module", "of": "test_inferred_tokens:Decoder"}
    data: ClassVar = {"name": "synthetic_text", "task": "next_token"}
