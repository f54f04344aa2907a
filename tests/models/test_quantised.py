"""Frozen bases of 8 and 4 bits: beside bitsandbytes' own layers, and beside the same weights in full."""

import importlib.util
from typing import Any

import pytest
import torch
from chats import causal, jsonl, tokenizer
from helpers import run, simulate
from torch import nn

from rayfl.config import ConfigError
from rayfl.core import frozen
from rayfl.core.net import Net, load, params_of
from rayfl.models import MODELS
from rayfl.models.quantised import Quantised, packed, unpacked
from rayfl.testing.tiny import tiny

BITS = ("int8", "nf4")
KINDS = ("llama", "gpt2")
"""Linear layers of torch, and `Conv1D`, whose weight is transposed."""


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("quantised")
    rows = [{"prompt": f"copy {i}", "response": "ab" * (1 + i % 3)} for i in range(96)]
    found = {kind: causal(root / kind, kind) for kind in KINDS}
    return found | {"tokenizer": tokenizer(root / "tokenizer"), "rows": jsonl(root / "rows.jsonl", rows)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYFL_CACHE", str(tmp_path / "cache"))


def section(places, kind, dtype):
    base = {"name": "causal_lm", "weights": places[kind], "dtype": dtype}
    return {"name": "lora", "base": base, "rank": 4, "alpha": 8, "targets": "all-linear"}


def model_of(places, kind, dtype) -> Any:
    return MODELS["lora"](**{k: v for k, v in section(places, kind, dtype).items() if k != "name"})


def trained(module: nn.Module) -> nn.Module:
    """Give every adapter values that are not zero."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return module


def whole(model, module: nn.Module) -> nn.Module:
    """Put the weights that a quantised model stands for into a network of bf16."""
    tensors = frozen.tensors_of(model)
    for path, bits in model._quantised.items():
        layer = module.get_submodule(path)
        buffers = {own: tensors[f"{path}.{own}"] for own in ("codes", "scales")}
        is_torchs = isinstance(layer, nn.Linear)
        shape = tuple(layer.weight.shape if is_torchs else layer.weight.T.shape)
        weight = unpacked(buffers, shape, bits, torch.bfloat16)
        layer.weight = (weight if is_torchs else weight.T).clone()
    return module


@pytest.mark.parametrize("bits", BITS)
def test_a_weight_comes_back_within_half_a_step(bits):
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    buffers = packed(weight, bits)
    back = unpacked(buffers, (48, 64), bits, torch.float32)
    if bits == "int8":
        steps = weight.abs().amax(1, keepdim=True) / 127
        # values were rounded to float16 before
        assert ((back - weight).abs() <= 0.57 * steps).all()
    else:
        # NF4's widest gap is from -1 to -0.696
        steps = weight.view(-1, 64).abs().amax(1, keepdim=True)
        assert ((back - weight).view(-1, 64).abs() <= 0.153 * steps).all()
        assert len(set((back.view(-1, 64) / steps).flatten().mul(1e4).round().tolist())) <= 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", BITS)
def test_logits_and_gradients_are_those_of_the_weights_that_it_stands_for(places, kind, bits):
    model = model_of(places, kind, bits)
    ids = torch.randint(4, 200, (3, 12), generator=torch.Generator().manual_seed(2))
    ours = trained(Net(model).build()).eval()
    assert sum(isinstance(layer, Quantised) for layer in ours.modules()) == len(model._quantised) > 0
    logits = ours(ids)
    logits.square().mean().backward()
    gradients = {name: p.grad for name, p in ours.named_parameters()}

    theirs = whole(model, trained(Net(model_of(places, kind, "bf16")).build())).eval()
    expected = theirs(ids)
    expected.square().mean().backward()
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.02 * float(expected.detach().abs().max()))
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None and gradients[name] is not None
        error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 0.05, name


@pytest.mark.parametrize("bits", BITS)
def test_layers_compute_what_bitsandbytes_own_layers_compute(bits):
    nn: Any = importlib.import_module("bitsandbytes").nn
    weight, x = torch.randn(32, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    ours = Quantised((32, 64), None, bits, torch.bfloat16)
    for own, t in packed(weight, bits).items():
        assert getattr(ours, own).shape == t.shape and getattr(ours, own).dtype == t.dtype
        ours.register_buffer(own, t)
    if bits == "nf4":
        theirs = nn.Linear4bit(64, 32, False, torch.bfloat16, compress_statistics=False, quant_type="nf4")
        theirs.weight = nn.Params4bit(weight, requires_grad=False, compress_statistics=False, quant_type="nf4")
    else:
        theirs = nn.Linear8bitLt(64, 32, False, has_fp16_weights=False, threshold=6.0)
        theirs.weight = nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    assert torch.equal(ours(x), theirs.to("cpu")(x))


def test_the_base_takes_less_memory(places):
    sizes = {dtype: Net(model_of(places, "llama", dtype)).fixed_bytes for dtype in ("float32", "bf16", *BITS)}
    assert sizes["float32"] - sizes["bf16"] == 2 * Net(MODELS["causal_lm"](weights=places["llama"])).parameters
    layers = [w for w in Net(model_of(places, "llama", "int8")).blank().modules() if isinstance(w, Quantised)]
    weights, rows = sum(w.weight.numel() for w in layers), sum(w.out_features for w in layers)
    assert sizes["bf16"] - sizes["int8"] == weights - 4 * rows
    assert sizes["bf16"] - sizes["nf4"] == 1.5 * weights - 4 * weights / 64
    for dtype in BITS:
        found = frozen.tensors_of(model_of(places, "llama", dtype))
        assert sum(t.numel() * t.element_size() for t in found.values()) == sizes[dtype]


@pytest.mark.parametrize("bits", BITS)
def test_the_merged_network_is_the_base_with_its_adapters(places, bits):
    model = model_of(places, "llama", bits)
    net = Net(model)
    ours = trained(net.build()).eval()
    ids = torch.randint(4, 200, (3, 12), generator=torch.Generator().manual_seed(2))
    merged = Net(model.base).build().eval()
    with torch.no_grad():
        load(merged, model.merged_into_base(net, params_of(ours)))
        logits, expected = merged(ids), ours(ids)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("bits", BITS)
def test_a_run_trains_the_adapters(places, tmp_path, bits):
    """Twelve clients of two ranks: more than train side by side where that is possible."""
    data = {"name": "instructions", "train": places["rows"], "tokenizer": places["tokenizer"], "max_length": 48}
    experiment = tiny(
        data=data,
        model=section(places, "llama", bits),
        method={"name": "flora"},
        partition={"name": "iid"},
        clients={"count": 12, "cohort": 12, "capacities": [1.0, 0.5]},
        training={"steps": 3, "lr": 0.05, "batch_size": 4},
        rounds=3,
    )
    simulation = simulate(experiment, tmp_path)
    lines = run(simulation)
    assert lines[-1]["train_loss"] < lines[0]["train_loss"]


def test_it_needs_its_library(places, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="dtype: nf4 needs the package bitsandbytes. Hint: uv sync --extra quantised"):
        MODELS["causal_lm"](weights=places["llama"], dtype="nf4")
