"""How long a round takes, beside a bare PyTorch loop that trains the same clients on the same cores.

    python scripts/bench_round.py            # cold start, compute-bound round, round without work
    python scripts/bench_round.py --server   # also: extract and fold, beside a plain memory copy

The compute-bound round is FedAvg on 60,000 images of 1x28x28: 10 of 100 clients with 600 images each, one
epoch of batches of 20, SGD 0.01, the CNN of McMahan et al. (1,663,370 parameters), no evaluation. The bare
loop has its tensors in PyTorch's default layout, its own optimiser and no Ray; its processes stay up, get the
model through shared memory and answer one sum each. All processes run one thread. What is compared takes
turns, and ratios are medians over turns: a machine that slows down slows both sides. Give it idle cores.
"""

import os
import time

STARTED = time.perf_counter()
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # or Ray copies this folder for every worker
os.environ["OMP_NUM_THREADS"] = "1"

import argparse  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import multiprocessing  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import nn  # noqa: E402

from rayfl.engine.memory import keep_freed_memory  # noqa: E402
from rayfl.experiment import Experiment, read_experiment  # noqa: E402
from rayfl.fold import HolderMean  # noqa: E402
from rayfl.models.resnet import ResNet18  # noqa: E402
from rayfl.net import Net, params_of  # noqa: E402
from rayfl.submodel import Mask, Selection, prefix, random_subset, rolling  # noqa: E402
from rayfl.tensors import Params, nbytes, pack  # noqa: E402

CLIENTS, COHORT, BATCH, LR = 100, 10, 20, 0.01


def experiment(epochs: int) -> Experiment:
    """The compute-bound round; with 0 epochs, the same round without its work."""
    return read_experiment(
        {
            "rounds": 10**6,
            "data": {"name": "synthetic", "samples": 60_000, "test_samples": 100, "shape": (1, 28, 28)},
            "partition": "iid",
            "clients": {"count": CLIENTS, "cohort": COHORT},
            "model": "mcmahan_cnn",
            "training": {"epochs": epochs, "batch_size": BATCH, "lr": LR},
            "method": "fedavg",
            "evaluation": {"every": 10**6, "holdout": 0.0, "clients": False},
        },
        "bench_round",
    )


# rayfl on Ray


class Rayfl:
    """A server actor with its client actors, kept up over several experiments."""

    def __init__(self, actors: int):
        import ray
        from ray.util.placement_group import placement_group

        from rayfl.engine.server import ServerActor

        group = placement_group([{"CPU": 1}] * actors)
        self.get = ray.get
        self.server: Any = ServerActor.remote(group, list(range(actors)))  # pyright: ignore
        self.folder = tempfile.TemporaryDirectory(prefix="bench_round_")

    def load(self, what: Experiment, arrays) -> None:
        self.get(self.server.load.remote(what, [arrays], self.folder.name))

    def round(self) -> float:
        """Seconds a round, as the driver sees them."""
        started = time.perf_counter()
        lines = self.get(self.server.step.remote())
        return (time.perf_counter() - started) / len(lines)


# the bare loop


class Bare:
    """FedAvg on so many processes and nothing else."""

    def __init__(self, processes: int):
        spawn = multiprocessing.get_context("spawn")
        self.flat = nn.utils.parameters_to_vector(bare_module().parameters()).detach().share_memory_()
        self.sums = torch.zeros(processes, len(self.flat)).share_memory_()
        self.pipes, self.processes = [], []
        for i in range(processes):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=bare_worker, args=(theirs, self.flat, self.sums[i]), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def round(self) -> float:
        started = time.perf_counter()
        for i, pipe in enumerate(self.pipes):
            pipe.send(list(range(i, COHORT, len(self.pipes))))
        for pipe in self.pipes:
            pipe.recv()
        self.flat.copy_(self.sums.sum(0).div_(COHORT))
        return time.perf_counter() - started

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


def bare_module() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def bare_worker(pipe, flat: torch.Tensor, total: torch.Tensor) -> None:
    """Trains the clients that it is told, one after another in one network, and sums what comes out."""
    torch.set_num_threads(1)
    what, module = experiment(1), bare_module()
    arrays = what.data.arrays()
    train = what.federate(arrays).train
    pixels, labels = (torch.from_numpy(arrays.train[name]) for name in ("x", "y"))
    pipe.send("ready")
    while True:
        clients = pipe.recv()
        total.zero_()
        for client in clients:
            rows = torch.from_numpy(train[client].astype("int64"))
            x, y = (pixels[rows].float() / 255 - 0.5) / 0.23, labels[rows]
            nn.utils.vector_to_parameters(flat.clone(), module.parameters())
            optimizer = torch.optim.SGD(module.parameters(), LR)
            for batch in torch.randperm(len(y)).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(module(x[batch]), y[batch]).backward()
                optimizer.step()
            total += nn.utils.parameters_to_vector(module.parameters()).detach()
        pipe.send("done")


# the server's own work


def server_bandwidth(repeats: int) -> dict[str, float]:
    """Seconds of a plain copy of the submodel, once to go out and once to come in, over the seconds of
    extracting it (into the buffer that goes out) and folding an answer of it."""
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


def seconds_of(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_turns(contenders: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """What each returned, A B C A B C ..., after one turn that does not count."""
    turns: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(repeats + 1):
        for name, contender in contenders.items():
            seconds = contender()
            if i:
                turns[name].append(seconds)
    return turns


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Turn by turn."""
    return [a / b for a, b in zip(above, below, strict=True)]


def measure(rounds: int, server: bool) -> dict[str, Any]:
    import ray

    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    work = experiment(1)
    arrays = ray.put(work.data.arrays())
    two = Rayfl(2)
    two.load(work, arrays)
    two.round()
    first = time.perf_counter() - STARTED
    one = Rayfl(1)
    one.load(work, arrays)
    bare_one, bare_two = Bare(1), Bare(2)
    turns = in_turns(
        {"bare 1": bare_one.round, "rayfl 1": one.round, "bare 2": bare_two.round, "rayfl 2": two.round}, rounds
    )
    bare_one.close()
    bare_two.close()
    two.load(experiment(0), arrays)
    turns |= in_turns({"no work 2": two.round}, rounds)
    found: dict[str, Any] = {
        "first round done, seconds after start": first,
        "seconds a round": {name: statistics.median(t) for name, t in turns.items()},
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
    table = Table("what", "measured")
    for name, value in found.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, number in parts:
            table.add_row(f"{name}: {part}" if part else name, f"{number:.3f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns that count (7)")
    parser.add_argument("--quick", action="store_true", help="3 turns")
    parser.add_argument("--server", action="store_true", help="also extract and fold")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    found = measure(3 if options.quick else options.rounds, options.server)
    print(json.dumps(found, indent=2)) if options.json else show(found)


if __name__ == "__main__":
    main()
