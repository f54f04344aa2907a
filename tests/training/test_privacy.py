"""Central differential privacy: steps by hand, sensitivity by brute force, epsilon as published, refusals."""

import math
import sys

import numpy as np
import pytest
import torch
from helpers import assert_same, read_data, run, simulate, tiny

import rayfl
from rayfl.clients import Population
from rayfl.config import ConfigError, parse
from rayfl.core.fold import Update
from rayfl.core.net import Net
from rayfl.core.seeds import numpy_generator, torch_generator
from rayfl.core.server_optimizers import NORM, Server
from rayfl.core.submodel import Mask, prefix, random_subset, rolling
from rayfl.core.tensors import norm
from rayfl.engine.checked import Checked, MethodFailed
from rayfl.engine.jobs import Broadcast, Train
from rayfl.engine.private import public_cover
from rayfl.engine.simulation import load_data
from rayfl.experiment import read_experiment
from rayfl.methods import Dense
from rayfl.methods.width.heterofl import HeteroFL
from rayfl.testing.tiny import model_of
from rayfl.training.privacy import Privacy, PrivateFold, Released, epsilon
from rayfl.training.secure import Protection
from rayfl.training.sending import transformed
from rayfl.training.transforms import Quantize, TopK

MODEL = {"name": "digits_cnn", "norm": "none"}
SECTION = {"clip": 0.5, "noise": 0.8, "delta": 0.1}
NET = Net(model_of(MODEL), 1.0)


def private(**sections):
    return tiny(**{"model": MODEL, "privacy": SECTION, "method": "heterofl"} | sections)


def cover_of(simulation):
    """Return the public denominators of the next round."""
    capacities = simulation.schedule.capacities
    return public_cover(simulation.verbs, simulation.clients, simulation.state, simulation.round, capacities)


@pytest.mark.parametrize(
    "more", [{}, {"stands_for": {"clients": 1000, "cohort": 10}, "delta": 1e-3}, {"quantile": 0.5}]
)
def test_a_runs_configuration_can_be_read_again(more):
    experiment = private(privacy=SECTION | {"noise": 0.1} | more)
    assert read_experiment(experiment.plain(), "again") == experiment


# the step


def noise_of(seed, round, name, shape):
    """Return the noise on a tensor, in units of its deviation."""
    return torch.from_numpy(numpy_generator(seed, "noise", round, name).standard_normal(tuple(shape), "float32"))


def test_a_step_by_hand():
    """x + (G + noise) / c, with the noise of its address; the third coordinate, which nobody could hold, keeps its
    bits; nobody held the second."""
    x = {"w": torch.tensor([1.0, 2.0, 0.3])}
    released = Released({"w": torch.tensor([2.0, 0.5, 0.0])}, 0.25, seed=5, round=3, cohort=2)
    noise = noise_of(5, 3, "w", (3,))
    mean, covered = released.mean(x, {"w": torch.tensor([0.8, 0.0, 0.0])})["w"]
    assert mean[0].item() == pytest.approx(1.0 + (0.8 + 0.25 * noise[0].item()) / 2)
    assert mean[1].item() == pytest.approx(2.0 + 0.25 * noise[1].item() / 0.5)
    assert torch.equal(mean[2], x["w"][2]) and covered.tolist() == [True, True, False]


def test_signal_to_noise_ratios_by_hand():
    """Seven of ten clients hold the first and second coordinate, all hold the third, two of ten those of v."""
    cover = {"w": torch.tensor([2.8, 2.8, 4.0, 0.0]), "v": torch.full((3,), 0.8)}
    released = Released(cover, 0.5, seed=0, round=0, cohort=4)
    released.mean({n: torch.zeros_like(t) for n, t in cover.items()}, {"w": torch.tensor([3.0, -4.0, 2.0, 0.0])})
    expected = {"snr_0.25": 0.0, "snr_0.75": math.sqrt((9 + 16) / 2) / 0.5, "snr_1": 2.0 / 0.5}
    assert released.snr() == pytest.approx(expected)


