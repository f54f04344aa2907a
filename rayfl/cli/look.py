"""rayfl compare | report | export: what is made of runs that ended."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rayfl.cli.shared import Output, TrackingUri, client_of, say, show, warn
from rayfl.config import ConfigError, choose, nearest


def compare(
    name: Annotated[str | None, typer.Argument(help="A sweep's name; unless given the newest sweep.")] = None,
    output: Output = Path("runs"),
    tracking_uri: TrackingUri = None,
    metric: Annotated[str | None, typer.Option(help="What the best trial is chosen by; the sweep's own.")] = None,
    format: Annotated[Literal["table", "markdown", "csv", "latex"], typer.Option(help="What to print.")] = "table",
) -> None:
    """The best trial of every method, from MLflow: mean and standard deviation over seeds."""
    from rayfl.results import published as beside
    from rayfl.results.rows import best_trials, facts_of
    from rayfl.results.tables import best_table, results_csv
    from rayfl.results.tables import table as results
    from rayfl.results.tuned import tuned

    client = client_of(output, tracking_uri, warn)
    if output.is_dir():
        client.sync_all(output)
    sweep = _newest(client.read(kind="sweep"), name)
    params, judge = sweep["params"], sweep["facts"]["judge"]
    trials = client.read(sweep=sweep["id"])
    found = [record for record in trials if record["status"] == "finished"]
    metric = metric or params.get("search.metric")
    choose({key: None for record in found for key in record}, metric, "--metric", "result")
    best = best_trials(found, metric, params.get("search.mode", "auto"))
    chosen = tuned(best, trials, facts_of(sweep).tuned, metric, params.get("search.mode", "auto"))
    published, changed = beside.from_config(params)
    if format == "csv":
        print(results_csv(best, judge, chosen), end="")
    elif format == "table":
        show(best, judge, params.get("published"), chosen)
    else:
        render = beside.markdown if format == "markdown" else beside.latex
        print(getattr(results(best, judge, chosen), format)())
        print(getattr(best_table(best, judge), format)())
        if published:
            print(render(published, changed, best))


def _newest(sweeps: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """The newest sweep, or the newest of this name."""
    named = [sweep for sweep in sweeps if name in (None, sweep["label"])]
    if not named:
        known = nearest(name, {sweep["label"] for sweep in sweeps})
        raise ConfigError(f"compare: no sweep is called {name!r}; {known}")
    return named[0]


def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a sweep or of a run.")],
    metric: Annotated[str | None, typer.Option(help="What the best trial is chosen by; the sweep's own.")] = None,
    html: Annotated[
        bool, typer.Option("--html", help="One page with all of it too, interactive: report.html.")
    ] = False,
    paper: Annotated[bool, typer.Option("--paper", help="Plots as PDF and SVG too.")] = False,
) -> None:
    """Tables and plots again, from a folder of runs."""
    from rayfl.report import report_on
    from rayfl.results.drawing import FORMATS

    found = report_on(folder, metric, warn, tuple(FORMATS) if paper else (), html)
    show(found.best, found.judge, found.config.get("published"), found.tuned)
    say(f"{'report.html, ' if html else ''}results.csv, results.md, results.tex and plots in {folder}")


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run with checkpoints.")],
    capacity: Annotated[float, typer.Option(help="Which submodel.")],
    to: Annotated[Path, typer.Option(help="Folder to write.")],
    client: Annotated[int | None, typer.Option(help="That client's own, if it keeps something.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="After the best round in place of the last (run.checkpoint: best).")
    ] = False,
) -> None:
    """The submodel of a capacity: model.safetensors, config.json, and model.pt2 for torch.export.load. The filters and
    neurons that a mask removed for good are left out."""
    from rayfl.driver import export as exported

    exported(run, capacity, to, client, best=best, say=warn)
    say(f"model.safetensors, config.json and model.pt2 in {to}")
