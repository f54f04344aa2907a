"""Strided 1x1 convolutions of few channels are those of torch, and their gradients do not end the process."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from rayfl.core.convolutions import safe
from rayfl.core.net import Net
from rayfl.models import MODELS_KIND

PROGRAM = """
import torch
from rayfl.core.net import Net
from rayfl.models import MODELS_KIND

torch.set_num_threads(1)
model = MODELS_KIND.read({"name": "resnet8", "channels": 4, "input": [1, 8, 8], "classes": 4}, "model")
module = Net(model).build()
for _ in range(100):
    x = torch.rand(8, 1, 8, 8).to(memory_format=torch.channels_last)
    module(x.as_strided((8, 1, 8, 8), (64, 1, 8, 1))).square().sum().backward()
"""


@pytest.mark.parametrize("stride", [(2, 2), (1, 3), (3, 1)])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"padding": "valid"}])
def test_outputs_and_gradients_are_those_of_torch(stride, options):
    torch.manual_seed(0)
    for channels in (1, 4, 7, 8, 12):
        layer = nn.Conv2d(channels, 6, 1, stride=stride, **options).double()
        changed = safe(nn.Sequential(nn.Conv2d(channels, 6, 1, stride=stride, **options).double()))
        changed[0].load_state_dict(layer.state_dict())
        assert (type(changed[0]) is nn.Conv2d) == (channels >= 8)
        x = torch.randn(2, channels, 7, 8, dtype=torch.float64)
        results = []
        # in the default layout torch's gradient is right
        for module in (layer, changed):
            given = x.clone().requires_grad_()
            y = module(given)
            y.square().sum().backward()
            results.append([y, given.grad, *(parameter.grad for parameter in module.parameters())])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_other_convolutions_stay():
    others = [
        nn.Conv2d(4, 4, 1),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Conv2d(4, 4, 1, stride=2, padding=1),
        nn.Conv2d(4, 4, 1, stride=2, groups=2),
        nn.Conv2d(8, 4, 1, stride=2),
    ]
    safe(nn.ModuleList(others))
    assert {type(layer) for layer in others} == {nn.Conv2d}


def test_shortcuts_of_narrow_networks_are_changed():
    model = MODELS_KIND.read({"name": "resnet8", "channels": 16}, "model")
    for width, kinds in ((1.0, {"Conv2d"}), (0.25, {"Conv2d", "_Conv2d"})):
        layers = [part for part in Net(model, width).build().modules() if isinstance(part, nn.Conv2d)]
        assert {type(part).__name__ for part in layers} == kinds


@pytest.mark.slow
def test_narrow_networks_train_with_avx2():
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
