"""Early stopping."""

import math

import pytest

from rayfl.listeners import EarlyStopping


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ([2.0, 1.0, 1.0, 0.5, 0.6, 0.7], 6),
        ([math.nan, 2.0, 1.5, math.nan, 1.0], None),
        ([math.nan, math.nan, math.nan], 3),
        ([1.0, math.nan, math.nan], 3),
    ],
)
def test_a_loss_that_is_not_a_number_is_worse_than_any(losses, ends):
    stopping = EarlyStopping(metric="loss", mode="min", patience=2)
    told = [stopping.on_round({"round": t, "evaluated": True, "loss": loss}) for t, loss in enumerate(losses, 1)]
    assert next((t for t, reason in enumerate(told, 1) if reason), None) == ends


def test_rounds_without_an_evaluation_do_not_count():
    """The training loss is known after every round."""
    stopping = EarlyStopping(metric="train_loss", mode="min", patience=2)
    lines = [{"round": t, "train_loss": float(t)} | ({"evaluated": True} if t % 2 == 0 else {}) for t in range(1, 9)]
    told = [stopping.on_round(line) for line in lines]
    assert [t for t, reason in enumerate(told, 1) if reason] == [6]
