"""Base classes of text data sets: texts are tokenised once, and tokens become samples of one length."""

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.config import ConfigError
from rayfl.data.arrays import Arrays
from rayfl.data.files import InFolder
from rayfl.data.text.cache import cached, digest
from rayfl.data.text.encoders import Encoder, FromFiles, Tokens, Vocabulary, alongside, find_tokenizer
from rayfl.data.tokens import PAD, Order, TokenData, TokenTask

VERSION = 2
"""Version of the cached tokens. Another version is tokenised again."""
DRAWN = ("order", "mask_rate", "mask_rule", "loss_on", "padding")
"""Fields that do not affect tokens."""


@dataclass(frozen=True)
class Texts:
    """A split before tokenisation."""

    texts: Sequence[str]
    pairs: Sequence[str] | None = None
    """Second part of each text, for tasks on two texts."""
    y: np.ndarray | None = None
    """Class of each text [texts] int64."""
    users: np.ndarray | None = None
    """Natural user of each text [texts] int64."""


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
    """Number of truncated texts."""
    known: Mapping[str, Any]
    """Other results of reading, as plain JSON."""


class TextData(TokenData, ABC):
    """Texts, tokenised once and cached on disk by content (rayfl/data/text/cache.py)."""

    tokenizer: str | None = None
    """Folder with tokenizer.json, with vocab.json and merges.txt, or with vocab.txt. Default: none (words)."""
    order: Order = "lengths"
    """Order of samples in a client's epoch. lengths: batches of sequences of similar length, in random order. shuffled:
    random. stored: the stored order."""
    not_in_tokens: ClassVar[tuple[str, ...]] = ()
    """Further fields that do not affect tokens."""

    @property
    def published(self) -> tuple[int, int] | None:
        """Numbers of training and test texts of a published data set. None: not known."""
        return None

    @abstractmethod
    def sources(self) -> Sequence[Path]:
        """Return the source files. Raise ConfigError if one is missing."""

    @abstractmethod
    def read(self) -> tuple[Texts, Texts, Mapping[str, Any]]:
        """Return training set, test set and other results of reading, as plain JSON."""

    @abstractmethod
    def encoder(self, train: Texts) -> Encoder:
        """Return the encoder used without a tokenizer."""

    @property
    def is_marked(self) -> bool:
        """True if a tokenizer adds its special tokens around each text."""
        return False

    @property
    def longest(self) -> int | None:
        """Maximum number of tokens per text. None: no limit."""
        return None

    @property
    def base(self) -> Path | None:
        """Folder for relative paths of tokenizers, besides the working folder."""
        return self.folder if isinstance(self, InFolder) else None

    def corpus(self) -> Corpus:
        """Return the tokens, from the cache if possible."""
        excluded = {"tokenizer", "public", *DRAWN, *self.not_in_tokens, *self.not_in_result}
        key = {
            "version": VERSION,
            "settings": self.model_dump(mode="json", exclude=excluded),
            "files": [[path.suffix, digest(path)] for path in self.sources()],
            "tokenizer": [[path.name, digest(path)] for path in self._tokenizer()],
            "code": _code_of(type(self)),
        }
        return _unpacked(cached(key, lambda: _packed(self._tokenised())))

    @property
    def notes(self) -> tuple[str, ...]:
        corpus, found = self.corpus(), []
        texts = (len(corpus.train.tokens.lengths), len(corpus.test.tokens.lengths))
        if self.published not in (None, texts):
            found.append(
                f"data: the files of {self.name} have {texts[0]} + {texts[1]} texts. The published ones have "
                f"{self.published[0]} + {self.published[1]}"
            )
        if corpus.cut:
            found.append(
                f"data.max_length: {corpus.cut} of {sum(texts)} texts of {self.name} are longer than {self.longest} "
                "tokens and were truncated"
            )
        return tuple(found)

    def _tokenised(self) -> Corpus:
        train, test, known = self.read()
        files = self._tokenizer()
        encoder = FromFiles(files, self.is_marked) if files else self.encoder(train)
        (train_tokens, cut), (test_tokens, test_cut) = (
            encoder.encode(part.texts, part.pairs, self.longest) for part in (train, test)
        )
        return Corpus(
            Part(train_tokens, train.y, train.users),
            Part(test_tokens, test.y, test.users),
            encoder.vocabulary,
            cut + test_cut,
            known,
        )

    def _tokenizer(self) -> tuple[Path, ...]:
        return () if self.tokenizer is None else find_tokenizer(self.tokenizer, self.base)

    @property
    def attached(self) -> tuple[Path, ...]:
        files = self._tokenizer()
        return alongside(files[0].parent) if files else ()

    @property
    def vocabulary_files(self) -> tuple[Path, ...]:
        return self._tokenizer()

    def vocabulary_or(self, words: Vocabulary) -> Vocabulary:
        """Return the vocabulary of the tokenizer, or `words` without one."""
        files = self._tokenizer()
        return vocabulary_of(files, tuple(map(digest, files))) if files else words