def expected_step(simulation):
    """Return the next parameters, from the clients' changes one by one and the definition of the denominators."""
    experiment, state, round = simulation.experiment, simulation.state, simulation.round
    clients, privacy = experiment.clients, experiment.privacy
    x, clip = state["params"], privacy.norm(state)
    total = {n: torch.zeros_like(t) for n, t in x.items()}
    for selection, some in simulation.cohort().values():
        broadcast = Broadcast(simulation.method.extract(state, selection), selection, Protection(clip))
        for client in some:
            update = simulation.executor.worker.train(broadcast, Train([client], {})).update
            change = update.sums["params"]
            assert norm([change]) <= clip * (1 + 1e-6) and update.weight == 1
            selection.put(change, total)
    cover = {n: torch.zeros_like(t) for n, t in x.items()}
    for capacity, weight in clients.levels:
        share = weight / sum(w for _, w in clients.levels)
        for n, t in simulation.method.prefix(capacity).cover(x).items():
            cover[n] += clients.cohort * share * t
    found = {}
    for n, t in x.items():
        noise = noise_of(experiment.seed, round, n, t.shape)
        moved = t + (total[n] + privacy.noise * clip * noise) / cover[n]
        found[n] = torch.where(cover[n] > 0, moved, t)
    return found, cover


def test_a_round_by_hand(tmp_path):
    """Denominators are cohort x share, whoever came; the outer channels, of the server only, keep their bits."""
    clients = {"count": 6, "cohort": 3, "capacities": [0.4, 0.2, 0.1], "weights": [0, 1, 1]}
    simulation = simulate(private(clients=clients), tmp_path)
    before = simulation.state["params"]
    expected, cover = expected_step(simulation)
    line = simulation.train()
    # all clients have capacity 0.1 or 0.2
    assert {n for n in line if n.startswith("snr_")} == {"snr_0.5", "snr_1"}
    assert {float(c) for t in cover.values() for c in t.unique()} == {0.0, 1.5, 3.0}
    for n, t in simulation.state["params"].items():
        torch.testing.assert_close(t, expected[n], rtol=1e-5, atol=1e-6)
        assert torch.equal(t[cover[n] == 0], before[n][cover[n] == 0])
        assert not (t[cover[n] > 0] == before[n][cover[n] > 0]).all()


def test_the_public_cover_does_not_depend_on_the_cohort(tmp_path):
    """With a cohort of one client, its own selection would tell its capacity."""
    clients = {"count": 6, "cohort": 1, "capacities": [0.3, 0.2, 0.1]}
    covers = [cover_of(simulate(private(clients=clients, seed=s), tmp_path / str(s))) for s in range(4)]
    assert all(torch.equal(t, cover[n]) for cover in covers for n, t in covers[0].items())
    assert {round(float(c), 5) for t in covers[0].values() for c in t.unique()} == {0.33333, 0.66667, 1.0}


RESNET = {"name": "resnet18", "channels": 8, "norm": "group"}
EXITS = {"name": "depthfl_resnet18", "channels": 8, "norm": "group"}


@pytest.mark.parametrize(
    ("method", "model", "withheld"),
    [
        ({"name": "heterofl"}, MODEL, False),
        ({"name": "depthfl", "alpha": 0, "exits": [2, 4], "distill": False}, EXITS, False),
        ({"name": "depthfl", "alpha": 0, "exits": [2, 4], "distill": False, "exits_trained": "last"}, EXITS, True),
        ({"name": "nefl", "variant": "D", "learn_steps": False}, RESNET, False),
        ({"name": "nefl", "variant": "D", "learn_steps": False, "projections": "with_block"}, RESNET, True),
    ],
)
def test_denominators_count_the_clients_that_return_a_coordinate(method, model, withheld, tmp_path):
    """All six clients come, so the denominators are the numbers of their answers."""
    simulation = simulate(
        private(
            method=method, model=model, clients={"count": 6, "cohort": 6, "capacities": [1, 0.4], "metric": "params"}
        ),
        tmp_path,
    )
    found, kept = {n: torch.zeros_like(t) for n, t in simulation.state["params"].items()}, set()
    for selection, some in simulation.cohort().values():
        payload = simulation.method.extract(simulation.state, selection)
        for client in some:
            done = simulation.executor.worker.train(Broadcast(payload, selection), Train([client], {}))
            returned = done.update.sums["params"]
            kept |= payload["params"].keys() - returned.keys()
            selection.put({n: torch.ones_like(t) for n, t in returned.items()}, found)
    assert bool(kept) == withheld
    for n, t in cover_of(simulation).items():
        torch.testing.assert_close(t, found[n])


