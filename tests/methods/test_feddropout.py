"""Federated Dropout: subsets, alignment at residual additions, and the authors' misaligned variant."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from helpers import bound, client_data, message, one_round, run, simulate, tiny
from torch import nn

from rayfl.core.axes import Axis, layer_norm, linear
from rayfl.core.net import Net
from rayfl.core.seeds import torch_generator
from rayfl.core.submodel import Picks, Window, random_subset, untied
from rayfl.methods import METHODS, Client, Task
from rayfl.models import MODELS, ImageModel
from rayfl.testing.tiny import model_of
from rayfl.training.settings import Training

FedDropout = METHODS["feddropout"]


def drawn(method, round=0, client=0, capacity=0.4, seed=0, axis="hidden0"):
    method = method.bind(replace(method.task, seed=seed))
    return method.select({}, Client(client, capacity, round)).positions[axis].positions


def test_every_client_and_round_draws_a_new_subset():
    """Exact sizes; equal draws for equal addresses, different draws for others (2.3 billion subsets)."""
    method = bound(FedDropout(), 1.0, 0.4, 0.1, hidden=(35, 35))
    first = drawn(method)
    assert len(set(first)) == len(first) == 14 and list(first) == sorted(first)
    assert len(drawn(method, capacity=0.1)) == 4
    assert drawn(method) == first
    others = [drawn(method, round=1), drawn(method, client=1), drawn(method, seed=1), drawn(method, axis="hidden1")]
    assert len({first, *others}) == 5


def test_draw_per_round_is_shared_by_clients_of_a_capacity():
    method = bound(FedDropout(draw="round"), 1.0, 0.4, 0.1, hidden=(35,))
    draws = {(r, c): {drawn(method, r, client, c) for client in range(5)} for r in range(2) for c in (0.4, 0.1)}
    assert all(len(found) == 1 for found in draws.values())
    assert len(set.union(*draws.values())) == 4


def test_a_client_of_full_capacity_holds_views():
    for tie in (True, False):
        method = bound(FedDropout(tie_residual=tie), 1.0, 0.4, hidden=(35,))
        state = method.init()
        taken = method.select(state, Client(0, 1.0, 3)).take(state["params"])
        assert all(t.data_ptr() == state["params"][name].data_ptr() for name, t in taken.items())


def test_a_round_of_two_capacities(clients_answer):
    """The large client holds all 4 nodes and returns 3; the small one holds two of them and returns 1."""
    method = bound(FedDropout(label_rows="all"), 1.0, 0.5, hidden=(4,))
    clients_answer(3, 1)
    data = client_data(0, 1, 2, 3)
    new = one_round(method, method.init(), (1.0, data), (0.5, data))["params"]
    small = drawn(method, client=1, capacity=0.5)
    assert new["hidden0.bias"].tolist() == [2 if node in small else 3 for node in range(4)]
    assert new["head.bias"].tolist() == [2] * 4


# alignment at residual additions


def on(name, **fields):
    model = MODELS[name]()
    task = Task(model, Training(), {1.0: Net(model), 0.25: Net(model, 0.25)}, 1.0, clients=1)
    return FedDropout(**fields).bind(task)


def additions(method) -> dict[str, tuple[list, list]]:
    """Return block -> the server's channels that the residual branch and the skip add, for a client at 0.25."""
    shapes = method.task.server.layout.shapes
    channel = {n: torch.arange(s[0]).view(-1, *[1] * (len(s) - 1)).expand(s).clone() for n, s in shapes.items()}
    taken = method.select({}, Client(3, 0.25, 7)).take(channel)
    stream, found = taken["conv.weight"][:, 0, 0, 0].tolist(), {}
    for name in [n for n in taken if n.endswith("conv2.weight")]:
        block = name.partition(".residual")[0]
        skip = taken.get(f"{block}.projection.conv.weight")
        skip = stream if skip is None else skip[:, 0, 0, 0].tolist()
        stream = taken[name][:, 0, 0, 0].tolist()
        found[block] = stream, skip
    return found


RESNETS = ["preact_resnet18", "resnet18"]


