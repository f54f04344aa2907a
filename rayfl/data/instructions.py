"""Instructions and answers, or conversations, for language models: files, chat templates, and the loss on answers."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from rayfl.config import ConfigError
from rayfl.data.arrays import Arrays, Column, Split
from rayfl.data.base import DataSet
from rayfl.data.goal import IGNORE_INDEX, NextToken
from rayfl.data.huggingface import Source
from rayfl.data.samples import Batch, Samples
from rayfl.data.scores import CrossEntropy, Perplexity, Score
from rayfl.data.text.base import padded
from rayfl.data.text.cache import cache_folder, cached, digest
from rayfl.data.text.chat import Chat, located
from rayfl.data.text.conversations import FILES, Conversations, Row, cell, read_rows
from rayfl.data.text.encoders import Tokens, alongside, find_tokenizer
from rayfl.data.text.own import classes_of, held_out_rows
from rayfl.data.tokens import PAD, Following, Order

VERSION = 1
"""Version of the cached tokens. Another version is tokenised again."""
AFTER_TOKENS = ("order", "loss", "public", "tokenizer")
"""Fields that do not affect stored tokens; the tokenizer's files do."""

CHAT_TEMPLATE = Path("chat_template.jinja")
"""File of a tokenizer's folder."""


@dataclass(frozen=True)
class Answers(Following):
    """Next-token prediction on the tokens of answers: `x` [N, T] int32 and `answer` [N, T] uint8, 1 where the assistant
    says the token."""

    loss: Literal["responses", "all"] = "responses"

    def batch(self, samples: Samples, generator: torch.Generator | None) -> Batch:
        x, y = super().batch(samples, generator)
        if self.loss == "all":
            return x, y
        return x, torch.where(samples["answer"][:, 1 : y.shape[1] + 1].bool(), y, IGNORE_INDEX)


