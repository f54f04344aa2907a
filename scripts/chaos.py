"""Inject random faults into real runs, whose results must equal those of serial runs bit for bit.

    python scripts/chaos.py --minutes 30 --seed 0

A run is `rayfl run` in a separate process, on its own Ray or, one time in three, on a cluster of three raylets. Its
method has client states. At random moments a fault is drawn from `FAULTS`; a run that ends is resumed. A completed run
is compared with a serial run without faults, bit for bit: every line of metrics except the seconds, the last state,
client states and client scores. Then the next run starts, with another method, until the time is over.

The exit code is 1 after the first difference, unexpected end or hang, and the run's folder is kept. It is 1 too if no
fault hit a process. The seed determines the order of faults, but not the work that they interrupt.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # otherwise Ray copies this folder for every worker
os.environ["OMP_NUM_THREADS"] = "1"
TESTS = str(Path(__file__).parents[1] / "tests")
sys.path.append(TESTS)
# Ray's processes import the run's listener
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))

from processes import Command, alive, descendants, named  # noqa: E402

import rayfl  # noqa: E402
from rayfl.config.plain import write_yaml  # noqa: E402
from rayfl.engine.checkpoints import complete, read  # noqa: E402
from rayfl.engine.files import checksum, load_tensors  # noqa: E402
from rayfl.engine.termination import leave  # noqa: E402
from rayfl.results.folder import RunFolder  # noqa: E402

METHODS = ["scaffold", "lg_fedavg", "standalone", "spafl", "nefl"]
"""Methods with client states."""
ACTORS = 3
EXPERIMENT = {
    "data": "digits",
    "clients": {"count": 12, "cohort": 6, "capacities": [1, 0.5, 0.25]},
    "model": "digits_cnn",
    "training": {"batch_size": 10, "steps": 20},
    "evaluation": {"every": 10},
    "run": {"chunk": 1, "cpus": 0.5},
}
JOB_SECONDS = 20.0
"""Seconds after which a job goes to another actor."""
PAUSE = 4.0
"""Maximum seconds from a start or fault to the next fault."""
EARLY = 0.25
"""Probability of a fault before the first round of a command."""
HANG = 300.0
"""Seconds without a new line of metrics that count as a hang."""
FAILED, INTERRUPTED, TERMINATED = 1, 130, 143
ACTOR, SERVER, RAYLET, GCS = "ray::ClientActor", "ServerActor", "/raylet", "/gcs_server"


class Wrong(Exception):
    """Raised for a difference, an unexpected end or a hang."""


# a run and its processes


@dataclass
class Run:
    """A run, its current command, and its cluster (None: its own Ray)."""

    method: str
    rounds_in_all: int
    output: Path
    draw: random.Random
    cluster: Any = None
    command: Command | None = None
    made: Counter[str] = field(default_factory=Counter)
    """Faults since its start."""
    stopped: dict[int, int] = field(default_factory=dict)
    """Stopped process -> round in which it was stopped."""
    grown: float = 0.0
    """Time of the last change of its metrics."""
    seen: int = 0
    has_begun: bool = False
    """True if the command finished a round."""
    was_left_running: bool = False
    """True if the folder was marked as running before the command, as after kill -9."""

    @property
    def folder(self) -> Path:
        return self.output / "run"

    @property
    def config(self) -> dict[str, Any]:
        return EXPERIMENT | {"method": self.method, "rounds": self.rounds_in_all}

    def start(self) -> None:
        """Start or resume the command."""
        file = self.output / "run.yaml"
        run = {"actors": ACTORS, "checkpoint_seconds": self.draw.choice([0, 3])}
        listeners = [{"name": "faults:Impatient", "seconds": JOB_SECONDS}]
        config = self.config | {"run": EXPERIMENT["run"] | run, "listeners": listeners}
        file.write_text(write_yaml(config))
        arguments = ["run", file, "--output", self.output]
        arguments += ["--resume"] if RunFolder.exists(self.folder) else []
        arguments += ["--address", self.cluster.address] if self.cluster else []
        self.was_left_running = self.says_running()
        self.command, self.grown, self.stopped = Command(*arguments), time.monotonic(), {}
        self.has_begun = False

    @property
    def driver(self) -> int:
        assert self.command is not None
        return self.command.process.pid

    def says_running(self) -> bool:
        """Return whether the folder is marked as running."""
        return RunFolder.exists(self.folder) and RunFolder.open(self.folder).status == "running"

    def is_running(self) -> bool:
        return self.command is not None and self.command.process.poll() is None

    def processes(self, name: str) -> list[int]:
        """Return Ray's processes by a part of their command line, without stopped ones."""
        above = os.getpid() if self.cluster else self.driver
        return [pid for pid in named(alive(descendants(above)), name) if pid not in self.stopped]

    def rounds(self) -> int:
        with suppress(OSError):
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def works(self) -> bool:
        """Return whether the command has locked the folder; from then on it handles signals."""
        return self.is_running() and (self.folder / "lock").exists()

    def waits(self, seconds: float, until: Callable[[], object] = lambda: False) -> bool:
        """Wait while the command runs, and return whether the condition became true. Raise Wrong if it hangs."""
        deadline = time.monotonic() + seconds
        while self.is_running() and time.monotonic() < deadline:
            if until():
                return True
            self._go_on()
            time.sleep(0.02)
        return False

    def gets_on(self) -> bool:
        """Return whether it has started a new round."""
        before = self.rounds()
        return self.waits(HANG, lambda: self.rounds() > before + 1)

    def _go_on(self) -> None:
        """Check the run's progress, and continue stopped processes once others have done their work."""
        rounds, now = self.rounds(), time.monotonic()
        if rounds != self.seen:
            self.has_begun |= rounds > self.seen
            self.seen, self.grown = rounds, now
        if now - self.grown > HANG:
            raise Wrong(f"the run hangs: no new line of metrics for {HANG:.0f} s; process {self.driver} still runs")
        for pid, round in list(self.stopped.items()):
            if rounds > round + 2:
                _signal([pid], signal.SIGCONT)
                del self.stopped[pid]


