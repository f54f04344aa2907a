"""Encoders from text to tokens: vocabularies of words or characters, and tokenizer files."""

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

BATCH = 10_000
"""Number of texts per call of a tokenizer."""
MASKS, PADDINGS = ("<mask>", "[MASK]"), ("<pad>", "[PAD]")
SPECIAL = (*MASKS, *PADDINGS, "<s>", "</s>", "<unk>", "<|endoftext|>", "[UNK]", "[CLS]", "[SEP]")
"""Names of special tokens."""
LAYOUTS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("vocab.txt",))
"""Files of a tokenizer. The first layout found in a folder is used."""
ALONGSIDE = ("*token*.json", "vocab*", "merges.txt", "*.model", "*.tiktoken", "chat_template*", "*chat_templates")
"""Files and folders that belong to a tokenizer, also those that rayfl does not read: chat templates, special tokens."""


@dataclass(frozen=True)
class Tokens:
    """Concatenated tokens of texts: text i has ids[ptr[i]:ptr[i + 1]]."""

    ids: np.ndarray
    """[tokens] int32."""
    ptr: np.ndarray
    """[texts + 1] int64."""

    @staticmethod
    def of(ids: Iterable[int], lengths: Sequence[int]) -> "Tokens":
        """Build from the concatenated tokens. `lengths` may grow while `ids` is consumed."""
        found = np.fromiter(ids, np.int32)
        return Tokens(found, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))

    @property
    def lengths(self) -> np.ndarray:
        """[texts] int64."""
        return np.diff(self.ptr)


@dataclass(frozen=True)
class Vocabulary:
    """The set of tokens."""

    ids: int
    """Number of tokens."""
    special: tuple[int, ...] = ()
    """Tokens that are not words."""
    mask: int | None = None
    """Mask token, if it is in the vocabulary."""
    padding: int | None = None
    """Padding token, if there is one."""


class Encoder(ABC):
    """Conversion of texts to tokens."""

    vocabulary: Vocabulary

    @abstractmethod
    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None, longest: int | None) -> tuple[Tokens, int]:
        """Return the tokens of texts, joined with `pairs` if given, and the number of texts truncated to `longest`."""


@dataclass(frozen=True)
class Lookup(Encoder):
    """Encoder by a table of words or characters."""

    vocabulary: Vocabulary
    index: Mapping[str, int]
    split: Callable[[str], Sequence[str]]
    """Function that splits a text into words."""
    unknown: int
    """Token of unknown words."""
    before: tuple[int, ...] = ()
    """Tokens before every text."""
    after: tuple[int, ...] = ()
    """Tokens after every text."""
    between: tuple[int, ...] = ()
    """Tokens between a text and its second part."""

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None, longest: int | None) -> tuple[Tokens, int]:
        lengths, cut = [], []

        def ids() -> Iterator[int]:
            for i, text in enumerate(texts):
                first, second = [*self._ids(text)], [] if pairs is None else [*self._ids(pairs[i])]
                between = () if pairs is None else self.between
                marks = len(self.before) + len(between) + len(self.after)
                cut.append(longest is not None and len(first) + len(second) + marks > longest)
                if longest is not None and cut[-1]:
                    first, second = _shortened(first, second, max(0, longest - marks))
                found = [*self.before, *first, *between, *second, *self.after][:longest]
                lengths.append(len(found))
                yield from found

        return Tokens.of(ids(), lengths), sum(cut)

    def _ids(self, text: str) -> Iterator[int]:
        return (self.index.get(word, self.unknown) for word in self.split(text))


