"""Seconds per round, compared with a bare PyTorch loop that trains the same clients on the same cores.

    python scripts/bench_round.py            # cold start, compute-bound round, round without work
    python scripts/bench_round.py --server   # also: extract and fold, compared with a plain memory copy

The compute-bound round is FedAvg on 60,000 images of 1x28x28: 10 of 100 clients with 600 images each, one epoch of
batches of 20, SGD 0.05, the CNN of McMahan et al. (1,663,370 parameters), no evaluation. The bare loop has tensors in
PyTorch's default layout, its own optimiser and no Ray. Its processes persist, get the model through shared memory and
return one sum each. All processes run one thread. Compared programs take turns, and ratios are medians over turns, so
that a slower machine affects both sides. Use idle cores.
"""

import os
import time

STARTED = time.perf_counter()
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # otherwise Ray copies this folder for every worker
os.environ["OMP_NUM_THREADS"] = "1"

import argparse  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import statistics  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import ExitStack, contextmanager  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from peers.on_bare import Bare  # noqa: E402
from peers.on_rayfl import experiment  # noqa: E402
from peers.timing import in_turns, ratios, seconds_of  # noqa: E402
from peers.workloads import WORKLOADS, Workload  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import rayfl  # noqa: E402
from rayfl.core.fold import HolderMean  # noqa: E402
from rayfl.core.net import Net, params_of  # noqa: E402
from rayfl.core.submodel import Mask, Selection, prefix, random_subset, rolling  # noqa: E402
from rayfl.core.tensors import Params, nbytes, pack  # noqa: E402
from rayfl.engine.memory import keep_freed_memory  # noqa: E402
from rayfl.models.resnet import ResNet18  # noqa: E402

# rounds


@contextmanager
def on_rayfl(workload: Workload, actors: int) -> Iterator[Callable[[], float]]:
    """Yield a function that runs a round and returns its seconds, as measured by the driver."""
    with rayfl.start(experiment(workload, actors)) as session:
        rounds = iter(session)

        def work() -> None:
            next(rounds)

        yield lambda: seconds_of(work)


@contextmanager
def on_bare(workload: Workload, processes: int) -> Iterator[Callable[[], float]]:
    bare = Bare(workload, processes)
    try:
        yield bare.round
    finally:
        bare.crew.close()


# work of the server


def server_bandwidth(repeats: int) -> dict[str, float]:
    """Return the ratio of seconds: two plain copies of the submodel, over extracting it (into the outgoing buffer) and
    folding one update of it."""
    torch.set_num_threads(1)
    keep_freed_memory()
    model: Any = ResNet18(input=(3, 32, 32))
    whole, net = Net(model), Net(model, 0.75)
    params = params_of(whole.build())
    generator = torch.Generator().manual_seed(0)
    places = {n: (torch.rand(t.numel(), generator=generator) < 0.25).nonzero().flatten() for n, t in params.items()}
    selections = {
        "prefix": prefix(whole, net),
        "rolling window": rolling(whole, net, 40),
        "random subset": random_subset(whole, net, generator),
        "mask": Mask(whole, "mask", places),
    }
    return {name: _share_of_copy(selection, params, repeats) for name, selection in selections.items()}


def _share_of_copy(selection: Selection, params: Params, repeats: int) -> float:
    answer = {name: t.clone() for name, t in selection.take(params).items()}
    source = torch.ones(nbytes(answer) // 4)
    target, mean = torch.empty_like(source), HolderMean(params)

    def copy() -> None:
        target.copy_(source)
        target.copy_(source)

    def serve() -> None:
        pack(selection.take(params))
        mean.add(selection, answer, 1.0)

    turns = in_turns({"copy": lambda: seconds_of(copy), "serve": lambda: seconds_of(serve)}, repeats)
    return statistics.median(ratios(turns["copy"], turns["serve"]))


# measuring


def measure(rounds: int, server: bool) -> dict[str, Any]:
    import ray

    # CPUs of the client actors of all three runs
    ray.init(address="local", num_cpus=5, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with ExitStack() as stack:
        rayfl_two = stack.enter_context(on_rayfl(WORKLOADS["compute"], 2))
        rayfl_two()
        first = time.perf_counter() - STARTED
        contenders = {
            "bare 1": stack.enter_context(on_bare(WORKLOADS["compute"], 1)),
            "rayfl 1": stack.enter_context(on_rayfl(WORKLOADS["compute"], 1)),
            "bare 2": stack.enter_context(on_bare(WORKLOADS["compute"], 2)),
            "rayfl 2": rayfl_two,
        }
        turns = in_turns(contenders, rounds)
        turns |= in_turns({"no work 2": stack.enter_context(on_rayfl(WORKLOADS["noop"], 2))}, rounds)
    found: dict[str, Any] = {
        "first round done, seconds after start": first,
        "seconds per round": {name: statistics.median(t) for name, t in turns.items()},
        "fastest round": {name: min(t) for name, t in turns.items()},
        "rayfl over bare, 1 process": statistics.median(ratios(turns["rayfl 1"], turns["bare 1"])),
        "rayfl over bare, 2 processes": statistics.median(ratios(turns["rayfl 2"], turns["bare 2"])),
        "faster with 2 actors than with 1": statistics.median(ratios(turns["rayfl 1"], turns["rayfl 2"])),
        "bare loop: faster with 2 than with 1": statistics.median(ratios(turns["bare 1"], turns["bare 2"])),
    }
    ray.shutdown()
    if server:
        found["extract and fold, share of a plain copy's bandwidth"] = server_bandwidth(10 * rounds)
    return found


def show(found: dict[str, Any]) -> None:
    table = Table("quantity", "measured")
    for name, value in found.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, number in parts:
            table.add_row(f"{name}: {part}" if part else name, f"{number:.3f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measured turns (default: 7)")
    parser.add_argument("--quick", action="store_true", help="3 turns")
    parser.add_argument("--server", action="store_true", help="also measure extract and fold")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    found = measure(3 if options.quick else options.rounds, options.server)
    print(json.dumps(found, indent=2)) if options.json else show(found)


if __name__ == "__main__":
    main()
