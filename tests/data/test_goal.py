"""Scores and goals: values by hand, and additivity over batches."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rayfl.config import ConfigError
from rayfl.core.seeds import torch_generator
from rayfl.data import SCORES, SCORES_KIND, Classes, Score
from rayfl.data.goal import IGNORE_INDEX, LabelSets, MaskedTokens, NextToken, Numbers, label_set
from rayfl.data.scores import (
    MAX_PERPLEXITY,
    R2,
    AbsoluteError,
    Accuracy,
    Confusion,
    CrossEntropy,
    ExactMatch,
    LabelAccuracy,
    LabelF1,
    MacroF1,
    Matthews,
    OfNetwork,
    Perplexity,
    PerplexityOfBatches,
    SquaredError,
    TopK,
)
from rayfl.testing.tiny import raised


def score(score, logits, y):
    return score.value(score.counts(logits, y))


def guess(*classes, of=3):
    """Return logits that are largest at these classes."""
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


def test_cross_entropy_of_a_vocabulary():
    generator = torch_generator(0, "test:noise")
    logits, y = torch.randn(40, 30_000, generator=generator), torch.randint(30_000, (40,), generator=generator)
    expected = F.cross_entropy(logits.double(), y)
    assert score(CrossEntropy(), logits, y) == pytest.approx(expected.item(), rel=1e-6)


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


@pytest.mark.parametrize(
    "name", [n for n, cls in SCORES.items() if not issubclass(cls, OfNetwork) and not cls().counted_by]
)
def test_every_score_adds_up_over_batches(name):
    found = SCORES_KIND.read(name, "exp.yaml: scores.0")
    generator = torch_generator(0, "test:noise")
    logits, y = torch.randn(20, 7, generator=generator), torch.randint(7, (20,), generator=generator)
    if found.of_targets != "class":
        y = F.one_hot(y, 7)
    whole = found.counts(logits, y)
    parts = sum(found.counts(a, b) for a, b in zip(logits.split(6), y.split(6), strict=True))
    assert whole.dim() == 1 and whole.dtype in (torch.int64, torch.float64)
    assert parts.tolist() == pytest.approx(whole.tolist())
    assert found.better == ("min" if name in ("loss", "perplexity", "mse", "mae") else "max")


def test_labels_name_the_numbers():
    labels = [SCORES_KIND.read(name, "").label for name in SCORES if name != "choices"]
    assert labels[:7] == ["accuracy", "loss", "perplexity", "perplexity_heterofl", "top5", "macro_f1", "matthews"]
    assert labels[7:] == ["confusion", "mse", "mae", "r2", "label_accuracy", "exact_match", "label_f1", "exact_match"]
    assert [Accuracy(of="words").label, Perplexity(of="masked").label] == ["accuracy_words", "perplexity_masked"]
    assert TopK(k=3).label == "top3"


def test_perplexity_by_hand():
    """Equal logits give the number of classes. It is exp of the mean loss, not a mean of perplexities."""
    assert score(Perplexity(), torch.zeros(5, 7), torch.arange(5)) == pytest.approx(7)
    logits, y = torch.tensor([[math.log(3), 0.0]] * 2), torch.tensor([0, 1])
    assert score(Perplexity(), logits, y) == pytest.approx(math.sqrt(16 / 3))
    found = [PerplexityOfBatches().counts(logits[i : i + 1], y[i : i + 1]) for i in range(2)]
    # 4/3 and 4
    assert PerplexityOfBatches().value(sum(found)) == pytest.approx((4 / 3 + 4) / 2)


@pytest.mark.parametrize("kind", [Perplexity, PerplexityOfBatches])
def test_perplexity_is_bounded(kind):
    logits = torch.tensor([[0.0, 1e4]])
    counts = kind().counts(logits, torch.tensor([0]))
    assert kind().value(counts) == pytest.approx(MAX_PERPLEXITY) and kind().values(
        counts[None]
    ).tolist() == pytest.approx([MAX_PERPLEXITY])


@pytest.mark.parametrize("name", [name for name, cls in SCORES.items() if not issubclass(cls, OfNetwork)])
def test_scores_without_rows_are_not_nan(name):
    found = SCORES_KIND.read(name, "")
    y = torch.tensor([0, 2]) if found.of_targets == "class" else torch.tensor([[0, 1, 0], [1, 0, 1]])
    none = found.counts(torch.zeros(0, 3), y[:0])
    some = found.counts(guess(0, 1), y)
    assert math.isfinite(found.value(none)) and found.value(none + some) == found.value(some)
    if isinstance(found, Accuracy | Confusion | Perplexity | PerplexityOfBatches):
        assert found.counted(torch.stack([none, some])).tolist() == [False, True]


def test_matthews_by_hand():
    """For two classes: (TP TN - FP FN) / sqrt((TP + FP)(TP + FN)(TN + FP)(TN + FN)): TP 2, TN 1, FP 1, FN 1."""
    y, logits = torch.tensor([1, 1, 1, 0, 0]), guess(1, 1, 0, 0, 1, of=2)
    assert score(Matthews(), logits, y) == pytest.approx(1 / 6)
    assert score(Matthews(), logits, torch.ones(5, dtype=torch.int64)) == 0


def test_matthews_is_scikit_learns():
    from sklearn.metrics import matthews_corrcoef

    generator = torch_generator(0, "test:noise")
    logits, y = torch.randn(60, 7, generator=generator), torch.randint(5, (60,), generator=generator)
    assert score(Matthews(), logits, y) == pytest.approx(matthews_corrcoef(y.numpy(), logits.argmax(1).numpy()))


def test_label_f1_is_scikit_learns():
    """A label that no sample has and no prediction names counts 0."""
    from sklearn.metrics import f1_score

    y = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0]])
    guesses = np.array([[1, 0, 0], [0, 0, 0], [1, 1, 0], [1, 0, 0]])
    found = score(LabelF1(), torch.tensor(guesses * 2.0 - 1), torch.tensor(y))
    assert found == pytest.approx(f1_score(y, guesses, average="macro", zero_division=0)) == pytest.approx(22 / 45)


def test_scores_of_many_classes_count_each_class_once():
    """A matrix of all pairs of 30,000 classes would take 7 GB; scores of equal counts are counted once."""
    counts = Matthews().counts(torch.zeros(2, 30_000), torch.tensor([0, 1]))
    assert counts.shape == (90_000,) and Matthews().measure == MacroF1().measure != LabelF1().measure


def test_confusion_is_scikit_learns():
    from sklearn.metrics import balanced_accuracy_score, confusion_matrix

    generator = torch_generator(0, "test:noise")
    logits, y = torch.randn(60, 7, generator=generator), torch.randint(5, (60,), generator=generator)
    counts, guesses = Confusion().counts(logits, y), logits.argmax(1).numpy()
    assert np.array_equal(Confusion().matrix(counts), confusion_matrix(y.numpy(), guesses, labels=range(7)))
    own = np.isin(guesses, y.numpy())
    expected = balanced_accuracy_score(y.numpy()[own], guesses[own])
    assert Confusion().value(Confusion().counts(logits[own], y[own])) == pytest.approx(expected)
    assert "confusion is not valid for 101 classes. Allowed: at most 100" in raised(
        lambda: Confusion().counts(torch.zeros(1, 101), y[:1]), ConfigError
    )


class Wrong(Score):
    """Number of errors."""

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
    assert "exp.yaml: scores.0.name: 'test_goal:Missing' cannot be imported" in str(error.value)


def test_the_goal_of_classes():
    goal = Classes(3)
    assert [s.label for s in goal.scores] == ["accuracy", "loss"]
    logits, y = torch.tensor([[1.0, 2, 3], [0, 0, 0]]), torch.tensor([2, 0])
    assert torch.equal(goal.loss(logits, y), F.cross_entropy(logits, y))
    labels = np.array([2, 0, 1])
    assert goal.labels({"x": np.zeros(3), "y": labels}) is labels
    assert Classes(3) == goal and Classes(3, (TopK(k=2),)).scores == (TopK(k=2),)


# goals of tokens

LOGITS = torch.randn(2, 3, 5, generator=torch_generator(0, "test:logits"))


def test_the_goal_of_next_tokens():
    goal, y = NextToken(5, special=(0, 4)), torch.tensor([[1, 0, 2], [4, IGNORE_INDEX, IGNORE_INDEX]])
    counted = [(0, 0), (0, 1), (0, 2), (1, 0)]
    expected = torch.stack([F.cross_entropy(LOGITS[i, j], y[i, j]) for i, j in counted]).mean()
    assert goal.loss(LOGITS, y).item() == pytest.approx(expected.item())
    logits, labels = goal.rows(LOGITS, y)
    assert labels.tolist() == [1, 0, 2, 4] and torch.equal(logits, torch.stack([LOGITS[at] for at in counted]))
    logits, labels = goal.rows(LOGITS, y, "words")
    assert labels.tolist() == [1, 2] and torch.equal(logits, LOGITS[0, [0, 2]])
    assert (goal.classes, goal.kinds, Classes(3).kinds) == (5, 1, 3)
    assert goal.present({"x": torch.tensor([[3, 1, -1]])}).tolist() == [False, True, False, True, False]


def test_the_goal_of_masked_tokens():
    y = torch.tensor([[1, 5 + 0, 2], [5 + 3, IGNORE_INDEX, 4]])
    goal, of_masked = MaskedTokens(5, special=(0, 4)), MaskedTokens(5, loss_on="masked")
    assert goal.rows(LOGITS, y)[1].tolist() == [1, 0, 2, 3, 4]
    assert goal.rows(LOGITS, y, "masked")[1].tolist() == [0, 3]
    assert goal.rows(LOGITS, y, "words")[1].tolist() == [1, 2, 3]
    whole = F.cross_entropy(*goal.rows(LOGITS, y))
    masked = F.cross_entropy(*goal.rows(LOGITS, y, "masked"))
    assert goal.loss(LOGITS, y).item() == pytest.approx(whole.item())
    assert of_masked.loss(LOGITS, y).item() == pytest.approx(masked.item())


@pytest.mark.parametrize("goal", [NextToken(5), MaskedTokens(5, loss_on="masked")])
def test_a_batch_of_padding_has_no_loss_and_no_gradient(goal):
    logits = LOGITS.clone().requires_grad_()
    loss = goal.loss(logits, torch.full((2, 3), IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None and logits.grad.abs().max() == 0


def test_present_classes():
    assert label_set(torch.tensor([3, 1, 1]), 5).tolist() == [False, True, False, True, False]


# numbers and labels


def test_errors_of_numbers_by_hand():
    """Errors 1, -2 and 3, of targets 0, 2 and 4, whose squared deviations from 2 are 8."""
    y, given = torch.tensor([[0.0], [2], [4]]), torch.tensor([[1.0], [0], [7]])
    assert score(SquaredError(), given, y) == pytest.approx(14 / 3)
    assert score(AbsoluteError(), given, y) == pytest.approx(2)
    assert score(R2(), given, y) == pytest.approx(1 - 14 / 8)


def test_scores_of_numbers_are_scikit_learns():
    from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

    generator = torch_generator(0, "test:noise")
    y = torch.randn(50, 3, generator=generator) * torch.tensor([1.0, 10, 0.1]) + 100
    given = y + torch.randn(50, 3, generator=generator)
    for kind, expected in ((SquaredError, mean_squared_error), (AbsoluteError, mean_absolute_error), (R2, r2_score)):
        parts = sum(kind().counts(a, b) for a, b in zip(given.split(7), y.split(7), strict=True))
        assert kind().value(parts) == pytest.approx(expected(y, given), rel=1e-5)


def test_equal_targets_have_no_r2():
    equal, some = torch.full((3, 1), 0.1), torch.tensor([[0.1], [0.2], [0.1]])
    sums = [R2().counts(some, equal), R2().counts(some, some), R2().counts(equal[:1], equal[:1])]
    assert R2().counted(torch.stack(sums)).tolist() == [False, True, False]
    # as scikit-learn's
    assert [R2().value(one) for one in sums] == [0, 1, 1]


def test_scores_of_labels_are_scikit_learns():
    from sklearn.metrics import accuracy_score, f1_score, hamming_loss

    generator = torch_generator(0, "test:noise")
    logits, y = torch.randn(60, 4, generator=generator), torch.randint(2, (60, 4), generator=generator)
    logits, guessed = logits + y, (logits + y > 0).int()
    assert score(LabelAccuracy(), logits, y) == pytest.approx(1 - hamming_loss(y, guessed))
    assert score(ExactMatch(), logits, y) == pytest.approx(accuracy_score(y, guessed))
    assert score(LabelF1(), logits, y) == pytest.approx(f1_score(y, guessed, average="macro"))


def test_numbers_are_trained_standardised_and_scored_in_their_units():
    """Targets 10 and 30 have the mean 20 and the standard deviation 10; an output of 0.5 is 25."""
    goal = Numbers(1).fitted({"y": np.array([[10.0], [30]], np.float32)})
    assert (goal.mean, goal.std) == ((20.0,), (10.0,))
    y, outputs = torch.tensor([[10.0], [30]]), torch.tensor([[0.5], [0.5]])
    assert goal.loss(outputs, y).item() == pytest.approx((1.5**2 + 0.5**2) / 2)
    predictions, targets = goal.rows(outputs, y)
    assert predictions.tolist() == [[25], [25]] and torch.equal(targets, y)
    assert goal.plain() == {"target_mean": (20.0,), "target_std": (10.0,)}


def test_numbers_are_parted_by_their_quantiles():
    """Equal numbers are in one part."""
    goal = Numbers(2, quantiles=4)
    y = np.array([[7, 0], [1, 9], [3, 9], [5, 0], [2, 0], [8, 0], [6, 0], [4, 0]], np.float32)
    assert goal.labels({"y": y}).tolist() == [3, 0, 1, 2, 0, 3, 2, 1] and goal.kinds == 4
    assert goal.labels({"y": np.zeros((5, 1), np.float32)}).tolist() == [3] * 5
    assert goal.present({"y": torch.zeros(3, 2)}).tolist() == [True, True]


def test_label_sets_by_hand():
    """-log sigmoid(ln 3) = ln 4/3 for a label that is there, and ln 4 for one that is not."""
    goal, y = LabelSets(2), torch.tensor([[1, 0], [0, 0]], dtype=torch.uint8)
    logits = torch.full((2, 2), math.log(3))
    assert goal.loss(logits, y).item() == pytest.approx((math.log(4 / 3) + 3 * math.log(4)) / 4)
    assert goal.labels({"y": np.array([[0, 1], [0, 0], [1, 1]])}).tolist() == [1, 2, 0] and goal.kinds == 3
