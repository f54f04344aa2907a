"""Tables, plots and sentences of a scale study, from one row of named numbers per point.

A row has the point (clients, cohort, actors, nodes, cpus of an actor) and its measurements:

    first_seconds         from the run's start to the end of its first round
    seconds               median seconds per round
    rounds_per_second, clients_per_second, client_seconds    the same as rates, and per client of the cohort
    server_cpu_seconds    CPU time of the server process per round
    client_cpu_seconds    CPU time of the client actors per client of the cohort
    *_peak                peak memory of a process in bytes: driver, server, the largest client actor
    *_own                 unshared memory at the end in bytes: driver (growth during the run), server, mean actor
    data_bytes            size of the data set's arrays, of which the driver has its own copy
    store_bytes           peak size of the object stores of all nodes after a round
    bytes_down, bytes_up  bytes per round to clients and back
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfl.results.cells import as_csv, human_bytes, human_time
from rayfl.results.drawing import COLORS, LINES, MARKERS, Plot, legend, new_figure
from rayfl.results.files import write_json
from rayfl.results.tables import Table

Row = Mapping[str, Any]

COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "first_seconds": ("first", human_time),
    "rounds_per_second": ("rounds/s", "{:.3g}".format),
    "clients_per_second": ("clients/s", "{:.4g}".format),
    "client_seconds": ("ms per client", lambda seconds: f"{1000 * seconds:.3g}"),
    "client_cpu_seconds": ("CPU ms", lambda seconds: f"{1000 * seconds:.3g}"),
    "server_cpu_seconds": ("server CPU s", "{:.3g}".format),
    "driver_peak": ("driver", human_bytes),
    "server_peak": ("server", human_bytes),
    "actor_peak": ("actor", human_bytes),
    "store_bytes": ("store", human_bytes),
    "bytes_down": ("down", human_bytes),
    "bytes_up": ("up", human_bytes),
}
"""Columns after the value on the axis: name -> title and formatter."""

PARALLEL = ("actors", "nodes")
"""Axes along which the work of a round is constant."""
HOLDERS = {
    "driver_peak": "driver",
    "server_peak": "server",
    "actor_peak": "client actor",
    "store_bytes": "object store",
}
MEGABYTE = 1e6


def table(axis: str, rows: Sequence[Row]) -> Table:
    """Return a table with one line per row; for actors and nodes with the efficiency."""
    header = [axis, *(title for title, _ in COLUMNS.values())]
    cells = [[f"{row[axis]:,}", *(shown(row[name]) for name, (_, shown) in COLUMNS.items())] for row in rows]
    if axis in PARALLEL:
        header.append("efficiency")
        cells = [[*line, f"{share:.2f}"] for line, share in zip(cells, efficiency(rows), strict=True)]
    return Table(header, cells, file="scale.csv")


def efficiency(rows: Sequence[Row]) -> list[float]:
    """Return clients per second and CPU of the client actors, relative to the first row."""
    rates = [row["clients_per_second"] / (row["actors"] * row["cpus"]) for row in rows]
    return [rate / rates[0] for rate in rates]


def idle_bytes(rows: Sequence[Row]) -> dict[str, float]:
    """Return process -> bytes per additional idle client beyond its data, from the first and last row."""
    few, many = rows[0], rows[-1]
    more = many["clients"] - few["clients"]
    data = many["data_bytes"] - few["data_bytes"]
    copies = {"driver": ("driver_own", 1), "server": ("server_own", 0), "client actor": ("actor_own", 0)}
    return {process: (many[name] - few[name] - copy * data) / more for process, (name, copy) in copies.items()}


def findings(found: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return sentences that summarise the rows of every axis."""
    sentences = []
    for axis, rows in found.items():
        if len(rows) < 2:
            continue
        few, many = rows[0], rows[-1]
        if axis == "clients":
            sizes = ", ".join(f"{max(size, 0):.0f} B in the {process}" for process, size in idle_bytes(rows).items())
            long, work = (amount(many) / amount(few) for amount in (lambda row: row["seconds"], _cpu))
            sentences.append(f"Memory per additional idle client, without its data: {sizes}.")
            sentences.append(
                f"With {many[axis]:,} instead of {few[axis]:,} clients a round takes {long:.2f}x the time and "
                f"{work:.2f}x the CPU time."
            )
        elif axis == "cohort":
            grown = [f"{HOLDERS[name]} {many[name] / few[name]:.2f}x" for name in ("server_peak", "actor_peak")]
            sentences.append(
                f"Peak memory with a cohort of {many[axis]:,} instead of {few[axis]:,}: {', '.join(grown)}."
            )
        else:
            rate = many["clients_per_second"] / few["clients_per_second"]
            sentences.append(f"{many[axis]:,} {axis} instead of {few[axis]:,}: {rate:.2f}x the clients per second.")
    return sentences


def _cpu(row: Row) -> float:
    return row["server_cpu_seconds"] + row["cohort"] * row["client_cpu_seconds"]


def plots(axis: str, rows: Sequence[Row]) -> dict[str, Plot]:
    """Return name -> plot of speed and of memory; {} for a single row."""
    if len(rows) < 2:
        return {}
    speed = "clients_per_second" if axis in PARALLEL else "seconds"
    title = "clients per second" if axis in PARALLEL else "seconds per round"
    memory = {name: [row[name] / MEGABYTE for row in rows] for name in HOLDERS}
    return {
        f"{axis}_speed": _plot(axis, rows, {speed: [row[speed] for row in rows]}, {speed: title}, title),
        f"{axis}_memory": _plot(axis, rows, memory, HOLDERS, "peak MB"),
    }


def _plot(
    axis: str, rows: Sequence[Row], series: Mapping[str, Sequence[float]], names: Mapping[str, str], title: str
) -> Plot:
    """Plot lines over a logarithmic axis; y starts at 0."""
    figure, axes = new_figure()
    values = [row[axis] for row in rows]
    for i, (name, line) in enumerate(series.items()):
        axes.plot(values, line, label=names[name], color=COLORS[i], linestyle=LINES[0], marker=MARKERS[i], markersize=4)
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.minorticks_off()
    axes.set(xlabel=axis, ylabel=title, ylim=(0, None))
    if len(series) > 1:
        legend(axes)
    cells = [[value, *(line[i] for line in series.values())] for i, value in enumerate(values)]
    return Plot(figure, [axis, *series], cells)


def write_scaling(folder: Path, found: Mapping[str, Sequence[Row]]) -> None:
    """Write scale.json, scale.csv, scale.md and plots/ of the rows of every axis."""
    rows = {json.dumps(row): row for some in found.values() for row in some}
    write_json(folder / "scale.json", {"axes": found, "findings": findings(found)})
    names = list(next(iter(rows.values()), {}))
    (folder / "scale.csv").write_text(
        as_csv(names, [[row[name] for name in names] for row in rows.values()]), encoding="utf-8"
    )
    tables = [table(axis, some).markdown() for axis, some in found.items() if some]
    (folder / "scale.md").write_text("\n".join([*tables, *(f"{text}\n" for text in findings(found))]), encoding="utf-8")
    for axis, some in found.items():
        for name, plot in plots(axis, some).items():
            plot.write(folder / "plots" / name)