def _signal(pids: list[int], number: int) -> int:
    """Send a signal and return the number of processes that received it."""
    sent = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            sent += 1
    return sent


# faults


def _one(run: Run, name: str) -> list[int]:
    found = run.processes(name)
    return [run.draw.choice(found)] if found else []


def kill_actor(run: Run) -> int:
    return _signal(_one(run, ACTOR), signal.SIGKILL)


def kill_actors(run: Run) -> int:
    """Kill all client actors except one, in short intervals."""
    killed = 0
    for pid in run.draw.sample(found := run.processes(ACTOR), max(len(found) - 1, 0)):
        killed += _signal([pid], signal.SIGKILL)
        time.sleep(run.draw.uniform(0, 0.3))
    return killed


def stop_actor(run: Run) -> int:
    pids = _one(run, ACTOR)
    run.stopped |= dict.fromkeys(pids, run.rounds())
    return _signal(pids, signal.SIGSTOP)


def kill_server(run: Run) -> int:
    return _signal(_one(run, SERVER), signal.SIGKILL)


def kill_raylet(run: Run) -> int:
    return _signal(_one(run, RAYLET), signal.SIGKILL)


def kill_node(run: Run) -> int:
    """Kill the raylet of a node without the driver, and add another node."""
    nodes = sorted(run.cluster.worker_nodes, key=lambda node: node.unique_id)
    node = run.draw.choice(nodes)
    killed = _signal([node.all_processes["raylet"][0].process.pid], signal.SIGKILL)
    run.cluster.remove_node(node, allow_graceful=False)
    run.cluster.add_node(num_cpus=1)
    return killed


def kill_gcs(run: Run) -> int:
    return _signal(_one(run, GCS), signal.SIGKILL)


def kill_driver(run: Run) -> int:
    return _signal([run.driver], signal.SIGKILL)


def kill_everything(run: Run) -> int:
    return _signal([run.driver, *descendants(run.driver)], signal.SIGKILL)


def terminate(run: Run) -> int:
    return _signal([run.driver], signal.SIGTERM)


