"""Availability of clients: the times at which they can be asked, and until when they stay."""

import math
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Literal

import numpy as np
from pydantic import Field

from rayfl.config import ConfigError, Kind, Named
from rayfl.core.seeds import numpy_generator
from rayfl.system.devices import rows_of

DAY = 86_400.0


class Availability(Named, ABC):
    """Base class of rules of availability."""

    def check(self, clients: int) -> None:
        """Raise a ValueError if the rule does not describe this many clients."""

    @abstractmethod
    def until(self, client: int, seconds: float, seed: int) -> float:
        """Return the end of the client's time of availability that contains `seconds`, or `seconds` if the client is
        not available then. Random draws have the purpose "availability"."""


class Always(Availability):
    """Every client is always available."""

    name: Literal["always"] = "always"

    def until(self, client: int, seconds: float, seed: int) -> float:
        return math.inf


class Bernoulli(Availability):
    """In every slot of time, a client is available with probability `p`, independently."""

    name: Literal["bernoulli"] = "bernoulli"
    p: float = Field(default=0.5, gt=0, le=1)
    """Probability that a client is available."""
    slot_s: float = Field(default=600.0, gt=0)
    """Length of a slot in seconds."""

    def until(self, client: int, seconds: float, seed: int) -> float:
        if self.p == 1:
            return math.inf
        slot, end = int(seconds // self.slot_s), seconds
        while numpy_generator(seed, "availability", client, slot).random() < self.p:
            slot += 1
            end = slot * self.slot_s
        return end


class OnOff(Availability):
    """Exponential times on and off, with a daily wave: times off are longer by day and shorter by night."""

    name: Literal["onoff"] = "onoff"
    on_s: float = Field(default=7_200.0, gt=0)
    """Mean time on, in seconds."""
    off_s: float = Field(default=21_600.0, gt=0)
    """Mean time off, in seconds."""
    day_amplitude: float = Field(default=0.5, ge=0, lt=1)
    """Amplitude of the daily sine by which times off vary, as a fraction of the mean."""

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
    period_s: float = Field(default=7 * DAY, gt=0)
    """Period of the trace in seconds."""

    def check(self, clients: int) -> None:
        known = _trace(self.file, self.period_s)
        if len(known) < clients:
            raise ValueError(f"{self.file} has {len(known)} clients. Allowed: at least {clients}")

    def until(self, client: int, seconds: float, seed: int) -> float:
        starts, ends = _trace(self.file, self.period_s)[client]
        if len(starts) and starts[0] == 0 and ends[0] == self.period_s:
            return math.inf
        end = seconds
        while True:
            turn, at = divmod(end, self.period_s)
            i = int(np.searchsorted(starts, at, side="right")) - 1
            if i < 0 or at >= ends[i]:
                return end
            end = turn * self.period_s + float(ends[i])


@lru_cache(maxsize=4)
def _trace(path: str, period: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the starts and ends of every client's intervals."""
    columns = ("client", "start_s", "end_s")
    found: dict[int, list[tuple[float, float]]] = {}
    for line, row in enumerate(rows_of(path, columns, columns), 2):
        try:
            client, start, end = int(row["client"]), float(row["start_s"]), float(row["end_s"])
        except ValueError:
            raise ConfigError(f"{path}: line {line}: {', '.join(row.values())} are not three numbers") from None
        before = found.setdefault(client, [])
        if client < 0 or not (before[-1][1] if before else 0) <= start < end <= period:
            raise ConfigError(
                f"{path}: line {line}: {start:g} to {end:g} of client {client} is not valid. Allowed: ascending "
                f"intervals of one client without overlaps, between 0 and period_s = {period:g}"
            )
        before.append((start, end))
    if missing := sorted(set(range(max(found, default=0) + 1)) - found.keys()):
        raise ConfigError(f"{path}: client {missing[0]} is missing. Allowed: intervals of all clients from 0")
    return [(np.array([s for s, _ in some]), np.array([e for _, e in some])) for _, some in sorted(found.items())]


AVAILABILITIES: dict[str, type[Availability]] = {
    "always": Always,
    "bernoulli": Bernoulli,
    "onoff": OnOff,
    "trace": Trace,
}

AVAILABILITY_KIND = Kind("rule of availability", Availability, AVAILABILITIES, "rayfl.availabilities")
