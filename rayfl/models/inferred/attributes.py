"""Sizes that modules keep beside their parameters, found by running narrow networks."""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rayfl.core.axes import Axis, segments
from rayfl.models.inferred.narrow import Plan, narrowed
from rayfl.models.inferred.trace import Untraceable, check_runs

RAN = 10**9
"""Number of operations of a probe that ran to its end."""


def fitted(module: nn.Module, plan: Plan, x: torch.Tensor) -> tuple[dict[Any, Any], tuple[str, str] | None]:
    """Return the attributes to set so that the network runs when it is cut, and (path, reason) if it does not.

    Modules keep sizes beside their parameters (`self.heads`). One that fails gets those numbers, one after another, of
    its own or of the modules around it that are the length of a dimension, if more operations run with them; modules of
    its class get the same.
    """
    probes = [_distinct(plan.axes, step) for step in (1, -1)]

    def tried(attributes: Mapping[Any, Any]) -> tuple[Untraceable | None, list[int]]:
        """Return the first error, and the number of operations that each probe did."""
        first, done = None, list[int]()
        for sizes in probes:
            try:
                check_runs(narrowed(copy.deepcopy(module), replace(plan, attributes=attributes), sizes), x)
                done.append(RAN)
            except Untraceable as error:
                first = first or error
                done.append(error.done)
        return first, done

    def best(given: Iterable[dict[Any, Any]]) -> dict[Any, Any] | None:
        """Return the numbers with which the probes come further than without; the first with which all do."""
        chosen, furthest = None, sum(done)
        for some in given:
            _, found = tried(attributes | some)
            if sum(found) > furthest:
                chosen, furthest = attributes | some, sum(found)
            if all(now > before or now == RAN for now, before in zip(found, done, strict=True)):
                break
        return chosen

    def better(path: str) -> dict[Any, Any] | None:
        """Return such numbers of the module that failed, or of those around it."""
        own = list(_numbers(module, plan, path, attributes))
        # a number can be right and the next one fail at the same operation
        pairs = (a | b for a, b in itertools.combinations(own, 2) if not a.keys() & b.keys())
        around = (_numbers(module, plan, place, attributes) for place in itertools.islice(_upwards(path), 1, None))
        return next((found for some in (own, pairs, *around) if (found := best(some)) is not None), None)

    attributes: dict[Any, Any] = {}
    error, done = tried(attributes)
    while error is not None:
        more = better(error.path)
        if more is None:
            return {}, (error.path, error.reason)
        attributes = more
        error, done = tried(attributes)
    return attributes, None


def _distinct(axes: Mapping[str, Axis], step: int) -> dict[str, int]:
    """Return a size of each axis, between a third and the whole, which differs between neighbours of equal length."""
    found, seen = dict[str, int](), Counter[int]()
    for name, axis in axes.items():
        choices = range(math.ceil(axis.size / 3), axis.size)[::step]
        found[name] = choices[seen[axis.size] % len(choices)]
        seen[axis.size] += 1
    return found


def _upwards(path: str) -> Iterator[str]:
    """Yield a path and those of the modules around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _numbers(module: nn.Module, plan: Plan, path: str, known: Collection[Any]) -> Iterator[dict[Any, Any]]:
    """Yield the numbers of a module, with those of all modules of its class, that are a size or a length of their
    parameters."""
    part = module.get_submodule(path)
    if not _own_numbers(part):
        return
    alike = {p: _lengths(plan, p) for p, other in module.named_modules() if type(other) is type(part)}
    lengths = alike[path]
    for name, value in _own_numbers(part):
        seen: list[dict[str, int]] = []
        for how, terms in lengths.items():
            if _value(plan, terms) == value and (path, name) not in known and terms not in seen:
                seen.append(terms)
                yield {
                    (p, name): others[how]
                    for p, others in alike.items()
                    if how in others
                    and (p, name) not in known
                    and (name, _value(plan, others[how])) in _own_numbers(module.get_submodule(p))
                }


def _own_numbers(part: nn.Module) -> list[tuple[str, int]]:
    if type(part).__module__.startswith("torch.nn."):
        return []
    return [(name, value) for name, value in vars(part).items() if type(value) is int]


def _value(plan: Plan, terms: Mapping[str, int]) -> int:
    return sum(plan.axes[name].size * count for name, count in terms.items())


def _lengths(plan: Plan, path: str) -> dict[tuple[str, int, str], dict[str, int]]:
    """Return (parameter, dimension, what of it) -> axis -> how often it is in that length, for a module's
    parameters."""
    found: dict[tuple[str, int, str], dict[str, int]] = {}
    for name, dims in plan.dims.items():
        for d, dim in enumerate(dims) if below(name, path) else ():
            inside = name.removeprefix(f"{path}.")
            whole: Counter[str] = Counter()
            for i, (_, axis) in enumerate(segments(dim)):
                whole[axis.name] += axis.groups * axis.copies
                if not axis.is_fixed:
                    each = {"size": 1, "groups": axis.groups, "copies": axis.copies}
                    found |= {(inside, d, f"{what} {i}"): {axis.name: count} for what, count in each.items()}
            if dim is not None and not any(axis.is_fixed for _, axis in segments(dim)):
                found[inside, d, "all"] = dict(whole)
    return found


def below(name: str, path: str) -> bool:
    """Return whether a parameter is one of a module's."""
    return not path or name.startswith(f"{path}.")
