"""The command line: run | sweep | compare | report | describe | check | list | export.

Exit codes: 0 done, 1 the run failed, 2 bad input (nothing is left behind), 130 stopped by the user.
Heavy imports stand inside the commands, so that `--help` and an error in a YAML file come at once.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.exceptions import TyperException

from rayfl.config import ConfigError

if TYPE_CHECKING:
    from rayfl.experiment import Experiment
    from rayfl.report import Record
    from rayfl.tracking.mlflow import Mlflow
    from rayfl.tracking.records import Run
    from rayfl.tuning import Sweep

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()
errors = Console(stderr=True)

QUICKSTART = Path("tune_configs/quickstart.yaml")
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
    """Runs the command line with the exit codes of this module."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (ConfigError, TyperException) as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except Exception as error:
        errors.print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    if code == STOPPED:
        errors.print("stopped; the same command with --resume goes on from the last checkpoint", soft_wrap=True)
    sys.exit(code)


@app.command()
def run(
    config: ConfigPath,
    settings: Settings = None,
    output: Output = Path("runs"),
    name: Name = None,
    resume: Resume = False,
    address: Address = None,
    tracking_uri: TrackingUri = None,
) -> None:
    """One federated run: config, metrics, result, plots and checkpoints in a folder, and in MLflow."""
    from rayfl.experiment import load_experiment
    from rayfl.report import judged_by, label_distribution
    from rayfl.tracking.console import RunProgress
    from rayfl.tracking.records import flatten, summary

    experiment = load_experiment(config, settings)
    params = flatten(experiment.plain())
    folder = output / (name or config.stem)
    arrays = _load_data(experiment, config)
    _check_folder(folder, experiment.plain(), resume)
    status, error = "stopped", None
    # what Ray refuses leaves no folder behind
    with _opened(experiment, arrays, folder, address) as simulation:
        costs = experiment.costs()
        record = _open_run(folder, experiment.method.name, experiment.plain(), experiment.tags(), costs=costs)
        with (
            RunProgress(record.label, experiment.rounds, judged_by(params)) as progress,
            _mlflow(output, tracking_uri, progress.note) as sender,
        ):
            sender.add(record.path)
            try:
                _go_on(simulation, record, progress)
                for lines in _rounds(simulation, record.path / "checkpoints", experiment.run.checkpoint_seconds):
                    record.append(lines)
                    if "accuracy_mean" in lines[-1]:
                        record.save_clients(simulation.client_accuracy())
                    for line in lines:
                        progress.update(line["round"], line)
                        if "refusals" in line:
                            progress.note(f"round {line['round']}: refused {line['refusals']}")
                status = "finished"
            except Exception as failure:
                status, error = "failed", str(failure)
                raise
            finally:
                record.finish(status, summary(record.rounds(), record.label, experiment.seed), error)
                if status == "finished":
                    rows = [record.record()]
                    _write_report(record.path, rows, rows, params, progress.note)
                    label_distribution(record.path / "plots" / "labels.png", _label_counts(experiment, arrays))
    _show_best([record.record()], params)
    console.print(f"results in {record.path}", soft_wrap=True)
    _say_mlflow(output, tracking_uri)


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
    settings = [*(settings or []), *([f"rounds={rounds}"] if rounds is not None else [])]
    from rayfl.executors.cluster import cluster
    from rayfl.report import label_distribution
    from rayfl.tracking.console import SweepProgress
    from rayfl.tracking.records import flatten, records
    from rayfl.tuning import Interrupted, check_room, expected_trials, load_sweep, run_sweep

    plan = load_sweep(config, settings, rows)
    example = plan.example(next(iter(plan.rows)))
    arrays = _load_data(example, config)
    splits = _splits(plan, arrays)
    folder = output / (name or plan.name)
    tags = {"config": config, "rows": ", ".join(plan.rows), "commit": example.tags()["commit"]}
    _check_folder(folder, plan.plain(), resume)
    console.print(
        f"{plan.name}: {len(plan.rows)} methods, {expected_trials(plan)} trials of {example.rounds} rounds, "
        f"{example.clients.count} clients on {example.data.name}; results in {folder}",
        soft_wrap=True,
        highlight=False,
    )
    status, error = "stopped", None
    progress = SweepProgress(expected_trials(plan), example.rounds, plan.search.metric, plan.search.mode)
    with cluster(address):
        check_room(plan, address)
        record = _open_run(folder, plan.name, plan.plain(), tags, kind="sweep")
        with progress, _mlflow(output, tracking_uri, progress.note) as sender:
            sender.add(record.path)
            try:
                best = run_sweep(plan, record, arrays, progress, sender.add)
                _write_report(folder, best, records(folder, record.id), flatten(plan.plain()), progress.note)
                for name, experiment in splits.items():
                    label_distribution(folder / "plots" / name, _label_counts(experiment, arrays))
                status = "finished"
            except Interrupted:
                raise KeyboardInterrupt from None
            except Exception as failure:
                status, error = "failed", str(failure)
                raise
            finally:
                record.finish(status, {}, error)
    _show_best(best, flatten(plan.plain()))
    console.print(f"results.csv, results.md and plots in {folder}", soft_wrap=True, highlight=False)
    _say_mlflow(output, tracking_uri)


