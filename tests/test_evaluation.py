"""Networks and data of an evaluation: hand-computed metrics."""

from collections import Counter
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from helpers import NESTED, Doubled, Pruned, message, run, simulate, tiny

import rayfl
from rayfl import InMemory
from rayfl.core import norms
from rayfl.core.net import Net, load
from rayfl.core.seeds import numpy_generator
from rayfl.data import scores
from rayfl.data.goal import Classes
from rayfl.data.partition.users import Users
from rayfl.data.samples import ClientData, equal_batches
from rayfl.data.scores import Accuracy, CrossEntropy, MacroF1, Perplexity, Score, TopK
from rayfl.engine import evaluator, worker
from rayfl.engine.collecting import grouped, spans_of
from rayfl.engine.simulation import load_data
from rayfl.evaluation import Evaluation, judge
from rayfl.results.matrices import matrix_plots

NAMES = ("0.3", "0.2", "0.1")
SCORES = (Accuracy(), CrossEntropy())


def rows(simulation, source, index) -> ClientData:
    """Return some rows of the training or test set."""
    return simulation.executor.worker._rows(source, np.asarray(index))


def all_test_rows(simulation) -> ClientData:
    return rows(simulation, "test", range(24))


def deployed(simulation, capacity):
    """Return the network of this capacity, with exact statistics of all clients' data."""
    found = simulation.method.deploy(simulation.state, simulation.round, capacity)
    module = found.net.build()
    load(module, found.params)
    norms.load(module, exact(simulation, module, range(simulation.clients.count)))
    return module


def exact(simulation, module, clients):
    """Return exact statistics from training batches of these clients' shuffled rows."""
    own = np.concatenate([simulation.data.train[id] for id in clients])
    data = rows(simulation, "train", numpy_generator(0, "pooled").permutation(own))
    return norms.finish(norms.collect(module, (x for x, _ in data.in_batches(equal_batches(len(own), 5)))), "exact")


def accuracy(module, data, scores=SCORES, **options) -> float:
    [judged] = judge(module, [data], scores, 7, **options)
    assert judged.count == len(data)
    return scores[0].value(judged.sums[scores[0].label])


# the global splits


def test_accuracy_of_every_capacity_by_hand(tmp_path):
    simulation = simulate(tiny(method="heterofl", training={"steps": 8}), tmp_path)
    line = run(simulation)[-1]
    held_out = rows(simulation, "train", simulation.data.validation)
    for data, prefix in ((all_test_rows(simulation), ""), (held_out, "validation_")):
        found = [line[f"{prefix}accuracy_{name}"] for name in NAMES]
        by_hand = [accuracy(deployed(simulation, float(name)), data) for name in NAMES]
        assert found == by_hand
        assert line[f"{prefix}accuracy_mean"] == pytest.approx(sum(by_hand) / 3)
        assert line[f"{prefix}accuracy_worst"] == min(by_hand)
        assert line[f"{prefix}accuracy_server"] == by_hand[0]
        losses = [accuracy(deployed(simulation, float(name)), data, SCORES[::-1]) for name in NAMES]
        assert [line[f"{prefix}loss_{name}"] for name in NAMES] == pytest.approx(losses, rel=1e-6)
        assert line[f"{prefix}loss_worst"] == pytest.approx(max(losses), rel=1e-6)


def test_every_early_exit_is_judged_on_the_global_splits(tmp_path):
    simulation = simulate(tiny(**NESTED["depthfl"] | {"method": "depthfl", "rounds": 1}), tmp_path)
    [line] = run(simulation)
    found = simulation.deployment(0.3)
    module = found.net.build().eval()
    load(module, found.params)
    norms.load(module, found.statistics)
    [(x, y)] = all_test_rows(simulation).in_order(24)
    with torch.no_grad():
        logits = module(x)
    for i, exit in enumerate(logits, start=1):
        assert line[f"accuracy_exit{i}"] == pytest.approx((exit.argmax(1) == y).float().mean().item())
    mean = torch.stack(logits).mean(0)
    assert line["accuracy_server"] == pytest.approx((mean.argmax(1) == y).float().mean().item())
    assert f"validation_accuracy_exit{len(logits)}" in line and "local_accuracy_exit1" not in line


