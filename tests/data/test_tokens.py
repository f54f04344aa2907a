"""Sequences of tokens: lengths of batches, epochs by length, and hidden tokens."""

import numpy as np
import pytest
import torch

from rayfl.core.seeds import torch_generator
from rayfl.data import Arrays, ClientData
from rayfl.data.goal import IGNORE_INDEX, Classes, MaskedTokens, NextToken
from rayfl.data.synthetic_text import SyntheticText
from rayfl.data.tokens import PAD, Following, Hidden, Sequences, TokenTask
from rayfl.testing.data import DataContract

SMALL = {"name": "heterofl_transformer", "layers": 1, "heads": 2, "head_width": 4, "mlp": 8}


class TestSyntheticText(DataContract):
    data = SyntheticText(samples=60, test_samples=20)
    model = SMALL


class TestSyntheticTextOfNextTokens(DataContract):
    data = SyntheticText(samples=60, test_samples=20, task="next_token")
    model = SMALL


class TestSyntheticTextOfMaskedTokens(DataContract):
    data = SyntheticText(samples=60, test_samples=20, task="masked_lm")
    model = SMALL


def padded(*sequences, width):
    x = np.full((len(sequences), width), PAD, np.int32)
    for row, tokens in zip(x, sequences, strict=True):
        row[: len(tokens)] = tokens
    return torch.from_numpy(x)


def client(prepare, goal=None, **samples):
    return ClientData(samples, prepare, goal or Classes(2))


def draw(purpose="draw"):
    return torch_generator(0, f"test:{purpose}")


def of_lengths(lengths, width=40):
    """Return sequences whose tokens and class are their own index."""
    return {"x": padded(*([i] * n for i, n in enumerate(lengths)), width=width), "y": torch.arange(len(lengths))}


# batches


def test_a_batch_is_as_long_as_its_longest_sequence():
    data = client(Sequences("stored"), x=padded([1, 2], [3], [4], [], width=9), y=torch.arange(4) % 2)
    (x, y), (short, _) = data.in_order(2)
    assert x.tolist() == [[1, 2], [3, PAD]] and y.tolist() == [0, 1] and x.dtype == torch.int64
    # a network sees one column at least
    assert short.tolist() == [[4], [PAD]]


def test_the_next_token_is_the_label():
    data = client(Following("stored"), NextToken(9), x=padded([1, 2, 3], [4, 5], width=6))
    [(x, y)] = data.in_order(2)
    assert x.tolist() == [[1, 2], [4, 5]]
    assert y.tolist() == [[2, 3], [5, IGNORE_INDEX]]


LENGTHS = [7, 1, 30, 12, 12, 3, 25, 8, 2, 19, 4]


@pytest.mark.parametrize("order", ["lengths", "shuffled", "stored"])
def test_an_epoch_has_every_sequence_once(order):
    data = client(Sequences(order), Classes(11), **of_lengths(LENGTHS))
    batches = [y.tolist() for _, y in data.batches(4, 3, draw())]
    assert sorted(sum(batches, [])) == list(range(11)) and [len(y) for y in batches] == [3, 3, 3, 2]
    assert (sum(batches, []) == list(range(11))) == (order == "stored")


def test_a_part_of_an_epoch_in_stored_order_starts_anywhere():
    """Otherwise a client that makes few steps would never see its other samples."""
    data, seen = client(Sequences("stored"), Classes(11), **of_lengths(LENGTHS)), set()
    for seed in range(30):
        found = [y.tolist() for _, y in data.batches(2, 3, torch_generator(seed, "test:epoch"))]
        start = found[0][0]
        assert found == [[(start + i) % 11 for i in range(3)], [(start + i) % 11 for i in range(3, 6)]]
        seen.add(start)
    assert seen == {0, 3, 6, 9}


