"""Shakespeare's plays by role: prediction of words or characters, with one user per role."""

import json
import lzma
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rayfl.config import ConfigError
from rayfl.data.arrays import Arrays, Split
from rayfl.data.files import InFolder, readable
from rayfl.data.text.base import LanguageText, Part, Texts, chunked
from rayfl.data.text.encoders import Encoder, Tokens, Vocabulary, characters, frequent_words, of_characters, of_words
from rayfl.data.tokens import TokenTask

FILES = ("shakespeare/by_speaker.jsonl.xz", "shakespeare/by_speaker.jsonl")
"""Alternative files with one line of JSON per role, {"user": "play|ROLE", "speeches": [text, ...]}."""
CHARACTERS = 80
"""Number of different characters in the text."""


class Shakespeare(InFolder, LanguageText):
    """Speeches of 1,313 roles; each role is a user. The last fifth of its speeches, at least one, is its test split.

    With `units: words`, `length: 20` and `padding: token` it replaces Stack Overflow in the next-word prediction of
    FedRolex's Table 2: 20 words, each predicting the next one, from a vocabulary of 10,000 in TFF's numbering (0
    padding, 1 ... 10,000 words by frequency, then unknown words, begin and end of a speech). Accuracies are not
    comparable with those on Stack Overflow.

    The speeches of a role are one text, divided into chunks of `length` tokens. Each token is predicted once. See
    `stride` for LEAF's samples.
    """

    name: Literal["shakespeare"] = "shakespeare"
    task: Literal["next_token", "masked_lm"] = "next_token"
    """Task: predict the next token, or hidden tokens."""
    units: Literal["words", "characters"] = "words"
    """Tokens without a tokenizer: words in lower case and the punctuation .,;:?! or characters."""
    vocabulary: int = Field(default=10_000, ge=1)
    """Number of words for `units: words`: the most frequent ones of the training text."""
    length: int = Field(default=20, ge=1)
    """Tokens per network input (FedRolex: 20 words, LEAF: 80 characters)."""
    stride: int | None = Field(default=None, ge=1)
    """Distance of the starts of samples, which are `length` tokens with the next token as class (LEAF: 1, which gives 4
    million samples of characters and 1.4 GB). Samples that overlap cannot be held out: `evaluation.holdout: 0`.
    Default: none; samples are chunks."""
    min_speeches: int = Field(default=2, ge=1)
    """Minimum number of speeches per role. A role with one speech has no test split."""
    not_in_tokens: ClassVar = ("task", "length", "stride")

    @model_validator(mode="after")
    def _only_of_chunks(self) -> Self:
        fields = ("task", "padding", "mask_rate", "mask_rule", "loss_on")
        given = [name for name in fields if getattr(self, name) != type(self).model_fields[name].default]
        if self.stride is not None and given:
            raise ConfigError(
                f"{given[0]}: {getattr(self, given[0])!r} is not supported with stride, whose samples have one class. "
                "Allowed: no value"
            )
        return self

    @property
    def overlap(self) -> str:
        if self.stride is None or self.stride > self.length:
            return ""
        return (
            f"samples at a distance (data.stride) of {self.stride} tokens overlap, with {self.length + 1} tokens each"
        )

    @property
    def published(self) -> tuple[int, int] | None:
        return (24_860, 5_980) if self.min_speeches == 2 else None

    def sources(self) -> Sequence[Path]:
        found = [self.folder / file for file in FILES if (self.folder / file).is_file()]
        if not found:
            raise self.missing(FILES[:1])
        return found[:1]

    def read(self) -> tuple[Texts, Texts, Mapping[str, Any]]:
        [path] = self.sources()
        text = lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8")
        with readable(path), text as lines:
            roles = [json.loads(line)["speeches"] for line in lines]
        # words have begin and end tokens
        mark = "" if self.units == "words" and self.tokenizer is None else "\n"
        kept = {role: speeches for role, speeches in enumerate(roles) if len(speeches) >= self.min_speeches}
        first = {role: max(1, len(speeches) - max(1, len(speeches) // 5)) for role, speeches in kept.items()}
        train = {role: speeches[: first[role]] for role, speeches in kept.items()}
        test = {role: speeches[first[role] :] for role, speeches in kept.items()}
        return _texts(train, mark), _texts(test, mark), {}

    def encoder(self, train: Texts) -> Encoder:
        if self.units == "characters":
            return characters(train.texts, CHARACTERS)
        return frequent_words(train.texts, words_of, self.vocabulary, ends=True)

    @property
    def token_task(self) -> TokenTask:
        vocabulary = self._vocabulary
        if self.stride is None:
            return self.language_task(self.task, vocabulary, self.length)
        return TokenTask(
            "classes", vocabulary.ids, self.length, vocabulary.ids, order=self.order, pad=vocabulary.padding
        )

    def load(self) -> Arrays:
        corpus = self.corpus()
        (train, users), (test, test_users) = self._split(corpus.train, "train"), self._split(corpus.test, "test")
        return Arrays(train, test, users, test_users)

    def _split(self, part: Part, name: str) -> tuple[Split, np.ndarray]:
        """Return samples and their users."""
        assert part.users is not None
        roles, first = np.unique(part.users, return_index=True)
        # concatenate the speeches of each role
        tokens = Tokens(part.tokens.ids, np.append(part.tokens.ptr[first], part.tokens.ptr[-1]))
        task = self.token_task
        if self.stride is None:
            x, role = chunked(tokens, self.length, task.stored - self.length)
            return task.split(self.filled(x, self._vocabulary), None, self.name, name), roles[role]
        x, role = windows(tokens, self.length + 1, self.stride)
        return task.split(np.ascontiguousarray(x[:, :-1]), x[:, -1].astype(np.int64), self.name, name), roles[role]

    @property
    def _vocabulary(self) -> Vocabulary:
        return self.vocabulary_or(of_words(self.vocabulary) if self.units == "words" else of_characters(CHARACTERS))


def _texts(speeches: Mapping[int, Sequence[str]], mark: str) -> Texts:
    """Return the speeches of all roles, each followed by `mark`."""
    users = np.repeat([*speeches], [len(some) for some in speeches.values()])
    return Texts([speech + mark for some in speeches.values() for speech in some], users=users)


def words_of(text: str) -> list[str]:
    """Split a text into words in lower case and punctuation."""
    return re.findall(r"[a-z']+|[.,;:?!]", text.lower())


def windows(tokens: Tokens, width: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the windows of every text at multiples of `stride`, [windows, width] int32, and the text of each window
    [windows]."""
    able = np.flatnonzero(tokens.lengths >= width)
    found = [
        np.lib.stride_tricks.sliding_window_view(tokens.ids[tokens.ptr[i] : tokens.ptr[i + 1]], width)[::stride]
        for i in able
    ]
    if not found:
        return np.empty((0, width), np.int32), able
    return np.concatenate(found), np.repeat(able, [len(some) for some in found])
