"""The documentation site: pages from README files. MkDocs itself runs in the workflow that publishes it."""

import re
from pathlib import Path

import pytest
import yaml
from PIL import Image

from rayfl.experiment import Experiment

GUIDE = Path.cwd() / "scripts/docs/guides/i_have.md"


@pytest.fixture
def docs(script, monkeypatch, tmp_path):
    # as a command, it imports files beside it
    monkeypatch.syspath_prepend(str(Path.cwd() / "scripts/docs"))
    build = script("docs.build")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "PAGES", tmp_path / "site")
    return build


def test_a_list_or_table_gets_an_empty_line_before_it(docs):
    assert docs.markdown("Text:\n- a\n  b\n- c\n") == "Text:\n\n- a\n  b\n- c\n"
    assert docs.markdown("<!-- table: x -->\n| a |\n|---|\n<!-- end -->\nText") == "\n| a |\n|---|\n\nText"
    assert docs.markdown("```sh\nx\n- a\n```\n1. a\n2. b\n") == "```sh\nx\n- a\n```\n1. a\n2. b\n"


def test_a_page_keeps_its_place_and_brings_its_files(docs, tmp_path):
    for name in ("a/README.md", "a/b.yaml", ".github/images/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("[b](b.yaml) ![c](../.github/images/c.png) [d](../README.md#e) [f](https://f)")
    assert docs._copied("a/README.md") == "a/README.md"
    page = (tmp_path / "site/a/README.md").read_text()
    assert page == "[b](b.yaml) ![c](../about/images/c.png) [d](../README.md#e) [f](https://f)"
    assert (tmp_path / "site/a/b.yaml").exists() and (tmp_path / "site/about/images/c.png").exists()


def test_equations_are_terms_that_mathjax_sets(docs):
    text = docs.typeset(
        "Symbols: $x_k$.\n\n    $y_k$    $<- max(x_k, CE)$:\n             more\n    $z$      text\n\nEnd."
    )
    terms = re.sub("&#(\\d+);", lambda m: chr(int(m[1])), text)
    assert terms == (
        '## Equations\n\nSymbols: <span class="math">`x_k`</span>.\n\n<span class="math">`y_k`</span>\n:   '
        '<span class="math">`larr max(x_k, "CE")`</span>:<br> more\n\n<span class="math">`z`</span>\n:   text\n\nEnd.'
    )


def test_examples_of_docstrings_are_code(script):
    text = script("docs.examples").fenced("Return 1.\n\n>>> x = {\n... }\n>>> f(x)[0]\n1\n\nText.")
    assert text == "Return 1.\n\n```pycon\n>>> x = {\n... }\n>>> f(x)[0]\n1\n```\n\nText."


def test_rows_of_studies_belong_to_methods(docs):
    files = {path.stem: docs.load_yaml(path) for path in sorted(docs.HERE.parents[1].glob("tune_configs/*.yaml"))}
    found = [line for _, name, line in docs._results(files) if name == "depthfl"]
    assert any(line.startswith("- DepthFL, 12 channels, 85.65 % in ") for line in found)


def test_a_study_without_a_picture_has_a_plot_of_its_first_score(docs, tmp_path):
    (tmp_path / "a.csv").write_text("method,seeds,local %,local % std,@1\nA,3,80,1.5,7\nB,3,,,\nC,1,70,,6\n")
    axes = docs.plotted(tmp_path / "a.csv").axes[0]
    assert axes.get_xlabel() == "local %" and [text.get_text() for text in axes.get_yticklabels()] == ["C", "A"]
    (tmp_path / "b.csv").write_text("width,accuracy %\n0.5,80\n")
    assert docs.plotted(tmp_path / "b.csv") is None


def test_the_files_of_the_guide_are_valid(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("patients.csv").write_text("sex,age,days\n" + "f,40,3\nm,50,4\n" * 20)
    Path("reviews.csv").write_text("review,stars,author\n" + "very good,1,a\nnot good,0,b\n" * 20)
    for name in ("train/rose", "train/tulip", "test/rose", "test/tulip"):
        Path("flowers", name).mkdir(parents=True)
        Image.new("RGB", (64, 64)).save(f"flowers/{name}/a.png")
    blocks = re.findall(r"^```yaml\n(.*?)^```", GUIDE.read_text(), re.S | re.M)
    assert len(blocks) == 5
    for block in blocks:
        # the folder of a language model is not here
        block = block.replace(", tokenizer: ~/roberta-base", "").replace(
            "weights: ~/roberta-base", "hidden: 16, heads: 2, layers: 1"
        )
        Experiment.model_validate(yaml.safe_load(block))
