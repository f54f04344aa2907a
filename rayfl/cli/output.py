"""Output of run, sweep and scale: progress and results, only results, or events for other programs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rayfl.cli.shared import console, notify, say_mlflow, show, warn
from rayfl.config import ConfigError
from rayfl.results.events import Tell, line_of, nobody

if TYPE_CHECKING:
    from rayfl.results.rows import Record
    from rayfl.results.tuned import Best

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the results; notes go to stderr.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON line per event (rayfl/cli/README.md).")]


@dataclass(frozen=True)
class Shows:
    """Output mode of a command."""

    quiet: bool
    json: bool

    def __post_init__(self) -> None:
        if self.quiet and self.json:
            raise ConfigError("--quiet, --json: both are set. Allowed: one of them")

    @property
    def for_people(self) -> bool:
        return not (self.quiet or self.json)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of a `Progress`."""
        return {"console": console if self.for_people else Console(quiet=True), "tell": self.tell}

    @property
    def tell(self) -> Tell:
        return _print_event if self.json else _warn_of_notes if self.quiet else nobody

    @contextmanager
    def busy(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show a phase until the block ends; the yielded function replaces its text."""
        self.tell("phase", phase=text)
        if not (self.for_people and console.is_terminal):
            yield lambda next: self.tell("phase", phase=next)
            return
        with console.status(text) as status:
            yield lambda next: status.update(next)

    def notify(self, text: str) -> None:
        if self.for_people:
            notify(text)

    def results(
        self,
        rows: "Sequence[Record]",
        judge: str,
        published: str | None = None,
        tuned: "Mapping[str, Best] | None" = None,
    ) -> None:
        """Print the table of results, or one event per run."""
        if not self.json:
            show(rows, judge, published, tuned)
            return
        hidden = {"params", "facts", "id", "sweep", "error", "method"}
        for row in rows:
            self.tell("result", **{key: value for key, value in row.items() if key not in hidden})

    def places(self, what: str, folder: Path, output: Path, uri: str | None, page: str) -> None:
        """Print the places of the files and of MLflow's `page`."""
        if self.for_people:
            notify(f"{what} in {folder}")
            say_mlflow(output, uri, page)


def _print_event(event: str, **facts: Any) -> None:
    print(line_of(event, **facts), flush=True)


def _warn_of_notes(event: str, **facts: Any) -> None:
    if event == "note":
        warn(facts["text"])
