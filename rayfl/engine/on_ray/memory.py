"""Processes that Ray or the operating system killed because memory ran out: which of ours held how much, and what to
lower."""

import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

KILLED = "because memory ran out"
"""Words in every sentence of this module, and in no other."""
HINT = (
    "Hint: lower run.actors, training.batch_size or evaluation.batch_size, or raise run.memory, so that fewer client "
    "actors share a node"
)
LOOK_SECONDS = 1.0
"""Seconds between two looks at the memory of processes."""
MOST = 4
"""Maximum number of processes of rayfl in a sentence."""
OF_RAY = "low on memory"
"""Words of Ray about processes that it killed."""
NODE = re.compile(r"was ([\d.]+) ?GB(?: used)? / ([\d.]+) ?GB")
PROCESS = re.compile(r"^\s*(\d+)\s+([\d.]+)\s+(\S.*)$", re.MULTILINE)
"""Line of Ray's table of the largest processes: id, GB, command."""
OURS = {
    "ray::ClientActor": "client actor",
    "ray::ServerActor": "server actor",
    "ray::FederatedTrial": "trial",
    "rayfl run": "command",
    "rayfl sweep": "command",
}
"""Part of a command -> name of the process."""


def by_ray(text: str) -> str | None:
    """Return a sentence on what Ray killed for lack of memory, from its message; None for another message."""
    if OF_RAY not in text:
        return None
    node, held = NODE.search(text), PROCESS.findall(text.partition("Top 10 memory users")[2])
    used = f", which used {node[1]} of {node[2]} GB" if node else ""
    return f"Ray killed processes of a node{used}, {KILLED}{_listed(held)}. {HINT}"


def _listed(held: Iterable[tuple[str, str, str]]) -> str:
    """Return ": client actor 8.5 GB (process 12), ..." of the largest processes (id, GB, command) of rayfl, and of the
    largest other one if it held more than all of these."""
    ours: list[tuple[float, str]] = []
    others: list[tuple[float, str]] = []
    for id, gb, command in held:
        name = next((name for part, name in OURS.items() if part in command), "")
        text = f"{name or command.split()[0]} {float(gb):.2g} GB (process {id})"
        (ours if name else others).append((float(gb), text))
    ours = sorted(ours, reverse=True)[:MOST]
    largest = max(others, default=(0.0, ""))
    more = [largest] if largest[0] > sum(gb for gb, _ in ours) else []
    texts = [text for _, text in [*ours, *more]]
    return f": {', '.join(texts)}" if texts else ""


class Watch:
    """Memory of processes of this node, for a sentence on one that the operating system kills."""

    def __init__(self) -> None:
        self._kills = kills()
        self._held: dict[int, int] = {}
        self._next = 0.0

    def look(self, processes: Mapping[int, str]) -> None:
        """Note the memory of processes (id -> command), at most once per `LOOK_SECONDS`. One that has just died keeps
        its last value."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_SECONDS
        now = {id: held(id) or self._held.get(id) for id in processes}
        self._held = {id: bytes for id, bytes in now.items() if bytes is not None}

    def by_system(self, process: int, processes: Mapping[int, str]) -> str | None:
        """Return a sentence on a dead process that the operating system killed for lack of memory; None if it killed
        none since the last call. `processes`: those looked at."""
        before, self._kills = self._kills, kills()
        if self._kills is None or before is None or self._kills <= before or process not in self._held:
            return None
        found = [(str(id), str(bytes / 1e9), processes[id]) for id, bytes in self._held.items() if id in processes]
        return f"the operating system killed process {process} {KILLED}{_listed(found)}. {HINT}"


def held(process: int) -> int | None:
    """Return the bytes of private memory of a process of this node; None if it has ended or is another user's."""
    with suppress(OSError, LookupError, ValueError):
        status = Path(f"/proc/{process}/status").read_text("utf-8", "replace")
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024
    return None


def kills() -> int | None:
    """Return how many processes the operating system has killed for lack of memory since its start; None if unknown."""
    with suppress(OSError, LookupError, ValueError):
        return int(Path("/proc/vmstat").read_text("utf-8").partition("oom_kill ")[2].split()[0])
    return None
