"""Grids that continue beyond the end at which a row's best value lies (`search.widen`)."""

from collections.abc import Collection
from typing import Any

from rayfl.tuning.space import Point, Search


def beyond(search: Search, tried: Collection[Point], best: Point) -> list[Point]:
    """Return the points that continue a row's grids. For every setting whose best value is the smallest or the largest
    of those tried: the best point with the next value. `search`: the row's; `tried`: its points, `best` among them."""
    found = []
    for path, domain in search.space.items():
        if domain.is_numeric_grid:
            value = _next(domain.values, sorted({point[path] for point in tried}), best[path], search.widen)
            found += [] if value is None else [best | {path: value}]
    return found


def _next(grid: Collection[Any], tried: list[Any], best: Any, most: int) -> Any:
    """Return the value that follows the end of `tried` at which the best one lies, or None: in the ratio of the last
    two, or if they have no positive ratio at their distance. Rounded to two digits (more if it would not lie beyond the
    end), or to a whole number if all are."""
    if len(tried) < 2:
        return None
    if best == tried[-1]:
        end, before, outside = tried[-1], tried[-2], sum(value > max(grid) for value in tried)
    elif best == tried[0]:
        end, before, outside = tried[0], tried[1], sum(value < min(grid) for value in tried)
    else:
        return None
    value = end * end / before if end * before > 0 else 2 * end - before
    whole = all(isinstance(v, int) for v in tried)
    rounded = [round(value)] if whole else [float(f"{value:.{digits}g}") for digits in range(2, 17)]
    beyond = (v for v in rounded if (v - end) * (end - before) > 0)
    return next(beyond, None) if outside < most else None
