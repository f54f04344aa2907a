"""WikiText-2 (Merity et al. 2017): two million words of Wikipedia articles."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.config import ConfigError
from rayfl.data.arrays import Arrays, Split
from rayfl.data.files import InFolder, readable
from rayfl.data.text.base import LanguageText, Part, Texts, chunked
from rayfl.data.text.encoders import Encoder, Lookup, Tokens, Vocabulary
from rayfl.data.tokens import Order, TokenTask

FILES = ("wikitext-2/train.txt", "wikitext-2/test.txt")
UNKNOWN, END = "<ukn>", "<eos>"
WORDS = 33_279
"""Number of tokens of the training text, including `UNKNOWN` and `END`."""


class WikiText2(InFolder, LanguageText):
    """WikiText-2 as in HeteroFL: the training text is divided into `rows` equal rows, one per client.

    A row is divided into samples of `length` tokens in stored order: batches of one sample are HeteroFL's. The test
    text has rows too. It is stored chunk by chunk: evaluation batches of `test_rows` samples are HeteroFL's.
    Remainders are dropped. The validation text is not used.

    Token 0 is for unknown words, 1 is the end of a line. The words of the training text follow in the order of their
    first occurrence, including its <unk>. Sizes: 2,088,628 and 245,569 tokens, 33,279 different ones.
    """

    name: Literal["wikitext2"] = "wikitext2"
    task: Literal["masked_lm", "next_token"] = "masked_lm"
    """Task: predict hidden tokens (HeteroFL), or the next token."""
    rows: int = Field(default=100, ge=1)
    """Number of rows of the training text, and of users."""
    test_rows: int = Field(default=10, ge=1)
    """Number of rows of the test text."""
    length: int = Field(default=64, ge=1)
    """Tokens per sample."""
    vocabulary: int | None = Field(default=None, ge=1, le=WORDS - 2)
    """Number of words: the most frequent ones, in order of appearance. Default: all."""
    order: Order = "stored"
    not_in_tokens: ClassVar = ("task", "rows", "test_rows", "length")

    @property
    def published(self) -> tuple[int, int]:
        return (36_718, 4_358)

    def sources(self) -> Sequence[Path]:
        return self.all_of(FILES)

    def read(self) -> tuple[Texts, Texts, Mapping[str, Any]]:
        train, test = map(_lines, self.sources())
        return Texts(train), Texts(test), {}

    def encoder(self, train: Texts) -> Encoder:
        counts = Counter(chain.from_iterable(map(str.split, train.texts)))
        words = [word for word in counts if word not in (UNKNOWN, END)]
        asked = WORDS - 2 if self.vocabulary is None else self.vocabulary
        if len(words) < asked or (self.vocabulary is None and len(words) > asked):
            raise ConfigError(
                f"data: {self.sources()[0]} has {len(words)} different words. Allowed: the {WORDS - 2} of WikiText-2. "
                "Hint: reduce them by data.vocabulary"
            )
        kept = set(sorted(words, key=counts.__getitem__, reverse=True)[:asked])
        tokens = [UNKNOWN, END, *(word for word in words if word in kept)]
        index = {word: i for i, word in enumerate(tokens)}
        return Lookup(self._words, index, str.split, unknown=0, after=(1,))

    @property
    def _words(self) -> Vocabulary:
        return Vocabulary(WORDS if self.vocabulary is None else self.vocabulary + 2, (0, 1))

    @property
    def token_task(self) -> TokenTask:
        return self.language_task(self.task, self.vocabulary_or(self._words), self.length)

    def load(self) -> Arrays:
        corpus = self.corpus()
        train, _ = self._rows(corpus.train, self.rows, "rows")
        test, chunks = self._rows(corpus.test, self.test_rows, "test_rows")
        users = np.repeat(np.arange(self.rows), len(train) // self.rows)
        # order by chunk, then by row
        test = test.reshape(self.test_rows, chunks, -1).swapaxes(0, 1).reshape(test.shape)
        return Arrays(self._split(train, "train"), self._split(test, "test"), users)

    def _rows(self, part: Part, rows: int, field: str) -> tuple[np.ndarray, int]:
        """Return the chunks of a text, row after row, and their number per row."""
        overlap = self.token_task.stored - self.length
        each = len(part.tokens.ids) // rows
        if each <= overlap:
            raise ConfigError(
                f"data.{field}: {rows} is not valid. Allowed: at most {len(part.tokens.ids) // (overlap + 1)}, one "
                "prediction per row"
            )
        tokens = Tokens(part.tokens.ids, np.arange(rows + 1) * each)
        x, _ = chunked(tokens, self.length, overlap)
        return x, len(x) // rows

    def _split(self, x: np.ndarray, part: str) -> Split:
        x = self.filled(x, self.vocabulary_or(self._words))
        return self.token_task.split(x, None, self.name, part)


def _lines(path: Path) -> list[str]:
    with readable(path):
        return path.read_text("utf-8").splitlines(keepends=True)
