"""The tutorials run as they stand, and their pages have what they print."""

from pathlib import Path

import pytest

SCRIPTS = sorted(Path("scripts/tutorials").glob("*.py"))


@pytest.fixture
def tutorial(script, monkeypatch):
    monkeypatch.syspath_prepend(str(Path.cwd() / "scripts/docs"))
    return script("tutorial")


def test_a_page_has_texts_code_and_outputs(tutorial, tmp_path):
    (tmp_path / "a.py").write_text("# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nx = 2\nprint(x)\nx + 1\n")
    shown = tutorial.page(tmp_path / "a.py", tmp_path / "a.md")
    assert shown == "# Title\n\nText.\n\n```python\nx = 2\nprint(x)\nx + 1\n```\n\n```text\n2\n3\n```\n"


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_tutorial_runs(tutorial, path, tmp_path):
    shown = tutorial.page(path, tmp_path / "page.md")
    assert shown.startswith("# ") and "At the end" in shown and "```text\n" in shown
