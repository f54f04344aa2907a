"""Table of networks of other libraries that `model: module` cuts without a declaration.

python scripts/networks.py [NAME ...]     prints the rows of these networks, default: of all
python scripts/networks.py --write        writes the table into rayfl/models/README.md

Needs timm (`uv pip install timm`). The difference is that between a narrow network at random positions of all axes and
the whole one with zeros elsewhere, in float64, relative to the largest output. Norms over channels and the scale of
attention depend on the width, so they are replaced: norms by their weight and bias, torch's scale by a constant.
"""

import argparse
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.net import Net, check_axes, load
from rayfl.core.seeds import torch_generator
from rayfl.core.submodel import random_subset
from rayfl.testing.tiny import run, simulate, tiny

README = Path(__file__).parent.parent / "rayfl" / "models" / "README.md"
START, END = "<!-- networks -->\n", "<!-- /networks -->"
METHODS: Mapping[str, Any] = {
    **{name: name.lower() for name in ("HeteroFL", "FedRolex", "FjORD", "FIARSE", "FedAvg")},
    "NeFL-D": {"name": "nefl", "variant": "D"},
}
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 80}
WIDE = {**SIZES, "intermediate_size": 48}
SHARED = {**WIDE, "num_key_value_heads": 2}
TOKENS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "BertForSequenceClassification": ("classes", WIDE),
    "RobertaForSequenceClassification": ("classes", WIDE),
    "DistilBertForSequenceClassification": (
        "classes",
        {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48, "max_position_embeddings": 80},
    ),
    "ElectraForSequenceClassification": ("classes", {**WIDE, "embedding_size": 16}),
    "ModernBertForSequenceClassification": ("classes", WIDE),
    "BertForMaskedLM": ("masked_lm", WIDE),
    "GPT2LMHeadModel": ("next_token", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 80}),
    "OPTForCausalLM": ("next_token", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "GPTNeoXForCausalLM": ("next_token", WIDE),
    "PhiForCausalLM": ("next_token", WIDE),
    "LlamaForCausalLM": ("next_token", SHARED),
    "MistralForCausalLM": ("next_token", SHARED),
    "Qwen2ForCausalLM": ("next_token", SHARED),
    "Qwen3ForCausalLM": ("next_token", {**SHARED, "head_dim": 8}),
    "GemmaForCausalLM": ("next_token", {**SHARED, "head_dim": 8}),
}
VIT = {"image_size": 64, "patch_size": 16, "num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
IMAGES: Mapping[str, tuple[str, dict[str, Any]]] = {
    **{name: ("torchvision.models", {}) for name in ("resnet18", "resnext50_32x4d", "mobilenet_v2")},
    **{name: ("torchvision.models", {}) for name in ("mobilenet_v3_small", "efficientnet_b0", "efficientnet_v2_s")},
    **{name: ("torchvision.models", {}) for name in ("convnext_tiny", "densenet121", "vgg11_bn", "alexnet")},
    **{name: ("torchvision.models", {}) for name in ("squeezenet1_1", "regnet_y_400mf", "mnasnet0_5")},
    **{name: ("torchvision.models", {}) for name in ("shufflenet_v2_x0_5", "swin_t")},
    "googlenet": ("torchvision.models", {"aux_logits": False, "init_weights": False}),
    "inception_v3": ("torchvision.models", {"aux_logits": False, "init_weights": False}),
    "VisionTransformer": ("torchvision.models", VIT),
    **{name: ("timm.models", {}) for name in ("efficientvit_b0", "edgenext_xx_small", "mobilevit_xxs", "pvt_v2_b0")},
    **{name: ("timm.models", {}) for name in ("ghostnet_100", "lcnet_050", "mobilenetv4_conv_small", "rexnet_100")},
    **{name: ("timm.models", {"img_size": 64}) for name in ("vit_tiny_patch16_224", "mixer_s32_224")},
}
NOTES = {"swin_t": " (scale of attention)"}
"""Network -> why the difference is not 0."""
LIBRARY = {"torchvision.models": "torchvision", "timm.models": "timm"}


def sections(name: str) -> dict[str, Any]:
    """Return the sections of a small experiment."""
    if name in TOKENS:
        task, options = TOKENS[name]
        model, data = f"transformers:{name}", {"name": "synthetic_text", "task": task, "length": 12}
    else:
        package, options = IMAGES[name]
        size = 96 if name == "inception_v3" else 64
        model, data = f"{package}:{name}", {"name": "synthetic", "shape": [3, size, size], "classes": 4}
    return {
        "model": {"name": "module", "of": model, "options": options},
        "data": {**data, "samples": 24, "test_samples": 6},
        "partition": "iid",
        "clients": {"count": 3, "cohort": 3, "capacities": [1, 0.5, 0.25]},
        "training": {"batch_size": 3, "steps": 1, "lr": 0.01},
        "evaluation": {"batch_size": 6, "clients": False},
        "rounds": 1,
    }


def row(name: str) -> str:
    started = time.perf_counter()
    library = LIBRARY[IMAGES[name][0]] if name in IMAGES else "transformers"
    try:
        net = Net(tiny(**sections(name), method="fedavg").model)
    except ConfigError as error:
        return f"| {library} | `{name}` | refused: {str(error).partition('. Allowed')[0]} |"
    check_axes(net, 0.4)
    inferred = time.perf_counter() - started
    widths = ", ".join(f"{replace(net, width=width).parameters:,}" for width in (1, 0.5, 0.25))
    ran = {label: _round(name, method) for label, method in METHODS.items()}
    failed = [f"{label} ({reason})" for label, reason in ran.items() if reason]
    rounds = f"all but {', '.join(failed)}" if failed else "all"
    differ = f"{difference(net):.0e}{NOTES.get(name, '')}"
    print(f"{name}: axes in {inferred:.1f} s, all in {time.perf_counter() - started:.1f} s", flush=True)
    return f"| {library} | `{name}` | {len(net.layout.axes)} | {widths} | {differ} | {rounds} |"


def _round(name: str, method: Any) -> str:
    """Return why a method does not run a round; "" if it does."""
    given = sections(name) | {"method": method}
    if not isinstance(method, str):
        # a depth of a quarter is seldom left
        given["clients"] = {**given["clients"], "capacities": [1, 0.8], "metric": "params"}
    try:
        with tempfile.TemporaryDirectory() as folder:
            [line] = run(simulate(tiny(**given), Path(folder)))
        return "" if line["refused"] == 0 and math.isfinite(line["train_loss"]) else "an update that is not finite"
    except (ConfigError, ValueError, RuntimeError) as error:
        return str(error).partition(". Allowed")[0].removeprefix("test: model: module has ").splitlines()[0][:160]


def difference(whole: Net, width: float = 0.4) -> float:
    """Return the largest difference between a narrow network at random positions and the whole one with zeros
    elsewhere, relative to the largest output."""
    narrow = replace(whole, width=width)
    generator = torch_generator(0, "networks:cut")
    selection = random_subset(whole, narrow, generator)
    shapes = whole.layout.shapes
    drawn = {name: torch.randn(shape, generator=generator).double() * 0.1 for name, shape in shapes.items()}
    x = whole.model.example(2, "cpu")
    x = torch.arange(x.numel()).view(x.shape) % 20 if x.dtype == torch.int64 else torch.randn(x.shape).double()
    part, answers = selection.take(drawn), []
    for net, params in ((narrow, part), (whole, selection.spread(part))):
        module = net.build().eval().double()
        load(module, params)
        with torch.no_grad(), without_norms(module):
            answers.append(module(x))
    one, other = answers
    return float((one - other).abs().max() / other.abs().max())


@contextmanager
def without_norms(module: nn.Module) -> Iterator[None]:
    """Replace norms over channels by their weight and bias, and the scale of torch's attention by a constant."""
    attention = F.scaled_dot_product_attention

    def affine(x: torch.Tensor, weight: Any, bias: Any, d: int) -> torch.Tensor:
        shape = [-1 if i == d % x.dim() else 1 for i in range(x.dim())]
        x = x if weight is None else x * weight.view(shape)
        return x if bias is None else x + bias.view(shape)

    patches = {
        "layer_norm": lambda x, shape, weight=None, bias=None, eps=0: affine(x, weight, bias, -1),
        "rms_norm": lambda x, shape, weight=None, eps=0: affine(x, weight, None, -1),
        "group_norm": lambda x, groups, weight=None, bias=None, eps=0: affine(x, weight, bias, 1),
        "scaled_dot_product_attention": lambda *given, **named: attention(*given, **{"scale": 0.3, **named}),
    }
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with ExitStack() as stack:
        for name, function in patches.items():
            stack.enter_context(mock.patch.object(F, name, function))
        # root mean squares of transformers
        stack.enter_context(mock.patch.object(torch, "rsqrt", torch.ones_like))
        yield
    torch.backends.mha.set_fastpath_enabled(fast)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="networks, default: all")
    parser.add_argument("--write", action="store_true", help=f"write the table into {README.name}")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    lines = [
        "| library | network | axes | parameters at widths 1, 1/2, 1/4 | narrow and whole differ by | rounds |",
        "|---|---|---:|---|---|---|",
    ]
    for name in given.names or [*IMAGES, *TOKENS]:
        lines.append(row(name))
        print(lines[-1], flush=True)
    table = "\n".join(lines) + "\n"
    if given.write:
        text = README.read_text()
        before, _, rest = text.partition(START)
        README.write_text(f"{before}{START}{table}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
