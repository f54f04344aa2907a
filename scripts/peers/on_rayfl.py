"""rayfl: a session, as a notebook starts it."""

import rayfl

from .turns import Turns
from .workloads import CLASSES, LR, MEAN, PROCESSES, STD, WORKLOADS, Workload, images

PACKAGES = ("rayfl", "ray", "torch")


def main(name: str, turns: Turns) -> None:
    with rayfl.start(experiment(WORKLOADS[name], PROCESSES)) as session:
        rounds = iter(session)
        while turns.wait(lambda: session.submodel(WORKLOADS[name].widths[0], raw=True)):
            next(rounds)


def experiment(workload: Workload, actors: int) -> rayfl.Experiment:
    """Without evaluation."""
    x, y = images(workload)
    heterofl = {"name": "heterofl", "scaler": False, "mask": "none", "label_rows": "all"}
    return rayfl.Experiment(
        rounds=10**6,
        data=rayfl.InMemory(x, y, x[:CLASSES], y[:CLASSES], mean=(MEAN,), std=(STD,)),
        partition="iid",
        clients={"count": workload.clients, "cohort": workload.cohort, "capacities": workload.widths},
        model={"name": workload.model, "norm": "none"},
        training={"epochs": workload.epochs, "batch_size": workload.batch, "lr": LR},
        method="fedavg" if workload.is_equal else heterofl,
        evaluation={"every": 10**6, "holdout": 0.0, "clients": False},
        # on CPUs, as the peers
        run={"actors": actors, "gpus": 0},
    )
