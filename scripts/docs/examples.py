"""Show the examples of docstrings as code."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Return a docstring with its examples as blocks of code.

    >>> print(fenced(">>> 1\\n1\\n\\nText."))
    ```pycon
    >>> 1
    1
    ```
    <BLANKLINE>
    Text.
    """
    return re.sub(r"^>>> (?:.+\n?)+", lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", text, flags=re.M)