@pytest.mark.parametrize(("method", "asked"), [("heterofl", 3), ("fedrolex", 3), ("feddropout", 6)])
def test_selections_by_capacity_are_found_once_for_all_its_clients(method, asked, tmp_path, monkeypatch):
    """A hundred thousand clients would take seconds per round. Federated Dropout draws for every client below 1."""
    simulation = simulate(private(method=method, clients={"count": 6, "capacities": [1, 0.5, 0.25]}), tmp_path)
    calls, select = [], simulation.verbs.select
    monkeypatch.setattr(Checked, "select", lambda verbs, state, client: calls.append(0) or select(state, client))
    cover_of(simulation)
    assert len(calls) == asked


def test_a_parameter_that_a_client_keeps_without_saying_so_is_refused(tmp_path, monkeypatch):
    simulation = simulate(private(), tmp_path)
    train = HeteroFL.local_update

    def forgetful(self, payload, visit):
        update = train(self, payload, visit)
        del update.sums["params"]["head.bias"]
        return update

    monkeypatch.setattr(HeteroFL, "local_update", forgetful)
    with pytest.raises(MethodFailed, match="head.bias is not returned, but the denominators of `privacy` count it"):
        simulation.train()


def test_random_selections_are_counted_over_all_clients(tmp_path):
    """Federated Dropout draws a client's channels from public seeds."""
    simulation = simulate(private(method={"name": "feddropout"}), tmp_path)
    cover = cover_of(simulation)
    covered = {n: torch.zeros_like(t) for n, t in cover.items()}
    for id in range(6):
        client = simulation.verbs.select(simulation.state, next_client(simulation, id))
        for n, t in client.cover(simulation.state["params"]).items():
            covered[n] += 4 / 6 * t
    for n, t in cover.items():
        torch.testing.assert_close(t, covered[n])


def test_the_cover_of_many_random_selections_is_at_most_the_cohort(tmp_path):
    clients = {"count": 2000, "cohort": 100, "capacities": [0.3, 0.2]}
    data = {"name": "synthetic", "samples": 3000, "test_samples": 24, "classes": 4}
    spec = private(method="feddropout", data=data, partition="iid", clients=clients, privacy=SECTION | {"delta": 1e-4})
    cover = cover_of(simulate(spec, tmp_path))
    assert max(float(t.max()) for t in cover.values()) <= 100 * (1 + 1e-6)


def next_client(simulation, id):
    from rayfl.methods.base import Client

    return Client(id, simulation.clients.capacity(id, simulation.seed, simulation.round), simulation.round)


# sensitivity


def parts(seed):
    """Selections of every family, of one server."""
    narrow, generator = Net(NET.model, 0.4), torch_generator(seed, "test:parts")
    held = {n: torch.rand(math.prod(s), generator=generator) < 0.3 for n, s in NET.layout.shapes.items()}
    return [
        prefix(NET, narrow),
        rolling(NET, narrow, 7),
        random_subset(NET, Net(NET.model, 0.2), generator),
        Mask(NET, "held", {n: t.nonzero().flatten() for n, t in held.items()}),
        prefix(NET, NET),
    ]


