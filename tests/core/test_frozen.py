"""Frozen tensors of a process."""

import pytest
import torch
from helpers import model_of

from rayfl.core import frozen
from rayfl.core.net import Net, cached_module


@pytest.fixture
def net():
    frozen.forget()
    yield Net(model_of("lora"))
    frozen.forget()


def test_a_process_gives_its_copy_for_the_nodes(net):
    """Also in the networks that it built before."""
    own, before = frozen.all_of([net]), cached_module(net, torch.device("cpu"))
    nodes = {key: {name: t.clone() for name, t in tensors.items()} for key, tensors in own.items()}
    frozen.keep(nodes)
    [tensors] = nodes.values()
    assert frozen.tensors_of(net.model) is tensors
    module = cached_module(net, torch.device("cpu"))
    assert module is not before
    shared = {t.data_ptr() for t in tensors.values()}
    assert {t.data_ptr() for t in module.buffers()} <= shared and len(shared) > 1
    frozen.keep(nodes)
    assert cached_module(net, torch.device("cpu")) is module


def test_what_was_forgotten_is_read_again(net):
    tensors = frozen.tensors_of(net.model)
    frozen.forget()
    again = frozen.tensors_of(net.model)
    assert again is not tensors and all(torch.equal(t, again[name]) for name, t in tensors.items())
