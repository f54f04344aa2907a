"""Networks for sequences of tokens, and networks of transformers: how they are made, called, and answer."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rayfl.config import ConfigError, nearest, shown

VOCABULARY = ("vocab_size", "vocabulary", "num_tokens", "n_tokens", "ntokens", "ntoken", "num_embeddings")
"""Names by which constructors take the number of tokens."""


def by_configuration(cls: Any, options: Mapping[str, Any], follow: Mapping[str, Any], where: str) -> Callable[[], Any]:
    """Return the constructor of a class of transformers, whose options are those of its configuration. `follow`:
    options from the data, unless set. Raise ConfigError for other names."""
    known = {*cls.config_class().to_dict(), *cls.config_class.attribute_map, "num_labels"}
    for name in options:
        if name not in known:
            raise ConfigError(
                f"{where}: no field of {cls.config_class.__name__} is called {shown(name)}. "
                f"{nearest(name, sorted(known))}"
            )
    rows = {**follow, **options}.get("vocab_size")
    # a vocabulary smaller than the published one lacks its special tokens
    special = {f"{token}_token_id" for token in ("bos", "eos", "cls", "sep", "decoder_start")} & known
    absent = {name for name in special if rows and (getattr(cls.config_class(), name) or 0) >= rows}
    given = {**dict.fromkeys(absent), **{name: value for name, value in follow.items() if name in known}, **options}
    return functools.partial(_configured, cls, {"use_cache": False} | given)


def _configured(cls: Any, options: Mapping[str, Any]) -> nn.Module:
    module = cls(cls.config_class(**options))
    for part in module.modules():
        if type(part).__name__ == "Conv1D":
            # transformers' linear layer
            part.is_linear = True
    return module


def check_positions(module: nn.Module, length: int, where: str) -> None:
    """Raise ConfigError if position embeddings that start after the padding token, as RoBERTa's, are fewer than the
    positions of a sequence. On torch's meta device such a network runs."""
    for path, part in module.named_modules():
        pad = part.padding_idx if isinstance(part, nn.Embedding) and "position" in path else None
        if pad is not None and part.num_embeddings <= pad + length:  # pyright: ignore[reportOperatorIssue]
            raise ConfigError(
                f"{where}: {path} has {part.num_embeddings} positions, of which the first {pad + 1} are not used. "
                f"Allowed: at least {pad + length + 1}, for sequences of {length} tokens and the padding token {pad}. "
                "Hint: a tokenizer with a small padding token (data.tokenizer), or max_position_embeddings"
            )


def adapt(module: nn.Module, pad: int | None, classes: int | None) -> nn.Module:
    """Let a network take tokens x [B, T], -1 for padding, and return logits, in place. Networks whose `forward` has
    `input_ids` are called as those of transformers. `pad`: token in place of padding; None for other samples.
    `classes`: number of logits to keep."""
    names = inspect.signature(module.forward).parameters
    if "input_ids" in names or "pixel_values" in names:
        _treat_meta_as_fake()
        module.register_forward_hook(_logits)
    if pad is not None:
        as_transformers = "input_ids" in names
        module.register_forward_pre_hook(
            functools.partial(_masked if as_transformers else _filled, pad), with_kwargs=True
        )
    if classes is not None:
        module.register_forward_hook(functools.partial(_first, classes))
    return module


def _masked(pad: int, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    there = args[0] >= 0
    return (), {"input_ids": torch.where(there, args[0], pad), "attention_mask": there.long()}


def _filled(pad: int, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    return (torch.where(args[0] >= 0, args[0], pad), *args[1:]), kwargs


def _logits(module: nn.Module, args: Any, output: Any) -> Any:
    # a tuple has the logits of early exits
    return tuple(getattr(one, "logits", one) for one in output) if type(output) is tuple else output.logits


def _first(classes: int, module: nn.Module, args: Any, output: Any) -> Any:
    # a vocabulary may have more rows than output tokens
    return output[..., :classes]


@functools.cache
def _treat_meta_as_fake() -> None:
    """Let transformers make masks without reading whether there is padding, as it does for torch's other tensors
    without values."""
    from transformers.utils import import_utils

    is_fake = import_utils.is_fake_tensor
    import_utils.is_fake_tensor = lambda t: is_fake(t) or (isinstance(t, torch.Tensor) and t.is_meta)
