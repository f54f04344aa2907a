"""Checkpoints survive crashes and damage, and refuse another configuration."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from disks import becomes_a_pipe, becomes_endless, flip_a_bit, moves, small_files, truncate
from helpers import assert_same, run, simulate, tiny

from rayfl.config import ConfigError
from rayfl.engine.checkpoints import (
    Best,
    DamagedCheckpoint,
    complete,
    forget_after,
    latest,
    read,
    remove_damaged_best,
    require_whole_best,
    write,
)
from rayfl.engine.client_states import ClientStates
from rayfl.engine.files import NotWritten, checksum, with_sum

CONFIG = {"training": {"lr": 0.1, "milestones": [1, 2]}, "seed": 0}
STATE = {
    "params": {"b": torch.randn(3, 4), "a": torch.tensor([0.1, float("nan"), -0.0])},
    "extra": {"deep": {"count": torch.tensor(3)}, "half": torch.ones(2, dtype=torch.float16)},
}


def state(value: float) -> dict:
    return {"params": {"w": torch.full((4,), value)}}


def names(folder: Path) -> list[str]:
    return [path.name for path in complete(folder)]


def test_round_trip(tmp_path):
    path = write(tmp_path, 12, CONFIG, STATE)
    assert path == tmp_path / "round-000012"
    found = read(path)
    assert (found.round, found.config, found.client_states.files) == (12, CONFIG, {})
    assert checksum(found.state) == checksum(STATE)
    assert list(found.state) == ["params", "extra"] and list(found.state["params"]) == ["b", "a"]
    assert found.state["extra"]["half"].dtype == torch.float16


def test_empty_groups_and_shared_tensors_come_back(tmp_path):
    shared = torch.arange(4.0)
    given = {"params": {"w": shared}, "memory": {}, "anchor": {"w": shared, "deep": {}}}
    found = read(write(tmp_path, 1, CONFIG, given)).state
    assert list(found) == ["params", "memory", "anchor"] and found["memory"] == {} == found["anchor"]["deep"]
    assert torch.equal(found["anchor"]["w"], shared) and torch.equal(found["params"]["w"], shared)


def test_keys_that_json_makes_text_of(tmp_path):
    path = write(tmp_path, 1, {"at": {2: "a", 10: "b"}}, STATE)
    assert read(path).config == {"at": {"2": "a", "10": "b"}}


def test_there_is_none(tmp_path):
    assert latest(tmp_path / "nowhere", CONFIG, print) is None
    assert complete(tmp_path / "nowhere") == []


def test_the_newest_two_are_kept(tmp_path):
    for round in (9, 10, 100):
        write(tmp_path, round, CONFIG, state(round))
    assert names(tmp_path) == ["round-000010", "round-000100"]
    found = latest(tmp_path, CONFIG, print)
    assert found.round == 100
    assert_same(found.state, state(100))


@pytest.mark.parametrize(
    ("round", "partial_round", "value", "kept"),
    [(3, {}, 0.7, 3), (3, {}, 0.5, 2), (4, {}, 0.7, 2), (3, {"seconds": 1.0}, 0.7, 2)],
    ids=["better", "equal", "another round", "in the middle of the next"],
)
def test_the_newest_is_kept_after_a_stop_if_it_is_of_the_best_round(tmp_path, round, partial_round, value, kept):
    best = Best(tmp_path, "accuracy", "max")
    write(tmp_path, 2, CONFIG, STATE)
    best.keep({"round": 2, "accuracy": 0.5})
    write(tmp_path, round, CONFIG, STATE, partial_round=partial_round)
    best.resume({"round": 3, "accuracy": value})
    assert names(tmp_path / "best") == [f"round-{kept:06d}"]


def test_rounds_count_as_numbers_do_and_other_names_are_no_checkpoints(tmp_path):
    for round in (999_999, 1_000_000):
        write(tmp_path, round, CONFIG, state(round))
    (tmp_path / "round-old").mkdir()
    assert names(tmp_path) == ["round-999999", "round-1000000"]
    assert latest(tmp_path, CONFIG, pytest.fail).round == 1_000_000


def test_later_rounds_are_forgotten_if_an_earlier_one_is_whole(tmp_path):
    for round in (3, 6):
        write(tmp_path, round, CONFIG, state(round))
    assert not forget_after(tmp_path, 6, "why")
    with pytest.raises(
        ConfigError, match="^why; .* has no valid checkpoint of an earlier round. Hint: restore the file"
    ):
        forget_after(tmp_path, 2, "why")
    assert names(tmp_path) == ["round-000003", "round-000006"]
    assert forget_after(tmp_path, 5, "why")
    assert names(tmp_path) == ["round-000003"]
    write(tmp_path, 6, CONFIG, state(6))
    flip_a_bit(tmp_path / "round-000003" / "state.safetensors")
    with pytest.raises(ConfigError, match="no valid checkpoint"):
        forget_after(tmp_path, 5, "why")


def test_a_crash_while_writing_leaves_the_old_one(tmp_path, monkeypatch):
    write(tmp_path, 1, CONFIG, state(1))

    def crash(*args, **kwargs):
        raise OSError("no space left on device")

    for place in ("pathlib.Path.rename", "pathlib.Path.write_text", "rayfl.engine.files.save_file"):
        with monkeypatch.context() as patch:
            patch.setattr(place, crash)
            with pytest.raises(NotWritten) as error:
                write(tmp_path, 2, CONFIG, state(2))
        assert str(error.value) == (
            f"{tmp_path}/round-000002: the checkpoint of round 2 cannot be written: no space left on device. "
            "Hint: --resume once the disk works"
        )
        assert os.listdir(tmp_path) == ["round-000001"]
        assert latest(tmp_path, CONFIG, pytest.fail).round == 1
    write(tmp_path, 2, CONFIG, state(2))
    assert sorted(os.listdir(tmp_path)) == ["round-000001", "round-000002"]


@pytest.mark.parametrize("round", [2, 3])
def test_a_kill_while_one_is_removed_leaves_no_half_of_it(round, tmp_path, monkeypatch):
    """Round 2 replaces a checkpoint; after round 3 the oldest goes."""
    for earlier in (1, 2):
        write(tmp_path, earlier, CONFIG, state(earlier))

    def killed(path, **_):
        (path / "manifest.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, round, CONFIG, state(round + 10))
    assert [read(path).round for path in complete(tmp_path)] == ([1, 2] if round == 2 else [2, 3])
    assert_same(latest(tmp_path, CONFIG, pytest.fail).state, state(round + 10))
    monkeypatch.undo()
    write(tmp_path, 4, CONFIG, state(4))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_what_a_killed_process_left_half_written_goes(tmp_path):
    (tmp_path / ".partial-round-000002").mkdir()
    (tmp_path / ".partial-round-000002" / "state.safetensors").write_text("half")
    write(tmp_path, 3, CONFIG, state(3))
    assert os.listdir(tmp_path) == ["round-000003"]


def test_checkpoints_of_rounds_that_are_made_again_go(tmp_path):
    """A run that went back before a damaged one has another future."""
    for round in (2, 4, 6):
        write(tmp_path, round, CONFIG, state(round))
    flip_a_bit(tmp_path / "round-000006" / "state.safetensors")
    assert latest(tmp_path, CONFIG, lambda said: None).round == 4
    write(tmp_path, 5, CONFIG, state(5))
    assert names(tmp_path) == ["round-000004", "round-000005"]


def test_files_have_the_permissions_of_new_files(tmp_path):
    """safetensors and tempfile create files that only their owner can read."""
    before = os.umask(0o026)
    try:
        client_states = ClientStates(tmp_path / "client_states")
        client_states.put(3, 0, {"w": torch.ones(2)})
        write(tmp_path / "checkpoints", 1, CONFIG, state(1), client_states)
    finally:
        os.umask(before)
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.rglob("*") if file.is_file()}
    assert modes == dict.fromkeys(("3-0.safetensors", "state.safetensors", "kept.npy", "manifest.json"), "0o640")


def test_a_round_that_was_written_before_is_replaced(tmp_path):
    write(tmp_path, 1, CONFIG, state(1))
    write(tmp_path, 1, CONFIG, state(2))
    assert_same(latest(tmp_path, CONFIG, pytest.fail).state, state(2))


def kept(path: Path) -> Path:
    """The state of client 3 of round 1 only."""
    return path.parent / "kept" / "3-1.safetensors"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: flip_a_bit(path / "state.safetensors"), "{path}/state.safetensors: the SHA-256 differs"),
        (lambda path: truncate(path / "state.safetensors"), "{path}/state.safetensors: the SHA-256 differs"),
        (lambda path: (path / "state.safetensors").unlink(), "{path}: the checkpoint is incomplete or damaged: "),
        (lambda path: (path / "manifest.json").unlink(), "{path}: the checkpoint is incomplete or damaged: "),
        (lambda path: truncate(path / "manifest.json"), "{path}: the checkpoint is incomplete or damaged: "),
        (lambda path: (path / "manifest.json").write_text("[]"), "{path}: the checkpoint is incomplete or damaged: "),
        (lambda path: (path / "manifest.json").write_text("{}"), "{path}/manifest.json: the SHA-256 differs"),
        (
            lambda path: (path / "manifest.json").write_text("[" * 100_000),
            "{path}: the checkpoint is incomplete or damaged: maximum recursion depth exceeded",
        ),
        (lambda path: flip_a_bit(path / "kept.npy"), "{path}/kept.npy: the SHA-256 differs from the manifest's"),
        (
            lambda path: flip_a_bit(kept(path)),
            "{path.parent}/kept/3-1.safetensors: the SHA-256 differs from the one in {path}",
        ),
        (lambda path: kept(path).unlink(), "{path}: the checkpoint is incomplete or damaged: .*3-1.safetensors"),
        (
            lambda path: becomes_a_pipe(path / "state.safetensors"),
            "{path}: the checkpoint is incomplete or damaged: .* neither a file",
        ),
        (
            lambda path: becomes_a_pipe(path / "manifest.json"),
            "{path}: the checkpoint is incomplete or damaged: .* neither a file",
        ),
        (lambda path: becomes_endless(kept(path)), "{path}: the checkpoint is incomplete or damaged: .* neither a f"),
    ],
    ids=[
        *(
            "bit",
            "truncated",
            "no state",
            "no manifest",
            "cut manifest",
            "list",
            "empty",
            "brackets",
            "names",
            "carry",
            "no carry",
        ),
        *("pipe", "manifest is a pipe", "endless"),
    ],
)
def test_a_damaged_one_is_passed_over_and_said(damage, said, tmp_path):
    client_states = ClientStates(tmp_path / "client_states")
    for round in (1, 2):
        client_states.put(3, round - 1, {"w": torch.ones(2)})
        newest = write(tmp_path, round, CONFIG, state(round), client_states)
    damage(newest)
    heard = []
    found = latest(tmp_path, CONFIG, heard.append)
    assert found.round == 1
    assert_same(found.state, state(1))
    [line] = heard
    assert re.match(said.format(path=newest), line)
    assert line.endswith(". Using the checkpoint before it")


@pytest.mark.parametrize("content", ["x", None], ids=["file", "broken link"])
def test_a_file_in_place_of_the_folder_is_refused(tmp_path, content):
    folder = tmp_path / "checkpoints"
    folder.symlink_to(tmp_path / "nowhere") if content is None else folder.write_text(content)
    for use in (complete, lambda folder: latest(folder, CONFIG, pytest.fail)):
        with pytest.raises(ConfigError) as error:
            use(folder)
        assert str(error.value) == f"{folder}: this is not a folder. Allowed: a folder. Hint: restore a copy of it"


def test_who_wants_the_state_alone_reads_nothing_that_clients_keep(tmp_path):
    """A report, of a run in which thousands of clients keep a network each."""
    client_states = ClientStates(tmp_path / "client_states")
    client_states.put(3, 1, {"w": torch.ones(2)})
    newest = write(tmp_path, 1, CONFIG, state(1), client_states)
    assert list(read(newest).client_states.files) == [3]
    flip_a_bit(kept(newest))
    found = latest(tmp_path, CONFIG, pytest.fail, client_states=False)
    assert_same(found.state, state(1))
    assert found.client_states.files == {}
    # but what is read is verified
    flip_a_bit(newest / "state.safetensors")
    with pytest.raises(DamagedCheckpoint):
        latest(tmp_path, CONFIG, print, client_states=False)


def test_checkpoints_that_a_user_moved_are_read_and_their_links_removed(tmp_path):
    """But not what the links name."""
    (tmp_path / "elsewhere").mkdir()
    for round in (1, 2):
        moves(write(tmp_path, round, CONFIG, state(round)), tmp_path / "elsewhere" / f"round-{round:06d}")
    moves(tmp_path / "round-000002" / "state.safetensors", tmp_path / "elsewhere" / "state")
    assert latest(tmp_path, CONFIG, pytest.fail).round == 2
    (tmp_path / ".partial-round-000003").symlink_to(tmp_path / "elsewhere")
    write(tmp_path, 2, CONFIG, state(2))
    write(tmp_path, 3, CONFIG, state(3))
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "round-000002", "round-000003"]
    assert not any(path.is_symlink() for path in complete(tmp_path))
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["round-000001", "round-000002", "state"]
    assert len(os.listdir(tmp_path / "elsewhere" / "round-000001")) == 2


def test_if_none_is_whole_the_run_does_not_start_anew_by_itself(tmp_path):
    for round in (1, 2):
        flip_a_bit(write(tmp_path, round, CONFIG, state(round)) / "state.safetensors")
    with pytest.raises(DamagedCheckpoint) as error:
        latest(tmp_path, CONFIG, pytest.fail)
    assert str(error.value) == (
        f"{tmp_path}: all 2 checkpoints are damaged. Hint: start again:\n"
        f"  {tmp_path}/round-000002/state.safetensors: the SHA-256 differs from the manifest's\n"
        f"  {tmp_path}/round-000001/state.safetensors: the SHA-256 differs from the manifest's"
    )


def test_another_version_is_refused(tmp_path):
    path = write(tmp_path, 1, CONFIG, state(1))
    rewrite(path / "manifest.json", {"version": 2})
    with pytest.raises(ConfigError) as error:
        latest(tmp_path, CONFIG, pytest.fail)
    assert not isinstance(error.value, DamagedCheckpoint)
    assert str(error.value) == (
        f"{path}: the checkpoint has version 2. Allowed: version 3. Hint: resume with the rayfl that wrote it, or "
        "start again in another folder"
    )


def rewrite(file: Path, changes: dict):
    """Write another content with the right sum."""
    given = json.loads(file.read_text()) | changes
    given.pop("sum")
    file.write_text(json.dumps(with_sum({key: value for key, value in given.items() if value is not ...})))


WRONG = (None, True, -1, 0.5, 10**30, "", "x", [], [1], {}, {"x": {}}, ...)
"""Values that are wrong in some place of a manifest; `...`: none."""


@pytest.mark.parametrize("key", ["round", "config", "sha256", "begun", "schedule", "version", "more"])
def test_a_manifest_of_right_sum_and_wrong_content_is_passed_over(key, tmp_path):
    """Or refused as a checkpoint of another version or configuration, or it says nothing that is wrong."""
    write(tmp_path, 1, CONFIG, state(1))
    file = write(tmp_path, 2, CONFIG, state(2)) / "manifest.json"
    whole = file.read_bytes()
    for wrong in WRONG:
        file.write_bytes(whole)
        rewrite(file, {key: wrong})
        heard = []
        try:
            found = latest(tmp_path, CONFIG, heard.append)
        except ConfigError as error:
            assert key in ("version", "config") and not isinstance(error, DamagedCheckpoint)
            continue
        assert (found.round == 1) == bool(heard)
        if not heard:
            assert (key, wrong) in (
                ("begun", {}), ("begun", ...), ("schedule", {}), ("schedule", {"x": {}}), ("schedule", ...)
            ) or key == "more" and wrong is ...  # fmt: skip


def test_every_bit_of_a_manifest_is_under_its_sum(tmp_path):
    """A flipped one is found, or changes nothing that the manifest says."""
    client_states = ClientStates(tmp_path / "client_states")
    client_states.put(3, 0, {"w": torch.ones(2)})
    file = write(tmp_path, 1, CONFIG, state(1), client_states) / "manifest.json"
    said, whole, unfound = json.loads(file.read_text()), file.read_bytes(), 0
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            read(file.parent)
        except DamagedCheckpoint:
            continue
        assert json.loads(file.read_text()) == said
        unfound += 1
    assert unfound < len(whole) / 2  # blanks and line ends


@pytest.mark.parametrize(
    "changes",
    [{"round": 1}, {"sha256": {}}, {"config": CONFIG | {"seed": 1}}, {"version": 2}, {"more": 1}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_manifest_that_says_something_else_is_passed_over(changes, tmp_path):
    write(tmp_path, 1, CONFIG, state(1))
    file = write(tmp_path, 2, CONFIG, state(2)) / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    heard = []
    assert latest(tmp_path, CONFIG, heard.append).round == 1
    assert heard == [f"{file}: the SHA-256 differs from the one inside the file. Using the checkpoint before it"]


def test_a_checkpoint_in_the_folder_of_another_round_is_passed_over(tmp_path):
    write(tmp_path, 1, CONFIG, state(1))
    write(tmp_path, 2, CONFIG, state(2)).rename(tmp_path / "round-000003")
    heard = []
    assert latest(tmp_path, CONFIG, heard.append).round == 1
    assert heard == [
        f"{tmp_path}/round-000003: the folder contains the checkpoint of another round, 2. Using the "
        "checkpoint before it"
    ]


def test_a_run_goes_on_with_more_rounds_and_not_with_another_rate(tmp_path):
    simulation = simulate(tiny(rounds=1), tmp_path / "a")
    run(simulation)
    simulation.save(tmp_path / "checkpoints")
    longer = simulate(tiny(rounds=2, run={"checkpoint_seconds": 1}), tmp_path / "b")
    assert longer.restore(tmp_path / "checkpoints") == (1, []) and not longer.done
    other = simulate(tiny(training={"lr": 0.5}), tmp_path / "c")
    with pytest.raises(ConfigError, match="Differences:\n  training.lr: 0.05 -> 0.5\n"):
        other.restore(tmp_path / "checkpoints")


def test_another_configuration_is_refused_with_what_differs(tmp_path):
    path = write(tmp_path, 1, CONFIG, state(1))
    other = {"training": {"lr": 0.2, "milestones": (1, 2), "clip": 1.0}, "seed": 0}
    with pytest.raises(ConfigError) as error:
        latest(tmp_path, other, pytest.fail)
    assert str(error.value) == (
        f"{path}: the checkpoint has another configuration. Differences:\n"
        "  training.clip: None -> 1.0\n"
        "  training.lr: 0.1 -> 0.2\n"
        "Hint: resume with the configuration that wrote it, or choose another output folder"
    )


def test_no_pickle(tmp_path):
    path = write(tmp_path, 1, CONFIG, STATE)
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "state.safetensors"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["sha256"].keys() == {"state.safetensors"}


def test_a_checkpoint_that_the_disk_does_not_take_leaves_the_ones_before(tmp_path):
    client_states = ClientStates(tmp_path / "client_states")
    client_states.put(3, 0, {"w": torch.ones(2)})
    write(tmp_path, 1, CONFIG, state(1), client_states)
    with small_files(), pytest.raises(NotWritten, match="checkpoint of round 2 cannot be written: .*large"):
        write(tmp_path, 2, CONFIG, {"w": torch.zeros(1000)}, client_states)
    assert sorted(os.listdir(tmp_path)) == ["client_states", "kept", "round-000001"]
    write(tmp_path, 2, CONFIG, state(2), client_states)
    assert latest(tmp_path, CONFIG, pytest.fail).round == 2


# fingerprints


def test_a_checksum_sees_every_bit():
    a = {"p": {"w": torch.tensor([1.0, 0.0])}}
    others = [
        {"p": {"w": torch.tensor([1.0, -0.0])}},
        {"p": {"w": torch.tensor([1.0 + 2**-23, 0.0])}},
        {"p": {"v": torch.tensor([1.0, 0.0])}},
        {"w": torch.tensor([1.0, 0.0])},
        {"p": {"w": torch.tensor([1.0, 0.0]), "x": torch.zeros(1)}},
        {"p": {"w": torch.tensor([[1.0], [0.0]])}},
        {"p": {"w": torch.tensor([1065353216, 0], dtype=torch.int32)}},
    ]
    assert checksum(a) == checksum({"p": {"w": torch.tensor([1.0, 0.0])}})
    assert checksum(a) not in [checksum(other) for other in others]


def test_a_checksum_does_not_see_order_or_strides():
    a, b = torch.randn(2, 3), torch.randn(2)
    assert checksum({"a": a, "b": b}) == checksum({"b": b, "a": a.t().contiguous().t()})


@pytest.mark.parametrize(("better", "kept"), [("max", 3), ("min", 2)])
def test_the_best_round_is_by_the_better_direction(tmp_path, better, kept):
    best = Best(tmp_path, "loss", better)
    for round, value in ((1, 0.5), (2, 0.25), (3, 0.75), (4, float("nan"))):
        write(tmp_path, round, CONFIG, STATE)
        if best.is_better(line := {"round": round, "loss": value}):
            best.keep(line)
    assert names(tmp_path / "best") == [f"round-{kept:06d}"]


def test_a_best_checkpoint_whose_value_is_not_of_the_metrics_is_removed(tmp_path):
    write(tmp_path, 2, CONFIG, STATE)
    best, line = Best(tmp_path, "accuracy", "max"), {"round": 2, "accuracy": 0.5}
    best.keep(line)
    assert remove_damaged_best(tmp_path, [line]) == [] and best.value == 0.5
    file = tmp_path / "best" / "best.json"
    rewrite(file, {"value": 0.75})
    assert remove_damaged_best(tmp_path, [line]) == [
        f"{file}: the value is not that of round 2; the best checkpoint is removed, and the next better round is kept"
    ]
    assert not (tmp_path / "best").exists() and math.isnan(best.value)


def test_a_pipe_as_the_value_of_the_best_checkpoint_is_not_read(tmp_path):
    write(tmp_path, 2, CONFIG, STATE)
    Best(tmp_path, "accuracy", "max").keep({"round": 2, "accuracy": 0.5})
    becomes_a_pipe(tmp_path / "best" / "best.json")
    [said] = remove_damaged_best(tmp_path, [])
    assert "best.json: the file is absent or damaged: " in said and "neither a file nor a link to one" in said


def test_a_best_checkpoint_that_was_copied_in_part(tmp_path):
    require_whole_best(tmp_path)
    write(tmp_path, 2, {}, {"weights": {"w": torch.ones(3)}})
    best = Best(tmp_path, "accuracy", "max")
    best.keep({"round": 2, "accuracy": 0.5})
    require_whole_best(tmp_path)
    for file in ("best.json", "round-000002/manifest.json", "round-000002/state.safetensors"):
        torn = tmp_path / "best" / file
        whole = torn.read_bytes()
        for damage in (whole[:-9], None):
            torn.unlink()
            if damage is not None:
                torn.write_bytes(damage)
            with pytest.raises(DamagedCheckpoint):
                require_whole_best(tmp_path)
        torn.write_bytes(whole)
    require_whole_best(tmp_path)
