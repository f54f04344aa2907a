"""Models of transformers: names, axes, what methods add to them, folders that are read and written, masks on them."""

import copy
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import tokenizers
import torch
import transformers
from helpers import message, simulate, tiny

from rayfl.core.net import Net, check_axes, load
from rayfl.core.seeds import torch_generator, torch_scope
from rayfl.core.submodel import Picks, Slice, prefix
from rayfl.costs import training_flops
from rayfl.data.text.own import OwnText
from rayfl.data.tokens import TokenTask
from rayfl.exporting.submodels import as_module, export_submodel
from rayfl.methods.base import Deployment
from rayfl.methods.masks.base import Masked
from rayfl.methods.masks.thresholds import Maskable, groups
from rayfl.models import MODELS, MODELS_KIND
from rayfl.testing import ModelContract
from rayfl.training.settings import every_exit

ENCODERS, DECODERS = ("roberta", "bert", "distilbert"), ("gpt2", "llama")
FAMILIES = (*ENCODERS, *DECODERS)
CASES = [(name, task) for name in FAMILIES for task in MODELS[name].tasks]
"""Every family with every task."""

every_family = pytest.mark.parametrize("name", FAMILIES)
every_case = pytest.mark.parametrize(("name", "task"), CASES)


def made(name, task="classes", **fields):
    """A family's smallest model, without dropout."""
    cls = MODELS[name]
    none = {"dropout": 0, "attention_dropout": 0} | ({"exits": ()} if name in ENCODERS else {})
    labels = {"classes": 4, "ids": 50} if task == "classes" else {"classes": 50, "ids": 50 + (task == "masked_lm")}
    return cls(**{**cls.smallest, **none, "task": task, "length": 12, **labels, **fields})


def drawn(net):
    """Parameters with nothing at its start; a step size is 0.7."""
    generator = torch_generator(0, "test:parameters")
    shapes = net.layout.shapes.items()
    return {name: torch.randn(s, generator=generator) * 0.3 if s else torch.tensor(0.7) for name, s in shapes}


def network(net, params=None):
    with torch_scope(0):
        module = net.build().eval().requires_grad_(False)
    load(module, drawn(net) if params is None else params)
    return module


@pytest.fixture
def x():
    """Three sequences of 9, 5 and 7 tokens, none of which is special."""
    x = torch.randint(3, 48, (3, 9), generator=torch_generator(0, "test:tokens"))
    x[1, 5:], x[2, 7:] = -1, -1
    return x


# --- counts ---


def base():
    return MODELS["roberta"](task="classes", classes=4, ids=50265, length=128)


def test_robertas_parameters_at_five_widths():
    nets = [Net(base(), width) for width in (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16)]
    assert [net.parameters for net in nets] == [124_648_708, 40_943_236, 15_126_340, 6_226_852, 2_779_348]
    words = [math.prod(net.layout.shapes["roberta.embeddings.word_embeddings.weight"]) for net in nets]
    assert words == [38_603_520, 19_301_760, 9_650_880, 4_825_440, 2_412_720]


EMBEDDINGS = "roberta.embeddings"
HELD = ("classifier", f"{EMBEDDINGS}.token_type_embeddings")
"""Parameters that FIARSE's clients hold whole, besides norms."""


def test_the_groups_of_fiarses_roberta():
    net = Net(base())
    sizes = {name: math.prod(shape) for name, shape in net.layout.shapes.items()}

    def counted(*encoder):
        shards = ((f"{EMBEDDINGS}.word_embeddings",), (f"{EMBEDDINGS}.position_embeddings",), *encoder)
        found = groups(net, "shard", shards, Maskable(embeddings=True, whole=HELD))
        return [sum(sizes[name] for name in names) for names in found]

    assert counted(("roberta.encoder",)) == [38_603_520, 394_752, 85_017_600]
    fine = counted(*((block,) for block in net.model.blocks[0]))
    assert fine == [38_603_520, 394_752, *[7_084_800] * 12]
    head = sum(size for name, size in sizes.items() if name.startswith("classifier."))
    norms = sum(size for name, size in sizes.items() if "LayerNorm" in name)
    assert (head, norms) == (593_668, 25 * 2 * 768)
    assert net.parameters == 38_603_520 + 394_752 + 85_017_600 + head + norms + 768


