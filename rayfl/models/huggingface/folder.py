"""Folders of transformers: config.json and model.safetensors. Code in a folder is never run."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rayfl.config import ConfigError
from rayfl.core.permissions import as_new
from rayfl.core.tensors import Params
from rayfl.models.settings import frozen, plain

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FREE = ("dropout", "attention_dropout")
"""Fields that may differ from the folder's, because no tensor depends on them."""

NO_MATTER = {"architectures", "dtype", "id2label", "label2id", "problem_type", "use_cache"}
"""Fields of a configuration that do not describe the network."""


def filled(
    kind: str, fields: Mapping[str, tuple[str, ...]], defaults: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a model section completed by the config.json of its `weights`. Raise ConfigError if they differ, or if the
    folder is of another kind of model. `weights_of` reports a missing folder."""
    file = _file(given["weights"], "config.json")
    if not file.is_file():
        return dict(given)
    from transformers import CONFIG_MAPPING

    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"weights: config.json in {given['weights']!r} cannot be read ({error}). Allowed: a folder saved by "
            "transformers"
        ) from None
    model_type = said.get("model_type") if isinstance(said, dict) else None
    if model_type != kind:
        raise ConfigError(
            f"weights: {given['weights']!r} has model_type {model_type!r} in its config.json. Allowed: a folder "
            f"of {kind!r}"
        )
    there, usual = CONFIG_MAPPING[kind].from_dict(said), CONFIG_MAPPING[kind](**defaults).to_dict()
    ours = {field: getattr(there, names[0]) for field, names in fields.items()}
    ours = {field: value for field, value in ours.items() if value is not None}
    for field, value in ours.items():
        if field in given and given[field] != value and field not in FREE:
            raise ConfigError(f"{field}: {given[field]!r} is not valid. Allowed: {value!r}, as in {file}, or no value")
    named = {name for names in fields.values() for name in names} | NO_MATTER
    more = {name: value for name, value in there.to_dict().items() if name in usual and value != usual[name]}
    config = {name: value for name, value in more.items() if name not in named}
    # DistilBERT's classifier has a dropout of its own, as GPT-2's embeddings have
    further = {name: names[0] for names in fields.values() for name in names[1:]}
    config |= {
        name: value for name, first in further.items() if (value := getattr(there, name)) != getattr(there, first)
    }
    config |= plain(frozen(given.get("config", {})))
    # the size of the vocabulary is kept even if it is the default
    return {**ours, **given, "config": config | {"vocab_size": there.vocab_size}}


def weights_of(
    made: "type[Any]", configuration: "PreTrainedConfig", folder: str, dtype: torch.dtype = torch.float32
) -> Params:
    """Return the folder's parameters for a module of this configuration; without its head if the folder's
    head differs. Raise ConfigError if the folder is missing or has other tensors."""
    from safetensors import SafetensorError

    if not any(_file(folder, name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise ConfigError(
            f"model.weights: {folder!r} is not valid. Allowed: a folder with config.json and model.safetensors of a "
            f"{configuration.model_type}, as saved by transformers or on its hub; other formats can execute code when "
            "loaded and are not supported"
        )
    if not _file(folder, "config.json").is_file():
        raise ConfigError(f"model.weights: {folder!r} has no config.json. Allowed: a folder that has one")
    with quiet():
        try:
            module, found = made.from_pretrained(
                str(Path(folder).expanduser()),
                config=configuration,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            [reason, *_] = [*str(error).splitlines(), type(error).__name__]
            raise ConfigError(
                f"model.weights: {folder!r} cannot be read ({reason}). Allowed: a folder saved by transformers"
            ) from None
    lacking = {*found["missing_keys"]} | {name for name, *_ in found["mismatched_keys"]}
    _check_trunk(module, lacking, found, folder)
    return {name: t.detach().to(dtype) for name, t in module.named_parameters() if name not in lacking}


def _check_trunk(module: "PreTrainedModel", lacking: set[str], found: Mapping[str, Any], folder: str) -> None:
    """Raise ConfigError if tensors below the head are missing."""
    trunk = f"{module.base_model_prefix}."
    wrong = sorted(name for name in lacking if name.startswith(trunk) and not name.startswith(f"{trunk}pooler."))
    if wrong:
        given = {name: list(shape) for name, shape, *_ in found["mismatched_keys"]}
        wanted = list(module.get_parameter(wrong[0]).shape)
        others = sorted(found["unexpected_keys"])
        raise ConfigError(
            f"model.weights: {len(wrong)} tensors of {folder!r} do not match the configured {module.config.model_type} "
            f"({wrong[0]} is {given.get(wrong[0], 'missing')} and should be {wanted}), and {len(others)} are "
            f"unknown{f', such as {others[0]}' if others else ''}. Allowed: the weights of that configuration"
        )


def save(module: Any, files: Sequence[Path], to: Path) -> None:
    """Write a module of transformers for `from_pretrained` into a new folder, with the files of its tokenizer."""
    with quiet():
        module.save_pretrained(to)
    for file in to.glob("*.safetensors"):
        as_new(file)
    for file in files:
        (shutil.copytree if file.is_dir() else shutil.copy)(file, to / file.name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' messages on new heads and its progress bars."""
    from transformers import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _file(folder: Any, name: str) -> Path:
    return Path(str(folder)).expanduser() / name
