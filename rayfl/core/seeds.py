"""Every random draw has an address.

`stream(seed, "cohort", round)` is a number that depends on nothing but its arguments, so a draw is the
same for any number of actors, in any order, and after a resume. Numbers are hashed, never added: seed 0
round 1 and seed 1 round 0 are unrelated. Two draws share an address only if they share their purpose, and `PURPOSES`
lists every purpose once.
"""

import contextlib
import hashlib
from collections.abc import Iterator

import numpy as np
import torch

PURPOSES = (
    "adapters",
    "batches",
    "capacity",
    "cohort",
    "deployed",
    "digits",
    "dropout",
    "ensemble",
    "export",
    "frozen",
    "hidden",
    "hold_out",
    "init",
    "judged",
    "local",
    "local_validation",
    "masks",
    "open",
    "partition",
    "pooled",
    "public",
    "refine",
    "scores",
    "search",
    "searcher",
    "statistics",
    "straggler",
    "student",
    "subset",
    "synthetic",
    "transforms",
    "variate",
    "width",
)
"""What rayfl draws. A user's package names its own with a colon: "package:purpose"."""


def stream(seed: int, purpose: str, *address: int | str) -> int:
    """A 63-bit seed for one purpose at one address, e.g. `stream(0, "cohort", round)`. A ValueError refuses a purpose
    that neither stands in `PURPOSES` nor has a colon."""
    if purpose not in PURPOSES and ":" not in purpose:
        raise ValueError(f"purpose: given {purpose!r}; allowed: package:purpose, or one of {', '.join(PURPOSES)}")
    text = "/".join(map(str, (seed, purpose, *address)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_generator(seed: int, purpose: str, *address: int | str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(stream(seed, purpose, *address)))


def torch_generator(seed: int, purpose: str, *address: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(stream(seed, purpose, *address))


@contextlib.contextmanager
def torch_scope(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seeds torch's global generators inside the block and puts the old state back after it.

    For what takes no generator: initialisation by layer constructors, dropout.
    """
    device = torch.device(device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed would seed every GPU, and not only those whose state is put back
        torch.default_generator.manual_seed(seed)
        for gpu in devices:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield
