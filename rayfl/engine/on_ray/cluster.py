"""Ray for a driver: a local or a running cluster, and the resources of a run in it."""

import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private.node import Node
from ray.exceptions import AuthenticationError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rayfl.config import ConfigError, RunFailed
from rayfl.core import frozen
from rayfl.core.tensors import unpack
from rayfl.data.base import Arrays
from rayfl.engine.locks import TEMPORARY, clear, take
from rayfl.engine.memory import give_back_freed_memory
from rayfl.engine.on_ray import memory
from rayfl.engine.on_ray.actors import Crew
from rayfl.engine.on_ray.pool import raised
from rayfl.engine.on_ray.resources import (
    bundles,
    described,
    gpus_of,
    is_own,
    memory_of,
    require_room,
    reserved,
    room,
    spread,
)
from rayfl.engine.on_ray.server import ServerActor
from rayfl.engine.on_ray.status import About, server_name
from rayfl.engine.plugins import packed
from rayfl.engine.simulation import STEP_SECONDS
from rayfl.engine.termination import blocked, kept
from rayfl.experiment import Experiment
from rayfl.methods.base import Deployment
from rayfl.metrics import Line

ROOM_SECONDS = 120.0
GROWTH_SECONDS = 1800.0
"""Seconds that an autoscaled cluster may take to grow."""
LOOK_SECONDS = 2.0
"""Seconds between two checks of a waiting driver that its Ray is alive."""
VITAL = {"gcs_server": "control process (gcs_server)", "raylet": "node process (raylet)"}
"""Processes that a local cluster needs -> their names in messages."""
GOES_ON = "Run the same command with --resume to continue from the last checkpoint"
STARTS = 3
"""Attempts to start a local cluster: Ray gives its node 30 seconds, which no setting changes."""
NODE_LABEL = "ray.io/node-id"
"""Label of every node in Ray: its id."""
PORT_SECONDS = "120"
"""Seconds that Ray waits for the port of its GCS. Ray's default: 30."""
SESSIONS = "/tmp/ray"
LONGEST_SESSIONS = 107 - len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""Maximum length of the folder of Ray's sessions: paths of sockets have at most 107 bytes."""
_print_of_ray = ray._private.worker.print_to_stdstream  # pyright: ignore


@contextmanager
def cluster(address: str | None = None) -> Iterator[None]:
    """Connect this process to Ray: to the cluster that it is connected to, otherwise to that at `address` or
    RAY_ADDRESS, otherwise to a new local one that ends with the block.

    A plain `ray.init()` would join any cluster that it finds on the machine. Frees frozen tensors, which this process
    has read for checks.
    """
    frozen.forget()
    give_back_freed_memory()
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    _require_answer(address)
    try:
        # with Ray's own handlers a SIGTERM would abort this process
        with kept():
            context = _started() if address == "local" else _init(address=address)
    except ConnectionError as error:
        if address == "auto":
            raise ConfigError(
                "no Ray cluster runs on this machine. Hint: give the address of a cluster, --address HOST:PORT"
            ) from None
        raise ConfigError(
            f"--address {address}: no Ray cluster answers at this address ({str(error).splitlines()[0]}). Hint: if it "
            "uses token authentication, set RAY_AUTH_MODE=token here too, with its token in ~/.ray/auth_token"
        ) from None
    except AuthenticationError:
        raise ConfigError(
            f"--address {address}: RAY_AUTH_MODE is set, but no token is found. Hint: put the cluster's token into "
            "~/.ray/auth_token or RAY_AUTH_TOKEN"
        ) from None
    session = Path(context.address_info["session_dir"]) if address == "local" else None  # pyright: ignore
    with ExitStack() as stack:
        try:
            if session is not None:
                stack.callback(os.close, _own_session(session))
            yield
        finally:
            ray.shutdown() if session is None else _end(session)


def _init(**options: Any) -> Any:
    driver: Any = ray._private.worker  # pyright: ignore
    driver.print_to_stdstream = _print_message
    return ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def _print_message(data: dict[str, Any], ignore_prefix: bool) -> None:
    """Print a message of Ray about its nodes as one sentence on stderr. Ray itself prints it with twenty lines of a log
    on stdout, where results are, even without `log_to_driver`."""
    if data.get("pid") != "raylet":
        _print_of_ray(data, ignore_prefix)
        return
    if killed := memory.by_ray("\n".join(data["lines"])):
        print(f"Ray reports: {killed}", file=sys.stderr)
        return
    for text in data["lines"]:
        first = text.strip().partition("\n")[0].partition(". ")[0]
        print(f"Ray reports: {first}", file=sys.stderr)


def _started() -> Any:
    """Start a local cluster, in several attempts if the machine is busy."""
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", PORT_SECONDS)
    reason = ""
    for _ in range(STARTS):
        try:
            with blocked():
                return _init(address="local", include_dashboard=False, _temp_dir=_sessions())
        except Exception as error:
            if "timed out" not in str(error).lower():
                raise
            _end_half_started(error)
            reason = str(error).partition(". ")[0]
    raise RunFailed(
        f"Ray did not start in {STARTS} attempts ({reason}): the machine is too busy. Hint: try again later; or start "
        "Ray once, with `ray start --head`, and give --address auto; a single run needs no Ray with --set "
        "run.executor=serial"
    )


def _sessions() -> str:
    """Return the folder of Ray's sessions: Ray's default below RAY_TMPDIR or TMPDIR, or below /tmp if a socket in it
    would have a path that Ray does not accept."""
    default = get_default_ray_temp_dir()
    is_valid = default.isascii() and len(default) <= LONGEST_SESSIONS
    return default if is_valid else SESSIONS


def _end_half_started(error: Exception) -> None:
    """End the processes of a node that did not start in time; Ray keeps no handle on them."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, Node):
            node.kill_all_processes(check_alive=False, allow_graceful=False)


def _own_session(folder: Path) -> int:
    """Lock the session folder of a local cluster, which Ray does not remove, and remove those of dead processes."""
    clear(folder.parent, "session_*", _end_those_of)
    return take(folder, TEMPORARY)


def _end(session: Path) -> None:
    """End a local cluster. Its processes ignore SIGTERM, and Ray would wait a second for each of them."""
    worker: Any = ray._private.worker  # pyright: ignore
    node, worker._global_node = worker._global_node, None
    ray.shutdown()
    node.destroy_external_storage()
    node.kill_all_processes(check_alive=False, allow_graceful=False)
    _end_those_of(session)


def _end_those_of(session: Path) -> None:
    """Kill the processes of a session that has ended: two agents would notice that only after a minute."""
    for process in Path("/proc").glob("[0-9]*"):
        # another user's, or ended meanwhile
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            # agents and workers name themselves, and have their logs open
            named = command.startswith(b"ray::") and _has_open(process, session)
            if named or str(session).encode() in command:
                os.kill(int(process.name), signal.SIGKILL)


def _has_open(process: Path, folder: Path) -> bool:
    """Return whether a process (its folder in /proc) has an open file in a folder."""
    for file in (process / "fd").iterdir():
        # one that it has closed meanwhile
        with suppress(FileNotFoundError):
            if os.readlink(file).startswith(f"{folder}/"):
                return True
    return False


def _require_answer(address: str) -> None:
    """Raise a ConfigError if nothing answers at an address; Ray would try for minutes."""
    if address in ("local", "auto"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--address: {address!r} is not valid. Allowed: HOST:PORT of a Ray head, auto, or local")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ConfigError(f"--address {address}: no Ray head answers at this address ({error})") from None


def require_ray() -> None:
    """Raise a RunFailed if the local cluster has died: within a minute Ray's core would end this process without a
    message."""
    for name in _dead():
        raise RunFailed(f"Ray's {name} died. {GOES_ON}")


def _dead() -> list[str]:
    """Return the names of vital processes of the local cluster that died."""
    node = ray._private.worker._global_node  # pyright: ignore
    return [] if node is None else [VITAL[kind] for kind, _ in node.dead_processes() if kind in VITAL]


def get(ref: Any) -> Any:
    """Return the answer of a remote call. Errors that are meant for users are raised without Ray's traceback."""
    try:
        while not ray.wait([ref], timeout=LOOK_SECONDS)[0]:
            require_ray()
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, ConfigError | RunFailed):
            raise error.cause from None
        raise RunFailed(raised(error)) from None
    except RayError as error:
        # its actors end with it, and may be noticed first
        require_ray()
        if killed := memory.by_ray(str(error)):
            raise RunFailed(f"{killed}. {GOES_ON}") from None
        if isinstance(error, RayActorError):
            raise RunFailed(f"the run's server actor died. {GOES_ON}\nRay reports: {error}") from None
        raise


