"""What data sets of text have in common: texts become tokens once, and tokens become samples of one length."""

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.config import ConfigError
from rayfl.data.arrays import Arrays, Column
from rayfl.data.base import DataSet
from rayfl.data.goal import Goal
from rayfl.data.samples import Prepare
from rayfl.data.text.cache import cached, digest
from rayfl.data.text.encoders import Encoder, FromFiles, Tokens, Vocabulary, find_tokenizer
from rayfl.data.tokens import PAD, Order, TokenTask

VERSION = 1
"""Of what this package makes of files: another one is tokenised anew."""
DRAWN = ("order", "mask_rate", "mask_rule", "loss_on", "padding")
"""Fields that change nothing in tokens."""


@dataclass(frozen=True)
class Texts:
    """A split before it is tokenised."""

    texts: Sequence[str]
    pairs: Sequence[str] | None = None
    """The second part of each text, of tasks on two."""
    y: np.ndarray | None = None
    """The class of each text [texts] int64."""
    users: np.ndarray | None = None
    """The natural user of each text [texts] int64."""


@dataclass(frozen=True)
class Part:
    """A split as tokens; `y` and `users` as in `Texts`."""

    tokens: Tokens
    y: np.ndarray | None = None
    users: np.ndarray | None = None


@dataclass(frozen=True)
class Corpus:
    """A data set as tokens."""

    train: Part
    test: Part
    vocabulary: Vocabulary
    cut: int
    """Texts that were longer than a sample may be."""
    known: Mapping[str, Any]
    """What else its reader knows, as plain JSON."""


class TextData(DataSet, ABC):
    """Texts, which are read and made into tokens once, and kept on disk by content (rayfl/data/text/cache.py)."""

    tokenizer: str | None = None
    """Folder with tokenizer.json, with vocab.json and merges.txt, or with vocab.txt. Unless given tokens are the words
    of the training texts."""
    order: Order = "lengths"
    """How a client's epoch is ordered. lengths: batches of sequences of about one length, in random order. shuffled: at
    random. stored: as the text has them."""
    not_in_tokens: ClassVar[tuple[str, ...]] = ()
    """More fields that change nothing in tokens."""

    # what a data set says

    @abstractmethod
    def sources(self) -> Sequence[Path]:
        """What texts are read from. A ConfigError if one of them is missing."""

    @abstractmethod
    def read(self) -> tuple[Texts, Texts, Mapping[str, Any]]:
        """Training and test set, and what else the reader knows, as plain JSON."""

    @abstractmethod
    def encoder(self, train: Texts) -> Encoder:
        """How texts become tokens where no tokenizer is given."""

    @property
    @abstractmethod
    def token_task(self) -> TokenTask:
        """What is learned."""

    @property
    def is_marked(self) -> bool:
        """Whether a tokenizer puts its special tokens around each text."""
        return False

    @property
    def longest(self) -> int | None:
        """Tokens that a text is cut to; None: it is not."""
        return None

    @property
    def base(self) -> Path | None:
        """The folder below which a tokenizer may lie, besides the working folder."""
        return None

    # what follows from it

    def corpus(self) -> Corpus:
        """As tokens: from disk, or made now."""
        excluded = {"tokenizer", "public", *DRAWN, *self.not_in_tokens, *self.not_in_result}
        made_of = {
            "version": VERSION,
            "settings": self.model_dump(mode="json", exclude=excluded),
            "files": [[path.suffix, digest(path)] for path in self.sources()],
            "tokenizer": [[path.name, digest(path)] for path in self._tokenizer()],
        }
        kept = cached(made_of, lambda: _packed(self._made()))
        return _unpacked(kept)

    def _made(self) -> Corpus:
        train, test, known = self.read()
        files = self._tokenizer()
        encoder = FromFiles(files, self.is_marked) if files else self.encoder(train)
        (of_train, cut), (of_test, test_cut) = (
            encoder.encode(part.texts, part.pairs, self.longest) for part in (train, test)
        )
        return Corpus(
            Part(of_train, train.y, train.users),
            Part(of_test, test.y, test.users),
            encoder.vocabulary,
            cut + test_cut,
            known,
        )

    def _tokenizer(self) -> tuple[Path, ...]:
        """Its files; none where none is given."""
        return () if self.tokenizer is None else find_tokenizer(self.tokenizer, self.base)

    @property
    def attached(self) -> tuple[Path, ...]:
        return self._tokenizer()

    def vocabulary_or(self, words: Vocabulary) -> Vocabulary:
        """The tokenizer's; where none is given, that of words."""
        files = self._tokenizer()
        return vocabulary_of(files, tuple(map(digest, files))) if files else words

    @property
    def columns(self) -> Mapping[str, Column]:
        return self.token_task.columns

    @property
    def prepare(self) -> Prepare:
        return self.token_task.prepare

    @property
    def goal(self) -> Goal:
        return self.token_task.goal

    @property
    def offers(self) -> Mapping[str, Any]:
        return self.token_task.offers


