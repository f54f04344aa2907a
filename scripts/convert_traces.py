"""Convert the published traces of FLASH and FedScale into CSV files for the `system:` section.

    python scripts/convert_traces.py flash state_traces.json trace.csv
    python scripts/convert_traces.py fedscale client_behave_trace trace.csv
    python scripts/convert_traces.py fedscale-devices client_device_capacity devices.csv

The inputs are in https://github.com/PKU-Chengxu/FLASH (data) and https://github.com/SymbioticLab/FedScale
(benchmark/dataset/data/device_info). The first two commands write a file for `availability: {name: trace}`, the last
one for `devices: {name: table}`. Clients are numbered from 0 in the order of the input; clients without an interval or
with unreadable data are skipped. The intervals of each client are repeated with its own period and cut at --period.
"""

import argparse
import json
import math
import os
import pickle
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

Rows = list[tuple[float, ...]]

EVENTS: dict[str, dict[str, bool]] = {
    "battery_charged_on": {"charging": True}, "battery_charged_off": {"charging": False},
    "screen_lock": {"locked": True}, "screen_unlock": {"locked": False}, "screen_on": {}, "screen_off": {},
    "wifi": {"wifi": True}, **dict.fromkeys(("unknown", "2g", "3g", "4g", "5g"), {"wifi": False}),
}  # fmt: skip
"""Event of FLASH -> conditions that it changes."""


class PlainUnpickler(pickle.Unpickler):
    """Loads numbers, texts, lists and dictionaries. Refuses every class and function, so that no code can run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the pickle refers to {module}.{name}, which could run code")


def flash(entry: Any, given: argparse.Namespace) -> Rows:
    """Return the intervals in which a phone is locked, charging and on WiFi: the rule of FLASH (models/timer.py).

    Times count from the first message; the period ends with the last one. An interval still open then is dropped."""
    state, times, found, start = {"locked": False, "charging": False, "wifi": False}, [], [], None
    for line in filter(str.strip, entry["messages"].split("\n")):
        time, event = (text.strip() for text in line.strip().split("\t"))
        # differences of times without time zone: no summer time
        times.append((datetime.strptime(time, "%Y-%m-%d %H:%M:%S") - datetime.min).total_seconds())
        if event.endswith("%"):
            float(event[:-1])
        elif event.lower() not in EVENTS:
            raise ValueError
        state |= EVENTS.get(event.lower(), {})
        is_ready = all(state.values())
        if is_ready and start is None:
            start = times[-1]
        elif start is not None and not is_ready:
            found.append((start - times[0], times[-1] - times[0]))
            start = None
    return repeated(found, times[-1] - times[0] if times else 0, given.period)


def fedscale(entry: Any, given: argparse.Namespace) -> Rows:
    """Return the intervals from active[i] to inactive[i], with the period finish_time."""
    starts, ends = ([number(value) for value in entry[key]] for key in ("active", "inactive"))
    return repeated(zip(starts, ends, strict=True), number(entry["finish_time"]), given.period)


def devices(entry: Any, given: argparse.Namespace) -> Rows:
    """Return GFLOP/s, and Mbit/s down and up. FedScale counts training as three inferences, of 2 FLOPs per MAC."""
    ms, kbps = number(entry["computation"]), number(entry["communication"])
    if min(ms, kbps) < 1e-6:
        raise ValueError
    mbps = 1.024 * kbps / 1000  # kbit of 1,024 bits
    return [(2 * given.macs / (ms * 1e6), mbps, mbps)]


def number(value: Any) -> float:
    """Return the value. Raise a TypeError if it is not a finite number."""
    if type(value) not in (int, float) or not abs(value) < 1e15:
        raise TypeError
    return value


def repeated(intervals: Iterable[tuple[float, float]], own: float, period: float) -> Rows:
    """Repeat intervals with the client's own period, cut them at `period`, and merge those that overlap or touch."""
    within = [(max(start, 0), min(end, own)) for start, end in intervals]
    # shorter periods are errors of the trace
    turns = [turn * own for turn in range(math.ceil(period / own))] if within and own >= 1 else []
    pieces = ((turn + start, min(turn + end, period)) for turn in turns for start, end in within)
    found: Rows = []
    for start, end in sorted(piece for piece in pieces if piece[0] < piece[1]):
        if found and start <= found[-1][1]:
            start, end = found[-1][0], max(found.pop()[1], end)
        found.append((start, end))
    if not found:
        raise ValueError
    return found


