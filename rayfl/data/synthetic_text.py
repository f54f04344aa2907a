"""Generated sequences of tokens for each text task, for tests and scale studies."""

from typing import Literal

import numpy as np
from pydantic import Field

from rayfl.core.seeds import numpy_generator
from rayfl.data.arrays import Arrays, Split
from rayfl.data.tokens import PAD, TaskName, TokenData, TokenTask


class SyntheticText(TokenData):
    """Sequences with frequent tokens per class, which a bag of words learns. They have at least half of `length`.

    The arrays depend on the fields below only, not on the run's seed.
    """

    name: Literal["synthetic_text"] = "synthetic_text"
    task: TaskName = "classes"
    """Task: predict the class of a sequence, the next token, or hidden tokens."""
    samples: int = Field(default=2000, ge=1)
    """Number of training sequences, balanced over the classes."""
    test_samples: int = Field(default=500, ge=1)
    """Number of test sequences."""
    classes: int = Field(default=4, ge=1)
    """Number of classes of sequences."""
    tokens: int = Field(default=50, ge=2)
    """Number of different tokens."""
    length: int = Field(default=12, ge=2)
    """Maximum number of tokens of a network input."""

    def load(self) -> Arrays:
        return Arrays(self._split("train", self.samples), self._split("test", self.test_samples))

    def _split(self, part: str, count: int) -> Split:
        draw, stored = numpy_generator(0, "synthetic", "text", part), self.token_task.stored
        y = np.arange(count) % self.classes
        # half of the tokens belong to the class
        anything = draw.integers(self.tokens, size=(count, stored))
        own = (anything // self.classes * self.classes + y[:, None]) % self.tokens
        x = np.where(draw.random((count, stored)) < 0.5, own, anything).astype(np.int32)
        ends = draw.integers(stored // 2 + 1, stored + 1, size=count)
        x[np.arange(stored) >= ends[:, None]] = PAD
        return self.token_task.split(x, y, self.name, part)

    @property
    def token_task(self) -> TokenTask:
        return TokenTask(self.task, self.tokens, self.length, self.classes)