def test_multiply_adds_of_gpt2s_own_layers():
    """For 12 tokens: 3 C C for queries, keys and values, C C after them, and 2 C F; the head reads all tokens too."""
    net = Net(made("gpt2", hidden=8, heads=2, ffn=6, layers=1))
    assert net.macs == 12 * (4 * 8 * 8 + 2 * 8 * 6 + 8 * 4)
    assert net.layers["transformer.h.0.attn.c_attn"] == (
        "transformer.h.0.attn.c_attn.weight",
        "transformer.h.0.attn.c_attn.bias",
    )


def test_flops_of_llamas_own_layers():
    """For 12 tokens: layers without biases, three norms that divide and scale, and one activation."""
    net = Net(made("llama", hidden=8, heads=2, groups=1, ffn=6, layers=1))
    assert net.macs == 12 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 6 + 8 * 4)
    assert net.operations("flops2") == 2 * net.macs + 12 * (3 * 2 * 8 + 6)
    assert net.operations("heterofl_official") == net.macs + 12 * 3 * 2 * 8


def test_activations_count_alike():
    of = [Net(made("bert", config={"hidden_act": name})).operations("flops2") for name in ("gelu", "relu", "gelu_new")]
    assert of[0] == of[1] == of[2]


def test_adapters_have_two_operations_per_multiply_add():
    """In 12 tokens: two low-rank products of 8 features, and 24 of queries, keys and values."""
    base = made("gpt2", hidden=8, heads=2, ffn=6, layers=1)
    plain, net = Net(base), Net(MODELS["lora"](base=base, rank=3, targets=("c_attn",)))
    assert net.macs - plain.macs == 12 * 3 * (8 + 24)
    assert net.operations("flops2") - plain.operations("flops2") == 2 * 12 * 3 * (8 + 24)


def test_a_tied_output_layer_is_trained():
    """Three forward passes per sample, also of the output layer, whose weight is that of the embedding."""
    net = Net(made("gpt2", "next_token", hidden=8, heads=2, ffn=6, layers=1))
    assert training_flops(net, 5) == 5 * 6 * net.macs and "lm_head" in net.layer_macs


# --- names and axes ---


@every_case
def test_parameters_are_called_as_in_transformers_and_tied_ones_are_one(name, task):
    net = Net(made(name, task))
    module = net.model.plain(net)
    assert {n: tuple(p.shape) for n, p in module.named_parameters()} == net.layout.shapes
    tied = task != "classes" and name != "llama"
    assert (module.get_output_embeddings() is not None and tied) == (
        tied and module.get_output_embeddings().weight is module.get_input_embeddings().weight
    )


@pytest.mark.parametrize("cut", ["inside", "heads"])
@every_case
def test_axes_are_what_can_be_permuted(name, task, cut, x):
    """The positions of an axis in another order, in all tensors alike, are the same function: heads inside and out,
    what is inside a perceptron, the residual stream with its norms."""
    if (name, cut) == ("llama", "inside"):
        assert "cut" in message(MODELS_KIND.read, {"name": "llama", "cut": "inside"}, "model")
        return
    net = Net(made(name, task, cut=cut, **({"heads": 6, "groups": 3, "hidden": 24} if name == "llama" else {})))
    params = drawn(net)
    expected = network(net, params)(x)
    assert len(net.layout.axes) >= 5
    for axis in net.layout.axes.values():
        turned = {other: Picks(tuple(range(a.size)), a.size) for other, a in net.layout.axes.items()}
        turned[axis.name] = Picks((*range(1, axis.size), 0), axis.size)
        permuted = Slice(net, net, turned).take(params)
        assert any(not torch.equal(t, params[n]) for n, t in permuted.items()), axis.name
        torch.testing.assert_close(network(net, permuted)(x), expected, rtol=1e-4, atol=1e-5, msg=axis.name)


def test_llamas_groups_keep_their_rotations(x):
    """A part of a head would be rotated otherwise, so that heads are as wide at every width."""
    model = made("llama", heads=6, groups=3, hidden=24)
    wide, narrow = (model.configuration(Net(model, width)) for width in (1, 0.5))
    assert (wide.head_dim, wide.num_attention_heads, wide.num_key_value_heads, wide.hidden_size) == (4, 6, 3, 24)
    assert (narrow.head_dim, narrow.num_attention_heads, narrow.num_key_value_heads) == (4, 4, 2)
    assert narrow.hidden_size == 16


