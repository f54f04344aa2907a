"""Provenance of a run: versions, commits, machine and command line of the driver process."""

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
"""Timeout of programs that describe this machine."""


class Made(Config):
    """One driver process of a run. Client actors on other nodes may run on other processors."""

    command: str
    """Command line as typed, without passwords in addresses."""
    versions: dict[str, str]
    """Versions of Python and of `PACKAGES`."""
    commit: str
    """Commit of the working folder's repository; "-dirty" if it has changes, "none" outside a repository."""
    rayfl_commit: str
    """Commit of rayfl's own repository if it runs from a clone; "none" if it is installed."""
    system: str
    """Operating system and processor architecture: "Linux-6.1 x86_64"."""
    cpu: str
    """Model name."""
    cores: int
    gpus: tuple[str, ...]
    """Model names."""
    host: str
    user: str

    def same_bits(self, other: "Made") -> bool:
        """Return whether equal configurations should give equal bits with both."""
        one, two = ((m.cpu, m.gpus, m.versions.get("torch"), m.versions.get("numpy")) for m in (self, other))
        return one == two


@cache
def here() -> Made:
    return Made(
        command=public(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])),
        versions={"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        commit=commit_of(Path.cwd()),
        rayfl_commit=_commit_of_package(),
        system=f"{platform.system()}-{platform.release()} {platform.machine()}",
        cpu=_cpu(),
        cores=os.cpu_count() or 1,
        gpus=tuple(_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()),
        host=platform.node(),
        user=_user(),
    )


def commit_of(folder: Path) -> str:
    """Return the commit of a folder's repository; "-dirty" if it has changes, "none" outside a repository."""
    command = ("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return _output(*command) or NO_COMMIT


def _commit_of_package() -> str:
    # an installed rayfl may lie inside another repository that does not track it
    file = Path(__file__)
    tracked = _output("git", "-C", str(file.parent), "ls-files", file.name)
    return commit_of(file.parent) if tracked else NO_COMMIT


def _output(*command: str) -> str:
    """Return what a program prints; "" if it is missing or fails."""
    try:
        found = subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
        return found.stdout.decode("utf-8", "replace").strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _cpu() -> str:
    # platform.processor() is not useful on Linux
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _user() -> str:
    try:  # users of containers may have no name
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())
