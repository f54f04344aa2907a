"""Time of a training step on text, compared with a bare PyTorch loop.

    python scripts/bench_text.py            # HeteroFL's transformer at level d, WikiText-2's vocabulary
    python scripts/bench_text.py --level a

Both train the same network on one row of tokens as in HeteroFL: batches of 1 x 64 tokens, 15 % of them masked, logits
of tokens not in the row set to 0, gradient norm clipped, SGD with momentum and weight decay. rayfl runs a whole visit
of a client, `method.local_update`: loading weights, batches, steps, update; and the same for a client with only the
rows of its own tokens (`vocab: own`), which gives the same weights. The bare loop continues with its weights. Times are
CPU seconds. All take turns, and ratios are medians over turns. One thread.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse  # noqa: E402
import json  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Literal  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from bench_step import show  # noqa: E402
from peers.timing import cpu_seconds_of, in_turns, over  # noqa: E402
from torch import nn  # noqa: E402

from rayfl.core.net import Net  # noqa: E402
from rayfl.core.tensors import pack, unpack  # noqa: E402
from rayfl.data.goal import MaskedTokens  # noqa: E402
from rayfl.data.samples import ClientData  # noqa: E402
from rayfl.data.tokens import Hidden  # noqa: E402
from rayfl.engine.memory import keep_freed_memory  # noqa: E402
from rayfl.methods.base import Client, Task, Visit  # noqa: E402
from rayfl.methods.width.heterofl import HeteroFL  # noqa: E402
from rayfl.models.transformer import HeteroFLTransformer  # noqa: E402
from rayfl.training.settings import Training  # noqa: E402

LEVELS = {"a": 1.0, "b": 1 / 2, "c": 1 / 4, "d": 1 / 8, "e": 1 / 16}
TRAINING = Training(batch_size=1, lr=0.1, momentum=0.9, weight_decay=5e-4, clip=1)
DISTINCT = 3774
"""Number of distinct tokens in a row of WikiText-2, the mean over its 100 rows."""


def rows(model: HeteroFLTransformer, steps: int) -> torch.Tensor:
    """Return the tokens [steps, 64] of a client."""
    generator = torch.Generator().manual_seed(0)
    known = torch.randperm(model.classes, generator=generator)[:DISTINCT]
    return known[torch.randint(DISTINCT, (steps, model.length), generator=generator)].int()


def ours(
    model: HeteroFLTransformer, width: float, steps: int, vocab: Literal["full", "own"] = "full"
) -> Callable[[], float]:
    task = Task(model, TRAINING, {1.0: Net(model), width: Net(model, width)}, 1.0, clients=100)
    method = HeteroFL(vocab=vocab).bind(task)
    prepare = Hidden("stored", model.classes, model.ids - 1)
    data = ClientData({"x": rows(model, steps)}, prepare, MaskedTokens(model.classes))
    state, client = method.init(), Client(0, width, 0, lambda: data.present)
    selection = method.select(state, client)
    payload = unpack(pack(method.extract(state, selection)))
    visit = Visit(client, selection, data, None, 7)
    return lambda: cpu_seconds_of(lambda: method.local_update(payload, visit))


def bare(model: HeteroFLTransformer, width: float, steps: int) -> Callable[[], float]:
    module = Net(model, width, scale=width).build()
    optimizer = torch.optim.SGD(module.parameters(), TRAINING.lr, TRAINING.momentum, weight_decay=TRAINING.weight_decay)
    data = rows(model, steps).long()
    absent = torch.ones(model.classes, dtype=torch.bool)
    absent[data.flatten()] = False

    def train() -> None:
        for y in data.split(1):
            x = torch.where(torch.rand(y.shape) < 0.15, model.classes, y)
            logits = module(x).masked_fill(absent, 0)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1)
            optimizer.step()

    return lambda: cpu_seconds_of(train)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--level", choices=LEVELS, default="d", help="HeteroFL's width (default: d)")
    parser.add_argument("--steps", type=int, default=40, help="steps per turn (default: 40)")
    parser.add_argument("--turns", type=int, default=9, help="measured turns (default: 9)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    model, width = HeteroFLTransformer(), LEVELS[options.level]
    sides = {
        "bare loop": bare(model, width, options.steps),
        "rayfl": ours(model, width, options.steps),
        "rayfl, own tokens": ours(model, width, options.steps, "own"),
    }
    table = over(in_turns(sides, options.turns), "bare loop", options.steps)
    if options.json:
        print(json.dumps(table, indent=2))
    else:
        show(f"Level {options.level}", table)


if __name__ == "__main__":
    main()
