"""Causal language models of transformers' folders: losses and gradients beside transformers' own, and wrong folders."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from chats import CAUSAL, causal, jsonl, tokenizer
from torch import nn

from rayfl.config import ConfigError
from rayfl.core import frozen
from rayfl.core.net import Net, params_of
from rayfl.data import Instructions
from rayfl.data.samples import ClientData
from rayfl.models import MODELS, MODELS_KIND
from rayfl.models import peft as files_of_peft
from rayfl.models.huggingface.causal import placed
from rayfl.testing.tiny import tiny
from rayfl.training.settings import Training
from rayfl.training.steps import Objective, Steps

IGNORED = -100


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("causal")
    found = {kind: causal(root / kind, kind) for kind in CAUSAL}
    rows = [{"prompt": f"copy {i}", "response": "ab" * (1 + 12 * (i == 2))} for i in range(24)]
    return found | {"tokenizer": tokenizer(root / "tokenizer"), "rows": jsonl(root / "rows.jsonl", rows)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYFL_CACHE", str(tmp_path / "cache"))


def data_of(places) -> Instructions:
    return Instructions(train=places["rows"], tokenizer=places["tokenizer"], max_length=96, order="stored")


def batch_of(places, count=6):
    """Return a batch, and the same one as transformers' own collators make it: padded on the right and on the left."""
    data = data_of(places)
    train = {name: torch.from_numpy(t[:count]) for name, t in data.arrays().train.items()}
    client = ClientData(train, data.prepare, data.goal)
    [(x, y)] = client.plain(count)
    sides = []
    for side in ("right", "left"):
        rows = [(train["x"][i], train["answer"][i]) for i in range(count)]
        rows = [(ids[ids >= 0].long(), answer[ids >= 0]) for ids, answer in rows]
        width = max(len(ids) for ids, _ in rows)
        ids, labels = torch.zeros(count, width, dtype=torch.long), torch.full((count, width), IGNORED)
        seen = torch.zeros(count, width, dtype=torch.long)
        for i, (row, answer) in enumerate(rows):
            at = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
            ids[i, at], labels[i, at], seen[i, at] = row, torch.where(answer == 1, row, IGNORED), 1
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        sides.append({"input_ids": ids, "labels": labels, "attention_mask": seen, "position_ids": positions})
    return data.goal, x, y, sides


RANKS = {"(layers|h).0.*": 2}
"""The first layer has half the rank of the second, as in peft."""


def lora_of(places, kind, **options):
    base = MODELS["causal_lm"](weights=places[kind], **options)
    model = MODELS["lora"](base=base, rank=4, rank_pattern=RANKS, alpha=8, targets="all-linear")
    return model.fitted("instructions", data_of(places).offers, "model")