@every_family
def test_a_prefix_is_what_the_narrow_module_loads(name):
    whole, part = Net(made(name)), Net(made(name), 0.3)
    cut = prefix(whole, part).take(drawn(whole))
    module = part.model.plain(part)
    lacking, unknown = module.load_state_dict(cut, strict=False)
    assert (lacking, unknown) == ([], [])


def test_every_width_is_one_that_transformers_builds():
    """Also where the widths of the stream and of the heads would not divide."""
    for name in FAMILIES:
        for width in (0.01, 0.1, 0.37, 0.6, 0.999):
            check_axes(replace(Net(made(name)), width=1.0), width)


# --- what it computes ---


@every_case
def test_padding_changes_nothing(name, task, x):
    module = network(Net(made(name, task)))
    given = module(x)
    for i, length in enumerate((9, 5, 7)):
        alone = module(x[i : i + 1, :length])
        there = given[i : i + 1] if task == "classes" else given[i : i + 1, :length]
        torch.testing.assert_close(alone, there, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_who_sees_whom(name, x):
    """A decoder's tokens see none behind them, an encoder's see all."""
    module = network(Net(made(name, MODELS[name].tasks[1])))
    other = x.clone()
    other[0, 6] = (x[0, 6] + 1 - 3) % 45 + 3
    differs = (module(x) != module(other))[0].any(1)
    assert differs.tolist() == ([False] * 6 + [True] * 3 if name in DECODERS else [True] * 9)


@every_family
def test_attention_step_by_step_is_the_same(name, x):
    for task in MODELS[name].tasks:
        fused, eager = (Net(made(name, task, attention=kind)) for kind in ("sdpa", "eager"))
        torch.testing.assert_close(network(fused)(x), network(eager)(x), rtol=1e-4, atol=1e-5)


def test_it_answers_with_as_many_tokens_as_there_are():
    """A vocabulary with a row for a mask, and one with more rows than the data have tokens."""
    module = network(Net(made("roberta", "masked_lm", vocabulary=60)))
    assert module(torch.full((2, 3), 5)).shape == (2, 3, 50)


# --- further fields of a configuration ---


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        (
            "bert",
            {"hiden_act": "relu"},
            "no field of BertConfig is called 'hiden_act'. Did you mean 'hidden_act'? Allowed: ",
        ),
        (
            "roberta",
            {"hidden_dropout_prob": 0.5},
            "'hidden_dropout_prob' is set by another field. Allowed: model.dropout",
        ),
        ("bert", {"hidden_size": 64}, "'hidden_size' is set by another field. Allowed: model.hidden"),
        ("gpt2", {"hidden_size": 64}, "'hidden_size' is set by another field. Allowed: model.hidden"),
        ("bert", {"num_labels": 3}, "'num_labels' is set by another field. Allowed: model.classes"),
        ("llama", {"dtype": "float16"}, "no field of LlamaConfig is called 'dtype'. "),
        (
            "bert",
            {"hidden_act": "nonsense"},
            "transformers does not build {'hidden_act': 'nonsense'} (KeyError: 'nonsense'). Allowed: values that ",
        ),
        ("bert", {"layer_norm_eps": "a"}, "expected float, got str (value: 'a')). Allowed: values that "),
    ],
)
def test_settings_that_transformers_does_not_use(name, config, expected):
    model = {"name": name, **MODELS[name].smallest, "config": config}
    said = message(tiny, data={"name": "synthetic_text"}, model=model)
    assert "model.config: " in said and expected in said


def test_settings_that_transformers_uses():
    config = {"layer_norm_eps": 1e-3, "hidden_act": "relu"}
    given = Net(made("bert", config=config)).model.configuration(Net(made("bert", config=config)))
    assert (given.layer_norm_eps, given.hidden_act) == (1e-3, "relu")


def test_llamas_heads_have_pairs_of_features():
    """Rotations turn two features together."""
    for given in ({"hidden": 15, "heads": 3}, {"hidden": 12, "heads": 3, "head_width": 5}):
        assert "head_width: an even number, not 5" in message(MODELS_KIND.read, {"name": "llama"} | given, "model")


# --- what methods add ---


