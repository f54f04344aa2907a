"""Contract tests of methods."""

import json
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch

from rayfl.config import ConfigError, parse
from rayfl.core.fold import State, Update
from rayfl.core.net import Net
from rayfl.core.norms import is_statistic
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params, leaves
from rayfl.engine.files import checksum
from rayfl.engine.simulation import Simulation
from rayfl.engine.worker import Recipe, Worker
from rayfl.experiment import Experiment
from rayfl.exporting.submodels import as_module
from rayfl.methods import METHODS_KIND
from rayfl.methods.base import Client, Method, Visit
from rayfl.methods.contract import Contract
from rayfl.metrics import EVALUATED, label, named
from rayfl.testing.tiny import (
    Shuffled,
    assert_same,
    data_for,
    drawn_like,
    folded,
    model_of,
    run,
    scratch,
    simulate,
    split_for,
    spread,
    tiny,
)
from rayfl.training.sending import transformed
from rayfl.training.transforms import BFloat16, ErrorFeedback, TopK

FITTING: dict[str, tuple[str, ...]] = {
    "": ("digits_cnn", "resnet18"),
    "exits": ("depthfl_resnet18",),
    "blocks": ("resnet18",),
    "adapters": ("lora",),
}
"""Requirement of a method -> models that meet it."""

CAPACITIES = (0.3, 0.2, 0.1)


