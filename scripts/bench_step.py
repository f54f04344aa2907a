"""Time of a client's steps, in four tables of ratios: tiny networks, clients side by side, masks, and widths.

    python scripts/bench_step.py                         # all four
    python scripts/bench_step.py --against ../older      # also compare tiny networks with another checkout

A row is a whole visit of one client, `method.local_update`: loading weights, batches, steps, update. It is measured in
CPU seconds, so that other work on the machine matters less. Compared cases take turns, and ratios are medians over
turns. One thread. The floor of a tiny network's step is a loop in plain PyTorch: forward, loss, backward and fused SGD
on batches cut beforehand, without loading weights and without an update.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse  # noqa: E402
import functools  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator, Mapping  # noqa: E402
from contextlib import contextmanager, suppress  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from peers.timing import in_turns, ratios  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import nn  # noqa: E402

import rayfl  # noqa: E402
from rayfl import costs  # noqa: E402
from rayfl.core.net import Net  # noqa: E402
from rayfl.core.tensors import pack, unpack  # noqa: E402
from rayfl.data.goal import Classes  # noqa: E402
from rayfl.data.images import Images  # noqa: E402
from rayfl.data.samples import ClientData  # noqa: E402
from rayfl.engine.memory import keep_freed_memory  # noqa: E402
from rayfl.methods import METHODS  # noqa: E402
from rayfl.methods.base import Client, Task, Visit  # noqa: E402
from rayfl.models import MODELS  # noqa: E402
from rayfl.training import stacked  # noqa: E402
from rayfl.training.settings import Training  # noqa: E402
from rayfl.training.together import together  # noqa: E402

LETTERS = {"a": 1.0, "b": 1 / 2, "c": 1 / 4, "d": 1 / 8, "e": 1 / 16}
"""HeteroFL's five widths."""


@dataclass(frozen=True)
class Case:
    """Client visit to measure."""

    method: str
    model: str
    width: float = 1.0
    steps: int = 10
    batch_size: int = 20
    input: tuple[int, int, int] | None = None
    """Channels, height and width of an image. Default: the model's."""
    spans: float = 0.02
    """Minimum seconds per turn."""

    def visit(self) -> tuple[Callable[[], Any], float]:
        """Return a function that trains the client, and its floating point operations."""
        given: dict[str, Any] = {"input": self.input} if self.input else {}
        model: Any = MODELS[self.model](**given)
        capacities = sorted({1.0, self.width}, reverse=True)
        training = Training(steps=self.steps, batch_size=self.batch_size, lr=0.01)
        task = Task(model, training, {c: Net(model, c) for c in capacities}, 1.0, clients=10)
        method = METHODS[self.method]().bind(task)
        state, client = method.init(), Client(0, self.width, 0)
        selection = method.select(state, client)
        generator = torch.Generator().manual_seed(0)
        samples = self.steps * self.batch_size
        pixels = torch.randint(256, (samples, *model.input), generator=generator).byte()
        labels = torch.randint(model.classes, (samples,), generator=generator)
        data = ClientData({"x": pixels, "y": labels}, Images(mean=(0.3,) * model.input[0], std=(0.3,)), Classes(10))
        visit = Visit(client, selection, data, None, 7)
        payload = unpack(pack(method.extract(state, selection)))
        # the first visit creates the client state
        visit = replace(visit, client_state=method.local_update(payload, visit).client_states.get(client.id))

        def train() -> Any:
            return method.local_update(payload, visit)

        return train, costs.training_flops(selection.net, samples)

    def bare(self) -> Callable[[], Any]:
        """Return a function that takes the same number of steps of the same network in plain PyTorch."""
        given: dict[str, Any] = {"input": self.input} if self.input else {}
        model: Any = MODELS[self.model](**given)
        module = Net(model, self.width).build()
        if self.method == "spafl":
            add_thresholds(module)
        taus: list[Any] = [layer.tau for layer in module.modules() if hasattr(layer, "tau")]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, fused=True)
        batches = torch.rand(self.steps, self.batch_size, *model.input)
        labels = torch.randint(model.classes, (self.steps, self.batch_size))

        def train() -> None:
            module.train()
            for x, y in zip(batches, labels, strict=True):
                optimizer.zero_grad()
                loss = F.cross_entropy(module(x), y)
                for tau in taus:
                    loss = loss + 0.002 * torch.exp(-tau).sum()
                loss.backward()
                optimizer.step()

        return train

    def seconds(self, train: Callable[[], Any] | None = None) -> Callable[[], float]:
        """Return a function that measures the mean seconds of a turn's visits, or of calls of `train`."""
        train = train or self.visit()[0]

        def turn() -> float:
            visits, started = 0, time.process_time()
            while (spent := time.process_time() - started) < self.spans or not visits:
                train()
                visits += 1
            return spent / visits

        return turn


