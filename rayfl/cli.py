"""The command line: run | sweep | scale | compare | report | describe | check | list | export.

Exit codes: 0 done, 1 the run failed, 2 bad input (nothing is left behind), 130 stopped by the user, 143 by SIGTERM.
Heavy imports stand inside the commands, so that `--help` and an error in a YAML file come at once.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.exceptions import TyperException

from rayfl.config import ConfigError, choose, component, load_yaml, nearest
from rayfl.termination import Terminated, leave

if TYPE_CHECKING:
    from rayfl.experiment import Experiment
    from rayfl.results.mlflow import Mlflow, Sender
    from rayfl.results.tables import Record

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()
errors = Console(stderr=True)

QUICKSTART = Path("tune_configs/quickstart.yaml")
SCALE = Path("tune_configs/scale.yaml")
MLFLOW_EXPERIMENT = "rayfl"
WIDTH = 140
"""Columns of a table that goes into a file or a pipe."""
STOPPED = 130
"""What typer makes of a KeyboardInterrupt."""

ConfigPath = Annotated[Path, typer.Argument(help="A YAML file of tune_configs/, or your own.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change the experiment: training.lr=0.1"),
]
Output = Annotated[Path, typer.Option(resolve_path=True, help="Folder of all runs, of mlflow.db and its artifacts.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where it was stopped.")]
Address = Annotated[
    str | None,
    typer.Option(help="A running Ray cluster; unless given RAY_ADDRESS, else a local one of its own."),
]
TrackingUri = Annotated[
    str | None,
    typer.Option(help="An MLflow server; unless given MLFLOW_TRACKING_URI, else sqlite in --output."),
]
Name = Annotated[str | None, typer.Option(help="Name of its folder below --output; unless given the file's.")]


def main() -> None:
    """Runs the command line with the exit codes of this module. Packages in the working folder can be imported."""
    sys.path.append(os.getcwd())
    signal.signal(signal.SIGTERM, leave)
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (ConfigError, TyperException) as error:
        said = error.format_message() if isinstance(error, TyperException) else error
        _say(f"error: {said}", style="red")
        sys.exit(2)
    except Exception as error:
        _say(f"failed: {error}", style="red")
        sys.exit(1)
    except Terminated:
        _say_stopped()
        raise
    if code == STOPPED:
        _say_stopped()
    sys.exit(code)


def _say_stopped() -> None:
    _say("stopped; if it wrote a checkpoint, the same command with --resume goes on from there")


@app.command()
def run(
    config: ConfigPath,
    settings: Settings = None,
    row: Annotated[str | None, typer.Option(help="Of a sweep's CONFIG: this row, at its first point.")] = None,
    output: Output = Path("runs"),
    name: Name = None,
    resume: Resume = False,
    address: Address = None,
    tracking_uri: TrackingUri = None,
) -> None:
    """One federated run: config, metrics, result, plots and checkpoints in a folder, and in MLflow."""
    from rayfl import driver
    from rayfl.report import write_labels, write_report
    from rayfl.results.console import RunProgress, Shown

    config = find_config(config)
    experiment = _experiment(config, settings, row)
    folder = _folder(output, name or (f"{config.stem}-{row}" if row else config.stem))
    driver.check_folder(folder, experiment.plain(), resume)
    progress = RunProgress(experiment.method.name, experiment.rounds, experiment.facts()["judge"])
    sending = _mlflow(output, tracking_uri, progress.note)
    arrays = _located(config, lambda: driver.load_data(experiment))
    with progress, sending as sender:
        shown = Shown.on(progress, sender.add)
        result = driver.run(experiment, folder, resume=resume, address=address, listeners=[shown], arrays=arrays)
        rows = [result.folder.record()]
        write_report(folder, rows, rows, progress.note)
        write_labels(folder / "plots" / "labels", experiment, arrays)
    _show(rows, result.folder.facts.judge)
    _print(f"results in {folder}")
    _print_mlflow(output, tracking_uri)


@app.command()
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
) -> None:
    """Tunes every row of a comparison with the same budget and ranks the tuned methods."""
    from rayfl import comparison, driver
    from rayfl.results.console import SweepProgress
    from rayfl.tuning.load import load_sweep

    config = find_config(config)
    settings = [*(settings or []), *([f"rounds={rounds}"] if rounds is not None else [])]
    plan = load_sweep(config, settings, rows)
    folder = _folder(output, name or plan.name)
    driver.check_folder(folder, plan.plain(), resume)
    rounds = plan.first.rounds
    progress = SweepProgress(plan.trials, rounds, plan.search.metric, plan.mode)
    sending = _mlflow(output, tracking_uri, progress.note)
    arrays = _located(config, lambda: driver.load_data(plan.first))
    clients, data = plan.first.clients.count, plan.first.data.name
    _print(
        f"{plan.name}: {len(plan.rows)} methods, {plan.trials} trials of {rounds} rounds, {clients} clients on {data}; "
        f"results in {folder}"
    )
    with progress, sending as sender:
        found = comparison.sweep(
            plan, folder, resume=resume, address=address, progress=progress, follow=sender.add, arrays=arrays
        )
    _show(found.best, found.folder.facts.judge, found.folder.config.get("published"))
    _print(f"results.csv, results.md and plots in {folder}")
    _print_mlflow(output, tracking_uri)


@app.command()
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
) -> None:
    """Rounds per second, memory and traffic against clients, cohort, actors and nodes, one at a time; all four unless
    some are given."""
    from rayfl import scaling
    from rayfl.results.scaling import findings, table

    config = find_config(config)
    if row is None and "experiment" in (given := load_yaml(config)):
        row = next(iter(given.get("rows") or ["run"]))
    experiment = _experiment(config, settings, row)
    asked = {"clients": clients, "cohort": cohort, "actors": actors, "nodes": nodes}
    axes = scaling.axes_of(asked, address)
    folder = _folder(output, name or "scale")
    with _mlflow(output, tracking_uri, _say) as sender:
        found = scaling.scale(experiment, folder, axes, rounds=rounds, address=address, say=_print, follow=sender.add)
    for axis, rows in found.items():
        if rows:
            _print_table(table(axis, rows).rich())
    for text in findings(found):
        _print(text)
    _print(f"scale.json, scale.csv, scale.md and plots in {folder}")
    _print_mlflow(output, tracking_uri)


@app.command()
def compare(
    name: Annotated[str | None, typer.Argument(help="A sweep's name; unless given the newest sweep.")] = None,
    output: Output = Path("runs"),
    tracking_uri: TrackingUri = None,
    metric: Annotated[str | None, typer.Option(help="What the best trial is chosen by; the sweep's own.")] = None,
    format: Annotated[str, typer.Option(help="table, markdown, csv or latex.")] = "table",
) -> None:
    """The best trial of every method, from MLflow: mean and standard deviation over seeds."""
    from rayfl.results import published as beside
    from rayfl.results.tables import best_table, best_trials, results_csv
    from rayfl.results.tables import table as results

    choose(dict.fromkeys(["table", "markdown", "csv", "latex"]), format, "--format", "format")
    client = _client(output, tracking_uri, _say)
    if output.is_dir():
        client.sync_all(output)
    sweep = _newest(client.read(kind="sweep"), name)
    params, judge = sweep["params"], sweep["facts"]["judge"]
    found = [record for record in client.read(sweep=sweep["id"]) if record["status"] == "finished"]
    metric = metric or params.get("search.metric")
    choose({key: None for record in found for key in record}, metric, "--metric", "result")
    best = best_trials(found, metric, params.get("search.mode", "auto"))
    published, changed = beside.from_config(params)
    if format == "csv":
        print(results_csv(best, judge), end="")
    elif format == "table":
        _show(best, judge, params.get("published"))
    else:
        render = beside.markdown if format == "markdown" else beside.latex
        print(getattr(results(best, judge), format)())
        print(getattr(best_table(best, judge), format)())
        if published:
            print(render(published, changed, best))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a sweep or of a run.")],
    metric: Annotated[str | None, typer.Option(help="What the best trial is chosen by; the sweep's own.")] = None,
) -> None:
    """Tables and plots again, from a folder of runs."""
    from rayfl.report import report_on
    from rayfl.results.folder import RunFolder

    best, judge = report_on(folder, metric, _say)
    config = RunFolder.open(folder).config if RunFolder.exists(folder) else {}
    _show(best, judge, config.get("published"))
    _print(f"results.csv, results.md, results.tex and plots in {folder}")


@app.command()
def describe(
    config: Annotated[Path | None, typer.Argument(help="A YAML file, in place of --model.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A model by name, with the images that it was published for.")
    ] = None,
    capacities: Annotated[str | None, typer.Option(help="Shares, or HeteroFL's letters; 1,0.5,...,0.0625.")] = None,
    convention: Annotated[str, typer.Option(help="heterofl_official, macs or flops2.")] = "macs",
    metric: Annotated[str | None, typer.Option(help="What a capacity is a share of: width, params, flops.")] = None,
    method: Annotated[str | None, typer.Option(help="The method that decides what a capacity runs.")] = None,
    row: Annotated[str | None, typer.Option(help="Of a sweep's CONFIG: that row.")] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Number of classes, with --model.")] = None,
    coverage: Annotated[
        int, typer.Option(min=0, help="Rounds: the share of the server's parameters that a client ever holds in them.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list of records.")] = False,
) -> None:
    """What every capacity runs and costs: width, blocks and exits; parameters, FLOPs of one forward pass, bytes a
    round, size."""
    from rayfl.describe import changed, native
    from rayfl.describe import describe as described
    from rayfl.experiment import read_experiment
    from rayfl.operations import CONVENTIONS

    counted: Any = choose({name: name for name in CONVENTIONS}, convention, "--convention", "convention")
    if config is not None and model is None:
        if classes is not None:
            raise ConfigError("--classes: allowed: with --model; a CONFIG's data say their classes")
        config = find_config(config)
        given = _given(config, row)
    elif model is not None and config is None:
        if row is not None:
            raise ConfigError("--row: allowed: with a sweep's CONFIG")
        given = native(model, classes)
    else:
        raise ConfigError("describe: allowed: either a CONFIG or --model NAME")
    experiment = read_experiment(changed(given, capacities, metric, method), str(config or "describe"))
    found = described(experiment, counted, coverage)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table(title=f"{experiment.model.name}, FLOPs by {convention}", title_justify="left", box=None)
    for column in found[0]:
        table.add_column(column, justify="right")
    for record in found:
        cells = [f"{v:.4f}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v for v in record.values()]
        table.add_row(f"{record['capacity']:g}", *cells[1:])
    _print_table(table)


@app.command()
def check(configs: Annotated[list[Path], typer.Argument(help="YAML files.")]) -> None:
    """Validates files without starting Ray: keys, types, ranges, models at every capacity, search spaces."""
    from rayfl.experiment import load_experiment
    from rayfl.tuning.load import load_sweep

    for path in map(find_config, configs):
        if "experiment" in load_yaml(path):
            plan = load_sweep(path)
            _print(f"{path}: a sweep of {len(plan.rows)} rows: {', '.join(plan.rows)}")
        else:
            _print(f"{path}: a run of {load_experiment(path).method.name}")


@app.command(name="list")
def list_(
    names: Annotated[
        list[str] | None, typer.Argument(help='Classes of your own too, as "package.module:Class".')
    ] = None,
) -> None:
    """The methods, models, data sets, partitions, scores and listeners with their options, those of installed packages
    included."""
    from rayfl.catalogue import catalogue

    for section, entries in catalogue(names or []).items():
        table = Table(title=f"{section}: name", title_justify="left", show_header=False, box=None)
        for name, sentence, options in entries:
            table.add_row(Text(name, "bold"), Text(sentence), Text(options))
        _print_table(table)
        _print("")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run with checkpoints.")],
    capacity: Annotated[float, typer.Option(help="Which submodel.")],
    to: Annotated[Path, typer.Option(help="Folder to write.")],
    client: Annotated[int | None, typer.Option(help="That client's own, if it keeps something.")] = None,
) -> None:
    """The submodel of a capacity: model.safetensors, config.json, and model.pt2 for torch.export.load. The filters and
    neurons that a mask removed for good are left out."""
    from rayfl.driver import export as exported

    exported(run, capacity, to, client, say=_say)
    _print(f"model.safetensors, config.json and model.pt2 in {to}")


# what the commands share


def find_config(path: Path) -> Path:
    """The file, or the one of this name that travels inside the package: quickstart, tune_configs/quickstart.yaml."""
    shipped = [Path(__file__).with_name("tune_configs"), Path(__file__).parents[1] / "tune_configs"]
    named = [folder / f"{path.stem}.yaml" for folder in shipped if path.parent in (Path(), Path("tune_configs"))]
    return next((place for place in (path, *named) if place.is_file()), path)


def _given(config: Path, row: str | None) -> dict[str, Any]:
    """What a run's file holds, or a sweep's file, of one row if it is named."""
    given = load_yaml(config)
    if row is not None:
        return _experiment(config, None, row).plain()
    return dict(given["experiment"]) if isinstance(given.get("experiment"), dict) else given


def _experiment(config: Path, settings: list[str] | None, row: str | None) -> "Experiment":
    """A run's file, or one row of a sweep's, with settings laid over it."""
    from rayfl.experiment import load_experiment, overlaid, read_experiment
    from rayfl.tuning.load import load_sweep

    given = load_yaml(config)
    if "experiment" not in given:
        if row is not None:
            raise ConfigError(f"--row: given {row!r}; allowed: with a sweep's file, and {config} is a run's")
        return load_experiment(config, settings)
    if row is None:
        rows = ", ".join(map(str, given.get("rows") or ["run"]))
        raise ConfigError(f"{config}: given a sweep; allowed: a run's file, or --row with one of {rows}")
    example = load_sweep(config, rows=row).example(row).plain()
    return read_experiment(overlaid(example, settings), f"{config}: rows.{row}")


def _folder(output: Path, name: str) -> Path:
    """A run's folder below the output folder."""
    return output / component(name, "--name")


