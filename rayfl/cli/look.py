"""rayfl compare, report, export, generate: results of finished runs. rayfl status: running ones."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rayfl.cli.shared import Output, notify, print_table, show, uri_of, warn
from rayfl.config import ConfigError, choose, nearest

if TYPE_CHECKING:
    from rayfl.results.mlflow import Reader
    from rayfl.results.studies import Study


def compare(
    names: Annotated[list[str] | None, typer.Argument(help="Names of sweeps. Default: the newest.")] = None,
    output: Output = Path("runs"),
    tracking_uri: Annotated[
        list[str] | None,
        typer.Option(
            help="MLflow server; may be repeated. Default: MLFLOW_TRACKING_URI, otherwise sqlite in --output."
        ),
    ] = None,
    experiment: Annotated[str | None, typer.Option(help="Only sweeps of this MLflow experiment.")] = None,
    tag: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only runs with this tag.")] = None,
    metric: Annotated[str | None, typer.Option(help="Metric that ranks the tuned rows. Default: the sweep's.")] = None,
    format: Annotated[Literal["table", "markdown", "csv", "latex"], typer.Option(help="What to print.")] = "table",
) -> None:
    """Compare the best trials of methods, from MLflow: mean and standard deviation over seeds, and rows without a
    significant difference. Settings in which sweeps differ are listed; rows of such sweeps are not tested."""
    from rayfl.results import published as beside
    from rayfl.results.findings import unfinished
    from rayfl.results.mlflow import Copy, Reader, Store
    from rayfl.results.rows import numbers_of
    from rayfl.results.studies import (
        apart_said,
        differences_said,
        machines_said,
        ranking_said,
        side_by_side,
        unranked_said,
    )
    from rayfl.results.tables import best_table, results_csv
    from rayfl.results.tables import table as results

    tags = _tags(tag or [])
    stores = [Store(uri) for uri in tracking_uri or [uri_of(output, None)]]
    for store in stores if tracking_uri else ():
        store.require()
    if output.is_dir():
        Copy(stores[0], warn).sync_all(output)
    readers = [Reader(store, experiment) for store in stores]
    studies = _studies(readers, names or [], tags)
    if metric is not None:
        choose(numbers_of(run for study in studies for run in study.runs), metric, "--metric", "metric")
    best, judge, tuned = side_by_side(studies, metric)
    if not best:
        raise ConfigError("compare: no finished run matches. Allowed: names of finished sweeps, and their runs' tags")
    params = studies[0].sweep["params"] if len(studies) == 1 else {}
    published, changed = beside.from_config(params)
    apart = [*ranking_said(studies, judge, is_chosen=metric is not None), *apart_said(studies)]
    for text in apart:
        (notify if format in ("table", "markdown") else warn)(text)
    if format == "csv":
        print(results_csv(best, judge, tuned), end="")
        return
    if format == "table":
        show(best, judge, params.get("published"), tuned)
    else:
        render = beside.markdown if format == "markdown" else beside.latex
        print(getattr(results(best, judge, tuned), format)())
        print(getattr(best_table(best, judge), format)())
        if published:
            print(render(published, changed, best))
    if format != "latex":
        everything = [run for study in studies for run in study.runs]
        left_open = [*unfinished(study.sweep for study in studies), *unranked_said(studies)]
        for text in [*differences_said(best, judge), *machines_said(everything, judge), *left_open]:
            notify(text)


def _tags(given: list[str]) -> dict[str, str]:
    for text in given:
        if "=" not in text or "'" in text or "`" in text:
            raise ConfigError(f"--tag: {text!r} is not valid. Allowed: NAME=VALUE without quotes, e.g. data=digits")
    return {name: value for name, _, value in (text.partition("=") for text in given)}


def _studies(readers: "list[Reader]", names: list[str], tags: dict[str, str]) -> "list[Study]":
    """Return the newest sweep of each name (default: the newest of all) on every server that has it. A name is that of
    an experiment, otherwise a label."""
    from rayfl.results.studies import Study

    sweeps = [(reader, reader.read("sweep")) for reader in readers]
    known = {sweep[key] for _, some in sweeps for sweep in some for key in ("label", "experiment")}
    if not known:
        raise ConfigError("compare: MLflow has no sweep. Hint: run a sweep first, or `rayfl report FOLDER` for a run")
    found = []
    for name in names or [None]:
        newest = [
            (reader, next((s for key in ("experiment", "label") for s in some if name in (None, s[key])), None))
            for reader, some in sweeps
        ]
        if not any(sweep for _, sweep in newest):
            raise ConfigError(f"compare: no sweep is called {name!r}. {nearest(name, known)}")
        found += [(reader, sweep) for reader, sweep in newest if sweep]
    # a sweep may be on several servers
    studies: dict[str, tuple[dict, dict[str, dict]]] = {}
    for reader, sweep in found:
        _, runs = studies.setdefault(sweep["id"], (sweep, {}))
        for run in reader.read(sweep=sweep["id"], tags=tags):
            runs.setdefault(run["id"], run)
    return [Study(sweep, list(runs.values())) for sweep, runs in studies.values()]


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a sweep or of a run.")],
    metric: Annotated[str | None, typer.Option(help="Metric that ranks the tuned rows. Default: the sweep's.")] = None,
    html: Annotated[bool, typer.Option("--html", help="Also write an interactive page: report.html.")] = False,
    paper: Annotated[bool, typer.Option("--paper", help="Also write the plots as PDF and SVG.")] = False,
) -> None:
    """Rebuild tables and plots from a folder of runs."""
    from rayfl.results.drawing import FORMATS
    from rayfl.results.findings import unfinished, unranked
    from rayfl.results.report import report_on

    found = report_on(folder, metric, warn, tuple(FORMATS) if paper else (), html)
    show(found.best, found.judge, found.config.get("published"), found.tuned)
    left_open = unfinished([found.run.record()] if found.run else found.trials)
    for text in [*left_open, *unranked(found.best, found.trials, found.metric)]:
        notify(text)
    notify(f"{'report.html, ' if html else ''}results.csv, results.md, results.tex and plots in {folder}")


def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a run or of a sweep.")],
    capacity: Annotated[float, typer.Option(help="Capacity of the submodel.")],
    to: Annotated[Path, typer.Option(help="Folder to write.")],
    row: Annotated[str | None, typer.Option(help="Row of a sweep: its best trial.")] = None,
    client: Annotated[int | None, typer.Option(help="Client whose personal network to export.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Use the best round instead of the last (run.checkpoint: best).")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Export the bare network, which takes prepared samples.")] = False,
) -> None:
    """Export the submodel of a capacity: model.safetensors, config.json, and model.pt2 for torch.export.load, which
    takes samples as the data set stores them. Filters and neurons removed by a mask are left out."""
    from rayfl.networks import export as exported

    exported(folder, capacity, to, client, row=row, best=best, raw=raw, notify=warn)
    notify(f"model.safetensors, config.json and model.pt2 in {to}")


def generate(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    prompts: Annotated[list[str], typer.Argument(help="Messages of a user, each put into the template of the data.")],
    capacity: Annotated[float, typer.Option(help="Capacity of the network.")],
    client: Annotated[int | None, typer.Option(help="Client whose personal network answers.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Use the best round instead of the last (run.checkpoint: best).")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = 128,
) -> None:
    """Print answers of a language model trained on data set instructions. Each token is the most likely one."""
    from rayfl.networks import generate as generated

    for text in generated(folder, prompts, capacity, client, best=best, max_new_tokens=max_new_tokens, notify=warn):
        print(text)


def status(
    address: Annotated[
        str | None, typer.Option(help="Running cluster, HOST:PORT. Default: RAY_ADDRESS, otherwise this machine's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show a running cluster: nodes with their client actors, and runs with their trial, round, deaths and time
    left."""
    import json
    import os
    from dataclasses import asdict

    from rayfl.engine.on_ray import status as now
    from rayfl.engine.on_ray.cluster import cluster
    from rayfl.results.status import nodes_table, runs_table, trials

    with cluster(address or os.environ.get("RAY_ADDRESS") or "auto"):
        nodes, runs = now.nodes(), now.running()
    studies = trials(runs)
    if as_json:
        found = {"nodes": [asdict(node) for node in nodes], "runs": [asdict(run) | {"left": run.left} for run in runs]}
        print(json.dumps(found | {"trials": studies}, indent=1))
        return
    print_table(nodes_table(nodes, runs))
    if not runs:
        notify("no runs")
        return
    print_table(runs_table(runs))
    for study, counts in studies.items():
        notify(f"{study}: {', '.join(f'{count} {status}' for status, count in counts.items())}")
