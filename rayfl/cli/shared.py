"""Shared by the commands: options, places of files, printing."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from rayfl.cli.files import configs, rows
from rayfl.config import ConfigError, choose, component, load_yaml
from rayfl.config.plain import public
from rayfl.engine.termination import Terminated

if TYPE_CHECKING:
    from rayfl.experiment import Experiment
    from rayfl.results.mlflow import Copy, Sender
    from rayfl.results.rows import Record
    from rayfl.results.tables import OnTerminal
    from rayfl.results.tuned import Best

COLORS = None if os.environ.get("NO_COLOR") else "auto"
"""Rich applies NO_COLOR to colours only and would still write bold text."""
console = Console(color_system=COLORS)
errors = Console(stderr=True, color_system=COLORS)

WIDTH = 140
"""Columns of a table printed into a file or a pipe."""

ConfigPath = Annotated[
    Path, typer.Argument(help="YAML file, or the name of a shipped one: quickstart.", autocompletion=configs)
]
Row = Annotated[
    str | None, typer.Option(help="Row of a sweep's CONFIG, at the first point of its space.", autocompletion=rows)
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: training.lr=0.1. May be repeated."),
]
Rounds = Annotated[int | None, typer.Option(min=1, help="Rounds of every run. Default: the file's.")]
Output = Annotated[
    Path, typer.Option(resolve_path=True, envvar="RAYFL_OUTPUT", help="Folder of all runs and of mlflow.db.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint.")]
ResumeChanged = Annotated[
    bool, typer.Option("--resume-changed", help="Resume although data, files or code have changed. Noted in run.json.")
]
Address = Annotated[
    str | None,
    typer.Option(help="Ray cluster to connect to, HOST:PORT. Default: RAY_ADDRESS, otherwise a new local cluster."),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|URL",
        help="Submit the command to a cluster and follow it: a file of Ray's cluster launcher, or "
        "http://127.0.0.1:8265 of a tunnel.",
    ),
]
TrackingUri = Annotated[
    str | None, typer.Option(help="MLflow server. Default: MLFLOW_TRACKING_URI, otherwise sqlite in --output.")
]
ToExperiment = Annotated[
    str | None, typer.Option("--experiment", help="MLflow experiment. Default: the name of the run or sweep.")
]
Name = Annotated[str | None, typer.Option(help="Folder name under --output. Default: the name of the file.")]


def given_of(config: Path, row: str | None) -> dict[str, Any]:
    """Return the settings of a run's file, or of one row of a sweep's."""
    from rayfl.tuning.load import is_sweep

    given = load_yaml(config)
    return experiment_of(config, None, row).plain() if is_sweep(given) or row is not None else given


def experiment_of(config: Path, settings: list[str] | None, row: str | None) -> "Experiment":
    """Read a run's file, or one row of a sweep's, with `settings` applied."""
    from rayfl.experiment import load_experiment, overlaid, read_experiment, with_settings
    from rayfl.tuning.load import is_sweep, load_sweep

    given = load_yaml(config)
    if not is_sweep(given):
        if row is not None:
            raise ConfigError(f"--row: {config} is a run's file, which has no rows. Allowed: only with a sweep's file")
        return load_experiment(config, settings)
    if row is None:
        rows = ", ".join(map(str, given.get("rows") or ["run"]))
        raise ConfigError(f"{config}: the file is a sweep. Allowed: a run's file, or --row with one of {rows}")
    if isinstance(given.get("rows"), dict):
        choose(given["rows"], row, f"{config}: --row", "row")
    example, where = load_sweep(config, rows=row).given(row), f"{config}: rows.{row}"
    settings = [text.removeprefix("experiment.") for text in settings or []]
    return with_settings(lambda some: read_experiment(overlaid(example, some), where), settings, where)


def with_rounds(settings: list[str] | None, rounds: int | None) -> list[str]:
    """Return the settings of --set and --rounds."""
    settings = settings or []
    if rounds is None:
        return settings
    if any(text.partition("=")[0].removeprefix("experiment.") == "rounds" for text in settings):
        raise ConfigError("--rounds, --set rounds: both are set. Allowed: one of them")
    return [*settings, f"rounds={rounds}"]


def folder_of(output: Path, name: str) -> Path:
    return output / component(name, "--name")


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """After a Ctrl-C or SIGTERM in the block, print the command that continues the run or sweep, if it has a folder."""
    from rayfl.results.folder import RunFolder

    try:
        yield
    except (KeyboardInterrupt, Terminated):
        if RunFolder.exists(folder):
            words = sys.argv[1:]
            warn(f"to continue: rayfl {public(shlex.join(words + ['--resume'] * ('--resume' not in words)))}")
        raise


def located(config: Path, load: Callable[[], Any], settings: Sequence[str] = ()) -> Any:
    """Return what `load` loads. A ConfigError begins with the settings of --set that it is about, or with the file."""
    from rayfl.experiment import blamed

    try:
        return load()
    except ConfigError as error:
        at = blamed(settings, str(error))
        raise ConfigError(f"{f'--set {at}' if at else config}: {error}") from None


def sending_to(output: Path, uri: str | None, note: Callable[[str], None], experiment: str | None = None) -> "Sender":
    """Return a `Sender`, which copies runs to MLflow in a thread, including those that earlier commands left unsent.
    `experiment`: the MLflow experiment of new runs. Default: the name of their study."""
    from rayfl.results.mlflow import Sender

    return Sender(copy_to(output, uri, note), output, experiment)


def copy_to(output: Path, uri: str | None, note: Callable[[str], None]) -> "Copy":
    from rayfl.results.mlflow import Copy, Store

    return Copy(Store(uri_of(output, uri)), note)


def uri_of(output: Path, uri: str | None) -> str:
    from rayfl.results.mlflow import default_uri

    return uri or os.environ.get("MLFLOW_TRACKING_URI") or default_uri(output)


def show(
    records: "Sequence[Record]", judge: str, published: str | None = None, tuned: "Mapping[str, Best] | None" = None
) -> None:
    """Print the tables of a run or a sweep: results, tuned values and the published numbers, if any. Local accuracies
    also get the table of best rounds."""
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
    # wrap between words on a terminal, nowhere in a pipe
    errors.print(_plain(text, style), soft_wrap=not errors.is_terminal)


def _plain(text: str, style: str = "") -> Text:
    """Return text without markup or highlighting; characters that cannot be encoded become "?"."""
    return Text(text.encode(errors="replace").decode(), style)


def say_mlflow(output: Path, uri: str | None, page: str = "") -> None:
    """Print how to open MLflow at a page, without the password of its address."""
    where = public(uri_of(output, uri))
    if where.startswith("http"):
        notify(f"open MLflow: {where.rstrip('/')}/{page}")
        return
    notify(f"open MLflow: mlflow ui --backend-store-uri {shlex.quote(where)}")
    if page:
        notify(f"its charts: http://127.0.0.1:5000/{page}")