@pytest.mark.parametrize("method", ["standalone", "spafl", "heterofl"])
def test_what_clients_start_from_is_nobody_s_result(method, tmp_path):
    """It is not evaluated on global splits; clients that were never selected use it on their own splits."""
    [line] = run(simulate(tiny(method=method, rounds=1), tmp_path))
    on_global = {name for name in line if name.startswith(("accuracy", "loss", "validation", "density"))}
    assert bool(on_global) == (method == "heterofl")
    assert {"local_accuracy_mean", "local_loss_worst", *(f"local_accuracy_{name}" for name in NAMES)} <= line.keys()


def test_a_network_of_several_capacities_is_judged_once(tmp_path, monkeypatch):
    simulation = simulate(tiny(method="fedavg", rounds=1), tmp_path)
    worker = simulation.executor.worker
    samples, original = Counter(), worker.evaluate
    monkeypatch.setattr(
        worker, "evaluate", lambda d, job: samples.update({job.split: count(simulation, job)}) or original(d, job)
    )
    [line] = run(simulation)
    assert samples == {"test": 24, "validation": 8, "clients": len(simulation.data.test.idx)}
    assert len({line[f"accuracy_{name}"] for name in (*NAMES, "mean", "server")}) == 1


def count(simulation, job) -> int:
    """Return the samples of a job."""
    spans = [
        item.stop - item.start if isinstance(item, slice) else len(simulation.data.test[item]) for item in job.items
    ]
    return sum(spans)


# clients


@pytest.mark.parametrize("batch", [24, 8, 3])
def test_small_pieces_share_forward_passes(batch, tmp_path):
    """Scores are those of each piece alone. Where norms lack statistics, samples of other pieces would change them."""
    simulation = simulate(tiny(method="heterofl"), tmp_path)
    run(simulation)
    module = deployed(simulation, 0.3)
    pieces = [rows(simulation, "test", piece) for piece in np.split(np.arange(24), [2, 9])]
    present = [torch.arange(4) != i for i in range(3)]
    passes = []
    module.register_forward_pre_hook(lambda module, given: passes.append(len(given[0])))
    shared = {24: [24], 8: [2, 7, 8, 7], 3: [2, 3, 2, 2, 3, 3, 3, 3, 3]}[batch]
    for statistics, expected in ((True, shared), (False, {24: [2, 7, 15], 8: shared, 3: shared}[batch])):
        if not statistics:
            norms.load(module, {})
        passes.clear()
        found = judge(module, pieces, SCORES, batch, "last", "zero", present)
        assert passes == expected
        alone = [judge(module, [pieces[i]], SCORES, batch, "last", "zero", [present[i]])[0] for i in range(3)]
        for joined, own in zip(found, alone, strict=True):
            assert joined.count == own.count and torch.equal(joined.sums["accuracy"], own.sums["accuracy"])
            torch.testing.assert_close(joined.sums["loss"], own.sums["loss"], rtol=1e-6, atol=0)


class Halved(CrossEntropy):
    """Has counts of its own."""

    name: Literal["halved"] = "halved"

    def counts(self, logits, y):
        return super().counts(logits, y) / 2


def test_equal_counts_of_several_scores_are_computed_once(monkeypatch):
    asked, entropy = [], scores._cross_entropy
    monkeypatch.setattr(scores, "_cross_entropy", lambda logits, y: asked.append(len(y)) or entropy(logits, y))
    data = ClientData({"x": torch.randn(6, 1, 2, 2), "y": torch.arange(6) % 4}, Doubled(), Classes(4))
    given = [CrossEntropy(), Perplexity(), Perplexity(of="words"), Halved()]
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 4))
    [found] = judge(module, [data], given[:2], 4)
    assert asked == [3, 3] and torch.equal(found.sums["loss"], found.sums["perplexity"])
    [other] = judge(module, [data], [given[0], given[3]], 4)
    assert len({score.measure for score in given}) == 3
    assert torch.equal(other.sums["loss"], 2 * other.sums["halved"])


