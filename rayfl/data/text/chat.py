"""Chat templates: from conversations to tokens, with the tokens of the assistant's turns marked.

A template is one of jinja for transformers' `apply_chat_template`, rendered by transformers in its sandbox. The turns
of the assistant are those inside `{% generation %}` or, in templates without it, what a turn adds to the text before it
with its generation prompt. A turn includes its end token.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rayfl.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, str]
"""`role` (system, user or assistant) and `content`; of a user also `instruction` and `input`, if the data have them."""
Span = tuple[int, int]
"""First character and end."""

_ANSWER = "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
_ALPACA = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content + '\\n\\n' }}"
    "{% elif message.role == 'user' %}"
    "{% if loop.first %}{{ 'Below is an instruction that describes a task' + (', paired with an input that provides "
    "further context' if message.input else '') + '. Write a response that appropriately completes the request.\\n\\n' "
    "}}{% endif %}"
    "{{ '### Instruction:\\n' + (message.instruction or message.content) + '\\n\\n' }}"
    "{% if message.input %}{{ '### Input:\\n' + message.input + '\\n\\n' }}{% endif %}"
    "{% else %}{{ '### Response:\\n' }}" + _ANSWER + "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)
_VICUNA = (
    "{% if messages[0].role != 'system' %}{{ 'A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user\\'s questions.' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}"
    "{% elif message.role == 'user' %}{{ ' USER: ' + message.content }}"
    "{% else %}{{ ' ASSISTANT:' }}{% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)
_PLAIN = (
    "{% for message in messages %}"
    "{% if message.role != 'assistant' %}{{ message.content + '\\n' }}"
    "{% else %}" + _ANSWER + "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endif %}"
    "{% endfor %}"
)
BUILT_IN = {"alpaca": _ALPACA, "vicuna": _VICUNA, "plain": _PLAIN}
"""Stanford Alpaca's and Vicuna's templates, and lines without any words around them."""
PROBE: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def read_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    """Return transformers' tokenizer of a folder, without executing code in it. Raise ConfigError if there is none that
    knows the characters of its tokens, or if it has no end token."""
    from transformers import AutoTokenizer

    try:
        found: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigError(
            f"data.tokenizer: {str(folder)!r} cannot be read ({reason}). Allowed: a folder with the tokenizer of a "
            "language model, as saved by transformers, without code of its own"
        ) from None
    if not found.is_fast:
        raise ConfigError(
            f"data.tokenizer: {str(folder)!r} has no tokenizer.json, and transformers cannot convert its files. "
            "Allowed: a folder with tokenizer.json"
        )
    if found.eos_token is None:
        raise ConfigError(
            f"data.tokenizer: {str(folder)!r} names no end token, so that no answer would end. Allowed: a folder with "
            "eos_token in its tokenizer_config.json"
        )
    return found


def located(template: str) -> str:
    """Return a template's name, or the absolute path of its file."""
    return template if template in ("chat", *BUILT_IN) else str(Path(template).expanduser().resolve())


