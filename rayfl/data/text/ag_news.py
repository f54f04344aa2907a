"""AG News (Zhang, Zhao and LeCun 2015): news on four topics."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from rayfl.config import ConfigError, shown
from rayfl.data.files import InFolder, readable
from rayfl.data.text.base import LabelledText, Texts
from rayfl.data.text.encoders import Encoder, frequent_words, of_words, words_and_marks
from rayfl.data.tokens import TokenTask

SIZES = {"train.csv": 120_000, "train_subset.csv": 17_179}
"""Training file -> number of texts."""


class AGNews(InFolder, LabelledText):
    """120,000 + 7,600 texts (title and description). Classes: world, sports, business, science and technology."""

    name: Literal["ag_news"] = "ag_news"
    file: Literal["train.csv", "train_subset.csv"] = "train.csv"
    """Training file: the official file, or a subset of 17,179 texts."""
    rows: int | None = Field(default=None, ge=1)
    """Number of texts from the start of the training file. Default: all. The first 13,638 texts of train_subset.csv are
    balanced; the others have only two of the classes."""
    classes: ClassVar = 4

    def sources(self) -> Sequence[Path]:
        files = [f"ag_news_csv/{name}" for name in (self.file, "test.csv")]
        other = "train_subset.csv" if self.file == "train.csv" else "train.csv"
        has_other = (self.folder / "ag_news_csv" / other).is_file()
        return self.all_of(files, f" (but {other} is; select it by data.file)" if has_other else "")

    @property
    def published(self) -> tuple[int, int]:
        return self.rows or SIZES[self.file], 7600

    def read(self) -> tuple[Texts, Texts, Mapping[str, Any]]:
        train, test = self.sources()
        return self._texts(train, self.rows), self._texts(test, None), {}

    def _texts(self, path: Path, rows: int | None) -> Texts:
        with readable(path), path.open(encoding="utf-8", newline="") as file:
            found = list(csv.reader(file))
        if rows is not None and rows > len(found):
            raise ConfigError(f"data.rows: {rows} is not valid. Allowed: at most {len(found)}, the texts in {path}")
        found = found[:rows]
        wrong = [i for i, row in enumerate(found, 1) if len(row) != 3 or row[0] not in ("1", "2", "3", "4")]
        if wrong:
            raise ConfigError(
                f"data: row {wrong[0]} of {path} is {shown(found[wrong[0] - 1])}. Allowed: a class from 1 to 4, a "
                "title and a description"
            )
        texts = [f"{title} {description}" for _, title, description in found]
        return Texts(texts, y=np.array([int(label) - 1 for label, _, _ in found], np.int64))

    def encoder(self, train: Texts) -> Encoder:
        return frequent_words(train.texts, words_and_marks, self.vocabulary, ends=False)

    @property
    def token_task(self) -> TokenTask:
        return self.labelled_task(self.vocabulary_or(of_words(self.vocabulary)), self.classes)
