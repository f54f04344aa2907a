"""From text to tokens: by a vocabulary of its words or characters, or by a tokenizer's files."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rayfl.config import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

AT_ONCE = 10_000
"""Texts whose tokens a tokenizer's library holds at a time."""
MASKS, PADDINGS = ("<mask>", "[MASK]"), ("<pad>", "[PAD]")
SPECIAL = (*MASKS, *PADDINGS, "<s>", "</s>", "<unk>", "<|endoftext|>", "[UNK]", "[CLS]", "[SEP]")
"""What tokenizers call tokens that are no words."""
LAYOUTS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("vocab.txt",))
"""The files of a tokenizer; the first layout that a folder has is taken."""


@dataclass(frozen=True)
class Tokens:
    """Texts as tokens, one after another: text i has ids[ptr[i]:ptr[i + 1]]."""

    ids: np.ndarray
    """[tokens] int32."""
    ptr: np.ndarray
    """[texts + 1] int64."""

    @staticmethod
    def of(ids: Iterable[int], lengths: Sequence[int]) -> "Tokens":
        """Of all texts' tokens in a row. `lengths` may still grow while they come."""
        found = np.fromiter(ids, np.int32)
        return Tokens(found, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))

    @property
    def lengths(self) -> np.ndarray:
        """[texts] int64."""
        return np.diff(self.ptr)


@dataclass(frozen=True)
class Vocabulary:
    """Which tokens there are."""

    ids: int
    """Their number."""
    special: tuple[int, ...] = ()
    """Those that are no words."""
    mask: int | None = None
    """The one that hides others, where it is one of them."""
    padding: int | None = None
    """The one that stands for padding where this counts."""


class Encoder(ABC):
    """From texts to tokens."""

    vocabulary: Vocabulary

    @abstractmethod
    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None, longest: int | None) -> tuple[Tokens, int]:
        """Texts, each with its second part if there are `pairs`; and how many were cut to the `longest` tokens."""


@dataclass(frozen=True)
class Lookup(Encoder):
    """A table of words, or of characters."""

    vocabulary: Vocabulary
    index: Mapping[str, int]
    split: Callable[[str], Sequence[str]]
    """A text's words."""
    unknown: int
    """The token of what the table does not have."""
    before: tuple[int, ...] = ()
    """Tokens in front of every text."""
    after: tuple[int, ...] = ()
    """Tokens behind every text."""
    between: tuple[int, ...] = ()
    """Tokens between a text and its second part."""

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None, longest: int | None) -> tuple[Tokens, int]:
        lengths, cut = [], []

        def ids() -> Iterator[int]:
            for i, text in enumerate(texts):
                found = [*self.before, *self._ids(text)]
                if pairs is not None:
                    found += [*self.between, *self._ids(pairs[i])]
                found += self.after
                cut.append(longest is not None and len(found) > longest)
                lengths.append(min(len(found), longest or len(found)))
                yield from found[:longest]

        return Tokens.of(ids(), lengths), sum(cut)

    def _ids(self, text: str) -> Iterator[int]:
        return (self.index.get(word, self.unknown) for word in self.split(text))


def words_and_marks(text: str) -> list[str]:
    """In lower case, and every other sign by itself."""
    return re.findall(r"\w+(?:'\w+)*|[^\w\s]", text.lower())


def of_words(number: int) -> Vocabulary:
    """TFF's Stack Overflow: 0 is padding, 1 ... number the words, then unknown words, begin and end of a text."""
    return Vocabulary(number + 4, (0, number + 1, number + 2, number + 3), padding=0)


def frequent_words(texts: Iterable[str], split: Callable[[str], Sequence[str]], most: int, ends: bool) -> Lookup:
    """The words that the texts have most often, in this order, the earlier of two equal ones first; ids of which there
    are no words are left over. `ends`: every text is put between a begin and an end."""
    words = [word for word, _ in Counter(chain.from_iterable(map(split, texts))).most_common(most)]
    vocabulary = of_words(most)
    _, unknown, begin, end = vocabulary.special
    around = {"before": (begin,), "after": (end,)} if ends else {}
    return Lookup(vocabulary, _numbered(words), split, unknown, between=(end,), **around)


def of_characters(number: int) -> Vocabulary:
    """0 is unknown characters and padding, 1 ... number the characters."""
    return Vocabulary(number + 1, (0,), padding=0)


