"""Help at 80 columns, the version, and completion on Tab."""

import os
import pty
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rayfl import cli

COMMANDS = typer.main.get_command(cli.app).commands
ESCAPE = "\x1b"


def said(*arguments, **environment) -> str:
    answer = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "80"} | environment, prog_name="rayfl")
    assert answer.exit_code == 0, answer.output
    return answer.output


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_at_80_columns(command):
    """Nothing is cut off, every option is explained, and there is an example that the command line takes."""
    short, long = (said(*[command] * bool(command), option) for option in ("-h", "--help"))
    assert short == long
    assert max(map(len, short.splitlines())) <= 80 and "…" not in short and "[bold]" not in short
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", short).split())
    if not command:
        assert [name for name in COMMANDS if f" {name} " not in words] == []
        return
    assert [o for p in COMMANDS[command].params for o in p.opts if o.startswith("--") and o not in short] == []
    assert [param.name for param in COMMANDS[command].params if not param.help] == []
    [example] = re.findall(r"Example: (rayfl .*)", words)
    name, *arguments = example.partition(" > ")[0].split()[1:]
    assert name == command
    flags = {option for param in COMMANDS[command].params for option in param.opts}
    assert [word for word in arguments if word.startswith("-") and word not in flags] == []


def test_version():
    assert said("--version") == f"rayfl {version('rayfl')}\n"


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "rayfl", "--version"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"rayfl {version('rayfl')}\n", "")


# completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_for_every_shell(shell, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    script = CliRunner().invoke(cli.app, [], env={"_RAYFL_COMPLETE": f"source_{shell}"}, prog_name="rayfl")
    assert script.exit_code == 0 and "_RAYFL_COMPLETE=complete_" + shell in script.output.replace("env ", "")
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script.output, text=True, check=True)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("rayfl de", ["describe"]),
        ("rayfl compare --format ", ["table", "markdown", "csv", "latex"]),
        ("rayfl describe --metric p", ["params"]),
        ("rayfl describe --convention ", ["heterofl_official", "macs", "flops2"]),
        ("rayfl list par", ["partitions"]),
        ("rayfl schema ", ["run", "sweep"]),
        ("rayfl run quickst", ["quickstart"]),
        ("rayfl run quickstart --row f", ["fedavg-smallest", "fjord", "fiarse"]),
        ("rayfl sweep --rows fjord,hete", ["fjord,heterofl"]),
        ("rayfl run nothere --row f", []),
    ],
)
def test_what_a_shell_offers(line, offered):
    environment = {"_RAYFL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    assert said(**environment).split() == offered


def test_files_and_folders_are_offered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Mine").mkdir()
    for name in ("Mine/a.yaml", "Mine/b.txt", "My.yaml"):
        (tmp_path / name).write_text("")
    environment = {"_RAYFL_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    assert said(COMP_WORDS="rayfl check M", **environment).split() == ["Mine/", "My.yaml"]
    assert said(COMP_WORDS="rayfl check Mine/", **environment).split() == ["Mine/a.yaml"]


def test_a_shell_does_not_wait_for_torch():
    """A file is found, and its rows are read, without what trains."""
    code = (
        "import sys; from rayfl.cli import app; from typer.testing import CliRunner; print(CliRunner().invoke(app, [], "
        "prog_name='rayfl').output); print('torch' in sys.modules, 'ray' in sys.modules)"
    )
    environment = {"_RAYFL_COMPLETE": "complete_bash", "COMP_WORDS": "rayfl run quickstart --row fj", "COMP_CWORD": "4"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    assert done.stdout.split() == ["fjord", "False", "False"]


# colours


def in_a_terminal(code: str, **environment) -> str:
    """Return the output of Python code on its own terminal."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=end, stdout=end, stderr=end, env=os.environ | environment
    )
    os.close(end)
    found = b""
    try:
        while some := os.read(terminal, 65536):
            found += some
    except OSError:  # it has ended
        pass
    os.close(terminal)
    assert process.wait() == 0
    return found.decode()


SHOWN = """
import sys
from rich.table import Table
from rayfl.cli.shared import console, print_table, warn
from rayfl.results.console import RunProgress

with RunProgress("fedavg", 4, console=console) as progress:
    progress.phase("starting Ray")
    progress.update(1, {"seconds": 1.0, "train_loss": 0.5})
    progress.note("something")
print_table(Table("method", "accuracy"))
warn("error: a sentence", style="red")
assert "torch" not in sys.modules
"""


def test_no_color_has_no_colors_in_a_terminal():
    """Nor bold: a live area moves in its place all the same. A terminal that knows nothing gets no code at all."""
    style = f"{ESCAPE}\\[[0-9;]*m"
    shown = {name: in_a_terminal(SHOWN, **{"TERM": "xterm-256color", name: "1"}) for name in ("NO_COLOR", "NOTHING")}
    assert all("fedavg: round 1/4" in text and "error: a sentence" in text for text in shown.values())
    assert re.findall(style, shown["NOTHING"]) and not re.findall(style, shown["NO_COLOR"])
    assert ESCAPE not in in_a_terminal(SHOWN, TERM="dumb")


def test_every_event_is_documented():
    """Every event that a progress tells of stands in the README's table, and no other."""
    table = Path("rayfl/cli/README.md").read_text().partition("## For other programs")[2]
    rows = "".join(re.findall(r"^\| (`.+?) \|", table, re.M))
    told = set()
    for file in ("rayfl/results/console.py", "rayfl/cli/output.py"):
        told |= set(re.findall(r'\btell\("(\w+)"|"(\w+)" if EVALUATED', Path(file).read_text()))
    names = {name for pair in told for name in pair if name} | {"round"}
    assert names == set(re.findall(r"`(\w+)`", rows))