def test_the_scaler_stands_behind_every_layer_but_the_last():
    """Three embeddings, six layers a block, and the hidden one of the head; in training alone."""
    plain, net = (Net(made("roberta", layers=2), scale=scale) for scale in (1, 0.5))
    module = network(net)
    hooked = [path for path, layer in module.named_modules() if layer._forward_hooks]
    assert len(hooked) == 3 + 2 * 6 + 1 and "classifier.out_proj" not in hooked
    x = torch.full((2, 3), 5)
    assert torch.equal(module(x), network(plain)(x))
    layer, h = module.train().get_submodule("classifier.dense"), torch.ones(1, 20)
    torch.testing.assert_close(layer(h), 2 * network(plain).get_submodule("classifier.dense")(h))


@pytest.mark.parametrize("name", DECODERS)
def test_a_step_of_nothing_is_a_block_that_is_left_out(name, x):
    """Where norms stand before the branches."""
    model = made(name)
    [(first, second)] = model.blocks
    net = Net(model, steps=True)
    params = drawn(net)
    params |= {n: torch.zeros(()) for n in params if n.startswith(f"{first}.step")}
    less = Net(model, without=(first,))
    assert less.layout.shapes.keys() == {n for n in Net(model).layout.shapes if not n.startswith(f"{first}.")}
    ones = params | {n: torch.ones(()) for n in params if n.startswith(f"{second}.step")}
    kept = {n: ones[n] for n in less.layout.shapes}
    torch.testing.assert_close(network(net, ones)(x), network(less, kept)(x))


@every_family
def test_a_copy_is_on_its_own(name, x):
    module = network(Net(made(name), steps=True))
    expected, other = module(x), copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.zero_()
    assert torch.equal(other(x), expected) and not torch.equal(module(x), expected)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_network_that_ends_early_answers_as_the_whole_does_there(name, x):
    model = made(name, exits=(1, 2), layers=3)
    whole = Net(model, exits=3)
    params = drawn(whole)
    given = network(whole, params)(x)
    assert len(given) == 3 and not torch.equal(given[0], given[1])
    assert torch.equal(given[2], network(Net(model), {n: params[n] for n in Net(model).layout.shapes})(x))
    for count in (1, 2):
        net = Net(model, exits=count)
        part = prefix(whole, net).take(params)
        torch.testing.assert_close(network(net, part)(x), given[:count])
        last = [n for n in net.layout.shapes if n.startswith(f"{model.blocks[0][count]}.") or "pooler" in n]
        assert last == [] and net.layout.shapes.keys() < whole.layout.shapes.keys()


