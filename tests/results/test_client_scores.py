"""Scores of clients over rounds: tables, their file per evaluation, and their plot."""

import os

import numpy as np
import pytest
from helpers import tiny

import rayfl
from rayfl.config import ConfigError
from rayfl.metrics import client_table
from rayfl.results import clients
from rayfl.results.folder import RunFolder

ALL = {"executor": "serial", "client_scores": "all"}


def experiment(rounds=4, **run):
    return tiny(method="heterofl", rounds=rounds, evaluation={"every": 2, "scores": ["macro_f1"]}, run=ALL | run)


def test_the_table_of_a_run_has_the_metrics_of_its_lines(tmp_path):
    result = rayfl.run(experiment(), tmp_path / "run")
    table = result.clients
    assert list(table) == ["round", "client", "capacity", "samples", "accuracy", "loss", "macro_f1"]
    lines = [line for line in result.lines if "evaluated" in line]
    assert list(table["round"].unique()) == [line["round"] for line in lines] == [2, 4]
    for line in lines:
        some = table[table["round"] == line["round"]]
        for score in ("accuracy", "loss", "macro_f1"):
            assert some[score].mean() == pytest.approx(line[f"local_{score}_mean"])
            weighted = np.average(some[score], weights=some["samples"])
            assert weighted == pytest.approx(line[f"local_{score}_samples"])
            for capacity, of in some.groupby("capacity"):
                assert of[score].mean() == pytest.approx(line[f"local_{score}_{capacity:g}"])
    last = result.folder.client_scores
    assert table[table["round"] == 4][["client", "accuracy"]].values.tolist() == [list(row) for row in last.tolist()]
    assert "clients_over_rounds" in result.plots

    # nothing else is written with the switch off, and only the last scores are known
    off = rayfl.run(experiment(client_scores="last"), tmp_path / "off")
    assert not (tmp_path / "off" / "clients").exists() and "clients_over_rounds" not in off.plots
    assert off.clients.values.tolist() == [[4, *row] for row in last.tolist()]
    assert list(off.clients) == ["round", "client", "accuracy"]


def test_a_run_that_continues_has_the_table_of_one_that_was_never_stopped(tmp_path):
    rayfl.run(experiment(2), tmp_path / "run")
    # left by a process that was killed after its last checkpoint
    clients.write(tmp_path / "run", 3, np.zeros(5, client_table(["accuracy", "loss", "macro_f1"])))
    continued = rayfl.run(experiment(), tmp_path / "run", resume=True)
    assert continued.clients.equals(rayfl.run(experiment(), tmp_path / "straight").clients)


def test_tables_wait_for_a_full_disk(tmp_path, monkeypatch):
    run = rayfl.run(experiment(2), tmp_path / "run").folder
    table = np.ones(3, client_table(run.facts.scores))
    run.resume()
    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        run.save_client_table(4, table)
    assert list(clients.read(run.path, run.facts)) == [2]
    run.finish("finished")
    assert clients.read(run.path, RunFolder.open(run.path).facts)[4].tolist() == table.tolist()


def test_all_scores_of_clients_that_have_none_are_refused():
    with pytest.raises(ConfigError, match="run.client_scores: all needs scores of clients"):
        tiny(evaluation={"clients": False}, run=ALL)


def test_quantiles_by_hand():
    kind = client_table(["accuracy"])

    def table(*values):
        rows = np.zeros(len(values), kind)
        rows["accuracy"] = values
        return rows

    # two seeds are pooled, in the rounds that both have; a client without a score is left out
    one = {5: table(0.0, 0.2), 10: table(0.4, np.nan), 15: table(0.5)}
    other = {5: table(0.6, 0.8), 10: table(0.6, 0.8)}
    plot = clients.over_rounds(
        {"a": [one, other], "b": [{5: table(1.0)}]}, "accuracy", "accuracy %", {"a": {"color": "red"}}
    )
    assert plot is not None
    assert plot.header == ["method", "round", *(f"accuracy q{q}" for q in (0, 10, 25, 50, 75, 90, 100))]
    first, second = plot.rows
    assert first == ["a", 5, *map(pytest.approx, (0.0, 0.06, 0.15, 0.4, 0.65, 0.74, 0.8))]
    assert second == ["a", 10, *map(pytest.approx, (0.4, 0.44, 0.5, 0.6, 0.7, 0.76, 0.8))]
    assert clients.over_rounds({"b": [{5: table(1.0)}]}, "accuracy", "accuracy %", {}) is None