@dataclass(frozen=True)
class Instructed(NextToken):
    """Next-token prediction of answers. The label of a sample for partition rules is the class `y` [N] of its column,
    if there is one."""

    scores: tuple[Score, ...] = (Perplexity(), CrossEntropy())
    columns: int = 0
    """Number of classes of the column for partition rules. 0: there is none."""
    ends: tuple[int, ...] = ()
    """Tokens that end an answer. (): answers are not told apart from prompts."""
    folder: str = ""
    """Folder of the tokenizer, and the template, with which scores read and write texts."""
    template: str = "chat"

    def labels(self, split: Mapping[str, np.ndarray], train: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
        return split["y"] if self.columns else super().labels(split, train)

    @property
    def kinds(self) -> int:
        return self.columns or 1

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self.chat.text(ids)

    @property
    def chat(self) -> Chat:
        """Tokenizer and template. Their files must be on every node."""
        return _chat(Path(self.folder), self.template, ())


@dataclass(frozen=True)
class Encoded:
    """A split as tokens."""

    tokens: Tokens
    answer: np.ndarray
    """Whether the assistant says the token, [tokens] uint8."""
    y: np.ndarray | None = None
    """Class of each sample [samples] int64."""
    users: np.ndarray | None = None
    """User of each sample [samples], text."""


class Instructions(Conversations, DataSet):
    """Instructions and answers: rows with `messages` (a list of role and content), with instruction, input and output,
    or with prompt and response.

    Every row is a conversation of user and assistant, rendered by a template and tokenised once. A network learns the
    assistant's tokens, including the end token. Batches are padded on the right to their longest sample.
    """

    name: Literal["instructions"] = "instructions"
    train: str
    """File of the training set (.jsonl, .json, .csv, .tsv, .parquet), or a data set of Hugging Face: a folder of
    `save_to_disk`, or a name on the hub (extra huggingface). A relative path starts at the working folder."""
    test: str | None = None
    """File of the test set; with a data set of Hugging Face, its split. Default: its split "test" if there is one,
    otherwise a held-out part of the training set."""
    test_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Fraction held out if there is no test set: the last rows of every user with a `user` column, otherwise random
    rows of every class with a fixed seed."""
    subset: str | None = None
    """Configuration of a data set of Hugging Face."""
    revision: str | None = None
    """Commit of a data set on the hub. Default: the newest."""
    split: str = "train"
    """Split of the training samples of a data set of Hugging Face."""
    label: str | None = None
    """Column of classes for partition rules, such as a task or language. Default: all rows are of one class."""
    user: str | None = None
    """Column of the natural users, for `partition: users`."""
    tokenizer: str
    """Folder of the language model's tokenizer, with tokenizer.json and its special tokens."""
    template: str = "chat"
    """Chat template: chat (the tokenizer's own), alpaca, vicuna, plain, or a file of jinja as for transformers."""
    max_length: int = Field(default=512, ge=2)
    """Maximum number of tokens of a sample. Longer ones are truncated; those without an answer left are dropped, which
    a note counts."""
    truncate: Literal["right", "left"] = "right"
    """Side of a long sample on which tokens are dropped: its end, or its beginning."""
    loss: Literal["responses", "all"] = "responses"
    """Tokens in loss and perplexity: those of answers, or of prompts too. Each counts equally within a batch."""
    order: Order = "lengths"
    """Order of samples in a client's epoch. lengths: batches of samples of similar length, in random order, which needs
    less padding. shuffled: random. stored: the stored order."""

    # what a sample is

    @property
    def columns(self) -> Mapping[str, Column]:
        tokens = (self.max_length,)
        found = {
            "x": Column(tokens, below=self._ids, least=PAD, stored="int32"),
            "answer": Column(tokens, below=2, stored="uint8"),
        }
        return found | ({"y": Column((), below=len(self._classes))} if self.label else {})

    @property
    def prepare(self) -> Answers:
        return Answers(self.order, self.loss)

    @property
    def goal(self) -> Instructed:
        classes = len(self._classes) if self.label else 0
        ends = self.chat.ends if self.loss == "responses" else ()
        return Instructed(
            self._ids, columns=classes, ends=ends, folder=str(self._folder), template=located(self.template)
        )

    @property
    def offers(self) -> Mapping[str, Any]:
        offered = {"task": "next_token", "ids": self._ids, "classes": self._ids, "length": self.max_length - 1}
        pad = self.chat.tokenizer.pad_token_id
        return offered if pad is None else offered | {"pad": pad}

    @property
    def attached(self) -> tuple[Path, ...]:
        """Return the tokenizer's files, with the template of these data as their chat template."""
        files = [file for file in alongside(self._folder) if not file.name.startswith(CHAT_TEMPLATE.stem)]
        return *files, self._template_file()

    def _template_file(self) -> Path:
        """Return a file with the template's text, in the cache."""
        source = self.chat.source.encode()
        file = cache_folder() / "templates" / hashlib.sha256(source).hexdigest() / CHAT_TEMPLATE
        if not file.is_file() or file.read_bytes() != source:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(source)
        return file

    @property
    def vocabulary_files(self) -> tuple[Path, ...]:
        return find_tokenizer(self.tokenizer, None)

    @property
    def chat(self) -> Chat:
        """Tokenizer and template, from a cache if their files are unchanged."""
        files, template = alongside(self._folder), Path(self.template).expanduser()
        digests = [digest(file) for file in (*files, template) if file.is_file()]
        return _chat(self._folder, self.template, tuple(digests))

    @property
    def _folder(self) -> Path:
        return self.vocabulary_files[0].parent.resolve()

    @property
    def _ids(self) -> int:
        return len(self.chat.tokenizer)

    @property
    def _classes(self) -> list[str]:
        return self._encoded()[2]["classes"]

    # samples

    def load(self) -> Arrays:
        train, test, _ = self._encoded()
        return Arrays(self._arrays(train), self._arrays(test), train.users, test.users)

    @property
    def notes(self) -> tuple[str, ...]:
        found, side = self._encoded()[2], "end" if self.truncate == "right" else "beginning"
        notes = []
        if found["cut"]:
            notes.append(
                f"data.max_length: {found['cut']} of {found['rows']} samples of {self.name} are longer than "
                f"{self.max_length} tokens and were truncated at the {side}"
            )
        if found["dropped"]:
            notes.append(
                f"data.max_length: {found['dropped']} of {found['rows']} samples of {self.name} have no answer in "
                f"{self.max_length} tokens and were dropped"
            )
        return tuple(notes)

    def _arrays(self, part: Encoded) -> Split:
        answer = padded(Tokens(part.answer.astype(np.int32), part.tokens.ptr), self.max_length)
        split = {"x": padded(part.tokens, self.max_length), "answer": (answer > 0).astype(np.uint8)}
        return split if part.y is None else split | {"y": part.y}

    def _encoded(self) -> tuple[Encoded, Encoded, Mapping[str, Any]]:
        """Return both splits and facts on them, from the cache if possible."""
        key = {
            "version": VERSION,
            "settings": self.model_dump(mode="json", exclude={*AFTER_TOKENS, *self.not_in_result}),
            "files": [[file.suffix, digest(file)] for file in self._files()],
            "template": self.chat.source,
            "tokenizer": [[path.name, digest(path)] for path in alongside(self._folder) if path.is_file()],
        }
        found = cached(key, self._tokenised)
        facts = json.loads(str(found["facts"]))
        parts = (
            Encoded(
                Tokens(found[f"{name}.ids"], found[f"{name}.ptr"]),
                found[f"{name}.answer"],
                found.get(f"{name}.y"),
                found.get(f"{name}.users"),
            )
            for name in ("train", "test")
        )
        return *parts, facts  # type: ignore

    def _tokenised(self) -> Mapping[str, np.ndarray]:
        facts: dict[str, Any] = {"rows": 0, "cut": 0, "dropped": 0, "classes": []}
        parts = [self._part(place, rows, facts) for place, rows in self._tables()]
        if (labels := parts[0].labels) is not None:
            facts["classes"] = classes_of(labels)
        arrays = {"facts": np.array(json.dumps(facts))}
        parts = [part.numbered(facts["classes"]) for part in parts]
        if len(parts) == 1:
            [only] = parts
            rows = held_out_rows(len(only.samples), only.y, only.users, self.test_fraction)
            parts = [only.picked(at) for at in rows]
        for name, part in zip(("train", "test"), parts, strict=True):
            ids, answer = (np.concatenate(of) for of in zip(*part.samples, strict=True))
            found = {"ids": ids, "answer": answer.astype(np.uint8), "y": part.y, "users": part.users}
            found["ptr"] = np.cumsum([0, *(len(ids) for ids, _ in part.samples)])
            arrays |= {f"{name}.{of}": array for of, array in found.items() if array is not None}
        return arrays

    def _part(self, place: str, rows: Sequence[Row], facts: dict[str, Any]) -> "_Part":
        """Return the samples of a table with an answer in `max_length` tokens, and add to the counts of facts."""
        places = [f"row {i} of {place}" for i in range(1, len(rows) + 1)]
        said = [self.conversation(row, at) for row, at in zip(rows, places, strict=True)]
        kept = slice(None, self.max_length) if self.truncate == "right" else slice(-self.max_length, None)
        whole = self.chat.encoded(said, places)
        # the first token is not predicted
        left = [i for i, (_, answer) in enumerate(whole) if answer[kept][1:].any()]
        facts["rows"] += len(rows)
        facts["dropped"] += len(rows) - len(left)
        facts["cut"] += sum(len(whole[i][0]) > self.max_length for i in left)
        if not left:
            raise ConfigError(
                f"data.max_length: no sample of {place} has an answer in {self.max_length} tokens. Allowed: more "
                "tokens, or truncate: left"
            )
        labels, users = (
            None if name is None else [cell(rows[i], name, field, places[i]) for i in left]
            for name, field in ((self.label, "label"), (self.user, "user"))
        )
        samples = [(ids[kept], answer[kept]) for ids, answer in (whole[i] for i in left)]
        return _Part(samples, labels, None, None if users is None else np.array(users))

    # rows

    def _is_file(self, given: str) -> bool:
        return Path(given).suffix.lower() in FILES

    def _source(self) -> Source:
        return Source(path=self.train, subset=self.subset, revision=self.revision, train=self.split, test=self.test)

    def _files(self) -> Sequence[Path]:
        if not self._is_file(self.train):
            return [Path(file["filename"]) for split in self._source().splits() for file in split.cache_files]
        given = {"train": self.train} | ({} if self.test is None else {"test": self.test})
        for field, name in given.items():
            if not Path(name).expanduser().is_file():
                raise ConfigError(f"data.{field}: the file {name!r} does not exist. Allowed: an existing file")
        return [Path(name).expanduser() for name in given.values()]

    def _tables(self) -> list[tuple[str, Sequence[Row]]]:
        """Return the name and the rows of the training set, and of the test set if there is one."""
        if self._is_file(self.train):
            found = [
                (path.name, read_rows(path, field))
                for path, field in zip(self._files(), ("train", "test"), strict=False)
            ]
        else:
            found = [(f"{self.train}", split.to_list()) for split in self._source().splits()]
        for place, rows in found:
            if not rows:
                raise ConfigError(f"data: {place} has no rows. Allowed: at least one row")
        return found


@dataclass(frozen=True)
class _Part:
    """Samples of a file: tokens and which of them are answers; `y` and `users` as in `Encoded`."""

    samples: list[tuple[np.ndarray, np.ndarray]]
    labels: list[str] | None
    y: np.ndarray | None
    users: np.ndarray | None

    def numbered(self, classes: Sequence[str]) -> "_Part":
        """Return the part with the numbers of its labels."""
        if self.labels is None:
            return self
        if unknown := sorted(set(self.labels) - set(classes)):
            raise ConfigError(
                f"data.test: the class {unknown[0]!r} is not in the training set. Allowed: {', '.join(classes)}"
            )
        number = {name: i for i, name in enumerate(classes)}
        return replace(self, y=np.array([number[label] for label in self.labels]))

    def picked(self, rows: np.ndarray) -> "_Part":
        y, users = (None if of is None else of[rows] for of in (self.y, self.users))
        return _Part([self.samples[i] for i in rows], None, y, users)


@lru_cache(maxsize=4)
def _chat(folder: Path, template: str, digests: tuple[str, ...]) -> Chat:
    return Chat(folder, template)
