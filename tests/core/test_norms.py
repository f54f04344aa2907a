"""Static batch norm: collection, sums and use of statistics."""

import pytest
import torch
from torch import nn

from rayfl.core import norms
from rayfl.core.net import Net
from rayfl.core.norms import StaticBatchNorm, collect, finish, fresh, static_norms, tracked
from rayfl.core.seeds import torch_generator, torch_scope
from rayfl.models import MODELS


def drawn(*shape, purpose="test:x"):
    return torch.randn(*shape, generator=torch_generator(0, purpose))


def network(name="digits_cnn", **fields):
    model = MODELS[name](**fields)
    with torch_scope(0):
        return Net(model, 0.25, scale=0.5).build(), drawn(24, *model.input)


def inputs_of(module, path, x):
    """Return the inputs of the norm at `path` in one pass over `x`, in evaluation with batch statistics."""
    seen = []
    handle = module.get_submodule(path).register_forward_hook(lambda m, i, o: seen.append(i[0]))
    norms.load(module, {})
    module.eval()(x)
    handle.remove()
    return seen[0].detach().double()


def check_statistics(statistics, path, seen):
    mean = seen.mean((0, 2, 3)).float()
    var = seen.var((0, 2, 3), correction=0).float()
    torch.testing.assert_close(statistics[f"{path}.running_mean"], mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(statistics[f"{path}.running_var"], var, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["digits_cnn", "heterofl_cnn"])
def test_exact_is_the_full_batch_in_every_layer_for_one_batch(name):
    module, x = network(name)
    statistics = finish(collect(module, [x]), "exact")
    assert len(statistics) == 2 * len(static_norms(module))
    for path in static_norms(module):
        check_statistics(statistics, path, inputs_of(module, path, x))


@pytest.mark.parametrize("sizes", [[24], [8, 8, 8], [1, 20, 3]])
def test_exact_is_the_full_batch_in_the_first_layer_for_any_batches(sizes):
    module, x = network()
    statistics = finish(collect(module, x.split(sizes)), "exact")
    check_statistics(statistics, "norm1", inputs_of(module, "norm1", x))


@pytest.mark.parametrize("kind", ["exact", "cumulative"])
def test_statistics_have_the_default_type(float64, kind):
    module, x = network()
    sums = collect(module, [x.double()])
    statistics = finish(sums, kind)
    n, total, *_ = sums["norm1"]
    assert torch.equal(statistics["norm1.running_mean"], total / n)
    assert {t.dtype for t in statistics.values()} == {torch.float64}


def test_inputs_of_later_norms_depend_on_the_batches():
    """`exact` describes the inputs of the layer, which differ from those of the full batch."""
    module, x = network()
    x = x + 3 * torch.arange(len(x)).view(-1, 1, 1, 1)
    batches = x.split(6)
    statistics = finish(collect(module, batches), "exact")
    seen = torch.cat([inputs_of(module, "norm2", batch) for batch in batches])
    check_statistics(statistics, "norm2", seen)
    at_once = finish(collect(module, [x]), "exact")
    for name, t in statistics.items():
        assert torch.allclose(t, at_once[name], atol=1e-5, rtol=1e-4) == name.startswith("norm1."), name


def test_the_first_norm_of_a_preactivation_network_has_unscaled_inputs():
    """The Scaler is the identity while sums are collected."""
    module, x = network("preact_resnet18", input=(3, 8, 8))
    path = "stage1.0.activate.norm"
    statistics = finish(collect(module, [x]), "exact")
    check_statistics(statistics, path, module.conv(x).detach().double())


@pytest.mark.parametrize("kind", ["exact", "cumulative"])
def test_sums_of_clients_add(kind):
    module, x = network()
    first, second = collect(module, x[:10].split(5)), collect(module, x[10:].split(7))
    both = collect(module, [*x[:10].split(5), *x[10:].split(7)])
    added = finish({path: first[path] + second[path] for path in first}, kind)
    for name, t in finish(both, kind).items():
        torch.testing.assert_close(added[name], t)


def test_cumulative_is_the_mean_of_batch_means_and_of_unbiased_batch_variances():
    layer = StaticBatchNorm(1)
    batches = [torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [1.0], [4.0]])]
    sums = collect(nn.Sequential(layer), batches)
    assert sums["0"].flatten().tolist() == pytest.approx([5, 8, 22, 2, 1 + 2, 2 + 3])
    assert finish(sums, "cumulative") == {"0.running_mean": torch.tensor([1.5]), "0.running_var": torch.tensor([2.5])}
    exact = finish(sums, "exact")
    assert exact["0.running_mean"].item() == pytest.approx(1.6)
    assert exact["0.running_var"].item() == pytest.approx(22 / 5 - 1.6**2)


