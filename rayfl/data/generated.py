"""Scores of generated answers of data set instructions."""

import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from rayfl.config import ConfigError, ask, require_number
from rayfl.data.goal import IGNORE_INDEX
from rayfl.data.scores import OfSplits, Texts

TEXTS = ("prompt", "answer", "reference")
SHOWN, LONGEST = 4, 500
"""Maximum numbers of samples, and of characters of a text, that an evaluation keeps."""
TextScore = Callable[[str, str, str], float]
"""(prompt, generated answer, reference) -> score of a sample."""


class Generated(OfSplits):
    """Mean score of generated answers: the network continues each sample before its last answer, by the most likely
    tokens, and the text is compared with that answer."""

    name: Literal["generated"] = "generated"  # pyright: ignore[reportIncompatibleVariableOverride]
    score: str = "exact_match"
    """exact_match: whether the texts are equal, without spaces around them. rouge_l: F1 of the longest common
    subsequence of words (extra text). Or a function (prompt, generated, reference) -> number, "package.module:name"."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum number of generated tokens."""

    @property
    def label(self) -> str:
        return self.score.rpartition(":")[2]

    def check(self, goal: Any) -> None:
        if not getattr(goal, "ends", ()):
            raise ConfigError(
                "evaluation.scores: generated needs answers. Allowed: with data set instructions and its `loss: "
                "responses`"
            )
        self._number("a prompt", "an answer", "a reference")

    def network_counts(
        self, module: nn.Module, x: torch.Tensor, y: torch.Tensor, goal: Any
    ) -> tuple[torch.Tensor, list[Texts]]:
        if not hasattr(module, "generate"):
            raise ConfigError(
                "evaluation.scores: generated needs a model that generates. Allowed: causal_lm, llama or gpt2, also as "
                "the base of lora"
            )
        prompts, references = zip(*map(_parted, x.tolist(), y.tolist()), strict=True)
        answers = module.generate(prompts, self.max_new_tokens, goal.ends)  # pyright: ignore[reportCallIssue]
        texts = ([goal.text(ids) for ids in of] for of in (prompts, answers, references))
        samples = list(zip(*texts, strict=True))
        found = [self._number(*sample) for sample in samples]
        shown: list[Texts] = [
            dict(zip(TEXTS, (text[:LONGEST] for text in one), strict=True)) for one in samples[:SHOWN]
        ]
        return torch.tensor([sum(found), len(found)], dtype=torch.float64, device=x.device), shown

    def _number(self, prompt: str, answer: str, reference: str) -> float:
        call = _function(self.score)
        return ask(f"evaluation.scores: {self.score}", lambda: require_number(call(prompt, answer, reference)))


def _parted(x: list[int], y: list[int]) -> tuple[list[int], list[int]]:
    """Return the tokens of a sample before its last answer, and those of the answer; y follows x by one token."""
    end = max(i for i, token in enumerate(y) if token != IGNORE_INDEX) + 1
    start = end
    while start and y[start - 1] != IGNORE_INDEX:
        start -= 1
    return x[: start + 1], y[start:end]


@cache
def _function(name: str) -> TextScore:
    if name == "exact_match":
        return lambda prompt, answer, reference: float(answer == reference)
    if name == "rouge_l":
        return _rouge_l()
    if ":" not in name:
        raise ConfigError(
            f"evaluation.scores: score {name!r} is not valid. Allowed: exact_match, rouge_l, or package.module:name"
        )
    try:
        return pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"evaluation.scores: score {name!r} cannot be imported ({type(error).__name__}: {error}). Allowed: "
            "package.module:name of a package that is installed or in PYTHONPATH"
        ) from None


def _rouge_l() -> TextScore:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ConfigError(
            "evaluation.scores: rouge_l needs the package rouge-score. Hint: uv sync --extra text"
        ) from None
    scorer = RougeScorer(["rougeL"])
    return lambda prompt, answer, reference: scorer.score(reference, answer)["rougeL"].fmeasure
