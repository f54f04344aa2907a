"""SST-2 (Socher et al. 2013, as GLUE has it): phrases and sentences of film reviews, for or against."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from rayfl.config import ConfigError
from rayfl.data.files import InFolder
from rayfl.data.text.base import LabelledText, Texts
from rayfl.data.text.encoders import Encoder, frequent_words, of_words
from rayfl.data.text.tables import column, not_empty, read_table
from rayfl.data.tokens import TokenTask

FILES = ("SST-2/train.tsv", "SST-2/dev.tsv")


class SST2(InFolder, LabelledText):
    """67,349 training texts; the 872 of dev.tsv are the test set, because GLUE keeps the labels of its own. Classes:
    negative, positive. The columns are label and sentence, in either order, or label and content."""

    name: Literal["sst2"] = "sst2"
    classes: ClassVar = 2

    @property
    def base(self) -> Path:
        return self.folder

    def sources(self) -> Sequence[Path]:
        return self.all_of(FILES)

    def read(self) -> tuple[Texts, Texts, Mapping[str, Any]]:
        train, test = map(_texts, self.sources())
        return train, test, {}

    def encoder(self, train: Texts) -> Encoder:
        # the texts are tokenised already
        return frequent_words(train.texts, str.split, self.vocabulary, ends=False)

    @property
    def token_task(self) -> TokenTask:
        return self.labelled_task(self.vocabulary_or(of_words(self.vocabulary)), self.classes)


def _texts(path: Path) -> Texts:
    table = read_table(path, "root")
    labels = column(table, "label", "root", path)
    if set(labels) - {"0", "1"}:
        raise ConfigError(f"data.root: given the label {max(set(labels) - {'0', '1'})!r} in {path}; allowed: 0 and 1")
    name = next((name for name in ("sentence", "content") if name in table), "sentence")
    return Texts(not_empty(column(table, name, "root", path), "root", path), y=np.array(labels, np.int64))