@app.command()
def compare(
    name: Annotated[str | None, typer.Argument(help="A sweep's name; unless given the newest sweep.")] = None,
    output: Output = Path("runs"),
    tracking_uri: TrackingUri = None,
    metric: Annotated[str | None, typer.Option(help="What the best trial is chosen by; the sweep's own.")] = None,
    format: Annotated[str, typer.Option(help="table, markdown, csv or latex.")] = "table",
) -> None:
    """The best trial of every method, from MLflow: mean and standard deviation over seeds."""
    from rayfl import published as beside
    from rayfl.config import choose
    from rayfl.report import best_table, judged_by, results_csv
    from rayfl.report import table as results

    choose(dict.fromkeys(["table", "markdown", "csv", "latex"]), format, "--format", "format")
    client = _client(output, tracking_uri, _say)
    if output.is_dir():
        client.sync_all(output)
    params, best = _best_of(client, name, metric)
    judge = judged_by(params)
    published, changed = beside.from_config(params)
    if format == "csv":
        print(results_csv(best, judge), end="")
    elif format == "table":
        _show_best(best, params)
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
    from rayfl.tracking.records import Run, flatten, records

    evaluated = [record for record in records(folder) if "accuracy_mean" in record]
    found = [record for record in evaluated if record["status"] == "finished"] or evaluated
    if not found:
        raise ConfigError(f"{folder}: holds no run with an accuracy; allowed: the folder of a sweep or a run")
    params = flatten(Run.open(folder).config) if Run.exists(folder) else {}
    best = _choose_best(found, params, metric)
    _write_report(folder, best, found, params, _say)
    _show_best(best, params)
    console.print(f"results.csv, results.md, results.tex and plots in {folder}", soft_wrap=True)


@app.command()
def describe(
    config: Annotated[Path | None, typer.Argument(help="A YAML file, in place of --model.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A model by name, with the images that it was published for.")
    ] = None,
    capacities: Annotated[str | None, typer.Option(help="Shares, or HeteroFL's letters; 1,0.5,...,0.0625.")] = None,
    convention: Annotated[Any, typer.Option(help="heterofl_official, macs or flops2.")] = "macs",
    metric: Annotated[str | None, typer.Option(help="What a capacity is a share of: width, params, flops.")] = None,
    method: Annotated[str | None, typer.Option(help="The method that decides what a capacity runs.")] = None,
    row: Annotated[str | None, typer.Option(help="Of a sweep's CONFIG: that row.")] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes.")] = None,
    coverage: Annotated[
        int, typer.Option(min=0, help="Rounds: the share of the server's parameters that a client ever holds in them.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list of records.")] = False,
) -> None:
    """What every capacity runs and costs: width, blocks and exits; parameters, FLOPs of one forward pass, bytes a
    round, size."""
    from rayfl import costs
    from rayfl.config import choose
    from rayfl.experiment import describe_experiment, experiment_section, native, parse_experiment
    from rayfl.tuning import load_sweep

    choose(dict.fromkeys(costs.CONVENTIONS), convention, "--convention", "convention")
    if (config is None) == (model is None):
        raise ConfigError("describe: allowed: either a CONFIG or --model NAME")
    if row is not None:
        if config is None:
            raise ConfigError("--row: allowed: with a sweep's CONFIG")
        given = load_sweep(config, rows=row).example(row).plain()
    else:
        given = experiment_section(config) if config else native(model)
    clients = dict(given.get("clients", {}))
    if capacities:
        clients |= {"capacities": capacities if capacities[:1].isalpha() else _floats(capacities), "weights": []}
    if metric:
        clients["metric"] = metric
    given |= {"clients": clients, "method": method or given.get("method", "heterofl")}
    if classes:
        given["model"] = dict(given["model"]) | {"classes": classes}
    experiment = parse_experiment(given, str(config or "describe"))
    records = describe_experiment(experiment, convention, coverage)
    if as_json:
        print(json.dumps(records, indent=1))
        return
    table = Table(title=f"{experiment.model.name}, FLOPs by {convention}", title_justify="left", box=None)
    for column in records[0]:
        table.add_column(column, justify="right")
    for record in records:
        cells = [f"{v:.4f}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v for v in record.values()]
        table.add_row(f"{record['capacity']:g}", *cells[1:])
    _print(table)


@app.command()
def check(configs: Annotated[list[Path], typer.Argument(help="YAML files.")]) -> None:
    """Validates files without starting Ray: keys, types, ranges, models at every capacity, search spaces."""
    from rayfl.config import load_yaml
    from rayfl.experiment import load_experiment
    from rayfl.tuning import load_sweep

    for path in configs:
        if "experiment" in load_yaml(path):
            plan = load_sweep(path)
            console.print(f"{path}: a sweep of {len(plan.rows)} rows: {', '.join(plan.rows)}", soft_wrap=True)
        else:
            experiment = load_experiment(path)
            console.print(f"{path}: a run of {experiment.method.name}", soft_wrap=True)


@app.command(name="list")
def list_() -> None:
    """The methods, models, data sets and partitions, with their options."""
    from rayfl.experiment import NAMED

    for section, (registry, _) in NAMED.items():
        table = Table(title=f"{section}: name", title_justify="left", show_header=False, box=None)
        for name, cls in registry.items():
            options = ", ".join(
                f"{key}={field.default!r}"
                for key, field in cls.model_fields.items()
                if key not in ("name", "task", "input", "classes")
            )
            table.add_row(f"[bold]{name}[/]", _first_sentence(cls), options)
        console.print(table)
        console.print()


def _first_sentence(cls: type) -> str:
    """Of its docstring, or of the file that it stands for."""
    text = cls.__doc__ or sys.modules[cls.__module__].__doc__ or ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a run with checkpoints.")],
    capacity: Annotated[float, typer.Option(help="Which submodel.")],
    to: Annotated[Path, typer.Option(help="Folder to write.")],
    client: Annotated[int | None, typer.Option(help="That client's own, if it keeps something.")] = None,
) -> None:
    """The submodel of a capacity: model.safetensors, config.json, and model.pt2 for torch.export.load. The filters and
    neurons that a mask removed for good are left out."""
    from rayfl.export import export_submodel

    export_submodel(run, capacity, to, client, _say)
    console.print(f"model.safetensors, config.json and model.pt2 in {to}", soft_wrap=True)


