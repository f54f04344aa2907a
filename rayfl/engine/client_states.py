"""What clients keep between their rounds: one file a client and round, loaded when it is wanted."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rayfl.core.fold import ClientState
from rayfl.engine.files import beside, link, load_tensors, remove, save_tensors, sha256, sync

OWN = "own"
"""The group of a carry that is part of what its client itself runs."""

ROWS = np.dtype([("client", "<i8"), ("round", "<i8"), ("own", "?"), ("sha256", "u1", (32,))])
"""A row a client: the round that its file is of, whether it holds the group `OWN`, and the file's SHA-256."""

THREADS = 16
"""A disk makes many files durable together in the time of one."""


@dataclass(frozen=True)
class Kept:
    """What clients keep at a checkpoint."""

    folder: Path
    """Where their files are, among those of other checkpoints."""
    round: int
    """The checkpoint's."""
    rows: np.ndarray

    @property
    def files(self) -> dict[int, Path]:
        """Client -> its file."""
        return files_of(self.folder, self.rows)


class ClientStates:
    """Client -> its file; never all in memory.

    A file never changes. So the next checkpoint sees to it that it is on disk for good, takes its SHA-256 and links it
    into the folder of all checkpoints; later ones only name it. A client's older file goes, from that folder once no
    checkpoint names it. Nothing but the copy of the table that names them grows with the clients who did not change.
    """

    def __init__(self, folder: Path):
        """`folder` is its own: what an earlier run left there goes."""
        self.folder = folder
        self._clear()

    def _clear(self) -> None:
        remove(self.folder)
        self._rows = np.empty(0, ROWS)
        """Of client i in row i; round -1: it keeps nothing."""
        self._unsummed: set[int] = set()
        """Clients whose files are not known to be on disk for good."""
        self._store: Path | None = None
        """Where the last checkpoint's files are, and there:"""
        self._unlinked: set[int] = set()
        """clients whose files are not there yet;"""
        self._old: dict[str, int] = {}
        """files that clients no longer have -> the last checkpoint that may name them, rounds ascending."""
        self._saved = 0
        """The round of the last checkpoint."""

    def get(self, client: int) -> dict | None:
        return load_tensors(self.folder / name_of(client, self._round(client))) if self._round(client) >= 0 else None

    @property
    def files(self) -> dict[int, Path]:
        """Client -> its file."""
        return files_of(self.folder, self._kept)

    @property
    def owners(self) -> frozenset[int]:
        """Clients who keep a network of their own, or a part of one."""
        return frozenset(np.flatnonzero(self._rows["own"]).tolist())

    def put(self, client: int, round: int, tensors: ClientState) -> None:
        """NotWritten if the disk does not take it: what the client kept before stays."""
        name, before = name_of(client, round), self._round(client)
        with beside(self.folder / name, f"what client {client} keeps of round {round + 1}") as partial:
            save_tensors(partial, tensors)
        if before >= 0 and (old := name_of(client, before)) != name:
            (self.folder / old).unlink()
            if client not in self._unlinked:
                self._old[old] = self._saved
        if client >= len(self._rows):
            self._grow(client + 1)
        self._rows[client] = (client, round, OWN in tensors, 0)
        self._unsummed.add(client)
        self._unlinked.add(client)

    def save(self, store: Path, round: int) -> np.ndarray:
        """Links into a folder what it lacks for the checkpoint of a round; the rows of all clients who keep
        something."""
        if store != self._store or not store.is_dir():
            self._store, self._old = store, {}
            self._unlinked = set(self._kept["client"].tolist())
        store.mkdir(parents=True, exist_ok=True)
        unsummed = sorted(self._unsummed)
        files = [self.folder / name_of(client, self._round(client)) for client in unsummed]
        _all_durable(files)
        for client, file in zip(unsummed, files, strict=True):
            self._rows["sha256"][client] = np.frombuffer(bytes.fromhex(sha256(file)), np.uint8)
        self._unsummed.clear()
        for client in sorted(self._unlinked):
            name = name_of(client, self._round(client))
            link(self.folder / name, store / name)
            self._old.pop(name, None)
        if self._unlinked:
            sync(store)
        self._unlinked.clear()
        self._saved = round
        return self._kept

    def forget_before(self, round: int) -> None:
        """Removes what no checkpoint of this round or a later one names."""
        for name, last in list(self._old.items()):
            if last >= round or self._store is None:
                break
            (self._store / name).unlink(missing_ok=True)
            del self._old[name]

    def restore(self, kept: Kept) -> None:
        """Takes over a checkpoint's files; what this folder held is forgotten."""
        self._clear()
        self.folder.mkdir(parents=True)
        for there in kept.files.values():
            link(there, self.folder / there.name)
        if len(kept.rows):
            self._grow(int(kept.rows["client"].max()) + 1)
            self._rows[kept.rows["client"]] = kept.rows
        _all_durable(self.files.values())  # whoever copied the checkpoint may not have
        named = {file.name for file in self.files.values()}
        self._store, self._saved = kept.folder, kept.round
        if kept.folder.is_dir():
            self._old = {name: kept.round for name in sorted(set(os.listdir(kept.folder)) - named)}

    @property
    def _kept(self) -> np.ndarray:
        return self._rows[self._rows["round"] >= 0]

    def _round(self, client: int) -> int:
        """Of a client's file; -1: it has none."""
        return int(self._rows["round"][client]) if client < len(self._rows) else -1

    def _grow(self, clients: int) -> None:
        more = np.zeros(max(clients, 2 * len(self._rows)) - len(self._rows), ROWS)
        more["round"] = -1
        self._rows = np.concatenate([self._rows, more])


def name_of(client: int, round: int) -> str:
    """The file of what a client keeps of a round."""
    return f"{client}-{round}.safetensors"


def files_of(folder: Path, rows: np.ndarray) -> dict[int, Path]:
    """Client -> its file in a folder."""
    named = zip(rows["client"].tolist(), rows["round"].tolist(), strict=True)
    return {client: folder / name_of(client, round) for client, round in named}


def _all_durable(files: Iterable[Path]) -> None:
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(sync, files))
