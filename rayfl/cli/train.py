"""rayfl run | sweep | scale: what trains."""

from pathlib import Path
from typing import Annotated

import typer

from rayfl.cli.shared import (
    Address,
    ConfigPath,
    Name,
    Output,
    Resume,
    Settings,
    ToExperiment,
    TrackingUri,
    experiment_of,
    find_config,
    folder_of,
    located,
    print_table,
    say,
    say_mlflow,
    sending_to,
    show,
    warn,
)
from rayfl.config import load_yaml

QUICKSTART = Path("tune_configs/quickstart.yaml")
SCALE = Path("tune_configs/scale.yaml")


def run(
    config: ConfigPath,
    settings: Settings = None,
    row: Annotated[str | None, typer.Option(help="Of a sweep's CONFIG: this row, at its first point.")] = None,
    output: Output = Path("runs"),
    name: Name = None,
    resume: Resume = False,
    address: Address = None,
    tracking_uri: TrackingUri = None,
    experiment_name: ToExperiment = None,
) -> None:
    """One federated run: config, metrics, result, plots and checkpoints in a folder, and in MLflow."""
    from rayfl import driver
    from rayfl.report import write_labels, write_report
    from rayfl.results.console import RunProgress, Shown
    from rayfl.results.findings import findings

    config = find_config(config)
    experiment = experiment_of(config, settings, row)
    folder = folder_of(output, name or (f"{config.stem}-{row}" if row else config.stem))
    driver.check_folder(folder, experiment.plain(), resume)
    progress = RunProgress(experiment.method.name, experiment.rounds, experiment.facts()["judge"])
    sending = sending_to(output, tracking_uri, progress.note, experiment_name)
    arrays = located(config, lambda: driver.load_data(experiment))
    with progress, sending as sender:
        shown = Shown.on(progress, sender.add)
        result = driver.run(experiment, folder, resume=resume, address=address, listeners=[shown], arrays=arrays)
        rows = [result.folder.record()]
        write_report(findings(folder, rows, rows), progress.note)
        write_labels(folder / "plots" / "labels", experiment, arrays)
    show(rows, result.folder.facts.judge)
    say(f"results in {folder}")
    say_mlflow(output, tracking_uri, sender.page(folder))


def sweep(
    config: ConfigPath = QUICKSTART,
    settings: Settings = None,
    rows: Annotated[str | None, typer.Option(help="Only these rows, e.g. heterofl,fedrolex.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Shorten or lengthen every run.")] = None,
    output: Output = Path("runs"),
    name: Name = None,
    resume: Resume = False,
    address: Address = None,
    tracking_uri: TrackingUri = None,
    experiment_name: ToExperiment = None,
    no_models: Annotated[
        bool, typer.Option("--no-models", help="Do not log the tuned rows' submodels as MLflow's models.")
    ] = False,
) -> None:
    """Tunes every row of a comparison with the same budget and ranks the tuned methods."""
    from rayfl import comparison, driver
    from rayfl.results.console import SweepProgress
    from rayfl.results.mlflow.models import log_models
    from rayfl.tuning.load import load_sweep

    config = find_config(config)
    settings = [*(settings or []), *([f"rounds={rounds}"] if rounds is not None else [])]
    plan = load_sweep(config, settings, rows)
    folder = folder_of(output, name or plan.name)
    driver.check_folder(folder, plan.plain(), resume)
    rounds = plan.first.rounds
    progress = SweepProgress(plan.trials, rounds, plan.search.metric, plan.mode)
    sending = sending_to(output, tracking_uri, progress.note, experiment_name)
    arrays = located(config, lambda: driver.load_data(plan.first))
    clients, data = plan.first.clients.count, plan.first.data.name
    say(
        f"{plan.name}: {len(plan.rows)} methods, {plan.trials} trials of {rounds} rounds, {clients} clients on {data}; "
        f"results in {folder}"
    )
    with progress, sending as sender:
        found = comparison.sweep(
            plan, folder, resume=resume, address=address, progress=progress, follow=sender.add, arrays=arrays
        )
    show(found.best, found.folder.facts.judge, found.folder.config.get("published"), found.tuned)
    say(f"results.csv, results.md and plots in {folder}")
    if not no_models:
        log_models(sender.copy, found.folder, lambda path: driver.deployments(path, arrays=arrays, say=warn))
    say_mlflow(output, tracking_uri, sender.page(folder))


def scale(
    config: ConfigPath = SCALE,
    settings: Settings = None,
    row: Annotated[str | None, typer.Option(help="Of a sweep's CONFIG: this row; unless given the first.")] = None,
    clients: Annotated[str | None, typer.Option(help="Clients in the population, e.g. 100,1000,10000,100000.")] = None,
    cohort: Annotated[str | None, typer.Option(help="Clients in a round, e.g. 10,100,1000.")] = None,
    actors: Annotated[str | None, typer.Option(help="Client actors, e.g. 1,2,4,8.")] = None,
    nodes: Annotated[str | None, typer.Option(help="Ray nodes on this machine, e.g. 1,2.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of a point, its first apart.")] = 5,
    output: Output = Path("runs"),
    name: Name = None,
    address: Address = None,
    tracking_uri: TrackingUri = None,
    experiment_name: ToExperiment = None,
) -> None:
    """Rounds per second, memory and traffic against clients, cohort, actors and nodes, one at a time; all four unless
    some are given."""
    from rayfl import scaling
    from rayfl.results.scaling import findings, table

    config = find_config(config)
    if row is None and "experiment" in (given := load_yaml(config)):
        row = next(iter(given.get("rows") or ["run"]))
    experiment = experiment_of(config, settings, row)
    asked = {"clients": clients, "cohort": cohort, "actors": actors, "nodes": nodes}
    axes = scaling.axes_of(asked, address)
    folder = folder_of(output, name or "scale")
    with sending_to(output, tracking_uri, warn, experiment_name) as sender:
        found = scaling.scale(experiment, folder, axes, rounds=rounds, address=address, say=say, follow=sender.add)
    for axis, rows in found.items():
        if rows:
            print_table(table(axis, rows).rich())
    for text in findings(found):
        say(text)
    say(f"scale.json, scale.csv, scale.md and plots in {folder}")
    say_mlflow(output, tracking_uri, sender.page(folder))
