"""Checks of a cluster's file before anything is started.

They include what Ray's launcher or KubeRay would refuse, and what both accept silently: a port open to the world, Ray
without a token, a password, an output folder that is not mounted.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayfl.clusters import kubernetes, launcher
from rayfl.config import ConfigError
from rayfl.config.plain import LARGEST_TEXT, read_yaml, shown

TOP = re.compile(rb"^(provider|kind)\s*:", re.MULTILINE)
"""Top-level keys of cluster files, which no experiment has."""
DOCUMENT = re.compile(rb"^---(?=\s)", re.MULTILINE)


def is_cluster(path: Path) -> bool:
    """Return whether a file is for Ray's launcher or Kubernetes, judged by its top-level keys."""
    try:
        with path.open("rb") as file:
            return TOP.search(file.read(LARGEST_TEXT)) is not None
    except OSError:
        return False


def check_cluster(path: Path) -> str:
    """Return a one-line summary of a cluster's file. Raise ConfigError with one line per problem."""
    documents = list(_documents(path))
    by_launcher = "provider" in documents[0]
    wrong = launcher.problems(documents[0]) if by_launcher else kubernetes.problems(documents)
    if lines := [f"{path}: {problem}" for problem in dict.fromkeys(wrong)]:
        raise ConfigError("\n".join(lines))
    return launcher.summary(documents[0]) if by_launcher else kubernetes.summary(documents)


def _documents(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_bytes()
    starts = [0, *(found.start() for found in DOCUMENT.finditer(text)), len(text)]
    for start, end in zip(starts, starts[1:], strict=False):
        # keep line numbers of the file
        before = b"\n" * text.count(b"\n", 0, start)
        try:
            document = read_yaml(before + text[start:end])
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
        if isinstance(document, dict):
            yield _merged(document)
        elif document is not None:
            raise ConfigError(f"{path}: {shown(document)} is not valid. Allowed: a mapping of sections")


def _merged(given: Any) -> Any:
    """Return a section with its merge keys (`<<`) resolved."""
    if isinstance(given, list):
        return [_merged(entry) for entry in given]
    if not isinstance(given, dict):
        return given
    below = given.get("<<", {})
    layers = [*(reversed(below) if isinstance(below, list) else [below]), given]
    whole = {key: value for layer in layers if isinstance(layer, dict) for key, value in layer.items() if key != "<<"}
    return {key: _merged(value) for key, value in whole.items()}
