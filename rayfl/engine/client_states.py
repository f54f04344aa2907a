"""Client states: one file per client and round, loaded on demand."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rayfl.core.fold import ClientState
from rayfl.engine.files import beside, link, load_tensors, remove, save_tensors, sha256, sync

OWN = "own"
"""Group of a client state that is part of the client's personal network."""

ROWS = np.dtype([("client", "<i8"), ("round", "<i8"), ("own", "?"), ("sha256", "u1", (32,))])
"""One row per client: the round of its file, whether the file has the group `OWN`, and its SHA-256."""

THREADS = 16
"""Parallel fsync calls: a disk syncs many files in the time of one."""


@dataclass(frozen=True)
class Kept:
    """Client states of a checkpoint."""

    folder: Path
    """Folder of their files, shared with other checkpoints."""
    round: int
    rows: np.ndarray

    @property
    def files(self) -> dict[int, Path]:
        return files_of(self.folder, self.rows)

    def personal(self, client: int) -> ClientState | None:
        """Return the state of a client with a personal network, or None."""
        own = self.rows[(self.rows["client"] == client) & self.rows["own"]]
        return next(map(load_tensors, files_of(self.folder, own).values()), None)


@dataclass
class _Store:
    """Folder of checkpoints' files."""

    unlinked: set[int]
    """Clients whose files are not in it yet."""
    old: dict[str, int] = field(default_factory=dict)
    """Replaced files in it -> last checkpoint that may list them, rounds ascending."""
    saved: int = 0
    """Round of the last checkpoint."""


class ClientStates:
    """States of all clients, on disk.

    A file never changes after it is written. The next checkpoint syncs it, computes its SHA-256 and links it into the
    folder of all checkpoints; later checkpoints only list it. A client's older file is deleted, and its link once no
    checkpoint lists it. For unchanged clients, a checkpoint only copies rows of a table.
    """

    def __init__(self, folder: Path):
        """Empty `folder`, which only this object uses."""
        self.folder = folder
        self._clear()

    def _clear(self) -> None:
        remove(self.folder)
        self._rows = np.empty(0, ROWS)
        """Row i is client i; round -1: it has no state."""
        self._unsummed: set[int] = set()
        """Clients whose files have no SHA-256 yet and may not be synced."""
        self._stores: dict[Path, _Store] = {}
        self._last: Path | None = None
        """Store of the last checkpoint."""

    def get(self, client: int) -> dict | None:
        return load_tensors(self.folder / name_of(client, self._round(client))) if self._round(client) >= 0 else None

    def some(self, clients: Iterable[int]) -> dict[int, ClientState]:
        """Return client -> its state, of these clients that have one."""
        states = {client: self.get(client) for client in clients}
        return {client: state for client, state in states.items() if state is not None}

    @property
    def files(self) -> dict[int, Path]:
        return files_of(self.folder, self._kept)

    @property
    def owners(self) -> frozenset[int]:
        """Clients with a personal network, or a part of one."""
        return frozenset(np.flatnonzero(self._rows["own"]).tolist())

    def put(self, client: int, round: int, tensors: ClientState) -> None:
        """Replace a client's state. Raise NotWritten and keep the old state if the disk fails."""
        name, before = name_of(client, round), self._round(client)
        with beside(self.folder / name, f"the state of client {client} after round {round + 1}") as partial:
            save_tensors(partial, tensors)
        if before >= 0 and (old := name_of(client, before)) != name:
            (self.folder / old).unlink()
            for there in self._stores.values():
                if client not in there.unlinked:
                    there.old[old] = there.saved
        if client >= len(self._rows):
            self._grow(client + 1)
        self._rows[client] = (client, round, OWN in tensors, 0)
        self._unsummed.add(client)
        for there in self._stores.values():
            there.unlinked.add(client)

    def save(self, store: Path, round: int) -> np.ndarray:
        """Link the files missing in folder `store` for the checkpoint of `round`. Return the rows of all clients with a
        state."""
        self._stores = {folder: there for folder, there in self._stores.items() if folder.is_dir()}
        if store not in self._stores:
            self._stores[store] = _Store(set(self._kept["client"].tolist()))
        self._last, there = store, self._stores[store]
        store.mkdir(parents=True, exist_ok=True)
        unsummed = sorted(self._unsummed)
        files = [self.folder / name_of(client, self._round(client)) for client in unsummed]
        _all_durable(files)
        for client, file in zip(unsummed, files, strict=True):
            self._rows["sha256"][client] = np.frombuffer(bytes.fromhex(sha256(file)), np.uint8)
        self._unsummed.clear()
        for client in sorted(there.unlinked):
            name = name_of(client, self._round(client))
            link(self.folder / name, store / name)
            there.old.pop(name, None)
        if there.unlinked:
            sync(store)
        there.unlinked.clear()
        there.saved = round
        return self._kept

    def forget_before(self, round: int) -> None:
        """Remove files that no checkpoint of this round or a later one lists, from the store of the last checkpoint."""
        if self._last is None:
            return
        old = self._stores[self._last].old
        for name, last in list(old.items()):
            if last >= round:
                break
            (self._last / name).unlink(missing_ok=True)
            del old[name]

    def restore(self, kept: Kept) -> None:
        """Replace all states by those of a checkpoint."""
        self._clear()
        self.folder.mkdir(parents=True)
        for there in kept.files.values():
            link(there, self.folder / there.name)
        if len(kept.rows):
            self._grow(int(kept.rows["client"].max()) + 1)
            self._rows[kept.rows["client"]] = kept.rows
        _all_durable(self.files.values())  # a copied checkpoint may not be synced
        named = {file.name for file in self.files.values()}
        self._last, self._stores = None, {}
        if kept.folder.is_dir():
            old = {name: kept.round for name in sorted(set(os.listdir(kept.folder)) - named)}
            self._last, self._stores = kept.folder, {kept.folder: _Store(set(), old, kept.round)}

    @property
    def _kept(self) -> np.ndarray:
        return self._rows[self._rows["round"] >= 0]

    def _round(self, client: int) -> int:
        """Return the round of a client's file, or -1."""
        return int(self._rows["round"][client]) if client < len(self._rows) else -1

    def _grow(self, clients: int) -> None:
        more = np.zeros(max(clients, 2 * len(self._rows)) - len(self._rows), ROWS)
        more["round"] = -1
        self._rows = np.concatenate([self._rows, more])


def name_of(client: int, round: int) -> str:
    """Return the file name of a client's state after a round."""
    return f"{client}-{round}.safetensors"


def files_of(folder: Path, rows: np.ndarray) -> dict[int, Path]:
    """Return client -> its file in a folder."""
    named = zip(rows["client"].tolist(), rows["round"].tolist(), strict=True)
    return {client: folder / name_of(client, round) for client, round in named}


def _all_durable(files: Iterable[Path]) -> None:
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(sync, files))