class Remote:
    """A server actor with the methods of a `Simulation`, as plain calls."""

    def __init__(self, server: Any, place: str):
        self.server, self.place = server, place

    def step(self, seconds: float = STEP_SECONDS) -> list[Line] | None:
        require_ray()
        return get(self.server.step.remote(seconds))

    def save(self, folder: Path) -> None:
        get(self.server.save.remote(str(folder)))

    def restore(self, folder: Path) -> tuple[int, list[str]]:
        return get(self.server.restore.remote(str(folder)))

    @property
    def client_scores(self) -> np.ndarray:
        return get(self.server.client_scores.remote())

    @property
    def client_table(self) -> np.ndarray:
        return get(self.server.client_table.remote())

    def deployment(self, capacity: float, client: int | None = None) -> Deployment:
        return unpack(get(self.server.deployment.remote(capacity, client)))


@contextmanager
def running(experiment: Experiment, arrays: Arrays, folder: Path, address: str | None) -> Iterator[Remote]:
    """Run an experiment's simulation on Ray: its server actor on this node, its client actors in a placement group."""
    experiment, run = experiment.described(), experiment.run
    packages = packed(experiment)
    _clients(experiment, address)
    with cluster(address), ExitStack() as stack:
        clients = _clients(experiment, address)
        here = ray.get_runtime_context().get_node_id()
        place = NodeAffinitySchedulingStrategy(here, soft=False)
        if run.server_cpus:
            # not in the clients' group: Ray may give them this node's CPUs first, and the group would never fit
            group = stack.enter_context(_reserved([{"CPU": run.server_cpus}], address, here))
            place = PlacementGroupSchedulingStrategy(group, 0)
        group = stack.enter_context(_reserved(clients, address))
        crew = Crew(group, range(len(clients)), run.cpus, gpus_of(run), run.threads, packages, os.getcwd())
        options = {"num_cpus": run.server_cpus, "scheduling_strategy": place, "name": server_name()}
        server = ServerActor.options(**options).remote(crew)  # pyright: ignore
        try:
            about = About(experiment.method.name, str(folder))
            get(server.load.remote(experiment, [ray.put(arrays)], str(folder), about))
            yield Remote(server, described(clients, run))
            get(server.close.remote())
        finally:
            # a notebook keeps its last exception and thereby this handle
            if not _dead():
                ray.kill(server)


@contextmanager
def _reserved(
    resources: list[dict[str, float]], address: str | None, node: str | None = None
) -> Iterator[PlacementGroup]:
    """Reserve a placement group, on one node if it is given."""
    labels = {NODE_LABEL: node} if node else {}
    group = placement_group(resources, bundle_label_selector=[labels] * len(resources))
    seconds = ROOM_SECONDS if is_own(address) else GROWTH_SECONDS
    try:
        if not group.wait(seconds):
            raise ConfigError(f"run: the cluster had no room for {resources} within {seconds:.0f} s: other jobs use it")
        yield group
    finally:
        # removing it from a dead cluster would block
        if not _dead():
            with suppress(Exception):
                remove_placement_group(group)


def _clients(experiment: Experiment, address: str | None) -> list[dict[str, float]]:
    """Return the bundles of the run's client actors. Raises a ConfigError if they do not fit."""
    run = experiment.run
    actors, gpus = run.actors, gpus_of(run)
    if actors == "auto":
        actors = max(1, min(room(run.cpus, gpus, run.server_cpus, memory_of(experiment)), experiment.jobs))
        gpus = spread(actors, run.cpus, gpus, run.server_cpus)
    asked = 0.0 if run.memory == "auto" else memory_of(experiment)
    require_room(actors, run.cpus, gpus, address, run.server_cpus, asked)
    return bundles(actors, run.cpus, gpus, reserved(experiment, actors, gpus))
