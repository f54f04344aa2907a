"""Data set of the user's own texts."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.config import ConfigError, shown
from rayfl.core.seeds import numpy_generator
from rayfl.data.arrays import UNKNOWN, Arrays, Split
from rayfl.data.own import tidy
from rayfl.data.partition import hold_out
from rayfl.data.partition.base import rank
from rayfl.data.text.base import LabelledText, LanguageText, Part, Texts, chunked
from rayfl.data.text.encoders import Encoder, characters, frequent_words, words_and_marks
from rayfl.data.text.tables import Table, column, not_empty, read_table
from rayfl.data.tokens import TaskName, TokenTask


class OwnText(LabelledText, LanguageText):
    """Texts from files: .csv and .tsv with a header line, .jsonl with one object per line, .json as written by LEAF.

    Texts are classified, or divided into chunks of `max_length` tokens for the prediction of next or hidden tokens.
    LEAF's files have the columns text, label and user; samples that are lists have the columns 0, 1, ... for text.
    LEAF's Shakespeare has samples that overlap: `evaluation.holdout: 0`, and a file `test`.
    """

    name: Literal["text"] = "text"
    train: str
    """File of the training set. A relative path starts at the working folder."""
    test: str | None = None
    """File of the test set. Default: a held-out part of the training set."""
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Fraction held out if there is no `test`: the last texts of every user with a `user` column, otherwise random
    texts of every class with a fixed seed."""
    task: TaskName = "classes"
    """Task: predict the class of a text, the next token, or hidden tokens."""
    text: str = "text"
    """Column of the texts."""
    text_pair: str | None = None
    """Column of the second texts, for tasks on two texts."""
    label: str = "label"
    """Column of the classes: words, or integers starting at 0 or 1."""
    user: str | None = None
    """Column of the natural users, for `partition: users`."""
    units: Literal["words", "characters"] = "words"
    """Tokens without a tokenizer: words in lower case and punctuation, or characters."""
    not_in_tokens: ClassVar = ("train", "test")

    @property
    def is_marked(self) -> bool:
        return self.task == "classes"

    @property
    def longest(self) -> int | None:
        return self.max_length if self.task == "classes" else None

    def sources(self) -> Sequence[Path]:
        files = [("train", self.train), *([("test", self.test)] if self.test is not None else [])]
        for field, given in files:
            if not Path(given).expanduser().is_file():
                raise ConfigError(f"data.{field}: the file {given!r} does not exist. Allowed: an existing file")
        return [Path(given).expanduser() for _, given in files]

    def read(self) -> tuple[Texts, Texts, Mapping[str, Any]]:
        found = self.tables()
        classes = classes_of(found[0]["label"]) if self.task == "classes" else []
        users = {user: i for i, user in enumerate(dict.fromkeys(chain(*(of.get("user", ()) for of in found))))}
        users |= {"": UNKNOWN} if "" in users else {}
        texts = [self._texts(of, classes, users) for of in found]
        train, test = texts if len(texts) == 2 else self._held_out(texts[0])
        return train, test, {"classes": classes}

    def tables(self) -> list[Table]:
        """Return the columns of the training set, and of the test set if there is one (`_columns`)."""
        files = zip(self.sources(), ("train", "test"), strict=False)
        return [self._columns(read_table(path, field), path) for path, field in files]

    def _columns(self, table: Table, path: Path) -> Table:
        """Return the configured columns of a table by their field."""
        asked = {"text": self.text, "text_pair": self.text_pair, "user": self.user}
        asked["label"] = self.label if self.task == "classes" else None
        found = {of: column(table, name, of, path) for of, name in asked.items() if name is not None}
        found |= {of: not_empty(found[of], of, path) for of in ("text", "label") if of in found}
        # a class may be a space
        return found | {of: [tidy(cell) or cell for cell in found[of]] for of in ("label", "user") if of in found}

    def _texts(self, found: Table, classes: Sequence[str], users: Mapping[str, int]) -> Texts:
        y = None
        if "label" in found:
            number = {name: i for i, name in enumerate(classes)}
            if unknown := sorted(set(found["label"]) - set(number)):
                raise ConfigError(
                    f"data.test: the class {unknown[0]!r} is not in the training set. Allowed: {', '.join(classes)}"
                )
            y = np.array([number[name] for name in found["label"]], np.int64)
        user = np.array([users[name] for name in found["user"]], np.int64) if "user" in found else None
        return Texts(found["text"], found.get("text_pair"), y, user)

    def _held_out(self, texts: Texts) -> tuple[Texts, Texts]:
        kept, held_out = held_out_rows(len(texts.texts), texts.y, texts.users, self.test_fraction)
        return _picked(texts, kept), _picked(texts, held_out)

    def encoder(self, train: Texts) -> Encoder:
        texts = chain(train.texts, train.pairs or ())
        if self.units == "characters":
            return characters(texts, None)
        return frequent_words(texts, words_and_marks, self.vocabulary, ends=self.task != "classes")

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in their order."""
        return tuple(self.corpus().known["classes"])

    @property
    def token_task(self) -> TokenTask:
        corpus = self.corpus()
        if self.task == "classes":
            return self.labelled_task(corpus.vocabulary, len(corpus.known["classes"]))
        return self.language_task(self.task, corpus.vocabulary, self.max_length)

    @property
    def offers(self) -> Mapping[str, Any]:
        return {**super().offers, "class_names": self.class_names} if self.task == "classes" else super().offers

    def load(self) -> Arrays:
        if self.task == "classes":
            return super().load()
        corpus = self.corpus()
        (train, users), (test, test_users) = self._split(corpus.train, "train"), self._split(corpus.test, "test")
        return Arrays(train, test, users, test_users)

    def _split(self, part: Part, name: str) -> tuple[Split, np.ndarray | None]:
        """Return samples and their users."""
        task = self.token_task
        x, text = chunked(part.tokens, self.max_length, task.stored - self.max_length)
        x = self.filled(x, self.corpus().vocabulary)
        return task.split(x, None, self.name, name), None if part.users is None else part.users[text]


def held_out_rows(
    count: int, y: np.ndarray | None, users: np.ndarray | None, fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the training set and of the test set, [n] each: of every user the last ones are for testing;
    without users [count] random ones of every class y [count], with a fixed seed."""
    if users is not None:
        user = np.unique(users, return_inverse=True)[1]
        totals = np.bincount(user)[user]
        last = rank(user) >= totals - np.rint(totals * fraction)
        kept, held_out = np.flatnonzero(~last), np.flatnonzero(last)
    else:
        y = np.zeros(count, np.int64) if y is None else y
        kept, held_out = hold_out(y, fraction, numpy_generator(0, "hold_out", "test"))
    if not len(kept) or not len(held_out):
        raise ConfigError(
            f"data.test_fraction: {fraction:g} of {count} texts gives {len(kept)} for training and {len(held_out)} for "
            "testing. Allowed: at least one for each, or a file data.test"
        )
    return kept, held_out


def classes_of(labels: Sequence[str]) -> list[str]:
    """Return the sorted names of the classes, numbers by value."""
    names = sorted(set(labels))
    if not all(name.isdecimal() and str(int(name)) == name for name in names):
        return names
    numbers = sorted(map(int, names))
    if missing := set(range(numbers[0], numbers[-1])) - set(numbers) | set(range(1, numbers[0])):
        raise ConfigError(
            f"data.label: the classes are {shown(numbers)}, but there is no text of class {min(missing)}. Allowed: "
            "words, or integers starting at 0 or 1 without gaps"
        )
    return list(map(str, numbers))


def _picked(texts: Texts, rows: np.ndarray) -> Texts:
    at: list[int] = rows.tolist()
    pairs = None if texts.pairs is None else [texts.pairs[i] for i in at]
    y, users = (None if cells is None else cells[rows] for cells in (texts.y, texts.users))
    return Texts([texts.texts[i] for i in at], pairs, y, users)