def test_samples_of_different_shapes_are_passed_separately():
    pieces = [ClientData({"x": torch.randn(2, n), "y": torch.arange(2)}, Doubled(), Classes(3)) for n in (4, 4, 6)]
    seen = []

    class Sums(torch.nn.Module):
        def forward(self, x):
            seen.append(tuple(x.shape))
            return x.sum(1, keepdim=True) * torch.tensor([-1.0, 0.0, 1.0])

    found = judge(Sums(), pieces, SCORES, 100)
    assert seen == [(4, 4), (2, 6)]
    by_hand = [((data.samples["x"].sum(1) > 0).long() * 2 == data.samples["y"]).sum() for data in pieces]
    assert [int(one.sums["accuracy"][0]) for one in found] == by_hand


@pytest.mark.parametrize("fill", ["none", "zero", "neg_inf"])
def test_accuracy_of_every_client_by_hand(fill, tmp_path):
    """Two of four classes per client: masked logits cannot reduce the accuracy."""
    simulation = simulate(tiny(method="heterofl", evaluation={"label_mask": fill}), tmp_path)
    line = run(simulation)[-1]
    modules = {name: deployed(simulation, float(name)) for name in NAMES}
    by_hand = {}
    for id in range(6):
        module = modules[f"{simulation.clients.capacity(id, 0, 0):g}"]
        present = rows(simulation, "train", simulation.data.train[id]).present
        assert present.sum() <= 2
        data = rows(simulation, "test", simulation.data.test[id])
        by_hand[id] = accuracy(module, data, fill=fill, present=[present])
    assert dict(simulation.client_scores.tolist()) == by_hand
    assert line["local_accuracy_mean"] == pytest.approx(np.mean(list(by_hand.values())))
    assert line["local_accuracy_worst"] == min(by_hand.values())
    assert line["local_accuracy_0.2"] == pytest.approx((by_hand[2] + by_hand[3]) / 2)


def test_absent_classes_are_masked_at_every_exit(tmp_path):
    """Logits of four classes that all samples share. Of classes 0 and 1 the exits prefer 0 and 1."""

    class TwoExits(torch.nn.Module):
        def forward(self, x):
            return tuple(
                torch.tensor(logits).expand(len(x), 4) for logits in ([2.0, 1.0, 3.0, 0.0], [0.0, 1.0, 2.0, 3.0])
            )

    data = rows(simulate(tiny(), tmp_path), "test", range(17))
    present = torch.tensor([True, True, False, False])
    [found] = judge(TwoExits(), [data], SCORES, 7, fill="neg_inf", present=[present])
    expected = [int((data.samples["y"] == label).sum()) for label in (0, 1)]
    assert expected[0] != expected[1]
    assert [int(counts[0]) for counts in found.exits] == expected
    assert int(found.sums["accuracy"][0]) == expected[1]


def own_accuracy(simulation, id: int, data: ClientData) -> float:
    """Personal networks use statistics of the client's data; clients that were never selected use initial networks."""
    capacity, client_state = simulation.clients.capacity(id, 0, 0), simulation.client_states.get(id)
    module = deployed(simulation, capacity)
    if client_state is not None:
        load(module, simulation.method.deploy(simulation.state, 1, capacity, client_state).params)
        norms.load(module, exact(simulation, module, [id]))
    return accuracy(module, data)


