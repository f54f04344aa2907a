"""What the commands share: options, where things are, and how they say something."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from rayfl.cli.files import configs, rows
from rayfl.config import ConfigError, component, load_yaml

if TYPE_CHECKING:
    from rayfl.experiment import Experiment
    from rayfl.results.mlflow import Copy, Sender
    from rayfl.results.rows import Record
    from rayfl.results.tables import OnTerminal
    from rayfl.results.tuned import Best

COLORS = None if os.environ.get("NO_COLOR") else "auto"
"""rich takes NO_COLOR for colours alone, and would still write bold."""
console = Console(color_system=COLORS)
errors = Console(stderr=True, color_system=COLORS)

WIDTH = 140
"""Columns of a table that goes into a file or a pipe."""

ConfigPath = Annotated[
    Path, typer.Argument(help="A YAML file, or the name of a shipped one: quickstart.", autocompletion=configs)
]
Row = Annotated[
    str | None, typer.Option(help="Of a sweep's CONFIG: this row, at its first point.", autocompletion=rows)
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: training.lr=0.1. May be repeated."),
]
Output = Annotated[
    Path, typer.Option(resolve_path=True, envvar="RAYFL_OUTPUT", help="The folder of all runs and of mlflow.db.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where it was stopped.")]
Address = Annotated[
    str | None,
    typer.Option(help="A running Ray cluster, HOST:PORT; else RAY_ADDRESS, else one of its own."),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|URL",
        help="Run it there, and show it here: a file of Ray's cluster launcher, or http://127.0.0.1:8265 of a tunnel.",
    ),
]
TrackingUri = Annotated[
    str | None,
    typer.Option(help="An MLflow server; else MLFLOW_TRACKING_URI, else sqlite in --output."),
]
ToExperiment = Annotated[
    str | None, typer.Option("--experiment", help="The MLflow experiment that it goes into; else its name.")
]
Name = Annotated[str | None, typer.Option(help="Its folder below --output; else the file's name.")]


def given_of(config: Path, row: str | None) -> dict[str, Any]:
    """What a run's file holds, or a sweep's file, of one row if it is named."""
    given = load_yaml(config)
    if row is not None:
        return experiment_of(config, None, row).plain()
    return dict(given["experiment"]) if isinstance(given.get("experiment"), dict) else given


def experiment_of(config: Path, settings: list[str] | None, row: str | None) -> "Experiment":
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
    example = load_sweep(config, rows=row).given(row)
    return read_experiment(overlaid(example, settings), f"{config}: rows.{row}")


def folder_of(output: Path, name: str) -> Path:
    """A run's folder below the output folder."""
    return output / component(name, "--name")


def located(config: Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}") from None


def sending_to(output: Path, uri: str | None, note: Callable[[str], None], experiment: str | None = None) -> "Sender":
    """Sends to MLflow, in a thread, the runs that it is told of, and those of earlier commands that it has not got.
    `experiment`: where the former go, in place of one with their study's name."""
    from rayfl.results.mlflow import Sender

    return Sender(copy_to(output, uri, note), output, experiment)


def copy_to(output: Path, uri: str | None, note: Callable[[str], None]) -> "Copy":
    from rayfl.results.mlflow import Copy, Store

    return Copy(Store(uri_of(output, uri)), note)


def uri_of(output: Path, uri: str | None) -> str:
    from rayfl.results.mlflow import default_uri

    return uri or os.environ.get("MLFLOW_TRACKING_URI") or default_uri(output)


def show(
    records: "Sequence[Record]",
    judge: str,
    published: str | None = None,
    tuned: "Mapping[str, Best] | None" = None,
) -> None:
    """The tables of a run or a sweep, with what a search chose, and a paper's numbers if it has some. The best rounds
    are shown where clients' own accuracies judge."""
    from rayfl.results import published as beside
    from rayfl.results.tables import best_table, table

    print_table(table(records, judge, tuned).rich())
    if judge.startswith("local_"):
        best = best_table(records, judge)
        print_table(best.rich(full=len(best.header)))
    section, changed = beside.from_config({"published": published} if published else {})
    if section:
        notify("\n".join(beside.caption(section, changed)))
        numbers = beside.table(section, records)
        print_table(numbers.rich(full=len(numbers.header)))


def print_table(table: "RenderableType | OnTerminal") -> None:
    (console if console.is_terminal else Console(width=WIDTH, color_system=COLORS)).print(table)


def notify(text: str) -> None:
    console.print(_plain(text), soft_wrap=True)


def warn(text: str, style: str = "") -> None:
    # a sentence breaks between words where somebody reads it, and nowhere in a pipe
    errors.print(_plain(text, style), soft_wrap=not errors.is_terminal)


def _plain(text: str, style: str = "") -> Text:
    """As it is: no markup, no highlighting; what cannot be encoded, as in a path, becomes "?"."""
    return Text(text.encode(errors="replace").decode(), style)


def say_mlflow(output: Path, uri: str | None, page: str = "") -> None:
    """How to open MLflow, at a page of it."""
    where = uri_of(output, uri)
    if where.startswith("http"):
        notify(f"open MLflow: {where.rstrip('/')}/{page}")
        return
    notify(f"open MLflow: mlflow ui --backend-store-uri {where}")
    if page:
        notify(f"its charts: http://127.0.0.1:5000/{page}")
