"""Tables, plots and sentences of a scale study, from its rows: one a point, numbers by name.

A row has the point (clients, cohort, actors, nodes, cpus of an actor) and what was measured there:

    first_seconds         from the run's start to the end of its first round
    seconds               of a round, the median
    rounds_per_second, clients_per_second, client_seconds    the same as rates, and for one client of the cohort
    server_cpu_seconds    CPU of the server's process in a round
    client_cpu_seconds    CPU of the client actors for one client of the cohort
    *_peak                most bytes that a process had in memory: driver, server, the largest client actor
    *_own                 bytes that are nobody else's at the end: of the driver what the run added, server, mean actor
    data_bytes            the arrays of the data set, of which the driver has a copy of its own
    store_bytes           most bytes in the object stores of all nodes, after a round
    bytes_down, bytes_up  what a round sends to clients and back
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
    "client_seconds": ("ms a client", lambda seconds: f"{1000 * seconds:.3g}"),
    "client_cpu_seconds": ("CPU ms", lambda seconds: f"{1000 * seconds:.3g}"),
    "server_cpu_seconds": ("server CPU s", "{:.3g}".format),
    "driver_peak": ("driver", human_bytes),
    "server_peak": ("server", human_bytes),
    "actor_peak": ("actor", human_bytes),
    "store_bytes": ("store", human_bytes),
    "bytes_down": ("down", human_bytes),
    "bytes_up": ("up", human_bytes),
}
"""Of a table, beside the value on the axis: name -> title and how a number is shown."""

PARALLEL = ("actors", "nodes")
"""Axes along which the work of a round stays the same."""
HOLDERS = {
    "driver_peak": "driver",
    "server_peak": "server",
    "actor_peak": "client actor",
    "store_bytes": "object store",
}
MEGABYTE = 1e6


def table(axis: str, rows: Sequence[Row]) -> Table:
    """A line a row; along actors and nodes the efficiency too."""
    header = [axis, *(title for title, _ in COLUMNS.values())]
    cells = [[f"{row[axis]:,}", *(shown(row[name]) for name, (_, shown) in COLUMNS.items())] for row in rows]
    if axis in PARALLEL:
        header.append("efficiency")
        cells = [[*line, f"{share:.2f}"] for line, share in zip(cells, efficiency(rows), strict=True)]
    return Table(header, cells, file="scale.csv")


def efficiency(rows: Sequence[Row]) -> list[float]:
    """What a CPU that client actors were given does, as a share of what one does in the first row."""
    rates = [row["clients_per_second"] / (row["actors"] * row["cpus"]) for row in rows]
    return [rate / rates[0] for rate in rates]


def idle_bytes(rows: Sequence[Row]) -> dict[str, float]:
    """What one more idle client takes beyond its data, by who holds it: from the first and the last row of the axis of
    clients."""
    few, many = rows[0], rows[-1]
    more = many["clients"] - few["clients"]
    data = many["data_bytes"] - few["data_bytes"]
    copies = {"driver": ("driver_own", 1), "server": ("server_own", 0), "client actor": ("actor_own", 0)}
    return {who: (many[name] - few[name] - copy * data) / more for who, (name, copy) in copies.items()}


def findings(found: Mapping[str, Sequence[Row]]) -> list[str]:
    """What the rows of every axis say, in a sentence each."""
    said = []
    for axis, rows in found.items():
        if len(rows) < 2:
            continue
        few, many = rows[0], rows[-1]
        if axis == "clients":
            held = ", ".join(f"{max(size, 0):.0f} B in the {who}" for who, size in idle_bytes(rows).items())
            long, work = (amount(many) / amount(few) for amount in (lambda row: row["seconds"], _cpu))
            said.append(f"One more idle client takes, beyond its data, {held}.")
            said.append(
                f"A round among {many[axis]:,} clients takes {long:.2f}x as long as among {few[axis]:,}, "
                f"and {work:.2f}x as much CPU."
            )
        elif axis == "cohort":
            grown = [f"{HOLDERS[name]} {many[name] / few[name]:.2f}x" for name in ("server_peak", "actor_peak")]
            said.append(
                f"With a cohort of {many[axis]:,} in place of {few[axis]:,} peaks of memory: {', '.join(grown)}."
            )
        else:
            rate = many["clients_per_second"] / few["clients_per_second"]
            said.append(f"{many[axis]:,} {axis} in place of {few[axis]:,}: {rate:.2f}x as many clients a second.")
    return said


def _cpu(row: Row) -> float:
    """Seconds of CPU that a round takes, of the server and of all client actors."""
    return row["server_cpu_seconds"] + row["cohort"] * row["client_cpu_seconds"]


def plots(axis: str, rows: Sequence[Row]) -> dict[str, Plot]:
    """Seconds of a round along clients and cohort, clients a second along actors and nodes; and memory. Nothing of a
    single row."""
    if len(rows) < 2:
        return {}
    speed = "clients_per_second" if axis in PARALLEL else "seconds"
    title = "clients a second" if axis in PARALLEL else "seconds of a round"
    memory = {name: [row[name] / MEGABYTE for row in rows] for name in HOLDERS}
    return {
        f"{axis}_speed": _plot(axis, rows, {speed: [row[speed] for row in rows]}, {speed: title}, title),
        f"{axis}_memory": _plot(axis, rows, memory, HOLDERS, "MB at most"),
    }


def _plot(
    axis: str, rows: Sequence[Row], series: Mapping[str, Sequence[float]], names: Mapping[str, str], title: str
) -> Plot:
    """Lines over the axis from 0, which a logarithmic scale of the values on the axis spreads."""
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
    """scale.json, scale.csv, scale.md and plots/ of the rows of every axis."""
    rows = {json.dumps(row): row for some in found.values() for row in some}
    write_json(folder / "scale.json", {"axes": found, "findings": findings(found)})
    names = list(next(iter(rows.values()), {}))
    (folder / "scale.csv").write_text(as_csv(names, [[row[name] for name in names] for row in rows.values()]))
    tables = [table(axis, some).markdown() for axis, some in found.items() if some]
    (folder / "scale.md").write_text("\n".join([*tables, *(f"{text}\n" for text in findings(found))]))
    for axis, some in found.items():
        for name, plot in plots(axis, some).items():
            plot.write(folder / "plots" / name)
