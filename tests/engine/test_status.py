"""Several raylets of one machine: what a cluster says of itself, where actors are, and who does not see a folder."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
import ray
import yaml
from helpers import TINY, simulate, tiny
from processes import PATIENCE, until
from ray.util.metrics import Metric

from rayfl.config import ConfigError
from rayfl.engine.devices import ONLY_DECLARED
from rayfl.engine.locks import locked
from rayfl.engine.on_ray import status
from rayfl.engine.on_ray.actors import Place
from rayfl.engine.on_ray.cluster import cluster, running
from rayfl.engine.on_ray.shared import require_seen, require_shared
from rayfl.engine.on_ray.status import About, Node, RunStatus
from rayfl.metrics import EVALUATED
from rayfl.results.folder import RunFolder
from rayfl.results.status import nodes_table, runs_table, trials

RUN = RunStatus(About("fedrolex (lr=0.1, seed 0)", "/runs/small", 3), 4, 10, 2.5, [Place("a", ("0",))] * 2, 0.5, 1, 1)


def shown(table) -> list[list[str]]:
    return [[str(cell) for cell in column.cells] for column in table.columns]


def test_the_time_that_is_left_is_that_of_the_last_rounds():
    assert RUN.left == 15.0


def test_no_gauge_ends_a_run(monkeypatch):
    shown = {}
    monkeypatch.setattr(Metric, "_record", lambda gauge, value, tags: shown.update({gauge.info["name"]: (value, tags)}))
    gauges, run = status.Gauges(), replace(RUN, about=About("größe", "/läufe"))
    gauges.show(run)
    # Ray's tags are ASCII
    assert shown["rayfl_round"] == (4, {"study": r"/l\xe4ufe", "run": r"gr\xf6\xdfe"})
    monkeypatch.undo()
    gauges.show(run)
    gauges.show(replace(run, about=About("\0", "")))
    gauges.gauges["round"]._metric.record(1.0, tags=shown["rayfl_round"][1])
    monkeypatch.setattr(Metric, "_record", lambda *_: 1 / 0)
    gauges.show(run)


def test_tables_of_a_cluster():
    nodes = [
        Node("h", "10.0.0.1", True, 8, 0, 1, 0),
        Node("a", "10.0.0.2", True, 4, 2, 2, 1),
        Node("b", "10.0.0.3", False, 4, 2, 0, 0),
    ]
    assert shown(nodes_table(nodes, [RUN])) == [
        ["10.0.0.1", "10.0.0.2", "10.0.0.3"],
        ["1 of 8", "2 of 4", ""],
        ["0 of 0", "1 of 2", ""],
        ["0", "2 on GPU 0", "dead"],
    ]
    assert [row[0] for row in shown(runs_table([RUN]))] == [
        "fedrolex (lr=0.1, seed 0)",
        "small",
        "4/10",
        "0:15",
        "2 x 0.5 GPU, 1 starting",
        "1",
    ]


def test_trials_are_counted_in_the_sweeps_folder(tmp_path):
    spec, run = tiny(), RunStatus(About("heterofl", str(tmp_path), 4), 0, 10, None, [], 0, 1, 0)
    for name, ended in (("a", "finished"), ("b", "failed"), ("c", None)):
        record = RunFolder.create(tmp_path / name, "heterofl", spec.plain(), {}, spec.facts(), costs=spec.costs())
        if ended:
            record.finish(ended)
    assert trials([run]) == {str(tmp_path): {"finished": 1, "failed": 1, "running": 1, "to come": 1}}
    wider = replace(run, about=replace(run.about, trials=2))
    assert trials([wider]) == {str(tmp_path): {"finished": 1, "failed": 1, "running": 1}}
    elsewhere = RunStatus(About("heterofl", "/not/here", 4), 0, 10, None, [], 0, 1, 0)
    assert trials([elsewhere]) == {"/not/here": {"running": 1, "to come": 3}}


@pytest.fixture
def raylets(monkeypatch):
    """A head without CPUs for clients, and two nodes that say they have a GPU each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv(ONLY_DECLARED, "1")
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=2, num_gpus=1)
        nodes.wait_for_nodes(PATIENCE)
        yield nodes
    finally:
        nodes.shutdown()


