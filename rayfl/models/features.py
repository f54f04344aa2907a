"""Features of a network, the input of its classifier, for methods that compare or combine them.

>>> from rayfl.models import MODELS
>>> net = Net(MODELS["digits_cnn"](input=(1, 8, 8)))
>>> classifier_path(net), feature_size(net)
('head', 128)
>>> module = net.build()
>>> with tapped(module, classifier_path(net)) as tap:
...     logits = module(torch.zeros(5, 1, 8, 8))
>>> tap.features.shape, bool((module.head(tap.features) == logits).all())
(torch.Size([5, 128]), True)
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rayfl.core.net import Net
from rayfl.core.tensors import Params


class Tap:
    """Last input of a layer."""

    def __init__(self):
        self._given: torch.Tensor | None = None

    @property
    def features(self) -> torch.Tensor:
        """[B, D]; gradients flow through it."""
        if self._given is None:
            raise ValueError("features: the module has not been called within `tapped`")
        return self._given

    def _hook(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._given = inputs[0]


@contextmanager
def tapped(module: nn.Module, layer: str) -> Iterator[Tap]:
    """Record the input of the layer at a path for calls of the module within the block. Replayed CUDA graphs call no
    layers and are not recorded."""
    tap = Tap()
    handle = module.get_submodule(layer).register_forward_pre_hook(tap._hook)
    try:
        yield tap
    finally:
        handle.remove()


def feature_size(net: Net) -> int:
    """Return D, the number of features that the classifier reads. Raise ValueError like `classifier_path`."""
    return _classifier(net)[1]


def classifier_path(net: Net) -> str:
    """Return the path of the only linear layer from features [B, D] to logits [B, C]. Raise ValueError if there is no
    such layer."""
    return _classifier(net)[0]


@functools.lru_cache(maxsize=512)
def _classifier(net: Net) -> tuple[str, int]:
    """Return the path and number of inputs of the classifier."""
    if net.exits:
        raise _none(net, f"answers at {net.exits} exits")
    paths = {name.rpartition(".")[0] for name in net.layout.classifier}
    if len(paths) != 1:
        raise _none(net, f"has {len(paths)} layers with one row per class")
    [path], module = paths, net.blank()
    layer = module.get_submodule(path)
    if not isinstance(layer, nn.Linear):
        raise _none(net, f"has a {type(layer).__name__} with one row per class, {path!r}")
    with torch.no_grad(), tapped(module.eval(), path) as tap:
        module(net.model.example(1, "meta"))
    if tap.features.dim() != 2:
        raise _none(net, "answers for every token")
    return path, layer.in_features


def classifier_of(params: Params, net: Net) -> Params:
    """Return the parameters of the classifier: "weight" [C, D], and "bias" [C] if it has one."""
    path = classifier_path(net)
    return {name.removeprefix(f"{path}."): params[name] for name in net.layout.classifier}


def with_classifier(params: Params, net: Net, shared: Params) -> Params:
    """Return parameters of a network with another classifier, as of `classifier_of`."""
    path = classifier_path(net)
    return params | {f"{path}.{name}": t.clone() for name, t in shared.items()}


def _none(net: Net, why: str) -> ValueError:
    return ValueError(
        f"model: {net.model.name} {why}. Allowed with methods that need features: a network with one linear "
        "classifier of whole samples"
    )