def test_evaluation_uses_loaded_statistics_until_they_are_reset():
    module, x = network()
    by_batch = module.eval()(x[:4])
    statistics = finish(collect(module, [x]), "exact")
    norms.load(module, statistics)
    loaded = module.eval()(x[:4])
    assert not torch.allclose(loaded, by_batch)
    # with statistics an image's logits do not depend on the others of its batch
    torch.testing.assert_close(module(x[:1]), loaded[:1])
    # on the calibration batch itself they are the batch's own
    norms.load(module, {})
    own = module(x)
    norms.load(module, statistics)
    torch.testing.assert_close(module(x), own, atol=1e-5, rtol=1e-4)
    norms.load(module, {})
    assert torch.equal(module(x[:4]), by_batch)


def test_training_normalises_by_the_batch_with_loaded_statistics():
    module, x = network()
    module.train()
    before = module(x)
    norms.load(module, finish(collect(module, [x * 3]), "exact"))
    assert torch.equal(module.train()(x), before)


def test_collecting_ignores_loaded_statistics_and_keeps_them():
    module, x = network()
    fresh = collect(module, [x])
    norms.load(module, finish(collect(module, [x * 3]), "exact"))
    again = collect(module, [x])
    assert all(torch.equal(again[path], fresh[path]) for path in fresh)
    assert all(norm.running_mean is not None for norm in static_norms(module).values())
    assert all(norm.sums is None for norm in static_norms(module).values())


def test_only_weight_and_bias_are_parameters_and_nothing_is_a_saved_buffer():
    layer = StaticBatchNorm(3)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert list(layer.state_dict()) == ["weight", "bias"]


def test_it_normalises_by_the_batch():
    layer, x = StaticBatchNorm(3), drawn(5, 3, 4, 4) * 2 + 7
    y = layer(x)
    torch.testing.assert_close(y.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(y.var((0, 2, 3), correction=0), torch.ones(3), atol=1e-4, rtol=0)


def test_a_single_value_per_channel_is_normalised_to_the_bias():
    layer = StaticBatchNorm(3)
    nn.init.constant_(layer.bias, 0.25)
    y = layer(drawn(1, 3, 1, 1))
    torch.testing.assert_close(y, torch.full_like(y, 0.25), atol=1e-3, rtol=0)


def test_tracked_statistics_are_those_of_torch():
    """Bit for bit, in every layer, over batches of several sizes; outputs are unchanged."""
    module, x = network()
    twin, _ = network()
    for path in static_norms(twin):
        twin.set_submodule(path, nn.BatchNorm2d(static_norms(module)[path].weight.numel()))
    statistics = fresh(module)
    for batch in x.split([5, 12, 7]):
        without = module.train()(batch)
        with tracked(module, statistics):
            assert torch.equal(module(batch), without)
        twin.train()(batch)
    state = twin.state_dict()
    assert len(statistics) == 2 * len(static_norms(module))
    assert all(torch.equal(t, state[name]) for name, t in statistics.items())


def test_tracking_ends_with_its_block():
    module, x = network()
    statistics = fresh(module)
    with pytest.raises(ArithmeticError), tracked(module, statistics):
        module.train()(x)
        raise ArithmeticError
    before = {name: t.clone() for name, t in statistics.items()}
    with tracked(module, {}):
        module(x)
    assert all(torch.equal(t, before[name]) for name, t in statistics.items())


def test_a_single_value_per_channel_is_not_tracked():
    layer = StaticBatchNorm(3)
    statistics = fresh(layer)
    with tracked(layer, statistics):
        layer(drawn(1, 3, 1, 1))
    assert statistics[".running_mean"].tolist() == [0] * 3 and statistics[".running_var"].tolist() == [1] * 3


def test_a_batch_with_a_single_value_per_channel():
    x = torch.tensor([[1.0, -2.0, 3.0]])
    [sums] = collect(nn.Sequential(StaticBatchNorm(3)), [x]).values()
    n, total, squares, batches, means, variances = sums.tolist()
    assert (n, batches, variances) == ([1.0] * 3, [1.0] * 3, [0.0] * 3)
    assert total == means == [1.0, -2.0, 3.0] and squares == [1.0, 4.0, 9.0]
