"""rayfl describe | check: what an experiment is, before it trains."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from rayfl.cli.files import configs, find_config, rows
from rayfl.cli.shared import given_of, notify, print_table
from rayfl.config import ConfigError, load_yaml


def describe(
    config: Annotated[
        Path | None, typer.Argument(help="A YAML file, in place of --model.", autocompletion=configs)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model by name, with the images that it was published for.")
    ] = None,
    capacities: Annotated[str | None, typer.Option(help="Shares, or HeteroFL's letters; 1,0.5,...,0.0625.")] = None,
    convention: Annotated[
        Literal["heterofl_official", "macs", "flops2"], typer.Option(help="How operations are counted.")
    ] = "macs",
    metric: Annotated[
        Literal["width", "params", "flops"] | None, typer.Option(help="What a capacity is a share of.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="The method that decides what a capacity runs.")] = None,
    row: Annotated[str | None, typer.Option(help="Of a sweep's CONFIG: that row.", autocompletion=rows)] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Number of classes, with --model.")] = None,
    coverage: Annotated[
        int, typer.Option(min=0, help="Rounds: the share of the server that a client ever holds in them.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list of records.")] = False,
) -> None:
    """What every capacity runs and costs: width, blocks and exits; parameters, FLOPs of one forward pass, bytes a
    round, size."""
    from rayfl.experiment import read_experiment
    from rayfl.reference.describe import changed, native
    from rayfl.reference.describe import describe as described

    if config is not None and model is None:
        if classes is not None:
            raise ConfigError("--classes: allowed: with --model; a CONFIG's data say their classes")
        config = find_config(config)
        given = given_of(config, row)
    elif model is not None and config is None:
        if row is not None:
            raise ConfigError("--row: allowed: with a sweep's CONFIG")
        given = native(model, classes)
    else:
        raise ConfigError("describe: allowed: either a CONFIG or --model NAME")
    experiment = read_experiment(changed(given, capacities, metric, method), str(config or "describe"))
    found = described(experiment, convention, coverage)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table(title=f"{experiment.model.name}, FLOPs by {convention}", title_justify="left", box=None)
    # networks of several models have different columns
    columns = dict.fromkeys(column for record in sorted(found, key=len, reverse=True) for column in record)
    for column in columns:
        table.add_column(column, justify="right")
    for record in found:
        values = [record.get(column, "–") for column in columns]
        cells = [f"{v:.4f}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v for v in values]
        table.add_row(f"{record['capacity']:g}", *cells[1:])
    print_table(table)


def check(
    files: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="YAML files.", autocompletion=configs)],
) -> None:
    """Validates files without starting Ray: keys, types, ranges, models at every capacity, search spaces; of a cluster
    also ports, tokens, secrets and mounts."""
    from rayfl.clusters.check import check_cluster, is_cluster
    from rayfl.experiment import load_experiment
    from rayfl.tuning.load import load_sweep

    for path in map(find_config, files):
        if is_cluster(path):
            notify(f"{path}: {check_cluster(path)}")
        elif "experiment" in load_yaml(path):
            plan = load_sweep(path)
            notify(f"{path}: a sweep of {len(plan.rows)} rows: {', '.join(plan.rows)}")
        else:
            notify(f"{path}: a run of {load_experiment(path).method.name}")
