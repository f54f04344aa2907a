"""What networks have that nobody trains: read once where a run starts, sent to every node once, kept once a process.

The server's process reads it (`Model.frozen`), and workers are given it before they build a network (`keep`). All
processes of a node see the same memory.
"""

from collections.abc import Hashable, Iterable, Mapping

import torch

from rayfl.core.net import Family, cached_module
from rayfl.core.tensors import Params

_KEPT: dict[Hashable, Params] = {}
"""Of the run that this process works on, by the models' keys."""


def tensors_of(model: Family) -> Params:
    """By name. Read only, because it may be memory that processes share."""
    if model.frozen_key not in _KEPT:
        keep({model.frozen_key: model.frozen()})
    return _KEPT[model.frozen_key]


def all_of(models: Iterable[Family]) -> dict[Hashable, Params]:
    """Those of all models that have some, by their keys."""
    return {model.frozen_key: found for model in models if (found := tensors_of(model))}


def keep(tensors: Mapping[Hashable, Params]) -> None:
    """From now on these are the models'. Networks that were built on others are forgotten."""
    if not (_same(tensors) if tensors.keys() <= _KEPT.keys() else not _KEPT):
        cached_module.cache_clear()
        _KEPT.clear()
    _KEPT.update(tensors)


def _same(tensors: Mapping[Hashable, Params]) -> bool:
    pairs = [(_KEPT[key], found) for key, found in tensors.items()]
    return all(a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items()) for a, b in pairs)
