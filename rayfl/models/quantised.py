"""Frozen linear layers whose weights have 8 or 4 bits, for the bases of large language models (extra `quantised`).

    int8    int8 with a scale per row, and inputs of large magnitude in 16 bits (LLM.int8(), Dettmers et al., NeurIPS
            2022, arXiv 2208.07339)
    nf4     4 bits with a scale per block of 64 weights (QLoRA, Dettmers et al., NeurIPS 2023, arXiv 2305.14314),
            without its second quantisation, of the scales

The library bitsandbytes quantises and multiplies, on CPUs and GPUs, as it does for transformers (`load_in_8bit` and
`load_in_4bit`).
"""

import functools
import importlib.util
import logging
from types import ModuleType
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.tensors import Params

Bits = Literal["int8", "nf4"]
BLOCK = 64
"""Weights per scale of nf4."""
OUTLIER = 6.0
"""Magnitude from which inputs of int8 are in 16 bits, as in the paper and transformers."""


def require(dtype: str) -> None:
    """Raise ConfigError for bits if the library is absent."""
    if dtype in get_args(Bits) and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"dtype: {dtype} needs the package bitsandbytes. Hint: uv sync --extra quantised")


class Quantised(nn.Linear):
    """Linear layer [..., in] -> [..., out] with the buffers `codes` and `scales` in place of its weight, and gradients
    for its input only. `weight` has the shape and the data type of its result, and no memory."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, shape: tuple[int, int], bias: torch.Tensor | None, bits: Bits, dtype: torch.dtype):
        nn.Module.__init__(self)
        self.out_features, self.in_features, self.bits = *shape, bits
        self.weight: Any = torch.empty(shape, dtype=dtype, device="meta")
        self.bias: Any = bias
        size = self.weight.numel()
        codes, scales = ((-(size // -2), 1), -(size // -BLOCK)) if bits == "nf4" else (shape, shape[0])
        self.register_buffer(
            "codes", torch.empty(codes, dtype=torch.uint8 if bits == "nf4" else torch.int8, device="meta")
        )
        self.register_buffer("scales", torch.empty(scales, device="meta"))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.is_meta:
            return F.linear(input, self.weight, self.bias)
        bnb = _library()
        if self.bits == "nf4":
            state = _state(self.scales, self.weight.shape, self.weight.dtype)
            return bnb.matmul_4bit(input, self.codes.t(), quant_state=state, bias=self.bias)
        state = bnb.MatmulLtState(CB=self.codes, SCB=self.scales)
        state.has_fp16_weights, state.threshold = False, OUTLIER
        return bnb.matmul(input, self.codes, bias=self.bias, state=state)


def packed(weight: torch.Tensor, bits: Bits) -> Params:
    """Return the buffers of a layer with this weight [out, in]."""
    functional = _library().functional
    if bits == "nf4":
        codes, state = functional.quantize_4bit(
            weight.contiguous(), blocksize=BLOCK, quant_type=bits, compress_statistics=False
        )
        return {"codes": codes, "scales": state.absmax}
    codes, scales, _ = functional.int8_vectorwise_quant(weight.half().contiguous())
    return {"codes": codes, "scales": scales}


def unpacked(buffers: Params, shape: tuple[int, ...], bits: Bits, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [out, in] of these buffers."""
    codes, scales = buffers["codes"], buffers["scales"]
    if bits == "nf4":
        return _library().functional.dequantize_4bit(codes, _state(scales, shape, dtype))
    return (codes.float() * (scales[:, None] / 127)).to(dtype)


def _state(scales: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    functional = _library().functional
    return functional.QuantState(
        absmax=scales,
        shape=torch.Size(shape),
        code=_table(scales.device),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )


@functools.cache
def _table(device: torch.device) -> torch.Tensor:
    return _library().functional.get_4bit_type("nf4", device=device)


@functools.cache
def _library() -> ModuleType:
    # it reports every call with inputs of bf16, and kernels that it does not need
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes

    return bitsandbytes
