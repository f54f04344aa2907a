"""GPT-2 and Llama: a token sees those before it; the last one represents its sequence."""

from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rayfl.core.axes import Axis
from rayfl.core.net import Net
from rayfl.models.huggingface.base import HuggingFace


class GPT2(HuggingFace):
    """Radford et al. 2019; by default the smallest GPT-2. Its matrices are [in, out], and one layer computes queries,
    keys and values."""

    name: Literal["gpt2"] = "gpt2"
    positions: int = Field(default=1024, ge=1)

    kind: ClassVar = "gpt2"
    sees: ClassVar = "before"
    tasks: ClassVar = ("classes", "next_token")
    fields: ClassVar = {
        "hidden": ("n_embd",),
        "heads": ("n_head",),
        "layers": ("n_layer",),
        "ffn": ("n_inner",),
        "positions": ("n_positions",),
        "pad": ("pad_token_id",),
        "dropout": ("resid_pdrop", "embd_pdrop"),
        "attention_dropout": ("attn_pdrop",),
    }
    defaults: ClassVar = {"use_cache": False}
    stack: ClassVar = "transformer.h"
    branches: ClassVar = ("attn.c_proj", "mlp.c_proj")
    table: ClassVar = {
        r"wte\.weight": ("vocabulary", "hidden"),
        r"wpe\.weight": ("positions", "hidden"),
        r"ln_(1|2|f)\.(weight|bias)": ("hidden",),
        r"attn\.c_attn\.weight": ("hidden", "qkv"),
        r"attn\.c_attn\.bias": ("qkv",),
        r"attn\.c_proj\.weight": ("head", "hidden"),
        r"mlp\.c_fc\.weight": ("hidden", "ffn"),
        r"mlp\.c_fc\.bias": ("ffn",),
        r"mlp\.c_proj\.weight": ("ffn", "hidden"),
        r"c_proj\.bias": ("hidden",),
        r"score\.weight": ("classes", "hidden"),
    }

    def axes(self, net: Net, block: str) -> dict[str, Axis]:
        axes = super().axes(net, block)
        return axes | {"qkv": replace(axes["head"], groups=3 * axes["head"].groups)}


class Llama(HuggingFace):
    """Touvron et al., arXiv 2302.13971; by default with the sizes of SmolLM2-135M. Queries share keys and values in
    groups. A narrow network keeps whole groups, because a part of a head would have other rotations."""

    name: Literal["llama"] = "llama"
    hidden: int = Field(default=576, ge=1)
    """Features of the residual stream."""
    heads: int = Field(default=9, ge=1)
    """Query heads."""
    groups: int = Field(default=3, ge=1)
    """Heads of keys and values, each shared by equally many heads of queries."""
    head_width: int | None = Field(default=None, ge=1)
    """Features of a head, an even number. Default: `hidden` / `heads`."""
    layers: int = Field(default=30, ge=1)
    ffn: int | None = Field(default=1536, ge=1)
    """Features inside an MLP."""
    positions: int = Field(default=2048, ge=1)
    """Tokens of the longest sequence."""
    dropout: Literal[0] = 0
    """Not supported: the architecture has none."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    cut: Literal["heads"] = "heads"
    """Cut of a narrow network: whole groups of heads."""
    smallest: ClassVar = {**HuggingFace.smallest, "hidden": 16, "heads": 4, "groups": 2}

    kind: ClassVar = "llama"
    sees: ClassVar = "before"
    tasks: ClassVar = ("classes", "next_token")
    fields: ClassVar = {
        "hidden": ("hidden_size",),
        "heads": ("num_attention_heads",),
        "groups": ("num_key_value_heads",),
        "head_width": ("head_dim",),
        "layers": ("num_hidden_layers",),
        "ffn": ("intermediate_size",),
        "positions": ("max_position_embeddings",),
        "pad": ("pad_token_id",),
        "attention_dropout": ("attention_dropout",),
    }
    defaults: ClassVar = {"use_cache": False}
    stack: ClassVar = "model.layers"
    branches: ClassVar = ("self_attn.o_proj", "mlp.down_proj")
    table: ClassVar = {
        r"embed_tokens\.weight": ("vocabulary", "hidden"),
        r"\w*norm\.weight": ("hidden",),
        r"q_proj\.weight": ("head", "hidden"),
        r"(k|v)_proj\.weight": ("kv", "hidden"),
        r"o_proj\.weight": ("hidden", "head"),
        r"(gate|up)_proj\.weight": ("ffn", "hidden"),
        r"down_proj\.weight": ("hidden", "ffn"),
        r"lm_head\.weight": ("vocabulary", "hidden"),
        r"score\.weight": ("classes", "hidden"),
    }

    @model_validator(mode="after")
    def _of_whole_groups(self) -> Self:
        if self.heads % self.groups:
            raise ValueError(f"groups: a number that divides the {self.heads} heads")
        if self._width % 2:
            raise ValueError(f"head_width: an even number, not {self._width} (default: hidden / heads)")
        return self

    @property
    def _width(self) -> int:
        """Features of a head."""
        return self.head_width or self.hidden // self.heads

    def axes(self, net: Net, block: str) -> dict[str, Axis]:
        group = net.axis(f"{block}.head", self.groups)
        return super().axes(net, block) | {
            "hidden": net.axis("hidden", self.groups).repeat(self.hidden // self.groups),
            "head": group.repeat(self.heads // self.groups * self._width),
            "kv": group.repeat(self._width),
        }

    def sizes(self, net: Net) -> dict[str, Any]:
        groups = self.axes(net, self.blocks[0][0])["kv"].size
        heads = {"heads": self.heads // self.groups * groups, "groups": groups, "head_width": self._width}
        return super().sizes(net) | heads
