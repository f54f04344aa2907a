"""A system's end of the line: it waits for its turns, and says how long its rounds take."""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from platform import python_version

from .workloads import Data, Network, Workload


class Turns:
    """Commands come by standard input, `round` or `close`; every one is answered by a line of JSON on standard output.

    What libraries print goes to standard error.
    """

    def __init__(self, workload: Workload, packages: Sequence[str]):
        self.workload, self.packages = workload, packages
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._started: float | None = None

    def wait(self, network: Network) -> bool:
        """Ends the round that runs, and waits for the next; False when there is none. `network`: what came out."""
        if self._started is not None:
            self._answer({"seconds": time.perf_counter() - self._started})
        command = sys.stdin.readline().strip()
        self._started = time.perf_counter()
        if command == "close":
            versions = {"python": python_version()} | {name: version(name) for name in self.packages}
            self._answer({"loss": Data(self.workload).loss(network()), "versions": versions})
        # nothing comes from a bench that is gone
        return command == "round"

    def _answer(self, answer: Mapping[str, object]) -> None:
        self._out.write(json.dumps(answer) + "\n")
