"""Accuracy of HtFLlib and of rayfl on the same clients, round by round, written as a CSV file.

    git clone https://github.com/TsingZ0/HtFLlib ../HtFLlib
    uv run scripts/compare_htfllib.py ../HtFLlib              # all methods, 40 rounds
    uv run scripts/compare_htfllib.py ../HtFLlib --methods FML FedGH --seeds 1
    uv run scripts/compare_htfllib.py ../HtFLlib --rates runs/htfl_rates --seeds 0 1 2    # rates tuned by a sweep

The study is `tune_configs/htfl_fashion_mnist.yaml`. HtFLlib's server and client classes run unchanged, on a CPU, with
the options of its `total.sh`. They get rayfl's partition, in their file format, and rayfl's networks with their initial
parameters, those of a common network too, in place of HtFLlib's own. Both sides run in processes of one thread, side by
side. Accuracy is that on the clients' own test splits, weighted by their sizes, in per cent; with several seeds, the
mean and the standard deviation, also of rayfl's difference.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse  # noqa: E402
import contextlib  # noqa: E402
import csv  # noqa: E402
import importlib  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import random  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import types  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from rayfl.core.norms import static_norms  # noqa: E402
from rayfl.engine.simulation import Simulation  # noqa: E402
from rayfl.models.features import classifier_path  # noqa: E402
from rayfl.results.cells import as_csv  # noqa: E402
from rayfl.tuning.load import load_sweep  # noqa: E402

STUDY = Path(__file__).parents[1] / "tune_configs" / "htfl_fashion_mnist.yaml"
METHODS = {
    "Local": ("local", "serverlocal", "Local"),
    "FedProto": ("fedproto", "serverproto", "FedProto"),
    "FD": ("feddistill.logits", "serverfd", "FD"),
    "FML": ("fml", "serverfml", "FML"),
    "FedGH": ("fedgh", "servergh", "FedGH"),
    "FedTGP": ("fedtgp", "servertgp", "FedTGP"),
    "FedKD": ("fedkd", "serverkd", "FedKD"),
    "FedMRL": ("fedmrl", "servermrl", "FedMRL"),
    "LG-FedAvg": ("lg-fedavg", "serverlg", "LG_FedAvg"),
    "FedGen": ("fedgen.untrained", "servergen", "FedGen"),
}
"""Name in the table -> the study's row, HtFLlib's module and class."""
SERVER_RATES = {"fedtgp": "method.server.lr"}
"""Row -> setting of a server's learning rate that HtFLlib takes from the clients."""
FEATURES, COMMON_FEATURES = 64, 16


@dataclass(frozen=True)
class Case:
    """One run of both sides."""

    name: str
    seed: int
    rounds: int
    lr: float

    def simulation(self, row: str, folder: str) -> Simulation:
        rates = {"training.lr": self.lr} | ({SERVER_RATES[row]: self.lr} if row in SERVER_RATES else {})
        experiment = load_sweep(STUDY).experiment(row, rates, self.seed)
        experiment = experiment.with_(rounds=self.rounds, run={"executor": "serial"})
        return Simulation(experiment, experiment.data.arrays(), Path(folder))


# rayfl


def on_rayfl(case: Case) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="rayfl-") as folder:
        run, found = case.simulation(METHODS[case.name][0], folder), []
        while not run.done:
            line = run.run_round()
            if "local_accuracy_samples" in line:
                found.append(line["local_accuracy_samples"])
    return found


# HtFLlib


class Given(nn.Module):
    """A network of rayfl with its initial parameters, as HtFLlib wants it: `fc` is the classifier."""

    nets: Any = None
    """Capacity, or "common" for the common network -> network and initial parameters."""

    def __init__(self, of: float | str):
        super().__init__()
        net, start = Given.nets[of]
        self.body, path = net.build(), classifier_path(net)
        for place, norm in static_norms(self.body).items():
            self.body.set_submodule(place, nn.BatchNorm2d(norm.weight.numel(), norm.eps))
        wrong = self.body.load_state_dict(start, strict=False)
        assert not wrong.unexpected_keys and all(key.endswith("num_batches_tracked") for key in wrong.missing_keys)
        self.start_head = {key: start[f"{path}.{key}"].clone() for key in ("weight", "bias")}
        self.fc = self.body.get_submodule(path)
        self.body.set_submodule(path, nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x))