def _shortened(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """Return the starts of two texts that fit into `room` tokens; the longer text is shortened first, as by
    tokenizers."""
    shorter = min(len(first), len(second), room // 2)
    if len(first) <= len(second):
        return first[:shorter], second[: room - shorter]
    return first[: room - shorter], second[:shorter]


def words_and_marks(text: str) -> list[str]:
    """Split a text into words in lower case and punctuation characters."""
    return re.findall(r"\w+(?:'\w+)*|[^\w\s]", text.lower())


def of_words(number: int) -> Vocabulary:
    """Return TFF's numbering for Stack Overflow: 0 padding, 1 ... number words, then unknown, begin, end of text."""
    return Vocabulary(number + 4, (0, number + 1, number + 2, number + 3), padding=0)


def frequent_words(texts: Iterable[str], split: Callable[[str], Sequence[str]], most: int, ends: bool) -> Lookup:
    """Return an encoder for the `most` most frequent words, in order of frequency, then of appearance. With `ends`
    every text is enclosed in begin and end tokens."""
    words = [word for word, _ in Counter(chain.from_iterable(map(split, texts))).most_common(most)]
    vocabulary = of_words(most)
    _, unknown, begin, end = vocabulary.special
    around = {"before": (begin,), "after": (end,)} if ends else {}
    return Lookup(vocabulary, _numbered(words), split, unknown, between=(end,), **around)


def of_characters(number: int) -> Vocabulary:
    """Return the numbering of characters: 0 unknown and padding, 1 ... number characters."""
    return Vocabulary(number + 1, (0,), padding=0)


def characters(texts: Iterable[str], number: int | None) -> Lookup:
    """Return an encoder for the sorted characters of the texts, or for the `number` most frequent ones."""
    counted = Counter(chain.from_iterable(texts))
    alphabet = sorted(c for c, _ in counted.most_common(number))
    return Lookup(of_characters(number or len(alphabet)), _numbered(alphabet), list, 0, between=(0,))


def _numbered(words: Iterable[str]) -> dict[str, int]:
    return {word: i for i, word in enumerate(words, 1)}


def find_tokenizer(given: str, root: Path | None) -> tuple[Path, ...]:
    """Return the files of a tokenizer. A relative folder is searched below the working folder, then below `root`."""
    places = [Path(given).expanduser(), *([root / given] if root is not None else [])]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        below = f", or a folder below {root}" if root is not None else ""
        raise ConfigError(f"data.tokenizer: the folder {given!r} does not exist. Allowed: an existing folder{below}")
    for layout in LAYOUTS:
        if all((folder / name).is_file() for name in layout):
            return tuple(folder / name for name in (*layout, "tokenizer_config.json") if (folder / name).is_file())
    raise ConfigError(
        f"data.tokenizer: the folder {given!r} has no tokenizer. Allowed: a folder with tokenizer.json, with "
        "vocab.json and merges.txt, or with vocab.txt"
    )


def alongside(folder: Path) -> tuple[Path, ...]:
    """Return all files and folders of a tokenizer's folder that belong to it."""
    return tuple(sorted({path for pattern in ALONGSIDE for path in folder.glob(pattern)}))


class FromFiles(Encoder):
    """Tokenizer from files (`LAYOUTS`), read by the `tokenizers` library without executing code.

    vocab.txt is BERT's, in lower case unless disabled in tokenizer_config.json. vocab.json and merges.txt are GPT-2's,
    or RoBERTa's if they contain <s> and </s>, which enclose every text.
    """

    def __init__(self, files: Sequence[Path], special: bool):
        """Read the files. `special`: enclose texts in the tokenizer's special tokens."""
        try:
            self.tokenizer, self.special = _tokenizer(files), special
            ids = self.tokenizer.get_vocab()
            added = [i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special]
        except Exception as error:  # the library raises Exception itself
            reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            raise ConfigError(
                f"data.tokenizer: {str(files[0])!r} cannot be read ({reason}). Allowed: files of the library "
                "`tokenizers`, or of GPT-2, RoBERTa or BERT"
            ) from None
        named = [ids[name] for name in SPECIAL if name in ids]
        mask, padding = (next((ids[n] for n in names if n in ids), None) for names in (MASKS, PADDINGS))
        self.vocabulary = Vocabulary(max(ids.values()) + 1, tuple(sorted({*added, *named})), mask, padding)

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None, longest: int | None) -> tuple[Tokens, int]:
        self.tokenizer.no_padding()
        if longest is None:
            self.tokenizer.no_truncation()
        else:
            own = self.tokenizer.num_special_tokens_to_add(pairs is not None) if self.special else 0
            if longest <= own:
                raise ConfigError(
                    f"data.max_length: {longest} is not valid. Allowed: at least {own + 1}, because the tokenizer adds "
                    f"{own} special tokens"
                )
            self.tokenizer.enable_truncation(longest)
        lengths, cut = [], []

        def ids() -> Iterator[int]:
            for start in range(0, len(texts), BATCH):
                some = texts[start : start + BATCH]
                if pairs is not None:
                    some = list(zip(some, pairs[start : start + BATCH], strict=True))
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
        config = (
            json.loads(found["tokenizer_config.json"].read_text(encoding="utf-8"))
            if "tokenizer_config.json" in found
            else {}
        )
        return BertWordPieceTokenizer(str(found["vocab.txt"]), lowercase=config.get("do_lower_case", True))._tokenizer
    made = ByteLevelBPETokenizer(str(found["vocab.json"]), str(found["merges.txt"]))._tokenizer
    begin, end = made.token_to_id("<s>"), made.token_to_id("</s>")
    if begin is not None and end is not None:
        made.post_processor = RobertaProcessing(
            ("</s>", end), ("<s>", begin), trim_offsets=True, add_prefix_space=False
        )
    return made