@dataclass(frozen=True)
class Chat:
    """A tokenizer and a template: the tokenizer's own ("chat"), one of `BUILT_IN`, or a file of jinja."""

    folder: Path
    template: str

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        return read_tokenizer(self.folder)

    @cached_property
    def source(self) -> str:
        """The template's text. Raise ConfigError if there is none."""
        if self.template in BUILT_IN:
            # tokenizers differ in whether a text begins with their first token
            begins = self.tokenizer.bos_token_id in self.tokenizer("").input_ids[:1]
            return ("{{ bos_token }}" if begins else "") + BUILT_IN[self.template]
        if self.template == "chat":
            if not isinstance(found := self.tokenizer.chat_template, str):
                raise ConfigError(
                    f"data.template: the tokenizer in {str(self.folder)!r} has no chat template. Allowed: "
                    f"{', '.join(BUILT_IN)}, or a file of jinja"
                )
            return found
        try:
            return Path(self.template).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError):
            raise ConfigError(
                f"data.template: {self.template!r} is not valid. Allowed: chat (the tokenizer's own), "
                f"{', '.join(BUILT_IN)}, or a file of jinja"
            ) from None

    @cached_property
    def _special(self) -> tuple[str, ...]:
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return tuple(dict.fromkeys([*added, str(self.tokenizer.eos_token)]))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer: the tokenizer's end token, and the last one of an answer in the template."""
        last = self.encoded([PROBE], ["a probe"])[0][0][-1]
        return tuple(dict.fromkeys([int(last), int(self.tokenizer.eos_token_id)]))  # type: ignore

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation that the assistant is to continue."""
        text = self._rendered(messages, "the prompt", prompted=True)[0]
        return self.tokenizer(text, add_special_tokens=False).input_ids  # type: ignore

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, without special tokens and without spaces around it."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def encoded(self, conversations: Sequence[Sequence[Message]], places: Sequence[str]) -> list[tuple[Any, Any]]:
        """Return for each conversation its tokens [n] int32, and which of them the assistant says, [n] bool. `places`:
        where each comes from, for errors."""
        found = [self._spans(messages, place) for messages, place in zip(conversations, places, strict=True)]
        given = self.tokenizer([text for text, _ in found], add_special_tokens=False, return_offsets_mapping=True)
        answers = []
        for ids, offsets, (_, spans) in zip(given.input_ids, given["offset_mapping"], found, strict=True):  # type: ignore
            first, end = np.array(offsets, np.int64).reshape(-1, 2).T
            said = np.zeros(len(ids), bool)
            for start, stop in spans:
                said |= (end > start) & (first < stop)
            answers.append((np.array(ids, np.int32), said))
        return answers

    def _spans(self, messages: Sequence[Message], place: str) -> tuple[str, list[Span]]:
        """Return the text up to the end of the last answer, and the answers' characters."""
        text, spans = self._rendered(messages, place)
        if not spans:
            spans = [self._added(messages, i, text, place) for i, m in enumerate(messages) if m["role"] == "assistant"]
        closed = [self._closed(text, span) for span in spans]
        start, end = closed[-1]
        text = text[:end]
        if not text.endswith(self._special):
            text += str(self.tokenizer.eos_token)
        return text, [*closed[:-1], (start, len(text))]

    def _added(self, messages: Sequence[Message], i: int, text: str, place: str) -> Span:
        """Return what message i adds to the text before it."""
        before = self._rendered(messages[:i], place, prompted=True)[0]
        after = text if i == len(messages) - 1 else self._rendered(messages[: i + 1], place)[0]
        if not (text.startswith(before) and text.startswith(after) and len(before) < len(after)):
            raise ConfigError(
                f"data.template: in {place}, the template changes message {i + 1} when another one follows, so that "
                "the answer cannot be found. Allowed: a template with {% generation %} around answers, conversations "
                f"with one answer, or {', '.join(BUILT_IN)}"
            )
        return len(before), len(after)

    def _closed(self, text: str, span: Span) -> Span:
        """Return the span up to its last special token, if only spaces follow, or with the end token after it."""
        start, end = span
        said, eos = text[start:end], str(self.tokenizer.eos_token)
        if (found := re.search(rf"({'|'.join(map(re.escape, self._special))})\s*$", said)) is not None:
            return start, start + found.end(1)
        return start, end + len(eos) * text.startswith(eos, end)

    def _rendered(self, messages: Sequence[Message], place: str, prompted: bool = False) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        # their types leave out the variables of templates
        render: Any = render_jinja_template
        marked = not prompted and re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None
        try:
            texts, spans = render(
                conversations=[list(messages)],
                chat_template=self.source,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompted,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(
                f"data.template: {self.template!r} fails on {place} ({reason}). Allowed: a template of jinja that "
                "renders `messages` with role and content"
            ) from None
        return texts[0], list(spans[0]) if marked else []
