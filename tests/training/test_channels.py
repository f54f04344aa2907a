"""Stacked clients as channels: pools and norms equal those of each client."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rayfl.core.norms import StaticBatchNorm
from rayfl.training.channels import Channels, side_by_side

ACTS = {
    "max": nn.MaxPool2d(2),
    "max, padded": nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
    "mean": nn.AvgPool2d(2, 1, count_include_pad=False),
    "mean of all": nn.AdaptiveAvgPool2d(1),
    "maximum of all": nn.AdaptiveMaxPool2d((2, 1)),
    "with places": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "by keywords": lambda x: F.avg_pool2d(input=x, kernel_size=2),
    "one image": lambda x: F.max_pool2d(x[0], 2),
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_pools_are_those_of_each_client(act):
    alone = [torch.randn(4, 3, 7, 5, dtype=torch.float64).requires_grad_() for _ in range(6)]
    together = side_by_side([x.detach() for x in alone]).requires_grad_()
    with Channels():
        found = torch.vmap(act)(together)
    expected = torch.stack([act(x) for x in alone])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad((found * weights).sum(), together)
    expected = torch.autograd.grad((expected * weights).sum(), alone)
    torch.testing.assert_close(gradient, torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_norms_are_those_of_each_client():
    norm = StaticBatchNorm(3).double()
    x, weights, biases = torch.randn(6, 4, 3, 5, 5).double(), torch.randn(6, 3).double(), torch.randn(6, 3).double()
    means, variances = torch.zeros(6, 3).double(), torch.ones(6, 3).double()
    weights.requires_grad_()

    def act(x, weight, bias, mean, var):
        return torch.batch_norm(x, weight, bias, mean, var, True, 0.1, norm.eps, False)

    with Channels():
        found = torch.vmap(act)(side_by_side(list(x)), weights, biases, means, variances)
    for i in range(6):
        norm.running = torch.zeros(3).double(), torch.ones(3).double()
        norm.weight.data, norm.bias.data = weights[i].detach(), biases[i]
        torch.testing.assert_close(found[i], norm(x[i]), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close((means[i], variances[i]), norm.running, rtol=1e-12, atol=1e-12)
    assert torch.autograd.grad(found.square().sum(), weights)[0].shape == (6, 3)


def test_a_norm_that_clients_share_is_refused_because_they_would_change_each_others_statistics():
    shared = torch.zeros(3), torch.ones(3)
    with Channels(), pytest.raises(ValueError, match="the same for all"):
        act = lambda x, w: torch.batch_norm(x, w, w, *shared, True, 0.1, 1e-5, False)  # noqa: E731
        torch.vmap(act)(torch.randn(6, 4, 3, 5, 5), torch.ones(6, 3))


def test_images_lie_with_the_channels_of_all_clients_last():
    images = [torch.randn(4, 3, 7, 5) for _ in range(6)]
    together = side_by_side(images)
    assert torch.equal(together, torch.stack(images))
    assert together.movedim(0, 1).flatten(1, 2).is_contiguous(memory_format=torch.channels_last)
    tokens = [torch.arange(8).view(2, 4)] * 2
    assert side_by_side(tokens).is_contiguous()


def test_without_company_nothing_changes():
    x = torch.randn(4, 3, 6, 6)
    with Channels():
        assert torch.equal(F.max_pool2d(x, 2), nn.MaxPool2d(2)(x))
        assert torch.equal(StaticBatchNorm(3)(x), F.batch_norm(x, None, None, training=True))
