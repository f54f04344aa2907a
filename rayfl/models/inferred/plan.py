"""Axes of any network."""

import copy
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from rayfl.core.axes import CLASSES, Axis, Concat, Dims, segments
from rayfl.models.inferred.attributes import below, fitted
from rayfl.models.inferred.blocks import Calls, leave_out, modules_named
from rayfl.models.inferred.narrow import Plan
from rayfl.models.inferred.rules import flat
from rayfl.models.inferred.trace import Trace, Untraceable, check_runs, traced


def plan_of(
    module: nn.Module,
    x: torch.Tensor,
    fixed: Iterable[str] = (),
    blocks: Iterable[str] | None = None,
    declared: Mapping[str, str] | None = None,
) -> Plan:
    """Return the plan of a network on the meta device. `fixed`: paths of modules that are not cut. Parts that do not
    run when they are cut are left whole, with a reason. `blocks`: paths of the residual blocks. Default: those found.
    `declared`: path of a module -> axis of its output's channels.
    """
    modules_named(module, "axes", declared or ())
    with Calls(module) as calls:
        trace, output = traced(module, x, declared)
    _check_training(module, x, output)
    outputs = output if isinstance(output, tuple | list) else [output]
    logits, classed = outputs[-1], set[tuple[str, int]]()
    for one in outputs:
        classed |= _classed(trace, one)
        trace.path = ""
        trace.fix(*trace.of(one), reason="output")
    trace.fix(*trace.rows, reason="embedding")
    for path in modules_named(module, "fixed", fixed):
        _keep(trace, path, "named in `fixed`")
    while True:
        plan = _planned(trace, classed, tuple(logits.shape[1:]))
        attributes, failed = fitted(module, plan, x)
        if failed is None:
            calls.fix(trace)
            paths = calls.found() if blocks is None else calls.named(blocks)
            stages = calls.stages(paths if _run_without(module, paths, x, blocks is not None) else ())
            return replace(plan, attributes=attributes, blocks=stages)
        path, reason = failed
        alike = [p for p, part in module.named_modules() if type(part) is type(module.get_submodule(path))]
        if any([_tie(trace, plan, p) for p in alike]):
            continue
        while not _keep(trace, path, reason):
            if not path:
                raise Untraceable(f"the network does not run when it is cut ({reason}). Hint: name modules in `fixed`")
            path = path.rpartition(".")[0]


def _check_training(module: nn.Module, x: torch.Tensor, output: Any) -> None:
    """Raise Untraceable if a network in training returns other tensors than in evaluation, whose `output` is given."""
    trained = check_runs(module.train(), x)
    module.eval()
    shapes, usual = ([list(t.shape) for t in flat(some)] for some in (trained, output))
    if shapes != usual:
        raise Untraceable(
            f"in training it returns tensors of shape {shapes}, in evaluation {usual}. Hint: an option without "
            "auxiliary outputs, such as aux_logits: false"
        )


def _run_without(module: nn.Module, blocks: Collection[str], x: torch.Tensor, is_asked: bool) -> bool:
    """Return whether a network runs without its blocks. Raise Untraceable if the user named them."""
    rest = copy.deepcopy(module)
    leave_out(rest, blocks)
    try:
        check_runs(rest, x)
    except Untraceable:
        if is_asked:
            raise
        return False
    return True


def _keep(trace: Trace, path: str, reason: str) -> bool:
    """Leave the tensors of a module whole; False if they are already."""
    labels, trace.path, changed = trace.components(), path, False
    for name, dims in trace.dims.items():
        if name == path or name.startswith(f"{path}.") or not path:
            for numbers in dims:
                if numbers is not None and labels[numbers].any():
                    trace.fix(numbers, reason=reason)
                    changed = True
    return changed


def _tie(trace: Trace, plan: Plan, path: str) -> bool:
    """Cut the dimensions of a module that have one length together: it may have one number for all of them. First
    channels inside of heads, then all that is cut by heads, then the rest. False if they already are."""
    labels = trace.components()
    own = [(name, d, dim) for name, dims in plan.dims.items() for d, dim in enumerate(dims) if below(name, path)]
    cut = [(trace.dims[name][d], dim) for name, d, dim in own if dim is not None and not dim.is_fixed]
    heads = [
        ((axis.size, axis.copies), numbers[start : start + axis.size * axis.copies])
        for numbers, dim in cut
        for start, axis in segments(dim)
        if numbers is not None and axis.groups > 1
    ]
    by_heads = [
        (len(numbers), numbers)
        for numbers, dim in cut
        if numbers is not None and any(axis.groups * axis.copies > 1 for _, axis in segments(dim))
    ]
    whole = [(len(numbers), numbers) for numbers, _ in cut if numbers is not None]
    for some in (heads, by_heads, whole):
        first, changed = {}, False
        for length, numbers in some:
            other = first.setdefault(length, numbers)
            changed |= not np.array_equal(labels[other], labels[numbers])
            trace.equal(other, numbers)
        if changed:
            return True
    return False


# axes


