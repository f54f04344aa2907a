"""Server cost of finding the largest elements, compared with common algorithms, and of sending them.

    python scripts/bench_selection.py          # a ResNet-18, 11 million parameters
    python scripts/bench_selection.py --large  # also RoBERTa-base, 124 million

Thresholds: the exact k-th largest |x| over all maskable tensors, for 1/4, 1/16 and 1/64 of their elements, by

    sort        all of |x|, once
    topk        torch.topk of the largest k, which contains the others
    partition   numpy.partition at the three positions
    ours        `threshold_for`: counting the bits' high half, then the low half of the few remaining elements

Cost of a round in CPU seconds: `select`, the thresholds of four capacities (including 1) and the positions that reach
them; and `extract`, the payload of one client of each. Bytes: values and the codes of their positions. One thread, in a
process that keeps freed memory like the server. Compared functions take turns, and ratios are medians over turns, so
that a slower machine affects all of them.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from bench_round import show
from peers.timing import cpu_seconds_of, in_turns, ratios

from rayfl.core.net import Net
from rayfl.core.submodel import Mask
from rayfl.core.tensors import Params, nbytes
from rayfl.engine.memory import keep_freed_memory
from rayfl.methods.base import Client, Task
from rayfl.methods.masks.base import Masked
from rayfl.methods.masks.fiarse import FIARSE
from rayfl.methods.masks.pruning_greedy import PruningGreedy
from rayfl.methods.masks.thresholds import threshold_for
from rayfl.metrics import label
from rayfl.models.base import Model
from rayfl.models.huggingface import Roberta
from rayfl.models.resnet import ResNet18
from rayfl.training.settings import Training

SHARES = (1 / 4, 1 / 16, 1 / 64)


def by_sort(params: Params) -> list[float]:
    ordered = _magnitudes(params).sort(descending=True).values
    return [float(ordered[k - 1]) for k in _counts(params)]


def by_topk(params: Params) -> list[float]:
    counts = _counts(params)
    top = _magnitudes(params).topk(max(counts)).values
    return [float(top[k - 1]) for k in counts]


def by_partition(params: Params) -> list[float]:
    magnitudes = _magnitudes(params).numpy()
    places = [len(magnitudes) - k for k in _counts(params)]
    parted = np.partition(magnitudes, places)
    return [float(parted[place]) for place in places]


def ours(params: Params) -> list[float]:
    return [threshold_for(params, share) for share in SHARES]


def _magnitudes(params: Params) -> torch.Tensor:
    return torch.cat([t.reshape(-1) for t in params.values()]).abs_()


def _counts(params: Params) -> list[int]:
    return [math.floor(share * sum(t.numel() for t in params.values())) for share in SHARES]


WAYS: dict[str, Callable[[Params], list[float]]] = {
    "sort": by_sort,
    "topk": by_topk,
    "partition": by_partition,
    "ours": ours,
}


def roberta() -> Masked:
    """Return FIARSE for AG News: RoBERTa-base, thresholds for word embeddings, position embeddings and the encoder."""
    words, positions, types = (f"roberta.embeddings.{name}_embeddings" for name in ("word", "position", "token_type"))
    shards = ((words,), (positions,), ("roberta.encoder",))
    fiarse = FIARSE(embeddings=True, whole=("classifier", types), threshold="shard", shards=shards)
    return bound(fiarse, Roberta(task="classes", classes=4, ids=50265, length=128))


def bound(method: Masked, model: Model) -> Masked:
    nets = dict.fromkeys((1.0, *SHARES), Net(model))
    return method.bind(Task(model, Training(), nets, 1.0, clients=4, metric="params"))


def thresholds(params: Params, repeats: int) -> dict[str, Any]:
    assert len({tuple(way(params)) for way in WAYS.values()}) == 1

    def seconds_by(way: Callable[[Params], list[float]]) -> float:
        def find() -> None:
            way(params)

        return cpu_seconds_of(find)

    turns = in_turns({name: partial(seconds_by, way) for name, way in WAYS.items()}, repeats)
    return {
        "CPU seconds": {name: statistics.median(t) for name, t in turns.items()},
        "over ours": {name: statistics.median(ratios(t, turns["ours"])) for name, t in turns.items() if name != "ours"},
    }


def round_of_a_server(method: Masked, repeats: int) -> dict[str, Any]:
    """Return the CPU seconds of the server's work before it sends payloads, and the payloads' MB."""
    state, values, places, selected = method.init(), {}, {}, {}

    def select() -> None:
        for id, capacity in enumerate(method.task.nets):
            selection = method.select(state, Client(id, capacity, 0))
            assert isinstance(selection, Mask)
            selected[capacity] = selection, [selection.places[name] for name in selection.places]

    def extract() -> None:
        for capacity, (selection, _) in selected.items():
            values[capacity] = nbytes(method.extract(state, selection)) / 1e6
            places[capacity] = selection.nbytes / 1e6

    turns = in_turns({"select": lambda: cpu_seconds_of(select), "extract": lambda: cpu_seconds_of(extract)}, repeats)
    return {
        "CPU seconds per round": {name: statistics.median(seconds) for name, seconds in turns.items()},
        "MB down": {label(c): values[c] + places[c] for c in values},
        "of it positions": {label(c): places[c] for c in SHARES},
    }


def measure(repeats: int, large: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    keep_freed_memory()
    methods = {"ResNet-18": bound(PruningGreedy(), ResNet18(input=(3, 32, 32)))}
    if large:
        methods["RoBERTa"] = roberta()
    found: dict[str, Any] = {}
    for name, method in methods.items():
        params = method.init()["params"]
        weights = {name: params[name] for names in method.groups for name in names if params[name].dim() > 1}
        results = round_of_a_server(method, repeats) | thresholds(weights, repeats)
        found |= {f"{name}, {what}": value for what, value in results.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="measured turns (default: 7)")
    parser.add_argument("--large", action="store_true", help="also measure 124 million elements")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    found = measure(options.repeats, options.large)
    print(json.dumps(found, indent=2)) if options.json else show(found)


if __name__ == "__main__":
    main()
