"""Time of a small client's step on a GPU: with separate launches, or recorded as one CUDA graph.

    python scripts/bench_gpu.py             # on a CUDA device; about ten minutes
    python scripts/bench_gpu.py --short     # fewer networks, batches, turns; no torch.compile; an estimated 2 minutes
    python scripts/bench_gpu.py --dry-run   # test of the code on a CPU with tiny networks, not a measurement

Not yet run on a GPU. It first checks that recorded steps equal the others bit for bit, and that a padded batch equals
the smaller one except for the order of sums. Then it prints microseconds per step and per change of clients, by
network, batch size and implementation, and clients per second of several processes on one device.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peers.timing import in_turns
from rich.console import Console
from rich.table import Table
from torch import nn

from rayfl.core import norms
from rayfl.core.joined import parameters_of
from rayfl.core.net import Net, cached_module, load, params_of
from rayfl.core.tensors import as_vector
from rayfl.data.goal import Classes
from rayfl.models import MODELS
from rayfl.training.settings import Training, precise
from rayfl.training.stacked import Stacked
from rayfl.training.steps import Objective, Steps, fit, static_steps
from rayfl.training.together import Ask

GOAL, LR, TOGETHER = Classes(10), 0.01, (8, 32)
OBJECTIVE = Objective(GOAL, "none", None)
Step = Callable[[], Any]


@dataclass(frozen=True)
class Scale:
    """Amount of measurement."""

    nets: Mapping[str, Net]
    batches: tuple[int, ...]
    processes: tuple[int, ...]
    steps: int
    """Steps per turn."""
    turns: int
    clients: int
    """Clients per process."""
    compiled: bool = False
    """Measure torch.compile too, which takes most of the time."""


FAMILIES: Any = MODELS
RESNET = FAMILIES["resnet18"](input=(3, 32, 32))
FULL = Scale(
    {
        "mcmahan_cnn": Net(FAMILIES["mcmahan_cnn"]()),
        "resnet18": Net(RESNET),
        "resnet18, 1/2": Net(RESNET, 1 / 2),
        "resnet18, 1/8": Net(RESNET, 1 / 8),
    },
    (10, 20, 50),
    (1, 2, 3, 4, 8),
    50,
    5,
    40,
    compiled=True,
)
SHORT = Scale(
    {name: FULL.nets[name] for name in ("mcmahan_cnn", "resnet18", "resnet18, 1/8")}, (10, 50), (1, 4), 30, 3, 10
)
DRY = Scale(
    {
        "digits_cnn": Net(FAMILIES["digits_cnn"](), 1 / 16),
        "group norm": Net(FAMILIES["digits_cnn"](norm="group"), 1 / 4),
    },
    (4,),
    (1, 2),
    2,
    1,
    2,
)


def batch_of(net: Net, size: int, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [B, C, H, W] in channels-last memory format, as from `Images`, and labels [B]."""
    generator = torch.Generator().manual_seed(seed)
    channels, height, width = net.model.input  # pyright: ignore[reportAttributeAccessIssue]
    x = torch.randn(size, height, width, channels, generator=generator).permute(0, 3, 1, 2)
    return x.to(device), torch.randint(10, (size,), generator=generator).to(device)


# implementations of a step


def ways(net: Net, size: int, device: torch.device, compiled: bool = False) -> dict[str, Step]:
    """Return name -> function for one step, each with its own network. `compiled`: with torch.compile."""
    batch, training = batch_of(net, size, device), Training(batch_size=size)

    def plain(**options: Any) -> Step:
        module = net.build().to(device)
        optimizer = torch.optim.SGD(module.parameters(), LR, **options)
        return lambda: step_of(module, optimizer, batch)

    eager = Steps(net.build().to(device), OBJECTIVE, training)
    recorded = static_steps(net.build().to(device), OBJECTIVE, training)
    found = {
        "SGD, tensor by tensor": plain(foreach=False),
        "SGD, foreach": plain(foreach=True),
        "SGD, fused": plain(fused=True),
        "rayfl, not recorded": lambda: eager.run(*batch, LR),
        "rayfl, recorded": lambda: recorded.run(*batch, LR),
    }
    found |= {f"{n} together, per client": stacked_step(net.build().to(device), batch, n) for n in TOGETHER}
    if compiled:
        module = net.build().to(device)
        faster, optimizer = torch.compile(module, mode="reduce-overhead"), torch.optim.SGD(module.parameters(), LR)
        found["compile, reduce-overhead"] = lambda: step_of(faster, optimizer, batch)
    return found


def step_of(module: Callable, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    optimizer.zero_grad()
    F.cross_entropy(module(batch[0]), batch[1]).backward()
    optimizer.step()


def stacked_step(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], clients: int) -> Step:
    """Return a function that makes a step of several clients side by side."""
    parameters = list(parameters_of(module.train()).values())
    values = torch.cat([p.detach().reshape(-1) for p in parameters])
    trained, running = (True,) * len(parameters), [None] * len(norms.static_norms(module))
    asks = [
        Ask(module, list, OBJECTIVE, Training(), LR, None, None, 0, None, trained, running, values)
        for _ in range(clients)
    ]
    stacked, (x, y) = Stacked(asks), (torch.stack([t] * clients) for t in batch)
    return lambda: stacked.step(list(range(clients)), x, y)