def test_batches_by_length_are_of_neighbours_in_random_order():
    data = client(Sequences(), Classes(12), **of_lengths(range(1, 13)))
    seen = set()
    for seed in range(4):
        batches = [y.tolist() for _, y in data.batches(3, 4, torch_generator(seed, "test:epoch"))]
        assert sorted(map(sorted, batches)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        seen.add(str(batches))
    assert len(seen) > 1


def test_the_last_batch_by_lengths_is_random():
    data = client(Sequences(), Classes(5), **of_lengths([1, 2, 3, 4, 5]))
    last = {
        [y.tolist() for _, y in data.batches(3, 2, torch_generator(seed, "test:epoch"))][-1][0] for seed in range(30)
    }
    assert last == {0, 1, 2, 3, 4}


def test_steps_may_end_within_an_epoch_and_go_on_after_it():
    data = client(Sequences(), Classes(11), **of_lengths(LENGTHS))
    assert sum(len(y) for _, y in data.batches(2, 3, draw())) == 6
    assert sum(len(y) for _, y in data.batches(6, 3, draw())) == 11 + 6


def test_an_evaluation_by_lengths_goes_from_short_to_long():
    data = client(Sequences(), Classes(11), **of_lengths(LENGTHS))
    widths = [x.shape[1] for x, _ in data.in_order(3)]
    assert widths == [3, 8, 19, 30]
    assert sorted(torch.cat([y for _, y in data.in_order(3)]).tolist()) == list(range(11))


def test_sequences_by_length_cost_about_what_they_are_long():
    lengths = (torch.rand(600, generator=draw()) ** 3 * 120 + 5).long().tolist()
    cost = {}
    for order in ("lengths", "shuffled"):
        data = client(Sequences(order), Classes(600), **of_lengths(lengths, 128))
        cost[order] = sum(x.numel() for x, _ in data.batches(30, 20, draw()))
    assert cost["lengths"] < 1.06 * sum(lengths) and cost["shuffled"] > 2 * sum(lengths)


# hidden tokens

TOKENS = torch.arange(4000, dtype=torch.int32).view(40, 100) % 50


def masked(prepare, **samples):
    data = client(prepare, MaskedTokens(50), x=TOKENS, **samples)
    return data


def test_training_hides_anew_every_time():
    data = masked(Hidden("stored", 50, 50), hidden=torch.zeros_like(TOKENS, dtype=torch.uint8))
    batches = list(data.batches(4, 20, draw()))
    whole = [torch.cat([x for x, _ in batches[i : i + 2]]) for i in (0, 2)]
    assert not torch.equal(*whole)
    for x, y in batches:
        hidden = y >= 50
        assert torch.equal(hidden, x == 50) and torch.equal(y % 50, torch.where(hidden, y - 50, x))
    assert 0.12 < float((torch.cat(whole) == 50).float().mean()) < 0.18


def test_an_evaluation_hides_what_is_stored():
    hidden = torch.zeros_like(TOKENS, dtype=torch.uint8)
    hidden[3, 7] = hidden[20, 0] = 1
    data = masked(Hidden("stored", 50, 50), hidden=hidden)
    x, y = (torch.cat(parts) for parts in zip(*data.in_order(7), strict=True))
    assert torch.equal(x == 50, hidden.bool()) and torch.equal(y, TOKENS + 50 * hidden)


def test_berts_rule_hides_by_mask_any_token_or_nothing():
    data = masked(Hidden("stored", 50, 50, rate=0.5, rule="bert"), hidden=torch.zeros_like(TOKENS, dtype=torch.uint8))
    [(x, y)] = data.batches(1, 40, draw())
    hidden, token = y >= 50, y % 50
    assert torch.equal(x[~hidden], token[~hidden]) and torch.equal(token, TOKENS.long())
    masks, same = (x == 50)[hidden].float().mean(), (x == token)[hidden].float().mean()
    # of the tenth that becomes any token one in fifty is the same
    assert 0.76 < float(masks) < 0.84 and 0.07 < float(same) < 0.14 and 0.46 < float(hidden.float().mean()) < 0.54


def test_padding_is_never_hidden():
    x = padded([0, 5, 6, 1], [0, 7, 1], width=5)
    prepare = Hidden("stored", 50, 50, rate=1.0)
    data = client(prepare, MaskedTokens(50), x=x, hidden=torch.ones_like(x, dtype=torch.uint8))
    for [(seen, y)] in (list(data.in_order(2)), list(data.batches(1, 2, draw()))):
        assert seen.tolist() == [[50, 50, 50, 50], [50, 50, 50, PAD]]
        assert y.tolist() == [[50, 55, 56, 51], [50, 57, 51, IGNORE_INDEX]]


# tasks


@pytest.mark.parametrize(
    ("task", "stored", "ids", "classes", "names"),
    [
        (TokenTask("classes", 30, 8, 3), 8, 30, 3, ["x", "y"]),
        (TokenTask("next_token", 30, 8), 9, 30, 30, ["x"]),
        (TokenTask("masked_lm", 30, 8), 8, 31, 30, ["x", "hidden"]),
        (TokenTask("masked_lm", 30, 8, mask=4), 8, 30, 30, ["x", "hidden"]),
    ],
)
def test_members_of_a_data_set_for_its_task(task, stored, ids, classes, names):
    assert [*task.columns] == names and task.columns["x"].shape == (stored,)
    assert task.offers == {"task": task.name, "ids": ids, "classes": classes, "length": 8}
    split = task.split(np.zeros((2, stored), np.int32), np.zeros(2, np.int64), "set", "train")
    assert [*split] == names


def test_hidden_tokens_depend_on_the_address():
    task, x = TokenTask("masked_lm", 30, 200), np.zeros((50, 200), np.int32)
    first, again, other = (task.split(x, None, *of)["hidden"] for of in (("a", "train"), ("a", "train"), ("a", "test")))
    assert np.array_equal(first, again) and not np.array_equal(first, other) and 0.13 < first.mean() < 0.17


def test_tokens_stay_int32():
    arrays = SyntheticText(samples=20, test_samples=5, task="masked_lm").arrays()
    assert isinstance(arrays, Arrays)
    assert arrays.train["x"].dtype == np.int32 and arrays.train["hidden"].dtype == np.uint8
