"""What a client sends: its update after transforms, with error feedback, clipping and secure aggregation."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

import torch

from rayfl.config import ConfigError, ask
from rayfl.core.fold import ClientState, Update
from rayfl.core.norms import VARIANCE
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params, norm
from rayfl.training.secure import Protection
from rayfl.training.transforms import Clip, ErrorFeedback, Transform, Wire

RESIDUAL = "updates residual"
"""Group of a client state with the residual of error feedback: group of the update -> name -> tensor, in the server's
shapes."""


def transformed(
    transforms: Sequence[Transform],
    payload: Mapping[str, Params],
    update: Update,
    seed: int,
    selection: Selection,
    residual: ClientState | None = None,
    protection: Protection = Protection(),  # noqa: B008 (immutable)
) -> tuple[float, ClientState | None]:
    """Apply the transforms and the protection to one client's update, in place. Return its size in bytes and, with
    error feedback, the new residual, which replaces `residual`.

    `payload`: the tensors that the client received; `seed`: its seed for this round. A change is the update divided by
    its weight, less what was received; groups in `update.as_is` are changes themselves. Classifier rows that the
    client does not own are not part of its change. Negative running variances are set to 0. With a clipping norm, the
    update becomes its change as sent, of at most this norm and of weight 1; its metric `within_norm` is 1 if the norm
    was smaller. With secure aggregation, `overflows` is the number of clamped elements.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = [*update.sums.items(), *update.whole.items()]
    answers = {f"{g}/{n}": (params, n, t) for g, params in groups for n, t in params.items()}
    received = {f"{g}/{n}": t for g, params in payload.items() if g not in update.as_is for n, t in params.items()}
    weight = {f"{g}/{n}": 1.0 if g in update.as_is else update.weight for g, params in groups for n in params}
    rows = {f"params/{name}": (t > 0).float() for name, t in update.row_weights.items()}
    start = {key: received.get(key, torch.zeros_like(t)) * rows.get(key, 1.0) for key, (_, _, t) in answers.items()}
    d = {key: t / weight[key] - start[key] for key, (_, _, t) in answers.items()}
    if not d:
        return 0.0, None
    wire, memory, wanted = Wire.of(d), None, {}
    for transform in transforms:
        if isinstance(transform, ErrorFeedback):
            memory = Memory(update, selection, residual or {})
            d = wanted = {key: t + memory.part[key] * rows.get(key, 1.0) for key, t in d.items()}
        place = f"updates.transforms: {transform.name}"
        changed = ask(f"{place}, change", partial(transform.change, d, generator))
        _check(transform, changed, d)
        wire, d = ask(f"{place}, wire", partial(transform.wire, d, changed, wire)), changed
    if memory is not None:
        left = {
            key: torch.where(rows.get(key, torch.ones(())) > 0, wanted[key] - d[key], memory.part[key]) for key in d
        }
        residual = memory.after(left)
    change, size = {key: t * rows.get(key, 1.0) for key, t in d.items()}, wire.nbytes
    if protection.clip is not None:
        update.metrics["within_norm"] = float(norm([change]) <= protection.clip)
        change = Clip(norm=protection.clip).change(change, generator)
        update.weight, update.row_weights = 1.0, {}
    if protection.secure is not None:
        change, update.metrics["overflows"] = protection.secure.encoded(change)
        elements = sum(t.numel() for t in (*change.values(), *update.row_weights.values()))
        size = protection.secure.bytes_up(elements, protection.group)
    for key, (params, name, _) in answers.items():
        if protection.clip is not None:
            params[name] = change[key]
            continue
        found = start[key] + change[key]
        params[name] = (found.clamp_min(0.0) if name.endswith(VARIANCE) else found) * weight[key]
    return size, residual


def _check(transform: Transform, changed: Params, d: Params) -> None:
    """Raise a ConfigError if a transform's answer has other names, shapes or types than the change."""
    given, allowed = (
        {key: f"a tensor {list(t.shape)} of {t.dtype}" for key, t in tensors.items() if isinstance(t, torch.Tensor)}
        for tensors in (changed if isinstance(changed, Mapping) else {}, d)
    )
    for key in sorted(given.keys() | allowed.keys()):
        if given.get(key) != allowed.get(key):
            raise ConfigError(
                f"updates.transforms: {transform.name} returned {given.get(key, 'nothing')} for {key}. Allowed: "
                f"{allowed.get(key, 'nothing')}"
            )


class Memory:
    """A client's residual, cut to one update. Parts of the model that the client does not hold now keep their
    residual."""

    def __init__(self, update: Update, selection: Selection, residual: ClientState):
        self.update, self.selection, self.residual = update, selection, residual
        self.part: Params = {}
        """"group/name" -> residual in the shape of the update's tensor."""
        for group, params in (update.sums | update.whole).items():
            before = cast(Params, residual.get(group, {}))
            known = {name: t for name, t in before.items() if name in params}
            cut = selection.take(known) if group in update.sums else known
            self.part |= {f"{group}/{name}": cut.get(name, torch.zeros_like(t)) for name, t in params.items()}

    def after(self, left: Params) -> ClientState:
        """Return the next residual, in the server's shapes, from that of this update's elements."""
        groups = {group: cast(Params, t) for group, t in self.residual.items()}
        for group, params in (self.update.sums | self.update.whole).items():
            new = {name: left[f"{group}/{name}"] for name in params}
            if group in self.update.sums:
                # before - S^T S before is exactly 0 in the selected coordinates
                whole = self.selection.spread(new)
                for name, t in whole.items():
                    if (old := groups.get(group, {}).get(name)) is not None:
                        rest = old.clone()
                        self.selection.put({name: self.part[f"{group}/{name}"]}, {name: rest}, alpha=-1.0)
                        whole[name] = rest + t
                new = whole
            groups[group] = groups.get(group, {}) | new
        return groups
