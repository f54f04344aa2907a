"""Secure aggregation, simulated: of a group of clients, the server learns the sum of the changes and no single change.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017,
https://doi.org/10.1145/3133956.3133982. Clients with equal selections form a group; m is their number. Client k sends
its change d_k (weight 1) in fixed point, masked by random integers that cancel in the sum:

    q_k  =  trunc(d_k / step), clamped to +-(2^(bits-1) - 1);    step = limit / 2^(bits-1)
    sum of all q_k modulo 2^(bits + ceil(log2 m)), which no sum of m such integers exceeds

1. The masks are not drawn, because they cancel: each client sends q_k step, and these are summed as any updates, in
   float32: exactly if bits + ceil(log2 m) <= 24, otherwise rounded.
   `tests/training/test_secure.py` compares with the masked integers.
2. Rounding is towards 0, so that no norm grows and a clipping norm still holds after it.
3. Traffic of a client, with n elements, counted from the messages of the protocol if nobody drops out. It sends two
   public keys of a bytes, two shares of secrets of b bytes for every other client and, to unmask, one share per client;
   a = b = 32:

    up      n (bits + ceil(log2 m)) / 8  +  2 a  +  (3 m - 2) b
    down    2 (m - 1) (a + b)  +  m / 8, the list of those that sent

4. A masked integer has one size: compression before it saves nothing and is refused.
"""

from dataclasses import dataclass

from pydantic import Field

from rayfl.config import Config
from rayfl.core.tensors import Params

KEY = 32
"""Bytes of a public key."""
SHARE = 32
"""Bytes of a share of a secret."""


class SecureAggregation(Config):
    """The `updates.secure_aggregation:` section."""

    bits: int = Field(default=16, ge=2, le=24)
    """Bits of one client's element, with its sign."""
    limit: float = Field(default=1.0, gt=0)
    """Largest magnitude of an element. Larger ones are clamped, and counted as `overflows`."""

    def encoded(self, change: Params) -> tuple[Params, int]:
        """Return the change in fixed point (q step), and the number of clamped elements."""
        most = 2 ** (self.bits - 1)
        step = self.limit / most
        levels = {name: (t / step).trunc() for name, t in change.items()}
        overflows = sum(int((t.abs() >= most).sum()) for t in levels.values())
        return {name: t.clamp(1 - most, most - 1) * step for name, t in levels.items()}, overflows

    def bytes_up(self, elements: int, group: int) -> int:
        """Return the bytes that a client of a group sends."""
        bits = self.bits + (group - 1).bit_length()
        return -(-elements * bits // 8) + 2 * KEY + (3 * group - 2) * SHARE

    def bytes_down(self, group: int) -> int:
        """Return the bytes that it receives beside the model."""
        return 2 * (group - 1) * (KEY + SHARE) + -(-group // 8)


@dataclass(frozen=True)
class Protection:
    """Protection of the changes that the clients of one group send."""

    clip: float | None = None
    """Clipping norm; then clients send changes of weight 1 in place of parameters (`rayfl.training.privacy`)."""
    secure: SecureAggregation | None = None
    group: int = 1
    """Number of clients whose sum the server learns."""

    @property
    def is_active(self) -> bool:
        return self.clip is not None or self.secure is not None
