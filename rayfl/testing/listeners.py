"""Contract tests of listeners."""

import pickle
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from rayfl.config import ConfigError
from rayfl.driver import run
from rayfl.listeners import LISTENERS_KIND, Listener
from rayfl.metrics import Line
from rayfl.session import start
from rayfl.testing.tiny import tiny


class Recorder(Listener):
    """Listener that records its events."""

    _told: list[str] = PrivateAttr(default_factory=list)

    def on_start(self, config: dict[str, Any], folder: Path | None, round: int) -> None:
        self._told.append(f"start {round}")

    def on_round(self, line: Line) -> None:
        self._told.append(f"round {line['round']}")

    def on_end(self, status: str) -> None:
        self._told.append(status)


class ListenerContract:
    """A subclass sets `listener`."""

    listener: Any
    """Listener, as in the `listeners:` section: a name, a mapping with options, or an object."""
    rounds: int = 3

    def made(self) -> Listener:
        return LISTENERS_KIND.read(self.listener, "listeners")

    def test_a_run_is_told_of_and_stays_the_same(self, tmp_path: Path) -> None:
        """The listener may stop the run early, but its rounds stay equal."""
        alone = run(tiny(rounds=self.rounds, evaluation={"every": 1}), tmp_path / "alone")
        recorder = Recorder()
        heard = run(
            tiny(rounds=self.rounds, evaluation={"every": 1}, listeners=[self.made()]),
            tmp_path / "heard",
            listeners=[recorder],
        )
        rounds = len(heard.lines)
        assert 1 <= rounds <= self.rounds
        assert recorder._told == ["start 0", *(f"round {t}" for t in range(1, rounds + 1)), "finished"]
        lines = [[line | {"seconds": 0} for line in result.lines[: rounds - 1]] for result in (alone, heard)]
        assert lines[0] == lines[1]

    def test_a_run_that_goes_on_tells_it_where(self, tmp_path: Path) -> None:
        run(tiny(rounds=1), tmp_path)
        recorder = Recorder()
        run(tiny(rounds=2, listeners=[self.made()]), tmp_path, resume=True, listeners=[recorder])
        assert recorder._told == ["start 1", "round 2", "finished"]

    def test_a_run_without_a_folder_may_have_it(self) -> None:
        """It gets None as the folder, as in `rayfl.start`, and may refuse it by a ConfigError."""
        try:
            [line] = start(tiny(rounds=1, listeners=[self.made()]))
        except ConfigError:
            return
        assert line["round"] == 1

    def test_a_file_may_name_it(self) -> None:
        listener = self.made()
        assert LISTENERS_KIND.read(listener.model_dump(mode="json"), "listeners") == listener
        assert pickle.loads(pickle.dumps(listener)) == listener
