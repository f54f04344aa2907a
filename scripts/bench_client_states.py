"""Cost of a network per client: memory of each process, disk, and seconds per checkpoint.

    python scripts/bench_client_states.py                                # 20 clients, a small ResNet: a minute
    python scripts/bench_client_states.py --clients 100 --channels 64    # 45 MB per client: minutes, 5 GB of disk

Ten clients per round take one step on two images each, until all clients have trained, so that most work is moving
networks. Then checkpoints are written: of all client states, of those changed by one more round, and of no changes.
Then every client's network is evaluated, and the run is resumed. Memory is sampled every 50 ms: of each process
(RssAnon), and its mapped part of the object store (RssShmem). Ray frees objects about once per second, so the store
includes about a second of unused messages. Linux only.
"""

# first, because Ray and torch read its settings when they are imported
from bench_round import show  # isort: skip

import argparse
import json
import logging
import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peers.timing import seconds_of

from rayfl.engine.on_ray.nodes import store_bytes
from rayfl.engine.simulation import Simulation
from rayfl.experiment import Experiment, read_experiment

COHORT, IMAGES, MEGABYTE = 10, 4, 1e6


def experiment(method: str, clients: int, channels: int) -> Experiment:
    return read_experiment(
        {
            "rounds": 10**6,
            "data": {
                "name": "synthetic",
                "samples": IMAGES * clients,
                "test_samples": IMAGES * clients,
                "shape": (3, 32, 32),
            },
            "partition": "iid",
            "clients": {"count": clients, "cohort": COHORT},
            "model": {"name": "resnet18", "channels": channels},
            "training": {"steps": 1, "batch_size": 2, "lr": 0.01},
            "method": method,
            "evaluation": {"every": 10**6, "holdout": 0.0},
        },
        "bench_client_states",
    )


def has_client_states(method: str) -> bool:
    """Return True if all clients of a round have a client state after it, by one round of small networks."""
    small = experiment(method, COHORT, channels=4)
    with tempfile.TemporaryDirectory(prefix="bench_client_states_") as folder:
        simulation = Simulation(small, small.data.arrays(), Path(folder))
        simulation.run_round()
        return len(simulation.client_states.files) == COHORT


# memory of processes


class Watch:
    """Peak memory of processes, by name, and of the object store since `reset`, in bytes."""

    def __init__(self, pids: Mapping[str, int], seconds: float = 0.05):
        self.pids, self.seconds = pids, seconds
        self.peaks: dict[str, int] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def reset(self) -> None:
        self.peaks = self._now()

    def __enter__(self) -> "Watch":
        self.reset()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._end.wait(self.seconds):
            self.peaks = {name: max(n, self.peaks[name]) for name, n in self._now().items()}

    def _now(self) -> dict[str, int]:
        held = {"object store": store_bytes()}
        for name, pid in self.pids.items():
            anonymous, shared = resident_memory(pid)
            held |= {f"{name}, own": anonymous, f"{name}, mapped from the store": shared}
        return held


def resident_memory(pid: int) -> tuple[int, int]:
    """Return a process's memory in bytes: its own, and shared."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {line.split()[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return found["RssAnon:"] * 1024, found["RssShmem:"] * 1024


def disk_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder, links counted once."""
    found = [file.stat() for file in folder.rglob("*") if file.is_file()]
    return sum({stat.st_ino: stat.st_blocks * 512 for stat in found}.values())


# measuring


def measure(what: Experiment, actors: int, repeats: int, folder: Path) -> dict[str, Any]:
    import ray
    from ray.util.placement_group import placement_group

    from rayfl.engine.on_ray.actors import Crew
    from rayfl.engine.on_ray.server import ServerActor
    from rayfl.engine.on_ray.status import About

    ray.init(
        address="local", num_cpus=actors + 1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
    crew = Crew(placement_group([{"CPU": 1}] * actors), range(actors), cpus=1, gpus=0, threads=1)
    server: Any = ServerActor.remote(crew)  # pyright: ignore
    about = About(what.method.name, str(folder))
    ray.get(server.load.remote(what, [ray.put(what.data.arrays())], str(folder), about))
    saved = str(folder / "checkpoints")

    def on_server(work: Callable[[Any], Any]) -> Any:
        return ray.get(server.__ray_call__.remote(work))

    def save() -> float:
        return seconds_of(lambda: ray.get(server.save.remote(saved)))

    def round() -> float:
        return on_server(lambda actor: actor.simulation.run_round()["seconds"])

    rounds = [round()]
    pids = {"server": on_server(lambda actor: os.getpid())}
    clients = on_server(lambda actor: ray.get([s.actor.__ray_call__.remote(pid_of) for s in actor.pool.slots]))
    pids |= {f"client actor {i}": pid for i, pid in enumerate(clients, start=1)}
    network = what.bound().task.server.parameters * 4
    found: dict[str, Any] = {"MB per network": network / MEGABYTE}
    with Watch(pids) as watch:
        while on_server(lambda actor: len(actor.simulation.client_states.files)) < what.clients.count:
            rounds.append(round())
        found["rounds until every client has a state"] = len(rounds)
        found["seconds per round"] = statistics.median(rounds)
        found["peak MB, training"] = {name: n / MEGABYTE for name, n in watch.peaks.items()}
        everything = save()
        size = disk_bytes(folder)
        changed, same = [], []
        for _ in range(repeats):
            round()
            changed.append(save())
            same.append(save())
        found["seconds per checkpoint"] = {
            "all client states": everything,
            "client states of a round": statistics.median(changed),
            "no changes": statistics.median(same),
        }
        found["checkpoint of everything over one of a round's"] = everything / statistics.median(changed)
        found["GB on disk"] = {"with the first checkpoint": size / 1e9, "with the last two": disk_bytes(folder) / 1e9}
        found["disk over clients x network, with the first checkpoint"] = size / network / what.clients.count
        watch.reset()
        found["seconds per evaluation"] = seconds_of(lambda: on_server(lambda actor: actor.simulation.evaluate()))
        found["peak MB, evaluation"] = {name: n / MEGABYTE for name, n in watch.peaks.items()}
        found["peak networks in the object store, evaluation"] = watch.peaks["object store"] / network
        found["seconds to resume"] = seconds_of(lambda: ray.get(server.restore.remote(saved)))
    ray.get(server.close.remote())
    ray.shutdown()
    return found


def pid_of(actor: Any) -> int:
    return os.getpid()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--method", default="spafl", help="method with a network per client (default: spafl)")
    parser.add_argument("--clients", type=int, default=20, help="number of clients; ten train per round (default: 20)")
    parser.add_argument("--channels", type=int, default=16, help="ResNet-18's channels (default: 16; published: 64)")
    parser.add_argument("--actors", type=int, default=2, help="number of client actors (default: 2)")
    parser.add_argument("--repeats", type=int, default=3, help="measured checkpoints after a round (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    what = experiment(options.method, options.clients, options.channels)
    if not has_client_states(options.method):
        parser.error(f"--method: {options.method} has no client states. Allowed: a method with a network per client")
    with tempfile.TemporaryDirectory(prefix="bench_client_states_") as folder:
        found = measure(what, options.actors, options.repeats, Path(folder))
    print(json.dumps(found, indent=2)) if options.json else show(found)


if __name__ == "__main__":
    main()
