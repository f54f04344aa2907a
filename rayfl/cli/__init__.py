"""The command line: run | sweep | scale | compare | report | describe | check | list | export.

Exit codes: 0 done, 1 the run failed, 2 bad input (nothing is left behind), 130 stopped by the user, 143 by SIGTERM.
Heavy imports stand inside the commands, so that `--help` and an error in a YAML file come at once.
"""

import os
import signal
import sys

import typer
from typer.exceptions import TyperException

from rayfl.cli import ask, look, train
from rayfl.cli.shared import warn
from rayfl.config import ConfigError
from rayfl.termination import Terminated, leave

STOPPED = 130
"""What typer makes of a KeyboardInterrupt."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
for command in (
    train.run,
    train.sweep,
    train.scale,
    look.compare,
    look.report,
    ask.describe,
    ask.check,
    ask.list_,
    look.export,
):
    app.command(command.__name__.rstrip("_"))(command)


def main() -> None:
    """Runs the command line with the exit codes of this module. Packages in the working folder can be imported."""
    sys.path.append(os.getcwd())
    signal.signal(signal.SIGTERM, leave)
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (ConfigError, TyperException) as error:
        said = error.format_message() if isinstance(error, TyperException) else error
        warn(f"error: {said}", style="red")
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
