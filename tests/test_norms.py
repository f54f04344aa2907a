"""Static batch norm: what is collected, how it adds, and when it is used."""

import pytest
import torch
from torch import nn

from rayfl import norms
from rayfl.axes import Net
from rayfl.models import MODELS
from rayfl.norms import StaticBatchNorm, collect, finish, fresh, static_norms, tracked
from rayfl.seeds import torch_generator, torch_scope


def drawn(*shape, purpose="x"):
    return torch.randn(*shape, generator=torch_generator(0, purpose))


def network(name="digits_cnn", **fields):
    model = MODELS[name](**fields)
    with torch_scope(0):
        return model.build(Net(0.25, scale=0.5)), drawn(24, *model.input)


def inputs_of(net, path, x):
    """What the norm at `path` sees in one pass over `x`, in evaluation with the batch's statistics."""
    seen = []
    handle = dict(net.named_modules())[path].register_forward_hook(lambda m, i, o: seen.append(i[0]))
    norms.load(net, {})
    net.eval()(x)
    handle.remove()
    return seen[0].detach().double()


def check_statistics(statistics, path, seen):
    mean = seen.mean((0, 2, 3)).float()
    var = seen.var((0, 2, 3), correction=0).float()
    torch.testing.assert_close(statistics[f"{path}.running_mean"], mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(statistics[f"{path}.running_var"], var, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["digits_cnn", "heterofl_cnn"])
def test_exact_is_the_full_batch_in_every_layer_for_one_batch(name):
    net, x = network(name)
    statistics = finish(collect(net, [x]), "exact")
    assert len(statistics) == 2 * len(static_norms(net))
    for path in static_norms(net):
        check_statistics(statistics, path, inputs_of(net, path, x))


@pytest.mark.parametrize("sizes", [[24], [8, 8, 8], [1, 20, 3]])
def test_exact_is_the_full_batch_in_the_first_layer_for_any_batches(sizes):
    net, x = network()
    statistics = finish(collect(net, x.split(sizes)), "exact")
    check_statistics(statistics, "norm1", inputs_of(net, "norm1", x))


def test_the_first_norm_of_a_preactivation_network_sees_what_is_not_scaled():
    """Collecting is evaluation: the Scaler in front of the norm is the identity."""
    net, x = network("preact_resnet18", input=(3, 8, 8))
    path = "stage1.0.activate.norm"
    statistics = finish(collect(net, [x]), "exact")
    check_statistics(statistics, path, net.conv(x).detach().double())


@pytest.mark.parametrize("kind", ["exact", "cumulative"])
def test_sums_of_clients_add(kind):
    net, x = network()
    first, second = collect(net, x[:10].split(5)), collect(net, x[10:].split(7))
    both = collect(net, [*x[:10].split(5), *x[10:].split(7)])
    added = finish({path: first[path] + second[path] for path in first}, kind)
    for name, t in finish(both, kind).items():
        torch.testing.assert_close(added[name], t)


def test_cumulative_is_the_mean_of_batch_means_and_of_unbiased_batch_variances():
    layer = StaticBatchNorm(1)
    batches = [torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [1.0], [4.0]])]
    sums = collect(nn.Sequential(layer), batches)
    assert sums["0"].flatten().tolist() == pytest.approx([5, 8, 22, 2, 1 + 2, 2 + 3])
    assert finish(sums, "cumulative") == {
        "0.running_mean": torch.tensor([1.5]),
        "0.running_var": torch.tensor([2.5]),
    }
    exact = finish(sums, "exact")
    assert exact["0.running_mean"].item() == pytest.approx(1.6)
    assert exact["0.running_var"].item() == pytest.approx(22 / 5 - 1.6**2)


def test_evaluation_uses_what_was_loaded_until_it_is_reset():
    net, x = network()
    by_batch = net.eval()(x[:4])
    statistics = finish(collect(net, [x]), "exact")
    norms.load(net, statistics)
    loaded = net.eval()(x[:4])
    assert not torch.allclose(loaded, by_batch)
    # with statistics an image's logits do not depend on the others of its batch
    torch.testing.assert_close(net(x[:1]), loaded[:1])
    # on the calibration batch itself they are the batch's own
    norms.load(net, {})
    own = net(x)
    norms.load(net, statistics)
    torch.testing.assert_close(net(x), own, atol=1e-5, rtol=1e-4)
    norms.load(net, {})
    assert torch.equal(net(x[:4]), by_batch)


def test_training_uses_the_batch_whatever_is_loaded():
    net, x = network()
    net.train()
    before = net(x)
    norms.load(net, finish(collect(net, [x * 3]), "exact"))
    assert torch.equal(net.train()(x), before)


def test_collecting_ignores_what_was_loaded_and_leaves_it():
    net, x = network()
    fresh = collect(net, [x])
    norms.load(net, finish(collect(net, [x * 3]), "exact"))
    again = collect(net, [x])
    assert all(torch.equal(again[path], fresh[path]) for path in fresh)
    assert all(module.running_mean is not None for module in static_norms(net).values())
    assert all(module.sums is None for module in static_norms(net).values())


def test_only_weight_and_bias_are_parameters_and_nothing_is_a_saved_buffer():
    layer = StaticBatchNorm(3)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_it_normalises_by_the_batch():
    layer, x = StaticBatchNorm(3), drawn(5, 3, 4, 4) * 2 + 7
    y = layer(x)
    torch.testing.assert_close(y.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(y.var((0, 2, 3), correction=0), torch.ones(3), atol=1e-4, rtol=0)


def test_a_single_value_a_channel_is_normalised_to_the_bias():
    layer = StaticBatchNorm(3)
    nn.init.constant_(layer.bias, 0.25)
    y = layer(drawn(1, 3, 1, 1))
    torch.testing.assert_close(y, torch.full_like(y, 0.25), atol=1e-3, rtol=0)


def test_tracked_statistics_are_those_of_torch():
    """To the bit, in every layer, over batches of several sizes; and the outputs are those without."""
    net, x = network()
    twin, _ = network()
    for path in static_norms(twin):
        twin.set_submodule(path, nn.BatchNorm2d(static_norms(net)[path].weight.numel()))
    statistics = fresh(net)
    for batch in x.split([5, 12, 7]):
        without = net.train()(batch)
        with tracked(net, statistics):
            assert torch.equal(net(batch), without)
        twin.train()(batch)
    state = twin.state_dict()
    assert len(statistics) == 2 * len(static_norms(net))
    assert all(torch.equal(t, state[name]) for name, t in statistics.items())


def test_tracking_ends_with_its_block():
    net, x = network()
    statistics = fresh(net)
    with pytest.raises(ArithmeticError), tracked(net, statistics):
        net.train()(x)
        raise ArithmeticError
    before = {name: t.clone() for name, t in statistics.items()}
    with tracked(net, {}):
        net(x)
    assert all(torch.equal(t, before[name]) for name, t in statistics.items())


def test_a_single_value_a_channel_is_not_tracked():
    layer = StaticBatchNorm(3)
    statistics = fresh(layer)
    with tracked(layer, statistics):
        layer(drawn(1, 3, 1, 1))
    assert statistics[".running_mean"].tolist() == [0] * 3 and statistics[".running_var"].tolist() == [1] * 3
