"""Training samples from which the statistics of static norms are collected, in batches.

| `evaluation.statistics` | batches |
|---|---|
| exact, pooled | of all clients' samples, shuffled |
| cumulative | of one client's samples, shuffled; a client with less than a batch shares batches with the next clients |

Batches follow from the data, the seed, `training.batch_size` and `evaluation.statistics_*`. They do not depend on
`evaluation.batch_size` or on the workers.
"""

from collections.abc import Sequence

import numpy as np

from rayfl.core.seeds import numpy_generator
from rayfl.data.partition import Shards
from rayfl.data.samples import equal_batches
from rayfl.engine.jobs import Collect

PIECE = 2000
"""Samples per job, at least. The last one has the rest."""


def collections_of(
    train: Shards, clients: Sequence[int] | np.ndarray, kind: str, batch_size: int, seed: int
) -> list[Collect]:
    """Return jobs over all training samples of these clients, each once."""
    ids = np.asarray(clients)
    rows = train.idx if len(ids) == len(train) else np.concatenate([train[id] for id in ids])
    order = numpy_generator(seed, "pooled").permutation(len(rows))
    runs = [len(rows)]
    if kind == "cumulative":
        holders = np.repeat(np.arange(len(ids)), train.sizes[ids])
        order = order[np.argsort(holders[order], kind="stable")]
        runs = _joined([n for n, _ in grouped(ids, train.sizes, batch_size)], batch_size)
    rows = rows[order]
    sizes = np.array([size for run in runs for size in equal_batches(run, batch_size)])
    jobs, start = [], 0
    for samples, batches in grouped(np.arange(len(sizes)), sizes, PIECE):
        part = rows[start : start + samples]
        jobs.append(Collect(part, sizes[batches].tolist(), start if kind == "pooled" else None))
        start += samples
    return jobs


def _joined(runs: list[int], least: int) -> list[int]:
    """Return the runs of samples, where a last one with less than `least` joins the one before."""
    return [*runs[:-2], runs[-2] + runs[-1]] if len(runs) > 1 and runs[-1] < least else runs


def grouped(ids: np.ndarray, sizes: np.ndarray, piece: int) -> list[tuple[int, list[int]]]:
    """Return (samples, ids) of consecutive groups of ids [n], each the shortest with at least `piece` samples; the last
    one has the rest."""
    ends, start, groups = np.cumsum(sizes[ids]), 0, []
    while start < len(ids):
        before = int(ends[start - 1]) if start else 0
        stop = min(int(np.searchsorted(ends, before + piece)) + 1, len(ids))
        groups.append((int(ends[stop - 1]) - before, ids[start:stop].tolist()))
        start = stop
    return groups


def spans_of(total: int, batch_size: int, piece: int) -> list[slice]:
    """Return slices that cover `total` samples: whole batches of `equal_batches`, with at least `piece` samples."""
    sizes = np.array(equal_batches(total, batch_size), int)
    stops = np.cumsum([samples for samples, _ in grouped(np.arange(len(sizes)), sizes, piece)], dtype=int).tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
