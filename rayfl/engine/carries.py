"""What clients keep between their rounds: one file a client and round, loaded when it is wanted."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rayfl.engine.files import beside, link, load_tensors, remove, save_tensors, sha256, sync
from rayfl.fold import Carry

OWN = "own"
"""The group of a carry that is part of what its client itself runs."""


@dataclass(frozen=True)
class Kept:
    """One client's file; it never changes."""

    path: Path
    is_own: bool
    """Whether it holds the group `OWN`."""
    sha256: str = ""
    """Known once the file is on disk for good."""


class Carries:
    """Client -> its file; never all in memory.

    A file never changes, so its first checkpoint sees to it that it is on disk for good and takes its SHA-256; later
    ones only link to it. A client's older file goes, and stays on disk as long as a checkpoint links it.
    """

    def __init__(self, folder: Path):
        """`folder` is its own: what an earlier run left there goes."""
        remove(folder)
        self.folder = folder
        self.files: dict[int, Kept] = {}

    def get(self, client: int) -> dict | None:
        kept = self.files.get(client)
        return None if kept is None else load_tensors(kept.path)

    @property
    def owners(self) -> frozenset[int]:
        """Clients who keep a network of their own, or a part of one."""
        return frozenset(client for client, kept in self.files.items() if kept.is_own)

    def put(self, client: int, round: int, tensors: Carry) -> None:
        """NotWritten if the disk does not take it: what the client kept before stays."""
        file = self.folder / f"{client}-{round}.safetensors"
        with beside(file, f"what client {client} keeps of round {round + 1}") as partial:
            save_tensors(partial, tensors)
        if (old := self.files.get(client)) is not None and old.path != file:
            old.path.unlink()
        self.files[client] = Kept(file, OWN in tensors)

    def link(self, folder: Path) -> dict[str, str]:
        """Links every file into a checkpoint's folder: its name there -> its SHA-256."""
        checksums = {}
        for client, kept in sorted(self.files.items()):
            if not kept.sha256:
                sync(kept.path)
                kept = self.files[client] = Kept(kept.path, kept.is_own, sha256(kept.path))
            name = f"{'own' if kept.is_own else 'carry'}-{client}.safetensors"
            link(kept.path, folder / name)
            checksums[name] = kept.sha256
        return checksums

    def restore(self, kept: Mapping[int, Kept]) -> None:
        """Takes over a checkpoint's files; what this folder held is forgotten."""
        remove(self.folder)
        self.folder.mkdir(parents=True)
        self.files = {}
        for client, there in kept.items():
            file = self.folder / there.path.name
            link(there.path, file)
            sync(file)  # whoever copied the checkpoint may not have
            self.files[client] = Kept(file, there.is_own, there.sha256)


def in_checkpoint(path: Path, checksum: str) -> tuple[int, Kept] | None:
    """The client of a file of a checkpoint, and the file; None if it is not a client's."""
    kind, dash, client = path.stem.partition("-")
    if kind not in ("own", "carry") or not dash:
        return None
    return int(client), Kept(path, kind == "own", checksum)