class MethodPromises:
    """Contract tests of all methods, base of `MethodContract` and `NetworksContract`."""

    method: Any
    """Method, as in a `method:` section: a name, a mapping with options, or an object."""
    models: Sequence[Any] = ()
    """As in a `model:` section, or names of families, for their smallest networks. Default: suitable ones of rayfl."""
    sections: dict[str, Any] = {}  # noqa: RUF012
    """Further sections of every experiment."""

    # experiments

    def given(self, **options: Any) -> Method:
        """Return the unbound method with these options."""
        method = METHODS_KIND.read(self.method, "method")
        return parse(type(method), method.model_dump(exclude={"task"}) | options, "method")

    @property
    def contract(self) -> Contract:
        return METHODS_KIND.read(self.method, "method").contract

    @property
    def fitting(self) -> Sequence[Any]:
        return self.models or FITTING[self.contract.wants]

    def experiment(self, model: Any = None, options: Any = (), **sections: Any) -> Experiment:
        """Return a tiny experiment. Default of `model`: the first of `fitting`."""
        network = model_of(self.fitting[0] if model is None else model)
        data = data_for(network, *(given["data"] for given in (self.sections, sections) if "data" in given))
        given: dict[str, Any] = {
            "method": self.given(**dict(options)),
            "model": network,
            "partition": split_for(network, data),
        }
        given |= {**self.sections, **sections, "data": data}
        given["clients"] = {**self.contract.clients, **self.sections.get("clients", {}), **sections.get("clients", {})}
        return tiny(**given)

    def with_changing_capacities(self, **sections: Any) -> Experiment:
        """Return an experiment whose capacities change in every round, if the method supports this."""
        try:
            return self.experiment(clients={"assignment": "dynamic"}, **sections)
        except ConfigError:
            return self.experiment(**sections)

    # the method

    def test_it_is_read_from_a_file(self) -> None:
        method = self.given()
        assert METHODS_KIND.read(method.model_dump(mode="json", exclude={"task"}), "method") == method
        bound = self.experiment().bound()
        assert pickle.loads(pickle.dumps(bound)) == bound

    def test_a_state_holds_tensors_and_follows_from_the_seed(self) -> None:
        state = self.experiment().bound().init()
        assert all(isinstance(t, torch.Tensor) for _, t in leaves(state)), "a state must contain only tensors"
        assert_same(state, self.experiment().bound().init())

    # a round

    def check_deployments(self, simulation: Simulation, line: dict[str, Any]) -> None:
        experiment, values = simulation.experiment, []
        score = experiment.scores[0]
        for capacity in CAPACITIES:
            deployed = simulation.method.deploy(simulation.state, 1, capacity)
            shapes = {name: p.shape for name, p in deployed.net.blank().named_parameters()}
            assert {name: t.shape for name, t in deployed.params.items()} == shapes
            example = deployed.net.model.example(2, "cpu")
            assert isinstance(as_module(deployed)(example), torch.Tensor), "an exported network has one output"
            name, judged = named(score.label, capacity), not deployed.is_start
            assert (name in line) == judged, f"capacity {capacity}: an initial network must not be evaluated"
            assert (f"density_{label(capacity)}" in line) == (judged and bool(deployed.masked))
            values += [line[name]] if judged else []
        if values:
            assert math.isclose(line[f"{score.label}_mean"], sum(values) / len(values))
            assert line[f"{score.label}_worst"] == (min(values) if score.better == "max" else max(values))
        judged_on = simulation.method.judged_on
        assert judged_on in ("test", "clients"), f"judged_on is {judged_on!r}. Allowed: test, clients"
        if judged_on == "clients":
            self.check_personal(simulation)
        judge = experiment.facts()["judge"]
        assert judge in line and judge in experiment.metrics(), f"no line has {judge}, the metric that compares runs"
        assert line[EVALUATED]

    def check_personal(self, simulation: Simulation) -> None:
        """What a client keeps of its network is in the group "own" of its state, and part of what is deployed."""
        for client in simulation.client_states.files:
            assert client in simulation.client_states.owners, f"the state of client {client} has no group 'own'"
            capacity = simulation.clients.capacity(client, simulation.seed, simulation.round - 1)
            common, personal = (
                simulation.method.deploy(simulation.method_state, simulation.round, capacity, state).params
                for state in (None, simulation.client_states.get(client))
            )
            assert any(
                personal[name].shape != t.shape or not torch.equal(personal[name], t) for name, t in common.items()
            ), f"the network deployed for client {client} does not depend on its state"

    # reproducibility

    def test_a_resumed_run_is_the_straight_run(self, tmp_path: Path) -> None:
        """State, client states and metrics are equal bit for bit, also if the jobs of up to two clients run in a random
        order, with messages in flat buffers, as on Ray."""
        straight = simulate(self.with_changing_capacities(), tmp_path / "straight")
        run(straight, 1)
        straight.save(tmp_path / "checkpoints")
        lines = run(straight)
        experiment = self.with_changing_capacities(run={"chunk": 2})
        arrays = experiment.data.arrays()

        def shuffled(recipe: Recipe) -> Shuffled:
            return Shuffled(Worker(recipe, arrays))

        resumed = simulate(experiment, tmp_path / "resumed", shuffled)
        assert resumed.restore(tmp_path / "checkpoints") == (1, [])
        assert run(resumed) == lines
        assert_equal_ends(resumed, straight)
        assert resumed.client_scores.tobytes() == straight.client_scores.tobytes()

    def test_verbs_are_pure_and_travel_by_pickle(self, tmp_path: Path) -> None:
        """A local update changes neither its payload nor the state, and is a function of its inputs."""
        simulation = simulate(self.experiment(clients={"cohort": 2}), tmp_path)
        method, state = simulation.method, simulation.state
        [(selection, [client, *_]), *_] = simulation.cohort().values()
        data = rows_of(simulation, client.id)
        payload = method.extract(state, selection)
        before = checksum({"payload": payload, "state": state})
        public = simulation.executor.worker.public  # pyright: ignore
        first = method.local_update(payload, Visit(client, selection, data, None, 9, public))
        assert checksum({"payload": payload, "state": state}) == before, "a local update changes its inputs"

        copy, copied = pickle.loads(pickle.dumps((method, selection)))
        assert (copy, copied.key) == (method, selection.key)
        second = copy.local_update(payload, Visit(client, copied, data, None, 9, public))
        for name in ("sums", "whole", "derived", "client_states"):
            one, other = ({str(k): v for k, v in getattr(update, name).items()} for update in (first, second))
            assert_same(one, other)
        assert (second.weight, second.metrics) == (first.weight, first.metrics)

        simulation.train()
        assert checksum({"payload": payload, "state": state}) == before, "a step changes the previous state"

    def test_error_feedback_loses_nothing(self, tmp_path: Path) -> None:
        """What a client sends in two rounds, and its residual after them, are the sum of its changes."""
        simulation = simulate(self.experiment(), tmp_path)
        [(selection, [client, *_]), *_] = simulation.cohort().values()
        payload = simulation.method.extract(simulation.state, selection)
        public = simulation.executor.worker.public  # pyright: ignore
        chain, residual = (ErrorFeedback(), TopK(share=0.1), BFloat16()), None
        sent, whole = [], []
        for seed in range(2):
            visit = Visit(client, selection, rows_of(simulation, client.id), None, seed, public)
            update = simulation.method.local_update(payload, visit)
            if update.products:
                raise SkipTest("clients send products")
            whole.append(changes(update, payload, selection))
            _, residual = transformed(chain, payload, update, 0, selection, residual)
            sent.append(changes(update, payload, selection))
        for path, t in leaves(residual or {}):
            if not is_statistic(path):
                total = torch.stack([one[path] for one in sent]).sum(0) + t
                torch.testing.assert_close(
                    total, torch.stack([one[path] for one in whole]).sum(0), rtol=1e-3, atol=1e-5
                )


