"""What made a run: versions, commits, the machine of the process that drove it, and its command line."""

import getpass
import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rayfl.config import Config
from rayfl.config.plain import public

PACKAGES = ("rayfl", "torch", "torchvision", "ray", "mlflow", "numpy")
NO_COMMIT = "none"
SECONDS = 10
"""That a program may take to say something of this machine."""


class Made(Config):
    """One process that made a part of a run. Client actors on other nodes may have other processors."""

    command: str
    """As it was typed, without passwords of addresses."""
    versions: dict[str, str]
    """Of Python, and of `PACKAGES`."""
    commit: str
    """Of the working folder's repository: "-dirty" if it has changes, "none" outside one."""
    rayfl_commit: str
    """Of rayfl's own repository, where it runs from a clone; "none" where it is installed."""
    system: str
    """Operating system and kind of processor: "Linux-6.1 x86_64"."""
    cpu: str
    """Model name."""
    cores: int
    gpus: tuple[str, ...]
    """Model names."""
    host: str
    user: str

    def same_bits(self, other: "Made") -> bool:
        """Whether equal configurations can be expected to give equal bits here and there: on one type of processor and
        accelerator, with one torch."""
        return self._arithmetic == other._arithmetic

    @property
    def _arithmetic(self) -> tuple:
        return self.cpu, self.gpus, *(self.versions.get(name) for name in ("torch", "numpy"))


@cache
def here() -> Made:
    """Of this process."""
    return Made(
        command=public(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        versions={"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        commit=commit_of(Path.cwd()),
        rayfl_commit=_commit_of_package(),
        system=f"{platform.system()}-{platform.release()} {platform.machine()}",
        cpu=_cpu(),
        cores=os.cpu_count() or 1,
        gpus=tuple(_said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()),
        host=platform.node(),
        user=_user(),
    )


def commit_of(folder: Path) -> str:
    """The commit of a folder's repository, "-dirty" if it has changes, "none" outside a repository."""
    command = ("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return _said(*command) or NO_COMMIT


def _commit_of_package() -> str:
    """An installed rayfl may lie inside somebody's repository, which does not track it."""
    file = Path(__file__)
    tracked = _said("git", "-C", str(file.parent), "ls-files", file.name)
    return commit_of(file.parent) if tracked else NO_COMMIT


def _said(*command: str) -> str:
    """What a program says of this machine; "" where there is no such program, or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _cpu() -> str:
    """platform.processor() says nothing of use on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _user() -> str:
    """Containers may run as somebody without a name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())
