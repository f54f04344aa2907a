"""The plan of a network, and the narrow copies of it."""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from rayfl.core.axes import Axis, Concat, Dims, declare, segments
from rayfl.models.inferred.blocks import leave_out


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
