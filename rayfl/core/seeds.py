"""Random seeds by address.

`stream(seed, "cohort", round)` depends on its arguments only, so that draws do not depend on the number of actors, the
order of execution or a resume. Arguments are hashed, not added: seed 0 round 1 and seed 1 round 0 are unrelated.
`PURPOSES` lists all purposes, so that no two kinds of draws share an address.
"""

import contextlib
import hashlib
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch

PURPOSES = tuple(
    """
    adapters asked availability batches capacity coefficients cohort deployed device digits dropout ensemble export
    frozen hidden hold_out init judged local local_validation masks noise open partition personal pooled public read
    refine scores search searcher statistics straggler student subset synthetic transforms variate visit width
    """.split()
)
"""Purposes of random draws in rayfl. Other packages use names with a colon: "package:purpose"."""


def stream(seed: int, purpose: str, *address: int | str) -> int:
    """Return a 63-bit seed for a purpose and an address, e.g. `stream(0, "cohort", round)`. A ValueError if the purpose
    is not in `PURPOSES` and has no colon."""
    if purpose not in PURPOSES and ":" not in purpose:
        raise ValueError(
            f"purpose: {purpose!r} is not valid. Allowed: package:purpose, or one of {', '.join(PURPOSES)}"
        )
    text = "/".join(map(str, (seed, purpose, *address)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_generator(seed: int, purpose: str, *address: int | str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(stream(seed, purpose, *address)))


def torch_generator(seed: int, purpose: str, *address: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(stream(seed, purpose, *address))


PROCESS = threading.RLock()
"""Held while state of the whole process is changed or used: torch's generators and threads, cached modules."""


@contextlib.contextmanager
def torch_scope(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch's global generators inside the block, and restore their state afterwards. Used for functions without
    a generator argument: initialisation of layers, dropout. Other threads wait for the block's end."""
    device = torch.device(device)
    devices = [device] if device.type == "cuda" else []
    with PROCESS, torch.random.fork_rng(devices=devices):
        # torch.manual_seed would also seed GPUs whose state is not restored
        torch.default_generator.manual_seed(seed)
        for gpu in devices:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield


@contextlib.contextmanager
def global_scope() -> Iterator[Callable[[int], None]]:
    """Restore the global generators of torch (CPU), numpy and Python after the block. It gets a function that seeds
    them all. Used for code of users that draws from them: Datasets and their transforms."""

    def seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    with torch_scope(0):
        of_numpy, of_python = np.random.get_state(), random.getstate()
        try:
            yield seed
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)
