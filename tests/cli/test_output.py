"""Output of run and sweep: for people, only the result (--quiet), or events for machines (--json)."""

import io
import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import yaml
from helpers import TINY
from typer.testing import CliRunner

from rayfl import cli
from rayfl.cli import train
from rayfl.config import ConfigError
from rayfl.results.events import line_of
from rayfl.results.folder import RunFolder


@pytest.fixture
def rayfl(monkeypatch, tmp_path):
    """Runs a command in an empty folder, without MLflow: what it answered."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        train, "sending_to", lambda *_: nullcontext(SimpleNamespace(add=lambda path: None, page=lambda path: ""))
    )
    given = TINY | {"method": "heterofl", "rounds": 3, "evaluation": {"every": 2}}
    (tmp_path / "exp.yaml").write_text(yaml.safe_dump(given))
    return lambda *arguments: CliRunner().invoke(cli.app, list(map(str, arguments)), prog_name="rayfl")


def events_of(answer):
    """Every line is one."""
    return [json.loads(line, parse_constant=lambda word: pytest.fail(word)) for line in answer.stdout.splitlines()]


def test_json_has_a_line_an_event(rayfl, tmp_path):
    answer = rayfl("run", "exp.yaml", "--json")
    assert answer.exit_code == 0 and answer.stderr == ""
    events = events_of(answer)
    kinds = [event["event"] for event in events]
    work = [kind for kind in kinds if kind != "phase"]
    assert work == ["started", "round", "evaluated", "evaluated", "ended", "result"]
    assert kinds[0] == "phase" and all(isinstance(event["time"], float) for event in events)
    by = {event["event"]: event for event in events}
    folder = RunFolder.open(tmp_path / "runs" / "exp")
    assert (by["started"]["folder"], by["started"]["rounds"]) == (str(folder.path), 3)
    lines = [
        {k: v for k, v in e.items() if k not in ("event", "time")}
        for e in events
        if e["event"] in ("round", "evaluated")
    ]
    assert lines == folder.rounds()
    assert by["ended"]["status"] == "finished"
    assert {key: by["result"][key] for key in folder.result if key != "method"} == {
        key: value for key, value in folder.result.items() if key != "method"
    }
    assert by["result"]["path"] == str(folder.path)


def test_json_of_a_run_that_fails_and_of_bad_input(rayfl):
    answer = rayfl("run", "exp.yaml", "--json", "--set", "training.lr=1e30", "--set", "updates.policy=stop")
    assert answer.exit_code == 1
    assert [e["status"] for e in events_of(answer) if e["event"] == "ended"] == ["failed"]
    answer = rayfl("run", "exp.yaml", "--json", "--quiet")
    assert isinstance(answer.exception, ConfigError) and answer.stdout == ""


def test_quiet_prints_the_table_alone(rayfl):
    loud, quiet = rayfl("run", "exp.yaml"), rayfl("run", "exp.yaml", "--quiet", "--name", "again")
    assert loud.exit_code == quiet.exit_code == 0 and quiet.stderr == ""
    lines = [line.split() for line in quiet.stdout.splitlines() if line.strip()]
    assert [line[0] for line in lines][:1] == ["method"] and lines[-1][0] == "heterofl" and len(lines) == 3
    assert "writing tables" in loud.stdout and "results in" in loud.stdout
    assert "mlflow" not in quiet.stdout and "round" not in quiet.stdout


def test_notes_of_a_quiet_command_go_to_stderr(rayfl):
    lost = ("--set", "training.lr=1e30", "--set", "training.steps=2")
    quiet = rayfl("run", "exp.yaml", "--quiet", *lost)
    assert quiet.exit_code == 0 and "refused" not in quiet.stdout and "round 1: refused client" in quiet.stderr
    loud = rayfl("run", "exp.yaml", "--json", "--name", "again", *lost)
    notes = [event["text"] for event in events_of(loud) if event["event"] == "note"]
    assert "\n".join(notes) in quiet.stderr.replace("\n", "\n") and notes


def test_a_line_is_json_whatever_is_told():
    line = line_of("round", loss=float("nan"), norm=float("inf"), folder=None, label="a\nb", share=0.5)
    assert "\n" not in line
    found = json.loads(line)
    assert (found["loss"], found["norm"], found["folder"], found["label"], found["share"]) == (
        None,
        None,
        None,
        "a\nb",
        0.5,
    )


def test_a_terminal_without_a_character_gets_another(monkeypatch, tmp_path):
    """Or the table of a run that took a day would not be printed."""
    monkeypatch.chdir(tmp_path)
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding="ascii") for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    for words, name, said in ((["check", "größe.yaml"], "stderr", b"gr??e.yaml"), (["list"], "stdout", b"fedavg")):
        monkeypatch.setattr(sys, "argv", ["rayfl", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        streams[name].flush()
        assert ended.value.code in (None, 0, 2) and said in streams[name].buffer.getvalue()  # pyright: ignore
