"""Devices of clients: computing speed, network speed and memory."""

import csv
import errno
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, Self, TextIO

import numpy as np
from pydantic import Field, field_validator, model_validator

from rayfl.config import Config, ConfigError, Kind, Named, parse, shown
from rayfl.core.seeds import numpy_generator


@dataclass(frozen=True)
class Speed:
    """A speed that varies between rounds: normal, drawn again while it is below 10 % of the mean.

    >>> Speed(100.0).draw(np.random.default_rng(0))
    100.0
    """

    mean: float
    deviation: float = 0.0
    """Standard deviation, in the unit of the mean."""

    def __post_init__(self) -> None:
        if not (self.mean > 0 and 0 <= self.deviation < math.inf):
            raise ValueError(
                f"a speed of mean {self.mean} and deviation {self.deviation} is not valid. Allowed: a mean above 0, "
                "and a deviation of at least 0"
            )

    def draw(self, generator: np.random.Generator) -> float:
        while self.deviation:
            drawn = self.mean + self.deviation * float(generator.standard_normal())
            if drawn >= 0.1 * self.mean:
                return drawn
        return self.mean


@dataclass(frozen=True)
class Device:
    """The device of a client.

    >>> Device("phone", Speed(5.0), down=Speed(20.0), up=Speed(5.0)).memory_mb
    inf
    """

    kind: str
    """Name of its class."""
    gflops: Speed
    """10^9 floating point operations of training per second."""
    down: Speed
    """Mbit/s to the client; infinite: transfers take no time."""
    up: Speed
    """Mbit/s from the client."""
    memory_mb: float = math.inf
    """Memory for training, in MB of 2^20 bytes."""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str):
            raise ValueError(f"the device has the kind {shown(self.kind)}. Allowed: text")
        if not all(isinstance(speed, Speed) for speed in (self.gflops, self.down, self.up)):
            raise ValueError(f"the device {self.kind} has speeds that are numbers. Allowed: Speed(mean, deviation)")


class Devices(Named, ABC):
    """Base class of rules that give each client a device.

    >>> class Phones(Devices):
    ...     def device(self, client, seed):
    ...         return Device("fast" if client % 2 else "slow", Speed(1.0 + client % 2), Speed(20.0), Speed(5.0))
    >>> Phones().device(client=1, seed=0).kind
    'fast'
    """

    def check(self, clients: int) -> None:
        """Raise a ValueError if there are not devices for this many clients."""

    @abstractmethod
    def device(self, client: int, seed: int) -> Device:
        """Return the client's device. Random draws use `numpy_generator(seed, "device", client)`."""


class InShares(Devices):
    """Base class of devices of a few classes with shares."""

    assignment: Literal["drawn", "turns"] = "drawn"
    """drawn: each client's class is drawn by the shares. turns: classes are assigned in turn by client id. With shares
    2 and 1, clients 0 and 1 have the first class, client 2 the second, client 3 the first. Needs whole shares."""

    @property
    @abstractmethod
    def all_shares(self) -> Sequence[float]:
        """Relative number of clients of each class."""

    @model_validator(mode="after")
    def _of_something(self) -> Self:
        shares = self.all_shares
        if min(shares, default=0) < 0 or sum(shares) <= 0:
            raise ValueError("shares of at least 0, not all 0")
        if self.assignment == "turns" and any(share % 1 for share in shares):
            raise ValueError("whole shares with assignment: turns")
        return self

    def pick(self, client: int, generator: np.random.Generator) -> int:
        """Return the position of the client's class."""
        ends = np.cumsum(self.all_shares)
        ticket = client % ends[-1] if self.assignment == "turns" else generator.random() * ends[-1]
        return int(np.searchsorted(ends, ticket, side="right"))


WIFI = (
    (19.4, 11.4, 22.7, 9.0), (26.0, 15.1, 3.5, 1.3), (27.0, 6.3, 19.1, 13.2), (28.5, 10.5, 42.1, 18.7),
    (30.0, 10.8, 20.9, 8.9), (31.0, 23.3, 21.6, 12.9), (33.2, 14.9, 24.6, 7.3), (34.5, 12.1, 24.4, 6.8),
    (35.1, 12.8, 29.8, 12.3), (35.4, 10.4, 26.9, 8.3), (38.2, 5.0, 26.3, 3.4), (42.0, 17.1, 30.6, 3.8),
    (55.0, 55.2, 5.4, 2.6), (59.1, 27.6, 33.1, 17.9), (59.6, 15.7, 47.0, 16.1), (61.4, 27.6, 40.4, 22.7),
    (72.8, 16.4, 51.4, 4.0), (81.2, 12.7, 54.4, 12.0), (142.0, 91.6, 46.2, 20.9),
)  # fmt: skip
"""WiFi of the 19 users that FLASH measured, Mbit/s: mean and deviation down, mean and deviation up (speed_distri.json
of https://github.com/PKU-Chengxu/FLASH, BSD-2)."""

