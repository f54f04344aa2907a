"""Atomic writing and checked reading of JSON files, arrays and files of JSON lines.

Lines, arrays and summed JSON files contain their SHA-256: as the key `sum`, arrays as the last 32 bytes of the file,
which numpy ignores.
"""

import errno
import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rayfl.config import ConfigError
from rayfl.config.plain import shown
from rayfl.engine.files import opened, with_sum, without_sum
from rayfl.metrics import Line

BLOCK = 1 << 16
"""Bytes that are read at once to find a file's last newline."""
DIGEST = hashlib.sha256().digest_size


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file is missing. Raise ConfigError if it contains anything else."""
    data = _read(path)
    return {} if data is None else _object(data, str(path))


def write_json(path: Path, value: Any) -> None:
    replace(path, (json.dumps(value, indent=2) + "\n").encode())


def read_summed(path: Path) -> dict[str, Any]:
    """Return the content of a file of `write_summed`; {} if the file is missing. Raise ConfigError for another one."""
    data = _read(path)
    return {} if data is None else _verified(_object(data, str(path)), str(path))


def write_summed(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object with its SHA-256."""
    write_json(path, with_sum(value))


def read_array(path: Path, rows: np.dtype) -> np.ndarray:
    """Return the rows in a file; none if it is missing. Raise ConfigError if it contains anything else."""
    data = _read(path)
    if data is None:
        return np.empty(0, rows)
    content, digest = data[:-DIGEST], data[-DIGEST:]
    try:
        if hashlib.sha256(content).digest() != digest:
            raise ValueError("the SHA-256 differs from the one inside the file")
        found = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
        if found.dtype != rows or found.ndim != 1:
            raise ValueError(f"an array of {found.dtype}, {found.ndim} dimensions")
    except ValueError as error:
        raise ConfigError(
            f"{path}: the file cannot be read: {error}. Allowed: an npy file of rows of {rows}. Hint: restore a copy "
            "of the file, or remove it"
        ) from None
    return found


def write_array(path: Path, rows: np.ndarray) -> None:
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    replace(path, file.getvalue() + hashlib.sha256(file.getvalue()).digest())


def read_lines(path: Path) -> list[Line]:
    """Return the lines in a file, without an incomplete last one. Raise ConfigError for other invalid lines."""
    return [_line(data, f"{path}: line {number}") for number, data in _whole(path)]


def count_lines(path: Path) -> int:
    """Return the number of lines in a file, without an incomplete last one, and without parsing them."""
    return (_read(path) or b"").count(b"\n")


def read_whole_lines(path: Path) -> tuple[list[Line], str]:
    """Return the leading lines of rounds 1, 2, ... and the error of the next line; "" if there is none."""
    found: list[Line] = []
    for number, data in _whole(path):
        where = f"{path}: line {number}"
        try:
            line = _line(data, where)
        except ConfigError as error:
            return found, str(error)
        if line["round"] != number:
            return found, f"{where}: the line is of round {line['round']}. Allowed: round {number}"
        found.append(line)
    return found, ""


def append_lines(path: Path, lines: list[Line]) -> None:
    """Append lines after the last complete one: all of them, or none and raise OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
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
    """Replace all lines of a file atomically."""
    replace(path, _jsonl(lines))


def _read(path: Path) -> bytes | None:
    try:
        with opened(path) as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: the file cannot be read: {error.strerror}") from None


def _whole(path: Path) -> Iterator[tuple[int, bytes]]:
    whole, _, _ = (_read(path) or b"").rpartition(b"\n")
    return enumerate(whole.split(b"\n") if whole else [], start=1)


def _line(data: bytes, where: str) -> Line:
    line = _object(data, where)
    if type(line.get("round")) is not int:
        raise ConfigError(f"{where}: {shown(line)} is not valid. Allowed: an object with a whole `round`")
    return _verified(line, where)


def _verified(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the content of a JSON object after verifying its own checksum."""
    if (content := without_sum(given)) is None:
        raise ConfigError(
            f"{where}: the SHA-256 differs from the one inside the file. Hint: restore a copy of the file, or remove "
            "the run's folder"
        )
    return content


def _object(data: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: {shown(data.decode(errors='replace'))} is not JSON ({error}). Allowed: a JSON object. Hint: "
            "restore a copy of the file, or remove the run's folder"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {shown(value)} is not valid. Allowed: a JSON object")
    return value


def _jsonl(lines: list[Line]) -> bytes:
    return "".join(json.dumps(with_sum(line)) + "\n" for line in lines).encode()


def _cut_torn_line(fd: int) -> int:
    """Truncate a file after its last newline and return the remaining size."""
    size = end = os.fstat(fd).st_size
    while end:
        start = max(0, end - BLOCK)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
    return end


def replace(path: Path, data: bytes) -> None:
    """Write a file atomically."""
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
