"""Timing in turns: ratios are medians over turns, so that a slower machine affects all sides."""

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