@pytest.mark.parametrize("chain", [(), (TopK(share=0.2), Quantize(bits=1))])
def test_the_sensitivity_is_the_clipping_norm_under_partial_cover(chain):
    """One client is left out, or answers something else, however large: the released sum moves by at most C, or 2 C.
    Both bounds are reached. Quantize is expansive; the norm is that of what is sent."""
    clip, cover = 0.7, {n: torch.full(s, 1.25) for n, s in NET.layout.shapes.items()}
    selections = parts(0)

    def change(k, seed, size):
        generator = torch_generator(seed, "test:change", k)
        x = {n: torch.zeros(t.shape) for n, t in selections[k].take(cover).items()}
        y = {n: size * torch.randn(t.shape, generator=generator) for n, t in x.items()}
        if seed < 0:
            y = {n: -t for n, t in change(k, -seed, size)[1].items()}
        update = Update({"params": dict(y)}, 1.0)
        transformed(chain, {"params": x}, update, 0, selections[k], None, Protection(clip))
        return update, y

    def released(answers):
        fold = PrivateFold({"params": {n: torch.zeros_like(t) for n, t in cover.items()}}, Server(), NOISE)
        for k, (update, _) in answers.items():
            fold.add(selections[k], Update({"params": dict(update.sums["params"])}, 1.0))
        return {n: t * cover[n] for n, t in fold.mean("params").items()}

    NOISE = Released(cover, 0.0, 0, 0, 2)
    cohort = {k: change(k, 1 + k, 10.0**k / 100) for k in range(len(selections))}
    whole, moved = released(cohort), []
    for k in cohort:
        without = released({i: a for i, a in cohort.items() if i != k})
        moved.append(norm([{n: t - without[n] for n, t in whole.items()}]))
        for seed in (50, 51, -1 - k):
            other = released(cohort | {k: change(k, seed, 1e3)})
            moved[-1] = max(moved[-1], norm([{n: t - other[n] for n, t in whole.items()}]) / 2)
    assert max(moved) <= clip * (1 + 1e-4)
    assert max(moved) >= clip * (0.999 if not chain else 0.5)


# epsilon


@pytest.mark.parametrize(
    ("q", "rounds", "noise", "delta", "expected"),
    [(0.1, 500, 1.0, 1e-3, 14.04), (0.01, 1000, 1.0, 1e-5, 2.10), (0.05, 1500, 0.8, 1e-6, 26.5)],
)
def test_epsilon_of_poisson_cohorts_is_the_published_one(q, rounds, noise, delta, expected):
    assert epsilon("rdp", True, 1000, round(1000 * q), noise, rounds, delta) == pytest.approx(expected, abs=0.05)


@pytest.mark.slow
def test_epsilon_by_privacy_loss_distributions_is_the_published_one():
    assert epsilon("pld", True, 1000, 100, 1.0, 500, 1e-3) == pytest.approx(12.46, abs=0.01)


@pytest.mark.parametrize(("poisson", "sensitivity"), [(True, 1), (False, 2)])
def test_epsilon_of_all_clients_in_every_round_is_that_of_the_gaussian_mechanism(poisson, sensitivity):
    """Its Renyi divergence of order a is rounds * a * sensitivity^2 / (2 z^2): adding or removing a client moves the
    sum by C, other data of a client by 2 C. Converted by Canonne, Kamath, Steinke (2020), Proposition 12."""
    z, rounds, delta = 3.0, 20, 1e-3
    orders = np.linspace(1.01, 60, 20_000)
    divergence = rounds * orders * sensitivity**2 / (2 * z**2)
    by_order = divergence + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    assert epsilon("rdp", poisson, 50, 50, z, rounds, delta) == pytest.approx(by_order.min(), rel=0.01)


def test_a_simulation_of_a_larger_cohort_scales_its_noise(tmp_path):
    """With 4 of 6 clients for 400 of 6,000, the noise on the mean is that of the 400, and so is epsilon."""
    large = {"clients": 6000, "cohort": 400}
    privacy, clients = Privacy(clip=1.0, noise=1.0, delta=1e-4, stands_for=large), Population(count=6, cohort=4)
    assert privacy.multiplier(clients) == pytest.approx(0.01)
    [line, _] = run(
        simulate(private(privacy=SECTION | {"delta": 1e-4, "stands_for": large}, evaluation={"every": 1}), tmp_path)
    )
    assert line["simulated_epsilon"] == epsilon("rdp", False, 6000, 400, 0.8, 1, 1e-4) and "epsilon" not in line