@pytest.mark.parametrize("name", RESNETS)
def test_the_operands_of_every_addition_are_the_same_channels(name):
    found = additions(on(name))
    assert len(found) == 8
    assert [block for block, (residual, skip) in found.items() if residual != skip] == []


@pytest.mark.parametrize("name", RESNETS)
def test_untied_identity_skips_are_misaligned_and_projections_are_not(name):
    """As in the authors' code. Two unordered draws from K channels agree in one position of K."""
    found = additions(on(name, tie_residual=False))
    same = [block for block, (residual, skip) in found.items() if residual == skip]
    assert same == ["stage2.0", "stage3.0", "stage4.0"]
    agree = [r == s for block, (rs, ss) in found.items() if block not in same for r, s in zip(rs, ss, strict=True)]
    assert sum(agree) / len(agree) < 0.015


def test_untied_layers_are_those_of_convolutions_and_linear_layers():
    """GPT-2's weights are [in, out]; output layers of language models are embeddings; an LSTM adds two layers."""
    for sections in (
        {"data": "synthetic_text", "partition": "iid", "model": model_of("gpt2")},
        {"data": {"name": "synthetic_text", "task": "masked_lm"}, "partition": "iid", "model": "heterofl_transformer"},
    ):
        said = message(tiny, method={"name": "feddropout", "tie_residual": False}, **sections)
        assert "method.tie_residual: false is not valid. Allowed: true, because model" in said


@pytest.mark.parametrize("name", [*RESNETS, "heterofl_cnn", "lenet5_caffe", "digits_cnn", "liang_cnn"])
def test_untied_layers_read_the_outputs_of_the_layers_before(name):
    """In the order of the parameters, except projections; also norms and biases. Shapes do not change."""
    whole = Net(MODELS[name]()).layout
    renamed = untied(whole)
    assert renamed.shapes == whole.shapes
    last, versions = None, set()
    for parameter, dims in renamed.dims.items():
        assert [a and a.length for a in dims] == [a and a.length for a in whole.dims[parameter]]
        if len(dims) == 1:
            assert dims[0].name == last
        elif "projection" in parameter:
            assert dims[0].name == last
        else:
            assert last is None or dims[1].name == last
            last = dims[0].name
            assert last not in versions
            versions.add(last)


def test_untied_axes_without_additions_keep_their_draws():
    for name in ("heterofl_cnn", "lenet5_caffe", "liang_mlp"):
        whole = Net(MODELS[name]()).layout
        assert len(untied(whole).axes) == len(whole.axes)


@pytest.mark.parametrize("tie", [True, False])
def test_rounds_of_a_residual_network(tie, tmp_path):
    model = {"name": "preact_resnet18"}
    spec = tiny(model=model, data={"shape": [1, 8, 8]}, method={"name": "feddropout", "tie_residual": tie})
    simulation = simulate(spec, tmp_path)
    lines = run(simulation)
    assert all(0 < line["train_loss"] < 10 and line["refused"] == 0 for line in lines)
    params = simulation.method.deploy(simulation.state, 2, 0.2).params
    assert {n: tuple(t.shape) for n, t in params.items()} == simulation.method.task.nets[0.2].layout.shapes


# attention


class Attention(ImageModel):
    """A transformer layer with 3 heads of 4 positions: Q and K share one axis, V and the input of O another."""

    name: Literal["attention"] = "attention"

    def build(self, net):
        width, qk, vo = net.axis("width", 8), net.axis("qk", 4, groups=3), net.axis("vo", 4, groups=3)
        layers = {
            "embed": linear(Axis.fixed("tokens", 5), width),
            "q": linear(width, qk),
            "k": linear(width, qk),
            "v": linear(width, vo),
            "o": linear(vo, width),
            "norm": layer_norm(width),
        }
        return nn.ModuleDict(layers)


def rows(net: Net) -> dict[str, torch.Tensor]:
    """Return tensors whose elements are their row numbers."""
    shapes = net.layout.shapes
    return {n: torch.arange(s[0]).view(-1, *[1] * (len(s) - 1)).expand(s).clone() for n, s in shapes.items()}


