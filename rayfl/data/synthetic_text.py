"""Sequences of tokens made up on the spot, for each task on text: for tests and scale studies."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rayfl.core.seeds import numpy_generator
from rayfl.data.arrays import Arrays, Column, Split
from rayfl.data.base import DataSet
from rayfl.data.goal import Goal
from rayfl.data.samples import Prepare
from rayfl.data.tokens import PAD, TaskName, TokenTask


class SyntheticText(DataSet):
    """Every class prefers tokens of its own: a bag of words learns it. Sequences are half of `length` and longer.

    The same arrays in every run: they depend on the fields below only, not on the run's seed.
    """

    name: Literal["synthetic_text"] = "synthetic_text"
    task: TaskName = "classes"
    """What is learned: the class of a sequence, the next token, or hidden tokens."""
    samples: int = Field(default=2000, ge=1)
    """Training sequences; the classes come round in turn."""
    test_samples: int = Field(default=500, ge=1)
    """Test sequences."""
    classes: int = Field(default=4, ge=1)
    """Number of classes of sequences."""
    tokens: int = Field(default=50, ge=2)
    """Number of different tokens."""
    length: int = Field(default=12, ge=2)
    """Tokens of the longest sequence that a network sees."""

    def load(self) -> Arrays:
        return Arrays(self._split("train", self.samples), self._split("test", self.test_samples))

    def _split(self, part: str, count: int) -> Split:
        draw, stored = numpy_generator(0, "synthetic", "text", part), self._task.stored
        y = np.arange(count) % self.classes
        # half of the tokens are a class's own
        anything = draw.integers(self.tokens, size=(count, stored))
        own = (anything // self.classes * self.classes + y[:, None]) % self.tokens
        x = np.where(draw.random((count, stored)) < 0.5, own, anything).astype(np.int32)
        ends = draw.integers(stored // 2 + 1, stored + 1, size=count)
        x[np.arange(stored) >= ends[:, None]] = PAD
        return self._task.split(x, y, self.name, part)

    @property
    def _task(self) -> TokenTask:
        return TokenTask(self.task, self.tokens, self.length, self.classes)

    @property
    def columns(self) -> Mapping[str, Column]:
        return self._task.columns

    @property
    def prepare(self) -> Prepare:
        return self._task.prepare

    @property
    def goal(self) -> Goal:
        return self._task.goal

    @property
    def offers(self) -> Mapping[str, Any]:
        return self._task.offers