# --- folders that are read ---


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder with a masked language model, and what is in it."""
    folder = tmp_path_factory.mktemp("weights")
    sizes = dict(hidden_size=16, num_attention_heads=4, num_hidden_layers=2, intermediate_size=24)
    others = dict(vocab_size=60, max_position_embeddings=40, type_vocab_size=1, layer_norm_eps=1e-4, hidden_act="relu")
    with torch_scope(5):
        module = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**sizes, **others)).eval()
    module.save_pretrained(folder)
    return folder, module


def started(folder, **fields):
    return MODELS["roberta"](weights=str(folder), **{"task": "classes", "ids": 60, "classes": 4, "length": 20} | fields)


def test_sizes_and_weights_are_the_folders(weights):
    folder, module = weights
    model = started(folder)
    assert (model.hidden, model.heads, model.layers, model.ffn, model.positions) == (16, 4, 2, 24, 40)
    assert model.plain(Net(model)).config.layer_norm_eps == 1e-4
    again = MODELS_KIND.read(model.model_dump(mode="json"), "model")
    assert again == model and hash(again) == hash(model)
    net = Net(started(folder, task="masked_lm", classes=60))
    x = torch.full((2, 5), 7)
    torch.testing.assert_close(network(net, net.initial())(x), module(x).logits)


@pytest.mark.parametrize(
    ("name", "said", "other"),
    [
        ("distilbert", {"dropout": 0.1, "seq_classif_dropout": 0.2}, "seq_classif_dropout"),
        ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.3}, "embd_pdrop"),
    ],
)
def test_a_second_dropout_is_the_folders(tmp_path, name, said, other):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name} | said))
    first = next(iter(said))
    for fields, expected in (({}, said), ({"dropout": 0.4}, {first: 0.4, other: said[other]})):
        model = MODELS[name](weights=str(tmp_path), task="classes", ids=60, classes=4, length=20, **fields)
        configuration = model.configuration(Net(model))
        assert {field: getattr(configuration, field) for field in said} == expected
    model = made(name, dropout=0.4)
    configuration = model.configuration(Net(model))
    assert {getattr(configuration, field) for field in said} == {0.4}


def test_a_head_for_another_task_is_new_and_a_narrow_network_starts_with_a_prefix(weights):
    folder, module = weights
    net, state = Net(started(folder)), module.state_dict()
    with torch_scope(0):
        start = net.initial()
    with torch_scope(0):
        new = Net(net.model.blank).initial()
    assert {n for n in start if torch.equal(start[n], new[n]) and "bias" not in n and "Norm" not in n} == {
        "classifier.dense.weight",
        "classifier.out_proj.weight",
    }
    name = "roberta.encoder.layer.1.attention.self.query.weight"
    narrow = Net(net.model, 0.5).initial()[name]
    assert torch.equal(narrow, state[name].view(4, 4, 16)[:, :2, :8].reshape(8, 8))


def test_a_trunk_without_its_prefix_and_of_half_precision(weights, tmp_path):
    folder, module = weights
    copy.deepcopy(module).roberta.half().save_pretrained(tmp_path)
    start = Net(started(tmp_path)).initial()
    name = "roberta.encoder.layer.1.output.dense.weight"
    assert {t.dtype for t in start.values()} == {torch.float32}
    assert torch.equal(start[name], module.state_dict()[name].half().float())


def changed(folder, to, **said):
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | said))
    return to


def test_folders_that_do_not_fit(weights, tmp_path):
    folder, module = weights
    assert "has model_type 'roberta' in its config.json. Allowed: a folder of 'bert'" in message(
        MODELS_KIND.read, {"name": "bert", "weights": str(folder)}, "model"
    )
    assert "hidden: 32 is not valid. Allowed: 16, as " in message(
        MODELS_KIND.read, {"name": "roberta", "weights": str(folder), "hidden": 32}, "model"
    )
    wider = started(changed(folder, tmp_path / "wider", intermediate_size=48))
    assert "(roberta.encoder.layer.0.intermediate.dense.bias is [24] and should be [48])" in message(wider.prepare)
    deeper = started(changed(folder, tmp_path / "deeper", num_hidden_layers=3))
    assert re.search(r"16 tensors .*layer\.2\..* is missing and should be \[", message(deeper.prepare))
    assert "a folder with config.json and model.safetensors" in message(started(tmp_path / "nowhere").prepare)
    damaged = changed(folder, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"damaged")
    assert "cannot be read (" in message(started(damaged).prepare)


def test_nothing_in_a_folder_is_run(weights, tmp_path):
    """Neither code beside the weights nor what a pickle would do."""
    folder, module = weights
    evil = changed(folder, tmp_path / "code", auto_map={"AutoModelForSequenceClassification": "evil.Evil"})
    (evil / "evil.py").write_text("raise SystemExit('it was run')")
    started(evil).prepare()
    (evil / "model.safetensors").unlink()
    torch.save(module.state_dict(), evil / "pytorch_model.bin")
    assert "other formats can execute code when loaded" in message(started(evil).prepare)


def test_data_that_do_not_fit():
    model = {"name": "roberta", **made("roberta").model_dump(include={"hidden", "heads", "layers", "ffn"})}
    text = {"name": "synthetic_text", "length": 12}
    given = {"data": text, "model": model, "clients": {"capacities": [1, 0.5]}}
    assert "sequences have up to 12 tokens. Allowed: 8, for which it has positions" in message(
        tiny, **given | {"model": model | {"positions": 10, "pad": 1}}
    )
    assert ": a vocabulary of 40 is not valid. Allowed: at least 50" in message(
        tiny, **given | {"model": model | {"vocabulary": 40}}
    )
    assert "model roberta: task next_token is not valid. Allowed: classes, masked_lm" in message(
        tiny, **given | {"data": text | {"task": "next_token"}}
    )
    assert "hidden: a multiple of 3, the heads, such as 18" in message(tiny, **given | {"model": model | {"heads": 3}})


def test_padding_is_the_vocabularys():
    """A family's own one is a word in another vocabulary."""
    offers = TokenTask("classes", 50, 12, 4, pad=3).offers
    model = MODELS["roberta"](**MODELS["roberta"].smallest).fitted("text", offers, "model")
    table = network(Net(model), Net(model).initial()).get_submodule("roberta.embeddings.word_embeddings")
    assert model.padding == table.padding_idx == 3 and not table.weight[3].any() and table.weight[1].any()
    assert model.room == 70 - 4