# what the commands share


def _say(text: str) -> None:
    errors.print(text, soft_wrap=True)


def _load_data(experiment: "Experiment", config: Path):
    """The arrays, and every error that only they can show, before Ray starts."""
    try:
        arrays = experiment.data.load()
        experiment.federate(arrays)
        experiment.model.prepare()
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}") from None
    return arrays


def _splits(plan: "Sweep", arrays) -> "dict[str, Experiment]":
    """Name of a plot of labels -> an experiment with that split of the data, one for each that the rows have. Some
    errors show only when it is made."""
    splits: dict[str, tuple[str, Experiment]] = {}
    for row in plan.rows:
        experiment = plan.example(row)
        key = repr((experiment.partition, experiment.clients.count, experiment.evaluation.holdout))
        try:
            experiment.model.prepare()
            if key not in splits:
                experiment.federate(arrays)
        except ConfigError as error:
            raise ConfigError(f"{plan.where}: rows.{row}: {error}") from None
        splits.setdefault(key, (f"labels-{row}.png" if splits else "labels.png", experiment))
    return dict(splits.values())


def _check_folder(folder: Path, config: dict, resume: bool) -> None:
    """A folder is new, or with `resume` it holds a run of the same configuration."""
    from rayfl.checkpoints import same_config
    from rayfl.experiment import read_experiment
    from rayfl.tracking.records import Run

    if resume:
        free = ("rounds", "run", "published")
        saved = Run.open(folder).config
        if "experiment" not in saved:
            saved = read_experiment(saved, str(folder / "config.json")).plain()
        old, new = ({k: v for k, v in c.items() if k not in free} for c in (saved, config))
        same_config(folder / "config.json", old, new)
    elif Run.exists(folder):
        raise ConfigError(f"{folder}: holds a run already; --resume goes on with it, --name gives another folder")


def _open_run(folder: Path, label: str, config: dict, tags: dict, **more: Any) -> "Run":
    """The record that is there, or a new one."""
    from rayfl.tracking.records import Run

    if not Run.exists(folder):
        return Run.create(folder, label, config, tags, **more)
    record = Run.open(folder)
    record.resume()
    return record


@contextmanager
def _opened(experiment: "Experiment", arrays, folder: Path, address: str | None) -> Iterator[Any]:
    """The experiment's simulation, in this process or on Ray: the same verbs."""
    if experiment.run.executor == "serial":
        yield experiment.simulation(arrays, folder)
        return
    from rayfl.executors.cluster import running

    with running(experiment, arrays, folder, address) as simulation:
        yield simulation


