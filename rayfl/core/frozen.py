"""Frozen tensors of models: read once per run, sent once per node, cached once per process.

The process of the server reads them (`Model.frozen`); workers receive them before they build a network (`keep`). All
processes of a node share the memory.
"""

from collections.abc import Hashable, Iterable, Mapping

from rayfl.core.net import Family, Net, cached_module
from rayfl.core.tensors import Params

_KEPT: dict[Hashable, Params] = {}
"""Frozen tensors of the current run, by `Family.frozen_key`."""


def tensors_of(model: Family) -> Params:
    """Return the frozen tensors of a model by name. Read only, because processes can share the memory."""
    if model.frozen_key not in _KEPT:
        keep({model.frozen_key: model.frozen()})
    return _KEPT[model.frozen_key]


def all_of(nets: Iterable[Net]) -> dict[Hashable, Params]:
    """Return the frozen tensors of all networks' models that have any, by `Family.frozen_key`, and keep them."""
    models = dict.fromkeys(net.model for net in nets)
    tensors = {model.frozen_key: found for model in models if (found := tensors_of(model))}
    keep(tensors)
    return tensors


def forget() -> None:
    """Free the frozen tensors, which are read again when they are needed."""
    cached_module.cache_clear()
    _KEPT.clear()


def keep(tensors: Mapping[Hashable, Params]) -> None:
    """Store the frozen tensors of a run. If they replace others, the cached modules, which have those, are cleared."""
    if all(_KEPT.get(key) is found for key, found in tensors.items()):
        return
    forget()
    _KEPT.update(tensors)
