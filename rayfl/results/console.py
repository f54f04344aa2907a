"""Live progress on a terminal, plain lines otherwise (pipes, CI), and events with `--json` (`rayfl.results.events`)."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import PrivateAttr
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rayfl.listeners import Listener
from rayfl.metrics import EVALUATED, Line
from rayfl.results.events import Tell, nobody

ENDED_IN_VIEW = 3
BAR = 24
"""Maximum width of a bar in columns."""
COLORS = {"running": "cyan", "finished": "green", "failed": "red", "stopped": "yellow"}


class Progress(ABC):
    """A live area with notes above it and the remaining time. `tell` receives events."""

    def __init__(self, console: Console | None = None, tell: Tell = nobody):
        self.console, self.tell = console or Console(), tell
        self._live: Live | None = None
        self._began = time.monotonic()
        self._worked: tuple[float, float] | None = None
        """Time at which progress was first seen, and the fraction done then."""
        self._phase = ""
        self._spinner = Spinner("dots", style="cyan")

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.console.quiet:
            self._live = Live(console=self.console, get_renderable=self.picture, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._phase = ""
        if self._live is not None:
            # clear the live area if no work was done
            self._live.transient = self._worked is None
            self._live.stop()

    @abstractmethod
    def picture(self) -> RenderableType:
        """Return the current content of the live area."""

    def phase(self, text: str) -> None:
        """Show the current phase, e.g. "starting Ray"."""
        if text != self._phase:
            self._phase = text
            self.tell("phase", phase=text)
            self._plain(f"{text} ...")

    def place(self, text: str) -> None:
        """Print the resources of the work, e.g. "2 actors on CPUs; no GPU found"."""
        self.tell("phase", phase=text)
        self._print(text)

    def note(self, text: str) -> None:
        """Print a message above the live area; from any thread. Characters that cannot be encoded become "?"."""
        text = text.encode(errors="replace").decode()
        self.tell("note", text=text)
        self._print(text)

    def end(self, status: str, **facts: Any) -> None:
        """Report the final status: finished, failed or stopped."""
        self.tell("ended", status=status, **facts)

    def _plain(self, text: str) -> None:
        if not self.console.is_terminal:
            self._print(text)

    def _print(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def _times(self, share: float) -> str:
        """Return "1:02 elapsed, 3:04 left". The estimate excludes the time before the first progress."""
        now = time.monotonic()
        if self._worked is None and share > 0:
            self._worked = (now, share)
        since, before = self._worked or (now, share)
        left = f", {clock((now - since) * (1 - share) / (share - before))} left" if before < share < 1 else ""
        return f"{clock(now - self._began)} elapsed{left}"

    def _below(self, more: str = "") -> list[RenderableType]:
        if not self._phase:
            return []
        self._spinner.update(text=Text(f"{self._phase}{more}, {clock(time.monotonic() - self._began)}", "dim"))
        return [self._spinner]

    def _bar(self, share: float, text: str) -> Table:
        row = Table.grid(padding=(0, 1))
        width = max(4, min(BAR, self.console.width - len(text) - 2))
        row.add_row(ProgressBar(1.0, share, width=width), Text(text))
        return row


class RunProgress(Progress):
    """Progress of one run. `metric`: the judge metric; `first`: the round from which a run is resumed."""

    def __init__(
        self,
        label: str,
        rounds: int,
        metric: str = "accuracy_mean",
        first: int = 0,
        console: Console | None = None,
        tell: Tell = nobody,
    ):
        super().__init__(console, tell)
        self.label, self.rounds, self.metric = label, rounds, metric
        self.first, self.round = first, first
        self.shown: dict[str, float] = {}
        self.judged = 0
        """Round of the last evaluation."""

    def begin(self, folder: Path | None, round: int) -> None:
        """Begin the rounds after `round`, the last one of an earlier process."""
        self.first = self.round = round
        self.tell("started", label=self.label, folder=folder, round=round, rounds=self.rounds, metric=self.metric)

    def update(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Show a finished round from its line; a score stays visible until the next evaluation."""
        before, self.round, self._phase = self.round, round, ""
        for key in ("train_loss", self.metric, "seconds"):
            if key in metrics:
                self.shown[key] = metrics[key]
        if self.metric in metrics:
            self.judged = round
        self.tell("evaluated" if EVALUATED in metrics else "round", **metrics)
        tenth = max(1, self.rounds // 10)
        if before // tenth < round // tenth or round == self.rounds:
            self._plain(f"{self.label}: {', '.join([self._where, *self._found(), self._clock])}")

    def end(self, status: str, **facts: Any) -> None:
        super().end(status, round=self.round, **facts)

    def picture(self) -> RenderableType:
        if self.round == self.first:
            return Group(*self._below())
        bar = self._bar(self.round / self.rounds, f"{self.label}: {self._where}, {self._clock}")
        return Group(bar, Text("  " + ", ".join(self._found()), "dim"), *self._below())

    @property
    def _where(self) -> str:
        return f"round {self.round}/{self.rounds}"

    def _found(self) -> list[str]:
        parts = []
        if "train_loss" in self.shown:
            parts.append(f"loss {self.shown['train_loss']:.4f}")
        if self.metric in self.shown:
            of = "" if self.judged == self.round else f" after round {self.judged}"
            parts.append(f"{spoken(self.metric)} {self.shown[self.metric]:.4f}{of}")
        if "seconds" in self.shown:
            parts.append(f"{self.shown['seconds']:.2f} s/round")
        return parts

    @property
    def _clock(self) -> str:
        made, all = self.round - self.first, self.rounds - self.first
        return self._times(made / all if all else 1.0)


class Shown(Listener):
    """Listener that shows a run on a `RunProgress` and calls `follow` with the run's folder."""

    _progress: Any = PrivateAttr(None)
    _follow: Any = PrivateAttr(None)

    @classmethod
    def on(cls, progress: RunProgress, follow: Callable[[Path], None]) -> Self:
        shown = cls()
        shown._progress, shown._follow = progress, follow
        return shown

    def on_phase(self, phase: str) -> None:
        self._progress.phase(phase)

    def on_start(self, config: dict[str, Any], folder: Path | None, round: int) -> None:
        self._progress.begin(folder, round)
        if folder is not None:
            self._follow(folder)

    def on_place(self, place: str) -> None:
        self._progress.place(place)

    def on_round(self, line: Line) -> None:
        self._progress.update(line["round"], line)

    def on_note(self, text: str) -> None:
        self._progress.note(text)

    def on_end(self, status: str) -> None:
        self._progress.end(status)


@dataclass(eq=False)
class _Trial:
    label: str
    point: str
    rounds: int
    round: int = 0
    value: float | None = None
    judged: int = 0
    """Round of the value."""
    status: str = "running"

    def learn(self, round: int, value: float | None) -> None:
        self.round = round
        if value is not None:
            self.value, self.judged = value, round

    @property
    def score(self) -> str:
        return "" if self.value is None else f"{self.value:.4f}"

    @property
    def place(self) -> str:
        return f"{self.round}/{self.rounds}"


class SweepProgress(Progress):
    """Progress of a sweep: a bar over all rounds, the best trial of each method, running and recently ended trials."""

    def __init__(
        self,
        total_trials: int,
        rounds: int,
        metric: str = "accuracy_mean",
        mode: Literal["max", "min"] = "max",
        console: Console | None = None,
        tell: Tell = nobody,
    ):
        super().__init__(console, tell)
        self.total_trials, self.rounds, self.metric, self.mode = total_trials, rounds, metric, mode
        self.trials: dict[str, _Trial] = {}
        self.ended: list[_Trial] = []
        self.before = 0.0

    def begin(self, label: str, folder: Path) -> None:
        self.tell("started", label=label, folder=folder, trials=self.total_trials, metric=self.metric, mode=self.mode)

    def end(self, status: str, **facts: Any) -> None:
        if status == "stopped":
            finished = sum(trial.status == "finished" for trial in self.trials.values())
            self.note(f"stopped with {finished} of {self.total_trials} trials finished")
        super().end(status, **facts)

    def resumed(self) -> None:
        """Exclude the work of an earlier process from the time estimate."""
        self.before = self._made
        self._worked = None

    def start(
        self, trial_id: str, label: str, point: str, rounds: int | None = None, made: Sequence[Line] = ()
    ) -> None:
        """Show a started or resumed trial. `point`: settings chosen by the search, e.g. "lr=0.03"; `rounds`: its number
        of rounds, default: the sweep's; `made`: lines of its finished rounds."""
        before = self.trials.get(trial_id)
        self.ended = [trial for trial in self.ended if trial is not before]
        trial = self.trials[trial_id] = _Trial(label, point, rounds or self.rounds)
        for line in made:
            trial.learn(line["round"], line.get(self.metric))
        self._tell_of(trial_id)

    def update(self, trial_id: str, round: int, metrics: Mapping[str, Any]) -> None:
        """Show a trial's finished round from its line."""
        trial = self.trials[trial_id]
        trial.learn(round, metrics.get(self.metric))
        self.tell("evaluated" if EVALUATED in metrics else "round", trial=trial_id, label=trial.label, **metrics)

    def done(self, trial_id: str, status: str) -> None:
        """Show an ended trial: finished, stopped (by the scheduler or the user) or failed."""
        trial = self.trials[trial_id]
        trial.status = status
        self.ended.append(trial)
        self._tell_of(trial_id)
        what = f"{trial.label} {trial.point}: {status}, round {trial.place}"
        score = f", {spoken(self.metric)} {trial.score}" if trial.score else ""
        self._plain(f"[{len(self.ended)}/{self.total_trials}] {what}{score}; {self._times(self._share)}")

    def _tell_of(self, trial_id: str) -> None:
        trial = self.trials[trial_id]
        about = {"label": trial.label, "point": trial.point, "status": trial.status, "round": trial.round}
        self.tell("trial", trial=trial_id, **about, rounds=trial.rounds, value=trial.value, value_round=trial.judged)

    @property
    def best(self) -> dict[str, _Trial]:
        """Label -> best trial so far by the metric, of those with a finite value."""
        best: dict[str, _Trial] = {}
        for trial in list(self.trials.values()):
            if trial.value is not None and math.isfinite(trial.value):
                leader = best.get(trial.label)
                if leader is None or self._score(trial) > self._score(leader):
                    best[trial.label] = trial
        return best

    def _score(self, trial: _Trial) -> float:
        value = trial.value or 0.0
        return value if self.mode == "max" else -value

    def picture(self) -> RenderableType:
        if not self.trials:
            return Group(*self._below(": first trials start"))
        trials = list(self.trials.values())
        made = sum(trial.round for trial in trials)
        rounds = sum(trial.rounds for trial in trials) + (self.total_trials - len(trials)) * self.rounds
        total = f"trials {len(self.ended)}/{self.total_trials}, rounds {made}/{rounds}, {self._times(self._share)}"
        ranked = sorted(self.best.items(), key=lambda item: -self._score(item[1]))
        best = [
            Text(
                f"best {label}: {t.score} after round {t.judged} ({t.point})", "dim", no_wrap=True, overflow="ellipsis"
            )
            for label, t in ranked
        ]
        # a terminal with few lines cuts the end
        running = [trial for trial in trials if trial.status == "running"]
        table = [self._table(running)] if running else []
        return Group(self._bar(self._made, total), *best, *table, *self._below("" if made else ": first trials start"))

    def _table(self, running: Sequence[_Trial]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("method", "point", "round", spoken(self.metric).replace(" ", "\n"), "of\nround", "state"):
            # on a narrow terminal the point is shortened
            table.add_column(Text(name), header_style="bold", no_wrap=name != "point", vertical="bottom")
        for trial in [*self.ended[-ENDED_IN_VIEW:], *running]:
            point, state = (
                Text(trial.point, no_wrap=True, overflow="ellipsis"),
                Text(trial.status, COLORS[trial.status]),
            )
            table.add_row(Text(trial.label), point, trial.place, trial.score, str(trial.judged or ""), state)
        return table

    @property
    def _share(self) -> float:
        """Fraction done of the work left when this process began."""
        return (self._made - self.before) / (1 - self.before) if self.before < 1 else 1.0

    @property
    def _made(self) -> float:
        """Fraction done of all trials, including running ones."""
        running = sum(t.round / t.rounds for t in list(self.trials.values()) if t.status == "running")
        return (len(self.ended) + running) / self.total_trials


class ScaleProgress(Progress):
    """Progress of a scale study: a bar over its points and a line for each."""

    made = points = 0

    def begin(self, folder: Path, points: int) -> None:
        self.points = points
        self.tell("started", label="scale", folder=folder, points=points)

    def update(self, text: str, row: Mapping[str, Any]) -> None:
        """Show a measured point: a sentence and its numbers."""
        self.made += 1
        self.tell("point", **row)
        self._print(text)

    def picture(self) -> RenderableType:
        if not self.points:
            return Group(*self._below())
        share = self.made / self.points
        bar = self._bar(share, f"points {self.made}/{self.points}, {self._times(share)}")
        return Group(bar, *self._below())


def spoken(metric: str) -> str:
    """Return a metric in words: "validation accuracy"."""
    return metric.removesuffix("_mean").replace("_", " ")


def clock(seconds: float) -> str:
    """Return "0:09", "12:34" or "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
