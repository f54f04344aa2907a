"""FLANC: composed layers, means and the orthogonality by hand, and two rounds against plain torch."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, images, one_round, updated, visit
from independent import batches, experiment, network, tensors, visited
from torch import nn

import rayfl
from rayfl.config import ConfigError
from rayfl.core.axes import Axis, conv, linear
from rayfl.core.net import Net
from rayfl.core.seeds import stream, torch_scope
from rayfl.core.tensors import nbytes
from rayfl.methods import METHODS, Task
from rayfl.methods.width.flanc import Basis, Composed, is_basis
from rayfl.models import MODELS
from rayfl.testing.tiny import model_of, simulate
from rayfl.training.settings import Training

FLANC = METHODS["flanc"]


def bound(*capacities, model=None, training=None, **options):
    model = model or MODELS["mcmahan_cnn"](input=(1, 8, 8), classes=4)
    nets = {c: Net(model, c) for c in sorted(capacities, reverse=True)}
    task = Task(model, Training(**training or {}), nets, max(capacities), clients=10)
    return FLANC(**options).bind(task)


def test_shapes_by_hand():
    """A CNN of 1 -> 32 -> 64 channels, 64 x 4 pixels -> 512 neurons -> 4 classes. The second convolution has 64 / 4
    filters of 32 / 8 inputs, the linear layer 128 filters of 32 inputs; at width 1/2, 16 inputs are 4 groups, and 128
    inputs too."""
    method = bound(1.0, 0.5)
    shapes = {c: net.layout.shapes for c, net in method.task.nets.items()}
    for capacity, (first, second, hidden) in {1.0: (32, 64, 512), 0.5: (16, 32, 256)}.items():
        assert shapes[capacity] == {
            "conv1.weight": (first, 1, 5, 5),
            "conv1.bias": (first,),
            "conv2.basis.weight": (16, 4, 5, 5),
            "conv2.coefficients.weight": (second, 16 * first // 4, 1, 1),
            "conv2.coefficients.bias": (second,),
            "hidden.basis.weight": (128, 32),
            "hidden.coefficients.weight": (hidden, 128 * 4 * second // 32),
            "hidden.coefficients.bias": (hidden,),
            "head.weight": (4, hidden),
            "head.bias": (4,),
        }


def test_multiply_adds_by_hand():
    """The second convolution sees 4 x 4 pixels: 8 groups of 16 filters with 4 x 25 weights, then 64 x 128 weights."""
    net = bound(1.0).task.server
    assert net.layer_macs["conv2.basis"] == 16 * 8 * 16 * 4 * 25
    assert net.layer_macs["conv2.coefficients"] == 16 * 64 * 128
    assert net.layer_macs["hidden.basis"] == 8 * 128 * 32


@pytest.mark.parametrize(
    ("layer", "shape", "applied"),
    [
        (nn.Conv2d(6, 5, 3, stride=2, padding=1), (4, 4), lambda x, v: F.conv2d(x, v, stride=2, padding=1)),
        (nn.Conv1d(6, 5, 3, stride=2, padding=1), (4,), lambda x, v: F.conv1d(x, v, stride=2, padding=1)),
        (nn.Linear(6, 5), (), F.linear),
    ],
    ids=["images", "series", "linear"],
)
@pytest.mark.parametrize("size", [2, 4, 7])
def test_a_basis_is_applied_to_every_group(layer, shape, applied, size):
    """Of 6 inputs, in groups of 2, and of 4 or 7 with zeros after the last."""
    basis, x = Basis(3, size, list(layer.weight.shape[2:]), layer), torch.rand(2, 6, *shape)
    parts = [applied(part, basis.weight[:, : part.shape[1]]) for part in x.split(size, dim=1)]
    torch.testing.assert_close(basis(x), torch.cat(parts, 1))


class Dilated(rayfl.ImageModel):
    name: Literal["dilated"] = "dilated"
    input: tuple[int, int, int] = (1, 8, 8)

    def build(self, net):
        first, second, third = (net.axis(name, 8) for name in ("first", "second", "third"))
        plain, wide = conv(first, second, 3, padding=1), conv(second, third, 3, padding=2)
        wide.dilation = (2, 2)
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(
            conv(Axis.fixed("image", 1), first, 3, padding=1), plain, wide, pool, linear(third, self.labels)
        )


def test_a_dilated_convolution_stays_as_it_is():
    assert Composed(of=Dilated(classes=4), basis=0.25, inputs=0.25).composed == ["1"]


def test_layers_that_are_composed():
    model = MODELS["resnet18"](channels=8, input=(1, 8, 8), classes=4)
    composed = Composed(of=model, basis=0.25, inputs=0.125).composed
    assert len(composed) == 16 and all(".residual.conv" in path for path in composed)


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ConfigError, match="model: lora has no layer that method flanc can compose. Allowed: "):
        bound(1.0, model=model_of("lora"))


def test_bases_start_orthogonal_and_are_shared():
    method = bound(1.0, 0.5)
    state = method.init()
    assert state.keys() == {"params", "width 1", "width 0.5"} and len(state["params"]) == 2
    for v in state["params"].values():
        rows = v.flatten(1)
        gap = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
        torch.testing.assert_close(gap, torch.eye(len(gap)), atol=1e-5, rtol=0)
    for capacity, net in method.task.nets.items():
        deployed = method.deploy(state, 1, capacity)
        assert {n for n in deployed.params if is_basis(n)} == {*state["params"]}
        assert_same({n: t for n, t in deployed.params.items() if is_basis(n)}, state["params"])
        assert deployed.params.keys() == net.layout.shapes.keys()


def test_means_by_hand(clients_answer):
    """Clients of width 1/2 answer 1 and 2, one of width 1 answers 6: bases 3, own parameters 1.5 and 6. Without clients
    of a width, its own parameters are unchanged."""
    method = bound(1.0, 0.5)
    state = method.init()
    clients_answer(1, 2, 6, 5)
    new = one_round(method, state, (0.5, images(0)), (0.5, images(1)), (1.0, images(1)))
    for group, value in (("params", 3.0), ("width 0.5", 1.5), ("width 1", 6.0)):
        assert all((t == value).all() for t in new[group].values())
    newer = one_round(method, new, (1.0, images(1)))
    assert_same(newer["width 0.5"], new["width 0.5"])
    assert all((t == 5).all() for group in ("params", "width 1") for t in newer[group].values())


def test_traffic():
    """A client receives and sends its network, of 4 bytes a number."""
    method = bound(1.0, 0.5, training={"lr": 0.01})
    state = method.init()
    for capacity in (1.0, 0.5):
        size = 4 * method.task.nets[capacity].parameters
        assert nbytes(method.extract(state, visit(method, state, capacity, images(0, 1)).selection)) == size
        update = updated(method, state, capacity, images(0, 1))
        assert nbytes(update.sums) + nbytes(update.whole) == size


def test_the_gradient_of_the_orthogonality():
    method = bound(1.0, orthogonality=3.0)
    module = method.task.server.build()
    expected = {}
    for name, v in module.named_parameters():
        with torch.no_grad():
            v.add_(torch.randn(v.shape, generator=torch.Generator().manual_seed(len(name))), alpha=0.1)
        v.grad = torch.ones_like(v)
        if is_basis(name):
            rows = v.detach().clone().requires_grad_()
            flat = rows.flatten(1)
            (3.0 * F.mse_loss(flat @ flat.T, torch.eye(len(flat)))).backward()
            expected[name] = rows.grad + 1
    method.straighten(module)
    for name, v in module.named_parameters():
        torch.testing.assert_close(v.grad, expected.get(name, torch.ones_like(v)))


@pytest.mark.parametrize("weight", [0.0, 10.0])
def test_two_rounds_are_plain_torch_s(weight, tmp_path, float64):
    """A CNN of two widths; the reference keeps a whole model per width, as the code does."""
    sections = {
        "model": "digits_cnn",
        "clients": {"capacities": [1.0, 0.5]},
        "evaluation": {"every": 9, "statistics": "batch"},
        "rounds": 3,
    }
    simulation = simulate(experiment({"name": "flanc", "orthogonality": weight}, **sections), tmp_path)
    nets = simulation.method.task.nets
    models = {net: simulation.method.deploy(simulation.state, 0, c).params for c, net in nets.items()}
    with torch_scope(stream(simulation.seed, "init", "width 0.5")):
        drawn = {name: t for name, t in nets[0.5].initial().items() if not is_basis(name)}
    assert_same(drawn, {name: models[nets[0.5]][name] for name in drawn})
    trained = set()
    for round in range(2):
        answers = []
        for client in visited(simulation, round):
            trained.add(client.net)
            module = network(client.net, models[client.net] | client.net.statistics()).train()
            for x, y in batches(client.data, client.seed, 2, 5):
                loss = F.cross_entropy(module(x), y)
                for name, v in module.named_parameters():
                    if is_basis(name):
                        rows = v.flatten(1)
                        loss = loss + weight * F.mse_loss(rows @ rows.T, torch.eye(len(rows)))
                module.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for p in module.parameters():
                        p -= 0.05 * p.grad
            answers.append((client.net, {n: t for n, t in tensors(module).items() if n in models[client.net]}))
        for net, params in models.items():
            for name in params:
                found = [of[name] for other, of in answers if other == net or is_basis(name)]
                params[name] = sum(found) / len(found) if found else params[name]
        simulation.train()
        simulation.round += 1
    assert len(trained) == 2
    for capacity, net in nets.items():
        found = simulation.method.deploy(simulation.state, 2, capacity).params
        for name, t in models[net].items():
            assert found[name].dtype == torch.float64
            torch.testing.assert_close(found[name], t, rtol=1e-9, atol=1e-11)