@pytest.mark.parametrize("tie", [True, False])
def test_heads_are_drawn_inside_each_head(tie):
    """Head j of a client holds positions of the server's head j, the same in each."""
    wide, narrow = (Net(Attention(), width) for width in (1.0, 0.5))
    columns = {"o.weight": torch.arange(12).expand(8, 12).clone()}
    apart = 0
    for seed in range(10):
        selection = random_subset(wide, narrow, torch_generator(seed, "subset"), ordered=tie, tied=tie)
        taken = selection.take(rows(wide))
        heads = {n: taken[f"{n}.weight"][:, 0].view(3, 2) for n in "qkv"}
        for held in heads.values():
            assert (held // 4).tolist() == [[0, 0], [1, 1], [2, 2]]
            assert (held % 4 == held[0]).all()
        assert torch.equal(heads["q"], heads["k"])
        assert torch.equal(heads["v"].flatten(), selection.take(columns)["o.weight"][0])
        apart += not torch.equal(heads["q"], heads["v"])
        stream = [taken[n].flatten().tolist() for n in ("embed.bias", "o.bias", "norm.weight")]
        assert stream[1] == stream[2] and (stream[0] == stream[1]) == tie
    assert apart > 0


def test_a_vision_transformers_block_draws_once():
    """Queries, keys, values and the columns of the output layer hold the same positions of every head (departure 4);
    other blocks differ."""
    model = MODELS["vit_b_16"](input=(3, 8, 8), layers=2, heads=3, head_width=8, patch=4)
    task = Task(model, Training(), {1.0: Net(model), 0.5: Net(model, 0.5)}, 1.0, clients=1)
    selection = FedDropout().bind(task).select({}, Client(0, 0.5, 0))
    taken = selection.take(rows(task.server))
    blocks = []
    for i in (0, 1):
        path = f"encoder.{i}.attention.attend"
        heads = [taken[f"{path}.{part}.linear.weight"][:, 0].view(3, 4) for part in "qkv"]
        columns = torch.arange(24).expand(24, 24).clone()
        heads.append(selection.take({f"{path}.out.linear.weight": columns})[f"{path}.out.linear.weight"][0].view(3, 4))
        assert all(torch.equal(held, heads[0]) for held in heads)
        assert (heads[0] // 8 == torch.arange(3)[:, None]).all() and (heads[0] % 8 == heads[0][0]).all()
        blocks.append(heads[0])
    assert not torch.equal(*blocks)


# after a round


def test_a_device_runs_a_subset_of_the_last_round():
    method = bound(FedDropout(), 1.0, 0.4, hidden=(35,))
    windows = [method.submodel({}, round, 0.4) for round in (0, 1, 2, 3)]
    assert windows[0].key == windows[1].key and len({w.key for w in windows}) == 3
    state = method.init()
    deployed = method.deploy(state, 3, 0.4)
    picked = list(windows[3].positions["hidden0"].positions)
    assert torch.equal(deployed.params["hidden0.bias"], state["params"]["hidden0.bias"][picked])
    shared = bound(FedDropout(draw="round"), 1.0, 0.4, hidden=(35,))
    shared = shared.bind(replace(shared.task, seed=7))
    assert shared.submodel({}, 5, 0.4).key == shared.select({}, Client(0, 0.4, 4)).key


def test_deploys_prefix():
    method = bound(FedDropout(deploys="prefix", tie_residual=False), 1.0, 0.4, hidden=(35,))
    assert all(method.submodel({}, r, 0.4).positions["hidden0"] == Window(0, 14, 35) for r in (0, 1, 5))


def test_whole_axes_are_not_drawn():
    """0.6 of 2 nodes are 2, and 0.6 of 3 nodes are 2."""
    method = bound(FedDropout(), 1.0, 0.6, hidden=(2, 3))
    positions = method.select({}, Client(0, 0.6, 0)).positions
    assert positions["hidden0"] == Window(0, 2, 2)
    assert isinstance(positions["hidden1"], Picks) and positions["hidden1"].count == 2
