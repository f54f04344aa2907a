"""Codes of masks: round trips, and lengths close to the entropy."""

import pytest
import torch

from rayfl.core.bitcodes import decode, decode_places, encode, encode_places, entropy
from rayfl.core.seeds import torch_generator


@pytest.mark.parametrize(
    ("p", "bits"), [(0.5, 1.0), (0.45, 0.99277), (0.31, 0.89317), (0.69, 0.89317), (0.0, 0.0), (1.0, 0.0)]
)
def test_entropy(p, bits):
    assert entropy(p) == pytest.approx(bits, abs=5e-6)


@pytest.mark.parametrize("ones", [0, 1, 40, 4_000, 31_000, 45_000, 50_000, 90_000, 99_999, 100_000])
def test_a_code_is_exact_and_as_long_as_its_entropy(ones):
    """A number up to 100,000 takes 3 bytes; a range code has at most two extra words."""
    n = 100_000
    bits = torch.randperm(n, generator=torch_generator(0, "test:bits")) < ones
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
    bits = torch.rand(8, 3, 5, generator=torch_generator(0, "test:bits")) < 0.4
    for given in (bits, bits.float(), bits.to(torch.uint8), bits.flatten()):
        assert torch.equal(encode(given), encode(bits))


@pytest.mark.parametrize("wrong", [lambda code: code[:-1], lambda code: code[:1], lambda code: code[2:]])
def test_invalid_codes_are_refused(wrong):
    code = encode(torch.arange(1000) % 3 == 0)
    with pytest.raises(ValueError, match="not a code of 1000 bits. Hint: decode with the n of encode"):
        decode(wrong(code), 1000)


# places


@pytest.mark.parametrize(
    ("places", "size", "code"),
    [
        ([], 9, [1]),
        ([], 0, [0]),
        ([0], 9, [1, 0]),
        ([0], 8, [0, 128]),
        ([8], 9, [1, 8]),
        ([0, 8], 9, [0, 128, 128]),
        ([254, 255], 9_000, [1, 254, 0]),
        ([255], 9_000, [1, 255, 0]),
        ([256, 512], 9_000, [1, 255, 1, 255, 0]),
        ([3, 8_999], 9_000, [1, 3, *[255] * 35, 70]),
        (range(20), 20, [0, 255, 255, 240]),
    ],
)
def test_places_by_hand(places, size, code):
    """1 and one byte per place (255: 255 zeros), or 0 and one bit per element."""
    places = torch.tensor([*places], dtype=torch.int64)
    assert encode_places(places, size).tolist() == code
    assert torch.equal(decode_places(torch.tensor(code, dtype=torch.uint8), size), places)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 256, 257, 3_000, 70_001])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.12, 0.13, 0.5, 1.0])
def test_places_round_trip(size, share):
    """The shorter code is used."""
    places = (torch.rand(size, generator=torch_generator(0, "test:places")) < share).nonzero().flatten()
    code = encode_places(places, size)
    assert torch.equal(decode_places(code, size), places) and code.dtype == torch.uint8
    skipped = (places - torch.cat([torch.tensor([-1]), places])[:-1] - 1) // 255
    assert len(code) == 1 + min(-(-size // 8), len(places) + int(skipped.sum()))


@pytest.mark.parametrize("wrong", [[], [2, 1], [0, 1], [0, 1, 1, 1], [1, 255, 1], [1, 8, 2]])
def test_invalid_codes_of_places_are_refused(wrong):
    message = f"code: {len(wrong)} bytes are not a code of places among 11. Hint: decode with the same size"
    with pytest.raises(ValueError, match=message):
        decode_places(torch.tensor(wrong, dtype=torch.uint8), 11)