@pytest.mark.parametrize("method", ["standalone", {"name": "lg_fedavg", "size": "own"}, "helpers:PersonalHead"])
def test_accuracy_of_clients_with_networks_of_their_own(method, tmp_path):
    sections = {"clients": {"cohort": 3}, "evaluation": {"local_holdout": 0.25}}
    simulation = simulate(tiny(method=method, rounds=1, **sections), tmp_path)
    [line] = run(simulation)
    assert (
        simulation.client_states.owners == set(simulation.client_states.files)
        and len(simulation.client_states.owners) == 3
    )
    data = simulation.data
    by_hand = {id: own_accuracy(simulation, id, rows(simulation, "test", data.test[id])) for id in range(6)}
    assert dict(simulation.client_scores.tolist()) == by_hand
    held = [own_accuracy(simulation, id, rows(simulation, "train", data.local_validation[id])) for id in range(6)]
    assert line["local_validation_accuracy_mean"] == pytest.approx(np.mean(held))
    assert line["local_validation_accuracy_worst"] == min(held)
    sizes = data.local_validation.sizes
    assert line["local_validation_accuracy_samples"] == pytest.approx(np.average(held, weights=sizes))


def test_a_client_keeps_its_own_head(tmp_path):
    simulation = simulate(tiny(method="helpers:PersonalHead", rounds=3), tmp_path)
    initial = simulation.state["params"]
    run(simulation)
    assert torch.equal(simulation.state["params"]["head.weight"], initial["head.weight"])
    assert not torch.equal(simulation.state["params"]["conv1.weight"], initial["conv1.weight"])
    trained = {id for round in range(3) for id in simulation.clients.sample(0, round)}
    assert set(simulation.client_states.files) == simulation.client_states.owners == trained
    id = min(trained)
    capacity, client_state = simulation.clients.capacity(id, 0, 3), simulation.client_states.get(id)
    own = simulation.method.deploy(simulation.state, 3, capacity, client_state)
    everybodys = simulation.method.deploy(simulation.state, 3, capacity)
    assert torch.equal(own.params["head.weight"], client_state["own"]["head.weight"])
    assert not torch.equal(own.params["head.weight"], everybodys.params["head.weight"])
    assert torch.equal(own.params["conv1.weight"], everybodys.params["conv1.weight"])


@pytest.mark.parametrize("batch_size", [1, 500])
def test_what_a_client_keeps_is_read_once_an_evaluation(batch_size, tmp_path, monkeypatch):
    """Independent of the number of splits and jobs; states of other clients are not read."""
    evaluation = {"local_holdout": 0.25, "batch_size": batch_size}
    for method, owners in (("standalone", 6), ("scaffold", 0)):
        simulation = simulate(tiny(method=method, clients={"cohort": 6}, evaluation=evaluation), tmp_path / method)
        simulation.train()
        assert len(simulation.client_states.files) == 6
        read = Counter()
        original = simulation.client_states.get
        monkeypatch.setattr(simulation.client_states, "get", lambda id, o=original, r=read: r.update([id]) or o(id))
        simulation.evaluate()
        assert read == {id: 1 for id in range(owners)}


@pytest.mark.parametrize("method", ["standalone", "spafl"])
def test_personal_networks_travel_together_and_no_result_depends_on_it(method, tmp_path, monkeypatch):
    found, messages = [], []
    monkeypatch.setattr(evaluator, "SHARES", 1)
    for most in (1, 2**22):
        monkeypatch.setattr(evaluator, "MESSAGE", most)
        sections = {"clients": {"cohort": 6}, "evaluation": {"local_holdout": 0.25}}
        simulation = simulate(tiny(method=method, rounds=1, **sections), tmp_path / str(most))
        original, sent = simulation.executor.map, []

        def seen(verb, jobs, shared, original=original, sent=sent):
            sent += [job.key for job in jobs if verb == "evaluate" and "own" in job.key]
            return original(verb, jobs, shared)

        monkeypatch.setattr(simulation.executor, "map", seen)
        [line] = run(simulation)
        found.append(
            ({k: v for k, v in line.items() if "accuracy" in k or "density" in k}, simulation.client_scores.tolist())
        )
        messages.append(len(set(sent)))
    assert found[0] == found[1] and len(found[0][1]) == 6
    assert messages[0] == 6 > messages[1]


