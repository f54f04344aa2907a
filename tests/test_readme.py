"""The READMEs are true: examples run unchanged; commands, options, files and links exist."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import rayfl
from rayfl import cli
from rayfl.data import DATASETS, PARTITIONS
from rayfl.methods import METHODS
from rayfl.methods.distillation import DISTILLATION
from rayfl.methods.lowrank import LOWRANK
from rayfl.training.transforms import TRANSFORMS
from rayfl.tuning.load import load_sweep

ROOT = Path.cwd()
FOLDERS = ("rayfl", "tests", "scripts", "clusters", "tune_configs")
READMES = [
    Path("README.md"),
    *sorted(Path(".github").glob("*.md")),
    *(path for folder in FOLDERS for path in sorted(Path(folder).glob("**/*.md"))),
]
COMMANDS = typer.main.get_command(cli.app).commands

every_readme = pytest.mark.parametrize("path", READMES, ids=str)


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.S | re.M)


# the top one


def test_the_top_readme_is_read_in_two_minutes():
    lines = Path("README.md").read_text().splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 100


def test_its_table_has_every_command():
    rows = "".join(re.findall(r"^\| (`rayfl .+?) \|", Path("README.md").read_text(), re.M))
    assert set(re.findall(r"`rayfl (\w+)", rows)) == set(COMMANDS)


def test_its_python_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    [example] = blocks(Path("README.md"), "python")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(example, names)
    assert "train_loss" in capsys.readouterr().out and (tmp_path / "by_capacity.png").exists()
    assert names["small"](torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_its_version_is_the_packages():
    version = re.search(r'^version = "(.+)"', Path("pyproject.toml").read_text(), re.M)
    assert version and f"rayfl-{version[1]}-py3" in Path("scripts/docs/guides/install.md").read_text()
    assert f"version: {version[1]}\n" in Path(".github/CITATION.cff").read_text()
    assert f"version = {{{version[1]}}}" in Path("scripts/docs/guides/paper.md").read_text()


# those of folders


def test_the_example_file_is_valid(tmp_path):
    [example] = blocks(Path("tune_configs/README.md"), "yaml")
    (tmp_path / "example.yaml").write_text(example)
    plan = load_sweep(tmp_path / "example.yaml")
    assert list(plan.rows) == ["heterofl", "fedrolex"] and plan.search.seeds == (0, 1, 2)
    assert [name for name in [*DATASETS, *PARTITIONS, *TRANSFORMS] if name not in example] == []


def test_it_counts_the_methods():
    text = " ".join(Path("README.md").read_text().split())
    for count in (f"[{len(METHODS)} methods]", f"{len(LOWRANK)} for low-rank", f"{len(DISTILLATION)} for networks"):
        assert count in text


def test_the_example_method_runs_as_it_stands(tmp_path, monkeypatch):
    [example] = blocks(Path("rayfl/methods/README.md"), "python")
    (tmp_path / "pulled.py").write_text(example)
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment = {
        "rounds": 3,
        "data": {"name": "synthetic", "samples": 80, "test_samples": 40},
        "clients": {"count": 4, "cohort": 2, "capacities": [1, 0.5]},
        "model": "digits_cnn",
        "method": {"name": "pulled:Pulled"},
        "run": {"executor": "serial"},
    }
    result = rayfl.run(experiment)
    sys.modules.pop("pulled")
    assert "accuracy_mean" in result.summary
    assert "refusals" not in result.metrics


# all


@every_readme
def test_links_lead_somewhere(path):
    text = path.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        file, _, heading = link.partition("#")
        target = (path.parent / file).resolve() if file else path.resolve()
        assert target.exists(), link
        if heading:
            assert heading in headings(target), link


def headings(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@every_readme
def test_files_that_it_names_exist(path):
    """In backticks, from the root; in the first column of a table also from its own folder."""
    text = path.read_text()
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./]*)`", text)
    first = " ".join(re.findall(r"^\| (.+?) \|", text, re.M))
    named += [f"{path.parent}/{name}" for name in re.findall(r"`(\w+\.(?:py|yaml))`", first)]
    assert [name for name in named if not Path(name).exists()] == []


@every_readme
def test_its_commands_are_there(path):
    """With their options. In a block of `sh` the files, rows and settings have to be right too."""
    text = path.read_text()
    for line in re.findall(r"`rayfl ([^`]+)`", text):
        parsed(line)
    for line in "".join(blocks(path, "sh")).splitlines():
        for part in re.split(r"&& ?", line.partition("  #")[0]):
            match = re.match(r"(?:uv run )?(?:rayfl|(?:python )?(scripts/\w+\.py)) ?(.*)", part.strip())
            if match and match[1] not in (None, "scripts/sweep.py"):
                script = Path(match[1]).read_text()
                assert all(option in script for option in re.findall(r"--[\w-]+", match[2])), part
            elif match:
                loads(*parsed(match[2] if match[1] is None else f"sweep {match[2]}"))


def parsed(line: str) -> tuple[str, list[str], dict[str, list[str]]]:
    """Command, arguments, and options with their values, of what follows `rayfl`."""
    name, *words = shlex.split(line)
    assert name in COMMANDS or name.startswith("-"), line
    flags = {
        opt: param.is_flag
        for param in COMMANDS[name].params
        for opt in param.opts + param.secondary_opts
        if opt[0] == "-"
    }
    arguments, options = [], {}
    while words:
        word = words.pop(0)
        if word == "--help":
            continue
        if not word.startswith("--"):
            arguments.append(word)
            continue
        assert word in flags, f"{line}: {word}"
        options.setdefault(word, []).append("" if flags[word] else words.pop(0))
    return name, arguments, options


def loads(command: str, arguments: list[str], options: dict[str, list[str]]) -> None:
    """A shipped sweep, or a row of one, that a reader would start is valid."""
    if command not in ("sweep", "run") or not arguments or not arguments[0].startswith("tune_configs/"):
        return
    rows = options.get("--rows", options.get("--row", [None]))[0]
    rounds = [f"rounds={value}" for value in options.get("--rounds", [])]
    load_sweep(arguments[0], [*options.get("--set", []), *rounds], rows)


@every_readme
def test_what_describe_prints_is_what_it_shows(path):
    shown = re.findall(r"^```sh\nrayfl (describe [^\n]+)\n```\n+```\n(.*?)^```", path.read_text(), re.S | re.M)
    for line, table in shown:
        answer = CliRunner().invoke(cli.app, shlex.split(line))
        assert answer.exit_code == 0, answer.output
        rows = [row.split() for row in answer.output.splitlines()]
        assert [row.split() for row in table.splitlines() if row.split() not in rows] == []