class LabelledText(TextData, ABC):
    """Texts of one class each."""

    vocabulary: int = Field(default=10_000, ge=1)
    """Without a tokenizer, so many words: the most frequent ones of the training texts."""
    max_length: int = Field(default=128, ge=3)
    """Tokens of a text, special ones included. Longer texts are cut."""

    @property
    def is_marked(self) -> bool:
        return True

    @property
    def longest(self) -> int | None:
        return self.max_length

    def labelled_task(self, vocabulary: Vocabulary, classes: int) -> TokenTask:
        """Telling so many classes apart, as the fields say."""
        return TokenTask(
            "classes",
            vocabulary.ids,
            self.max_length,
            classes,
            vocabulary.special,
            order=self.order,
            pad=vocabulary.padding,
        )

    def load(self) -> Arrays:
        corpus, task = self.corpus(), self.token_task
        if corpus.cut:
            texts = len(corpus.train.tokens.lengths) + len(corpus.test.tokens.lengths)
            warnings.warn(
                f"data.max_length: {corpus.cut} of {texts} texts of {self.name} are longer than {self.max_length} "
                "tokens, and were cut",
                stacklevel=2,
            )
        train, test = (
            task.split(padded(part.tokens, task.stored), part.y, self.name) for part in (corpus.train, corpus.test)
        )
        return Arrays(train, test, corpus.train.users, corpus.test.users)


class LanguageText(TextData, ABC):
    """Texts whose tokens are to be predicted."""

    mask_rate: float = Field(default=0.15, gt=0, lt=1)
    """masked_lm: the probability that a token is hidden, each by itself."""
    mask_rule: Literal["mask", "bert"] = "mask"
    """masked_lm: what hides a token in training. mask: the mask (HeteroFL). bert: with probability 0.8 the mask, 0.1
    any token, 0.1 nothing. In an evaluation it is the mask, and the same tokens are hidden every time."""
    loss_on: Literal["all", "masked"] = "all"
    """masked_lm: positions that the loss is over. all: HeteroFL, masked: BERT."""
    padding: Literal["ignored", "token"] = "ignored"
    """Behind the end of a sequence. token: it is filled up with a token of its own, which counts as any other
    (FedRolex)."""

    def language_task(self, name: Literal["next_token", "masked_lm"], vocabulary: Vocabulary, length: int) -> TokenTask:
        """Predicting tokens, as the fields say."""
        if self.padding == "token" and vocabulary.padding is None:
            raise ConfigError(
                "data.padding: given 'token'; allowed: ignored, because the tokenizer has none for padding"
            )
        return TokenTask(
            name,
            vocabulary.ids,
            length,
            special=vocabulary.special,
            mask=vocabulary.mask,
            order=self.order,
            rate=self.mask_rate,
            rule=self.mask_rule,
            loss_on=self.loss_on,
            pad=vocabulary.padding if self.padding == "ignored" else None,
        )

    def filled(self, x: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
        """Sequences [N, T] with their padding as `padding` says."""
        return np.where(x == PAD, np.int32(vocabulary.padding or 0), x) if self.padding == "token" else x


@lru_cache(maxsize=8)
def vocabulary_of(files: tuple[Path, ...], digests: tuple[str, ...]) -> Vocabulary:
    """That of a tokenizer; it is read again if its files have changed."""
    return FromFiles(files, special=False).vocabulary


def padded(tokens: Tokens, width: int) -> np.ndarray:
    """Every text a row [texts, width] int32; none is longer."""
    x = np.full((len(tokens.lengths), width), PAD, np.int32)
    x[np.arange(width) < tokens.lengths[:, None]] = tokens.ids
    return x


def chunked(tokens: Tokens, length: int, overlap: int) -> tuple[np.ndarray, np.ndarray]:
    """Every text cut in pieces of length + overlap tokens; a piece begins with the `overlap` last ones of the piece
    before. Pieces [pieces, length + overlap] int32, the last one of a text padded, and the text of each [pieces]."""
    pieces = np.maximum(-(-(tokens.lengths - overlap) // length), 0)
    text = np.repeat(np.arange(len(pieces)), pieces)
    place = np.arange(len(text)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = tokens.ptr[text] + place * length
    at = start[:, None] + np.arange(length + overlap)
    there = at < tokens.ptr[text + 1][:, None]
    return np.where(there, tokens.ids[np.where(there, at, 0)], np.int32(PAD)), text


def _packed(corpus: Corpus) -> dict[str, np.ndarray]:
    facts = {"vocabulary": asdict(corpus.vocabulary), "cut": corpus.cut, "known": corpus.known}
    found = {"facts": np.array(json.dumps(facts))}
    for name, part in (("train", corpus.train), ("test", corpus.test)):
        columns = {"ids": part.tokens.ids, "ptr": part.tokens.ptr, "y": part.y, "users": part.users}
        found |= {f"{name}.{column}": array for column, array in columns.items() if array is not None}
    return found


def _unpacked(kept: Mapping[str, np.ndarray]) -> Corpus:
    facts = json.loads(str(kept["facts"]))
    train, test = (
        Part(Tokens(kept[f"{name}.ids"], kept[f"{name}.ptr"]), kept.get(f"{name}.y"), kept.get(f"{name}.users"))
        for name in ("train", "test")
    )
    vocabulary = facts["vocabulary"] | {"special": tuple(facts["vocabulary"]["special"])}
    return Corpus(train, test, Vocabulary(**vocabulary), facts["cut"], facts["known"])