def _rounds(simulation, folder: Path, checkpoint_seconds: float) -> Iterator[list[dict[str, Any]]]:
    """The lines of a run to its end, with a checkpoint every so often and at the end."""
    saved = time.monotonic()
    while lines := simulation.step():
        yield lines
        if time.monotonic() - saved > checkpoint_seconds:
            simulation.save(folder)
            saved = time.monotonic()
    simulation.save(folder)


def _go_on(simulation, record: "Run", progress) -> None:
    """Restores the last checkpoint, if there is one, and forgets the rounds after it."""
    round, said = simulation.restore(record.path / "checkpoints")
    for text in said:
        progress.note(text)
    record.truncate_after(round)
    progress.first = progress.round = round


@contextmanager
def _mlflow(output: Path, uri: str | None, note: Callable[[str], None]) -> Iterator[Any]:
    """Sends to MLflow, in a thread, the runs that it is told of."""
    from rayfl.tracking.mlflow import Sender

    with Sender(_client(output, uri, note)) as sender:
        yield sender


def _client(output: Path, uri: str | None, note: Callable[[str], None]) -> "Mlflow":
    from rayfl.tracking.mlflow import Mlflow

    return Mlflow(_uri(output, uri), MLFLOW_EXPERIMENT, note)


def _uri(output: Path, uri: str | None) -> str:
    from rayfl.tracking.mlflow import default_uri

    return uri or os.environ.get("MLFLOW_TRACKING_URI") or default_uri(output)


def _say_mlflow(output: Path, uri: str | None) -> None:
    console.print(f"open MLflow: mlflow ui --backend-store-uri {_uri(output, uri)}", soft_wrap=True, highlight=False)


def _choose_best(found: list[dict[str, Any]], params: Mapping[str, Any], metric: str | None) -> "list[Record]":
    """The best trial of every method, by the metric of the sweep with these flat parameters unless another is asked
    for."""
    from rayfl.config import choose
    from rayfl.report import best_trials, judged_by

    metric = metric or str(params.get("search.metric", judged_by(params)))
    choose({key: None for record in found for key in record}, metric, "--metric", "result")
    return best_trials(found, metric, params.get("search.mode", "max"))


def _best_of(client: "Mlflow", name: str | None, metric: str | None) -> "tuple[dict[str, str], list[Record]]":
    """A sweep's parameters and its best trials in MLflow; the newest unless it is named."""
    from rayfl.config import nearest

    sweeps = client.read(kind="sweep")
    named = [sweep for sweep in sweeps if name in (None, sweep["label"])]
    if not named:
        known = nearest(name, {sweep["label"] for sweep in sweeps})
        raise ConfigError(f"compare: no sweep is called {name!r}; {known}")
    params = named[0]["params"]
    found = [record for record in client.read(sweep=named[0]["id"]) if record["status"] == "finished"]
    return params, _choose_best(found, params, metric)


def _show_best(records: "Sequence[Record]", config: Mapping[str, Any]) -> None:
    """The tables of a run or a sweep with this flat configuration, and a paper's numbers if it has some. The best
    rounds are shown where clients' own accuracies judge."""
    from rayfl import published as beside
    from rayfl.report import best_table, judged_by, table

    judge = judged_by(config)
    _print(table(records, judge).rich())
    if judge == "local_accuracy_mean":
        best = best_table(records, judge)
        _print(best.rich(full=len(best.header)))
    published, changed = beside.from_config(config)
    if published:
        console.print("\n".join(beside.caption(published, changed)), soft_wrap=True, highlight=False)
        numbers = beside.table(published, records)
        _print(numbers.rich(full=len(numbers.header)))


def _write_report(
    folder: Path,
    records: "Sequence[Record]",
    trials: "Sequence[Record]",
    config: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """Everything that a run or a comparison leaves in its folder: of its best trials, and of all."""
    from rayfl import published as beside
    from rayfl.anatomy import write_anatomy
    from rayfl.report import judged_by, write_pareto, write_report

    judge = judged_by(config)
    write_report(folder, records, judge)
    finished = [trial for trial in trials if trial["status"] == "finished"]
    write_pareto(folder, finished, config.get("search.metric", judge))
    write_anatomy(folder, records, say, judge)
    published, changed = beside.from_config(config)
    if published:
        (folder / "published.md").write_text(beside.markdown(published, changed, records))


def _print(table: Table) -> None:
    (console if console.is_terminal else Console(width=WIDTH)).print(table)


def _label_counts(experiment: "Experiment", arrays):
    from rayfl.data.partition import label_counts

    return label_counts(experiment.federate(arrays).train, arrays.y, experiment.data.classes)


def _floats(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--capacities: given {text!r}; allowed: shares such as 1,0.5 or letters such as a1-e1"
        ) from None