def without_padding(name, task="classes", **fields):
    """A family's smallest model for data of 20 tokens, none of which is padding."""
    smallest = MODELS[name].smallest | ({"exits": ()} if name in ENCODERS else {})
    return MODELS[name](**smallest | fields).fitted("text", TokenTask(task, 20, 12, 4).offers, "model")


@every_case
def test_no_token_of_the_data_is_padding(name, task):
    """Every token is trained, and counts at the end of a sequence."""
    net = Net(without_padding(name, task))
    module, every = network(net), torch.arange(20)
    x = torch.tensor([[3, 4, 5]]).repeat(20, 1)
    shorter, longer = module(x), module(torch.cat([x, every[:, None]], 1))
    if task != "classes":
        shorter, longer = shorter[:, -1], longer[:, -1]
    assert (shorter != longer).any(1).all()
    [table] = [
        layer
        for layer in module.modules()
        if isinstance(layer, torch.nn.Embedding) and len(layer.weight) == net.model.rows
    ]
    assert table.padding_idx in (None, net.model.rows - 1)
    table.requires_grad_(True)
    module(every.view(2, 10)).square().sum().backward()
    assert table.weight.grad[:20].any(1).all()


def test_robertas_positions_follow_each_other():
    module, seen = network(Net(without_padding("roberta"))), []
    table = module.get_submodule("roberta.embeddings.position_embeddings")
    table.register_forward_pre_hook(lambda layer, given: seen.append(given[0].tolist()))
    module(torch.tensor([[5, 1, 7, 1, -1]]))
    assert seen == [[[21, 22, 23, 24, 20]]]


def test_a_row_for_padding():
    """One more, unless there is a free one; predictors of the next token need none."""
    assert [without_padding(name).rows for name in FAMILIES] == [21] * 5
    assert [without_padding(name, "next_token").rows for name in DECODERS] == [20] * 2
    spare, chosen = without_padding("bert", vocabulary=30), without_padding("bert", pad=3)
    assert (spare.rows, spare.padding, chosen.rows, chosen.padding) == (30, 20, 20, 3)
    again = MODELS_KIND.read(spare.model_dump(mode="json"), "model")
    assert again.fitted("text", TokenTask("classes", 20, 12, 4).offers, "model") == spare
    with pytest.raises(ValueError, match=r"pad 20 is not valid. Allowed: less than 20, the rows of the voc"):
        Net(without_padding("gpt2", vocabulary=20)).blank()
    with pytest.raises(ValueError, match=r"pad 20 is not valid. Allowed: less than 19, because the positions"):
        Net(without_padding("roberta", positions=20)).blank()


def test_weights_without_a_padding_token(tmp_path):
    sizes = dict(vocab_size=20, n_embd=8, n_head=2, n_layer=1, n_inner=6, n_positions=20)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    offers = TokenTask("classes", 20, 12, 4).offers
    with pytest.raises(ValueError, match=r"pad 20 is not valid. Allowed: .*such as the end of a text"):
        Net(MODELS["gpt2"](weights=str(tmp_path)).fitted("text", offers, "model")).blank()
    model = MODELS["gpt2"](weights=str(tmp_path), pad=19).fitted("text", offers, "model")
    assert (model.rows, model.padding) == (20, 19) and model.initial(Net(model))["transformer.wte.weight"].any()


def test_a_tokenizer_that_is_not_the_weights(weights):
    folder, _ = weights
    given = {"data": {"name": "synthetic_text", "tokens": 50}, "clients": {"capacities": [1, 0.5]}}
    model = {"name": "roberta", "weights": str(folder)}
    assert (
        "the data have 50 tokens and the weights 60. Allowed: the weights' own tokenizer (data.tokenizer), or"
        in message(tiny, model=model, **given)
    )
    assert tiny(model=model | {"vocabulary": 60}, **given).model.rows == 60


def test_a_run_starts_from_the_folder_and_trains(weights, tmp_path):
    folder, module = weights
    data = {"name": "synthetic_text", "tokens": 60}
    experiment = tiny(
        data=data,
        model={"name": "roberta", "weights": str(folder)},
        method="fiarse",
        clients={"capacities": [1, 0.5], "metric": "params"},
        rounds=1,
    )
    experiment.model.prepare()
    simulation = simulate(experiment, tmp_path)
    word = "roberta.embeddings.word_embeddings.weight"
    assert torch.equal(simulation.state["params"][word], module.state_dict()[word])
    line = simulation.run_round()
    assert line["refused"] == 0 and not torch.equal(simulation.state["params"][word], module.state_dict()[word])


