"""Codes of masks: exact both ways, and as long as their entropy."""

import pytest
import torch

from rayfl.coding import decode, encode, entropy
from rayfl.seeds import torch_generator


@pytest.mark.parametrize(
    ("p", "bits"), [(0.5, 1.0), (0.45, 0.99277), (0.31, 0.89317), (0.69, 0.89317), (0.0, 0.0), (1.0, 0.0)]
)
def test_entropy(p, bits):
    assert entropy(p) == pytest.approx(bits, abs=5e-6)


@pytest.mark.parametrize("ones", [0, 1, 40, 4_000, 31_000, 45_000, 50_000, 90_000, 99_999, 100_000])
def test_a_code_is_exact_and_as_long_as_its_entropy(ones):
    """17 bits of a number up to 100,000 are 3 bytes; a range code ends within two of its words."""
    n = 100_000
    bits = torch.randperm(n, generator=torch_generator(0, "bits")) < ones
    code = encode(bits)
    assert torch.equal(decode(code, n), bits)
    assert -1 <= len(code) - 3 - n * entropy(ones / n) / 8 <= 9


def test_a_code_starts_with_the_number_of_ones():
    assert encode(torch.arange(70_000) < 66_051)[:3].tolist() == [3, 2, 1]
    assert encode(torch.tensor([True] * 5)).tolist() == [5]


@pytest.mark.parametrize("n", [0, 1, 2, 33])
def test_any_length(n):
    for bits in (torch.arange(n) % 3 == 0, torch.ones(n).bool(), torch.zeros(n).bool()):
        assert torch.equal(decode(encode(bits), n), bits)


def test_any_shape_and_type():
    bits = torch.rand(8, 3, 5, generator=torch_generator(0, "bits")) < 0.4
    for given in (bits, bits.float(), bits.to(torch.uint8), bits.flatten()):
        assert torch.equal(encode(given), encode(bits))


@pytest.mark.parametrize("wrong", [lambda code: code[:-1], lambda code: code[:1], lambda code: code[2:]])
def test_what_is_no_code_is_refused(wrong):
    code = encode(torch.arange(1000) % 3 == 0)
    with pytest.raises(ValueError, match="no code of 1000 bits; decode with the n of encode"):
        decode(wrong(code), 1000)