class MethodContract(MethodPromises):
    """A subclass sets `method`, and other attributes for a method that differs from rayfl's."""

    def pytest_generate_tests(self, metafunc: Any) -> None:
        if self.contract.wants not in FITTING:
            raise TypeError(f"{type(self).__name__}: {self.method} trains different networks. Use NetworksContract")
        models = self.models_of(metafunc.function.__name__)
        of_any = self.contract.wants in ("", "adapters")
        for name, given in (("model", models), ("plain_model", models if of_any else FITTING[""])):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, given)

    def models_of(self, check: str) -> Sequence[Any]:
        """Return the models on which a test runs. Default: all of `fitting`."""
        return self.fitting

    def shared(self, state: State) -> Params:
        """Return the server's groups that are means over clients."""
        return state[self.contract.mean]

    # selections

    def test_selections_are_adjoint(self, model: Any) -> None:
        """take, put and cover are S, S^T and S^T 1."""
        method = self.experiment(model).bound()
        state = method.init()
        x = drawn_like(self.shared(state), "x")
        for capacity, round in zip(CAPACITIES, (70, 1, 0), strict=True):
            check_selection(method.select(state, Client(0, capacity, round)), x)

    def test_equal_keys_are_equal_selections(self) -> None:
        method = self.experiment().bound()
        state, found = method.init(), {}
        for round in range(12):
            for id, capacity in enumerate(CAPACITIES):
                selection = method.select(state, Client(id, capacity, round))
                cover = checksum(selection.cover(self.shared(state)))
                assert found.setdefault(selection.key, cover) == cover, f"two selections have the key {selection.key}"

    def test_the_mean_is_over_holders(self, model: Any) -> None:
        """Client k, of weight k + 1, returns (k + 1) / 4 everywhere. The weighted mean of a coordinate is over its
        holders, or over all clients, where missing values count as 0."""
        if self.contract.over == "products":
            raise SkipTest("the factors of the mean are not unique")
        if not self.contract.averages:
            raise SkipTest("the step does more than average")
        method = self.experiment(model, self.contract.plain).bound()
        state = method.init()
        selections = [method.select(state, Client(k, c, 5)) for k, c in enumerate(CAPACITIES)]
        answers = [
            {name: torch.full(t.shape, (k + 1) ** 2 / 4) for name, t in selection.take(self.shared(state)).items()}
            for k, selection in enumerate(selections)
        ]
        updates = [Update({self.contract.answers: answer}, k + 1.0) for k, answer in enumerate(answers)]
        mean, answered = self.contract.mean, self.contract.answers
        of = f"`step` of updates with the group {answered!r} alone, whose mean is the state's group {mean!r}"
        declared = "A method's `contract` declares other groups (`mean`, `answers`, `over`), or `averages=False`"
        try:
            new = self.shared(method.step(state, 5, folded(state, *zip(selections, updates, strict=True))))
        except KeyError as error:
            raise AssertionError(f"{of}: it needs {error}. {declared}") from error
        covers = [selection.cover(self.shared(state)) for selection in selections]
        for name, old in self.shared(state).items():
            held = torch.stack([cover[name].bool() for cover in covers])
            weights = torch.arange(1.0, 4).view(-1, *[1] * old.dim())
            total = (held * weights * weights / 4).sum(0)
            unheld, divisor = (old, (held * weights).sum(0)) if self.contract.over == "holders" else (old * 0, 6)
            expected = torch.where(held.any(0), total / divisor, unheld)
            torch.testing.assert_close(
                new[name], expected, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{of}: {name}: {text}\n{declared}"
            )
            assert torch.equal(new[name][~held.any(0)], unheld[~held.any(0)]), f"{name}: values without holders changed"

    # a round

    def test_a_round_changes_what_its_clients_hold(self, model: Any, tmp_path: Path) -> None:
        """The deployed networks of all capacities are evaluated, and the metric that compares runs is reported."""
        experiment = self.experiment(model, rounds=1, evaluation={"local_holdout": 0.2})
        simulation = simulate(experiment, tmp_path)
        before, covers = self.shared(simulation.state), []
        for selection, clients in simulation.cohort().values():
            covers += [selection.cover(before)] * len(clients)
        [line] = run(simulation)
        counted = [line[name] for name in ("round", "clients", "steps", "refused")]
        assert counted == [1, len(covers), 2 * len(covers), 0]
        after = self.shared(simulation.state)
        held = {name: torch.stack([cover[name] for cover in covers]).sum(0) > 0 for name in before}
        trained = any(not torch.equal(after[name], t) for name, t in before.items())
        assert trained == any(bool(h.any()) for h in held.values())
        for name, t in before.items():
            assert after[name].isfinite().all()
            if self.contract.over == "holders":
                assert torch.equal(after[name][~held[name]], t[~held[name]]), f"{name}: values without holders changed"
        assert {named(experiment.scores[0].label, "mean", of) for of in ("clients", "client_validation")} <= line.keys()
        self.check_deployments(simulation, line)

    def test_clients_that_train_nothing_change_nothing(self, tmp_path: Path) -> None:
        """The mean over holders of equal parameters leaves them unchanged, with weights by samples if the method has
        them. Integer tensors of the state may change."""
        if not self.contract.exact or self.contract.over == "all":
            raise SkipTest("the mean of equal parameters differs from them")
        idle: dict[str, Any] = {"training": {"steps": None, "epochs": 0}, "clients": {"cohort": 6}}
        try:
            experiment = self.experiment(options={"weight": "samples"}, **idle)
        except ConfigError:
            experiment = self.experiment(**idle)
        simulation = simulate(experiment, tmp_path)
        before = {name: t.clone() for name, t in leaves(simulation.state)}
        simulation.train()
        said = "of the state changes, although no client trained. A method's `contract` declares `exact=False`"
        for name, t in leaves(simulation.state):
            if t.is_floating_point():
                torch.testing.assert_close(
                    t, before[name], rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name} {said}\n{text}"
                )

    def test_at_full_capacity_it_is_fedavg(self, plain_model: Any, tmp_path: Path) -> None:
        """Bit for bit, with equal losses and weights, and one exit."""
        if self.contract.fedavg is None:
            raise SkipTest("it is not FedAvg")
        same = {"mask": "none", "label_rows": "all", "weight": "uniform"}
        options = {name: value for name, value in same.items() if name in type(self.given()).model_fields}
        experiment = self.experiment(plain_model, options | dict(self.contract.fedavg), **ABLE)
        simulation = simulate(experiment, tmp_path)
        expected = fedavg_rounds(experiment.with_(method={"name": "fedavg"} | same))
        for reference in expected[: self.contract.fedavg_rounds]:
            simulation.train()
            simulation.round += 1
            found = simulation.method.deploy(simulation.state, simulation.round, 1.0).params
            differs = [name for name in reference if not torch.equal(found[name], reference[name])]
            assert not differs, (
                f"after round {simulation.round}, {', '.join(differs[:3])} differ from FedAvg's. A method's `contract` "
                "declares options that make them equal (`fedavg`, for `fedavg_rounds`), or `fedavg=None`"
            )


