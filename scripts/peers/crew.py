"""Processes that stay up and answer by pipes."""

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class Crew:
    """A process for each of `given`: `work(pipe, *given)`, which sends a first message when it is ready."""

    def __init__(self, work: Callable[..., None], given: Iterable[Sequence[Any]]):
        spawn = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for arguments in given:
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=work, args=(theirs, *arguments), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        self._answers()

    def ask(self, messages: Callable[[int], Any]) -> list[Any]:
        """Send each process its message, by its number, and return their answers."""
        for i, pipe in enumerate(self.pipes):
            pipe.send(messages(i))
        return self._answers()

    def _answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self.pipes]

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()
