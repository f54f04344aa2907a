"""Permissions of files."""

import os
from pathlib import Path


def as_new(path: Path) -> None:
    """Give a file the permissions of new files. Those of tempfile and safetensors are readable by their owner only."""
    mask = os.umask(0o077)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