def test_what_a_client_keeps_for_its_training_alone_is_no_deployment_of_its_own(tmp_path):
    """SCAFFOLD's first round equals FedAvg's, including the accuracies of clients."""
    found = []
    for method in ("fedavg", "scaffold"):
        simulation = simulate(tiny(method={"name": method, "weight": "uniform"}, rounds=1), tmp_path / method)
        run(simulation)
        found.append(simulation.client_scores.tolist())
    assert simulation.client_states.files and not simulation.client_states.owners and found[0] == found[1]


def test_heterofls_local_and_global_by_hand(tmp_path):
    """Local: the server's network on all clients' own splits, with masked absent classes, mean over samples.
    Global: the same network on the whole test set."""
    spec = tiny(method="heterofl", partition={"labels": 2}, evaluation={"local": "server", "label_mask": "zero"})
    simulation = simulate(spec, tmp_path)
    line = run(simulation)[-1]
    module, by_hand, sizes = deployed(simulation, 0.3), {}, []
    for id in range(6):
        data = rows(simulation, "test", simulation.data.test[id])
        present = rows(simulation, "train", simulation.data.train[id]).present
        by_hand[id] = accuracy(module, data, fill="zero", present=[present])
        sizes.append(len(data))
    assert dict(simulation.client_scores.tolist()) == by_hand
    assert line["local_accuracy_samples"] == pytest.approx(np.average(list(by_hand.values()), weights=sizes))
    assert line["accuracy_server"] == line["accuracy_0.3"]


def test_local_holdout_takes_rows_out_of_training(tmp_path):
    """A fraction of each client's rows is held out from training; all other rows keep their client."""
    without, with_it = (
        simulate(tiny(evaluation={"local_holdout": share}), tmp_path / str(share)) for share in (0, 0.25)
    )
    for id in range(6):
        all, kept, held = (d[id] for d in (without.data.train, with_it.data.train, with_it.data.local_validation))
        assert sorted([*kept, *held]) == sorted(all) and len(held) == round(len(all) * 0.25)
    assert not len(without.data.local_validation.idx)
    lines = [run(simulation)[-1] for simulation in (without, with_it)]
    found = [{name for name in line if name.startswith("local_validation")} for line in lines]
    assert not found[0] and found[1] == {
        f"local_validation_{score}_{of}"
        for score in ("accuracy", "loss")
        for of in (*NAMES, "mean", "samples", "worst")
    }


def test_clients_without_test_data_are_passed_over(tmp_path):
    """6 clients and 4 test samples: 4 // 6 per client."""
    spec = tiny(data={"test_samples": 4}, partition="iid", rounds=1)
    [line] = run(simulate(spec, tmp_path))
    assert "accuracy_mean" in line and "local_accuracy_mean" not in line


def test_clients_are_not_evaluated_unless_asked(tmp_path):
    simulation = simulate(tiny(rounds=1, evaluation={"clients": False, "holdout": 0}), tmp_path)
    [line] = run(simulation)
    assert not [name for name in line if name.startswith(("local", "validation"))]
    assert len(simulation.client_scores) == 0


def test_a_sample_of_clients_is_evaluated_the_same_in_every_round_and_row(tmp_path):
    """The values of these clients equal those of an evaluation of all clients."""
    lines, scores = {}, {}
    for clients in (True, 3, 100):
        spec = tiny(method="heterofl", rounds=2, evaluation={"clients": clients, "every": 1})
        simulation = simulate(spec, tmp_path / str(clients))
        lines[clients] = run(simulation)
        scores[clients] = dict(simulation.client_scores.tolist())
    assert lines[100] == lines[True] and scores[100] == scores[True]
    drawn = np.sort(numpy_generator(0, "judged").choice(6, 3, replace=False, shuffle=False)).tolist()
    assert scores[3] == {id: scores[True][id] for id in drawn}
    assert lines[3][-1]["local_accuracy_mean"] == pytest.approx(np.mean(list(scores[3].values())))
    assert lines[3][-1]["accuracy_mean"] == lines[True][-1]["accuracy_mean"]
    of_other = Evaluation(clients=3).judged(6, seed=0)
    assert of_other.tolist() == drawn


