"""What is wrong in a cluster's file, before it costs anything.

That is what Ray's launcher or KubeRay refuses, and what both take without a word: a port that is open to the world, Ray
without a token, a password, an output folder that nothing mounts.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayfl.clusters import kubernetes, launcher
from rayfl.config import ConfigError
from rayfl.config.plain import LARGEST_TEXT, read_yaml, shown

TOP = re.compile(rb"^(provider|kind)\s*:", re.MULTILINE)
"""What stands at the top of a cluster's file, and of no experiment's."""
DOCUMENT = re.compile(rb"^---(?=\s)", re.MULTILINE)


def is_cluster(path: Path) -> bool:
    """Whether a file is one of Ray's launcher or of Kubernetes, by a key at its top; not whether it is a good one."""
    try:
        with path.open("rb") as file:
            return TOP.search(file.read(LARGEST_TEXT)) is not None
    except OSError:
        return False


def check_cluster(path: Path) -> str:
    """What a cluster's file holds, in one line. A ConfigError has a line for each thing that is wrong in it."""
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
        # the lines before it, so that an error names the line of the file
        before = b"\n" * text.count(b"\n", 0, start)
        try:
            document = read_yaml(before + text[start:end])
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
        if isinstance(document, dict):
            yield _merged(document)
        elif document is not None:
            raise ConfigError(f"{path}: given {shown(document)}; allowed: a mapping of sections")


def _merged(given: Any) -> Any:
    """With what `<<` lays below a section."""
    if isinstance(given, list):
        return [_merged(entry) for entry in given]
    if not isinstance(given, dict):
        return given
    below = given.get("<<", {})
    layers = [*(reversed(below) if isinstance(below, list) else [below]), given]
    whole = {key: value for layer in layers if isinstance(layer, dict) for key, value in layer.items() if key != "<<"}
    return {key: _merged(value) for key, value in whole.items()}