# checks


def check(net: Net, size: int, device: torch.device) -> dict[str, float]:
    """Return the largest differences of parameters after a client with full batches, which must be 0, and after one
    with a smaller last batch. Raise AssertionError if a difference exceeds its bound."""
    training, start = Training(batch_size=size), params_of(net.build())
    whole = [batch_of(net, size, device, seed) for seed in range(5)]
    found = {}
    for name, batches, bound in (
        ("recorded", whole, 0.0),
        ("filled up", [*whole, batch_of(net, size // 2, device, 9)], 1e-4),
    ):
        ends = []
        for static in (False, True):
            module = net.build().to(device)
            # the first client records, the second replays
            for _ in range(2):
                load(module, start)
                fit(module, batches, OBJECTIVE, training, LR, static=static)
            ends.append(as_vector(list(module.parameters())).clone())
        found[name] = float((ends[0] - ends[1]).abs().max())
        assert found[name] <= bound, f"{net.model.name} at width {net.width:g}, {name}: {found[name]:g} over {bound:g}"
    return found


# measuring


def seconds_a_step(step: Step, steps: int, device: torch.device) -> Callable[[], float]:
    for _ in range(5):
        step()

    def turn() -> float:
        _wait(device)
        started = time.perf_counter()
        for _ in range(steps):
            step()
        _wait(device)
        return (time.perf_counter() - started) / steps

    return turn


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rows_of(name: str, net: Net, size: int, scale: Scale, device: torch.device) -> dict[str, Any]:
    """Return a row of the table of steps, in microseconds."""
    steps = ways(net, size, device, scale.compiled)
    contenders = {way: seconds_a_step(step, scale.steps, device) for way, step in steps.items()}
    module, payload = net.build().to(device), params_of(net.build())
    contenders["change of clients"] = seconds_a_step(lambda: load(module, payload), scale.steps, device)
    found = {way: statistics.median(turns) * 1e6 for way, turns in in_turns(contenders, scale.turns).items()}
    for n in TOGETHER:
        found[f"{n} together, per client"] /= n
    found["recorded: times as fast"] = found["rayfl, not recorded"] / found["rayfl, recorded"]
    return {"network": name, "batch": size} | found


def serve(net: Net, clients: int, device: torch.device) -> None:
    """Train clients of 30 steps of batch 20 for every line read, and print a line when done."""
    batches, training = [batch_of(net, 20, device)] * 30, Training(batch_size=20)
    module, start = cached_module(net, device), params_of(net.build())

    def client() -> None:
        load(module, start)
        fit(module, batches, OBJECTIVE, training, LR, static=True)

    client()
    print("ready", flush=True)
    for _ in sys.stdin:
        for _ in range(clients):
            client()
        print("done", flush=True)


def clients_a_second(name: str, count: int, scale: Scale, options: list[str]) -> float:
    """Return the clients per second of `count` concurrent processes on one device."""
    command = [sys.executable, __file__, *options, "--serve", name]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        for child in children:
            _heard(child)
        started = time.perf_counter()
        for child in children:
            print(file=child.stdin, flush=True)
        for child in children:
            _heard(child)
        return count * scale.clients / (time.perf_counter() - started)
    finally:
        for child in children:
            child.communicate()


def _heard(child: subprocess.Popen) -> None:
    assert child.stdout
    if not child.stdout.readline():
        raise RuntimeError("a process ended before its clients were trained; see its output above")


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


def scale_of(options: argparse.Namespace) -> Scale:
    return DRY if options.dry_run else SHORT if options.short else FULL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--short", action="store_true", help="the main networks only, without torch.compile")
    amount.add_argument("--dry-run", action="store_true", help="run on a CPU with tiny networks")
    parser.add_argument("--precision", choices=("fp32", "tf32"), default="fp32", help="of products (default: fp32)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.dry_run or torch.cuda.is_available()):
        sys.exit("bench_gpu.py: torch finds no CUDA device. Allowed: a machine with one, or --dry-run on a CPU")
    device, scale = torch.device("cpu" if options.dry_run else "cuda"), scale_of(options)
    torch.set_num_threads(1)
    with precise(Training(precision=options.precision), device):
        if options.serve:
            serve(scale.nets[options.serve], scale.clients, device)
            return
        checks = [{"network": name} | check(net, 20, device) for name, net in scale.nets.items()]
        steps = [rows_of(name, net, size, scale, device) for name, net in scale.nets.items() for size in scale.batches]
    given = sys.argv[1:]
    several = [
        {"network": name} | {f"{k} processes": clients_a_second(name, k, scale, given) for k in scale.processes}
        for name in scale.nets
    ]
    found = {"largest differences": checks, "microseconds": steps, "clients a second": several}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for rows in found.values():
        show(rows)


if __name__ == "__main__":
    main()