def characters(texts: Iterable[str], number: int | None) -> Lookup:
    """The characters of the texts, sorted; with a `number` the most frequent ones."""
    counted = Counter(chain.from_iterable(texts))
    alphabet = sorted(c for c, _ in counted.most_common(number))
    return Lookup(of_characters(number or len(alphabet)), _numbered(alphabet), list, 0, between=(0,))


def _numbered(words: Iterable[str]) -> dict[str, int]:
    return {word: i for i, word in enumerate(words, 1)}


def find_tokenizer(given: str, root: Path | None) -> tuple[Path, ...]:
    """The files of a tokenizer. A relative folder is below the working folder or, unless it is there, below `root`."""
    places = [Path(given).expanduser(), *([root / given] if root is not None else [])]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        below = f", or a folder below {root}" if root is not None else ""
        raise ConfigError(f"data.tokenizer: given {given!r}; allowed: an existing folder{below}")
    for layout in LAYOUTS:
        if all((folder / name).is_file() for name in layout):
            return tuple(folder / name for name in (*layout, "tokenizer_config.json") if (folder / name).is_file())
    raise ConfigError(
        f"data.tokenizer: given {given!r}, which has none of the files; allowed: a folder with tokenizer.json, with "
        "vocab.json and merges.txt, or with vocab.txt"
    )


class FromFiles(Encoder):
    """The tokenizer that files say (`LAYOUTS`), as the `tokenizers` library reads them: nothing in them is executed.

    vocab.txt is BERT's, in lower case unless tokenizer_config.json says otherwise. vocab.json and merges.txt are
    GPT-2's; if they have <s> and </s>, RoBERTa's, which stand around every text.
    """

    def __init__(self, files: Sequence[Path], special: bool):
        """`special`: texts get the special tokens around them that the tokenizer knows."""
        try:
            self.tokenizer, self.special = _tokenizer(files), special
            ids = self.tokenizer.get_vocab()
            added = [i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special]
        except Exception as error:  # the library raises Exception itself
            reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            raise ConfigError(
                f"data.tokenizer: given {str(files[0])!r}, which cannot be read ({reason}); allowed: files that the "
                "library `tokenizers` has written, or GPT-2's, RoBERTa's or BERT's own"
            ) from None
        named = [ids[name] for name in SPECIAL if name in ids]
        mask, padding = (next((ids[n] for n in names if n in ids), None) for names in (MASKS, PADDINGS))
        self.vocabulary = Vocabulary(max(ids.values()) + 1, tuple(sorted({*added, *named})), mask, padding)

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None, longest: int | None) -> tuple[Tokens, int]:
        self.tokenizer.no_padding()
        if longest is None:
            self.tokenizer.no_truncation()
        else:
            self.tokenizer.enable_truncation(longest)
        lengths, cut = [], []

        def ids() -> Iterator[int]:
            for start in range(0, len(texts), AT_ONCE):
                some = texts[start : start + AT_ONCE]
                if pairs is not None:
                    some = list(zip(some, pairs[start : start + AT_ONCE], strict=True))
                for found in self.tokenizer.encode_batch(some, add_special_tokens=self.special):
                    lengths.append(len(found))
                    cut.append(bool(found.overflowing))
                    yield from found.ids

        return Tokens.of(ids(), lengths), sum(cut)


def _tokenizer(files: Sequence[Path]) -> "Tokenizer":
    import json

    from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer, Tokenizer
    from tokenizers.processors import RobertaProcessing

    found = {file.name: file for file in files}
    if "tokenizer.json" in found:
        return Tokenizer.from_file(str(found["tokenizer.json"]))
    if "vocab.txt" in found:
        config = json.loads(found["tokenizer_config.json"].read_text()) if "tokenizer_config.json" in found else {}
        return BertWordPieceTokenizer(str(found["vocab.txt"]), lowercase=config.get("do_lower_case", True))._tokenizer
    made = ByteLevelBPETokenizer(str(found["vocab.json"]), str(found["merges.txt"]))._tokenizer
    begin, end = made.token_to_id("<s>"), made.token_to_id("</s>")
    if begin is not None and end is not None:
        made.post_processor = RobertaProcessing(
            ("</s>", end), ("<s>", begin), trim_offsets=True, add_prefix_space=False
        )
    return made