# helpers


def check_selection(selection: Selection, x: Params) -> None:
    """Check <S x, y> = <x, S^T y>, S S^T = I, cover = S^T 1, and `covers`, exactly, on tensors of integers."""
    taken = selection.take(x)
    y = drawn_like(taken, "y")
    whole = {name: torch.zeros_like(t) for name, t in x.items()}
    selection.put(y, whole)
    assert sum((taken[name] * y[name]).sum() for name in taken) == sum((x[name] * whole[name]).sum() for name in x)
    assert_same(selection.take(whole), y)
    cover = selection.cover(x)
    assert_same(cover, {name: torch.zeros_like(t) for name, t in x.items()} | spread(selection, _ones(taken), x))
    assert all(selection.covers(name) == bool(t.all()) for name, t in cover.items())


def changes(update: Update, payload: dict[str, Params], selection: Selection) -> Params:
    """Return "group/name" -> change of a client's tensor, in the server's shapes; of rows that it contributes only."""
    found: Params = {}
    for group, params in (update.sums | update.whole).items():
        rows = update.row_weights if group == "params" else {}
        start = {name: payload.get(group, {}).get(name, torch.zeros_like(t)) for name, t in params.items()}
        held = {name: (rows[name] > 0).float() if name in rows else 1.0 for name in params}
        d = {name: t / update.weight - start[name] * held[name] for name, t in params.items()}
        d = selection.spread(d) if group in update.sums else d
        found |= {f"{group}/{name}": t for name, t in d.items()}
    return found


