"""Run a tutorial, a script in percent format (`# %%`), cell by cell, and make a page of it with its outputs."""

import ast
import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure


def page(script: Path, pictures: Path) -> str:
    """Return the page of a script in Markdown. Its figures are written beside `pictures`, with numbers. The last
    expression of a cell is shown, as in a notebook."""
    matplotlib.use("Agg")
    names: dict[str, Any] = {"__name__": script.stem}
    parts = []
    for kind, text in cells(script.read_text()):
        if kind == "markdown":
            parts.append(re.sub(r"^# ?", "", text, flags=re.M))
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = run(text, str(script), names)
        parts.append(f"```python\n{text}\n```")
        if isinstance(value, Figure):
            place = pictures.with_name(f"{pictures.stem}_{len(parts)}.png")
            value.savefig(place, dpi=100, bbox_inches="tight")
            parts.append(f"![A plot of the cell above]({place.name})")
        elif value is not None:
            print(value.to_string() if isinstance(value, pd.DataFrame) else repr(value), file=printed)
        if printed.getvalue():
            parts.append(f"```text\n{printed.getvalue().rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def cells(text: str) -> Iterator[tuple[str, str]]:
    """Yield "markdown" or "code", and the text, of every cell."""
    for cell in re.split(r"^# %%", text, flags=re.M)[1:]:
        head, _, body = cell.partition("\n")
        yield "markdown" if "[markdown]" in head else "code", body.strip()


def run(text: str, file: str, names: dict[str, Any]) -> Any:
    """Run a cell, and return the value of its last statement if that is an expression, otherwise None."""
    tree = ast.parse(text)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, file, "exec"), names)
    return eval(compile(ast.Expression(last.value), file, "eval"), names) if isinstance(last, ast.Expr) else None
