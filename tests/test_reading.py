"""How hard the pages are to read: at most 25 words between two full stops, colons or semicolons, and 100 per paragraph.

`tests/reading.yaml` has the number of long sentences and paragraphs of harder pages. It may only shrink:

    python tests/test_reading.py        # write the list
"""

import re
from pathlib import Path

import pytest
import yaml

WORDS, PARAGRAPH = 25, 100
LIST = Path("tests/reading.yaml")
# the changelog is looked up, not read
PAGES = [Path("README.md"), *sorted(Path(".github").glob("CO*.md")), *sorted(Path("clusters").glob("*.md"))]
PAGES += [
    page for folder in ("rayfl", "scripts", "tests", "tune_configs") for page in sorted(Path(folder).rglob("*.md"))
]


def hard(text: str) -> list[str]:
    """Return the sentences and paragraphs that are too long. Code and numbers of a table are not read as text."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|^(?:\||#|    )[^\n]*$", "\n", text, flags=re.S | re.M)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text))
    found = []
    for paragraph in re.split(r"\n\s*\n|^\s*(?:- |\d+\. )", text, flags=re.M):
        words = " ".join(paragraph.split())
        found += [words] * (len(words.split()) > PARAGRAPH)
        found += [part for part in re.split(r"(?<=[.!?:;]) ", words) if len(part.split()) > WORDS]
    return found


def test_what_is_counted():
    assert hard("# Title\n\n" + "word " * 25 + "\n\n```\n" + "word " * 30 + "\n```\n| " + "word " * 30) == []
    assert len(hard("A: " + "word " * 24 + "word word. Short.")) == 1
    assert len(hard("One two. " * 51)) == 1


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_is_easy_to_read(page):
    allowed = yaml.safe_load(LIST.read_text()).get(str(page), 0)
    found = hard(page.read_text())
    assert len(found) <= allowed, "\n".join(found)
    assert len(found) > allowed - 4, f"python tests/test_reading.py: {page} has only {len(found)}"


if __name__ == "__main__":
    counts = {str(page): count for page in PAGES if (count := len(hard(page.read_text())))}
    LIST.write_text(yaml.safe_dump(counts))
