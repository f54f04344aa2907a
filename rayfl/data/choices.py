"""Multiple choice by log-likelihood, as MMLU, ARC and HellaSwag: a file of questions for a language model."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from rayfl.config import ConfigError, shown
from rayfl.data.goal import IGNORE_INDEX
from rayfl.data.scores import OfOwnSamples, Predict
from rayfl.data.text.base import padded
from rayfl.data.text.cache import digest
from rayfl.data.text.conversations import Row, read_rows
from rayfl.data.text.encoders import Tokens

if TYPE_CHECKING:
    from rayfl.data.text.chat import Chat


class Choices(OfOwnSamples):
    """Fraction of questions for whose right option the network has the highest log-likelihood, as in
    lm-evaluation-harness: the question is a prompt in the template of the data, and an option its answer without the
    end token. The first of equal options counts."""

    name: Literal["choices"] = "choices"  # pyright: ignore[reportIncompatibleVariableOverride]
    file: str
    """File of questions (.jsonl, .json, .parquet), on the server's machine."""
    question: str = "question"
    """Column of questions, with all that the network is to read."""
    choices: str = "choices"
    """Column of options: a list of texts, or a mapping with the lists `text` and `label` (ARC)."""
    answer: str = "answer"
    """Column of the right option: its number from 0, or its label."""
    normalise: Literal["none", "characters", "tokens"] = "none"
    """Length by which a log-likelihood is divided: none, the characters of the option (acc_norm of
    lm-evaluation-harness), or its tokens."""
    max_length: int = Field(default=2048, ge=2)
    """Maximum number of tokens of a question with its option. Longer questions lose their beginning."""

    @property
    def label(self) -> str:
        ends = () if self.normalise == "none" else (self.normalise,)
        return "_".join((self.name, re.sub(r"\W", "_", Path(self.file).stem), *ends))

    @property
    def samples(self) -> "Sequence[Question]":
        """Content of the file, from a cache if it is unchanged."""
        path = Path(self.file).expanduser()
        if path.suffix.lower() not in (".jsonl", ".json", ".parquet") or not path.is_file():
            raise ConfigError(
                f"evaluation.scores: {self.file!r} is not valid. Allowed: an existing file that ends in .jsonl, .json "
                "or .parquet"
            )
        return _questions(self, path, digest(path))  # pyright: ignore[reportArgumentType]

    def check(self, goal: Any) -> None:
        if not hasattr(goal, "chat"):
            raise ConfigError("evaluation.scores: choices needs a template. Allowed: with data set instructions")
        self._encoded(goal.chat, self.samples)

    def own_counts(
        self, predict: Predict, samples: "Sequence[Question]", batch_size: int, goal: Any, device: torch.device
    ) -> torch.Tensor:
        options = self._encoded(goal.chat, samples)
        starts = range(0, len(options), batch_size)
        given = np.concatenate([self._likelihoods(predict, options[i : i + batch_size], device) for i in starts])
        parts = np.split(given, np.cumsum([len(one.options) for one in samples])[:-1])
        right = [int(part.argmax()) == one.right for part, one in zip(parts, samples, strict=True)]
        return torch.tensor([sum(right), len(right)], dtype=torch.float64)

    def _encoded(self, chat: "Chat", samples: "Sequence[Question]") -> "list[Option]":
        """Return all options of questions as tokens."""
        texts = [(one.text, option) for one in samples for option in one.options]
        places = [one.place for one in samples for _ in one.options]
        conversations = [
            [{"role": "user", "content": text}, {"role": "assistant", "content": option}] for text, option in texts
        ]
        found = []
        for (_, option), place, (ids, answer) in zip(texts, places, chat.encoded(conversations, places), strict=True):
            kept = np.flatnonzero(answer)
            # the last token of an answer is the end token
            first, end = int(kept[0]), int(kept[-1])
            if end <= first or end - first >= self.max_length:
                raise ConfigError(
                    f"evaluation.scores: {place} has an option of {end - first} tokens. Allowed: 1 to max_length - 1 = "
                    f"{self.max_length - 1:,}"
                )
            size = {"none": 1, "characters": len(option), "tokens": end - first}[self.normalise]
            found.append(Option(ids[max(end - self.max_length, 0) : end], end - first, size))
        return found

    @torch.no_grad()
    def _likelihoods(self, predict: Predict, options: "Sequence[Option]", device: torch.device) -> np.ndarray:
        """Return the log-likelihood of every option over its length."""
        ids = Tokens(np.concatenate([one.ids for one in options]), np.cumsum([0, *(len(one.ids) for one in options)]))
        x = torch.from_numpy(padded(ids, max(len(one.ids) for one in options))).long()
        y = torch.full_like(x[:, 1:], IGNORE_INDEX)
        for row, one in enumerate(options):
            end = len(one.ids)
            y[row, end - 1 - one.tokens : end - 1] = x[row, end - one.tokens : end]
        logits = predict(x[:, :-1].to(device))
        losses = F.cross_entropy(
            logits.flatten(0, 1), y.flatten().to(device), ignore_index=IGNORE_INDEX, reduction="none"
        )
        total = losses.view(y.shape).double().sum(1).cpu().numpy()
        return -total / np.array([one.size for one in options])


@dataclass(frozen=True)
class Question:
    text: str
    options: tuple[str, ...]
    right: int
    place: str
    """Its row and file, for errors."""


@dataclass(frozen=True)
class Option:
    """A question with one of its options."""

    ids: np.ndarray
    """Tokens, int32."""
    tokens: int
    """Number of tokens of the option, which are the last."""
    size: int
    """Length by which its log-likelihood is divided."""


@lru_cache(maxsize=8)
def _questions(score: Choices, path: Path, digest: str) -> tuple[Question, ...]:
    rows = read_rows(path, "file")
    if not rows:
        raise ConfigError(f"evaluation.scores: {path.name} has no rows. Allowed: at least one question")
    return tuple(_question(score, row, f"row {i} of {path.name}") for i, row in enumerate(rows, 1))


def _question(score: Choices, row: Row, place: str) -> Question:
    where = f"evaluation.scores: {place}"
    if lacking := [name for name in (score.question, score.choices, score.answer) if name not in row]:
        raise ConfigError(
            f"{where} has no column {lacking[0]!r}. Allowed: one of {', '.join(map(repr, row))}. Hint: question, "
            "choices and answer name columns"
        )
    text, options, answer = row[score.question], row[score.choices], row[score.answer]
    labels: Sequence[Any] = ()
    if isinstance(options, Mapping):
        options, labels = options.get("text"), list(options.get("label", ()))
    options = [] if options is None or isinstance(options, str) else list(options)
    if not isinstance(text, str) or len(options) < 2 or not all(isinstance(o, str) and o.strip() for o in options):
        raise ConfigError(
            f"{where} has the question {shown(text)} with the options {shown(options)}. Allowed: a text, and at least "
            "two texts that are not empty"
        )
    numbers = range(len(options))
    known = {str(i): i for i in numbers} | {str(label): i for label, i in zip(labels, numbers, strict=False)}
    if str(answer) not in known:
        raise ConfigError(f"{where} has the answer {shown(answer)}. Allowed: {', '.join(known)}")
    return Question(text, tuple(options), known[str(answer)], place)
