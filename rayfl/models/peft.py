"""Adapter files of the library peft (https://github.com/huggingface/peft, 0.21).

adapter_config.json            rank, scaling, targets, other trained modules
adapter_model.safetensors      "base_model.model.<path>.lora_A.weight" [r, in], "...lora_B.weight" [out, r]; the head by
                               its own names after "base_model.model."
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rayfl.config import ConfigError
from rayfl.core.permissions import as_new
from rayfl.core.tensors import Params

BEFORE = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TASKS = {"classes": "SEQ_CLS", "next_token": "CAUSAL_LM"}
"""rayfl's task -> peft's."""


def written(params: Params) -> Params:
    """Return the parameters by peft's names, without adapters of rank 0 and updates merged into the base."""
    kept = {name: t for name, t in params.items() if t.numel() and not name.endswith(".lora.W")}
    return {BEFORE + _theirs(name): t.detach().contiguous() for name, t in kept.items()}


def write(folder: Path, params: Params, config: dict[str, Any]) -> None:
    """Write the adapter files into a new folder. `params`: by rayfl's names; `config`: from `config_of`."""
    folder.mkdir(parents=True)
    save_file(written(params), folder / WEIGHTS)
    as_new(folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def config_of(
    ranks: Mapping[str, int], alphas: Mapping[str, float], head: Sequence[str], dropout: float, task: str, base: str
) -> dict[str, Any]:
    """Return the content of adapter_config.json. `ranks` and `alphas`: by layer, r and s r of y = W0 x + s B A x;
    `base`: folder of the base."""
    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    return {
        "peft_type": "LORA",
        "task_type": TASKS.get(task),
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {path: r for path, r in ranks.items() if r != rank},
        "alpha_pattern": {path: a for path, a in alphas.items() if a != alpha},
        "use_rslora": False,
        "lora_dropout": dropout,
        "target_modules": list(ranks),
        "modules_to_save": list(head) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def read(folder: str) -> Params:
    """Return the folder's tensors by rayfl's names. Raise ConfigError if the file cannot be read."""
    file = Path(folder).expanduser() / WEIGHTS
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"model.adapter: {WEIGHTS} in {folder!r} cannot be read ({error}). Allowed: a folder written by peft or "
            "rayfl export"
        ) from None
    return {_ours(name.removeprefix(BEFORE)): t.float() for name, t in tensors.items()}


def scales(folder: str, paths: Iterable[str]) -> dict[str, float]:
    """Return the factor s of y = W0 x + s B A x of every layer. Raise ConfigError if the configuration cannot be
    read."""
    file = Path(folder).expanduser() / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if config.get("use_dora"):
            raise ConfigError(
                f"model.adapter: {folder!r} has magnitudes (use_dora), which are not supported. Allowed: adapters of "
                "LoRA"
            )
        if (start := config.get("init_lora_weights", True)) not in (True, False, "gaussian"):
            raise ConfigError(
                f"model.adapter: {folder!r} has init_lora_weights: {start!r}, which changes the base's weights too. "
                "Allowed: adapters of the unchanged base. Hint: peft converts them when it saves, with "
                "path_initial_model_for_weight_conversion"
            )
        ranks, alphas, is_rslora = config["r"], config["lora_alpha"], config.get("use_rslora", False)
        found = {
            path: (_of(path, config.get("rank_pattern"), ranks), _of(path, config.get("alpha_pattern"), alphas))
            for path in paths
        }
        return {path: alpha / (math.sqrt(rank) if is_rslora else rank) for path, (rank, alpha) in found.items()}
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, re.error) as error:
        raise ConfigError(
            f"model.adapter: {CONFIG} in {folder!r} cannot be read ({error!r}). Allowed: a folder written by peft or "
            "rayfl export"
        ) from None


def matches(path: str, key: str) -> bool:
    """Return whether a key of peft's patterns, the end of a path or a regular expression of it, is for a layer."""
    return re.fullmatch(rf"(.*\.)?({key})", path) is not None


def _of(path: str, pattern: Mapping[str, float] | None, default: float) -> float:
    """Return a layer's value in peft's pattern."""
    return next((v for key, v in (pattern or {}).items() if matches(path, key)), default)


def _theirs(name: str) -> str:
    return name.replace(".lora.A", ".lora_A.weight").replace(".lora.B", ".lora_B.weight")


def _ours(name: str) -> str:
    return name.replace(".lora_A.weight", ".lora.A").replace(".lora_B.weight", ".lora.B")
