"""rayfl describe, check: an experiment before it trains."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from rayfl.cli.files import configs, find_config, rows
from rayfl.cli.shared import given_of, located, notify, print_table
from rayfl.config import ConfigError, load_yaml
from rayfl.results.cells import human_time

if TYPE_CHECKING:
    from rayfl.data import DataSet
    from rayfl.experiment import Experiment


def describe(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file, instead of --model.", autocompletion=configs)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name, with the input size that it was published for.")
    ] = None,
    capacities: Annotated[str | None, typer.Option(help="Capacities, 1,0.5, or HeteroFL's letters.")] = None,
    convention: Annotated[
        Literal["heterofl_official", "macs", "flops2"], typer.Option(help="Unit of computation.")
    ] = "macs",
    metric: Annotated[
        Literal["width", "params", "flops"] | None, typer.Option(help="Quantity that a capacity is a fraction of.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Method that selects the submodels.")] = None,
    row: Annotated[str | None, typer.Option(help="Row of a sweep's CONFIG.", autocompletion=rows)] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Number of classes, with --model.")] = None,
    coverage: Annotated[
        int, typer.Option(min=0, help="Add the fraction of the server model that one client covers in N rounds.")
    ] = 0,
    time: Annotated[bool, typer.Option("--time", help="Show the simulated times of a file with `system:`.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of records.")] = False,
) -> None:
    """Show every capacity's submodel and its costs: width, blocks, exits, parameters, FLOPs of one forward pass, bytes
    per round and memory."""
    from rayfl.experiment import read_experiment
    from rayfl.reference.describe import changed, native
    from rayfl.reference.describe import describe as described

    if config is not None and model is None:
        if classes is not None:
            raise ConfigError("--classes: a CONFIG's data set defines its classes. Allowed: only with --model")
        config = find_config(config)
        given = given_of(config, row)
    elif model is not None and config is None:
        if row is not None:
            raise ConfigError("--row: a model has no rows. Allowed: only with a sweep's CONFIG")
        given = native(model, classes)
    else:
        problem = "neither CONFIG nor --model is set" if config is None else "both CONFIG and --model are set"
        raise ConfigError(f"describe: {problem}. Allowed: one of them")
    experiment = read_experiment(changed(given, capacities, metric, method), str(config or "describe"))
    notes: list[str] = []
    if time:
        _print_times(experiment, as_json)
        return
    found = described(experiment, convention, coverage, notes.append)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table(title=f"{experiment.model.name}, FLOPs by {convention}", title_justify="left", box=None)
    # different models have different columns
    columns = dict.fromkeys(column for record in sorted(found, key=len, reverse=True) for column in record)
    for column in columns:
        table.add_column(column, justify="right")
    for record in found:
        values = [record.get(column, "–") for column in columns]
        cells = [f"{v:.4f}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v for v in values]
        table.add_row(f"{record['capacity']:g}", *cells[1:])
    print_table(table)
    for note in [*experiment.notes, *notes]:
        notify(note)


def _print_times(experiment: "Experiment", as_json: bool) -> None:
    from rayfl.reference.describe import times

    notes: list[str] = []
    records, facts = times(experiment, notes.append)
    if as_json:
        print(json.dumps({"devices": records, "rounds": facts}, indent=1))
        return
    table = Table(title="Devices: clients, mean capacity, mean seconds of a visit, share of the updates", box=None)
    table.title_justify = "left"
    for column in records[0]:
        table.add_column(column, justify="left" if column == "device" else "right")
    for record in records:
        shares = {"clients", "updates"}
        cells = [f"{100 * v:.0f} %" if c in shares else f"{v:.3g}" for c, v in record.items() if c != "device"]
        table.add_row(record["device"], *cells)
    print_table(table)
    notify(
        f"A round: {facts['mean']:.3g} s on average, {facts['median']:.3g} s median, 9 of 10 within "
        f"{facts['nine_of_ten']:.3g} s; {experiment.rounds} rounds: {human_time(facts['seconds'])}"
    )
    numbers = {name: f"{value:.3g}" for name, value in facts.items()}
    notify(
        "Per round: {asked} clients asked, {updates} updates aggregated, {late} late, {lost} lost, mean staleness "
        "{staleness}; abandoned: {abandoned} of the rounds".format(**numbers)
    )
    for note in notes:
        notify(note)


def check(
    files: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="YAML files.", autocompletion=configs)],
) -> None:
    """Validate files without starting Ray: keys, types, ranges, models at every capacity and search spaces; in cluster
    files ports, tokens, secrets and mounts. Tables, results of functions, and embedded and generated data are read and
    partitioned. Not checked: data sets in folders, data sets and weights that are downloaded, memory."""
    from rayfl.clusters.check import check_cluster, is_cluster
    from rayfl.experiment import load_experiment
    from rayfl.tuning.load import load_sweep

    def valid(path: Path) -> str:
        if is_cluster(path):
            return check_cluster(path)
        if "experiment" in load_yaml(path):
            plan = load_sweep(path)
            _check_data(path, list(map(plan.example, plan.rows)))
            return f"valid sweep with {len(plan.rows)} rows: {', '.join(plan.rows)}"
        experiment = load_experiment(path)
        _check_data(path, [experiment])
        return f"valid run of {experiment.method.name}"

    wrong = []
    for path in map(find_config, files):
        try:
            notify(f"{path}: {valid(path)}")
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\nerror: ".join(wrong))


def _check_data(path: Path, experiments: "list[Experiment]") -> None:
    """Raise a ConfigError if experiments on one data set cannot use it. Of files, only the user's tables are loaded."""
    data = experiments[0].data
    if _is_here(data) and (data.public is None or data.public.data is None or _is_here(data.public.data)):
        arrays = located(path, data.arrays)
        for experiment in experiments:
            located(path, partial(experiment.federate, arrays))


def _is_here(data: "DataSet") -> bool:
    from rayfl.data import Digits
    from rayfl.data.synthetic_text import SyntheticText
    from rayfl.data.variables import Shaped

    return isinstance(data, Shaped | Digits | SyntheticText)