def drawn(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1


def reference(places, kind, module):
    """Return peft's model with the module's adapters."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(places[kind], dtype=torch.float32).double()
    config = peft.LoraConfig(r=4, rank_pattern=RANKS, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    for name, parameter in params_of(module).items():
        path, _, part = name.rpartition(".lora.")
        model.get_parameter(f"base_model.model.{path}.lora_{part}.default.weight").data = parameter.clone()
    return model


def gradients(module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


# of peft's calls of transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CAUSAL)
def test_losses_and_gradients_are_those_of_peft(places, kind, monkeypatch):
    # Gemma's norms round to float32, which turns 1e-16 into 1e-9
    monkeypatch.setattr(torch.Tensor, "float", lambda t: t)
    goal, x, y, sides = batch_of(places)
    assert (x < 0).any() and (y >= 0).sum() < (x >= 0).sum()
    model = lora_of(places, kind)
    module = Net(model).build().double()
    drawn(module)
    other = reference(places, kind, module)
    for side in sides:
        other.zero_grad()
        labels = side.pop("labels")
        # transformers' own loss is in float32
        expected = F.cross_entropy(other(**side).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        expected.backward()
        wanted = {
            name.replace("base_model.model.", "")
            .replace("_A.default.weight", ".A")
            .replace("_B.default.weight", ".B"): g
            for name, g in gradients(other).items()
        }
        for accumulate, checkpointing, packing in itertools.product((1, 4), (False, True), (False, True)):
            ours = Net(lora_of(places, kind, checkpointing=checkpointing, packing=packing)).build().double().train()
            drawn(ours)
            steps = Steps(ours, Objective(goal, "none", None), Training(accumulate=accumulate), goal=goal)
            value = steps.backward(x, y)
            assert abs(float(value) - float(expected)) < 1e-10
            found = gradients(ours)
            assert found.keys() == wanted.keys()
            assert max(float((found[name] - g).abs().max()) for name, g in wanted.items()) < 1e-10


def test_samples_share_rows(places):
    assert placed([3, 9, 2, 4, 0], 9) == [(1, 4), (0, 0), (1, 7), (1, 0), (0, 9)]
    _, x, _, _ = batch_of(places)
    lengths = (x >= 0).sum(1).tolist()
    assert 1 + max(row for row, _ in placed(lengths, x.shape[1])) < len(x)
    module = Net(lora_of(places, "llama", packing=True)).build()
    shapes = []
    module.get_submodule("model.layers.0").register_forward_hook(lambda _, given, out: shapes.append(given[0].shape))
    with torch.no_grad():
        module(x)
    # the first are those of the check
    assert len(shapes) == 3 and shapes[-1][0] < len(x) and shapes[-1][1] == x.shape[1]


def test_a_model_whose_samples_see_each_other_is_not_packed(places):
    _, x, _, _ = batch_of(places)
    module = Net(lora_of(places, "llama", packing=True)).build()
    run = module.run
    module.run = lambda input_ids, position_ids=None: run(input_ids=input_ids)
    # modules are cached: a second run in the process is refused too
    for _ in range(2):
        with pytest.raises(ConfigError, match="model.packing: transformers does not keep the samples of a row apart"):
            module(x)


def test_all_linear_layers_but_the_head_are_targets(places):
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    paths = lora_of(places, "llama").target_paths
    assert sorted({path.rpartition(".")[2] for path in paths}) == sorted(layers) and len(paths) == 14
    assert len(lora_of(places, "gpt2").target_paths) == 8
    with pytest.raises(ConfigError, match="no linear layer of causal_lm ends with 'querry'"):
        _ = lora_of(places, "llama").model_copy(update={"targets": ("querry",)}).target_paths
    with pytest.raises(ConfigError, match="model.rank: rank 40 is too large for the layer"):
        Net(lora_of(places, "llama").model_copy(update={"rank": 40})).build()


@pytest.mark.parametrize(
    "kind, options, message",
    [
        ("llama", {"modules_to_save": ["head"]}, "no module of causal_lm with parameters of its own is named 'head'"),
        ("qwen3", {"modules_to_save": ["embed_tokens"]}, "'model.embed_tokens' is tied to 'lm_head', which would keep"),
        ("llama", {"targets": ["up_proj"], "modules_to_save": ["0.mlp"]}, "is one of model.targets too"),
        ("llama", {"lora_alpha": 8}, "lora_alpha: the setting of peft is not supported. Allowed: alpha"),
        ("llama", {"use_dora": True}, "Allowed: LoRA without magnitudes \\(DoRA\\)"),
    ],
)
def test_settings_of_peft_that_are_refused(places, kind, options, message):
    with pytest.raises(ConfigError, match=message):
        _ = MODELS["lora"](base=MODELS["causal_lm"](weights=places[kind]), **options).head_names


def test_other_data_types_and_magnitudes_are_refused(places, tmp_path):
    with pytest.raises(ConfigError, match="dtype: 'float64' is not valid. Allowed: one of float32, bf16, int8, nf4"):
        MODELS_KIND.read({"name": "causal_lm", "weights": places["llama"], "dtype": "float64"}, "model")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "use_dora": True}))
    with pytest.raises(ConfigError, match="has magnitudes \\(use_dora\\)"):
        files_of_peft.scales(str(tmp_path), [])


def test_a_base_in_bf16_has_adapters_in_float32(places):
    model = lora_of(places, "llama", dtype="bf16")
    tensors = frozen.tensors_of(model)
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    module = Net(model).build()
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    _, x, y, _ = batch_of(places)
    whole = Net(lora_of(places, "llama")).build()
    with torch.no_grad():
        logits, exact = module(x), whole(x)
    assert logits.dtype == torch.float32 and 0 < float((logits - exact).abs().max()) < 0.05


def test_trained_parameters_are_float32(places):
    sections = {"data": data_of(places), "method": {"name": "fedavg"}, "partition": {"name": "iid"}}
    with pytest.raises(ConfigError, match="trained parameters of type torch.bfloat16. Allowed: torch.float32"):
        tiny(model={"name": "causal_lm", "weights": places["llama"], "dtype": "bf16"}, **sections)


def test_a_whole_network_starts_from_the_folder(places):
    from transformers import AutoModelForCausalLM

    model = MODELS["causal_lm"](weights=places["qwen3"]).fitted("instructions", data_of(places).offers, "model")
    model.prepare()
    _, x, _, _ = batch_of(places)
    module = Net(model).build().eval()
    for name, t in Net(model).initial().items():
        module.get_parameter(name).data = t
    theirs = AutoModelForCausalLM.from_pretrained(places["qwen3"])
    with torch.no_grad():
        ours, expected = module(x), theirs(input_ids=x.clamp(min=0), attention_mask=(x >= 0).long()).logits
    assert torch.allclose(ours[x >= 0], expected[x >= 0], atol=1e-5)
    # the folder is needed only where the run starts
    assert type(model)(**model.blank.model_dump(mode="json")).rows == 304


def changed(places, tmp_path, **fields) -> str:
    """Write a copy of the Llama folder with changed fields of its config.json; without its weights."""
    config = json.loads(Path(places["llama"], "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"auto_map": {"AutoModelForCausalLM": "own.Own"}}, "has code of its own \\(auto_map in config.json\\)"),
        ({"model_type": "mine"}, "model_type 'mine' is not valid. Allowed: the model_type of a causal language model"),
        ({"model_type": "bert_japanese"}, "model_type 'bert_japanese' is not valid"),
        ({"quantization_config": {"bits": 4}}, "is quantised, which is not supported"),
    ],
)
def test_folders_that_are_not_read(places, tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        MODELS["causal_lm"](weights=changed(places, tmp_path, **fields))


def test_weights_in_pickle_are_not_read(places, tmp_path):
    folder = changed(places, tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="other formats can execute code when loaded"):
        MODELS["causal_lm"](weights=folder).prepare()


def test_data_with_more_tokens_or_positions_than_the_weights(places):
    model, offers = MODELS["causal_lm"](weights=places["llama"]), data_of(places).offers
    with pytest.raises(ConfigError, match="the data have 400 tokens and the weights 304"):
        model.fitted("instructions", offers | {"ids": 400}, "model")
    with pytest.raises(ConfigError, match="sequences have up to 5,000 tokens. Allowed: at most 2,048"):
        model.fitted("instructions", offers | {"length": 5000}, "model")
