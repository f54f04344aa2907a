"""Any causal language model of transformers, whole: a base for adapters, or for methods of whole networks.

The module is what `AutoModelForCausalLM` builds from a folder's config.json. No axis of it can be cut. Code in a folder
is never run.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from pydantic import field_validator, model_validator
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.axes import CLASSES, Axis, declare
from rayfl.core.net import Answer, Net, load
from rayfl.core.tensors import Params
from rayfl.models.base import TokenModel
from rayfl.models.huggingface import folder
from rayfl.models.huggingface.network import Network, owners
from rayfl.models.quantised import Bits, require
from rayfl.models.settings import Settings, plain
from rayfl.models.start import is_state

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16, "nf4": torch.bfloat16}
GENERATION = "generation_config.json"


class CausalLM(TokenModel):
    """A causal language model in a folder of transformers: Llama, Qwen2 and 3, Mistral, Gemma, Phi, SmolLM, GPT-2, ....

    It has no axis that can be cut: use it as `base` of model lora, whose ranks follow the capacities, or with methods
    and clients of whole networks.
    """

    name: Literal["causal_lm"] = "causal_lm"
    weights: str
    """Folder with config.json and model.safetensors, as on the hub or from `save_pretrained`, on the server's machine.
    Or a file of the network's state or the folder of an earlier run, with `config`. "": a new network of `config`."""
    config: Settings = ()
    """Configuration of transformers with its `model_type`. Default: config.json of `weights`."""
    dtype: Literal["float32", "bf16", "int8", "nf4"] = "float32"
    """Data type of the parameters. bf16 needs half the memory. int8 and nf4: linear layers, except the head, in a
    quarter and about a seventh, the rest in bf16 (package bitsandbytes). All but float32 only for the frozen base of
    model lora, whose adapters are float32."""
    checkpointing: bool = False
    """Gradient checkpointing: keep only the inputs of the blocks for the backward pass, and compute the rest again."""
    packing: bool = False
    """Compute the samples of a batch in as few rows as possible, one after another: less padding where lengths differ.
    Attention does not cross samples, and positions restart, so that losses are equal up to rounding."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention by torch's fused kernels, or as separate operations."""
    task: Literal["next_token"] = "next_token"

    @model_validator(mode="before")
    @classmethod
    def _as_in_the_folder(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("config") or not (weights := str(given.get("weights", ""))):
            return given
        if is_state(weights):
            return given
        return {**given, "config": _config_of(Path(weights).expanduser())}

    @field_validator("dtype")
    @classmethod
    def _has_its_library(cls, given: str) -> str:
        require(given)
        return given

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

        kind = plain(self.config).get("model_type", "")
        if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(
                f"config: model_type {kind!r} is not valid. Allowed: the model_type of a causal language model of "
                "transformers; models with code of their own are not supported"
            )
        return self

    # the network

    @property
    def quantised(self) -> Bits | None:
        return None if self.dtype in ("float32", "bf16") else self.dtype

    @property
    def configuration(self) -> "PreTrainedConfig":
        """Transformers' configuration."""
        from transformers import CONFIG_MAPPING

        given = plain(self.config)
        with self._blamed():
            found = CONFIG_MAPPING[given["model_type"]].from_dict(given)
        found.use_cache = False
        return found

    @property
    def rows(self) -> int:
        """Number of rows of the token embedding, and of logits."""
        return int(self.configuration.get_text_config().vocab_size)

    def fitted(self, data: str, offers: Mapping[str, Any], where: str) -> Self:
        if offers.get("task", self.task) != self.task:
            raise ConfigError(
                f"{where}: causal_lm predicts the next token, and data set {data} has task {offers['task']}. Allowed: "
                "data with task next_token, such as instructions"
            )
        fitted = super().fitted(data, offers, where)
        if fitted.ids > self.rows:
            raise ConfigError(
                f"{where}: the data have {fitted.ids:,} tokens and the weights {self.rows:,}. Allowed: the weights' "
                "own tokenizer (data.tokenizer)"
            )
        room = getattr(self.configuration.get_text_config(), "max_position_embeddings", None)
        if room is not None and fitted.length > room:
            raise ConfigError(
                f"{where}: sequences have up to {fitted.length:,} tokens. Allowed: at most {room:,}, the positions of "
                "the weights. Hint: data.max_length"
            )
        return fitted

    def build(self, net: Net) -> nn.Module:
        module = self.made()
        rows = Axis.fixed(CLASSES, self.rows)
        ends = [module.get_input_embeddings(), module.get_output_embeddings()]
        for _, part, own in list(owners(module)):
            by_token = any(part is end for end in ends)
            dims = {name: (rows if by_token and not i else None for i in range(t.dim())) for name, t in own.items()}
            declare(part, **{name: tuple(of) for name, of in dims.items()})
            part.is_linear = is_conv1d(part)  # type: ignore[assignment]
        if self.checkpointing:
            with self._blamed():
                # newer versions of transformers have another name
                enable = (
                    getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
                )
                enable({"use_reentrant": False})
        children = dict(module.named_children())
        found = Causal(children, module.forward, self.rows, pad=0, sees="before", is_eager=False)
        found.packing = self.packing
        return found

    def made(self) -> "PreTrainedModel":
        """Return transformers' module, newly initialised."""
        from transformers import AutoModelForCausalLM

        options = {"attn_implementation": self.attention, "dtype": DTYPES[self.dtype]}
        with self._blamed(), folder.quiet():
            return AutoModelForCausalLM.from_config(self.configuration, trust_remote_code=False, **options)

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(
                f"model: transformers does not build the {plain(self.config).get('model_type')} of {self.weights!r} "
                f"({reason}). Allowed: a configuration that AutoModelForCausalLM builds"
            ) from error

    # initial values

    def prepare(self) -> None:
        with torch.device("meta"):
            module = self.made()
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        if others := sorted(module.state_dict().keys() - parameters):
            raise ConfigError(
                f"model.weights: {module.config.model_type} keeps tensors that are not parameters, such as "
                f"{others[0]}. Allowed: models whose weights are parameters"
            )
        super().prepare()

    def published(self) -> Params:
        if not self.weights or is_state(self.weights):
            return super().published()
        from transformers import AutoModelForCausalLM

        found = folder.weights_of(AutoModelForCausalLM, self.configuration, self.weights, DTYPES[self.dtype])
        if lacking := sorted(Net(self).layout.shapes.keys() - found.keys()):
            raise ConfigError(
                f"model.weights: {self.weights!r} lacks {len(lacking)} tensors, such as {lacking[0]}. Allowed: the "
                "weights of a whole causal language model"
            )
        return found

    def initial(self, net: Net) -> Params:
        # the weights are large: without a new network beside them
        return self.published() or super().initial(net)

    # export

    def write(self, net: Net, params: Params, answer: Answer, files: Sequence[Path], to: Path) -> None:
        """Write a folder "transformers" for `from_pretrained`, with all files of the tokenizer."""
        module = self.made()
        load(module, dict(params))
        folder.save(module, files, to / "transformers")
        said = Path(self.weights).expanduser() / GENERATION
        if self.weights and said.is_file():
            shutil.copy(said, to / "transformers" / GENERATION)


class Causal(Network):
    """A network without a mask: padding on the right is not seen by the tokens before it, which alone count. So fused
    kernels and sliding windows are transformers' own."""

    packing = False
    """Whether samples share rows."""
    is_checked = False
    """Whether they are known not to see each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        # shapes of meta tensors, and of an exported program, do not depend on values
        packs = self.packing and not (x.is_meta or torch.compiler.is_exporting())
        lengths = (x >= 0).sum(1).tolist() if packs else []
        starts = placed(lengths, x.shape[1])
        if lengths and 1 + max(row for row, _ in starts) < len(x):
            if not self.is_checked:
                self._check(x)
            logits: Any = self._packed(x, starts)
        else:
            logits = super().forward(x)
        # losses are computed in float32
        return logits.float() if logits.dtype == torch.bfloat16 else logits

    def _packed(self, x: torch.Tensor, starts: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the logits [B, T, C] of samples x [B, T] that start at (row, position) of as many rows of T tokens."""
        there, (count, width) = x >= 0, x.shape
        steps = torch.arange(width, device=x.device)
        firsts = torch.tensor([row * width + first for row, first in starts], device=x.device)
        at = torch.where(there, firsts[:, None] + steps, 0)
        rows = 1 + max(row for row, _ in starts)
        ids = x.new_full((rows * width,), self.pad)
        # transformers takes a position that does not follow the one before it as the start of a sample
        positions = torch.zeros_like(ids)
        ids[at[there]], positions[at[there]] = x[there], steps.expand(count, -1)[there]
        found = self.run(input_ids=ids.view(rows, width), position_ids=positions.view(rows, width))
        return found.logits[..., : self.classes].flatten(0, 1)[at]

    @torch.no_grad()
    def _check(self, x: torch.Tensor) -> None:
        """Raise ConfigError if a sample in a row sees the one before it."""
        two = x[(x >= 0).sum(1).argsort()[:2], :4].clamp(min=0)
        was = self.training
        self.eval()
        alone = self.run(input_ids=two).logits.float()
        both = self._packed(torch.cat([two, torch.full_like(two, -1)], 1), [(0, 0), (0, two.shape[1])])
        self.train(was)
        difference = float((both[:, : two.shape[1]].float() - alone[..., : self.classes]).abs().max())
        if difference > 0.05 * float(alone.abs().max()):
            raise ConfigError(
                "model.packing: transformers does not keep the samples of a row apart in this model. Allowed: false"
            )
        self.is_checked = True

    def _seen(self, there: torch.Tensor) -> torch.Tensor | None:
        # without a mask, transformers reads positions, which meta tensors do not have
        return super()._seen(there) if there.is_meta else None


def placed(lengths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Return (row, first position) of every sample in few rows of `width` tokens: each, the longest first, in the first
    row with room for it."""
    room: list[int] = []
    found = [(0, 0)] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((row for row, left in enumerate(room) if left >= lengths[i]), len(room))
        if row == len(room):
            room.append(width)
        found[i] = row, width - room[row]
        room[row] -= lengths[i]
    return found


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' linear layer, whose weight is [in, out]."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def _config_of(place: Path) -> Mapping[str, Any]:
    """Return the content of a folder's config.json. Raise ConfigError if there is none, or if it names code or a
    quantisation."""
    try:
        found = json.loads((place / "config.json").read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"weights: config.json in {str(place)!r} cannot be read ({type(error).__name__}: {error}). Allowed: a "
            "folder of a causal language model, as saved by transformers or on its hub"
        ) from None
    if "auto_map" in found:
        raise ConfigError(
            f"weights: {str(place)!r} has code of its own (auto_map in config.json), which is never run. Allowed: a "
            "model that transformers itself contains"
        )
    if "quantization_config" in found:
        raise ConfigError(
            f"weights: {str(place)!r} is quantised, which is not supported. Allowed: the original weights, with dtype: "
            "int8 or nf4"
        )
    # an empty mapping says nothing, and reads like an empty list
    return {name: value for name, value in found.items() if value != {}}