CNN_MACS = 17.212e6
"""Multiply-adds of FLASH's CNN for FEMNIST, forward pass of one sample."""

PHONES = (
    ("nexus_6", 1.642, 0.0995, 3072),
    ("redmi_note_8", 0.588, 0.0239, 4096),
    ("galaxy_note_10", 0.179, 0.0023, 8192),
)
"""Name, seconds per batch of 10 of that CNN with their deviation (device_util.py of FLASH), and MB of memory (data
sheets)."""


class Phones(InShares):
    """Phones and WiFi networks measured by FLASH (Yang et al., "Characterizing Impacts of Heterogeneity in Federated
    Learning upon Large-Scale Smartphone Data", WWW 2021): three phones of 0.63, 1.76 and 5.77 GFLOP/s."""

    name: Literal["phones"] = "phones"
    shares: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Relative numbers of Nexus 6, Redmi Note 8 and Galaxy Note 10."""

    @property
    def all_shares(self) -> Sequence[float]:
        return self.shares

    def device(self, client: int, seed: int) -> Device:
        generator = numpy_generator(seed, "device", client)
        kind, seconds, deviation, memory = PHONES[self.pick(client, generator)]
        down, down_deviation, up, up_deviation = WIFI[int(generator.integers(len(WIFI)))]
        gflops = 6 * 10 * CNN_MACS / seconds / 1e9
        return Device(
            kind,
            Speed(gflops, gflops * deviation / seconds),
            Speed(down, down_deviation),
            Speed(up, up_deviation),
            memory,
        )


class DeviceClass(Config):
    """One class of devices."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name, for metrics and tables."""
    share: float = Field(default=1.0, ge=0)
    """Relative number of clients with this device."""
    gflops: float = Field(ge=1e-6, le=1e9)
    """10^9 floating point operations of training per second, as reached by the device."""
    down_mbps: float | None = Field(default=None, ge=1e-6, le=1e9)
    """Mbit/s to the client. Default: transfers take no time."""
    up_mbps: float | None = Field(default=None, ge=1e-6, le=1e9)
    """Mbit/s from the client. Default: transfers take no time."""
    sigma: float = Field(default=0.0, ge=0, le=1)
    """Standard deviation of the three speeds between rounds, as a fraction of the mean."""
    memory_mb: float | None = Field(default=None, gt=0)
    """Memory for training, in MB of 2^20 bytes. Default: unlimited."""

    def device(self) -> Device:
        def speed(mean: float | None) -> Speed:
            return Speed(math.inf) if mean is None else Speed(mean, self.sigma * mean)

        memory = math.inf if self.memory_mb is None else self.memory_mb
        return Device(self.name, speed(self.gflops), speed(self.down_mbps), speed(self.up_mbps), memory)


class Classes(InShares):
    """Classes of equal devices, given in the configuration."""

    name: Literal["classes"] = "classes"
    classes: tuple[DeviceClass, ...] = Field(min_length=1)
    """Classes, from which the device of each client is drawn by `share`."""

    @field_validator("classes")
    @classmethod
    def _distinct(cls, classes: tuple[DeviceClass, ...]) -> tuple[DeviceClass, ...]:
        if len({one.name for one in classes}) < len(classes):
            raise ValueError("classes with different names")
        return classes

    @property
    def all_shares(self) -> Sequence[float]:
        return [one.share for one in self.classes]

    def device(self, client: int, seed: int) -> Device:
        return self.classes[self.pick(client, numpy_generator(seed, "device", client))].device()


BOARDS = {
    "pi_zero_2": 0.370, "orange_pi_cm4": 5.604, "pi_4": 11.889, "pi_5": 30.249, "n100": 37.2, "rk3588": 48.6,
    "i5_7400t": 72.5, "m1_max": 264.0, "ryzen_5600x": 229.0, "m4": 299.9,
}  # fmt: skip
"""Board -> GFLOP/s of HPL in float64 (https://github.com/geerlingguy/top500-benchmark, MIT)."""


