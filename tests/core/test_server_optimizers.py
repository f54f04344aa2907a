"""Server optimizers: hand-computed values, lazy updates, equal bits after a resume."""

import pytest
import torch
from helpers import assert_same, run, simulate, tiny

from rayfl.config import ConfigError
from rayfl.core.fold import Fold, Update
from rayfl.core.server_optimizers import Server


def stepped(server, old, answers, moments=None):
    """Return the next value and moments of a group, from whole updates of clients of weight 1."""
    fold = Fold({"params": {"w": torch.tensor(old)}} | (moments or {}), server)
    for answer in answers:
        fold.add(None, Update({}, 1.0, whole={"params": {"w": torch.tensor(answer)}}))
    return fold.mean("params")["w"], fold.moments


def test_the_mean_is_the_default():
    x, moments = stepped(Server(), [1.0, 2.0], [[3.0, 4.0], [5.0, 0.0]])
    assert x.tolist() == [4.0, 2.0] and not moments


def test_sgd_steps_by_its_rate_and_momentum():
    server = Server(optimizer="sgd", lr=0.5, momentum=0.5)
    x, moments = stepped(server, [1.0], [[3.0]])
    assert (x.tolist(), moments["server m params"]["w"].tolist()) == ([2.0], [2.0])
    x, moments = stepped(server, [2.0], [[3.0]], moments)  # m = 0.5 * 2 + 1
    assert (x.tolist(), moments["server m params"]["w"].tolist()) == ([3.0], [2.0])


@pytest.mark.parametrize(
    ("optimizer", "v"),
    # of d = 2 and v = 1 before: v + 4; 0.5 * 1 + 0.5 * 4; 1 - 0.5 * 4 * sign(1 - 4)
    [("adagrad", 5.0), ("adam", 2.5), ("yogi", 3.0)],
)
def test_adaptive_steps_by_hand(optimizer, v):
    server = Server(optimizer=optimizer, lr=0.1, betas=(0.5, 0.5), tau=1.0)
    x, moments = stepped(server, [1.0], [[3.0]])
    assert moments["server v params"]["w"].item() == pytest.approx(v)
    assert moments["server m params"]["w"].item() == 1.0
    assert x.item() == pytest.approx(1 + 0.1 * 1.0 / (v**0.5 + 1))


@pytest.mark.parametrize(("optimizer", "b1"), [("adagrad", 0.0), ("adam", 0.9), ("yogi", 0.9)])
def test_default_decay_rates(optimizer, b1):
    """Of Reddi et al.'s experiments: adagrad has no momentum."""
    assert Server(optimizer=optimizer).betas == (b1, 0.99)
    _, moments = stepped(Server(optimizer=optimizer), [1.0], [[3.0]])
    assert moments["server m params"]["w"].item() == pytest.approx((1 - b1) * 2)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_coordinates_without_holders_are_unchanged_bit_for_bit(optimizer, tmp_path):
    """Neither parameters nor moments change, despite momentum."""
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {"lr": 0.01}
    spec = tiny(method="heterofl", server={"optimizer": optimizer} | momentum, clients={"cohort": 2, "count": 6})
    simulation = simulate(spec, tmp_path)
    simulation.train()
    before = {group: dict(tensors) for group, tensors in simulation.state.items()}
    simulation.round = 1
    covers = [selection.cover(before["params"]) for selection, _ in simulation.cohort().values()]
    simulation.train()
    for name in before["params"]:
        if name.startswith("head."):
            continue  # held by label rows
        held = sum(cover[name] for cover in covers) > 0
        for group, tensors in simulation.state.items():
            assert torch.equal(tensors[name][~held], before[group][name][~held]), (group, name)
    conv = simulation.state["params"]["conv2.weight"]
    assert not torch.equal(conv, before["params"]["conv2.weight"])


@pytest.mark.parametrize("method", ["heterofl", "fiarse", "nefl", "spafl"])
def test_a_resumed_run_equals_an_uninterrupted_run(method, tmp_path):
    spec = tiny(method=method, server={"optimizer": "adam", "lr": 0.01}, rounds=4)
    straight = simulate(spec, tmp_path / "straight")
    run(straight)
    first = simulate(spec, tmp_path / "first")
    run(first, 2)
    first.save(tmp_path / "checkpoints")
    second = simulate(spec, tmp_path / "second")
    second.restore(tmp_path / "checkpoints")
    run(second)
    assert_same(second.state, straight.state)
    assert any(group.startswith("server m") for group in second.state)


def test_methods_do_not_see_moments(tmp_path):
    """FML sends its whole state, the same bytes in every round."""
    simulation = simulate(tiny(method="fml", server={"optimizer": "adam", "lr": 0.01}, rounds=3), tmp_path)
    assert len({line["bytes_down"] / line["clients"] for line in run(simulation)}) == 1
    assert "server v common" in simulation.state and "server v common" not in simulation.method_state


@pytest.mark.parametrize(("method", "is_noted"), [("feddistill", True), ("fedpm", True), ("heterofl", False)])
@pytest.mark.parametrize("server", [{"optimizer": "adam", "lr": 0.01}, {"optimizer": "sgd"}, {}])
def test_an_optimizer_without_effect_is_noted(method, is_noted, server, tmp_path):
    lines = run(simulate(tiny(method=method, server=server, rounds=2), tmp_path))
    notes = [line["note"] for line in lines if "note" in line]
    assert len(notes) == (is_noted and bool(server))
    for note in notes:
        assert note == (
            f"server.optimizer: {server['optimizer']!r} has no effect, because the server of method {method} takes no "
            "mean of parameters"
        )


def test_running_statistics_take_their_mean(tmp_path):
    """NeFL keeps running statistics in separate groups; an optimizer step could make variances negative."""
    simulation = simulate(tiny(method="nefl", server={"optimizer": "sgd", "lr": 0.5}, rounds=1), tmp_path)
    plain = simulate(tiny(method="nefl", rounds=1), tmp_path / "plain")
    run(simulation), run(plain)
    for group in ("submodel 1", "submodel 2", "submodel 3"):
        for name, t in simulation.state[group].items():
            assert torch.equal(t, plain.state[group][name]) == ("running" in name) or not t.any()


def test_settings_of_another_optimizer_are_refused():
    with pytest.raises(ConfigError) as error:
        tiny(server={"optimizer": "sgd", "tau": 0.1})
    assert str(error.value) == (
        "test: server: {'optimizer': 'sgd', 'tau': 0.1} is not valid. Allowed: tau only with an optimizer that uses "
        "it, not with sgd"
    )
