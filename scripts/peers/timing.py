"""Timing in turns: ratios are medians over turns, so that a slower machine affects all sides."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def seconds_of(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cpu_seconds_of(work: Callable[[], Any]) -> float:
    """Return the CPU seconds of this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def in_turns(contenders: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Return the results of all functions, called in turns A B C A B C ..., after one warm-up turn."""
    turns: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(repeats + 1):
        for name, contender in contenders.items():
            seconds = contender()
            if i:
                turns[name].append(seconds)
    return turns


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Turn by turn."""
    return [a / b for a, b in zip(above, below, strict=True)]


def over(found: Mapping[str, Sequence[float]], base: str, steps: int) -> dict[str, dict[str, float]]:
    """Return contender -> milliseconds a step, and times the `base`'s: median, least and most over turns."""
    table = {}
    for name, seconds in found.items():
        times = ratios(seconds, found[base])
        table[name] = {
            "ms a step": statistics.median(seconds) / steps * 1e3,
            f"times the {base}'s": statistics.median(times),
            "least": min(times),
            "most": max(times),
        }
    return table
