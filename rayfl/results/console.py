"""Live progress on the terminal; plain lines where there is none (a pipe, CI)."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import PrivateAttr
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayfl.listeners import Listener
from rayfl.metrics import Line

ENDED_IN_VIEW = 3
COLORS = {"running": "cyan", "finished": "green", "failed": "red", "stopped": "yellow"}


class Progress(ABC):
    """A live area, notes above it, and the time that is left."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        self._live: Live | None = None
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self.picture, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    @abstractmethod
    def picture(self) -> RenderableType:
        """What the live area shows now."""

    def note(self, text: str) -> None:
        """A message above the live area; from any thread. What cannot be encoded, as in a path, becomes "?"."""
        self.console.print(Text(text.encode(errors="replace").decode()), soft_wrap=True)

    def _plain(self, text: str) -> None:
        if not self.console.is_terminal:
            self.note(text)

    def _times(self, share: float) -> str:
        """ "1:02 elapsed, 3:04 left" when a share of the work was done in this time."""
        elapsed = time.monotonic() - self._began
        left = f", {clock(elapsed * (1 - share) / share)} left" if 0 < share < 1 else ""
        return f"{clock(elapsed)} elapsed{left}"


class RunProgress(Progress):
    """One run: a bar over its rounds. `metric` is the accuracy that it is judged by, `first` the round that a resumed
    run goes on from."""

    def __init__(
        self,
        label: str,
        rounds: int,
        metric: str = "accuracy_mean",
        first: int = 0,
        console: Console | None = None,
    ):
        super().__init__(console)
        self.label, self.rounds, self.metric = label, rounds, metric
        self.first, self.round = first, first
        self.shown: dict[str, float] = {}

    def update(self, round: int, metrics: Mapping[str, Any]) -> None:
        """After a round, with its line; an accuracy stays in view until the next evaluation."""
        before, self.round = self.round, round
        for key in ("train_loss", self.metric, "seconds"):
            if key in metrics:
                self.shown[key] = metrics[key]
        tenth = max(1, self.rounds // 10)
        if before // tenth < round // tenth or round == self.rounds:
            self._plain(f"{self.label}: {self._text()}")

    def picture(self) -> RenderableType:
        return _bar(self.round / self.rounds, f"{self.label}: {self._text()}")

    def _text(self) -> str:
        parts = [f"round {self.round}/{self.rounds}"]
        if "train_loss" in self.shown:
            parts.append(f"loss {self.shown['train_loss']:.4f}")
        if self.metric in self.shown:
            name = self.metric.removesuffix("_mean").replace("_", " ")
            parts.append(f"{name} {self.shown[self.metric]:.4f}")
        if "seconds" in self.shown:
            parts.append(f"{self.shown['seconds']:.2f} s/round")
        made, all = self.round - self.first, self.rounds - self.first
        return ", ".join([*parts, self._times(made / all if all else 1.0)])


class Shown(Listener):
    """Shows a run on a `RunProgress`, and tells `follow` the run's folder."""

    _progress: Any = PrivateAttr(None)
    _follow: Any = PrivateAttr(None)

    @classmethod
    def on(cls, progress: RunProgress, follow: Callable[[Path], None]) -> Self:
        shown = cls()
        shown._progress, shown._follow = progress, follow
        return shown

    def on_start(self, config: dict[str, Any], folder: Path | None, round: int) -> None:
        self._progress.first = self._progress.round = round
        if folder is not None:
            self._follow(folder)

    def on_round(self, line: Line) -> None:
        self._progress.update(line["round"], line)

    def on_note(self, text: str) -> None:
        self._progress.note(text)


@dataclass(eq=False)
class _Trial:
    label: str
    point: str
    rounds: int
    round: int = 0
    value: float | None = None
    status: str = "running"

    @property
    def score(self) -> str:
        return "" if self.value is None else f"{self.value:.4f}"


class SweepProgress(Progress):
    """A sweep: a bar over all rounds, the best of each method, what runs and what ended last."""

    def __init__(
        self,
        total_trials: int,
        rounds: int,
        metric: str = "accuracy_mean",
        mode: Literal["max", "min"] = "max",
        console: Console | None = None,
    ):
        super().__init__(console)
        self.total_trials, self.rounds, self.metric, self.mode = total_trials, rounds, metric, mode
        self.trials: dict[str, _Trial] = {}
        self.ended: list[_Trial] = []
        self.before = 0.0

    def resumed(self) -> None:
        """What is done by now was done by an earlier process: it says nothing of the time that is left."""
        self.before = self._made

    def start(self, trial_id: str, label: str, point: str, rounds: int | None = None) -> None:
        """A trial runs, perhaps again: the method's label, what the search chose, "lr=0.03", and its rounds if they
        are not everybody's."""
        before = self.trials.get(trial_id)
        self.ended = [trial for trial in self.ended if trial is not before]
        self.trials[trial_id] = _Trial(label, point, rounds or self.rounds)

    def update(self, trial_id: str, round: int, metrics: Mapping[str, Any]) -> None:
        """After a trial's round, with its line."""
        trial = self.trials[trial_id]
        trial.round = round
        trial.value = metrics.get(self.metric, trial.value)

    def done(self, trial_id: str, status: str) -> None:
        """A trial ended: finished, stopped (by the scheduler or the user) or failed."""
        trial = self.trials[trial_id]
        trial.status = status
        self.ended.append(trial)
        what = f"{trial.label} {trial.point}: {status}, round {trial.round}/{trial.rounds}"
        score = f", {self.metric} {trial.score}" if trial.score else ""
        self._plain(f"[{len(self.ended)}/{self.total_trials}] {what}{score}; {self._times(self._share)}")

    @property
    def best(self) -> dict[str, _Trial]:
        """Label -> its best trial so far by the metric."""
        best: dict[str, _Trial] = {}
        for trial in list(self.trials.values()):
            if trial.value is not None:
                leader = best.get(trial.label)
                if leader is None or self._score(trial) > self._score(leader):
                    best[trial.label] = trial
        return best

    def _score(self, trial: _Trial) -> float:
        """More is better."""
        value = trial.value or 0.0
        return value if self.mode == "max" else -value

    def picture(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("method", "point", "round", self.metric, "state"):
            table.add_column(Text(name), header_style="bold", no_wrap=True)
        trials = list(self.trials.values())
        running = [trial for trial in trials if trial.status == "running"]
        for trial in self.ended[-ENDED_IN_VIEW:] + running:
            state = Text(trial.status, COLORS[trial.status])
            place = f"{trial.round}/{trial.rounds}"
            table.add_row(Text(trial.label), Text(trial.point), place, trial.score, state)
        made = sum(trial.round for trial in trials)
        rounds = sum(trial.rounds for trial in trials) + (self.total_trials - len(trials)) * self.rounds
        total = f"trials {len(self.ended)}/{self.total_trials}, rounds {made}/{rounds}, {self._times(self._share)}"
        ranked = sorted(self.best.items(), key=lambda item: -self._score(item[1]))
        best = [Text(f"best {label}: {t.score} ({t.point})", "dim") for label, t in ranked]
        # a terminal that is too low cuts the end
        return Group(_bar(self._made, total), *best, table)

    @property
    def _share(self) -> float:
        """Of what was left when this process began."""
        return (self._made - self.before) / (1 - self.before) if self.before < 1 else 1.0

    @property
    def _made(self) -> float:
        """Of all trials, with the shares of those that run."""
        running = sum(t.round / t.rounds for t in list(self.trials.values()) if t.status == "running")
        return (len(self.ended) + running) / self.total_trials


def _bar(share: float, text: str) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(1.0, share, width=24), Text(text))
    return row


def clock(seconds: float) -> str:
    """ "0:09", "12:34" or "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
