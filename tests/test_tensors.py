"""Nested tensors and the flat buffers that they travel in."""

import torch
from helpers import assert_same

from rayfl.tensors import as_tensor, leaves, nbytes, nest, pack, unpack

NESTED = {
    "params": {"conv.weight": torch.arange(6.0).view(2, 3), "conv.bias": torch.tensor([1.5])},
    "count": torch.tensor(7),
    "rows": {"deep": {"mask": torch.tensor([True, False]), "empty": torch.zeros(0, 4)}},
}


def test_leaves_have_paths_in_order():
    assert [name for name, _ in leaves(NESTED)] == [
        "params/conv.weight",
        "params/conv.bias",
        "count",
        "rows/deep/mask",
        "rows/deep/empty",
    ]


def test_nest_undoes_leaves():
    assert_same(nest(dict(leaves(NESTED))), NESTED)
    assert nest({"a/b": NESTED["count"]}) == {"a": {"b": NESTED["count"]}}


def test_bytes():
    assert nbytes(NESTED) == 6 * 4 + 4 + 8 + 2 + 0


def test_pack_and_unpack():
    packed = pack(NESTED)
    assert {dtype: len(buffer) for dtype, buffer in packed.buffers.items()} == {
        "float32": 7,
        "int64": 1,
        "bool": 2,
    }
    unpacked = unpack(packed)
    assert_same(unpacked, NESTED)
    assert {name: t.dtype for name, t in leaves(unpacked)} == {name: t.dtype for name, t in leaves(NESTED)}


def test_pack_takes_any_layout():
    t = torch.randn(2, 3, 4, 5)
    strided = {"a": t.contiguous(memory_format=torch.channels_last), "b": t.transpose(0, 3), "c": t[:, ::2]}
    assert_same(unpack(pack(strided)), strided)


def test_unpacked_tensors_are_views_of_one_buffer():
    packed = pack({"a": torch.zeros(2), "b": torch.zeros(3)})
    unpacked = unpack(packed)
    packed.buffers["float32"][2] = 5
    assert unpacked["b"].tolist() == [5, 0, 0]
    assert unpacked["b"].data_ptr() == unpacked["a"].data_ptr() + 8


def test_nothing_is_packed_too():
    assert unpack(pack({})) == {}
    assert unpack(pack({"held": {}})) == {}


def test_a_read_only_array_is_viewed_without_a_warning():
    array = pack({"a": torch.zeros(2)}).buffers["float32"]
    array.flags.writeable = False
    assert as_tensor(array).tolist() == [0, 0]