# scores


class Margin(Score):
    """A user-defined score: mean margin of the label's logit over the largest other one."""

    better: ClassVar = "max"

    @property
    def label(self):
        return "margin"

    def counts(self, logits, y):
        own = logits.gather(1, y[:, None])
        others = logits.scatter(1, y[:, None], -torch.inf).max(1, keepdim=True).values
        return torch.stack([(own - others).sum().double(), torch.tensor(len(y), dtype=torch.float64)])

    def value(self, sums):
        total, samples = sums.tolist()
        return total / samples


def test_a_user_s_scores_stand_in_every_line(tmp_path):
    scores = [f"{__name__}:Margin", {"name": "top_k", "k": 2}, "macro_f1"]
    simulation = simulate(tiny(method="heterofl", evaluation={"scores": scores, "local_holdout": 0.2}), tmp_path)
    line = run(simulation)[-1]
    assert [score.label for score in simulation.recipe.scores] == ["accuracy", "loss", "margin", "top2", "macro_f1"]
    data, module = all_test_rows(simulation), deployed(simulation, 0.2)
    for score in (Margin(), TopK(k=2), MacroF1()):
        assert line[f"{score.label}_0.2"] == pytest.approx(accuracy(module, data, (score,)), rel=1e-6)
    assert line["margin_worst"] == min(line[f"margin_{name}"] for name in NAMES)
    for prefix in ("", "validation_", "local_", "local_validation_"):
        assert f"{prefix}margin_mean" in line and f"{prefix}top2_worst" in line
    found = simulation.experiment.metrics()
    assert {name for name in line if "margin" in name} <= found.keys()
    assert (found["local_margin_mean"].better, found["local_margin_mean"].split) == ("max", "clients")


def test_a_confusion_matrix_is_kept_and_plotted(tmp_path):
    """Also in the lines of the folder, and by capacity."""
    result = rayfl.run(tiny(method="heterofl", evaluation={"scores": ["confusion"]}), tmp_path / "run")
    matrices = result.matrices["confusion"]
    assert list(matrices) == [0.3, 0.2, 0.1]
    test = result.experiment.data.arrays().test
    with torch.no_grad():
        guesses = result.submodel(0.2)(torch.from_numpy(test["x"])).argmax(1).numpy()
    expected = np.zeros((4, 4), int)
    np.add.at(expected, (test["y"], guesses), 1)
    assert np.array_equal(matrices[0.2], expected)
    assert result.summary["confusion_0.2"] == pytest.approx((expected.diagonal() / expected.sum(1)).mean())
    assert "matrices" in result.lines[-1] and "matrices" not in result.metrics
    plot = matrix_plots([result.lines, result.lines])["confusion"]
    assert plot.rows[0] == ["0.3", 0, 0, 2 * matrices[0.3][0, 0]] and len(plot.rows) == 3 * 16
    assert "confusion" in result.plots and "confusion" not in rayfl.run(tiny(rounds=1)).plots


class Listed(Margin):
    def counts(self, logits, y):
        return super().counts(logits, y).tolist()


class Square(Margin):
    def counts(self, logits, y):
        return torch.ones(2, 3)


class Many(Margin):
    def value(self, sums):
        return [[0.5, 1.0]]


