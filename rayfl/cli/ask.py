"""rayfl describe, check: an experiment before it trains."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rayfl.cli.files import configs, find_config, rows
from rayfl.cli.shared import given_of, located, notify, print_table
from rayfl.config import ConfigError, load_yaml
from rayfl.engine.termination import reason
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
    from rayfl.results.tables import Table

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
        if coverage or convention != "macs":
            option = "--coverage" if coverage else "--convention"
            raise ConfigError(f"{option}: not valid with --time, which shows no submodels. Allowed: without --time")
        _print_times(experiment, as_json)
        return
    found = described(experiment, convention, coverage, notes.append)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    # different models have different columns
    columns = list(dict.fromkeys(column for record in sorted(found, key=len, reverse=True) for column in record))
    lines = []
    for record in found:
        values = [record.get(column, "–") for column in columns]
        cells = [f"{v:.4f}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v for v in values]
        lines.append([f"{record['capacity']:g}", *cells[1:]])
    notify(f"{experiment.model.name}, FLOPs by {convention}")
    print_table(Table(columns, lines).rich())
    for note in [*experiment.notes, *notes]:
        notify(note)


def _print_times(experiment: "Experiment", as_json: bool) -> None:
    from rayfl.reference.describe import times
    from rayfl.results.tables import Table

    notes: list[str] = []
    records, facts = times(experiment, notes.append)
    if as_json:
        print(json.dumps({"devices": records, "rounds": facts}, indent=1))
        return
    shares = {"clients", "updates"}
    lines = [
        [str(v) if c == "device" else f"{100 * v:.0f} %" if c in shares else f"{v:.3g}" for c, v in record.items()]
        for record in records
    ]
    notify("Devices: clients, mean capacity, mean seconds of a visit, share of the updates")
    print_table(Table(list(records[0]), lines).rich())
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
    partitioned. The notes of a run are printed too. Not checked: data sets in folders, data sets and weights that are
    downloaded, memory."""
    from rayfl.clusters.check import check_cluster, is_cluster
    from rayfl.experiment import load_experiment
    from rayfl.tuning.load import is_sweep, load_sweep

    def valid(path: Path) -> list[str]:
        if is_cluster(path):
            return [check_cluster(path)]
        if is_sweep(load_yaml(path)):
            plan = load_sweep(path)
            notes = _checked_data(path, list(map(plan.example, plan.rows)))
            return [f"valid sweep with {len(plan.rows)} rows: {', '.join(plan.rows)}", *plan.notes, *notes]
        experiment = load_experiment(path)
        notes = _checked_data(path, [experiment])
        return [f"valid run of {experiment.method.name}", *experiment.notes, *notes]

    wrong = []
    for file in files:
        try:
            path = find_config(file)
            for text in valid(path):
                notify(f"{path}: {text}")
        except ConfigError as error:
            wrong.append(str(error))
        except Exception as error:
            wrong.append(f"{file}: {reason(error)}")
    if wrong:
        raise ConfigError("\nerror: ".join(wrong))


def _checked_data(path: Path, experiments: "list[Experiment]") -> list[str]:
    """Raise a ConfigError if experiments on one data set cannot use it, otherwise return notes on it. Of files, only
    the user's tables are loaded."""
    from rayfl.data.notes import notes_on

    data, notes = experiments[0].data, {}
    if _is_here(data) and (data.public is None or data.public.data is None or _is_here(data.public.data)):
        arrays = located(path, data.arrays)
        for experiment in experiments:
            federation = located(path, partial(experiment.federate, arrays))
            notes |= dict.fromkeys(notes_on(data, arrays, federation))
    return list(notes)


def _is_here(data: "DataSet") -> bool:
    from rayfl.data import Digits
    from rayfl.data.synthetic_text import SyntheticText
    from rayfl.data.variables import Shaped

    return isinstance(data, Shaped | Digits | SyntheticText)