def exported() -> str:
    """Return the metrics that Prometheus gets from all nodes."""
    places = [(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in ray.nodes() if node["Alive"]]
    return "".join(urlopen(f"http://{host}:{port}/metrics").read().decode() for host, port in places)


@pytest.mark.ray
@pytest.mark.slow
def test_actors_spread_over_nodes_and_gpus_as_asked_and_the_cluster_says_where(raylets, tmp_path):
    """Four actors of half a GPU on two nodes of one; the bits are the serial ones."""
    spec = tiny(rounds=3, run={"executor": "ray", "actors": 4, "cpus": 0.5, "gpus": 0.5, "chunk": 1})
    with cluster(raylets.address):
        head, *others = status.nodes()
        assert (head.gpus, [node.gpus for node in others]) == (0, [1, 1]) and status.running() == []
        with running(spec, spec.data.arrays(), tmp_path / "ray", raylets.address) as simulation:
            lines = []
            while step := simulation.step():
                lines += step
            until(lambda: len(status.running()[0].places) == 4)
            [found] = status.running()
            until(lambda: "ray_rayfl_round{" in exported() and f'study="{tmp_path / "ray"}"' in exported())
            said = subprocess.run(
                [Path(sys.executable).with_name("rayfl"), "status", "--json", "--address", raylets.address],
                capture_output=True,
                text=True,
            )
        assert status.running() == []
    assert Counter((place.node, place.gpus) for place in found.places) == {(node.id, ("0",)): 2 for node in others}
    assert (found.round, found.rounds, found.gpus, found.deaths) == (3, 3, 0.5, 0)
    assert said.returncode == 0, said.stderr
    printed = json.loads(said.stdout)
    assert [run["places"] for run in printed["runs"]] == [
        [{"node": p.node, "gpus": list(p.gpus), "log": p.log, "process": p.process} for p in found.places]
    ]
    assert printed["trials"] == {str(tmp_path / "ray"): {"running": 1}}
    assert [node["gpus_taken"] for node in printed["nodes"]] == [0, 1, 1]
    serial = simulate(spec, tmp_path / "serial")
    while not serial.done:
        serial.step()
    accuracies = [line["accuracy_mean"] for line in lines if EVALUATED in line]
    assert accuracies and accuracies[-1] == serial.evaluate()["accuracy_mean"]


@pytest.mark.ray
@pytest.mark.slow
def test_nodes_that_do_not_see_the_output_are_named_before_the_first_trial(raylets, tmp_path, start):
    """One more raylet has a disk of its own in that place: a mount that nobody else sees."""
    output = tmp_path / "runs"
    output.mkdir()
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("this user may not make mounts of its own")
    with cluster(raylets.address), locked(output / "fine"):
        require_shared(output / "fine")
    ray_start = f"{Path(sys.executable).with_name('ray')} start --address {raylets.address} --num-cpus 2 --block"
    blind = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"mount -t tmpfs none {output} && exec {ray_start}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with cluster(raylets.address):
            until(lambda: sum(node["Alive"] for node in ray.nodes()) == 4)
        config = tmp_path / "small.yaml"
        config.write_text(
            yaml.safe_dump({"experiment": TINY | {"run": {"chunk": 1}}, "rows": {"heterofl": {"method": "heterofl"}}})
        )
        sweep = start(
            config, "--output", output, "--address", raylets.address, program=(sys.executable, "scripts/sweep.py")
        )
        code, printed = sweep.finish()
    finally:
        blind.terminate()
        blind.wait()
    assert code == 2
    assert f"--output: {output / 'small'} is not shared with these nodes: " in printed
    assert not (output / "small").exists()


@pytest.mark.ray
def test_a_node_that_joined_later_says_it_itself(ray_cluster, tmp_path):
    with locked(tmp_path / "runs"):
        require_shared(tmp_path / "runs")
        (tmp_path / "runs" / "run.json").touch()
    require_seen(tmp_path / "runs" / "run.json")
    with pytest.raises(ConfigError, match="elsewhere .* --storage s3://BUCKET/FOLDER for the files of trials"):
        require_seen(tmp_path / "elsewhere" / "run.json")


@pytest.mark.slow
@pytest.mark.ray
def test_without_a_cluster_there_is_nothing_to_ask(start, tmp_path):
    code, printed = start("status", "--address", "127.0.0.1:1").finish()
    assert (code, printed.startswith("error: --address 127.0.0.1:1: no Ray head answers at this address")) == (2, True)
    assert os.listdir(tmp_path) == []
