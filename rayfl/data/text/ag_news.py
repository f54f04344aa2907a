"""AG News (Zhang, Zhao and LeCun 2015): news of four topics."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.config import ConfigError, shown
from rayfl.data.files import InFolder
from rayfl.data.text.base import LabelledText, Texts
from rayfl.data.text.encoders import Encoder, frequent_words, of_words, words_and_marks
from rayfl.data.tokens import TokenTask


class AGNews(InFolder, LabelledText):
    """120,000 + 7,600 titles and descriptions, which are one text. Classes: world, sports, business, science and
    technology."""

    name: Literal["ag_news"] = "ag_news"
    file: Literal["train.csv", "train_subset.csv"] = "train.csv"
    """Which training set: the official file, or a part of it with 17,179 texts."""
    rows: int | None = Field(default=None, ge=1)
    """So many texts from the begin of the training file; unless given all. The first 13,638 of train_subset.csv are
    about as many of each class; behind them are two classes only."""
    classes: ClassVar = 4

    @property
    def base(self) -> Path:
        return self.folder

    def sources(self) -> Sequence[Path]:
        files = [f"ag_news_csv/{name}" for name in (self.file, "test.csv")]
        found = [self.folder / file for file in files]
        if not all(path.is_file() for path in found):
            other = "train_subset.csv" if self.file == "train.csv" else "train.csv"
            there = (self.folder / "ag_news_csv" / other).is_file()
            raise self.missing(files, f" ({other} is: data.file says which of the two is read)" if there else "")
        return found

    def read(self) -> tuple[Texts, Texts, Mapping[str, Any]]:
        train, test = self.sources()
        return self._texts(train, self.rows), self._texts(test, None), {}

    def _texts(self, path: Path, rows: int | None) -> Texts:
        with path.open(encoding="utf-8", newline="") as file:
            found = list(csv.reader(file))
        if rows is not None and rows > len(found):
            raise ConfigError(f"data.rows: given {rows}; allowed: at most {len(found)}, the texts in {path}")
        found = found[:rows]
        wrong = [i for i, row in enumerate(found, 1) if len(row) != 3 or row[0] not in ("1", "2", "3", "4")]
        if wrong:
            raise ConfigError(
                f"data: given {path}, whose row {wrong[0]} is {shown(found[wrong[0] - 1])}; allowed: a class from 1 to "
                "4, a title and a description"
            )
        texts = [f"{title} {description}" for _, title, description in found]
        return Texts(texts, y=np.array([int(label) - 1 for label, _, _ in found], np.int64))

    def encoder(self, train: Texts) -> Encoder:
        return frequent_words(train.texts, words_and_marks, self.vocabulary, ends=False)

    @property
    def token_task(self) -> TokenTask:
        return self.labelled_task(self.vocabulary_or(of_words(self.vocabulary)), self.classes)