def _ones(tensors: Params) -> Params:
    return {name: torch.ones_like(t) for name, t in tensors.items()}


def assert_equal_ends(actual: Simulation, expected: Simulation) -> None:
    """Assert that the state and the client states of two runs are equal bit for bit."""
    assert_same(actual.state, expected.state)
    files = expected.client_states.files
    assert actual.client_states.files.keys() == files.keys()
    for client in files:
        assert_same(actual.client_states.get(client) or {}, expected.client_states.get(client) or {})


def rows_of(simulation: Simulation, client: int) -> Any:
    """Return a client's training data."""
    return simulation.executor.worker._rows("train", simulation.data.train[client])  # pyright: ignore


ABLE = {"clients": {"capacities": [1.0], "count": 4, "cohort": 2}, "rounds": 3, "evaluation": {"every": 5}}
"""Sections with the largest capacity for all clients."""


_FEDAVG: dict[tuple[str, Net], list[Params]] = {}


def fedavg_rounds(experiment: Experiment) -> list[Params]:
    """Return FedAvg's deployments after one and two rounds, cached per experiment."""
    key = json.dumps(experiment.result_config()), experiment.bound().task.server
    if key not in _FEDAVG:
        found = _FEDAVG[key] = []
        with scratch() as folder:
            simulation = simulate(experiment, Path(folder))
            for _ in range(2):
                simulation.train()
                simulation.round += 1
                found.append(simulation.method.deploy(simulation.state, simulation.round, 1.0).params)
    return _FEDAVG[key]