class UnitStep(torch.autograd.Function):
    """1 above 0, otherwise 0; its gradient is 1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x > 0).float()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return gradient


def add_thresholds(module: nn.Module) -> None:
    """Give every convolution and linear layer thresholds of its rows, as in SpaFL: pruned outputs are 0, and the
    thresholds of an empty layer are reset."""

    def prune(layer: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        mu: torch.Tensor = layer.weight.detach().abs().flatten(1).mean(1)
        layer.tau.detach().masked_fill_((mu > layer.tau).sum() <= 0.01 * len(mu), 0)
        rows: Any = UnitStep.apply(mu - layer.tau)
        return out * rows.reshape(-1, *[1] * (out.dim() - 2))

    for layer in list(module.modules()):
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.tau = nn.Parameter(torch.zeros(layer.weight.shape[0]))
            layer.register_forward_hook(prune)


TINY = {
    f"width {name}, {steps} step{'s' * (steps > 1)}": Case("heterofl", "digits_cnn", width, steps, spans=0.2)
    for name, width in (("1", 1.0), ("1/8", 1 / 8), ("1/16", 1 / 16))
    for steps in (1, 10)
}
MASKS = {
    f"{model}, {method}": Case(method, model, width)
    for model in ("digits_cnn", "mcmahan_cnn")
    for method, width in (("fedavg", 1.0), ("pruning_greedy", 0.5), ("fiarse", 0.5), ("spafl", 1.0))
}
WIDTHS = {f"mcmahan_cnn, {letter}": Case("heterofl", "mcmahan_cnn", width) for letter, width in LETTERS.items()} | {
    f"preact_resnet18, {letter}": Case("heterofl", "preact_resnet18", width, 2, 10, (3, 32, 32))
    for letter, width in LETTERS.items()
}

COMPANY = {
    f"{model}, {letter}": Case("heterofl", model, width, 10, 20, size)
    for model, size, letters in (
        ("digits_cnn", None, "eca"),
        ("resnet8", (1, 28, 28), "eca"),
        ("mcmahan_cnn", None, "ec"),
    )
    for letter, width in LETTERS.items()
    if letter in letters
}
GROUPS = (8, 32, 64)


# tables


def tiny(turns: int, against: Path | None) -> dict[str, dict[str, float]]:
    """Return per row: microseconds per step, the same in plain PyTorch and the ratio, clients per second, and the ratio
    to the other checkout."""
    bare = {f"{name}, bare": case.seconds(case.bare()) for name, case in TINY.items()}
    with elsewhere(against) as there:
        found = in_turns(here() | bare | {f"{name}, there": turn for name, turn in there.items()}, turns)
    rows = {}
    for name, case in TINY.items():
        visit = statistics.median(found[name])
        plain = found[f"{name}, bare"]
        rows[name] = {
            "us a step": visit / case.steps * 1e6,
            "plain PyTorch": statistics.median(plain) / case.steps * 1e6,
            "ratio": statistics.median(ratios(found[name], plain)),
            "clients/s": 1 / visit,
        }
        if there:
            rows[name]["times the other's"] = statistics.median(ratios(found[name], found[f"{name}, there"]))
    return rows


def company(turns: int) -> dict[str, dict[str, float]]:
    """Return per row: microseconds per client and step alone, with so many clients side by side, and their ratios; and
    the number that `run.together: auto` chooses."""
    sides, rows = {}, {}
    for name, case in COMPANY.items():
        train = case.visit()[0]
        sides[name] = case.seconds(train)
        for group in GROUPS:
            sides[f"{name}, {group}"] = case.seconds(functools.partial(together, [train] * group, stacked.train))
    found = in_turns(sides, turns)
    for name, case in COMPANY.items():
        rows[name] = {"us a step alone": statistics.median(found[name]) / case.steps * 1e6}
        for group in GROUPS:
            shared = [seconds / group for seconds in found[f"{name}, {group}"]]
            rows[name] |= {
                f"{group} together": statistics.median(shared) / case.steps * 1e6,
                f"ratio of {group}": statistics.median(ratios(shared, found[name])),
            }
        given: dict[str, Any] = {"input": case.input} if case.input else {}
        training = Training(batch_size=case.batch_size)
        rows[name]["auto"] = stacked.most(Net(MODELS[case.model](**given), case.width), training)
    return rows


def here() -> dict[str, Callable[[], float]]:
    return {name: case.seconds() for name, case in TINY.items()}


@contextmanager
def elsewhere(folder: Path | None) -> Iterator[dict[str, Callable[[], float]]]:
    """Yield the rows of the first table, measured by the rayfl in another folder, in a separate process. Raise
    SystemExit if the process ends early or imports another rayfl."""
    if folder is None:
        yield {}
        return
    command = [sys.executable, __file__, "--serve"]
    environment = os.environ | {"PYTHONPATH": str(folder.resolve())}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:

        def answer() -> str:
            assert child.stdout
            if line := child.stdout.readline():
                return line.strip()
            child.communicate()
            raise SystemExit(
                f"--against: the process with the rayfl of {folder} ended with status {child.returncode}. Hint: its "
                "error is printed above"
            )

        def ask(name: str) -> float:
            assert child.stdin
            with suppress(BrokenPipeError):
                print(name, file=child.stdin, flush=True)
            return float(answer())

        if not Path(imported := answer()).resolve().is_relative_to(folder.resolve()):
            raise SystemExit(f"--against: the process imports {imported}, which is not below {folder}")
        yield {name: functools.partial(ask, name) for name in TINY}
        child.communicate()


def serve() -> None:
    """Print the path of the imported rayfl, then the seconds of every row whose name is read from standard input."""
    sides = here()
    print(rayfl.__file__, flush=True)
    for line in sys.stdin:
        print(sides[line.strip()](), flush=True)


def masks(turns: int) -> dict[str, dict[str, float]]:
    """Return per row: microseconds per step, and the ratio to FedAvg's; for FedAvg and SpaFL also the same in plain
    PyTorch, and the ratio to it."""
    plain = {name: case for name, case in MASKS.items() if case.method in ("fedavg", "spafl")}
    bare = {f"{name}, bare": case.seconds(case.bare()) for name, case in plain.items()}
    found = in_turns({name: case.seconds() for name, case in MASKS.items()} | bare, turns)
    rows = {}
    for name, case in MASKS.items():
        fedavg = f"{case.model}, fedavg"
        rows[name] = {
            "us a step": statistics.median(found[name]) / case.steps * 1e6,
            "times FedAvg's": statistics.median(ratios(found[name], found[fedavg])),
        }
        if name in plain:
            seconds = found[f"{name}, bare"]
            rows[name] |= {
                "plain PyTorch": statistics.median(seconds) / case.steps * 1e6,
                "times its FedAvg's": statistics.median(ratios(seconds, found[f"{fedavg}, bare"])),
                "ratio": statistics.median(ratios(found[name], seconds)),
            }
    return rows


def widths(turns: int) -> dict[str, dict[str, float]]:
    """Return per row: milliseconds per step; their ratio to plain PyTorch's, and to the largest network's; the ratio of
    operations to the largest network's; and the quotient of these two, also of plain PyTorch. The mix is the mean of
    all five."""
    plain = {f"{name}, bare": case.seconds(case.bare()) for name, case in WIDTHS.items()}
    found = in_turns({name: case.seconds() for name, case in WIDTHS.items()} | plain, turns)
    rows = {}
    for model in dict.fromkeys(case.model for case in WIDTHS.values()):
        flops = {letter: WIDTHS[f"{model}, {letter}"].visit()[1] for letter in LETTERS}
        sides = [{letter: found[f"{model}, {letter}{side}"] for letter in LETTERS} for side in ("", ", bare")]
        for side in sides:
            side["mix"] = [statistics.mean(turn) for turn in zip(*side.values(), strict=True)]
        flops["mix"] = statistics.mean(flops.values())
        for letter in flops:
            share = flops[letter] / flops["a"]
            ours, plain = (statistics.median(ratios(side[letter], side["a"])) for side in sides)
            rows[f"{model}, {letter}"] = {
                "ms a step": statistics.median(sides[0][letter]) / WIDTHS[f"{model}, a"].steps * 1e3,
                "times plain PyTorch's": statistics.median(ratios(sides[0][letter], sides[1][letter])),
                "times a's": ours,
                "share of a's operations": share,
                "over its share": ours / share,
                "plain PyTorch over its share": plain / share,
            }
    return rows


def show(title: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    columns = next(iter(rows.values()))
    table = Table(title, *columns)
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in row.values()))
    Console().print(table)


def main() -> None:
    tables = ("tiny", "company", "masks", "widths")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=tables, help="print only this table")
    parser.add_argument("--turns", type=int, default=9, help="measured turns (default: 9)")
    parser.add_argument("--against", type=Path, help="folder of another checkout, 0.5.0 or later")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.against and not (options.against / "rayfl" / "__init__.py").is_file():
        parser.error(f"--against: {options.against} has no rayfl/__init__.py. Allowed: the folder of another checkout")
    torch.set_num_threads(1)
    keep_freed_memory()
    if options.serve:
        serve()
        return
    found: dict[str, Any] = {}
    for name in [options.only] if options.only else tables:
        found[name] = tiny(options.turns, options.against) if name == "tiny" else globals()[name](options.turns)
        if not options.json:
            show(name, found[name])
    if options.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
