"""A run's folder: atomic writing, damaged files, results, and folders of rayfl 0.4."""

import hashlib
import io
import json
import math
import os
import pickle
import re

import numpy as np
import pytest
from disks import becomes_a_pipe, becomes_endless
from rows import FACTS, PERSONAL, folder, line

from rayfl.config import ConfigError
from rayfl.engine.files import with_sum
from rayfl.metrics import CLIENT_SCORES
from rayfl.results.folder import RunFolder, flatten, records, runs
from rayfl.results.made import here
from rayfl.results.summary import Cost, Facts, amounts, summaries, summary

COSTS = {"1": {"parameters": 100, "macs": 1000}, "0.125": {"parameters": 12, "macs": 130}}


@pytest.fixture
def run(tmp_path):
    config = {"seed": 3, "method": {"name": "fedavg"}, "clients": {"capacities": [1.0, 0.5]}}
    return RunFolder.create(tmp_path / "run", "fedavg-largest", config, {"seed": 3}, FACTS, costs=COSTS)


def client_scores(scores):
    return np.array(list(scores.items()), CLIENT_SCORES)


def of_numbers(array):
    """Return the bytes of an npy file with the right sum."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue() + hashlib.sha256(file.getvalue()).digest()


def plain(round, **metrics):
    """A line of a round without an evaluation."""
    return {"round": round, "seconds": 2.0} | metrics


def summed(lines, facts=FACTS, costs=None):
    return summary(lines, Facts(**facts), {capacity: Cost(**cost) for capacity, cost in (costs or {}).items()})


# what is written is read


def test_a_run_is_opened_as_it_was_created(run):
    assert RunFolder.open(run.path) == run.model_copy(update={"counted": None})
    assert run.config["method"] == {"name": "fedavg"}
    assert (run.tags, run.seed) == ({"seed": "3"}, 3)
    assert (run.status, run.result, run.rounds(), len(run.client_scores)) == ("running", {}, [], 0)
    assert json.loads((run.path / "run.json").read_text()) == {
        "version": 3,
        "id": run.id,
        "label": "fedavg-largest",
        "title": "",
        "kind": "run",
        "made": [here().model_dump(mode="json")],
        "inputs": {},
        "changes": [],
        "tags": {"seed": "3"},
        "sweep": None,
        "started": run.started,
        "seconds": 0,
        "status": "running",
        "error": None,
        "costs": COSTS,
        "facts": FACTS,
    }


def test_seconds_count_the_processes_and_not_the_time_between_them(run, monkeypatch):
    start = run.counted

    def at(seconds):
        monkeypatch.setattr("time.monotonic", lambda: start + seconds)

    def counted():
        return round(RunFolder.open(run.path).seconds, 3)

    at(10)
    run.count_time()
    assert counted() == 10
    # killed after 15 seconds
    at(100)
    run = RunFolder.open(run.path)
    run.resume()
    at(130)
    run.finish("stopped")
    assert counted() == 40
    at(200)
    run.finish("failed")
    run.count_time()
    assert counted() == 40


def test_a_folder_contains_one_run(run, tmp_path):
    with pytest.raises(
        ConfigError, match="the folder holds a run. Allowed: a new folder, or --resume to continue the run"
    ):
        RunFolder.create(run.path, "x", {}, {}, FACTS)
    with pytest.raises(ConfigError, match="the folder contains no run. Allowed: a folder with a run.json"):
        RunFolder.open(tmp_path)


def test_lines_are_appended_in_order(run):
    run.append([plain(1), plain(2, train_loss=0.5)])
    run.append([plain(3)])
    assert RunFolder.open(run.path).rounds() == [plain(1), plain(2, train_loss=0.5), plain(3)]


@pytest.mark.parametrize("torn", ['{"round": 3, "sec', "x" * 200_000, "\xe9"])
def test_a_torn_last_line_is_neither_read_nor_glued_to_the_next(run, torn):
    run.append([plain(1), plain(2)])
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(torn.encode("latin-1"))
    again = RunFolder.open(run.path)
    assert again.rounds() == [plain(1), plain(2)]
    again.append([plain(3)])
    assert again.rounds() == [plain(1), plain(2), plain(3)]


def test_a_lone_torn_line_is_cut(run):
    (run.path / "metrics.jsonl").write_text('{"round"')
    run.append([plain(1)])
    assert RunFolder.open(run.path).rounds() == [plain(1)]


def test_a_resumed_file_equals_a_straight_one(run):
    run.append([plain(r) for r in range(1, 6)])
    straight = (run.path / "metrics.jsonl").read_bytes()
    run.truncate_after(3)
    assert run.rounds() == [plain(1), plain(2), plain(3)]
    run.append([plain(4), plain(5)])
    assert (run.path / "metrics.jsonl").read_bytes() == straight


DAMAGES = {
    "missing": (lambda lines: lines[:3] + lines[4:], 3, "line 4: the line is of round 5. Allowed: round 4"),
    "repeated": (lambda lines: [*lines[:4], *lines[3:]], 4, "line 5: the line is of round 4. Allowed: round 5"),
    "swapped": (lambda lines: [lines[1], lines[0], *lines[2:]], 0, "line 1: the line is of round 2. Allowed: round 1"),
    "blank": (lambda lines: [*lines[:3], "", *lines[3:]], 3, "line 4: '' is not JSON"),
    "garbage": (lambda lines: [*lines[:3], "\x00{", *lines[4:]], 3, "line 4: '.x00{' is not JSON"),
    "no round": (
        lambda lines: ["{}", *lines[1:]],
        0,
        "line 1: {} is not valid. Allowed: an object with a whole `round`",
    ),
    "cut": (lambda lines: lines[:3], 3, ""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_resumes_only_after_complete_rounds(run, damage):
    change, whole, said = DAMAGES[damage]
    run.append([plain(r) for r in range(1, 7)])
    file = run.path / "metrics.jsonl"
    damaged = "".join(line + "\n" for line in change(file.read_text().splitlines()))
    file.write_text(damaged)
    found, wrong = run.whole_rounds()
    assert found == whole and re.match(said, wrong.removeprefix(f"{file}: "))
    with pytest.raises(ConfigError, match=f", but the run resumes after round {whole + 1}. Hint: restore a copy"):
        run.truncate_after(whole + 1)
    assert file.read_text() == damaged
    run.truncate_after(whole)
    assert run.rounds() == [plain(r) for r in range(1, whole + 1)]


@pytest.mark.parametrize("taken", [0, 7], ids=["nothing", "a part"])
def test_a_full_disk_keeps_lines_for_later(run, monkeypatch, taken):
    run.append([plain(1)])
    write = os.write
    with monkeypatch.context() as disk:
        disk.setattr(os, "write", lambda fd, data: write(fd, data[:taken]))
        run.append([plain(2)])
        run.append([plain(3)])
    assert run.pending == [plain(2), plain(3)]
    assert run.rounds() == [plain(1), plain(2), plain(3)]
    assert RunFolder.open(run.path).rounds() == [plain(1)]
    run.append([plain(4)])
    assert run.pending == []
    assert RunFolder.open(run.path).rounds() == [plain(1), plain(2), plain(3), plain(4)]


def test_a_replaced_file_is_whole_or_old(run, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        run.finish("finished")
    assert RunFolder.open(run.path).status == "running"
    assert RunFolder.open(run.path).result == {}
    assert sorted(file.name for file in run.path.iterdir()) == ["config.json", "run.json"]


def test_finish_writes_pending_lines_and_the_status(run, monkeypatch):
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "full")))
        run.append([plain(1)])
    run.finish("failed", error="client 7: no data")
    again = RunFolder.open(run.path)
    assert again.rounds() == [plain(1)]
    assert (again.status, again.error, again.result["rounds"]) == ("failed", "client 7: no data", 1)
    again.resume()
    assert (RunFolder.open(run.path).status, RunFolder.open(run.path).error) == ("running", None)


def test_an_extended_run_has_new_rounds_in_its_facts(run):
    run.resume({"rounds": 9}, FACTS | {"rounds": 9})
    again = RunFolder.open(run.path)
    assert (again.config, again.facts.rounds) == ({"rounds": 9}, 9)


def test_record_is_flat_and_plain(run):
    run.append([line(1, accuracy_mean=0.5)])
    run.finish("finished")
    record = run.record()
    assert record["params"] == {"seed": 3, "method.name": "fedavg", "clients.capacities": [1.0, 0.5]}
    assert (record["label"], record["seed"], record["accuracy_mean"]) == ("fedavg-largest", 3, 0.5)
    assert record["facts"] == FACTS
    assert json.loads(json.dumps(record)) == record


def test_client_scores_are_saved(run):
    """To the bit, and in 12 bytes a client."""
    scores = client_scores({0: 0.5, 12: 1.0, 13: math.nan, 2**31 - 1: -0.0})
    run.save_clients(scores)
    assert RunFolder.open(run.path).client_scores.tobytes() == scores.tobytes()
    run.save_clients(client_scores({id: id / 7 for id in range(10**5)}))
    assert (run.path / "clients.npy").stat().st_size < 12 * 10**5 + 300


def test_client_scores_wait_for_a_full_disk(run, monkeypatch):
    old, new = client_scores({0: 0.5}), client_scores({0: 0.75})
    run.save_clients(old)
    with monkeypatch.context() as disk:
        disk.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        run.save_clients(new)
    assert RunFolder.open(run.path).client_scores.tobytes() == old.tobytes()
    run.finish("finished")
    assert RunFolder.open(run.path).client_scores.tobytes() == new.tobytes()


def test_runs_of_a_sweep_are_found_below_it(tmp_path):
    sweep = folder(tmp_path / "sweep", "digits", kind="sweep")
    for name in ("b", "a"):
        folder(sweep.path / name, name, sweep=sweep.id)
    folder(tmp_path / "other", "c")
    assert [run.label for run in runs(tmp_path)] == ["c", "digits", "a", "b"]
    assert [r["label"] for r in records(tmp_path)] == ["c", "a", "b"]
    assert [r["label"] for r in records(tmp_path, sweep.id)] == ["a", "b"]
    assert sweep.result == {} and not (sweep.path / "result.json").exists()


def test_flatten_keeps_lists_and_empty_sections():
    nested = {"a": {"b": {"c": 1}, "d": [1, 2]}, "e": {}, "f": [{"g": 1}, {"g": 2}]}
    assert flatten(nested) == {"a.b.c": 1, "a.d": [1, 2], "e": {}, "f.0.g": 1, "f.1.g": 2}


# what is damaged is said


def without(name):
    return lambda saved: resummed({key: value for key, value in saved.items() if key != name})


def changed(**values):
    return lambda saved: resummed(saved | values)


def resummed(content):
    return with_sum({key: value for key, value in content.items() if key != "sum"}) if "sum" in content else content


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("run.json", b"", r"run.json: '' is not JSON \(Expecting value: line 1 column 1 \(char 0\)\)"),
        ("run.json", b'{"version": 3, "id"', r"is not JSON .*Hint: restore a copy of the file, or remove the run's"),
        ("run.json", b"\xff\xfe{}", "is not JSON"),
        ("run.json", b"[" * 100_000, "is not JSON"),
        ("run.json", b"[]", r"run.json: \[\] is not valid. Allowed: a JSON object"),
        ("run.json", b"null", "None is not valid. Allowed: a JSON object"),
        (
            "run.json",
            changed(version=2),
            "version: 2 is not valid. Allowed: 3. Hint: use the rayfl version that wrote it",
        ),
        ("run.json", without("id"), "id: a value is required"),
        ("run.json", without("facts"), "facts: a value is required"),
        ("run.json", changed(label=7), "label: 7 is not valid. Allowed: text"),
        ("run.json", changed(started="yesterday"), "started: 'yesterday' is not valid. Allowed: a number"),
        (
            "run.json",
            changed(status="done"),
            "status: 'done' is not valid. Allowed: one of running, finished, failed, stop",
        ),
        ("run.json", changed(tags=["seed"]), "tags: .'seed'. is not valid. Allowed: a section"),
        (
            "run.json",
            changed(tags={"seed": "x"}),
            "tags: .* is not valid. Allowed: tags whose `seed` is a whole number",
        ),
        ("run.json", changed(costs={"1": {"macs": 1}}), "costs.1.parameters: a value is required"),
        ("run.json", changed(path="/"), "path: unknown key 'path'"),
        (
            "run.json",
            changed(facts=FACTS | {"capacities": "all"}),
            "facts.capacities: 'all' is not valid. Allowed: a list",
        ),
        (
            "run.json",
            changed(facts=FACTS | {"scores": {"f1": "up"}}),
            "facts.scores.f1: 'up' is not valid. Allowed: one of m",
        ),
        ("config.json", b'{"seed": 3', "is not JSON"),
        ("config.json", b'"seed"', "'seed' is not valid. Allowed: a JSON object"),
        ("config.json", None, "the file does not exist. Hint: restore a copy of it, or remove the run's folder"),
        ("result.json", b'{"rounds": 1, "accur', "is not JSON"),
        ("result.json", b"3", "3 is not valid. Allowed: a JSON object"),
        ("result.json", without("bytes_up"), "bytes_up: a value is required"),
        ("result.json", changed(accuracy_mean="high"), "accuracy_mean: 'high' is not valid. Allowed: a number"),
        ("result.json", changed(rounds=None), "rounds: None is not valid. Allowed: a whole number"),
        (
            "clients.npy",
            b"",
            "the file cannot be read: the SHA-256 differs from the one inside the file. Allowed: an npy",
        ),
        ("clients.npy", pickle.dumps(["a"] * 9), "the SHA-256 differs .*. Hint: restore a copy of the file, or remove"),
        ("result.json", lambda given: {}, "the SHA-256 differs from the one inside the file. Hint: restore a copy"),
        ("clients.npy", of_numbers(np.zeros(3)), "cannot be read: an array of float64, 1 dimensions. Allowed: an npy"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, damage, said):
    run = folder(tmp_path / "run", lines=[line(1, accuracy_mean=0.5)], costs=COSTS)
    run.save_clients(client_scores({0: 0.5}))
    file = run.path / name
    if damage is None:
        file.unlink()
    else:
        made = damage if isinstance(damage, bytes) else json.dumps(damage(json.loads(file.read_text()))).encode()
        file.write_bytes(made)
    with pytest.raises(ConfigError, match=said) as error:
        [row] = records(tmp_path)
        assert row and len(RunFolder.open(run.path).client_scores)
    assert str(error.value).startswith(f"{file}: ")
    assert "Traceback" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "clients.npy"])
def test_every_flipped_bit_is_found(tmp_path, name):
    """Or changes nothing that is read."""
    run = folder(tmp_path / "run", lines=[line(1, accuracy_mean=0.5), line(2)])
    run.save_clients(client_scores({0: 0.5, 1: 0.25}))
    run.finish("finished")
    file = run.path / name

    def found():
        again = RunFolder.open(run.path)
        return again.rounds(), again.result, again.client_scores.tolist()

    before, whole = found(), file.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        try:
            after = found()
        except ConfigError:
            continue
        # the last line without its line break is incomplete
        assert after == before or (name, place) == ("metrics.jsonl", len(whole) - 1)


def test_numpy_reads_the_scores_of_clients(run):
    run.save_clients(client_scores({0: 0.5, 3: 0.25}))
    assert np.load(run.path / "clients.npy").tolist() == [(0, 0.5), (3, 0.25)]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ('{"round": 2}', "line 2: the SHA-256 differs from the one inside the file. Hint: restore a copy of the file"),
        ('{"round": 2, "sec', 'line 2: \'."round": 2, "sec\' is not JSON'),
        ("", "line 2: '' is not JSON"),
        ("[2]", "line 2: .2. is not valid. Allowed: a JSON object"),
        ('{"seconds": 1.0}', "line 2: .'seconds': 1.0. is not valid. Allowed: an object with a whole `round`"),
        ('{"round": "2"}', "line 2: .'round': '2'. is not valid. Allowed: an object with a whole `round`"),
    ],
)
def test_a_damaged_line_is_named_by_its_number(run, damage, said):
    run.append([plain(1), plain(3)])
    file = run.path / "metrics.jsonl"
    first, last = file.read_text().splitlines()
    file.write_text(f"{first}\n{damage}\n{last}\n")
    with pytest.raises(ConfigError, match=said) as error:
        RunFolder.open(run.path).rounds()
    assert str(error.value).startswith(f"{file}: line 2: ")


def test_a_file_that_cannot_be_read_is_named(run):
    (run.path / "result.json").mkdir()
    with pytest.raises(ConfigError, match="result.json: the file cannot be read: Is a directory"):
        run.record()


@pytest.mark.parametrize("becomes", [becomes_a_pipe, becomes_endless])
@pytest.mark.parametrize("name", ["run.json", "config.json", "result.json", "metrics.jsonl"])
def test_pipes_and_devices_are_not_read(tmp_path, name, becomes):
    file = folder(tmp_path, lines=[line(1, accuracy_mean=0.5)]).path / name
    becomes(file)
    with pytest.raises(ConfigError) as error:
        run = RunFolder.open(tmp_path)
        assert run.record() and run.rounds()
    assert str(error.value) == f"{file}: the file cannot be read: neither a file nor a link to one"


# the summary


def test_summary_by_hand():
    accuracies = {2: 0.1, 4: 0.9, 6: 0.2, 8: 0.3, 10: 0.9, 12: 0.4}
    lines = [plain(r, bytes_down=10, bytes_up=5, train_flops=100) for r in range(1, 14)]
    for round, accuracy in accuracies.items():
        lines[round - 1] |= {
            "evaluated": True,
            "accuracy_mean": accuracy,
            "accuracy_worst": accuracy / 2,
            "accuracy_0.125": accuracy / 2,
            "accuracy_exit1": 0.25,
            "local_accuracy_mean": 1.0 - accuracy,
            "validation_loss_mean": 2.0,
            "coverage_min": 3,
        }
    result = summed(lines, costs=COSTS)
    last5 = result.pop("last5_accuracy_mean")
    assert last5 == pytest.approx((0.9 + 0.2 + 0.3 + 0.9 + 0.4) / 5)
    assert result.pop("last5_local_accuracy_mean") == pytest.approx(1 - last5)
    assert result == {
        "rounds": 13,
        "accuracy_mean": 0.4,
        "accuracy_worst": 0.2,
        "accuracy_0.125": 0.2,
        "accuracy_exit1": 0.25,
        "local_accuracy_mean": 0.6,
        "validation_loss_mean": 2.0,
        "best_local_accuracy_mean": 0.9,
        "best_accuracy_mean": 0.9,
        "best_round": 4,
        "parameters_1": 100,
        "macs_1": 1000,
        "parameters_0.125": 12,
        "macs_0.125": 130,
        "bytes_down": 130,
        "bytes_up": 65,
        "bytes_public": 0,
        "train_flops": 1300,
        "server_flops": 0,
        "seconds": 26.0,
    }


def test_a_result_has_the_epsilon_of_the_last_evaluation():
    lines = [line(1, accuracy_mean=0.5, epsilon=2.0), line(2, accuracy_mean=0.5, epsilon=3.0), plain(3)]
    assert summed(lines)["epsilon"] == 3.0


@pytest.mark.parametrize(("better", "time"), [("min", 20.0), ("max", 10.0)])
def test_the_time_to_a_score(better, time):
    facts = FACTS | {"targets": [0.5], "judge": "loss_mean", "scores": {"loss": better}}
    lines = [line(r, loss_mean=loss, sim_time=10.0 * r) for r, loss in ((1, 0.75), (2, 0.5), (3, 0.25))]
    assert summed(lines, facts)["time_to_0.5"] == time


def test_summary_of_nothing():
    assert summed([]) == {
        "rounds": 0,
        "bytes_down": 0,
        "bytes_up": 0,
        "bytes_public": 0,
        "train_flops": 0,
        "server_flops": 0,
        "seconds": 0,
    }


def test_the_best_round_is_by_the_judge_metric():
    lines = [
        line(1, accuracy_mean=0.5, local_accuracy_mean=0.25),
        line(2, accuracy_mean=0.25, local_accuracy_mean=0.75),
    ]
    assert (summed(lines)["best_round"], summed(lines, PERSONAL)["best_round"]) == (1, 2)
    assert "best_round" not in summed([line(1, local_accuracy_mean=0.5)])


def test_own_scores_are_summarised_by_their_better_direction():
    facts = FACTS | {"scores": {"perplexity": "min", "f1": "max"}, "judge": "perplexity_mean"}
    lines = [line(r, perplexity_mean=p, f1_mean=f) for r, p, f in ((1, 9.0, 0.5), (2, 5.0, 0.75), (3, 7.0, 0.25))]
    result = summed([*lines, line(4, perplexity_mean=float("nan"), f1_mean=0.125)], facts)
    assert (result["best_perplexity_mean"], result["best_f1_mean"], result["best_round"]) == (5.0, 0.75, 2)
    assert result["last5_f1_mean"] == 1.625 / 4 and result["f1_mean"] == 0.125
    expected = ["best_perplexity_mean", "last5_perplexity_mean", "gbit", "client_macs", "kbit_up_per_point"]
    assert summaries(["perplexity_mean", "perplexity_0.5"], facts["scores"]) == expected


def test_the_better_direction_of_a_metric():
    facts = Facts(**FACTS)
    small = ["loss_mean", "validation_loss_0.125", "local_loss_samples", "best_loss_mean", "train_loss", "seconds"]
    small += ["time_to_0.8", "macs_0.5", "parameters_1", "loss_exit1", "validation_loss_exit12"]
    large = ["accuracy_1", "local_accuracy_worst", "last5_accuracy_mean", "local_density_at_best", "accuracy_exit1"]
    assert [facts.better(metric) for metric in small + large] == ["min"] * 11 + ["max"] * 5
    assert facts.about("validation_accuracy_mean") == ("accuracy", "validation")
    assert facts.about("accuracy_0.5") is None
    assert facts.about("local_accuracy_samples_at_best_server") == ("accuracy", "clients")


def test_the_local_score_in_the_best_round_of_the_server():
    lines = [line(r, accuracy_server=a, local_accuracy_samples=b) for r, a, b in ((1, 0.25, 1.0), (2, 0.75, 0.5))]
    assert summed(lines)["local_accuracy_samples_at_best_server"] == 0.5
    assert "local_accuracy_samples_at_best_server" not in summed([line(1, local_accuracy_samples=1.0)])


def test_densities_of_a_run():
    """Densities of clients' masked networks: of the best round, and of the last rounds."""
    lines = [line(r, local_accuracy_mean=a, local_density=d) for r, a, d in ((1, 0.5, 0.75), (2, 0.875, 0.5))]
    lines.append(line(3, local_accuracy_mean=0.625, local_density=0.25, local_density_conv=0.25, density_1=0.375))
    result = summed(lines, PERSONAL)
    assert (result["local_density_at_best"], result["local_density"], result["density_1"]) == (0.5, 0.25, 0.375)
    assert "local_density_conv" not in result
    assert not [key for key in summed([line(1, accuracy_mean=0.5)]) if "density" in key or "macs" in key]


