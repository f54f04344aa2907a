"""JSON files that are there wholly or not at all, files of lines that are appended whole, and how both are read."""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from rayfl.config import ConfigError
from rayfl.config.plain import shown
from rayfl.engine.files import opened
from rayfl.metrics import Line


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} where there is no file. A ConfigError names a file that holds no such object."""
    data = _read(path)
    return {} if data is None else _object(data, str(path))


def write_json(path: Path, value: Any) -> None:
    """JSON that is there wholly or not at all."""
    _replace(path, (json.dumps(value, indent=2) + "\n").encode())


def read_array(path: Path, rows: np.dtype) -> np.ndarray | None:
    """The rows in a file, None where there is no file. A ConfigError names a file that holds something else."""
    data = _read(path)
    if data is None:
        return None
    try:
        found = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        if found.dtype != rows or found.ndim != 1:
            raise ValueError(f"an array of {found.dtype}, {found.ndim} dimensions")
    except (ValueError, EOFError, SyntaxError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {error}; allowed: a npy file of rows of {rows}; put back a copy of the file, or "
            "remove it"
        ) from None
    return found


def write_array(path: Path, rows: np.ndarray) -> None:
    """Rows in a file that is there wholly or not at all."""
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    _replace(path, file.getvalue())


def read_lines(path: Path) -> list[Line]:
    """The lines of rounds in a file, in order. One at the end that a crash tore is left out; a ConfigError names any
    other that is no round's."""
    whole, _, _ = (_read(path) or b"").rpartition(b"\n")
    return [_line(data, f"{path}: line {n}") for n, data in enumerate(whole.split(b"\n") if whole else [], start=1)]


def read_whole_lines(path: Path) -> tuple[list[Line], str]:
    """The lines of rounds 1, 2, ... up to the first line that is not the next round's, and what is wrong with that one:
    "" where there is none."""
    whole, _, _ = (_read(path) or b"").rpartition(b"\n")
    found: list[Line] = []
    for number, data in enumerate(whole.split(b"\n") if whole else [], start=1):
        where = f"{path}: line {number}"
        try:
            line = _line(data, where)
        except ConfigError as error:
            return found, str(error)
        if line["round"] != number:
            return found, f"{where}: given round {line['round']}; allowed: round {number}"
        found.append(line)
    return found, ""


def append_lines(path: Path, lines: list[Line]) -> None:
    """Adds lines after the last whole one, all of them or (OSError) none."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        end, data = _cut_torn_line(fd), _jsonl(lines)
        try:
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, end)
            raise
    finally:
        os.close(fd)


def write_lines(path: Path, lines: list[Line]) -> None:
    """Lines in place of all that are there."""
    _replace(path, _jsonl(lines))


def _read(path: Path) -> bytes | None:
    try:
        with opened(path) as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _line(data: bytes, where: str) -> Line:
    line = _object(data, where)
    if type(line.get("round")) is not int:
        raise ConfigError(f"{where}: given {shown(line)}; allowed: an object with a whole `round`")
    return line


def _object(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: given {shown(data.decode(errors='replace'))}, which is no JSON ({error}); allowed: a JSON "
            "object; put back a copy of the file, or remove the run's folder"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: given {shown(value)}; allowed: a JSON object")
    return value


def _jsonl(lines: list[Line]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _cut_torn_line(fd: int, block: int = 1 << 16) -> int:
    """Cuts what stands after the last newline, and returns the size that is left."""
    size = end = os.fstat(fd).st_size
    while end:
        start = max(0, end - block)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
    return end


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