def terminate_everything(run: Run) -> int:
    return _signal([run.driver, *descendants(run.driver)], signal.SIGTERM)


def interrupt(run: Run) -> int:
    assert run.command is not None
    run.command.interrupt()
    return 1


@dataclass(frozen=True)
class Fault:
    about: str
    strike: Callable[[Run], int]
    """Function that causes the fault and returns the number of affected processes."""
    codes: tuple[int, ...] = ()
    """Possible exit codes of the run; empty if it must continue."""
    on: str = "any"
    """own: only on the run's own Ray; nodes: only on several raylets."""
    hears: bool = False
    """Whether the command must handle signals."""


KILLED = -signal.SIGKILL
FAULTS = [
    Fault("kill -9 of a client actor", kill_actor),
    Fault("kill -9 of all client actors but one, in a row", kill_actors),
    Fault("SIGSTOP of a client actor, SIGCONT after its work was done", stop_actor),
    Fault("kill -9 of a node's raylet", kill_node, on="nodes"),
    Fault("kill -9 of the server actor", kill_server, (FAILED,)),
    Fault("kill -9 of the only raylet", kill_raylet, (FAILED,), on="own"),
    Fault("kill -9 of the GCS", kill_gcs, (FAILED,), on="own"),
    Fault("kill -9 of the driver", kill_driver, (KILLED,)),
    Fault("kill -9 of everything", kill_everything, (KILLED,), on="own"),
    Fault("SIGTERM to the driver", terminate, (TERMINATED,), hears=True),
    Fault("SIGTERM to everything", terminate_everything, (TERMINATED,), on="own", hears=True),
    Fault("Ctrl-C", interrupt, (INTERRUPTED,), hears=True),
]


# runs and their comparison


@dataclass
class Tally:
    """Results of the faults."""

    faults: Counter[str] = field(default_factory=Counter)
    outlived: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)
    runs: list[tuple[str, str, int]] = field(default_factory=list)
    """Equal runs: method, place, number of faults."""


@contextmanager
def raylets() -> Iterator[Any]:
    """Start a head for the driver and the server, and two nodes with space for two client actors each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes(HANG)
        yield cluster
    finally:
        cluster.shutdown()


def disturb(run: Run, ends: float, tally: Tally, notify: Callable[[str], None]) -> None:
    """Complete a run, with faults until `ends`, and later until one has hit in any run."""
    place = "nodes" if run.cluster else "own"
    faults = [fault for fault in FAULTS if fault.on in ("any", place)]
    run.start()
    while True:
        if run.draw.random() > EARLY:
            run.waits(HANG, lambda: run.has_begun)
        run.waits(run.draw.uniform(0, PAUSE))
        fault = run.draw.choice(faults)
        hit = 0
        if time.monotonic() > ends and tally.faults:
            run.waits(float("inf"))
        elif run.waits(HANG, run.works if fault.hears else lambda: True):
            at = run.rounds()
            if hit := fault.strike(run):
                tally.faults[fault.about] += 1
                run.made[fault.about] += 1
                notify(f"round {at}: {fault.about} ({hit} hit)")
        if not hit and run.is_running():
            continue
        if hit and not fault.codes:
            if run.gets_on():
                tally.outlived[fault.about] += 1
                continue
        else:
            run.waits(HANG)
        assert run.command is not None
        if run.is_running():
            raise Wrong(f"process {run.driver} did not end within {HANG:.0f} s of: {fault.about}")
        code, printed = run.command.finish()
        if code not in (0, *(fault.codes if hit else ())):
            raise Wrong(f"exit code {code}. Allowed: {fault.codes if hit else 0}. Output:\n{printed}")
        # a command that ends before it resumes the run does not change the folder
        if code > 0 and run.says_running() and (run.has_begun or not run.was_left_running):
            raise Wrong(f"exit code {code}, but the folder is marked as running. Output:\n{printed}")
        if code == 0:
            if hit:
                tally.outlived[fault.about] += 1
            return
        notify(f"ended with {code}: {' '.join(printed.splitlines()[-1:])[:100]}; resumed")
        tally.resumed[fault.about] += 1
        run.start()


Outcome = tuple[list[dict[str, Any]], str, str, list]


def outcome(folder: Path) -> Outcome:
    """Return a run's lines without seconds, checksums of its last state and of its client states, and client scores."""
    record = RunFolder.open(folder)
    found = read(complete(folder / "checkpoints")[-1])
    kept = {str(client): load_tensors(file) for client, file in sorted(found.client_states.files.items())}
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in record.rounds()]
    return lines, checksum(found.state), checksum(kept), record.client_scores.tolist()