def test_masked_networks_cost_their_remaining_part(tmp_path):
    """result.json says what the last evaluation found, run.json what was built: one truth each."""
    shares = {"density_0.125": 0.75, "macs_share_0.125": 0.7, "density_1": 1.0, "macs_share_1": 1.0}
    before = {name: 1.0 for name in shares}
    run = folder(tmp_path, lines=[line(1, **before), line(2, **shares), plain(3)], costs=COSTS)
    assert {key: run.result[key] for key in ("parameters_1", "macs_1", "parameters_0.125", "macs_0.125")} == {
        "parameters_1": 100,
        "macs_1": 1000,
        "parameters_0.125": 9,
        "macs_0.125": 91,
    }
    assert json.loads((tmp_path / "run.json").read_text())["costs"] == COSTS


def test_amounts_are_spafl_s():
    """LeNet-5-Caffe in its table 1: 580 thresholds, 5000 client-rounds; FedAvg's FLOPs are 5 epochs of 600 samples
    in 50 rounds of every client, 2,293,000 multiply-adds forward, twice that backward."""
    sent = 5000 * 580 * 4
    row = {"rounds": 500, "facts": FACTS | {"clients": 100}, "bytes_down": sent, "bytes_up": sent}
    row["train_flops"] = 3 * 2 * 2_293_000 * 5 * 600 * 5000
    assert amounts(row) == {"gbit": pytest.approx(0.1856), "client_macs": pytest.approx(10.3185e11)}
    assert amounts(row | {"rounds": 0}) == {}
    # late and lost updates have costs too
    wasted = row | {"wasted_bytes": 2 * sent, "wasted_flops": row["train_flops"]}
    assert amounts(wasted) == {"gbit": pytest.approx(2 * 0.1856), "client_macs": pytest.approx(2 * 10.3185e11)}
    # 8 bits per byte, at 80 %
    found = amounts(row | {FACTS["judge"]: 0.8})["kbit_up_per_point"]
    assert found == pytest.approx(8 * sent / 1000 / 80)
    perplexity = FACTS | {"scores": {"perplexity": "min"}, "judge": "perplexity_mean", "clients": 100}
    assert "kbit_up_per_point" not in amounts(row | {"facts": perplexity, "perplexity_mean": 5.0})


def test_a_folder_of_rayfl_0_4_is_refused(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"id": "x", "label": "fedavg", "started": 1.0}))
    with pytest.raises(ConfigError) as error:
        RunFolder.open(tmp_path)
    assert str(error.value) == (
        f"{tmp_path / 'run.json'}: version: None is not valid. Allowed: 3. Hint: use the rayfl version that wrote it"
    )