FORMATS = {
    "flash": (flash, "FLASH's state_traces.json: JSON with the messages of each user"),
    "fedscale": (fedscale, "FedScale's client_behave_trace: a pickle with active, inactive, finish_time"),
    "fedscale-devices": (devices, "FedScale's client_device_capacity: a pickle with computation, communication"),
}
"""Format -> reader of a client, and description of the file. A ValueError of the reader skips the client."""


def convert(given: argparse.Namespace) -> None:
    """Write the CSV file: beside its place first, so that it is complete or absent."""
    read, allowed = FORMATS[given.format]
    try:
        with given.file.open("rb") as file:
            entries = json.load(file) if read is flash else PlainUnpickler(file).load()
    except Exception as error:  # a damaged pickle can raise any exception
        stop(given.file, f"the file cannot be read: {reason(error)}", allowed)
    if not isinstance(entries, dict):
        stop(given.file, "the file is not a dictionary of clients", allowed)
    used: list[Rows] = []
    skipped = 0
    for name, entry in entries.items():
        try:
            used.append(read(entry, given))
        except ValueError:
            skipped += 1
        except (KeyError, TypeError, AttributeError):
            stop(given.file, f"the data of client {name!r} are missing or have a wrong type", allowed)
        if len(used) == given.clients:
            break
    if not used:
        stop(given.file, f"no client can be used, and {skipped:,} have no interval or unreadable data", allowed)
    if skipped:
        print(f"{given.file}: clients skipped: {skipped:,} (no interval, or unreadable data)", file=sys.stderr)
    is_table = read is devices
    lines = ["name,gflops,down_mbps,up_mbps" if is_table else "client,start_s,end_s"]
    for i, row in ((i, row) for i, rows in enumerate(used) for row in rows):
        cells = (str(int(value) if value == int(value) else value) for value in row)
        lines.append(",".join(("fedscale" if is_table else str(i), *cells)))
    beside = Path(f"{given.out}.part")
    try:
        beside.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(beside, given.out)
    except OSError as error:
        beside.unlink(missing_ok=True)
        stop(given.out, f"the file cannot be written: {reason(error)}", "a file in an existing folder")
    print(f"{given.out}: clients written: {len(used):,}")


def reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else str(error)
    return " ".join((text or type(error).__name__).split())


def stop(place: Path, problem: str, allowed: str) -> NoReturn:
    print(f"{place}: {problem}. Allowed: {allowed}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("file", type=Path, metavar="FILE", help="published trace")
    parser.add_argument("out", type=Path, metavar="OUT", help="CSV file, replaced if it exists")
    parser.add_argument("--period", type=float, default=604_800, help="seconds, for `period_s` (default: 604800)")
    parser.add_argument("--clients", type=int, help="write only the first clients that can be used (default: all)")
    macs = "multiply-adds of the network measured by FedScale (default: 300e6, an assumption: MobileNetV2, 224 x 224)"
    parser.add_argument("--macs", type=float, default=300e6, help=macs)
    given = parser.parse_args()
    for name in ("period", "clients", "macs"):
        if (value := getattr(given, name)) is not None and not 0 < value < 1e15:
            parser.error(f"--{name}: {value} is not valid. Allowed: a number above 0")
    convert(given)


if __name__ == "__main__":
    main()
