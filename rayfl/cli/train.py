"""rayfl run, sweep, scale: commands that train."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rayfl.cli.elsewhere import elsewhere, require_alone, words
from rayfl.cli.files import find_config, some_rows
from rayfl.cli.output import Json, Quiet, Shows
from rayfl.cli.shared import (
    Address,
    Cluster,
    ConfigPath,
    Name,
    Output,
    Resume,
    ResumeChanged,
    Rounds,
    Row,
    Settings,
    ToExperiment,
    TrackingUri,
    experiment_of,
    folder_of,
    located,
    print_table,
    resumable,
    sending_to,
    with_rounds,
)
from rayfl.config import load_yaml

QUICKSTART = Path("quickstart")
SCALE = Path("scale")
LOADING, SENDING = "loading rayfl", "sending to MLflow"


def run(
    config: ConfigPath,
    settings: Settings = None,
    row: Row = None,
    rounds: Rounds = None,
    output: Output = Path("runs"),
    name: Name = None,
    resume: Resume = False,
    resume_changed: ResumeChanged = False,
    address: Address = None,
    cluster: Cluster = None,
    tracking_uri: TrackingUri = None,
    experiment_name: ToExperiment = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Run one experiment: write config, metrics, result, plots and checkpoints to a folder and to MLflow."""
    shows, config = Shows(quiet, json), find_config(config)
    settings = with_rounds(settings, rounds)
    if cluster is not None:
        require_alone(address, tracking_uri)
        shown = words({"--quiet": quiet, "--json": json})
        options = words({"--set": settings, "--row": row, "--experiment": experiment_name})
        options += words({"--resume-changed": resume_changed})
        with shows.busy(LOADING):
            from rayfl.clusters.jobs import Work, show_token

            show_token()
            from rayfl.engine.plugins import packed

            experiment = experiment_of(config, settings, row)
            folder = folder_of(output, name or (f"{config.stem}-{row}" if row else config.stem))
            work = Work("run", config, options, folder.name, experiment.plain(), packed(experiment), resume, shown)
        elsewhere(work, cluster, folder, shows)
        return
    with shows.busy(LOADING) as phase:
        from rayfl import driver
        from rayfl.engine.simulation import load_data
        from rayfl.results.console import RunProgress, Shown
        from rayfl.results.findings import findings
        from rayfl.results.report import write_labels, write_report

        phase(f"reading {config}")
        experiment = experiment_of(config, settings, row)
        folder = folder_of(output, name or (f"{config.stem}-{row}" if row else config.stem))
        driver.check_folder(folder, experiment.plain(), resumes := "changed" if resume_changed else resume)
        judge = experiment.facts()["judge"]
        progress = RunProgress(experiment.method.name, experiment.rounds, judge, **shows.options)
        sending = sending_to(output, tracking_uri, progress.note, experiment_name)
        phase(driver.LOADING)
        arrays = located(config, lambda: load_data(experiment), settings)
    with resumable(folder), progress, sending as sender:
        shown = Shown.on(progress, sender.add)
        result = driver.run(experiment, folder, resume=resumes, address=address, listeners=[shown], arrays=arrays)
        progress.phase(driver.WRITING)
        rows = [result.folder.record()]
        write_report(findings(folder, rows, rows), progress.note)
        write_labels(folder / "plots" / "labels", experiment, arrays)
        progress.phase(SENDING)
    shows.results(rows, result.folder.facts.judge)
    shows.places("results", folder, output, tracking_uri, sender.page(folder))