class Boards(InShares):
    """Single-board computers and laptops, with a fraction of the speed that they reach in HPL."""

    name: Literal["boards"] = "boards"
    boards: dict[str, float] = {"pi_zero_2": 1.0, "pi_4": 1.0, "pi_5": 1.0}
    """Board -> relative number of clients. Known: pi_zero_2, orange_pi_cm4, pi_4, pi_5, n100, rk3588, i5_7400t, m1_max,
    ryzen_5600x, m4."""
    efficiency: float = Field(default=0.2, gt=0, le=1)
    """Fraction of the float32 speed (twice that of HPL in float64) that training reaches; 0.2 is assumed."""
    down_mbps: float | None = Field(default=100.0, ge=1e-6, le=1e9)
    """Mbit/s to the client. None: transfers take no time."""
    up_mbps: float | None = Field(default=20.0, ge=1e-6, le=1e9)
    """Mbit/s from the client. None: transfers take no time."""

    @field_validator("boards")
    @classmethod
    def _known(cls, boards: dict[str, float]) -> dict[str, float]:
        if unknown := sorted(boards.keys() - BOARDS.keys()):
            raise ValueError(f"boards of {', '.join(BOARDS)}; {unknown[0]!r} is not known")
        return boards

    @property
    def all_shares(self) -> Sequence[float]:
        return list(self.boards.values())

    def device(self, client: int, seed: int) -> Device:
        kind = list(self.boards)[self.pick(client, numpy_generator(seed, "device", client))]
        gflops = 2 * BOARDS[kind] * self.efficiency
        return DeviceClass(name=kind, gflops=gflops, down_mbps=self.down_mbps, up_mbps=self.up_mbps).device()


class Table(Devices):
    """Devices from a CSV file: row k is the device of client k."""

    name: Literal["table"] = "table"
    file: str
    """Path of a CSV file with the columns name, gflops, and optionally down_mbps, up_mbps, sigma, memory_mb. Empty
    cells: the default of `classes`."""

    def check(self, clients: int) -> None:
        if (rows := len(self._devices)) < clients:
            raise ValueError(f"{self.file} has {rows} devices. Allowed: at least one for each of the {clients} clients")

    def device(self, client: int, seed: int) -> Device:
        return self._devices[client]

    @property
    def _devices(self) -> list[Device]:
        return _table(self.file, changed(self.file))


@lru_cache(maxsize=4)
def _table(path: str, changed: int) -> list[Device]:
    columns = ("name", "gflops", "down_mbps", "up_mbps", "sigma", "memory_mb")
    found = []
    for line, row in enumerate(rows_of(path, columns[:2], columns), 2):
        where = f"{path}, line {line}"
        try:
            found.append(parse(DeviceClass, {key: text for key, text in row.items() if text}, where).device())
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    return found


def changed(path: str) -> int:
    """Return the time of a file's last change; 0 if it cannot be read, of which `rows_of` tells."""
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


def opened(path: str) -> TextIO:
    """Open a CSV file for reading. Raise OSError for a pipe or a device, which may never end."""
    if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
        raise OSError(errno.EINVAL, "it is neither a file nor a link to one")
    return Path(path).open(newline="", encoding="utf-8-sig")


def rows_of(path: str, needed: Sequence[str], known: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a header. Raise ConfigError if it or its columns are wrong."""
    try:
        with opened(path) as file:
            reader = csv.DictReader(file, restkey="")
            columns = reader.fieldnames or []
            if not set(needed) <= set(columns) <= set(known):
                raise ConfigError(
                    f"{path}: the columns {', '.join(columns) or 'are missing'}. Allowed: {', '.join(needed)}"
                    + "".join(f", optional {name}" for name in known if name not in needed)
                )
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for line, row in enumerate(rows, 2):
        if None in row.values() or "" in row:
            raise ConfigError(f"{path}: line {line} does not have {len(columns)} cells")
    return rows


DEVICES: dict[str, type[Devices]] = {"phones": Phones, "boards": Boards, "classes": Classes, "table": Table}

DEVICES_KIND = Kind("device table", Devices, DEVICES, "rayfl.devices")
