"""A user's own texts."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.config import ConfigError, shown
from rayfl.core.seeds import numpy_generator
from rayfl.data.arrays import Arrays, Split
from rayfl.data.partition import hold_out
from rayfl.data.partition.base import rank
from rayfl.data.text.base import LabelledText, LanguageText, Part, Texts, chunked
from rayfl.data.text.encoders import Encoder, characters, frequent_words, words_and_marks
from rayfl.data.text.tables import Table, column, not_empty, read_table
from rayfl.data.tokens import TaskName, TokenTask


class OwnText(LabelledText, LanguageText):
    """Texts of files: .csv and .tsv with a line of names, .jsonl with an object a line, .json as LEAF writes it.

    To be classified, or to learn the next or hidden tokens of; then a text is cut in chunks of `max_length` tokens.
    LEAF's files have the columns text, label and user; where its samples are lists, 0, 1, ... instead of text.
    """

    name: Literal["text"] = "text"
    train: str
    """File of the training set. A relative one is below the working folder."""
    test: str | None = None
    """File of the test set. Unless given a part of the training set is held out."""
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    """Share that is held out where there is no `test`: with a `user` column the last texts of every user, else of every
    class, at random, from a fixed seed."""
    task: TaskName = "classes"
    """What is learned: the class of a text, the next token, or hidden tokens."""
    text: str = "text"
    """Column of the texts."""
    text_pair: str | None = None
    """Column of their second parts, of tasks on two texts."""
    label: str = "label"
    """Column of the classes: any words, or whole numbers from 0 or 1 on."""
    user: str | None = None
    """Column of the natural users, for `partition: users`."""
    units: Literal["words", "characters"] = "words"
    """Tokens, unless a tokenizer is given: words in lower case and every other sign, or characters."""
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
                raise ConfigError(f"data.{field}: given {given!r}; allowed: an existing file")
        return [Path(given).expanduser() for _, given in files]

    def read(self) -> tuple[Texts, Texts, Mapping[str, Any]]:
        fields = ("train", "test")
        found = [self._columns(path, field) for path, field in zip(self.sources(), fields, strict=False)]
        classes = _classes(found[0]["label"]) if self.task == "classes" else []
        users = {user: i for i, user in enumerate(dict.fromkeys(chain(*(of.get("user", ()) for of in found))))}
        texts = [self._texts(of, classes, users) for of in found]
        train, test = texts if len(texts) == 2 else self._held_out(texts[0])
        return train, test, {"classes": classes}

    def _columns(self, path: Path, field: str) -> Table:
        """The columns that count, by the fields that name them."""
        table = read_table(path, field)
        asked = {"text": self.text, "text_pair": self.text_pair, "user": self.user}
        asked["label"] = self.label if self.task == "classes" else None
        found = {of: column(table, name, of, path) for of, name in asked.items() if name is not None}
        return found | {"text": not_empty(found["text"], "text", path)}

    def _texts(self, found: Table, classes: Sequence[str], users: Mapping[str, int]) -> Texts:
        y = None
        if "label" in found:
            number = {name: i for i, name in enumerate(classes)}
            if unknown := sorted(set(found["label"]) - set(number)):
                raise ConfigError(
                    f"data.test: given the class {unknown[0]!r}, which no training text has; allowed: "
                    f"{', '.join(classes)}"
                )
            y = np.array([number[name] for name in found["label"]], np.int64)
        whose = np.array([users[user] for user in found["user"]], np.int64) if "user" in found else None
        return Texts(found["text"], found.get("text_pair"), y, whose)

    def _held_out(self, texts: Texts) -> tuple[Texts, Texts]:
        count = len(texts.texts)
        if texts.users is not None:
            totals = np.bincount(texts.users)[texts.users]
            last = rank(texts.users) >= totals - np.rint(totals * self.test_fraction)
            kept, held = np.flatnonzero(~last), np.flatnonzero(last)
        else:
            y = np.zeros(count, np.int64) if texts.y is None else texts.y
            kept, held = hold_out(y, self.test_fraction, numpy_generator(0, "hold_out", "test"))
        if not len(kept) or not len(held):
            raise ConfigError(
                f"data.test_fraction: given {self.test_fraction:g} of {count} texts, which leaves {len(kept)} for "
                f"training and {len(held)} for testing; allowed: a share that leaves some for both, or a file data.test"
            )
        return _picked(texts, kept), _picked(texts, held)

    def encoder(self, train: Texts) -> Encoder:
        texts = chain(train.texts, train.pairs or ())
        if self.units == "characters":
            return characters(texts, None)
        return frequent_words(texts, words_and_marks, self.vocabulary, ends=self.task != "classes")

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of each class, in its order."""
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
        (train, users), (test, test_users) = (
            self._split(part, name) for part, name in ((corpus.train, "train"), (corpus.test, "test"))
        )
        return Arrays(train, test, users, test_users)

    def _split(self, part: Part, name: str) -> tuple[Split, np.ndarray | None]:
        """Samples, and whose they are."""
        task = self.token_task
        x, text = chunked(part.tokens, self.max_length, task.stored - self.max_length)
        x = self.filled(x, self.corpus().vocabulary)
        return task.split(x, None, self.name, name), None if part.users is None else part.users[text]


def _classes(labels: Sequence[str]) -> list[str]:
    """The names of the classes, in order: numbers by value, other names as Python sorts them."""
    names = sorted(set(labels))
    if not all(name.isdecimal() and str(int(name)) == name for name in names):
        return names
    numbers = sorted(map(int, names))
    if missing := set(range(numbers[0], numbers[-1])) - set(numbers) | set(range(1, numbers[0])):
        raise ConfigError(
            f"data.label: given the classes {shown(numbers)}, but no text of class {min(missing)}; allowed: whole "
            "numbers from 0 or 1 on, each with a training text, or words"
        )
    return list(map(str, numbers))


def _picked(texts: Texts, rows: np.ndarray) -> Texts:
    at: list[int] = rows.tolist()
    pairs = None if texts.pairs is None else [texts.pairs[i] for i in at]
    y, users = (None if cells is None else cells[rows] for cells in (texts.y, texts.users))
    return Texts([texts.texts[i] for i in at], pairs, y, users)
