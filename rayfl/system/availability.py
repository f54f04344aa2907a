"""Availability of clients: the times at which they can be asked, and until when they stay."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from rayfl.config import ConfigError, Kind, Named, require_number
from rayfl.core.seeds import numpy_generator
from rayfl.system.devices import changed, opened, rows_of

DAY = 86_400.0
LARGEST_SHARE = 0.999
"""Largest probability, below 1, to stay for another slot or day: a query looks at 1,000 of them on average."""
SHORTEST_CYCLE = 600.0
"""Smallest sum of mean times on and off, in seconds: a query draws all of a day."""
SECONDS = "a number of seconds"


class Availability(Named, ABC):
    """Base class of rules of availability.

    >>> class FirstHour(Availability):
    ...     def until(self, client, seconds, seed):
    ...         return max(seconds, 3600.0)
    >>> [FirstHour().is_available(0, seconds, seed=0) for seconds in (10.0, 7200.0)]
    [True, False]
    """

    def check(self, clients: int) -> None:
        """Raise a ValueError if the rule does not describe this many clients."""

    @abstractmethod
    def until(self, client: int, seconds: float, seed: int) -> float:
        """Return the end of the client's time of availability that contains `seconds`, or `seconds` if the client is
        not available then. Random draws have the purpose "availability"."""

    def is_available(self, client: int, seconds: float, seed: int) -> bool:
        """Return whether the client is available: a shorter way to `until` where there is one."""
        return require_number(self.until(client, seconds, seed), SECONDS) > seconds


class Always(Availability):
    """Every client is always available."""

    name: Literal["always"] = "always"

    def until(self, client: int, seconds: float, seed: int) -> float:
        return math.inf


class Bernoulli(Availability):
    """In every slot of time, a client is available with probability `p`, independently."""

    name: Literal["bernoulli"] = "bernoulli"
    p: float = Field(default=0.5, gt=0, le=1)
    """Probability that a client is available: at most 0.999, or 1."""
    slot_s: float = Field(default=600.0, ge=1e-3, le=1e9)
    """Length of a slot in seconds."""

    @field_validator("p")
    @classmethod
    def _ends(cls, p: float) -> float:
        if LARGEST_SHARE < p < 1:
            raise ValueError(f"at most {LARGEST_SHARE}, or 1 for clients that never leave")
        return p

    def is_available(self, client: int, seconds: float, seed: int) -> bool:
        return self.p == 1 or self._is_on(client, int(seconds // self.slot_s), seed)

    def _is_on(self, client: int, slot: int, seed: int) -> bool:
        return numpy_generator(seed, "availability", client, slot).random() < self.p

    def until(self, client: int, seconds: float, seed: int) -> float:
        if self.p == 1:
            return math.inf
        slot, end = int(seconds // self.slot_s), seconds
        while self._is_on(client, slot, seed):
            slot += 1
            end = slot * self.slot_s
        return end


class OnOff(Availability):
    """Exponential times on and off, with a daily wave: times off are longer by day and shorter by night.

    Every day is drawn anew, so that the cost does not grow with the time: an interval goes on after midnight by chance
    only. Mean times on are therefore shorter than `on_s`: 6,700 s for 7,200 s on and 21,600 s off, 1.0 days for 2 days
    on and 2 off.
    """

    name: Literal["onoff"] = "onoff"
    on_s: float = Field(default=7_200.0, gt=0, le=1e9)
    """Mean time on, in seconds."""
    off_s: float = Field(default=21_600.0, gt=0, le=1e9)
    """Mean time off, in seconds."""
    day_amplitude: float = Field(default=0.5, ge=0, lt=1)
    """Amplitude of the daily sine by which times off vary, as a fraction of the mean."""

    @model_validator(mode="after")
    def _ends(self) -> Self:
        cycle = self.on_s + self.off_s
        if cycle < SHORTEST_CYCLE:
            raise ValueError(f"on_s + off_s of at least {SHORTEST_CYCLE:g}")
        if self.on_s / cycle * math.exp(-DAY / self.on_s) > LARGEST_SHARE:
            raise ValueError(f"an on_s with which at most {LARGEST_SHARE} of the clients stay for a whole day")
        return self

    def is_available(self, client: int, seconds: float, seed: int) -> bool:
        return self._until(client, seconds, int(seconds // DAY), seed) > seconds

    def until(self, client: int, seconds: float, seed: int) -> float:
        end, day = seconds, int(seconds // DAY)
        while (stop := self._until(client, end, day, seed)) > end:
            end = stop
            if end < (day + 1) * DAY:
                break
            day += 1
        return end

    def _until(self, client: int, seconds: float, day: int, seed: int) -> float:
        """Return `until` within a day, which has its own stream: a query costs the intervals of one day."""
        generator = numpy_generator(seed, "availability", client, day)
        time, end = day * DAY, (day + 1) * DAY
        is_on = generator.random() < self.on_s / (self.on_s + self.off_s)
        while True:
            wave = 1 + self.day_amplitude * math.sin(2 * math.pi * time / DAY)
            time += float(generator.exponential(self.on_s if is_on else self.off_s * wave))
            if time > seconds or time >= end:
                return min(time, end) if is_on else seconds
            is_on = not is_on


class Trace(Availability):
    """Times of availability from a CSV file, repeated with a period."""

    name: Literal["trace"] = "trace"
    file: str
    """Path of a CSV file with the columns client, start_s, end_s: ascending intervals, for every client from 0."""
    period_s: float = Field(default=7 * DAY, gt=0, le=1e9)
    """Period of the trace in seconds."""

    def check(self, clients: int) -> None:
        known = len(self._intervals[0]) - 1
        if known < clients:
            raise ValueError(f"{self.file} has {known} clients. Allowed: at least {clients}")

    def until(self, client: int, seconds: float, seed: int) -> float:
        first, starts, ends = self._intervals
        low, high = first[client], first[client + 1]
        turn, at = divmod(seconds, self.period_s)
        i = low + int(np.searchsorted(starts[low:high], at, side="right")) - 1
        if i < low or at >= ends[i]:
            return seconds
        # intervals that touch are joined by number: sums of times are rounded
        for _ in range(low, high):
            is_last = i + 1 == high
            following = low if is_last else i + 1
            if starts[following] != ends[i] - is_last * self.period_s:
                return max(seconds, turn * self.period_s + float(ends[i]))
            turn, i = turn + is_last, following
        return math.inf

    @property
    def _intervals(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return _trace(self.file, self.period_s, changed(self.file))


@lru_cache(maxsize=4)
def _trace(path: str, period: float, changed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the intervals of all clients: the first one of each client [clients + 1], starts and ends [intervals]."""
    client, start, end = numbers_of(path, ("client", "start_s", "end_s"))
    order = np.argsort(client, kind="stable")
    client, start, end = client[order], start[order], end[order]
    before = np.where(np.diff(client, prepend=-1) == 0, np.concatenate([[0.0], end[:-1]]), 0.0)
    valid = (client >= 0) & (client % 1 == 0) & (before <= start) & (start < end) & (end <= period)
    if not valid.all():
        i = int(np.argmin(valid))
        raise ConfigError(
            f"{path}: line {order[i] + 2}: {start[i]:g} to {end[i]:g} of client {client[i]:g} is not valid. Allowed: "
            f"ascending intervals of one client without overlaps, between 0 and period_s = {period:g}"
        )
    ids, first = np.unique(client, return_index=True)
    missing = np.setdiff1d(np.arange(len(ids) + 1), ids)[0]
    if missing < max(len(ids), 1):
        raise ConfigError(f"{path}: client {missing} is missing. Allowed: intervals of all clients from 0")
    return np.append(first, len(client)), start, end


def numbers_of(path: str, columns: Sequence[str]) -> np.ndarray:
    """Return the columns [n, lines] float64 of a CSV file of numbers with a header."""
    try:
        with opened(path) as file, warnings.catch_warnings(action="ignore"):
            header = file.readline().strip().split(",")
            places = [header.index(name) for name in columns]
            if len(header) == len(columns):
                # a file without lines gives no columns
                return np.loadtxt(file, delimiter=",", usecols=places, ndmin=2).reshape(-1, len(columns)).T
    except (OSError, ValueError):
        pass
    # quoted cells, or a problem
    found = []
    for line, row in enumerate(rows_of(path, columns, columns), 2):
        try:
            found.append([float(row[name]) for name in columns])
        except ValueError:
            raise ConfigError(f"{path}: line {line}: {', '.join(row.values())} are not numbers") from None
    return np.array(found).reshape(-1, len(columns)).T


AVAILABILITIES: dict[str, type[Availability]] = {
    "always": Always,
    "bernoulli": Bernoulli,
    "onoff": OnOff,
    "trace": Trace,
}

AVAILABILITY_KIND = Kind("rule of availability", Availability, AVAILABILITIES, "rayfl.availabilities")