def test_epsilon_grows_with_the_rounds(tmp_path):
    lines = run(simulate(private(rounds=3, evaluation={"every": 1}), tmp_path))
    assert [line["epsilon"] for line in lines] == [epsilon("rdp", False, 6, 4, 0.8, r, 0.1) for r in (1, 2, 3)]
    assert lines[0]["epsilon"] < lines[1]["epsilon"] < lines[2]["epsilon"]


# adaptive clipping


def test_the_norm_is_adapted_by_hand():
    """Of a cohort of 40, 30 were within the norm; s = 2, as cohort / 20; the sum has more noise for it."""
    privacy = Privacy(clip=2.0, noise=1.5, delta=1e-3, quantile=0.5, rate=0.3)
    clients = Population(count=100, cohort=40)
    noise = numpy_generator(7, "noise", 2, NORM).standard_normal()
    new = privacy.adapted(2.0, 30, 40, clients, 7, 2)[NORM]["norm"].item()
    assert new == pytest.approx(2.0 * math.exp(-0.3 * ((30 + 2 * noise) / 40 - 0.5)))
    assert privacy.multiplier(clients) == pytest.approx((1 / 1.5**2 - 1 / 16) ** -0.5)
    assert Privacy(clip=2.0, noise=1.5, delta=1e-3).multiplier(clients) == pytest.approx(1.5)


@pytest.mark.parametrize("within", [True, False])
def test_a_client_more_changes_the_count_within_the_norm_by_half(within):
    """The sum's noise is raised for a count of this sensitivity (Poisson cohorts: a client comes, or does not)."""
    privacy = Privacy(clip=2.0, noise=1.5, delta=1e-3, quantile=0.5, rate=0.3)
    clients = Population(count=100, cohort=40, participation="poisson")
    alone, more = (privacy.adapted(2.0, w, n, clients, 7, 2)[NORM]["norm"] for w, n in ((30, 37), (30 + within, 38)))
    assert abs(math.log(more / alone)) == pytest.approx(0.3 * 0.5 / 40)


ADAPTIVE = {"quantile": 0.5, "deviation": 0.5}


@pytest.mark.parametrize("method", ["heterofl", "fedrolex", "feddropout", "fiarse"])
def test_a_private_run_resumes_to_the_bit(method, tmp_path):
    sections = {"clients": {"participation": "poisson"}, "server": {"optimizer": "sgd", "momentum": 0.5}}
    spec = private(method=method, privacy=SECTION | ADAPTIVE, rounds=4, evaluation={"every": 2}, **sections)
    straight = simulate(spec, tmp_path / "straight")
    lines = run(straight)
    first, second = simulate(spec, tmp_path / "first"), simulate(spec, tmp_path / "second")
    run(first, 2)
    first.save(tmp_path / "checkpoints")
    second.restore(tmp_path / "checkpoints")
    assert run(second) == lines[2:]
    assert_same(second.state, straight.state)
    assert len({line["clip_norm"] for line in lines}) == 4 and lines[0]["clip_norm"] == 0.5


# cohorts


def test_poisson_cohorts_have_every_client_independently():
    clients = Population(count=20, cohort=5, participation="poisson")
    cohorts = [clients.sample(0, round) for round in range(3000)]
    sizes = np.array([len(cohort) for cohort in cohorts])
    # Binomial(20, 1/4): mean 5, variance 3.75
    assert abs(sizes.mean() - 5) < 4 * math.sqrt(3.75 / 3000) and abs(sizes.var() - 3.75) < 0.5
    came = np.zeros((3000, 20))
    for row, cohort in zip(came, cohorts, strict=True):
        row[cohort] = 1
    assert abs(came.mean(0) - 0.25).max() < 4.5 * math.sqrt(0.25 * 0.75 / 3000)
    together = np.corrcoef(came.T) - np.eye(20)  # fixed cohorts: -1/19
    assert abs(together[~np.eye(20, dtype=bool)].mean()) < 0.01


