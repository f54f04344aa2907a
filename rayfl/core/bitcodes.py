"""Codes of masks: what a 0/1 tensor costs on the wire, by really coding it.

`encode` comes close to its entropy. A code of n bits is the number of ones, in as few whole bytes as n asks for, and a
range code of the bits under Bernoulli(p), p the share of ones: together n H(p) + log2(n) bits, a few bytes more by
rounding, where H(p) = -p log2 p - (1 - p) log2 (1 - p).

    >>> bits = torch.arange(80_000) % 20 == 0
    >>> round(80_000 * entropy(1 / 20) / 8), len(encode(bits))
    (2864, 2871)

`encode_places` is fast, and for masks with few ones. After a byte that says which, it has the shorter of two: a bit an
element, or a byte a one, the number of zeros before it, where 255 is "255 zeros, go on".

    >>> len(encode_places(torch.arange(0, 80_000, 20), 80_000))
    4001
"""

import math

import numpy as np
import torch
from constriction import stream  # pyright: ignore[reportAttributeAccessIssue]

WORD = np.dtype("<u4")
"""What a range code is made of."""
BITS, GAPS = 0, 1
"""The first byte of a code of places."""
ON = 255
"""So many zeros, and no one yet."""


def entropy(p: float) -> float:
    """H(p) of a share of ones, in bits."""
    return -sum(q * math.log2(q) for q in (p, 1 - p) if q)


def encode(bits: torch.Tensor) -> torch.Tensor:
    """The code [bytes] uint8 of 0/1 `bits` of any shape and type."""
    symbols = bits.detach().reshape(-1).to("cpu", torch.int32).numpy()
    n, ones = len(symbols), int(symbols.sum(dtype=np.int64))
    encoder = stream.queue.RangeEncoder()
    if 0 < ones < n:
        encoder.encode(symbols, stream.model.Bernoulli(ones / n, perfect=False))
    code = ones.to_bytes(_head(n), "little") + encoder.get_compressed().astype(WORD).tobytes()
    return torch.frombuffer(bytearray(code), dtype=torch.uint8) if code else torch.empty(0, dtype=torch.uint8)


def decode(code: torch.Tensor, n: int) -> torch.Tensor:
    """The [n] bool bits of a code; a ValueError if it cannot be one of so many."""
    head, raw = _head(n), code.numpy().tobytes()
    ones = int.from_bytes(raw[:head], "little")
    if len(raw) < head or (len(raw) - head) % WORD.itemsize or ones > n:
        raise ValueError(f"code: given {len(raw)} bytes that are no code of {n} bits; decode with the n of encode")
    if ones in (0, n):
        return torch.full((n,), bool(ones))
    words = np.frombuffer(raw, WORD, offset=head).astype(np.uint32)
    symbols = stream.queue.RangeDecoder(words).decode(stream.model.Bernoulli(ones / n, perfect=False), n)
    return torch.from_numpy(symbols).bool()


def encode_places(places: torch.Tensor, size: int) -> torch.Tensor:
    """The code [bytes] uint8 of ascending `places` [k] int64 among `size`; as bits if both are as long."""
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
    """The places [k] int64 of a code; a ValueError if it cannot be one of places among so many."""
    kind, raw = code[:1].tolist(), code[1:].numpy()
    if kind == [BITS] and len(raw) == -(-size // 8):
        return torch.from_numpy(np.flatnonzero(np.unpackbits(raw, count=size).view(bool)))
    if kind == [GAPS]:
        ends = np.flatnonzero(raw != ON)
        places = raw.cumsum(dtype=np.int64)[ends] + np.arange(len(ends))
        if not len(places) or places[-1] < size:
            return torch.from_numpy(places)
    raise ValueError(f"code: given {len(code)} bytes that are no code of places among {size}; decode with that size")


def _head(n: int) -> int:
    """Bytes of a number from 0 to n."""
    return (n.bit_length() + 7) // 8
