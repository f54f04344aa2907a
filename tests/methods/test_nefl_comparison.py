"""DepthFL and ScaleFL as run by NeFL's authors, against manual computations."""

from dataclasses import replace

import pytest
import torch
from helpers import images, one_round

from rayfl.core.net import Net
from rayfl.core.norms import fresh
from rayfl.methods import METHODS, Task
from rayfl.methods.sizes import Submodel
from rayfl.models import MODELS
from rayfl.training.settings import Training

DepthFLNeFL, ScaleFLNeFL = METHODS["depthfl_nefl"], METHODS["scalefl_nefl"]

TWO = (Submodel(capacity=0.5, width=1, blocks="10 10 10 00"), Submodel(capacity=1, width=1))


def bound(method, *capacities, model=None, **training):
    model = model or MODELS["resnet18"](channels=3, input=(1, 8, 8), classes=4)
    nets = {c: Net(model) for c in sorted(capacities, reverse=True)}
    return method.bind(Task(model, Training(**training), nets, max(capacities), clients=10, metric="params"))


@pytest.mark.parametrize(
    ("name", "smallest", "kept"),
    [("resnet18", "11 00 11 00", 0.2), ("resnet34", "100 0000 100000 100", 0.2), ("resnet56", "9 4 1", 0.1)],
)
def test_published_submodels(name, smallest, kept):
    """Own blocks for ResNet34 and ResNet56, otherwise those of NeFL-D."""
    model = MODELS[name]()
    task = bound(DepthFLNeFL(submodels="published"), 1.0, 0.8, 0.6, 0.4, 0.2, model=model).task
    net = task.nets[0.2]
    groups = ["".join("01"[path not in net.without] for path in stage) for stage in model.blocks]
    if name == "resnet56":
        assert [group.count("1") for group in groups] == [int(n) for n in smallest.split()]
        assert all(group == "".join(sorted(group, reverse=True)) for group in groups)
    else:
        assert " ".join(groups) == smallest
    assert net.parameters / Net(model).parameters > kept
    assert {(net.width, net.steps) for net in task.nets.values()} == {(1.0, False)}


def test_norms_are_averaged_over_all_holders(clients_answer):
    """The small submodel returns 1, the large one 3."""
    method = bound(DepthFLNeFL(submodels=TWO), 1.0, 0.5)
    clients_answer(1, 3)
    new = one_round(method, method.init(), (0.5, images(0)), (1.0, images(1)))["params"]
    assert (new["stage1.0.residual.norm1.weight"] == 2).all()
    assert (new["stage4.0.projection.norm.weight"] == 2).all()
    assert (new["stage1.1.residual.norm1.weight"] == 3).all()
    assert (new["head.weight"] == 2).all()


def test_running_statistics_too():
    """Two clients with the same images: statistics of the shared first layer are either's; those of a block that only
    the large submodel has are its client's alone, and stay if it does not take part."""
    method = bound(DepthFLNeFL(submodels=TWO), 1.0, 0.5, lr=0.1)
    state = method.init()
    assert state.keys() == {"params", "statistics"}
    assert state["statistics"].keys() == fresh(method.task.server.build()).keys()
    small = one_round(method, state, (0.5, images(0, 1, 2)))["statistics"]
    large = one_round(method, state, (1.0, images(0, 1, 2)))["statistics"]
    both = one_round(method, state, (0.5, images(0, 1, 2)), (1.0, images(0, 1, 2)))["statistics"]
    first, exclusive = "norm.running_mean", "stage1.1.residual.norm1.running_mean"
    shared = "stage4.0.projection.norm.running_var"
    torch.testing.assert_close(small[first], large[first])
    assert not torch.equal(small[first], state["statistics"][first])
    assert torch.equal(small[exclusive], state["statistics"][exclusive])
    assert not torch.equal(large[exclusive], small[exclusive])
    torch.testing.assert_close(both[exclusive], large[exclusive])
    torch.testing.assert_close(both[shared], (small[shared] + large[shared]) / 2)


def test_all_deploy_the_same_norms():
    method = bound(DepthFLNeFL(submodels=TWO), 1.0, 0.5, lr=0.1)
    state = one_round(method, method.init(), (0.5, images(0, 1)), (1.0, images(2)))
    small, large = (method.deploy(state, 1, capacity) for capacity in (0.5, 1.0))
    assert small.params.keys() < large.params.keys()
    assert all(torch.equal(t, large.params[name]) for name, t in small.params.items())
    assert torch.equal(small.statistics["norm.running_mean"], large.statistics["norm.running_mean"])


def test_norms_of_narrow_submodels_are_prefixes(clients_answer):
    """ScaleFL as NeFL ran it: the first half of the channels is averaged over both clients, the rest is the large
    one's; running statistics go with their norm's channels."""
    submodels = (Submodel(capacity=0.5, width=0.5, blocks="10 10 10 00"), Submodel(capacity=1, width=1))
    model = MODELS["resnet18"](channels=4, input=(1, 8, 8), classes=4)
    method = bound(ScaleFLNeFL(submodels=submodels), 1.0, 0.5, model=model, lr=0.1)
    state, data = method.init(), images(0, 1, 2)
    small = one_round(method, state, (0.5, data))["statistics"]["norm.running_mean"]
    large = one_round(method, state, (1.0, data))["statistics"]["norm.running_mean"]
    both = one_round(method, state, (0.5, data), (1.0, data))["statistics"]["norm.running_mean"]
    assert torch.equal(small[2:], torch.zeros(2)) and (small[:2] != 0).all()
    torch.testing.assert_close(both, torch.cat([(small[:2] + large[:2]) / 2, large[2:]]))
    deployed = method.deploy({**state, "statistics": {n: t + 1 for n, t in state["statistics"].items()}}, 1, 0.5)
    assert deployed.statistics["stage4.0.projection.norm.running_var"].tolist() == [2.0] * 16
    assert "stage4.0.residual.norm1.running_var" not in deployed.statistics
    clients_answer(1, 3)
    new = one_round(method, state, (0.5, data), (1.0, data))["params"]
    assert new["norm.weight"].tolist() == [2, 2, 3, 3]


def test_scalefl_has_the_submodels_of_nefl_wd():
    model = MODELS["resnet18"]()
    capacities = (1.0, 0.8, 0.6, 0.4, 0.2)
    ours, nefls = (
        bound(method, *capacities, model=model).task.nets
        for method in (ScaleFLNeFL(submodels="published"), METHODS["nefl"](variant="WD", submodels="published"))
    )
    assert ours == {c: replace(net, steps=False) for c, net in nefls.items()}
