"""Helpers of tests of results: folders and rows without a run."""

from itertools import product

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
"""Facts of a run with personal networks."""


def folder(path, label="fedavg", lines=(), *, facts=FACTS, seed=0, status="finished", config=None, **more):
    """A run's folder with these lines, ended unless the status is running."""
    run = RunFolder.create(path, label, config or {"seed": seed}, {"seed": seed}, facts, **more)
    run.append(list(lines))
    if status != "running":
        run.finish(status)
    return run


def study(path, labels=("heterofl", "fjord"), rates=(0.1,), seeds=(0, 1, 2), rounds=3, score=None, clock=None):
    """A sweep's folder that no sweep made, with a trial for every label, rate and seed; `score(label, rate, seed,
    round)`: its accuracies; `clock`: simulated seconds of a round by label."""
    score = score or (lambda label, rate, seed, round: 1 - 1 / (round + 1 + len(label) + seed) - rate / 10)
    search = {"metric": "accuracy_mean", "mode": "auto", "seeds": list(seeds)}
    facts = FACTS | {"tuned": ["training.lr"], "rounds": rounds}
    config = {"question": "Which one?", "search": search, "experiment": {"rounds": rounds}}
    sweep = RunFolder.create(path, path.name, config, {"rows": ", ".join(labels)}, facts, kind="sweep")
    for label, rate, seed in product(labels, rates, seeds):
        lines = []
        for r in range(1, rounds + 1):
            value = score(label, rate, seed, r)
            lines.append(line(r, accuracy_mean=value, accuracy_1=value, train_loss=1 / r, bytes_down=10, bytes_up=10))
            lines[-1] |= {"train_flops": 1e6, "clients": 4, "steps": 8, "loss_mean": 1 - value}
            if clock:
                lines[-1] |= {"sim_seconds": clock[label], "sim_time": r * clock[label]}
        run = folder(
            path / "trials" / f"{label}-{rate}-s{seed}",
            label,
            lines,
            status="running",
            facts=FACTS | {"rounds": rounds},
            seed=seed,
            sweep=sweep.id,
            title=label.title(),
            config={"seed": seed, "data": {"name": "digits"}, "partition": {"name": "iid"}, "training": {"lr": rate}},
        )
        run.tags |= {"method": label, "data": "digits", "point": f"lr={rate:g}"}
        run.finish("finished")
    sweep.finish("finished")
    return sweep


def line(round, **metrics):
    """A line of a round that was evaluated."""
    return {"round": round, "seconds": 1.0, "evaluated": True} | metrics
