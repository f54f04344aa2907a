"""Shakespeare's plays by role: next words, or next characters, of people who speak unlike each other."""

import json
import lzma
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.data.arrays import Arrays, Split
from rayfl.data.files import InFolder
from rayfl.data.text.base import LanguageText, Part, Texts, chunked
from rayfl.data.text.encoders import Encoder, Tokens, Vocabulary, characters, frequent_words, of_characters, of_words
from rayfl.data.tokens import TokenTask

FILES = ("shakespeare/by_speaker.jsonl.xz", "shakespeare/by_speaker.jsonl")
"""One of them: a line of JSON a role, {"user": "play|ROLE", "speeches": [text, ...]}."""
CHARACTERS = 80
"""Different ones in the text."""


class Shakespeare(InFolder, LanguageText):
    """The speeches of 1,313 roles; each role is a user. The last fifth of its speeches, one at least, are its test
    split.

    With `units: words`, `length: 20` and `padding: token` it stands in for Stack Overflow, on which FedRolex's Table 2
    has its next-word prediction: 20 words that each predict the next one, of a vocabulary of 10,000, in TFF's numbering
    (0 padding, 1 ... 10,000 the words from the most frequent one on, then unknown words, begin and end of a speech).
    Accuracies on it do not compare with those on Stack Overflow.

    A role's speeches are one text, which is cut in chunks of `length` tokens, each predicted once. A LEAF sample is
    another thing: `stride`.
    """

    name: Literal["shakespeare"] = "shakespeare"
    task: Literal["next_token", "masked_lm"] = "next_token"
    """What is learned: the next token, or hidden ones."""
    units: Literal["words", "characters"] = "words"
    """Tokens, unless a tokenizer is given: words in lower case and the marks .,;:?! or characters."""
    vocabulary: int = Field(default=10_000, ge=1)
    """With `units: words` so many of them, the most frequent ones of the training text."""
    length: int = Field(default=20, ge=1)
    """Tokens of a chunk that a network sees (FedRolex: 20 words, LEAF: 80 characters)."""
    stride: int | None = Field(default=None, ge=1)
    """Given, a sample is `length` tokens and its class is the token that follows; the samples of a role begin so many
    tokens apart. LEAF: 1, which with characters is 4 million samples and 1.4 GB."""
    min_speeches: int = Field(default=2, ge=1)
    """Roles with fewer speeches are left out. A role with a single one has no test split."""
    not_in_tokens: ClassVar = ("task", "length", "stride")

    @property
    def base(self) -> Path:
        return self.folder

    def sources(self) -> Sequence[Path]:
        found = [self.folder / file for file in FILES if (self.folder / file).is_file()]
        if not found:
            raise self.missing(FILES[:1])
        return found[:1]

    def read(self) -> tuple[Texts, Texts, Mapping[str, Any]]:
        [path] = self.sources()
        text = lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8")
        with text as lines:
            roles = [json.loads(line)["speeches"] for line in lines]
        # words have a begin and an end of their own
        mark = "" if self.units == "words" and self.tokenizer is None else "\n"
        kept = {role: speeches for role, speeches in enumerate(roles) if len(speeches) >= self.min_speeches}
        held = {role: max(1, len(speeches) // 5) if len(speeches) > 1 else 0 for role, speeches in kept.items()}
        train = {role: speeches[: len(speeches) - held[role]] for role, speeches in kept.items()}
        test = {role: speeches[len(speeches) - held[role] :] for role, speeches in kept.items()}
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
        return TokenTask("classes", vocabulary.ids, self.length, vocabulary.ids, order=self.order)

    def load(self) -> Arrays:
        corpus = self.corpus()
        (train, users), (test, test_users) = (
            self._split(part, name) for part, name in ((corpus.train, "train"), (corpus.test, "test"))
        )
        return Arrays(train, test, users, test_users)

    def _split(self, part: Part, name: str) -> tuple[Split, np.ndarray]:
        """Samples, and whose they are."""
        assert part.users is not None
        roles, first = np.unique(part.users, return_index=True)
        # all speeches of a role in a row
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
    """The speeches of all roles, each with a mark behind it."""
    users = np.repeat([*speeches], [len(some) for some in speeches.values()])
    return Texts([speech + mark for some in speeches.values() for speech in some], users=users)


def words_of(text: str) -> list[str]:
    """Words in lower case, and marks."""
    return re.findall(r"[a-z']+|[.,;:?!]", text.lower())


def windows(tokens: Tokens, width: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Of every text the stretches of `width` tokens that begin a multiple of `stride` behind its begin, [windows,
    width] int32, and the text of each [windows]."""
    able = np.flatnonzero(tokens.lengths >= width)
    found = [
        np.lib.stride_tricks.sliding_window_view(tokens.ids[tokens.ptr[i] : tokens.ptr[i + 1]], width)[::stride]
        for i in able
    ]
    if not found:
        return np.empty((0, width), np.int32), able
    return np.concatenate(found), np.repeat(able, [len(some) for some in found])
