"""Rules by which the numbers of positions move through the operations of ATen (`trace.py`)."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

Layer = torch.Tensor
"""Numbers [int64] of a tensor's positions: of its shape, with size 1 in dimensions along which they are equal."""

UNARY = {"alias", "clone", "contiguous", "detach", "lift_fresh", "dropout", "native_dropout", "_to_copy", "hardswish"}
MOVED = {"permute", "t", "transpose", "unsqueeze", "squeeze", "view", "_unsafe_view", "reshape", "expand", "slice"}
MOVED |= {"select", "split", "split_with_sizes", "chunk", "unbind", "flip", "roll", "repeat"}
MOVED |= {"pixel_shuffle", "pixel_unshuffle", "narrow", "channel_shuffle", "unfold", "_reshape_alias", "unflatten"}
VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten"}
CHANNELWISE = {"max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d", "max_pool1d"}
CHANNELWISE |= {"avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool3d", "max_pool3d_with_indices", "avg_pool3d"}
CHANNELWISE |= {"upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_nearest1d"}
CHANNELWISE |= {"reflection_pad1d", "reflection_pad2d", "replication_pad2d", "_upsample_bilinear2d_aa"}
MEANS = {"mean", "var", "var_mean", "std"}
SUMS = {"sum", "linalg_vector_norm", "norm"}
REDUCED = MEANS | SUMS | {"amax", "amin", "prod"}
FACTORIES = {"new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like"}
ALONG = {"_softmax": 1, "_log_softmax": 1, "_safe_softmax": 1, "cumsum": 1, "logcumsumexp": 1}
"""Operations whose result at one position depends on all others along a dimension; place of the dimension."""
BATCH_NORMS = {"native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"}
BATCH_NORMS |= {"_batch_norm_impl_index", "cudnn_batch_norm", "_batch_norm_no_update", "batch_norm"}
NORMS = dict.fromkeys(BATCH_NORMS | {"native_group_norm", "group_norm"}, 1)
NORMS |= dict.fromkeys(("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"), 2)
"""Operations whose result is 0 where their weight is, and place of the weight."""
SOFTMAX = {"_softmax", "_log_softmax", "_safe_softmax"}


class Numbers(Protocol):
    """What a rule reads and says of the tensors of a forward pass; see `trace.Trace`."""

    def of(self, t: Any) -> list[Layer]: ...
    def give(self, t: torch.Tensor, layers: Sequence[Layer]) -> None: ...
    def along(self, t: Any, d: int) -> np.ndarray: ...
    def has_zeros(self, t: Any) -> bool: ...
    def equal(self, a: Any, b: Any, reason: str = "") -> None: ...
    def fix(self, *layers: Any, reason: str = "") -> None: ...
    def pointwise(self, given: Sequence[torch.Tensor], out: Any) -> None: ...
    def contract(self, a: list[Layer], b: list[Layer], has_zeros: bool) -> list[Layer]: ...
    def merged(self, layers: list[Layer], new: Layer) -> list[Layer]: ...

    rows: list[np.ndarray]


