"""Nested tensors, and serialisation as flat buffers."""

import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from helpers import assert_same

from rayfl.core.tensors import Packed, as_tensor, copied, leaves, nbytes, nest, pack, unpack

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


def test_nest_is_the_inverse_of_leaves():
    assert_same(nest(dict(leaves(NESTED))), NESTED)
    assert nest({"a/b": NESTED["count"]}) == {"a": {"b": NESTED["count"]}}


def test_bytes():
    assert nbytes(NESTED) == 6 * 4 + 4 + 8 + 2 + 0


def test_copies_are_never_views():
    params = {"w": torch.tensor([1.0, 2.0])}
    for factor in (1.0, 3.0):
        copy = copied(params, factor)
        assert copy["w"].tolist() == [factor, 2 * factor]
        assert copy["w"].data_ptr() != params["w"].data_ptr()


# --- the wire ---


@dataclass
class Answer:
    """Nested dicts with integer keys, as in a client state."""

    sums: dict[str, dict[str, torch.Tensor]]
    client_states: dict[int, Mapping] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def test_pack_and_unpack():
    packed = pack(NESTED)
    assert {dtype: len(buffer) for dtype, buffer in packed.buffers.items()} == {"float32": 7, "int64": 1, "bool": 2}
    unpacked = unpack(packed)
    assert_same(unpacked, NESTED)
    assert {name: t.dtype for name, t in leaves(unpacked)} == {name: t.dtype for name, t in leaves(NESTED)}


def test_round_trip_of_any_object():
    """Dataclasses, integer keys, empty dicts, None, numbers, text."""
    sums = {"params": {"w": torch.arange(3.0)}, "": {}, "a/b": {"w": torch.tensor(2)}}
    client_states = {7: {"own": {"w": torch.ones(1)}}, 0: {}, -1: {"round": 3, "none": None}}
    answer = Answer(sums, client_states, {"train_loss": 0.1, "nan": float("inf")})
    packed = pack([answer, ("text", 1 << 70)])
    assert isinstance(packed, Packed) and sum(len(b) for b in packed.buffers.values()) == 5
    [received, rest] = unpack(packed)
    assert type(received) is Answer and rest == ("text", 1 << 70)
    assert received.metrics == answer.metrics
    assert (
        list(received.client_states) == [7, 0, -1]
        and received.client_states[-1] == client_states[-1]
        and received.client_states[0] == {}
    )
    assert list(received.sums) == ["params", "", "a/b"] and received.sums[""] == {}
    assert_same(received.sums, sums)
    assert_same(received.client_states[7], client_states[7])


def test_pack_takes_any_layout():
    t = torch.randn(2, 3, 4, 5)
    strided = {"a": t.contiguous(memory_format=torch.channels_last), "b": t.transpose(0, 3), "c": t[:, ::2]}
    assert_same(unpack(pack(strided)), strided)


def test_pack_takes_parameters():
    """Parameters become plain tensors."""
    received = unpack(pack({"w": torch.nn.Parameter(torch.ones(2))}))["w"]
    assert type(received) is torch.Tensor and not received.requires_grad and received.tolist() == [1, 1]


def test_a_repeated_tensor_is_sent_once():
    t, other = torch.arange(100.0), torch.arange(100.0)
    packed = pack({"a": t, "b": {"again": t}, "c": [other, t]})
    assert {dtype: len(buffer) for dtype, buffer in packed.buffers.items()} == {"float32": 200}
    received = unpack(packed)
    assert received["a"].data_ptr() == received["b"]["again"].data_ptr() == received["c"][1].data_ptr()
    assert_same({"a": received["a"], "c": received["c"][0]}, {"a": t, "c": other})


class Fresh:
    """An object that creates its tensors in __reduce__."""

    def __init__(self, *values: int):
        self.values = values

    def __reduce__(self):
        return list, ([torch.full((50,), float(value)) for value in self.values],)


def test_tensors_that_are_made_while_packing_are_kept_apart():
    """Their memory must not be reused before all are copied."""
    received = unpack(pack([Fresh(1, 2), Fresh(3), Fresh(*range(4, 40))]))
    assert [t[0].item() for some in received for t in some] == list(range(1, 40))


def test_the_header_does_not_grow_with_the_tensors():
    small, large = (pack({"w": torch.zeros(n)}) for n in (1, 1_000_000))
    assert abs(len(large.header) - len(small.header)) < 20


def test_unpacked_tensors_are_views_of_one_buffer():
    packed = pack({"a": torch.zeros(2), "b": torch.zeros(3)})
    unpacked = unpack(packed)
    packed.buffers["float32"][2] = 5
    assert unpacked["b"].tolist() == [5, 0, 0]
    assert unpacked["b"].data_ptr() == unpacked["a"].data_ptr() + 8


def test_received_tensors_are_not_copied_even_if_read_only():
    """Return the object as from an object store: tensors share the memory of the message."""
    sent = pickle.loads(pickle.dumps(pack({"a": torch.arange(4.0), "b": torch.arange(3)})))
    for buffer in sent.buffers.values():
        buffer.flags.writeable = False
    received = unpack(sent)
    for name, dtype in (("a", "float32"), ("b", "int64")):
        assert received[name].data_ptr() == sent.buffers[dtype].ctypes.data
    assert received["a"].tolist() == [0, 1, 2, 3] and received["b"].tolist() == [0, 1, 2]


def test_packed_tensors_are_copied():
    t = torch.zeros(3)
    packed = pack({"a": t})
    t.fill_(1)
    assert packed.buffers["float32"].tolist() == [0, 0, 0]


def test_empty_objects_are_packed():
    assert unpack(pack({})) == {}
    assert unpack(pack({"held": {}})) == {"held": {}}
    assert unpack(pack(None)) is None
    empty = unpack(pack({"empty": torch.zeros(0, 4)}))["empty"]
    assert empty.shape == (0, 4)


NOTEBOOK = """
import sys
from dataclasses import dataclass
import torch
from rayfl.core.tensors import pack

@dataclass
class Mine:
    w: torch.Tensor
    def twice(self):
        return FACTOR * self.w

FACTOR = 2
packed = pack([Mine(torch.arange(3.0)), Mine])
sys.stdout.buffer.write(__import__("pickle").dumps((packed.header, packed.buffers)))
"""


def test_a_class_of_a_notebook_is_pickled_by_value():
    """A class of another program's __main__, which cannot be imported here."""
    written = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, check=True).stdout
    mine, cls = unpack(Packed(*pickle.loads(written)))
    assert type(mine) is cls and cls.__name__ == "Mine" and not hasattr(sys.modules["__main__"], "Mine")
    assert mine.twice().tolist() == [0, 2, 4]


def test_a_read_only_array_is_viewed_without_a_warning():
    array = np.zeros(2, np.float32)
    array.flags.writeable = False
    assert as_tensor(array).tolist() == [0, 0]
    assert as_tensor(array).data_ptr() == array.ctypes.data