def test_an_empty_cohort_is_not_visible(tmp_path):
    """Its round has the noise of every other round."""
    clients = {"count": 6, "cohort": 1, "participation": "poisson"}
    simulation = simulate(private(clients=clients, rounds=30), tmp_path)
    simulation.round = next(r for r in range(30) if not simulation.clients.sample(0, r))
    before = simulation.state["params"]
    line = simulation.train()
    assert line.get("clients", 0) == 0
    cover = cover_of(simulation)
    for n, t in simulation.state["params"].items():
        noise = noise_of(0, simulation.round, n, t.shape)
        expected = torch.where(cover[n] > 0, before[n] + 0.8 * 0.5 * noise / cover[n], before[n])
        torch.testing.assert_close(t, expected)


def test_empty_rounds_change_the_model():
    clients = {"count": 6, "cohort": 1, "participation": "poisson"}
    result = rayfl.run(private(clients=clients, rounds=8))
    assert not all(line.get("clients") for line in result.lines)
    assert not any("did not change" in note for note in result.notes)


# refusals


class Weighing(Dense):
    """Counts clients by their samples in a way of its own."""

    def weight_of(self, data):
        return len(data) ** 0.5


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {"method": "spafl"},
            "privacy: method spafl is not supported, because its updates are not parameters of the model",
        ),
        ({"method": "fedpm"}, "privacy: method fedpm is not supported"),
        ({"method": "scaffold"}, "privacy: method scaffold is not supported, because its control variates change"),
        (
            {"method": "fedavg"},
            "privacy: method.weight: samples gives clients unequal parts of the sum. Allowed: uniform",
        ),
        (
            {"method": Weighing()},
            "weighs clients by its own `weight_of`, but all count alike. Allowed: a method without",
        ),
        ({"model": "digits_cnn"}, "privacy: evaluation.statistics: statistics of batch norms are collected from"),
        ({"system": {}}, "privacy: a system chooses clients by their time, not at random. Allowed: no system"),
        ({"updates": {"policy": "stop"}}, "privacy: updates.policy: stop tells that one client diverged"),
        (
            {"updates": {"transforms": [{"name": "error_feedback"}, {"name": "sign"}]}},
            "privacy: updates.transforms: the residual of error_feedback carries what was clipped",
        ),
        (
            {"data": read_data(name="breast_cancer"), "model": "mlp"},
            "privacy: data: missing numbers are replaced, or numbers scaled, by values computed from the clients' data "
            "without noise. Allowed: data.scaling: none with data.missing: refuse",
        ),
        (
            {"data": read_data(name="breast_cancer", scaling="none", missing="mean"), "model": "mlp"},
            "privacy: data: missing numbers are replaced",
        ),
        (
            {"data": read_data(name="diabetes", scaling="none"), "model": "mlp"},
            "privacy: data: numbers as targets are scaled by values computed from the clients' data without noise. "
            "Allowed: targets that are classes or labels",
        ),
        ({"privacy": SECTION | {"delta": 0.2}}, "privacy.delta: 0.2 is not valid: publishing all data of one random"),
        ({"privacy": SECTION | {"accountant": "pld"}}, "privacy.accountant: pld is not defined for cohorts of a fixed"),
        ({"privacy": SECTION | {"quantile": 0.5}}, "privacy.deviation: 0.2 is too small for noise 0.8"),
        ({"privacy": SECTION | {"rate": 0.5}}, "rate and deviation only with quantile"),
        ({"privacy": SECTION | {"stands_for": {"clients": 3, "cohort": 4}}}, "a cohort of at most clients = 3"),
        (
            {"system": {}, "privacy": None, "clients": {"participation": "poisson"}},
            "clients.participation: poisson is not",
        ),
    ],
)
def test_a_run_whose_epsilon_would_not_hold_is_refused(sections, sentence):
    with pytest.raises(ConfigError) as error:
        private(**sections)
    assert sentence in str(error.value) and "Allowed: " in str(error.value)