class Failing(Margin):
    def value(self, sums):
        return {}["tau"]


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (Listed, "{}.counts returns list. Allowed: a tensor [k] of numbers that add up over batches"),
        (Square, "{}.counts returns Tensor of shape [2, 3]. Allowed: a tensor [k] of numbers that add up over batches"),
        (Many, "{}.value returns 2 numbers. Allowed: one number. Hint: a method `matrix` keeps and plots more"),
        (
            Failing,
            "{} fails on 24 test samples and random outputs (KeyError: 'tau'). Allowed: `counts` that returns a tensor "
            "[k] of numbers that add up over batches, and `value` that returns a number",
        ),
    ],
)
def test_scores_that_answer_no_numbers_are_refused_before_a_run(score, expected):
    name = f"{__name__}:{score.__name__}"
    experiment = tiny(evaluation={"scores": [name]})
    assert message(load_data, experiment) == f"evaluation.scores: {expected.format(name)}"


class Single(Margin):
    """Returns a number of another library."""

    def value(self, sums):
        return np.float32(super().value(sums))


def test_a_score_may_be_a_number_of_numpy(tmp_path):
    simulation = simulate(tiny(evaluation={"scores": [f"{__name__}:Single"]}), tmp_path)
    assert {type(value) for name, value in run(simulation)[-1].items() if "margin" in name} == {float}


def test_every_metric_of_an_evaluation_is_known_before_the_run(tmp_path):
    spec = tiny(**NESTED["depthfl"] | {"method": "depthfl", "rounds": 1, "evaluation": {"local_holdout": 0.2}})
    simulation = simulate(spec, tmp_path)
    trained = simulation.train()
    assert simulation.evaluate().keys() - {"evaluated"} == spec.metrics().keys() - trained.keys()


# what is exported


def test_a_deployment_has_the_statistics_that_it_was_judged_with(tmp_path):
    """Statistics of all clients' data; of a personal network, of the client's data."""
    simulation = simulate(tiny(method="helpers:PersonalHead", rounds=1), tmp_path)
    run(simulation)
    for capacity in (0.3, 0.1):
        found, module = simulation.deployment(capacity), deployed(simulation, capacity)
        expected = {n: t for n, t in module.named_buffers() if n in found.statistics}
        assert expected.keys() == found.statistics.keys()
        for name, t in expected.items():
            assert torch.equal(t, found.statistics[name])
    id = min(simulation.client_states.owners)
    capacity = simulation.clients.capacity(id, 0, 0)
    own, everybodys = simulation.deployment(capacity, id), simulation.deployment(capacity)
    assert any(not torch.equal(t, everybodys.statistics[name]) for name, t in own.statistics.items())
    module = own.net.build()
    load(module, own.params)
    norms.load(module, own.statistics)
    data = rows(simulation, "test", simulation.data.test[id])
    assert accuracy(module, data) == simulation.client_scores["score"][id]


# densities


def test_densities_of_masked_networks_by_hand(tmp_path):
    """10 rows of 9 weights in conv1, at 64 pixels, and 39 of 80 weights in hidden: all, 6 and 26, or 3 and 13 by
    capacity; 10 - k and 39 - 3k in the personal network of client k after training."""
    simulation = simulate(tiny(method=Pruned(), rounds=1), tmp_path / "own")
    [own] = run(simulation)
    [line] = run(simulate(tiny(method=Pruned(keeps=False), rounds=1), tmp_path / "shared"))
    whole = (90 + 10) + (20 * 90 + 20) + 2 * (10 + 20) + (39 * 80 + 39) + (4 * 39 + 4)
    assert whole == Net(simulation.method.task.model, 0.3).parameters
    macs = 90 * 64 + 20 * 90 * 16 + 39 * 80 + 4 * 39
    left = {"0.3": (10, 39), "0.2": (6, 26), "0.1": (3, 13)}
    for name, (conv, hidden) in left.items():
        gone = 9 * (10 - conv), 80 * (39 - hidden)
        assert line[f"density_{name}"] == pytest.approx((whole - sum(gone)) / whole)
        assert line[f"macs_share_{name}"] == pytest.approx((macs - 64 * gone[0] - gone[1]) / macs)
    trained = set(simulation.client_states.files)
    assert len(trained) == 4
    kept = [
        (10 - k, 39 - 3 * k) if k in trained else left[f"{simulation.clients.capacity(k, 0, 0):g}"] for k in range(6)
    ]
    shares = np.array(kept) / [10, 39]
    assert own["local_density"] == pytest.approx(shares.mean())
    assert [own["local_density_conv1"], own["local_density_hidden"]] == pytest.approx(list(shares.mean(0)))
    assert densities(own) == {"local_density", "local_density_conv1", "local_density_hidden"}
    assert densities(line) == {f"{share}_{name}" for share in ("density", "macs_share") for name in NAMES}


