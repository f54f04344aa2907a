"""Axes of any network, and the narrow copies of it."""

import copy
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from rayfl.core.axes import CLASSES, Axis, Concat, Dims, declare, segments
from rayfl.models.inferred.blocks import Calls, leave_out, modules_named
from rayfl.models.inferred.rules import flat
from rayfl.models.inferred.trace import Trace, Untraceable, check_runs, traced

RAN = 10**9
"""Number of operations of a probe that ran to its end."""


@dataclass(frozen=True)
class Plan:
    """The axes of a whole network, and the attributes of its modules that follow their sizes."""

    dims: Mapping[str, Dims]
    """Parameter -> its axes at full width."""
    attributes: Mapping[tuple[str, str], Mapping[str, int]]
    """(path of a module, name of a whole number) -> axis -> how often the number contains its size."""
    outputs: tuple[int, ...]
    """Shape of the (last) output of one sample."""
    fixed: tuple[str, ...]
    """Reasons for dimensions that are not cut, each with the path of a module."""
    blocks: tuple[tuple[str, ...], ...] = ()
    """Paths of the residual blocks that can be left out, by stage."""

    @functools.cached_property
    def axes(self) -> dict[str, Axis]:
        """Axes that can be cut, by name."""
        found = (axis for dims in self.dims.values() for dim in dims for _, axis in segments(dim))
        return {axis.name: axis for axis in found if not axis.is_fixed}


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
        attributes, failed = _fitted(module, plan, x)
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
    own = [(name, d, dim) for name, dims in plan.dims.items() for d, dim in enumerate(dims) if _below(name, path)]
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


def _below(name: str, path: str) -> bool:
    return not path or name.startswith(f"{path}.")


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


# narrow networks


def narrowed(module: nn.Module, plan: Plan, sizes: Mapping[str, int], without: Collection[str] = ()) -> nn.Module:
    """Cut a network in place to the first positions of its axes, leave blocks out, and declare the axes."""
    leave_out(module, without)
    dims = {name: tuple(_resized(dim, sizes) for dim in some) for name, some in plan.dims.items()}
    done: dict[int, nn.Parameter] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        cut = False
        for name, t in list(part.named_parameters(recurse=False)):
            full = plan.dims.get(f"{prefix}{name}")
            if full is None:
                # a tied parameter has its first name
                if id(t) in done:
                    part.register_parameter(name, done[id(t)])
                    cut = True
                continue
            new = _first(t, full, sizes)
            if new.shape != t.shape:
                cut = True
                part.register_parameter(name, nn.Parameter(new.contiguous(), t.requires_grad))
            done[id(t)] = part._parameters[name]  # pyright: ignore[reportArgumentType]
        if cut:
            _adjust(part)
        names = [name for name, _ in part.named_parameters(recurse=False)]
        if names:
            declare(part, **{name: dims[f"{prefix}{name}"] for name in names if f"{prefix}{name}" in dims})
    present = dict(module.named_modules())
    for (path, name), terms in plan.attributes.items():
        if path in present:
            setattr(present[path], name, sum(sizes[axis] * count for axis, count in terms.items()))
    return module


def _resized(dim: Axis | Concat | None, sizes: Mapping[str, int]) -> Axis | Concat | None:
    if isinstance(dim, Concat):
        return Concat(tuple(replace(axis, size=sizes.get(axis.name, axis.size)) for axis in dim.parts))
    return dim if dim is None else replace(dim, size=sizes.get(dim.name, dim.size))


def _first(t: torch.Tensor, dims: Dims, sizes: Mapping[str, int]) -> torch.Tensor:
    """Return the first positions of a tensor along its axes."""
    if t.is_meta:
        kept = [_resized(dim, sizes) for dim in dims]
        return t.new_empty([dim.length if dim else size for dim, size in zip(kept, t.shape, strict=True)])
    t = t.detach()
    for d, dim in enumerate(dims):
        kept = []
        for start, axis in segments(dim):
            size = sizes.get(axis.name, axis.size) if not axis.is_fixed else axis.size
            inside = torch.arange(axis.length).view(axis.groups, axis.size, axis.copies)[:, :size]
            kept.append(start + inside.flatten())
        if kept and sum(map(len, kept)) < t.shape[d]:
            t = t.index_select(d, torch.cat(kept).to(t.device))
    return t


def _adjust(part: nn.Module) -> None:
    """Set the sizes that a layer of torch keeps beside its parameters."""
    weight = getattr(part, "weight", None)
    if isinstance(part, nn.modules.conv._ConvNd):
        assert isinstance(weight, torch.Tensor)
        rows, columns = weight.shape[:2]
        if part.groups > 1 and columns == 1 and part.groups == part.in_channels:
            part.groups = rows // (part.out_channels // part.in_channels)
        inner, outer = (columns * part.groups, rows) if not part.transposed else (rows, columns * part.groups)
        part.in_channels, part.out_channels = inner, outer
    elif isinstance(part, nn.Linear):
        part.out_features, part.in_features = part.weight.shape
    elif isinstance(part, nn.Embedding):
        part.num_embeddings, part.embedding_dim = part.weight.shape
    elif isinstance(part, nn.GroupNorm):
        part.num_groups = len(part.weight) if part.num_groups == part.num_channels else part.num_groups
        part.num_channels = len(part.weight)
    elif isinstance(part, nn.LayerNorm | nn.RMSNorm):
        part.normalized_shape = tuple(part.weight.shape)
    elif isinstance(part, nn.modules.batchnorm._NormBase) and part.weight is not None:
        part.num_features = len(part.weight)
    elif isinstance(part, nn.MultiheadAttention):
        part.embed_dim = part.kdim = part.vdim = part.in_proj_weight.shape[1]
        part.head_dim = part.embed_dim // part.num_heads


def _fitted(module: nn.Module, plan: Plan, x: torch.Tensor) -> tuple[dict[Any, Any], tuple[str, str] | None]:
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

    def better(path: str) -> dict[Any, Any] | None:
        """Return numbers of the module that failed, or of those around it, with which the probes come further."""
        for place in _upwards(path):
            best, furthest = None, sum(done)
            for some in _numbers(module, plan, place, attributes):
                _, found = tried(attributes | some)
                if sum(found) > furthest:
                    best, furthest = attributes | some, sum(found)
                if all(now > before or now == RAN for now, before in zip(found, done, strict=True)):
                    break
            if best is not None:
                return best
        return None

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
        for d, dim in enumerate(dims) if _below(name, path) else ():
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