def _planned(trace: Trace, classed: Collection[tuple[str, int]], outputs: tuple[int, ...]) -> Plan:
    labels = trace.components()
    places = {(name, d): labels[n] for name, dims in trace.dims.items() for d, n in enumerate(dims) if n is not None}
    # what nothing else has is no axis: the pixels of a kernel
    seen: Counter[int] = Counter()
    for sets in places.values():
        seen.update(set(sets.tolist()))
    alone = np.zeros(trace.count, dtype=bool)
    alone[[label for label, count in seen.items() if count == 1]] = True
    places = {place: np.where(alone[sets], 0, sets) for place, sets in places.items()}
    declared = {label: name for name, numbers in trace.named.items() for label in labels[numbers].tolist()}
    axes = _named_axes(places, declared)
    dims: dict[str, Dims] = {}
    for name, numbers in trace.dims.items():
        found: list[Axis | Concat | None] = []
        for d, n in enumerate(numbers):
            if n is None:
                found.append(None)
            elif (name, d) in classed:
                found.append(Axis.fixed(CLASSES, len(n)))
            else:
                found.append(_dimension(places[name, d], axes, f"{name}.{d}"))
        dims[name] = tuple(found)
    reasons = tuple(dict.fromkeys(reason for _, reason in trace.reasons))
    return Plan(dims, {}, outputs, reasons)


def _classed(trace: Trace, logits: torch.Tensor) -> set[tuple[str, int]]:
    """Return the dimensions of parameters that are, or begin with, the rows of the output, in their order."""
    labels = trace.components()
    rows = [labels[layer.flatten()] for layer in trace.of(logits) if layer.shape[-1] == layer.numel()]
    places = [(name, d, n) for name, dims in trace.dims.items() for d, n in enumerate(dims) if n is not None]
    return {(name, d) for name, d, n in places for row in rows if np.array_equal(labels[n][: len(row)], row)}


def _named_axes(
    places: Mapping[tuple[str, int], np.ndarray], declared: Mapping[int, str]
) -> dict[int, tuple[str, int, int]]:
    """Return set -> (axis, its position, number of positions). Sets are of one axis if they occur in the same
    dimensions of the same tensors, in unbroken runs. `declared`: set -> name of its axis. Default: the first module."""
    where: dict[int, list[Any]] = defaultdict(list)
    for place, sets in places.items():
        for label in dict.fromkeys(sets.tolist()):
            where[label].append(place)
    where.pop(0, None)
    kinds = {label: tuple(some) for label, some in where.items()}
    while True:
        finer: dict[int, list[Any]] = defaultdict(list)
        for sets in places.values():
            for number, run in enumerate(_runs(sets, kinds)):
                for label in set(run):
                    finer[label].append(number)
        refined = {label: (kind, tuple(finer[label])) for label, kind in kinds.items()}
        numbered = {kind: i for i, kind in enumerate(dict.fromkeys(refined.values()))}
        new = {label: numbered[kind] for label, kind in refined.items()}
        if len(set(new.values())) == len(set(kinds.values())):
            break
        kinds = new
    members: dict[Any, list[int]] = defaultdict(list)
    first: dict[Any, tuple[str, int]] = {}
    for place, sets in places.items():
        for label in dict.fromkeys(sets.tolist()):
            if label:
                kind = kinds[label]
                first.setdefault(kind, place)
                if first[kind] == place:
                    members[kind].append(label)
    axes: dict[int, tuple[str, int, int]] = {}
    names: Counter[str] = Counter()
    for kind, labels in members.items():
        path = declared.get(labels[0]) or first[kind][0].rpartition(".")[0] or first[kind][0]
        names[path] += 1
        name = path if names[path] == 1 else f"{path}#{names[path]}"
        if len(labels) > 1:
            axes |= {label: (name, i, len(labels)) for i, label in enumerate(labels)}
    return axes


def _runs(sets: np.ndarray, kinds: Mapping[int, Any]) -> list[list[int]]:
    """Return the runs of sets of one kind."""
    runs: list[list[int]] = []
    last: Any = ()
    for label in sets.tolist():
        kind = kinds.get(label)
        if not runs or kind != last:
            runs.append([])
        last = kind
        runs[-1].append(label)
    return [run for run in runs if run[0]]


def _dimension(sets: np.ndarray, axes: Mapping[int, tuple[str, int, int]], name: str) -> Axis | Concat | None:
    """Return the axes of one dimension."""
    parts: list[Axis] = []
    start = 0
    kinds = [axes[label][0] if label in axes else "" for label in sets.tolist()]
    while start < len(sets):
        end = start
        while end < len(sets) and kinds[end] == kinds[start]:
            end += 1
        if kinds[start]:
            _, _, size = axes[int(sets[start])]
            positions = np.array([axes[int(label)][1] for label in sets[start:end]])
            parts.append(_axis(kinds[start], size, positions))
        else:
            parts.append(Axis.fixed(f"{name}.fixed", end - start))
        start = end
    if len(parts) == 1:
        return None if parts[0].is_fixed else parts[0]
    return Concat(tuple(parts))


def _axis(name: str, size: int, positions: np.ndarray) -> Axis:
    """Return the axis of positions 0, 1, ..., each with its copies, in every group."""
    copies = int(np.argmax(positions != positions[0])) or len(positions)
    groups = len(positions) // (size * copies)
    expected = np.tile(np.repeat(np.arange(size), copies), groups)
    if not np.array_equal(expected, positions):
        raise Untraceable(f"the positions of axis {name} have an order that no axis has. Hint: fixed: [{name}]")
    return Axis(name, size, groups, copies)