def flat(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    if isinstance(given, dict):
        given = list(given.values())
    return [t for one in given for t in flat(one)] if isinstance(given, list | tuple) else []


def along_which(layer: Layer) -> list[int]:
    """Return the dimensions along which numbers differ."""
    return [d for d, size in enumerate(layer.shape) if size > 1]


def compact(layer: Layer) -> Layer:
    for d in range(layer.dim()):
        if layer.shape[d] > 1 and (layer.stride(d) == 0 or bool((layer.narrow(d, 0, 1) == layer).all())):
            layer = layer.narrow(d, 0, 1)
    return layer


def keeps_zeros(trace: Numbers, func: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the result of an operation is 0 at cut positions. `tensors`: those with numbers."""
    zeros = [trace.has_zeros(t) for t in tensors]
    if name in NORMS:
        return len(args) > NORMS[name] and args[NORMS[name]] is not None
    if name in SOFTMAX or torch.Tag.pointwise not in func.tags or name in UNARY:
        return all(zeros) and name not in SOFTMAX
    known = {id(t) for t, is_zero in zip(tensors, zeros, strict=True) if is_zero}

    def at(value: float, given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return torch.full((), 0.0 if id(given) in known else value, dtype=given.dtype, device="cpu")
        return [at(value, one) for one in given] if isinstance(given, list | tuple) else given

    try:
        found = [func(*at(value, args), **{k: at(value, v) for k, v in kwargs.items()}) for value in (0.7, 0.0, -1.3)]
    except (RuntimeError, NotImplementedError, TypeError):
        # not computable for single values: its channels stay whole
        return False
    return not any(bool(t.any()) for t in flat(found))


RULES: dict[str, Callable[..., None]] = {}
"""Operation -> rule(trace, function, arguments, keywords, output)."""


def rule(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def registered(function: Callable[..., None]) -> Callable[..., None]:
        RULES.update(dict.fromkeys(names, function))
        return function

    return registered


@rule(*MOVED)
def _moved(trace: Numbers, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    x, *rest = args
    outs: list[list[Layer]] = [[] for _ in flat(out)]
    for layer in trace.of(x):
        whole = layer.expand(x.shape)
        moves = whole.reshape(out.shape) if func.overloadpacket.__name__ in VIEWS else func(whole, *rest, **kwargs)
        for place, moved in zip(outs, flat(moves), strict=True):
            place.append(moved)
    for t, layers in zip(flat(out), outs, strict=True):
        trace.give(t, layers)


@rule("constant_pad_nd")
def _padded(trace: Numbers, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
    x, pad = args[0], args[1]
    layers = []
    for layer in trace.of(x):
        # zeros around a map belong to all channels, zeros after the channels are a part that is never cut
        inside = [n if layer.shape[x.dim() - 1 - i // 2] > 1 else 0 for i, n in enumerate(pad)]
        layers.append(torch.constant_pad_nd(layer, inside, 0))
    trace.give(out, layers)


@rule("cat")
def _concatenated(trace: Numbers, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
    tensors = [t for t in args[0] if t.dim() == out.dim()]
    at = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
    none = torch.zeros([1] * out.dim(), dtype=torch.int64, device="cpu")
    layers = []
    given = [_spread(trace.of(t), t.shape[at], at, tensors, trace) for t in tensors]
    # other dimensions have one size in all of them
    across = [[layer for layer in some if layer.shape[at] == 1] for some in given]
    for where in dict.fromkeys(tuple(along_which(layer)) for some in across for layer in some):
        alike = [next((layer for layer in some if tuple(along_which(layer)) == where), none) for some in across]
        first = next(layer for layer in alike if layer is not none)
        for layer in alike:
            trace.equal(first, layer)
        layers.append(first)
    along = [next((layer for layer in some if layer.shape[at] > 1), none) for some in given]
    if any(layer is not none for layer in along):
        sizes = [max(some) for some in zip(*(layer.shape for layer in along), strict=True)]
        wide = [
            layer.expand([t.shape[d] if d == at else size for d, size in enumerate(sizes)])
            for layer, t in zip(along, tensors, strict=True)
        ]
        layers.append(torch.cat(wide, at))
    trace.give(out, layers)


def _spread(layers: list[Layer], size: int, at: int, tensors: Sequence[torch.Tensor], trace: Numbers) -> list[Layer]:
    """Return numbers of whole heads as those of all their channels, if other heads to be concatenated have numbers for
    each channel."""
    joint = {d for t in tensors for layer in trace.of(t) if layer.shape[at] > 1 for d in along_which(layer)} - {at}
    return [
        layer.expand([size if d == at else n for d, n in enumerate(layer.shape)])
        if layer.shape[at] == 1 and joint & set(along_which(layer))
        else layer
        for layer in layers
    ]


@rule(*CHANNELWISE)
def _channelwise(trace: Numbers, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    x = args[0]
    # [C, H, W] without a batch
    d = x.dim() - {"1": 2, "2": 3, "3": 4}[next((c for c in func.overloadpacket.__name__ if c in "123"), "2")]
    numbers = torch.from_numpy(trace.along(x, d))
    for t in flat(out):
        trace.give(t, [numbers.view([-1 if i == d else 1 for i in range(t.dim())])])


@rule(*REDUCED)
def _reduced(trace: Numbers, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    x = args[0]
    keep = out if isinstance(out, torch.Tensor) else out[0]
    given = next((a for a in [*args[1:], kwargs.get("dim")] if isinstance(a, list | tuple)), None)
    dims = {d % x.dim() for d in given} if given else set(range(x.dim()))
    layers = trace.of(x)
    name = func.overloadpacket.__name__
    if name not in MEANS and not (name in SUMS and trace.has_zeros(x)):
        trace.fix(*(layer for layer in layers if dims & set(along_which(layer))))
    for d in dims:
        layers = [layer.narrow(d, 0, 1) for layer in layers]
    if keep.dim() != x.dim():
        layers = [layer.squeeze(tuple(dims)) for layer in layers]
    for t in flat(out):
        trace.give(t, layers)


@rule(*ALONG)
def _along(trace: Numbers, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
    d = args[1] % args[0].dim()
    for layer in trace.of(args[0]):
        if layer.shape[d] > 1:
            trace.fix(layer)
    trace.give(out, [layer for layer in trace.of(args[0]) if layer.shape[d] == 1])


@rule("tril", "triu")
def _triangle(trace: Numbers, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
    plane = {out.dim() - 2, out.dim() - 1}
    trace.fix(*(layer for layer in trace.of(args[0]) if plane & set(along_which(layer))))
    trace.give(out, [layer for layer in trace.of(args[0]) if not plane & set(along_which(layer))])


@rule("convolution")
def _convolution(trace: Numbers, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
    x, weight, bias, _, _, _, transposed, _, groups = args
    d = x.dim() - weight.dim() + 1
    inputs, first, second = trace.along(x, d), trace.along(weight, 0), trace.along(weight, 1)
    if transposed:
        trace.equal(inputs, first)
        results = np.tile(second, groups)
        if groups > 1:
            rows = inputs.reshape(groups, -1)
            trace.equal(rows[:1], rows)
    elif groups > 1 and weight.shape[1] == 1 and weight.shape[0] % groups == 0:
        trace.equal(np.repeat(inputs, weight.shape[0] // groups), first)
        results = first
    else:
        trace.equal(inputs.reshape(groups, -1), second)
        if groups > 1:
            rows = first.reshape(groups, -1)
            trace.equal(rows[:1], rows)
        results = first
    if bias is not None:
        trace.equal(trace.along(bias, 0), results)
    trace.give(out, [torch.from_numpy(results).view([-1 if i == d else 1 for i in range(out.dim())])])


@rule("mm", "bmm", "matmul")
def _product(trace: Numbers, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
    a, b = args[:2]
    trace.give(out, trace.contract(trace.of(a), trace.of(b), trace.has_zeros(a) or trace.has_zeros(b)))


@rule("addmm", "baddbmm")
def _affine(trace: Numbers, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
    bias, a, b = args[:3]
    layers = trace.contract(trace.of(a), trace.of(b), trace.has_zeros(a) or trace.has_zeros(b))
    for layer in trace.of(bias):
        layers = trace.merged(layers, layer.view(*[1] * (out.dim() - bias.dim()), *layer.shape))
    trace.give(out, layers)


@rule(
    "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
def _attention(trace: Numbers, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    q, k, v = args[:3]
    shared = q.shape[-3] // k.shape[-3] if q.dim() > 3 else 1
    keys, values = ([_repeated(layer, shared) for layer in trace.of(t)] for t in (k, v))
    scores = trace.contract(
        trace.of(q), [layer.transpose(-1, -2) for layer in keys], trace.has_zeros(q) or trace.has_zeros(k)
    )
    trace.fix(*(layer for layer in scores if layer.shape[-1] > 1))
    heads = [layer for layer in scores if layer.shape[-1] == 1]
    trace.give(flat(out)[0], trace.contract(heads, values, trace.has_zeros(v)))


def _repeated(layer: Layer, times: int) -> Layer:
    """Return the numbers of heads that several heads of queries share."""
    return layer.repeat_interleave(times, -3) if times > 1 and layer.shape[-3] > 1 else layer


@rule(*BATCH_NORMS)
def _batch_norm(trace: Numbers, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    x, *given = args
    d = 1
    numbers = trace.along(x, d)
    for t in given[:4]:
        if isinstance(t, torch.Tensor) and t.dim() == 1:
            trace.equal(numbers, trace.along(t, 0))
    first = flat(out)[0]
    trace.give(first, [torch.from_numpy(numbers).view([-1 if i == d else 1 for i in range(first.dim())])])


@rule("native_layer_norm", "_fused_rms_norm", "layer_norm", "rms_norm")
def _layer_norm(trace: Numbers, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    trace.pointwise([t for t in args if isinstance(t, torch.Tensor)], flat(out)[:1])


@rule("native_group_norm", "group_norm")
def _group_norm(trace: Numbers, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    x, weight, bias, groups = args[0], args[1], args[2], args[6]
    numbers = trace.along(x, 1)
    for t in (weight, bias):
        if t is not None:
            trace.equal(numbers, trace.along(t, 0))
    if 1 < groups < len(numbers):
        rows = numbers.reshape(groups, -1)
        trace.equal(rows[:1], rows)
    first = flat(out)[0]
    trace.give(first, [torch.from_numpy(numbers).view([-1 if i == 1 else 1 for i in range(first.dim())])])


@rule("embedding")
def _embedding(trace: Numbers, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
    weight = args[0]
    trace.rows.append(trace.along(weight, 0))
    trace.give(out, [torch.from_numpy(trace.along(weight, 1)).view(*[1] * (out.dim() - 1), -1)])


@rule("index", "index_select")
def _indexed(trace: Numbers, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
    x, given = args[0], args[1]
    indices: list[Any] = [None] * given + [args[2]] if isinstance(given, int) else [*given]
    used = {d: index for d, index in enumerate(indices) if index is not None}
    at: list[int] = [*used]
    if not at or at != list(range(at[0], at[0] + len(at))):
        trace.fix(*trace.of(x))
        return
    new = [1] * max(index.dim() for index in used.values())
    trace.fix(*(layer for layer in trace.of(x) if set(at) & set(along_which(layer))))
    moved = [layer for layer in trace.of(x) if not set(at) & set(along_which(layer))]
    trace.give(out, [layer.view(*layer.shape[: at[0]], *new, *layer.shape[at[-1] + 1 :]) for layer in moved])


@rule("as_strided")
def _strided(trace: Numbers, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
    # pooling to one pixel changes the strides of its result
    layers = trace.of(args[0])
    if list(out.shape) != list(args[1]) or out is not args[0]:
        trace.fix(*layers)
    trace.give(out, layers)


@rule("copy")
def _copied(trace: Numbers, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
    trace.fix(*trace.of(args[0]), *trace.of(args[1]))