class LabelledText(TextData, ABC):
    """Texts with one class each."""

    vocabulary: int = Field(default=10_000, ge=1)
    """Number of words without a tokenizer: the most frequent ones of the training texts."""
    max_length: int = Field(default=128, ge=3)
    """Maximum number of tokens per text, including special ones. Longer texts are truncated."""

    @property
    def is_marked(self) -> bool:
        return True

    @property
    def longest(self) -> int | None:
        return self.max_length

    def labelled_task(self, vocabulary: Vocabulary, classes: int) -> TokenTask:
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
        train, test = (
            task.split(padded(part.tokens, task.stored), part.y, self.name) for part in (corpus.train, corpus.test)
        )
        return Arrays(train, test, corpus.train.users, corpus.test.users)


class LanguageText(TextData, ABC):
    """Texts for the prediction of tokens."""

    mask_rate: float = Field(default=0.15, gt=0, lt=1)
    """masked_lm: probability of hiding a token."""
    mask_rule: Literal["mask", "bert"] = "mask"
    """masked_lm: replacement of a hidden token in training. mask: the mask (HeteroFL). bert: with probability 0.8 the
    mask, 0.1 a random token, 0.1 the token itself. Evaluations use the mask and always hide the same tokens."""
    loss_on: Literal["all", "masked"] = "all"
    """masked_lm: positions in the loss (HeteroFL: all, BERT: masked)."""
    padding: Literal["ignored", "token"] = "ignored"
    """Padding of sequences. ignored: padding does not count. token: padding is a token like any other (FedRolex)."""

    def language_task(self, name: Literal["next_token", "masked_lm"], vocabulary: Vocabulary, length: int) -> TokenTask:
        if self.padding == "token" and vocabulary.padding is None:
            raise ConfigError("data.padding: the tokenizer has no padding token. Allowed: ignored")
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
        """Return sequences x [N, T] with the padding selected by `padding`."""
        return np.where(x == PAD, np.int32(vocabulary.padding or 0), x) if self.padding == "token" else x


def _code_of(kind: type) -> list[str]:
    """Return digests of the modules of another package that define a class and its bases."""
    own = [one for one in kind.__mro__ if issubclass(one, TextData) and one.__module__.partition(".")[0] != "rayfl"]
    files = {one: getattr(sys.modules.get(one.__module__), "__file__", None) for one in own}
    # a class of a notebook has no file: its tokens are not found again
    return [digest(Path(file)) if file else f"{os.getpid()}-{id(one)}" for one, file in files.items()]


@lru_cache(maxsize=8)
def vocabulary_of(files: tuple[Path, ...], digests: tuple[str, ...]) -> Vocabulary:
    """Return the vocabulary of a tokenizer from a cache. Changed digests of its files invalidate the entry."""
    return FromFiles(files, special=False).vocabulary


def padded(tokens: Tokens, width: int) -> np.ndarray:
    """Return padded texts [texts, width] int32. No text may be longer than `width`."""
    x = np.full((len(tokens.lengths), width), PAD, np.int32)
    x[np.arange(width) < tokens.lengths[:, None]] = tokens.ids
    return x


def chunked(tokens: Tokens, length: int, overlap: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide every text into pieces of length + overlap tokens; a piece starts with the last `overlap` tokens of the
    previous one. Return padded pieces [pieces, length + overlap] int32 and the text of each piece [pieces]."""
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


def _unpacked(arrays: Mapping[str, np.ndarray]) -> Corpus:
    facts = json.loads(str(arrays["facts"]))
    train, test = (
        Part(Tokens(arrays[f"{name}.ids"], arrays[f"{name}.ptr"]), arrays.get(f"{name}.y"), arrays.get(f"{name}.users"))
        for name in ("train", "test")
    )
    vocabulary = facts["vocabulary"] | {"special": tuple(facts["vocabulary"]["special"])}
    return Corpus(train, test, Vocabulary(**vocabulary), facts["cut"], facts["known"])