def difference(run: Outcome, twin: Outcome) -> str:
    """Return the first difference of two runs, "" if they are equal."""
    if len(run[0]) != len(twin[0]):
        return f"{len(run[0])} lines of metrics, but {len(twin[0])} in the serial run"
    for ours, theirs in zip(run[0], twin[0], strict=True):
        if ours != theirs:
            return f"the line of round {theirs['round']}:\n{ours}\n{theirs}"
    names = ("the last state", "client states", "client scores")
    return ", ".join(name for name, a, b in zip(names, run[1:], twin[1:], strict=True) if a != b)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="time with faults (default: 30)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the faults (default: random, and printed)")
    parser.add_argument("--rounds", type=int, default=80, help="rounds of a run (default: 80)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, leave)
    seed = random.randrange(10**6) if args.seed is None else args.seed
    draw, tally, twins = random.Random(seed), Tally(), {}
    console = Console(width=140, highlight=False)
    methods = draw.sample(METHODS, len(METHODS))
    place = Path(tempfile.mkdtemp(prefix="chaos-"))
    began, number, wrong = time.monotonic(), 0, ""
    ends = began + 60 * args.minutes
    console.print(f"seed {seed}, in {place}")
    while not wrong and (time.monotonic() < ends or not tally.runs):
        method = methods[number % len(methods)]
        output = place / f"{number:03}-{method}"
        output.mkdir()

        def notify(text: str, of: str = output.name) -> None:
            console.print(f"{time.monotonic() - began:7.1f} s  {of}: {text}", soft_wrap=True, markup=False)

        with ExitStack() as stack:
            cluster = stack.enter_context(raylets()) if draw.random() < 1 / 3 else None
            where = "three raylets" if cluster else "one raylet"
            run = Run(method, args.rounds, output, draw, cluster)
            notify(f"starts on {where}")
            try:
                disturb(run, ends, tally, notify)
                if method not in twins:
                    twin = run.config | {"run": EXPERIMENT["run"] | {"executor": "serial"}}
                    twins[method] = outcome(rayfl.run(twin, place / f"serial-{method}").folder.path)
                wrong = difference(outcome(run.folder), twins[method])
            except Wrong as error:
                wrong = str(error)
            finally:
                if run.is_running():
                    kill_everything(run)
        if wrong:
            notify(f"WRONG, see {output}: {wrong}")
        else:
            notify(f"equal to its serial twin after {run.made.total()} faults")
            tally.runs.append((method, where, run.made.total()))
            shutil.rmtree(output)
        number += 1
    report(tally, console, time.monotonic() - began)
    if not (wrong or tally.faults):
        console.print("WRONG: no fault hit a process")
    if wrong or not tally.faults:
        sys.exit(1)
    shutil.rmtree(place)


def report(tally: Tally, console: Console, seconds: float) -> None:
    table = Table(title=f"faults in {seconds / 60:.1f} minutes", title_justify="left", box=None)
    for column in ("fault", "injected", "survived", "resumed after"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for fault in FAULTS:
        counts = (tally.faults, tally.outlived, tally.resumed)
        table.add_row(fault.about, *(str(count[fault.about]) for count in counts))
    table.add_row("all", *(str(count.total()) for count in (tally.faults, tally.outlived, tally.resumed)))
    console.print(table)
    each = ", ".join(f"{method} on {where} ({faults})" for method, where, faults in tally.runs)
    console.print(f"{len(tally.runs)} runs equal to their serial twins bit for bit (number of faults): {each}")


if __name__ == "__main__":
    main()
