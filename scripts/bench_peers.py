"""Seconds per round of rayfl, Flower, pfl and a bare PyTorch loop, by itself and in Ray's actors.

    python scripts/bench_peers.py                                          # all workloads and systems
    python scripts/bench_peers.py --workloads compute --systems rayfl,pfl --turns 3

Flower and pfl run in separate environments, created by uv under --environments: the versions below, with the Python and
torch of rayfl. Every system trains the same network on the same images, in two processes of one thread, on the same two
cores; waiting systems are stopped. No system evaluates. Systems take turns, round by round, and ratios are medians over
turns. The first round of a system is not a turn: it is reported separately, and as the time since the start of the
program. Use idle cores.
"""

import argparse
import hashlib
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from peers.timing import in_turns, ratios
from peers.workloads import PROCESSES, WORKLOADS
from rich.console import Console
from rich.table import Table

SYSTEMS: Mapping[str, tuple[str, ...]] = {
    "rayfl": (),
    "bare": (),
    "ray": (),
    "flower": ("flwr[simulation]==1.41.0",),
    "pfl": ("pfl==0.6.0",),
    "jax": ("jax==0.10.2",),
}
"""System -> packages of its environment besides torch; rayfl and the bare loops run in the current environment."""
HETEROGENEOUS = ("rayfl", "flower")
NARROW: Mapping[str, tuple[str, ...]] = {"jax": ("tiny", "narrow", "quarter")}
"""System -> its workloads, if it has not all: JAX's convolutions of whole networks are many times slower."""
COLD = "cold"
"""Workload that restarts every system in every turn."""
NEWEST_PYTHON = (3, 12)
"""Newest Python supported by pfl."""
ANSWER_SECONDS, END_SECONDS = 1800.0, 60.0
SCRIPTS = Path(__file__).resolve().parent
QUIET = {
    "OMP_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # otherwise Ray copies this folder for every worker
}


class Failed(Exception):
    """Raised if a system fails, with its name and last output."""


# environments


def python_of(system: str, folder: Path) -> str:
    """Return the interpreter of a system's environment, created if missing."""
    if not SYSTEMS[system]:
        return sys.executable
    python = ".".join(map(str, min(sys.version_info[:2], NEWEST_PYTHON)))
    needs = [*SYSTEMS[system], f"torch=={version('torch').partition('+')[0]}"]
    place = folder / f"{system}-{hashlib.sha256(repr((python, needs)).encode()).hexdigest()[:8]}"
    interpreter, ready = place / "bin" / "python", place / "ready"
    if not ready.exists():
        print(f"creating {place}: Python {python}, {', '.join(needs)}", file=sys.stderr)
        shutil.rmtree(place, ignore_errors=True)
        _uv("venv", "--quiet", "--python", python, str(place))
        _uv("pip", "install", "--quiet", "--compile-bytecode", "--python", str(interpreter), *needs)
        ready.touch()
    return str(interpreter)