def sweep(
    config: ConfigPath = QUICKSTART,
    settings: Settings = None,
    rows: Annotated[
        str | None, typer.Option(help="Rows to run: heterofl,fedrolex. Default: all.", autocompletion=some_rows)
    ] = None,
    rounds: Rounds = None,
    output: Output = Path("runs"),
    name: Name = None,
    resume: Resume = False,
    resume_changed: ResumeChanged = False,
    address: Address = None,
    storage: Annotated[
        str | None,
        typer.Option(
            envvar="RAYFL_STORAGE", help="Storage of checkpoints for nodes without a shared folder: s3://BUCKET/FOLDER."
        ),
    ] = None,
    cluster: Cluster = None,
    tracking_uri: TrackingUri = None,
    experiment_name: ToExperiment = None,
    no_models: Annotated[bool, typer.Option("--no-models", help="Do not log the tuned submodels in MLflow.")] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Tune every method of a comparison with the same budget and rank the tuned methods."""
    shows, config = Shows(quiet, json), find_config(config)
    settings = with_rounds(settings, rounds)
    if cluster is not None:
        require_alone(address, tracking_uri)
        shown = words({"--quiet": quiet, "--json": json})
        options = words({"--set": settings, "--rows": rows, "--experiment": experiment_name, "--storage": storage})
        options += words({"--no-models": no_models, "--resume-changed": resume_changed})
        with shows.busy(LOADING):
            from rayfl.clusters.jobs import Work, show_token

            show_token()
            from rayfl.engine.plugins import packed
            from rayfl.tuning.load import load_sweep

            plan = load_sweep(config, settings, rows)
            folder = folder_of(output, name or plan.name)
            packages = packed([plan, *map(plan.example, plan.rows)])
            work = Work("sweep", config, options, folder.name, plan.plain(), packages, resume, shown)
        elsewhere(work, cluster, folder, shows)
        return
    with shows.busy(LOADING) as phase:
        from rayfl import driver
        from rayfl.engine.simulation import load_data
        from rayfl.networks import deployments
        from rayfl.results.console import SweepProgress
        from rayfl.results.mlflow.models import log_models
        from rayfl.tuning import comparison
        from rayfl.tuning.load import load_sweep

        phase(f"reading {config}")
        plan = load_sweep(config, settings, rows)
        folder = folder_of(output, name or plan.name)
        driver.check_folder(folder, plan.plain(), resumes := "changed" if resume_changed else resume, "sweep")
        rounds = plan.first.rounds
        progress = SweepProgress(plan.trials, rounds, plan.search.metric, plan.mode, **shows.options)
        sending = sending_to(output, tracking_uri, progress.note, experiment_name)
        phase(driver.LOADING)
        arrays = located(config, lambda: load_data(plan.first), settings)
    clients, data = plan.first.clients.count, plan.first.data.name
    shows.notify(
        f"{plan.name}: {len(plan.rows)} methods, {plan.trials} trials of {rounds} rounds, {clients} clients on {data}"
    )
    with resumable(folder), progress, sending as sender:
        found = comparison.sweep(
            plan,
            folder,
            resume=resumes,
            address=address,
            storage=storage,
            progress=progress,
            follow=sender.add,
            arrays=arrays,
        )
        progress.phase(SENDING)
    published = found.folder.config.get("published")
    shows.results(found.best, found.folder.facts.judge, published, found.tuned)
    if not no_models:
        with shows.busy("logging the tuned submodels in MLflow"):
            networks = partial(deployments, arrays=arrays, notify=progress.note)
            log_models(sender.copy, found.folder, networks)
    shows.places("results.csv, results.md and plots", folder, output, tracking_uri, sender.page(folder))


def scale(
    config: ConfigPath = SCALE,
    settings: Settings = None,
    row: Row = None,
    clients: Annotated[str | None, typer.Option(help="Numbers of clients: 100,10000.")] = None,
    cohort: Annotated[str | None, typer.Option(help="Clients per round: 10,100,1000.")] = None,
    actors: Annotated[str | None, typer.Option(help="Numbers of client actors: 1,2,4,8.")] = None,
    nodes: Annotated[str | None, typer.Option(help="Numbers of Ray nodes on this machine: 1,2.")] = None,
    rounds: Annotated[int, typer.Option(help="Measured rounds per point, after one warm-up round.")] = 5,
    output: Output = Path("runs"),
    name: Name = None,
    address: Address = None,
    tracking_uri: TrackingUri = None,
    experiment_name: ToExperiment = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Measure rounds per second, memory and traffic for numbers of clients, cohort, actors and nodes, one varied at a
    time. Default: all four."""
    shows, config = Shows(quiet, json), find_config(config)
    with shows.busy(LOADING) as phase:
        from rayfl.results.console import ScaleProgress
        from rayfl.results.scaling import findings, table
        from rayfl.tuning import scaling
        from rayfl.tuning.load import is_sweep

        phase(f"reading {config}")
        if row is None and is_sweep(given := load_yaml(config)):
            row = next(iter(given.get("rows") or ["run"]))
        experiment = experiment_of(config, settings, row)
        asked = {"clients": clients, "cohort": cohort, "actors": actors, "nodes": nodes}
        axes = scaling.axes_of(asked, address)
        folder = folder_of(output, name or config.stem)
        progress = ScaleProgress(**shows.options)
        sending = sending_to(output, tracking_uri, progress.note, experiment_name)
    with progress, sending as sender:
        found = scaling.scale(
            experiment, folder, axes, rounds=rounds, address=address, progress=progress, follow=sender.add
        )
        progress.phase(SENDING)
    if not json:
        for axis, rows in found.items():
            if rows:
                print_table(table(axis, rows).rich())
        for text in findings(found):
            shows.notify(text)
    shows.places("scale.json, scale.csv, scale.md and plots", folder, output, tracking_uri, sender.page(folder))
