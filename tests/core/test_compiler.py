"""Torch's compiler is not imported where nothing is compiled, and works where something is."""

import subprocess
import sys

PROGRAM = """
import sys, torch
from rayfl.core.compiler import without_compiler
from rayfl.core.net import Net
from rayfl.models import MODELS_KIND
from rayfl.training.settings import Training
from rayfl.training.steps import fit

net = Net(MODELS_KIND.read("digits_cnn", "model"))
found = [net.macs]
for optimizer in ("sgd", "adam"):
    training = Training(optimizer=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0)
    fit(net.build(), [(torch.zeros(2, *net.model.input), torch.tensor([0, 1]))], lambda y, _: y.sum(), training, 0.1)
assert not [name for name in sys.modules if name.startswith("torch._dynamo")], "imported"

double = torch.compile(lambda x: 2 * x, backend="eager")
assert double(torch.ones(1)).item() == 2
import torch._dynamo
with without_compiler:
    assert sys.modules["torch._dynamo"] is torch._dynamo
assert sys.modules["torch._dynamo"] is torch._dynamo and callable(torch._dynamo.optimize)
print(*found)
"""


def test_the_compiler_is_imported_only_when_used():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "347392\n"), done.stderr
