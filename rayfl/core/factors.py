"""Products of low rank: what servers of low-rank adapters compute of factors, without the large matrix.

A product P = L R has factors L [m, q] and R [q, n]; where R is None, L is the product itself. An adapter is P = s B A
with B [m, r] and A [r, n]. Everything is worked out in float64 on the CPU, whatever comes in, so that a result does not
depend on where it was asked for.
"""

from typing import NamedTuple, Self

import torch


class SVD(NamedTuple):
    """U diag(s) V^T: columns of U and rows of V^T are orthonormal, s falls. The largest entry of every column of U is
    positive, so that equal products have equal factors."""

    u: torch.Tensor
    """[m, q]"""
    s: torch.Tensor
    """[q]"""
    vt: torch.Tensor
    """[q, n]"""

    def truncated(self, rank: int) -> Self:
        """The best approximation of this rank; itself if it has no more."""
        return self._make((self.u[:, :rank], self.s[:rank], self.vt[:rank]))

    @property
    def rank(self) -> int:
        """How many singular values are not 0, but for rounding."""
        return int((self.s > 1e-12 * self.s[:1]).sum())

    def rank_of(self, energy: float) -> int:
        """The smallest rank whose squared singular values add up to the share `energy` of all (FLoRIST)."""
        shares = self.s.square().cumsum(0)
        return int((shares < energy * shares[-1:] * (1 - 1e-12)).sum()) + 1 if self.rank else 0


def svd(left: torch.Tensor, right: torch.Tensor | None) -> SVD:
    """Of the product [m, n], exactly: by the QR decompositions of both factors, or of the product itself where that is
    no larger."""
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
    """B [m, r] and A [r, n] with scale B A = the product, truncated to the rank r of `a` [r, n]. All singular values
    are on B, and A has orthonormal rows (FlexLoRA); where the product has no r directions A keeps the rows of `a`."""
    rank = min(found.rank, len(a))
    u, s, vt = found.truncated(rank)
    b = u.new_zeros(len(u), len(a))
    b[:, :rank] = u * (s / scale)
    return b.to(a.dtype), torch.cat([vt.to(a.dtype), a[rank:]])


def norm(left: torch.Tensor, right: torch.Tensor | None) -> float:
    """The Frobenius norm of the product."""
    left = _double(left)
    if right is None:
        return float(left.norm())
    right = _double(right)
    return float(((left.T @ left) * (right @ right.T)).sum().clamp(min=0).sqrt())


def importance(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """||b_j a_j||_F = ||b_j|| ||a_j|| of every component of B [m, r] and A [r, n]: [r]."""
    return b.norm(dim=0) * a.norm(dim=1)


def ridge(
    left: torch.Tensor, right: torch.Tensor | None, b: torch.Tensor, a: torch.Tensor, strength: float
) -> torch.Tensor:
    """The D [m, r] that minimises ||P - (B + D) A||_F^2 + strength ||D||_F^2 (LoRA-FAIR by least squares):
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
    """The D [m, r] to which so many steps from 0 bring 1 - cos(P, (B + D) A) + strength ||D||_F (LoRA-FAIR): each goes
    down the cosine's gradient and then shortens D by lr * strength, down to 0, which is the proximal step of a norm."""
    b, a = _double(b), _double(a)
    # <P, X A> = <P A^T, X>, and ||X A||^2 = <X, X A A^T>: nothing of the product's size
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
    """P A^T [m, r]."""
    return _double(left) @ (a.T if right is None else _double(right) @ a.T)


def _double(t: torch.Tensor) -> torch.Tensor:
    return t.detach().to("cpu", torch.float64)