def on_htfllib(checkout: Path, case: Case) -> list[float]:
    _, file, kind = METHODS[case.name]
    with tempfile.TemporaryDirectory(prefix="rayfl-") as folder:
        own: Any = case.simulation(METHODS[case.name][0], folder).method
        run = case.simulation("local", folder)
        capacities = _export(run, checkout / "dataset" / f"rayfl{case.seed}", case.seed)
        every = run.experiment.evaluation.every
        method: Any = run.method
        Given.nets = {c: (net, method.initial(c)) for c, net in method.task.nets.items()}
        if "common" in (state := own.init()):
            Given.nets["common"] = own.common_net, state["common"]
    os.chdir(checkout / "system")
    sys.path.insert(0, str(checkout / "system"))
    sys.modules["h5py"] = types.ModuleType("h5py")  # imported there, and not used here
    load = torch.load
    torch.load = lambda *args, **options: load(*args, **({"weights_only": False} | options))
    models: Any = importlib.import_module("flcore.trainmodel.models")
    models.Given = Given
    split = models.BaseHeadSplit.__init__

    def with_initial_head(self: Any, *args: Any, **options: Any) -> None:
        split(self, *args, **options)
        self.head.load_state_dict(self.base.start_head)

    models.BaseHeadSplit.__init__ = with_initial_head
    module = importlib.import_module(f"flcore.servers.{file}")
    random.seed(case.seed)
    np.random.seed(case.seed)
    torch.manual_seed(case.seed)
    with contextlib.redirect_stdout(io.StringIO()):
        server = getattr(module, kind)(_options(case, every, capacities), 0)
        server.save_results = lambda: None
        try:
            server.train()
        except ValueError as error:
            # HtFLlib stops with an error of scikit-learn if outputs are not finite
            if not any(word in str(error) for word in ("NaN", "infinity")):
                raise
    found = server.rs_test_acc[1:]
    return found + [math.nan] * (case.rounds // every - len(found))


def _export(run: Simulation, to: Path, seed: int) -> list[float]:
    """Write all clients' samples in HtFLlib's format. Return the clients' capacities."""
    worker: Any = run.executor.worker  # pyright: ignore[reportAttributeAccessIssue]
    for part, shards in (("train", run.data.train), ("test", run.data.test)):
        (to / part).mkdir(parents=True, exist_ok=True)
        for client in range(run.clients.count):
            [(x, y)] = worker._rows(part, shards[client]).in_order(10**6)
            np.savez(to / part / f"{client}.npz", data=np.array({"x": x.numpy(), "y": y.numpy()}))
    return [run.clients.capacity(client, seed, 0) for client in range(run.clients.count)]


def _options(case: Case, every: int, capacities: list[float]) -> types.SimpleNamespace:
    """Return the arguments of HtFLlib's `main.py`, those of methods as in `total.sh`."""
    models = [f"Given({capacity})" for capacity in capacities]
    return types.SimpleNamespace(
        device="cpu",
        dataset=f"rayfl{case.seed}",
        num_classes=10,
        global_rounds=case.rounds,
        local_epochs=1,
        batch_size=10,
        local_learning_rate=case.lr,
        num_clients=len(capacities),
        join_ratio=1.0,
        random_join_ratio=False,
        client_drop_rate=0.0,
        train_slow_rate=0.0,
        send_slow_rate=0.0,
        time_select=False,
        time_threthold=1e4,
        few_shot=0,
        auto_break=False,
        top_cnt=100,
        eval_gap=every,
        goal="rayfl",
        algorithm=case.name,
        save_folder_name="temp",
        models_folder_name="",
        feature_dim=FEATURES,
        models=models,
        global_model="Given('common')" if "common" in Given.nets else models[0],
        lamda=10 if case.name in ("FedProto", "FedTGP") else 1,
        server_epochs=1 if case.name == "FedGH" else 100,
        server_learning_rate=0.01,
        alpha=0.5,
        beta=0.5,
        mentee_learning_rate=case.lr,
        T_start=0.95,
        T_end=0.98,
        margin_threthold=100.0,
        sub_feature_dim=COMMON_FEATURES,
        noise_dim=32,
        generator_learning_rate=0.1,
        hidden_dim=512,
    )


# both


def compared(checkout: Path, case: Case) -> dict[str, list[float]]:
    """Return the accuracy of both sides, round by round."""
    given = [f"--{key}={value}" for key, value in (("seeds", case.seed), ("rounds", case.rounds), ("lr", case.lr))]
    command = [sys.executable, __file__, str(checkout), *given, f"--methods={case.name}"]
    sides = {side: [*command, f"--side={side}"] for side in ("HtFLlib", "rayfl")}
    running = {side: subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for side, one in sides.items()}
    printed = {side: process.communicate()[0] for side, process in running.items()}
    if failed := [side for side, process in running.items() if process.returncode]:
        raise SystemExit(f"{case.name}: {' and '.join(failed)} failed, see above")
    return {side: json.loads(text.splitlines()[-1]) for side, text in printed.items()}


def line_of(checkout: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """Return the line of a method in the table, over its seeds."""
    found = [compared(checkout, case) for case in cases]
    every = load_sweep(STUDY).first.evaluation.every
    line: dict[str, Any] = {"method": cases[0].name, "row": METHODS[cases[0].name][0], "lr": cases[0].lr}
    for i in range(cases[0].rounds // every):
        columns = {side: [100 * one[side][i] for one in found] for side in found[0]}
        if len(cases) > 1:
            columns["difference"] = [ours - theirs for theirs, ours in zip(*columns.values(), strict=True)]
        for title, values in columns.items():
            line[f"{title} {(i + 1) * every}"] = float(np.mean(values))
            if len(cases) > 1:
                line[f"{title} {(i + 1) * every} std"] = float(np.std(values, ddof=1))
    return line


def rates_of(sweep: Path | None) -> dict[str, float]:
    """Return row -> best learning rate of a finished sweep."""
    if sweep is None:
        return {}
    with (sweep / "results.csv").open(newline="") as file:
        return {row["method"]: float(row["training.lr"]) for row in csv.DictReader(file)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of HtFLlib")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of partition, networks and training")
    parser.add_argument("--rounds", type=int, default=40, help="rounds, a multiple of 10 (default: 40)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of all methods (default: 0.01)")
    parser.add_argument("--rates", type=Path, help="folder of a sweep of the study: every method's best rate, for --lr")
    parser.add_argument("--side", choices=("HtFLlib", "rayfl"), help="print the accuracies of one side only, as JSON")
    options = parser.parse_args()
    every = load_sweep(STUDY).first.evaluation.every
    if options.rounds < 1 or options.rounds % every:
        parser.error(
            f"--rounds: {options.rounds} is not a positive multiple of {every}. Allowed: {every}, {2 * every}, ..."
        )
    torch.set_num_threads(1)
    checkout, rates = options.checkout.resolve(), rates_of(options.rates)
    lines, rows = [], {name: METHODS[name][0] for name in options.methods}
    if options.rates and (missing := sorted({*rows.values()} - rates.keys())):
        parser.error(f"--rates: {options.rates} has no {', '.join(missing)}. Allowed: a sweep of all rows")
    for name, row in rows.items():
        lr = rates[row] if row in rates else options.lr
        cases = [Case(name, seed, options.rounds, lr) for seed in options.seeds]
        if options.side:
            print(json.dumps(on_rayfl(cases[0]) if options.side == "rayfl" else on_htfllib(checkout, cases[0])))
            return
        lines.append(line_of(checkout, cases))
        print(*(f"{value:.3g}" if isinstance(value, float) else value for value in lines[-1].values()), flush=True)
    print(as_csv(list(lines[0]), [list(line.values()) for line in lines]))


if __name__ == "__main__":
    main()
