"""The comparison with other systems: all sides train the same networks, and the bench runs with the bare loop alone."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rayfl.core.net import Net

SCRIPTS = Path.cwd() / "scripts"


@pytest.fixture
def peers(script):
    """scripts/peers, imported."""
    for module in ("on_bare", "on_rayfl", "workloads"):
        script(f"peers.{module}")
    return script("peers")


@pytest.fixture
def bench(peers):
    return importlib.import_module("bench_peers")


@pytest.mark.parametrize("name", ["compute", "overhead", "noop", "tiny", "heterofl"])
def test_peers_train_rayfls_networks_on_rayfls_data(peers, name):
    workload = peers.workloads.WORKLOADS[name]
    experiment = peers.on_rayfl.experiment(workload, 2)
    for width in workload.widths:
        module, net = peers.workloads.build(workload, width), Net(experiment.model, width)
        assert sum(p.numel() for p in module.parameters()) == net.parameters
        assert module(torch.zeros(2, *workload.shape)).shape == (2, peers.workloads.CLASSES)
    data = peers.workloads.Data(workload)
    prepared = experiment.data.prepare.whole({"x": data.x[:5]})["x"]
    assert torch.allclose(prepared, data.of(0)[0][:5])
    sizes = experiment.federate(experiment.data.arrays()).train.sizes
    assert len(sizes) == workload.clients and set(sizes) == {workload.samples} == {len(data.of(1)[1])}


def test_the_loss_is_that_of_the_trained_network_on_prepared_images(peers, monkeypatch):
    workload = peers.workloads.Workload("", clients=2, cohort=2, samples=20, model="digits_cnn", shape=(1, 8, 8))
    serial = peers.on_rayfl.experiment(workload, 1).with_(run={"executor": "serial", "actors": "auto"})
    monkeypatch.setitem(peers.workloads.WORKLOADS, "small", workload)
    monkeypatch.setattr(peers.on_rayfl, "experiment", lambda *_: serial)
    given = []

    class Turns:
        def wait(self, network):
            given.append(network)
            if len(given) == 2:
                given.append(network())
            return len(given) == 1

    peers.on_rayfl.main("small", Turns())
    trained, alike = given[-1], peers.workloads.build(workload)
    for ours, theirs in zip(trained.parameters(), alike.parameters(), strict=True):
        theirs.data.copy_(ours)
    x, _ = peers.workloads.Data(workload).of(0)
    torch.testing.assert_close(trained(x), alike(x))


def test_what_workloads_say_of_themselves_is_so(peers):
    for workload in peers.workloads.WORKLOADS.values():
        count = sum(p.numel() for p in peers.workloads.build(workload).parameters())
        if workload.widths == (1.0,):
            assert f"{workload.cohort:,} of {workload.clients:,} clients" in workload.about
            assert f"{count:,} parameters" in workload.about
        if workload.epochs:
            assert f" x {workload.samples // workload.batch} step" in workload.about


@pytest.mark.slow
def test_the_bare_loop_is_fedavg(peers):
    """One round of two processes is the mean of the clients that trained alone."""
    workload = peers.workloads.Workload("", clients=2, cohort=2, samples=20, model="digits_cnn", shape=(1, 8, 8))
    bare = peers.on_bare.Bare(workload, 2)
    try:
        start = bare.flat.clone()
        bare.round()
    finally:
        bare.crew.close()
    data, ends = peers.workloads.Data(workload), []
    for client in range(2):
        module = peers.workloads.build(workload)
        torch.nn.utils.vector_to_parameters(start.clone(), module.parameters())
        peers.workloads.train(module, *data.of(client), workload)
        ends.append(torch.nn.utils.parameters_to_vector(module.parameters()).detach())
    assert not torch.equal(bare.flat, start)
    # a batch is all that a client has, so its order is nothing but rounding
    torch.testing.assert_close(bare.flat, torch.stack(ends).mean(0), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_bench_runs_turns_and_prints_what_it_found():
    command = [
        sys.executable,
        str(SCRIPTS / "bench_peers.py"),
        "--systems",
        "bare,ray",
        "--workloads",
        "tiny",
        "--turns",
        "1",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["tiny"]["systems"]
    for one in found.values():
        assert len(one["seconds"]) == 1 and one["median"] == one["fastest"] == one["seconds"][0]
        assert 0 < one["first round"] < one["from start"]
        assert 0 < one["loss"] < 2.31 and one["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    # all clients make one step on all that they have
    assert found["ray"]["loss"] == pytest.approx(found["bare"]["loss"], abs=1e-4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--systems", "bare,flowers"], "'flowers' is not valid. Allowed: rayfl,bare,ray,flower,pfl"),
        (
            ["--workloads", "hot"],
            "'hot' is not valid. Allowed: compute,overhead,noop,tiny,narrow,quarter,heterofl,cold",
        ),
        (["--turns", "0"], "'0' is not valid. Allowed: a whole number of at least 1"),
    ],
)
def test_a_wrong_option_says_what_is_allowed(bench, monkeypatch, capsys, given, said):
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", *given])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_a_system_that_ends_is_named_with_its_last_words(bench, tmp_path):
    with bench.Side("bare", sys.executable, "hot", tmp_path) as side:
        with pytest.raises(bench.Failed, match="(?s)bare on hot: ended; last output:.*KeyError: 'hot'"):
            side.start()


def test_an_environment_is_made_once_and_is_not_taken_for_ready_when_uv_failed(bench, monkeypatch, tmp_path):
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    monkeypatch.setenv("PATH", f"{uv.parent}:/usr/bin:/bin")

    def uv_does(last: str) -> None:
        uv.write_text(
            f'#!/bin/sh\necho "$1" >> {tmp_path}/calls\nif [ "$1" = venv ]; then mkdir -p "$5"; else {last}; fi\n'
        )
        uv.chmod(0o755)

    uv_does("echo no such package >&2; exit 1")
    for _ in range(2):
        with pytest.raises(bench.Failed, match="(?s)uv pip install .* exit code 1.*no such package"):
            bench.python_of("pfl", tmp_path / "made")
    uv_does("exit 0")
    made = {bench.python_of("pfl", tmp_path / "made") for _ in range(2)}
    assert [Path(python).parent.name for python in made] == ["bin"]
    assert (tmp_path / "calls").read_text().split() == ["venv", "pip"] * 3
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(bench.Failed, match="uv: not found"):
        bench.python_of("flower", tmp_path / "made")
