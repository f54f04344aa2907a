"""The benches of steps run, their checks hold, and their ratios are what they say."""

import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

SCRIPTS = Path.cwd() / "scripts"
CPU = torch.device("cpu")


def test_recorded_steps_are_measured_beside_the_others_on_a_cpu(script):
    gpu = script("bench_gpu")
    for name, net in gpu.DRY.nets.items():
        assert gpu.check(net, 4, CPU)["recorded"] == 0
        row = gpu.rows_of(name, net, 4, replace(gpu.DRY, steps=1), CPU)
        assert row["recorded: times as fast"] == row["rayfl, not recorded"] / row["rayfl, recorded"] > 0


def test_without_a_gpu_the_bench_says_what_is_allowed(script, monkeypatch):
    gpu = script("bench_gpu")
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert str(ended.value) == (
        "bench_gpu.py: torch finds no CUDA device. Allowed: a machine with one, or --dry-run on a CPU"
    )


def test_the_short_bench_is_a_part_of_the_whole_one_without_compilation(script):
    gpu = script("bench_gpu")
    short = gpu.scale_of(Namespace(dry_run=False, short=True))
    assert short.nets.items() < gpu.FULL.nets.items() and gpu.FULL.compiled and not short.compiled
    assert set(short.batches) < set(gpu.FULL.batches) and set(short.processes) < set(gpu.FULL.processes)
    [net] = [net for name, net in gpu.DRY.nets.items() if name == "group norm"]
    names = [set(gpu.ways(net, 4, CPU, compiled)) for compiled in (False, True)]
    assert names[1] - names[0] == {"compile, reduce-overhead"}


def test_the_mix_of_widths_is_their_mean_over_the_largest(script, monkeypatch):
    """With seconds that are the operations, and three times as many in plain PyTorch, all is as large as its share."""
    step = script("bench_step")
    monkeypatch.setattr(step, "WIDTHS", {name: c for name, c in step.WIDTHS.items() if c.model == "mcmahan_cnn"})
    monkeypatch.setattr(step.Case, "seconds", lambda case, train=None: lambda: case.visit()[1] * (3 if train else 1))
    rows = step.widths(1)
    assert list(rows) == [f"mcmahan_cnn, {letter}" for letter in (*step.LETTERS, "mix")]
    for column in ("over its share", "plain PyTorch over its share"):
        assert [row[column] for row in rows.values()] == pytest.approx([1] * 6)
    assert [row["times plain PyTorch's"] for row in rows.values()] == pytest.approx([1 / 3] * 6)
    shares = [row["times a's"] for row in rows.values()]
    assert shares[0] == 1 and shares[-1] == pytest.approx(sum(shares[:-1]) / 5)


def test_the_floor_of_spafl_prunes_and_trains_thresholds_as_spafl_does(script):
    """A threshold of 2 prunes the row of mean magnitude 1, not that of 3. Its gradient is -g out, pruned or not."""
    step = script("bench_step")
    layer = torch.nn.Linear(2, 2, bias=False)
    layer.weight.data = torch.tensor([[1.0, -1.0], [3.0, 3.0]])
    step.add_thresholds(layer)
    layer.tau.data = torch.tensor([2.0, 2.0])
    out = layer(torch.tensor([[5.0, 2.0]]))
    out.backward(torch.tensor([[10.0, 100.0]]))
    assert out.tolist() == [[0, 21]]
    assert layer.weight.grad.tolist() == [[0, 0], [500, 200]]
    assert layer.tau.grad.tolist() == [-30, -2100]


def test_another_checkout_without_rayfl_is_refused(script, monkeypatch, capsys, tmp_path):
    step = script("bench_step")
    monkeypatch.setattr(sys, "argv", ["bench_step.py", "--only", "tiny", "--against", str(tmp_path)])
    monkeypatch.setattr(step, "tiny", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as ended:
        step.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(
        f"--against: {tmp_path} has no rayfl/__init__.py. Allowed: the folder of another checkout\n"
    )


@pytest.mark.slow
def test_the_served_process_must_import_the_rayfl_of_its_folder(script, tmp_path):
    step = script("bench_step")
    with pytest.raises(SystemExit) as ended, step.elsewhere(tmp_path):
        pass
    said = str(ended.value)
    assert said.startswith("--against: the process imports /") and said.endswith(f"which is not below {tmp_path}")


@pytest.mark.slow
def test_a_served_process_that_fails_at_its_start_is_reported(script, tmp_path):
    step = script("bench_step")
    (tmp_path / "rayfl").mkdir()
    (tmp_path / "rayfl/__init__.py").write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit) as ended, step.elsewhere(tmp_path):
        pass
    assert str(ended.value) == (
        f"--against: the process with the rayfl of {tmp_path} ended with status 3. Hint: its error is printed above"
    )


@pytest.mark.slow
def test_a_served_process_that_fails_later_is_reported(script, monkeypatch):
    """It has no row of this name."""
    step, folder = script("bench_step"), Path.cwd()
    monkeypatch.setattr(step, "TINY", {"unknown": None})
    with pytest.raises(SystemExit) as ended, step.elsewhere(folder) as there:
        there["unknown"]()
    assert str(ended.value) == (
        f"--against: the process with the rayfl of {folder} ended with status 1. Hint: its error is printed above"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [["bench_gpu.py", "--dry-run"], ["bench_step.py", "--turns", "1", "--only", "tiny", "--against", str(Path.cwd())]],
    ids=lambda command: command[0],
)
def test_the_commands_print_what_they_found(command):
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / command[0]), *command[1:], "--json"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if command[0] == "bench_gpu.py":
        assert all(row["recorded"] == 0 for row in found["largest differences"])
        assert all(row["1 processes"] > 0 for row in found["clients a second"])
    else:
        assert all(row["times the other's"] > 0 for row in found["tiny"].values())