# --- folders that are written ---


@pytest.mark.parametrize(
    ("name", "task", "of"),
    [
        ("roberta", "classes", {"width": 0.5}),
        ("bert", "classes", {"width": 0.5, "exits": 1}),
        ("distilbert", "masked_lm", {"width": 0.3, "steps": True}),
        ("gpt2", "next_token", {"width": 0.7, "steps": True, "without": ("transformer.h.0",)}),
        ("llama", "classes", {"width": 0.5}),
    ],
)
def test_transformers_loads_what_is_exported(name, task, of, x, tmp_path):
    """At its small size, with blocks numbered from 0, step sizes inside the layers, and the last exit as its head."""
    model = made(name, task, **({"exits": (1,)} if "exits" in of else {}))
    net = Net(model, **of)
    module = export_submodel(Deployment("key", net, drawn(net)), tmp_path / "to", {}, pytest.fail)
    kind = {"classes": "SequenceClassification", "masked_lm": "MaskedLM", "next_token": "CausalLM"}[task]
    theirs = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(tmp_path / "to" / "transformers").eval()
    there = x >= 0
    given = theirs(input_ids=torch.where(there, x, model.padding), attention_mask=there.long()).logits
    given, expected = given[..., : model.classes], module(x)
    where = slice(None) if task == "classes" else there
    torch.testing.assert_close(given[where], expected[where], rtol=1e-4, atol=1e-5)
    assert theirs.num_parameters() == net.parameters
    program = torch.export.load(tmp_path / "to" / "model.pt2").module()
    torch.testing.assert_close(every_exit(program(x))[-1], expected, rtol=1e-4, atol=1e-5)


def test_no_folder_has_the_mean_of_several_heads(tmp_path):
    net = Net(made("roberta", exits=(1,)), exits=2)
    net.model.write(net, drawn(net), "mean", (), tmp_path)
    assert list(tmp_path.iterdir()) == []
    net.model.write(net, drawn(net), "last", (), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["transformers"]


def test_all_files_of_the_tokenizer_lie_beside_the_weights(tmp_path):
    """With its chat template, other templates in a folder, and marks; without the weights in its folder."""
    source = tmp_path / "source"
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "hello"])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<pad>"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", pad_token="<pad>")
    theirs.chat_template = {"default": "{{ bos_token }}{{ messages[0].content }}", "tool": "none"}
    theirs.save_pretrained(source)
    for name in ("model.safetensors", "config.json", "training.json"):
        (source / name).touch()
    data = OwnText(train="none.csv", tokenizer=str(source))
    assert {path.name for path in data.vocabulary_files} == {"tokenizer.json", "tokenizer_config.json"}
    net = Net(made("roberta"))
    export_submodel(Deployment("key", net, drawn(net)), tmp_path / "to", {}, pytest.fail, data.attached)
    to = tmp_path / "to" / "transformers"
    own = {path.relative_to(source) for path in source.rglob("*") if path.name not in ("config.json", "training.json")}
    assert own <= {path.relative_to(to) for path in to.rglob("*")} and not (to / "training.json").exists()
    assert (to / "config.json").stat().st_size and (to / "model.safetensors").stat().st_size
    again = transformers.AutoTokenizer.from_pretrained(to)
    assert again.chat_template == theirs.chat_template and again.bos_token == "<s>"
    messages = [{"role": "user", "content": "hello"}]
    assert again.apply_chat_template(messages, tokenize=False) == "<s>hello"


def test_a_masked_network_is_exported_without_neurons_that_are_not_there(x, tmp_path):
    """No configuration can express this for one layer: transformers gets it with zeros."""
    net, said = Net(made("roberta")), []
    params, path = drawn(net), "roberta.encoder.layer.1.intermediate.dense"
    for name in (f"{path}.weight", f"{path}.bias"):
        params[name][:5] = 0
    deployed = Deployment("key", net, params, masked=(f"{path}.weight", f"{path}.bias"))
    module = export_submodel(deployed, tmp_path / "to", {}, said.append)
    assert said[0].endswith("5 of 12 filters removed")
    assert module.get_submodule(path).weight.shape == (7, 20)
    torch.testing.assert_close(module(x), as_module(deployed)(x))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "to" / "transformers")
    there = x >= 0
    given = theirs.eval()(input_ids=torch.where(there, x, 1), attention_mask=there.long()).logits
    torch.testing.assert_close(given, module(x))


