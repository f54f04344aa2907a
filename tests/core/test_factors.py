"""Low-rank products in float64: decompositions, norms and descent."""

import pytest
import torch

from rayfl.core import factors as lowrank
from rayfl.core.seeds import torch_generator


def drawn(*shapes, purpose="factors"):
    generator = torch_generator(0, f"test:{purpose}")
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("q", [3, 20, 40], ids=["small", "between", "larger than the product"])
def test_singular_values_are_those_of_the_product(q):
    """QR of the factors for q < 12, otherwise the SVD of the product."""
    left, right = drawn((30, q), (q, 12))
    found, expected = lowrank.svd(left, right), torch.linalg.svdvals(left @ right)
    size = min(q, 12)
    assert (found.u.shape, found.s.shape, found.vt.shape) == ((30, size), (size,), (size, 12))
    torch.testing.assert_close(found.s, expected[:size], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.u * found.s @ found.vt, left @ right, rtol=1e-12, atol=1e-11)
    for orthonormal in (found.u.T @ found.u, found.vt @ found.vt.T):
        torch.testing.assert_close(orthonormal, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)


def test_signs_are_fixed_by_the_largest_entry():
    """(-L)(-R), (L / 3)(3 R) and the dense product have the factors of L R."""
    left, right = drawn((9, 4), (4, 7))
    found = lowrank.svd(left, right)
    assert (found.u.gather(0, found.u.abs().argmax(0, keepdim=True)) > 0).all()
    for factors in ((-left, -right), (left / 3, 3 * right), (left @ right, None)):
        other = lowrank.svd(*factors).truncated(4)
        for one, two in zip(found, other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_a_truncation_is_the_best_approximation_of_its_rank():
    """The error consists of the remaining singular values (Eckart, Young)."""
    left, right = drawn((10, 6), (6, 8))
    product = left @ right
    for rank in range(7):
        u, s, vt = lowrank.svd(left, right).truncated(rank)
        error = torch.linalg.matrix_norm(product - u * s @ vt)
        torch.testing.assert_close(error, torch.linalg.svdvals(product)[rank:6].norm(), rtol=1e-10, atol=1e-10)


def test_the_rank_of_an_energy():
    """Singular values 4, 2, 1 with energies 16, 4, 1 of 21."""
    left, right = torch.eye(5, 3, dtype=torch.float64), torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64))
    found = lowrank.svd(left, right)
    ranks = {16 / 21: 1, 0.77: 2, 20 / 21: 2, 0.96: 3, 1.0: 3}
    assert {energy: found.rank_of(energy) for energy in ranks} == ranks
    assert lowrank.svd(torch.zeros(5, 3), right).rank_of(0.9) == 0


def test_new_factors_have_the_product_and_keep_other_rows():
    """A product of rank 3 in factors of rank 5."""
    left, right, a = drawn((9, 3), (3, 7), (5, 7))
    b, new = lowrank.refactored(lowrank.svd(left, right), a, scale=2.0)
    torch.testing.assert_close(2 * b @ new, left @ right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(new[:3] @ new[:3].T, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-12)
    assert not b[:, 3:].any() and torch.equal(new[3:], a[3:])
    b, new = lowrank.refactored(lowrank.svd(torch.zeros(9, 3), right), a, scale=2.0)
    assert not b.any() and torch.equal(new, a)


def test_the_norm_of_a_product():
    left, right = drawn((30, 4), (4, 20))
    for factors in ((left, right), (left @ right, None)):
        assert lowrank.norm(*factors) == pytest.approx(float((left @ right).norm()), rel=1e-12)
    assert lowrank.norm(torch.zeros(3, 0), torch.zeros(0, 2)) == 0


def test_the_importance_of_a_component_is_the_norm_of_its_product():
    b, a = drawn((6, 3), (3, 5))
    expected = torch.stack([torch.outer(b[:, j], a[j]).norm() for j in range(3)])
    torch.testing.assert_close(lowrank.importance(b, a), expected)


def test_ridge_is_where_the_gradient_vanishes():
    left, right, b, a, other = drawn((8, 6), (6, 7), (8, 3), (3, 7), (8, 3))

    def objective(d):
        return (left @ right - (b + d) @ a).square().sum() + 0.1 * d.square().sum()

    d = lowrank.ridge(left, right, b, a, 0.1).requires_grad_()
    [gradient] = torch.autograd.grad(objective(d), d)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-10)
    torch.testing.assert_close(lowrank.ridge(left @ right, None, b, a, 0.1), d.detach())
    assert objective(d) < objective(d + 1e-3 * other) and objective(d) < objective(torch.zeros_like(d))


def test_cosine_descent_follows_the_gradient():
    """Compared with automatic differentiation and the proximal step of the norm."""
    left, right, b, a = drawn((8, 6), (6, 7), (8, 3), (3, 7))

    def objective(d):
        product = left @ right
        return 1 - (product * ((b + d) @ a)).sum() / (product.norm() * ((b + d) @ a).norm())

    expected = torch.zeros_like(b)
    for steps in range(1, 4):
        d = expected.clone().requires_grad_()
        [gradient] = torch.autograd.grad(objective(d), d)
        expected = expected - 0.5 * gradient
        expected = expected * (1 - 0.5 * 0.01 / expected.norm())
        found = lowrank.by_cosine(left, right, b, a, 0.01, 0.5, steps)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert objective(lowrank.by_cosine(left, right, b, a, 0.01, 0.5, 200)) < objective(torch.zeros_like(b)) - 0.1


def test_without_a_direction_there_is_no_correction():
    left, right, b, a = drawn((8, 6), (6, 7), (8, 3), (3, 7))
    for given in ((0 * left, right, b, a), (left, right, 0 * b, a), (b, a, b, a)):
        assert not lowrank.by_cosine(*given, 0.01, 0.5, 3).any()


def test_averaging_factors_is_not_averaging_products():
    """Four clients of ranks 2, 2, 4 and 8 with random factors: the mean of the factors, over all or over the holders,
    is far from the mean of the products."""
    ranks, errors = (2, 2, 4, 8), {}
    factors = [tuple(drawn((40, r), (r, 30), purpose=f"client {k}")) for k, r in enumerate(ranks)]
    mean = sum(b @ a for b, a in factors) / 4
    b_sum, a_sum = torch.zeros(40, 8, dtype=torch.float64), torch.zeros(8, 30, dtype=torch.float64)
    for b, a in factors:
        b_sum[:, : b.shape[1]] += b
        a_sum[: len(a)] += a
    holders = torch.tensor([4, 4, 2, 2, 1, 1, 1, 1], dtype=torch.float64)
    for name, divisor in (("all", torch.full_like(holders, 4)), ("holders", holders)):
        product = (b_sum / divisor) @ (a_sum / divisor[:, None])
        errors[name] = float((product - mean).norm() / mean.norm())
    assert 0.6 < errors["all"] < 1.0 < errors["holders"] < 2.5
