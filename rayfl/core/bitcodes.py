"""Binary codes of 0/1 masks, used to send them and to count their bytes.

`encode` comes close to the entropy. A code of n bits contains the number of ones, in as few bytes as n needs, and a
range code of the bits under Bernoulli(p), where p is the fraction of ones: n H(p) + log2(n) bits in total, plus a few
bytes of rounding, where H(p) = -p log2 p - (1 - p) log2 (1 - p).

    >>> bits = torch.arange(80_000) % 20 == 0
    >>> round(80_000 * entropy(1 / 20) / 8), len(encode(bits))
    (2864, 2871)

`encode_places` is fast, and meant for masks with few ones. Its first byte names the shorter of two formats: one bit per
element, or one byte per one, with the number of zeros before it (255: 255 zeros, continued in the next byte).

    >>> len(encode_places(torch.arange(0, 80_000, 20), 80_000))
    4001
"""

import math

import numpy as np
import torch
from constriction import stream  # pyright: ignore[reportAttributeAccessIssue]

WORD = np.dtype("<u4")
"""Unit of a range code."""
BITS, GAPS = 0, 1
"""First byte of a code of places: one bit per element, or gaps between ones."""
ON = 255
"""Gap byte: 255 zeros, continued in the next byte."""


def entropy(p: float) -> float:
    """Return H(p) in bits, for a fraction p of ones."""
    return -sum(q * math.log2(q) for q in (p, 1 - p) if q)


def encode(bits: torch.Tensor) -> torch.Tensor:
    """Return the code [bytes] uint8 of 0/1 `bits` of any shape and type."""
    symbols = bits.detach().reshape(-1).to("cpu", torch.int32).numpy()
    n, ones = len(symbols), int(symbols.sum(dtype=np.int64))
    encoder = stream.queue.RangeEncoder()
    if 0 < ones < n:
        encoder.encode(symbols, stream.model.Bernoulli(ones / n, perfect=False))
    code = ones.to_bytes(_head(n), "little") + encoder.get_compressed().astype(WORD).tobytes()
    return torch.frombuffer(bytearray(code), dtype=torch.uint8) if code else torch.empty(0, dtype=torch.uint8)


def decode(code: torch.Tensor, n: int) -> torch.Tensor:
    """Return the [n] bool bits of a code; a ValueError if it is not a code of n bits."""
    head, raw = _head(n), code.numpy().tobytes()
    ones = int.from_bytes(raw[:head], "little")
    if len(raw) < head or (len(raw) - head) % WORD.itemsize or ones > n:
        raise ValueError(f"code: {len(raw)} bytes are not a code of {n} bits. Hint: decode with the n of encode")
    if ones in (0, n):
        return torch.full((n,), bool(ones))
    words = np.frombuffer(raw, WORD, offset=head).astype(np.uint32)
    symbols = stream.queue.RangeDecoder(words).decode(stream.model.Bernoulli(ones / n, perfect=False), n)
    return torch.from_numpy(symbols).bool()


def encode_places(places: torch.Tensor, size: int) -> torch.Tensor:
    """Return the code [bytes] uint8 of ascending `places` [k] int64 among `size`; as bits if both are equally long."""
    ones, in_bits = places.numpy(), -(-size // 8)
    if len(ones) < in_bits:
        skipped, gaps = np.divmod(np.diff(ones, prepend=-1) - 1, ON)
        in_gaps = len(ones) + int(skipped.sum())
        if in_gaps < in_bits:
            code = np.full(1 + in_gaps, ON, np.uint8)
            code[0] = GAPS
            code[np.arange(1, 1 + len(ones)) + skipped.cumsum()] = gaps
            return torch.from_numpy(code)
    bits = np.zeros(size, bool)
    bits[ones] = True
    return torch.from_numpy(np.concatenate([np.array([BITS], np.uint8), np.packbits(bits)]))


def decode_places(code: torch.Tensor, size: int) -> torch.Tensor:
    """Return the places [k] int64 of a code; a ValueError if it is not a code of places among `size`."""
    kind, raw = code[:1].tolist(), code[1:].numpy()
    if kind == [BITS] and len(raw) == -(-size // 8):
        return torch.from_numpy(np.flatnonzero(np.unpackbits(raw, count=size).view(bool)))
    if kind == [GAPS]:
        ends = np.flatnonzero(raw != ON)
        places = raw.cumsum(dtype=np.int64)[ends] + np.arange(len(ends))
        if not len(places) or places[-1] < size:
            return torch.from_numpy(places)
    raise ValueError(f"code: {len(code)} bytes are not a code of places among {size}. Hint: decode with the same size")


def _head(n: int) -> int:
    """Return the number of bytes of an integer from 0 to n."""
    return (n.bit_length() + 7) // 8