# --- masks ---


def masked(method, name="roberta", **fields) -> Masked:
    model = {"name": name, **made(name).model_dump(mode="json", include={"hidden", "heads", "layers", "ffn"})}
    given = {"data": {"name": "synthetic_text"}, "clients": {"capacities": [1, 0.25], "metric": "params"}}
    bound = tiny(model=model, method={"name": method} | fields, **given).bound()
    assert isinstance(bound, Masked)
    return bound


def test_masks_reach_embeddings_and_leave_what_is_held_whole():
    shards = [[f"{EMBEDDINGS}.word_embeddings"], [f"{EMBEDDINGS}.position_embeddings"], ["roberta.encoder"]]
    method = masked("fiarse", embeddings=True, whole=list(HELD), threshold="shard", shards=shards)
    state = method.init()
    deployed = method.deploy(state, 0, 0.25)
    kept = {name: int(t.count_nonzero()) for name, t in deployed.params.items()}
    for names in method.groups:
        total = sum(state["params"][name].numel() for name in names)
        assert sum(kept[name] for name in names) == math.floor(0.25 * total)
    whole = deployed.params.keys() - {*deployed.masked}
    assert whole == {n for n in state["params"] if "LayerNorm" in n or n.startswith(HELD)}
    assert all(torch.equal(deployed.params[n], state["params"][n]) for n in whole)


def test_without_the_option_embeddings_are_whole():
    method = masked("pruning_greedy", name="gpt2")
    deployed = method.deploy(method.init(), 0, 0.25)
    assert {n for n in deployed.net.layout.shapes if n not in deployed.masked} == {
        n for n in deployed.net.layout.shapes if "ln_" in n or "wte" in n or "wpe" in n
    }
    assert "transformer.h.0.attn.c_attn.weight" in deployed.masked


def test_what_is_no_layer_cannot_be_whole():
    given = "method.whole: 'head' is neither a layer nor a parent of one. Allowed: the layers "
    assert given in message(masked, "fiarse", whole=["head"])


def test_clients_train_the_elements_that_they_hold(tmp_path):
    """One with a quarter of the elements changes these alone, of embeddings too."""
    method = {"name": "fiarse", "embeddings": True, "threshold": "layer"}
    model = {"name": "roberta", **made("roberta").model_dump(mode="json", include={"hidden", "heads", "layers", "ffn"})}
    clients = {"count": 2, "cohort": 1, "capacities": [1, 0.25], "weights": [0, 1], "metric": "params"}
    experiment = tiny(data={"name": "synthetic_text"}, model=model, method=method, clients=clients, partition="iid")
    simulation = simulate(experiment, tmp_path)
    before = {name: t.clone() for name, t in simulation.state["params"].items()}
    assert simulation.run_round()["refused"] == 0
    held = experiment.bound().submodel({"params": before}, 0, 0.25)
    for name in held.places:
        changed = (simulation.state["params"][name] != before[name]).flatten().nonzero().flatten()
        assert set(changed.tolist()) <= set(held.places[name].tolist()), name
        # biases start at 0, below every threshold
        assert len(changed) or name.endswith(".bias"), name


# --- a family of a user's own ---


def _electra():
    """The class that the README shows, in a module that can be found."""
    readme = Path("rayfl/models/huggingface/README.md").read_text()
    [example] = re.findall(r"^```python\n(.*?)^```", readme, re.S | re.M)
    module = ModuleType("readme_electra")
    sys.modules["readme_electra"] = module
    exec(example, module.__dict__)
    return module.__dict__["Electra"]


_electra()


class TestElectra(ModelContract):
    model = {"name": "readme_electra:Electra", "hidden": 20, "heads": 2, "layers": 2, "ffn": 12, "exits": [1]}


def test_a_parameter_that_no_table_has_is_named():
    class Forgetful(sys.modules["readme_electra"].Electra):
        table = {k: v for k, v in sys.modules["readme_electra"].Electra.table.items() if "project" not in k}

    with pytest.raises(ValueError, match=r"no entry of its table fits the parameter 'electra\.embeddings_project"):
        Net(Forgetful(hidden=20, heads=2, layers=1)).blank()
