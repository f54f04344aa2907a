"""Build the documentation site from the README files, the docstrings, the shipped files and their results.

    uv run --group docs python scripts/docs/build.py    # site/html/index.html: no server needed

A page has the same path as its source, so links between README files are links between pages. `.github/` is `about/` on
the site. Files that a page links to are copied. MkDocs fails on a dead link, a dead anchor or a page outside of the
navigation.
"""

import csv
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tutorial import page

import rayfl
from rayfl.config import load_yaml
from rayfl.config.plain import write_yaml
from rayfl.experiment import Experiment
from rayfl.reference.card import card, settings_table, table
from rayfl.reference.catalogue import KINDS
from rayfl.reference.settings import SECTIONS, kinds_below, settings

ROOT = Path(__file__).parents[2]
HERE, SITE = ROOT / "scripts/docs", ROOT / "site"
PAGES = SITE / "pages"
STUDIES = ROOT / "tune_configs/results"
CONCEPTS = (
    "methods",
    "models",
    "models/huggingface",
    "data",
    "training",
    "system",
    "tuning",
    "results",
    "engine",
    "cli",
)
"""Folders of `rayfl/` whose README is a page, beside the map."""
TUTORIALS = ("first_steps", "own_network_and_data", "own_method", "phones", "adapters", "papers_table")
GUIDES = ("install", "choose", "i_have", "machines", "after_a_run", "terms", "paper")
CARDS = {"method": "Methods", "model": "Models", "data": "Data sets", "partition": "Partitions"}
"""Place in a file -> title of its cards."""
LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)")
Nav = dict[str, Any]


def main() -> None:
    """Write the pages and the configuration of MkDocs, and run it."""
    shutil.rmtree(SITE, ignore_errors=True)
    PAGES.mkdir(parents=True)
    nav = [
        {"Start": [_copied("README.md")]},
        {"Tutorials": [tutorial(name) for name in TUTORIALS]},
        {"Guides": [*map(guide, GUIDES), *_all("clusters/README.md", "rayfl/PLUGINS.md")]},
        {"Concepts": _all(["rayfl/README.md", *(f"rayfl/{folder}/README.md" for folder in CONCEPTS)])},
        {"Reference": [*cards(), {"Settings": list(sections())}, {"Python": list(python())}]},
        {"Findings": ["tune_configs/README.md", {"Studies": [study(path) for path in sorted(STUDIES.glob("*.md"))]}]},
        {"About": _all(sorted((ROOT / ".github").glob("*.md")), "scripts/README.md", "tests/README.md")},
    ]
    _copied("tune_configs/README.md")
    for asset in ("iframe-worker.js", "extra.css"):
        shutil.copy(HERE / asset, _made(f"assets/{asset}"))
    base = {"INHERIT": str(HERE / "mkdocs.yml"), "docs_dir": str(PAGES), "site_dir": str(SITE / "html"), "nav": nav}
    (SITE / "mkdocs.yml").write_text(write_yaml(base))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(SITE / "mkdocs.yml")]
    subprocess.run(command, check=True, cwd=ROOT)
    print(f"{sum(1 for _ in PAGES.rglob('*.md'))} pages: {SITE / 'html/index.html'}")


def cards() -> Iterator[Nav]:
    """Write one page per class that a file can name, with its rows in the studies."""
    files = {path.stem: load_yaml(path) for path in sorted(ROOT.glob("tune_configs/*.yaml"))}
    results = list(_results(files))
    for place, title in CARDS.items():
        pages, entries = [], []
        for name in sorted(KINDS[place].known()):
            text = card(place, name, files)
            if found := [line for where, named, line in results if (where, named) == (place, name)]:
                text += "\n## Results\n\n" + "\n".join(found) + "\n"
            pages.append({name: _page(f"reference/{place}/{name}.md", text)})
            entries.append((f"[`{name}`]({name}.md)", text.split("\n\n")[1].partition(". ")[2]))
        index = _page(f"reference/{place}/index.md", f"# {title}\n\n" + table(("name", ""), entries) + "\n")
        yield {title: [{title: index}, *pages]}


