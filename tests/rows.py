"""What tests of results share: runs' folders and rows that no run made."""

from rayfl.results.folder import RunFolder

FACTS = {
    "judge": "accuracy_mean",
    "capacities": [1.0, 0.125],
    "trained": [1.0, 0.125],
    "scores": {"accuracy": "max", "loss": "min"},
    "clients": 4,
    "rounds": 3,
    "tuned": [],
}
PERSONAL = FACTS | {"judge": "local_accuracy_mean"}
"""Of a run whose clients have networks of their own."""


def folder(path, label="fedavg", lines=(), *, facts=FACTS, seed=0, status="finished", config=None, **more):
    """A run's folder with these lines, ended unless the status is running."""
    run = RunFolder.create(path, label, config or {"seed": seed}, {"seed": seed}, facts, **more)
    run.append(list(lines))
    if status != "running":
        run.finish(status)
    return run


def line(round, **metrics):
    """A line of a round that was evaluated."""
    return {"round": round, "seconds": 1.0, "evaluated": True} | metrics
