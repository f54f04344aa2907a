"""The command line: sweep, run, scale, status; compare, report, export, generate; describe, check; init, explain, list,
schema.

Exit codes: 0 success, 1 the run failed, 2 invalid input (no files written), 130 stopped by Ctrl-C, 143 by SIGTERM.
Commands import torch and Ray inside their functions, so that `--help` and errors in a file appear at once.
"""

import importlib.metadata
import io
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
from rayfl.engine.termination import leave, reason

EXAMPLES = {
    train.sweep: "rayfl sweep quickstart --rows heterofl,fjord --rounds 10",
    train.run: "rayfl run quickstart --row heterofl --set training.lr=0.1",
    train.scale: "rayfl scale --clients 100,10000 --rounds 3",
    look.compare: "rayfl compare quickstart --format latex",
    look.report: "rayfl report runs/quickstart",
    look.status: "rayfl status --address 10.0.0.1:6379",
    look.export: "rayfl export runs/NAME --capacity 0.25 --to submodel",
    look.generate: "rayfl generate runs/NAME --capacity 0.25 'Name three rivers.'",
    ask.describe: "rayfl describe quickstart --row heterofl",
    ask.check: "rayfl check experiment.yaml",
    learn.init: "rayfl init comparison.yaml --sweep",
    learn.explain: "rayfl explain training.lr method",
    learn.list_: "rayfl list methods",
    learn.schema: "rayfl schema sweep > sweep.schema.json",
}
"""Commands in the order of `--help`, with the example of their own `--help`."""

app = typer.Typer(
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}, rich_markup_mode="rich"
)
for command, example in EXAMPLES.items():
    words = " ".join((command.__doc__ or "").split())
    app.command(
        command.__name__.rstrip("_"),
        help=words,
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
    """Simulate model-heterogeneous federated learning on Ray. Start with [bold]rayfl sweep[/bold] or
    [bold]rayfl init[/bold]."""


def main() -> None:
    """Run the command line. Packages in the working folder can be imported. Characters that the terminal's encoding
    lacks are printed as "?"."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.path.append(os.getcwd())
    signal.signal(signal.SIGTERM, leave)
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (ConfigError, TyperException) as error:
        text = error.format_message() if isinstance(error, TyperException) else str(error)
        # prefix that pydantic adds
        warn(f"error: {text.replace('Value error, ', '')}", style="red")
        sys.exit(2)
    except Exception as error:
        warn(f"failed: {reason(error)}", style="red")
        sys.exit(1)
    sys.exit(code)