def _uv(*arguments: str) -> None:
    try:
        done = subprocess.run(["uv", *arguments], stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise Failed("uv: not found. Hint: pip install uv; it creates the environments of other systems") from None
    if done.returncode:
        raise Failed(f"uv {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr.strip()}")


# systems


class Side:
    """A system that runs a workload in separate processes, which are stopped between its turns."""

    def __init__(self, system: str, python: str, workload: str, logs: Path):
        self.name, self.log = f"{system} on {workload}", logs / f"{workload}_{system}.log"
        self.started = time.perf_counter()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, "-m", "peers", system, workload],
                cwd=SCRIPTS,
                env=os.environ | QUIET,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                # if the benchmark is killed, the kernel resumes and ends a stopped group, but not another session
                process_group=0,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # the program ends when its input is closed
        with self.process as process:
            assert process.stdin
            process.send_signal(signal.SIGCONT)
            process.stdin.close()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)

    def start(self) -> dict[str, float]:
        """Run the first round. Return its seconds, and those from the start of the program to its end."""
        first = self.round()
        return {"first round": first, "from start": time.perf_counter() - self.started}

    def round(self) -> float:
        """Run a round and return its seconds."""
        return self._ask("round")["seconds"]

    def close(self) -> dict[str, Any]:
        """Return the loss after all rounds, and the versions."""
        return self._ask("close")

    def _ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.stdin.write(f"{command}\n".encode())
        except BrokenPipeError:
            raise self._failed("ended") from None
        if not select.select([self.process.stdout], [], [], ANSWER_SECONDS)[0]:
            raise self._failed(f"no answer in {ANSWER_SECONDS:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise self._failed("ended")
        # Flower's server polls for messages ten times per second, at a cost that grows with the clients
        self.process.send_signal(signal.SIGSTOP)
        return json.loads(line)

    def _failed(self, what: str) -> Failed:
        last = self.log.read_text(errors="replace").strip().splitlines()[-20:]
        return Failed("\n".join([f"{self.name}: {what}; last output:", *last]))


Start = Callable[[str, str], Side]
"""(system, workload) -> the started system."""


def rounds(workload: str, systems: Sequence[str], turns: int, start: Start) -> dict[str, dict[str, Any]]:
    """Measure rounds of a workload, per system."""
    with ExitStack() as stack:
        sides, found = {}, {}
        for system in systems:
            sides[system] = stack.enter_context(start(system, workload))
            found[system] = sides[system].start()
        taken = in_turns({system: side.round for system, side in sides.items()}, turns)
        for system, side in sides.items():
            found[system] |= {"seconds": taken[system]} | side.close()
    return found


def cold_starts(systems: Sequence[str], turns: int, start: Start) -> dict[str, dict[str, Any]]:
    """Measure seconds from the start of the program to the end of the first compute-bound round, per system."""

    def once(system: str) -> float:
        with start(system, "compute") as side:
            seconds = side.start()["from start"]
            found[system] = side.close()
        return seconds

    found: dict[str, dict[str, Any]] = {}
    taken = in_turns({system: lambda system=system: once(system) for system in systems}, turns)
    return {system: found[system] | {"seconds": taken[system]} for system in systems}


def summary(found: dict[str, dict[str, Any]]) -> None:
    """Add medians, minima, and ratios of rayfl's seconds to those of every system."""
    for of in found.values():
        of["median"], of["fastest"] = statistics.median(of["seconds"]), min(of["seconds"])
        if "rayfl" in found:
            of["rayfl over it"] = statistics.median(ratios(found["rayfl"]["seconds"], of["seconds"]))


# output


def about(workload: str) -> str:
    if workload == COLD:
        return "cold: from the start of the program to the end of its first round, 10 clients x 30 steps"
    return f"{workload}: {WORKLOADS[workload].about}"


def show(workload: str, found: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    columns = ["from start", "first round", "median", "fastest", "rayfl over it", "loss"]
    columns = [name for name in columns if any(name in of for of in found.values())]
    console.print(f"{about(workload)}; seconds", highlight=False, soft_wrap=True)
    table = Table("system", *columns)
    for system, of in found.items():
        table.add_row(system, *[f"{of[name]:.3f}" if name in of else "–" for name in columns])
    console.print(table)


def show_versions(results: Mapping[str, Mapping[str, Mapping[str, Any]]], console: Console) -> None:
    versions = {system: of["versions"] for found in results.values() for system, of in found.items()}
    for system, of in versions.items():
        console.print(f"{system}: {', '.join(f'{name} {number}' for name, number in of.items())}", highlight=False)


# the command


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a reader of comma-separated names."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not valid. Allowed: {','.join(known)}")
        return [name for name in known if name in names]

    return read


def positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid. Allowed: a whole number of at least 1")
    return int(text)


def main() -> None:
    workloads = [*WORKLOADS, COLD]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--systems", type=some_of(list(SYSTEMS)), default=list(SYSTEMS), help=",".join(SYSTEMS))
    parser.add_argument("--workloads", type=some_of(workloads), default=workloads, help=",".join(workloads))
    parser.add_argument("--turns", type=positive, default=5, help="measured turns, after one that is not (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--environments",
        type=Path,
        default=Path.home() / ".cache" / "rayfl-peers",
        help="folder of the environments (default: ~/.cache/rayfl-peers)",
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:PROCESSES])
    console, results, failures = Console(stderr=options.json), {}, []
    try:
        pythons = {system: python_of(system, options.environments.expanduser()) for system in options.systems}
    except Failed as failure:
        sys.exit(str(failure))
    logs = Path(tempfile.mkdtemp(prefix="bench_peers_"))

    def start(system: str, workload: str) -> Side:
        return Side(system, pythons[system], workload, logs)

    for workload in options.workloads:
        equal = workload == COLD or WORKLOADS[workload].is_equal
        systems = [system for system in options.systems if equal or system in HETEROGENEOUS]
        systems = [system for system in systems if system not in NARROW or workload in NARROW[system]]
        if not systems:
            continue
        try:
            if workload == COLD:
                found = cold_starts(systems, options.turns, start)
            else:
                found = rounds(workload, systems, options.turns, start)
        except Failed as failure:
            failures.append(str(failure))
            console.print(f"{workload}: {failure}", highlight=False, markup=False)
            continue
        summary(found)
        results[workload] = found
        show(workload, found, console)
    show_versions(results, console)
    if options.json:
        print(json.dumps({name: {"about": about(name), "systems": found} for name, found in results.items()}, indent=2))
    if failures:
        sys.exit(f"{len(failures)} of {len(options.workloads)} workloads failed; logs: {logs}")
    shutil.rmtree(logs)


if __name__ == "__main__":
    main()
