"""Networks for tables and series: against torch's own, narrow ones against slices of wide ones, counts by hand."""

import pytest
import torch
from helpers import message, simulate, tiny
from torch import nn

from rayfl.core.net import Net, load
from rayfl.core.seeds import torch_scope
from rayfl.core.submodel import prefix
from rayfl.data import InMemory
from rayfl.models.variables import LSTM, MLP, Conv1D


def test_an_lstm_is_torchs():
    """With the same weights; torch's second bias is 0."""
    model = LSTM(series=(3, 9), classes=2, hidden=(7, 5))
    with torch_scope(0):
        module = Net(model).build()
        x = torch.randn(4, 3, 9)
    states = x.transpose(1, 2)
    for name, units, inputs in (("lstm1", 7, 3), ("lstm2", 5, 7)):
        theirs, own = nn.LSTM(inputs, units, batch_first=True), module.get_submodule(name)
        with torch.no_grad():
            theirs.weight_ih_l0.copy_(own.inputs.weight)
            theirs.weight_hh_l0.copy_(own.states.weight)
            theirs.bias_ih_l0.copy_(own.inputs.bias)
            theirs.bias_hh_l0.zero_()
        states, _ = theirs(states)
    expected = module.get_submodule("head")(states[:, -1])
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-6)


def test_an_lstm_starts_as_torchs():
    """Uniformly up to the inverse root of the units, for all weights."""
    module = Net(LSTM(series=(1, 9), classes=2, hidden=(64,))).build()
    for weights in module.get_submodule("lstm1").parameters():
        assert 0.11 < weights.abs().max() <= 1 / 8


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        (MLP(variables=3, classes=2, hidden=(8, 6)), 0.5),
        (Conv1D(series=(3, 16), classes=2, channels=(8, 6), norm="none"), 0.5),
        (LSTM(series=(3, 9), classes=2, hidden=(8, 6)), 0.5),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_narrow_network_is_the_wide_one_without_its_other_units(model, kept):
    """Units that are cut have no influence once all their outgoing weights are 0."""
    wide, narrow = Net(model), Net(model, width=kept)
    selection = prefix(wide, narrow)
    with torch_scope(1):
        params = wide.initial()
        x = torch.randn(*model.example(5, "cpu").shape)
    cover = selection.cover(params)
    whole, part = wide.build(), narrow.build()
    load(whole, {name: t * cover[name] for name, t in params.items()})
    load(part, selection.take(params))
    with torch.no_grad():
        torch.testing.assert_close(part.eval()(x), whole.eval()(x), rtol=1e-5, atol=1e-6)


def test_counts_by_hand():
    mlp = Net(MLP(variables=10, classes=3, hidden=(20, 5)))
    assert mlp.macs == 10 * 20 + 20 * 5 + 5 * 3 and mlp.parameters == mlp.macs + 20 + 5 + 3
    # the second convolution sees half of the steps
    conv = Net(Conv1D(series=(2, 16), classes=3, channels=(4, 6), kernel=3, norm="none"))
    assert conv.macs == 16 * 4 * 2 * 3 + 8 * 6 * 4 * 3 + 6 * 3
    assert conv.operations("flops2") == 2 * conv.macs + 16 * 4 + 8 * 6 + 3 + (16 * 4 + 8 * 6 + 4 * 6) + (8 * 4 + 4 * 6)
    # four gates, every step
    lstm = Net(LSTM(series=(2, 16), classes=3, hidden=(5,)))
    assert lstm.macs == 16 * 4 * 5 * (2 + 5) + 5 * 3 and lstm.parameters == 4 * 5 * (2 + 5 + 1) + 5 * 3 + 3


def test_every_gate_keeps_the_same_units():
    net = Net(LSTM(series=(1, 4), hidden=(4,)))
    whole = {name: torch.arange(t.numel(), dtype=torch.float32).view(t.shape) for name, t in net.initial().items()}
    part = prefix(net, Net(net.model, width=0.5)).take(whole)
    assert part["lstm1.inputs.bias"].tolist() == [0, 1, 4, 5, 8, 9, 12, 13]
    assert part["lstm1.states.weight"].shape == (8, 2) and part["head.weight"].shape == (2, 2)


def test_samples_that_do_not_fit():
    assert message(lambda: tiny(model="mlp")) == (
        "test: model: mlp takes tables. Allowed: one of images, which data set synthetic has"
    )
    series = {"data": {"shape": [2, 3]}, "partition": "iid"}
    assert message(lambda: tiny(**series, model="digits_cnn")) == (
        "test: model: digits_cnn takes images. Allowed: one of series, which data set synthetic has"
    )
    assert message(lambda: tiny(**series, model="conv1d")) == (
        "test: model conv1d: 2 layers with kernel 5 do not fit series of 3 steps. Allowed: at least 4 steps and an odd "
        "kernel"
    )


def test_an_lstm_learns_from_the_past(tmp_path):
    """The class is the sign of the first step, which is 7 steps before the last one."""
    with torch_scope(0):
        x = torch.randn(400, 1, 8)
    data = InMemory(x, (x[:, 0, 0] > 0).int())
    training = {"lr": 0.02, "optimizer": "adam", "epochs": 8, "steps": None, "batch_size": 20}
    clients = {"count": 4, "cohort": 4, "capacities": [1.0, 0.5]}
    given = {"data": data, "model": {"name": "lstm", "hidden": [24]}, "partition": "iid", "clients": clients}
    simulation = simulate(tiny(**given, training=training, rounds=8, method="heterofl"), tmp_path)
    lines = [simulation.run_round() for _ in range(8)]
    assert lines[-1]["accuracy_1"] > 0.9
