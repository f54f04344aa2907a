"""SST-2 (Socher et al. 2013, in GLUE's version): sentiment of phrases and sentences of film reviews."""

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
    """67,349 training texts. The 872 texts of dev.tsv are the test set, because GLUE's test labels are not public.
    Classes: negative, positive. Columns: label, and sentence or content, in any order."""

    name: Literal["sst2"] = "sst2"
    classes: ClassVar = 2

    @property
    def published(self) -> tuple[int, int]:
        return (67_349, 872)

    def sources(self) -> Sequence[Path]:
        return self.all_of(FILES)

    def read(self) -> tuple[Texts, Texts, Mapping[str, Any]]:
        train, test = map(_texts, self.sources())
        return train, test, {}

    def encoder(self, train: Texts) -> Encoder:
        # words are already separated by spaces
        return frequent_words(train.texts, str.split, self.vocabulary, ends=False)

    @property
    def token_task(self) -> TokenTask:
        return self.labelled_task(self.vocabulary_or(of_words(self.vocabulary)), self.classes)


def _texts(path: Path) -> Texts:
    table = read_table(path, "root")
    labels = column(table, "label", "root", path)
    if set(labels) - {"0", "1"}:
        raise ConfigError(f"data.root: {path} has the label {max(set(labels) - {'0', '1'})!r}. Allowed: 0 and 1")
    name = next((name for name in ("sentence", "content") if name in table), "sentence")
    return Texts(not_empty(column(table, name, "root", path), "root", path), y=np.array(labels, np.int64))
