"""Linear algebra of low-rank products for servers of low-rank adapters, without the large matrix.

A product P = L R has factors L [m, q] and R [q, n]; if R is None, L is the product itself. An adapter is P = s B A with
B [m, r] and A [r, n]. All computations are in float64 on the CPU, so that results do not depend on the device.
"""

from typing import NamedTuple, Self

import torch


class SVD(NamedTuple):
    """U diag(s) V^T with orthonormal columns of U and rows of V^T, and s in descending order. The largest entry of
    each column of U is positive, so that equal products have equal factors."""

    u: torch.Tensor
    """[m, q]"""
    s: torch.Tensor
    """[q]"""
    vt: torch.Tensor
    """[q, n]"""

    def truncated(self, rank: int) -> Self:
        """Return the best approximation of this rank."""
        return self._make((self.u[:, :rank], self.s[:rank], self.vt[:rank]))

    @property
    def rank(self) -> int:
        """Number of nonzero singular values, up to rounding."""
        return int((self.s > 1e-12 * self.s[:1]).sum())

    def rank_of(self, energy: float) -> int:
        """Return the smallest rank whose squared singular values have the fraction `energy` of the sum (FLoRIST)."""
        shares = self.s.square().cumsum(0)
        return int((shares < energy * shares[-1:] * (1 - 1e-12)).sum()) + 1 if self.rank else 0


def svd(left: torch.Tensor, right: torch.Tensor | None) -> SVD:
    """Return the exact SVD of the product [m, n], by QR decompositions of the factors if q < min(m, n)."""
    left, right = _double(left), None if right is None else _double(right)
    if right is not None and left.shape[1] < min(len(left), right.shape[1]):
        (of_left, small_left), (of_right, small_right) = torch.linalg.qr(left), torch.linalg.qr(right.T)
        u, s, vt = torch.linalg.svd(small_left @ small_right.T)
        u, vt = of_left @ u, vt @ of_right.T
    else:
        u, s, vt = torch.linalg.svd(left if right is None else left @ right, full_matrices=False)
    largest = u.gather(0, u.abs().argmax(0, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0)
    return SVD(u * signs, s, vt * signs.T)


def refactored(found: SVD, a: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return B [m, r] and A [r, n] with scale B A = the product, truncated to the rank r of `a` [r, n]. B contains the
    singular values, A has orthonormal rows (FlexLoRA). If the rank of the product is lower, A keeps rows of `a`."""
    rank = min(found.rank, len(a))
    u, s, vt = found.truncated(rank)
    b = u.new_zeros(len(u), len(a))
    b[:, :rank] = u * (s / scale)
    return b.to(a.dtype), torch.cat([vt.to(a.dtype), a[rank:]])


def norm(left: torch.Tensor, right: torch.Tensor | None) -> float:
    """Return the Frobenius norm of the product."""
    left = _double(left)
    if right is None:
        return float(left.norm())
    right = _double(right)
    return float(((left.T @ left) * (right @ right.T)).sum().clamp(min=0).sqrt())


def importance(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return ||b_j a_j||_F = ||b_j|| ||a_j|| [r] of all components of B [m, r] and A [r, n]."""
    return b.norm(dim=0) * a.norm(dim=1)


def ridge(
    left: torch.Tensor, right: torch.Tensor | None, b: torch.Tensor, a: torch.Tensor, strength: float
) -> torch.Tensor:
    """Return the D [m, r] that minimises ||P - (B + D) A||_F^2 + strength ||D||_F^2 (LoRA-FAIR by least squares):
    (P - B A) A^T (A A^T + strength I)^-1."""
    b, a = _double(b), _double(a)
    error = _along(left, right, a) - b @ (a @ a.T)
    gram = a @ a.T + strength * torch.eye(len(a), dtype=a.dtype)
    return torch.linalg.solve(gram, error, left=False)


def by_cosine(
    left: torch.Tensor,
    right: torch.Tensor | None,
    b: torch.Tensor,
    a: torch.Tensor,
    strength: float,
    lr: float,
    steps: int,
) -> torch.Tensor:
    """Return the D [m, r] after `steps` descent steps from 0 on 1 - cos(P, (B + D) A) + strength ||D||_F (LoRA-FAIR).
    A step follows the gradient of the cosine, then shortens D by lr * strength, at most to 0: the proximal step."""
    b, a = _double(b), _double(a)
    # <P, X A> = <P A^T, X>, and ||X A||^2 = <X, X A A^T> avoid tensors of the product's size
    toward, gram, length = _along(left, right, a), a @ a.T, norm(left, right)
    d = torch.zeros_like(b)
    if not length or not toward.any():
        return d
    for _ in range(steps):
        x = b + d
        along = x @ gram
        size = (x * along).sum().clamp(min=0).sqrt()
        if not size:
            return torch.zeros_like(b)
        pull = (along * ((toward * x).sum() / size**2) - toward) / (length * size)
        d = d - lr * pull
        d *= (1 - lr * strength / d.norm().clamp(min=torch.finfo(d.dtype).tiny)).clamp(min=0)
    return d


def _along(left: torch.Tensor, right: torch.Tensor | None, a: torch.Tensor) -> torch.Tensor:
    """Return P A^T [m, r]."""
    return _double(left) @ (a.T if right is None else _double(right) @ a.T)


def _double(t: torch.Tensor) -> torch.Tensor:
    return t.detach().to("cpu", torch.float64)
