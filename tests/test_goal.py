"""Scores by hand, and that they add up over batches."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rayfl.config import ConfigError
from rayfl.data import SCORES, SCORES_KIND, Classes, Score
from rayfl.data.goal import Accuracy, CrossEntropy, MacroF1, TopK, found_in
from rayfl.seeds import torch_generator


def score(score, logits, y):
    return score.value(score.counts(logits, y))


def guess(*classes, of=3):
    """Logits whose largest is that of these classes."""
    return F.one_hot(torch.tensor(classes), of).float()


def test_accuracy_by_hand():
    counts = Accuracy().counts(guess(0, 1, 2, 1), torch.tensor([0, 1, 1, 0]))
    assert counts.tolist() == [2, 4] and counts.dtype == torch.int64
    assert Accuracy().value(counts) == 0.5
    # of equal logits the first counts
    assert Accuracy().counts(torch.zeros(2, 3), torch.tensor([0, 1])).tolist() == [1, 2]


def test_cross_entropy_by_hand():
    """ln 4 for equal logits; and -log softmax of (ln 3, 0) is ln 4/3 or ln 4."""
    counts = CrossEntropy().counts(torch.zeros(5, 4), torch.tensor([0, 1, 2, 3, 3]))
    assert counts.dtype == torch.float64
    assert counts.tolist() == pytest.approx([5 * math.log(4), 5])
    assert CrossEntropy().value(counts) == pytest.approx(math.log(4))
    logits = torch.tensor([[math.log(3), 0.0]] * 2)
    assert score(CrossEntropy(), logits, torch.tensor([0, 1])) == pytest.approx(math.log(16 / 3) / 2)


def test_cross_entropy_sums_each_batch_in_float32_and_the_batches_in_float64():
    logits = torch.randn(7, 4, generator=torch_generator(0, "test:noise")) * 100
    y = torch.arange(7) % 4
    total = sum(CrossEntropy().counts(a, b) for a, b in zip(logits.split(3), y.split(3), strict=True))
    expected = torch.zeros((), dtype=torch.float64)
    for a, b in zip(logits.split(3), y.split(3), strict=True):
        expected += F.cross_entropy(a, b, reduction="sum")
    assert total.tolist() == [expected.item(), 7]


def test_top_k_by_hand():
    logits = torch.tensor([[4.0, 3, 2, 1], [1, 2, 3, 4]])
    assert [TopK(k=k).counts(logits, torch.tensor([2, 2])).tolist() for k in (1, 2, 3)] == [[0, 2], [1, 2], [2, 2]]
    # more guesses than classes
    assert score(TopK(k=9), logits, torch.tensor([0, 0])) == 1.0
    assert score(TopK(k=1), logits, torch.tensor([0, 3])) == score(Accuracy(), logits, torch.tensor([0, 3])) == 1.0


def test_macro_f1_by_hand():
    """Labels 0 0 0 1 2, guesses 0 0 1 1 1: F1 is 2 * 2 / (2 + 3), 2 * 1 / (3 + 1) and 0."""
    y, logits = torch.tensor([0, 0, 0, 1, 2]), guess(0, 0, 1, 1, 1, of=4)
    counts = MacroF1().counts(logits, y)
    assert counts.tolist() == [2, 1, 0, 0, 2, 3, 0, 0, 3, 1, 1, 0]
    # class 3 is neither guessed nor a label
    assert MacroF1().value(counts) == pytest.approx((0.8 + 0.5 + 0) / 3)


def test_macro_f1_is_scikit_learns():
    from sklearn.metrics import f1_score

    generator = torch_generator(0, "test:noise")
    logits, y = torch.randn(60, 7, generator=generator), torch.randint(5, (60,), generator=generator)
    expected = f1_score(y.numpy(), logits.argmax(1).numpy(), average="macro", zero_division=0)
    assert score(MacroF1(), logits, y) == pytest.approx(expected)


@pytest.mark.parametrize("name", SCORES)
def test_every_score_adds_up_over_batches(name):
    found = SCORES_KIND.read(name, "exp.yaml: scores.0")
    generator = torch_generator(0, "test:noise")
    logits, y = torch.randn(20, 7, generator=generator), torch.randint(7, (20,), generator=generator)
    whole = found.counts(logits, y)
    parts = sum(found.counts(a, b) for a, b in zip(logits.split(6), y.split(6), strict=True))
    assert whole.dim() == 1 and whole.dtype in (torch.int64, torch.float64)
    assert parts.tolist() == pytest.approx(whole.tolist())
    assert found.better == ("min" if name in ("loss", "perplexity") else "max")


def test_labels_name_the_numbers():
    labels = [SCORES_KIND.read(name, "").label for name in SCORES]
    assert labels == ["accuracy", "loss", "perplexity", "top5", "macro_f1"]
    assert TopK(k=3).label == "top3"


class Wrong(Score):
    """How many are wrong."""

    better = "min"

    def counts(self, logits, y):
        return (logits.argmax(1) != y).sum()[None]

    def value(self, sums):
        return float(sums[0])


def test_a_score_of_a_users_package():
    found = SCORES_KIND.read("test_goal:Wrong", "exp.yaml: scores.0")
    assert (found.name, found.label, found.better) == ("test_goal:Wrong", "Wrong", "min")
    assert score(found, guess(0, 1), torch.tensor([0, 0])) == 1.0
    with pytest.raises(ConfigError) as error:
        SCORES_KIND.read("test_goal:Missing", "exp.yaml: scores.0")
    assert "exp.yaml: scores.0.name: given 'test_goal:Missing', which cannot be imported" in str(error.value)


def test_the_goal_of_classes():
    goal = Classes(3)
    assert [s.label for s in goal.scores] == ["accuracy", "loss"]
    logits, y = torch.tensor([[1.0, 2, 3], [0, 0, 0]]), torch.tensor([2, 0])
    assert torch.equal(goal.loss(logits, y), F.cross_entropy(logits, y))
    labels = np.array([2, 0, 1])
    assert goal.labels({"x": np.zeros(3), "y": labels}) is labels
    assert Classes(3) == goal and Classes(3, (TopK(k=2),)).scores == (TopK(k=2),)


def test_present_classes():
    assert found_in(torch.tensor([3, 1, 1]), 5).tolist() == [False, True, False, True, False]