def _results(files: dict[str, dict]) -> Iterator[tuple[str, str, str]]:
    """Yield method, its name and a line of its row, for every row of every study."""
    for study, entry in load_yaml(STUDIES / "index.yaml").items():
        match = re.search(r"tune_configs/(\w+)\.yaml", entry["command"])
        sweep = files.get(match[1] if match else "quickstart", {})
        page = next((p for p in STUDIES.glob("*.md") if f"<!-- table: {study} -->" in p.read_text()), None)
        by_title = {given.get("title", row): given for row, given in (sweep.get("rows") or {}).items() if given}
        with (STUDIES / f"{study}.csv").open(newline="") as file:
            for row in csv.DictReader(file):
                method = by_title.get(row.get("method", ""), {}).get("method") or sweep["experiment"].get("method")
                name = method["name"] if isinstance(method, dict) else method
                where = f"[{study}](../../tune_configs/results/{page.name})" if page else study
                score = next((f", {float(row[key]):.2f} %" for key in ("accuracy %", "local %") if row.get(key)), "")
                if name and row.get("method", "") in by_title:
                    yield "method", name, f"- {row['method']}{score} in {where}"


def tutorial(name: str) -> str:
    """Run a tutorial, and write its page with the outputs."""
    place = f"scripts/tutorials/{name}.md"
    return _page(place, page(ROOT / f"scripts/tutorials/{name}.py", _made(place)))


def guide(name: str) -> str:
    """Write the page of a guide, which a search finds first."""
    place = _copied(HERE / f"guides/{name}.md")
    _made(place).write_text("---\nsearch: {boost: 4}\n---\n" + _made(place).read_text())
    return place


def study(path: Path) -> str:
    """Write the page of a study, with the facts of its runs."""
    place, index = _copied(path), load_yaml(STUDIES / "index.yaml")
    facts = ["\n## Facts\n"]
    for name in re.findall(r"<!-- table: (\w+)", path.read_text()):
        shutil.copy(STUDIES / f"{name}.csv", _made(f"tune_configs/results/{name}.csv"))
        known = (f"{key}: {value}" for key, value in index[name].items() if key not in ("columns", "command"))
        facts.append(f"- [{name}.csv]({name}.csv): {'; '.join(known)}")
    with _made(place).open("a") as file:
        file.write("\n".join(facts) + "\n")
    return place


def sections() -> Iterator[str]:
    """Write one page per section of a file that is not chosen by name."""
    classes = {name: cls for name, s in settings(Experiment).items() for cls in kinds_below(name, s.field).values()}
    for name, cls in {"experiment": Experiment, **classes, **SECTIONS}.items():
        if name not in CARDS:
            text = f"# {name}\n\n{cls.__doc__ or ''}\n\n" + settings_table(cls) + "\n"
            yield _page(f"reference/settings/{name}.md", text)


def python() -> Iterator[Nav]:
    """Write one page per public name of `rayfl`."""
    for name in rayfl.__all__:
        value = getattr(rayfl, name)
        module = importlib.import_module(getattr(value, "__module__", "rayfl"))
        yield {name: _page(f"reference/python/{name}.md", f"::: {module.__name__}.{name}\n")}


def _all(*sources: Iterable[Path | str] | str) -> list[str]:
    return [_copied(source) for some in sources for source in ([some] if isinstance(some, str) else some)]


def _copied(source: Path | str) -> str:
    """Write the page of a file, and copy the files to which it links. Return its place among the pages."""
    path = ROOT / source
    text = path.read_text()
    for _, link in LINK.findall(text):
        linked = (path.parent / link).resolve()
        if linked.suffix != ".md":
            shutil.copy(linked, _made(_place(linked)))
    return _page(_place(path), LINK.sub(lambda m: m[1] + m[2].replace(".github/", "about/"), text))


def _place(path: Path) -> str:
    return str(path.relative_to(ROOT)).replace(".github/", "about/")


def _page(place: str, text: str) -> str:
    _made(place).write_text(markdown(text))
    return place


def _made(place: str) -> Path:
    (PAGES / place).parent.mkdir(parents=True, exist_ok=True)
    return PAGES / place


def markdown(text: str) -> str:
    """Return GitHub's Markdown as that of MkDocs: a list or a table needs an empty line before it, and a comment that
    marks a table is none of its rows."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.S | re.M)
    for i in range(0, len(parts), 2):
        part = re.sub(r"^<!-- .*? -->\n", "\n", parts[i], flags=re.M)
        part = re.sub(r"^(?!\s|$|- |\d+\. |\||#)(.+)\n(?=- |\d+\. |\|)", r"\1\n\n", part, flags=re.M)
        parts[i] = part
    return "".join(parts)


if __name__ == "__main__":
    main()