def test_a_private_run_learns_no_constants_from_its_table(tmp_path):
    """Inputs are the stored numbers."""
    data = read_data(name="breast_cancer", scaling="none")
    experiment = private(data=data, model="mlp", rounds=1, evaluation={"every": 1})
    prepare = experiment.federate(load_data(experiment)).prepare
    assert prepare == experiment.data.prepare and not prepare.learns
    x = torch.rand(3, 30)
    assert torch.equal(prepare.whole({"x": x})["x"], x)
    [line] = run(simulate(experiment, tmp_path))
    assert line["epsilon"] > 0


@pytest.mark.parametrize(("method", "group"), [("nefl", "submodel"), ("fjord", "width")])
def test_groups_outside_the_clipped_parameters_are_refused_before_the_run(method, group):
    given = {"name": method} | ({"weight": "uniform"} if method == "fjord" else {})
    spec = private(method=given, model="digits_cnn", evaluation={"statistics": "batch"})
    with pytest.raises(ConfigError, match=f"privacy: clients of method {method} send {group}.*which is not clipped"):
        load_data(spec)


def test_a_private_fold_gives_the_noisy_mean_only():
    fold = PrivateFold({"params": {}}, Server(), Released({}, 0.0, 0, 0, 1))
    with pytest.raises(ConfigError, match="the server's step reads more of params than its noisy mean"):
        fold.mean("params", over="all")
    for read in (fold.sum, fold.weights, fold.mean_so_far):
        with pytest.raises(ConfigError, match="the server's step reads more of params than its noisy mean"):
            read("params")
    with pytest.raises(ConfigError, match="clients send masks, which is not clipped"):
        fold.add(prefix(NET, NET), Update({}, 1.0, whole={"masks": {"w": torch.zeros(1)}}))
    fold.add(prefix(NET, NET), Update({"params": {}, "statistics": {}}, 1.0))


def test_the_accountant_is_needed_by_private_runs_only(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    run(simulate(tiny(rounds=1), tmp_path))
    with pytest.raises(ConfigError, match=r"dp-accounting is not installed. Hint: uv sync --extra privacy"):
        private()


def test_the_norm_follows_from_the_clients_that_came(tmp_path):
    spec = private(privacy=SECTION | ADAPTIVE, clients={"participation": "poisson"}, rounds=6)
    simulation, sizes = simulate(spec, tmp_path), set()
    for round in range(6):
        clip, line = spec.privacy.norm(simulation.state), simulation.run_round()
        came, within = line.get("clients", 0), line.get("within_norm", 0)
        new = spec.privacy.adapted(clip, within, came, spec.clients, spec.seed, round)
        assert torch.equal(simulation.state[NORM]["norm"], new[NORM]["norm"])
        sizes.add(came)
    assert sizes - {spec.clients.cohort}


@pytest.mark.parametrize(("change", "within"), [([3.0, 4.0], 1), ([3.0, 4.1], 0)])
def test_a_change_is_within_the_norm(change, within):
    update = Update({"params": {"w": torch.tensor(change)}}, 1.0)
    transformed([], {"params": {"w": torch.zeros(2)}}, update, 0, Mask(NET, "whole", {}), None, Protection(5.0))
    assert update.metrics["within_norm"] == within


@pytest.mark.parametrize(("field", "value"), [("noise", 1e-300), ("noise", 1e300), ("clip", 1e300), ("clip", 1e-300)])
def test_numbers_that_no_accountant_takes_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"privacy.{field}: .* is not valid. Allowed: at "):
        parse(Privacy, {"clip": 1.0, "noise": 1.0, "delta": 1e-5, field: value}, "x: privacy")
