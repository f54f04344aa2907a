"""Rows of instructions and conversations: their files, their formats, and the messages that they mean."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rayfl.config import Config, ConfigError, shown
from rayfl.data.own import tidy
from rayfl.data.text.chat import Message
from rayfl.data.text.tables import read_table

FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Suffixes of files with rows."""
Row = Mapping[str, Any]


class Conversations(Config):
    """Columns of rows: a list of messages; instruction, input and output; or prompt and response."""

    format: Literal["messages", "instruction", "prompt"] | None = None
    """Columns of the rows. Default: the format whose columns the rows have."""
    messages: str = "messages"
    """Column of conversations."""
    instruction: str = "instruction"
    """Column of instructions."""
    input: str = "input"
    """Column of inputs of instructions, which may be empty or missing."""
    output: str = "output"
    """Column of answers to instructions."""
    prompt: str = "prompt"
    """Column of prompts."""
    response: str = "response"
    """Column of answers to prompts."""
    system: str | None = None
    """System message before conversations without one."""

    def _format(self, row: Row, place: str) -> str:
        """Return the format of a row."""
        wanted = {
            "messages": (self.messages,),
            "instruction": (self.instruction, self.output),
            "prompt": (self.prompt, self.response),
        }
        fits = [name for name, columns in wanted.items() if all(column in row for column in columns)]
        if self.format is not None:
            fits = [name for name in fits if name == self.format]
        if len(fits) != 1:
            asked = [self.format] if self.format else list(wanted)
            columns = "; or ".join(" and ".join(map(repr, wanted[name])) for name in asked)
            hint = (
                ". Hint: data.format selects one" if fits else ". Hint: data.instruction, data.output, ... name columns"
            )
            raise ConfigError(f"data: {place} has the columns {', '.join(map(repr, row))}. Allowed: {columns}{hint}")
        return fits[0]

    def conversation(self, row: Row, place: str) -> list[Message]:
        """Return the messages of a row. Raise a ConfigError with its place if there are none."""
        format = self._format(row, place)
        if format == "messages":
            messages = _messages(row[self.messages], place, self.messages)
        elif format == "prompt":
            said = _text(row, self.prompt, place), _text(row, self.response, place)
            messages = [{"role": "user", "content": said[0]}, {"role": "assistant", "content": said[1]}]
        else:
            asked = {"instruction": _text(row, self.instruction, place)}
            if row.get(self.input):
                asked["input"] = _text(row, self.input, place)
            user = {"role": "user", "content": "\n".join(asked.values()), **asked}
            messages = [user, {"role": "assistant", "content": _text(row, self.output, place)}]
        if self.system is not None and messages[0]["role"] != "system":
            return [{"role": "system", "content": self.system}, *messages]
        return messages


def cell(row: Row, name: str, field: str, place: str) -> str:
    """Return a class or a user; of unknown users ""."""
    value = row.get(name)
    if value in (None, "") and field == "label":
        raise ConfigError(f"data.label: {place} has no value in {name!r}. Allowed: a value in every row")
    return "" if value is None else tidy(str(value))


def _text(row: Row, column: str, place: str) -> str:
    if not isinstance(value := row[column], str) or not value.strip():
        raise ConfigError(f"data: {place} has {shown(value)} in column {column!r}. Allowed: text that is not empty")
    return value


def _messages(given: Any, place: str, column: str) -> list[Message]:
    if isinstance(given, str):  # of a table
        try:
            given = json.loads(given)
        except ValueError:
            pass
    if not isinstance(given, list) or not all(
        isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in given
    ):
        raise ConfigError(
            f"data: {place} has {shown(given)} in column {column!r}. Allowed: a list of messages with role and content"
        )
    roles = [message["role"] for message in given]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or len(turns) % 2 or turns != ["user", "assistant"] * (len(turns) // 2):
        raise ConfigError(
            f"data: {place} has the roles {', '.join(map(str, roles)) or '(none)'}. Allowed: user and assistant in "
            "turns that end with assistant, after at most one system"
        )
    return [
        {"role": m["role"], "content": _text(m, "content", f"message {i} of {place}")} for i, m in enumerate(given, 1)
    ]


def read_rows(path: Path, field: str) -> Sequence[Row]:
    """Return the rows of a file."""
    if path.suffix.lower() in (".csv", ".tsv"):
        table = read_table(path, field)
        return [dict(zip(table, cells, strict=True)) for cells in zip(*table.values(), strict=True)]
    try:
        if path.suffix.lower() == ".parquet":
            from pyarrow import parquet

            return parquet.read_table(path).to_pylist()
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() == ".json":
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("rows are not objects")
        return rows
    except (OSError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"data.{field}: {str(path)!r} cannot be read ({reason}). Allowed: one JSON object per line, a JSON list of "
            "objects, or a table"
        ) from None
