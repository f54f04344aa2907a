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
from importlib.resources import files as files_of
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tutorial import page

import rayfl
from rayfl.config import load_yaml
from rayfl.config.plain import write_yaml
from rayfl.experiment import Experiment
from rayfl.reference.card import MATH, card, settings_table, table
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
CARDS = {"method": "Methods", "model": "Models", "data": "Data sets", "partition": "Partitions, IID and non-IID"}
"""Place in a file -> title of its cards."""
MATHJAX = ("startup.js", "core.js", "input/asciimath.js", "output/svg.js", "output/svg/fonts/tex.js")
"""Files of MathJax that set AsciiMath, without fonts of their own."""
ASCIIMATH = {
    *("alpha", "beta", "gamma", "delta", "epsilon", "eta", "theta", "lambda", "mu", "rho", "sigma", "tau", "phi"),
    *(
        "in",
        "sum",
        "norm",
        "sqrt",
        "cos",
        "floor",
        "ceil",
        "min",
        "max",
        "log",
        "exp",
        "mod",
        "grad",
        "bar",
        "tilde",
        "larr",
    ),
}
"""Words of AsciiMath in data sheets. Other words are text."""
FIRST = "---\nsearch: {{boost: {}}}\n---\n"
"""Beginning of a page that a search finds before others, of which the boost is 1."""
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
    for asset in ("iframe-worker.js", "math.js", "extra.css"):
        shutil.copy(HERE / asset, _made(f"assets/{asset}"))
    for name in MATHJAX:
        _made(f"assets/mathjax/{name}").write_bytes(
            files_of("mathjax").joinpath("static/mathjax/es5", name).read_bytes()
        )
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
            # before cards of its variants, whose names are longer
            first = FIRST.format(1 + 1 / len(name.split("_")))
            pages.append({name: _page(f"reference/{place}/{name}.md", first + typeset(text))})
            entries.append((f"[`{name}`]({name}.md)", text.split("\n\n")[1].partition(". ")[2]))
        index = _page(f"reference/{place}/index.md", f"# {title}\n\n" + table(("name", ""), entries) + "\n")
        yield {title: [{title: index}, *pages]}


def typeset(card: str) -> str:
    """Return a card in which MathJax sets the mathematics, equations have a heading, and their blocks are lists."""
    parts = re.sub("^Symbols: ", "## Equations\n\n\\g<0>", card, flags=re.M).split("\n\n")
    parts = [_terms(part) if part.startswith("    ") and "$" in part else part for part in parts]
    return MATH.sub(_math, "\n\n".join(parts))


def _terms(block: str) -> str:
    """Return a block as a definition list: a term ends at two spaces, and a line at a colon or semicolon."""
    found = []
    for entry in re.split(r"\n(?=    \S)", block):
        term, text = re.split(r"(?<=\S) {2,}", entry.strip(), maxsplit=1)
        found.append(f"{term}\n:   " + re.sub(r"\n +", " ", re.sub(r"(?<=[:;])\n", "<br>\n", text)))
    return "\n\n".join(found)


def _math(match: re.Match[str]) -> str:
    text = match[1].replace("<-", "larr").replace("'", "^'")
    text = re.sub(r"[A-Za-z]{2,}", lambda m: m[0] if m[0] in ASCIIMATH else f'"{m[0]}"', text)
    # entities, which Markdown leaves alone
    found = "".join(c if c.isalnum() or c.isspace() else f"&#{ord(c)};" for c in f"`{text}`")
    return f'<span class="math">{found}</span>'


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
    return _page(place, FIRST.format(4) + page(ROOT / f"scripts/tutorials/{name}.py", _made(place)))


def guide(name: str) -> str:
    """Write the page of a guide."""
    place = _copied(HERE / f"guides/{name}.md")
    _made(place).write_text(FIRST.format(4) + _made(place).read_text())
    return place


def study(path: Path) -> str:
    """Write the page of a study, with the facts of its runs, and a plot if it has none."""
    place, index, text = _copied(path), load_yaml(STUDIES / "index.yaml"), path.read_text()
    names = re.findall(r"<!-- table: (\w+)", text)
    facts = ["\n## Facts\n"]
    if "![" not in text and (figure := plotted(STUDIES / f"{names[0]}.csv")):
        figure.savefig(_made(f"tune_configs/results/{names[0]}.png"), dpi=100, bbox_inches="tight")
        facts.insert(0, f"\n![The table's scores, with standard deviations over seeds]({names[0]}.png)")
    for name in names:
        shutil.copy(STUDIES / f"{name}.csv", _made(f"tune_configs/results/{name}.csv"))
        known = (f"{key}: {value}" for key, value in index[name].items() if key not in ("columns", "command"))
        facts.append(f"- [{name}.csv]({name}.csv): {'; '.join(known)}")
    with _made(place).open("a") as file:
        file.write("\n".join(facts) + "\n")
    return place


def plotted(file: Path) -> Figure | None:
    """Return a plot of a table's first score in per cent, by row; None of a table without one."""
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))[::-1]
    label, *others = rows[0]
    score = next((key for key in others if key.endswith(" %")), None)
    if score is None or label not in ("method", "row"):
        return None
    rows = [row for row in rows if row[score]]
    figure = Figure(figsize=(7, 0.8 + 0.25 * len(rows)))
    axes = figure.subplots()
    spread = [float(row.get(f"{score} std") or 0) for row in rows]
    axes.errorbar([float(row[score]) for row in rows], range(len(rows)), xerr=spread, fmt="o", capsize=3)
    axes.set_yticks(range(len(rows)), [row[label] for row in rows])
    axes.set_xlabel(score)
    axes.grid(axis="x", alpha=0.3)
    return figure


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
