"""The command line: sweep | run | scale | status, compare | report | export, describe | check, init | explain | list |
schema.

Exit codes: 0 done, 1 the run failed, 2 bad input (nothing is left behind), 130 stopped by the user, 143 by SIGTERM.
Heavy imports stand inside the commands, so that `--help` and an error in a YAML file come at once.
"""

import importlib.metadata
import os
import re
import signal
import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

from rayfl.cli import ask, learn, look, train
from rayfl.cli.shared import warn
from rayfl.config import ConfigError
from rayfl.engine.termination import Terminated, leave

STOPPED = 130
"""What typer makes of a KeyboardInterrupt."""

EXAMPLES = {
    train.sweep: "rayfl sweep quickstart --rows heterofl,fjord --rounds 10",
    train.run: "rayfl run quickstart --row heterofl --set training.lr=0.1",
    train.scale: "rayfl scale --clients 100,10000 --rounds 3",
    look.compare: "rayfl compare quickstart --format latex",
    look.report: "rayfl report runs/quickstart",
    look.status: "rayfl status --address 10.0.0.1:6379",
    look.export: "rayfl export runs/NAME --capacity 0.25 --to submodel",
    ask.describe: "rayfl describe quickstart --row heterofl",
    ask.check: "rayfl check experiment.yaml",
    learn.init: "rayfl init comparison.yaml --sweep",
    learn.explain: "rayfl explain training.lr method",
    learn.list_: "rayfl list methods",
    learn.schema: "rayfl schema sweep > sweep.schema.json",
}
"""Every command, with an example of it."""

app = typer.Typer(
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)
for command, example in EXAMPLES.items():
    words = " ".join((command.__doc__ or "").split())
    app.command(
        command.__name__.rstrip("_"),
        help=words,
        # of the list of commands
        short_help=re.split("[:.;]", words)[0],
        epilog=f"Example: [bold]{example}[/bold]",
    )(command)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rayfl {importlib.metadata.version('rayfl')}")
        raise typer.Exit


@app.callback()
def rayfl(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning among unequal clients, simulated on Ray. Begin with [bold]rayfl sweep[/bold], or with
    [bold]rayfl init[/bold]."""


def main() -> None:
    """Runs the command line with the exit codes of this module. Packages in the working folder can be imported."""
    sys.path.append(os.getcwd())
    signal.signal(signal.SIGTERM, leave)
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (ConfigError, TyperException) as error:
        said = error.format_message() if isinstance(error, TyperException) else str(error)
        # pydantic's word, by way of typer
        warn(f"error: {said.replace('Value error, ', '')}", style="red")
        sys.exit(2)
    except Exception as error:
        warn(f"failed: {error}", style="red")
        sys.exit(1)
    except Terminated:
        _say_stopped()
        raise
    if code == STOPPED:
        _say_stopped()
    sys.exit(code)


def _say_stopped() -> None:
    warn("stopped; if it wrote a checkpoint, the same command with --resume goes on from there")