@pytest.mark.parametrize("local_holdout", [0.25, 0])
def test_densities_without_local_test_samples(tmp_path, local_holdout):
    """Those of clients with local validation samples: 10 - k and 39 - 3k rows of client k."""
    generator, users = numpy_generator(0, "test:x"), np.arange(96) % 6
    x, y = generator.random((96, 1, 8, 8), np.float32), np.arange(96) // 6 % 4
    data = InMemory(x, y, x[:24], y[:24], users)
    partition = Users(test_fraction=0)
    evaluation = {"local_holdout": local_holdout}
    given = {"data": data, "partition": partition, "evaluation": evaluation, "clients": {"cohort": 6}}
    [line] = run(simulate(tiny(method=Pruned(), rounds=1, **given), tmp_path))
    assert ("local_validation_accuracy_mean" in line) == bool(local_holdout) and "local_accuracy_mean" not in line
    expected = {"local_density_conv1": 7.5 / 10, "local_density_hidden": 31.5 / 39}
    expected["local_density"] = sum(expected.values()) / 2
    assert {name: line[name] for name in densities(line)} == pytest.approx(expected if local_holdout else {})


def densities(line):
    return {name for name in line if "density" in name or name.startswith("macs")}


def test_dense_networks_have_no_densities(tmp_path):
    [line] = run(simulate(tiny(method="standalone", rounds=1), tmp_path))
    assert not densities(line)


# the parts


def test_spans_and_groups():
    assert spans_of(10, 4, 5) == [slice(0, 7), slice(7, 10)]  # batches of 4, 3, 3
    assert spans_of(10, 4, 1) == [slice(0, 4), slice(4, 7), slice(7, 10)]
    assert spans_of(0, 4, 5) == []
    sizes = np.array([3, 3, 5, 1, 1])
    assert grouped(np.arange(5), sizes, 6) == [(6, [0, 1]), (6, [2, 3]), (1, [4])]
    assert grouped(np.array([4, 2]), sizes, 1) == [(1, [4]), (5, [2])]


def test_clients_are_judged_at_the_capacity_of_the_last_round(tmp_path):
    simulation = simulate(tiny(method="heterofl", clients={"assignment": "dynamic"}), tmp_path)
    run(simulation)
    nets = {id: deployed(simulation, simulation.clients.capacity(id, 0, 1)) for id in range(6)}
    data = simulation.data.test
    by_hand = {id: accuracy(net, rows(simulation, "test", data[id])) for id, net in nets.items()}
    assert dict(simulation.client_scores.tolist()) == by_hand


def test_masked_classes_are_those_of_the_training_data(tmp_path, monkeypatch):
    """Every client has one test image, and images of several classes to train on."""
    seen, one_each = [], {"partition": "iid", "rounds": 1, "data": {"test_samples": 6}}
    monkeypatch.setattr(worker, "judge", lambda *given: seen.extend(given[-1] or ()) or judge(*given))
    run(simulate(tiny(**one_each, evaluation={"label_mask": "zero"}), tmp_path))
    assert len(seen) == 6 and min(int(present.sum()) for present in seen) > 1