def _located(config: Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}") from None


def _mlflow(output: Path, uri: str | None, note: Callable[[str], None]) -> "Sender":
    """Sends to MLflow, in a thread, the runs that it is told of, and those of earlier commands that it has not got."""
    from rayfl.results.mlflow import Sender

    return Sender(_client(output, uri, note), output)


def _client(output: Path, uri: str | None, note: Callable[[str], None]) -> "Mlflow":
    from rayfl.results.mlflow import Mlflow

    return Mlflow(_uri(output, uri), MLFLOW_EXPERIMENT, note)


def _uri(output: Path, uri: str | None) -> str:
    from rayfl.results.mlflow import default_uri

    return uri or os.environ.get("MLFLOW_TRACKING_URI") or default_uri(output)


def _newest(sweeps: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """The newest sweep, or the newest of this name."""
    named = [sweep for sweep in sweeps if name in (None, sweep["label"])]
    if not named:
        known = nearest(name, {sweep["label"] for sweep in sweeps})
        raise ConfigError(f"compare: no sweep is called {name!r}; {known}")
    return named[0]


def _show(records: "Sequence[Record]", judge: str, published: str | None = None) -> None:
    """The tables of a run or a sweep, and a paper's numbers if it has some. The best rounds are shown where clients'
    own accuracies judge."""
    from rayfl.results import published as beside
    from rayfl.results.tables import best_table, table

    _print_table(table(records, judge).rich())
    if judge.startswith("local_"):
        best = best_table(records, judge)
        _print_table(best.rich(full=len(best.header)))
    section, changed = beside.from_config({"published": published} if published else {})
    if section:
        _print("\n".join(beside.caption(section, changed)))
        numbers = beside.table(section, records)
        _print_table(numbers.rich(full=len(numbers.header)))


def _print_table(table: Table) -> None:
    (console if console.is_terminal else Console(width=WIDTH)).print(table)


def _print(text: str) -> None:
    console.print(_plain(text), soft_wrap=True)


def _say(text: str, style: str = "") -> None:
    errors.print(_plain(text, style), soft_wrap=True)


def _plain(text: str, style: str = "") -> Text:
    """As it is: no markup, no highlighting; what cannot be encoded, as in a path, becomes "?"."""
    return Text(text.encode(errors="replace").decode(), style)


def _print_mlflow(output: Path, uri: str | None) -> None:
    _print(f"open MLflow: mlflow ui --backend-store-uri {_uri(output, uri)}")
