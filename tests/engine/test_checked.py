"""Faults of a user's method: the error names the method, the verb and the client, and the run's folder has it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import simulate, tiny
from torch.backends import mkldnn

import rayfl
from rayfl.core import params_of
from rayfl.core.net import cached_module
from rayfl.engine.checked import MethodFailed, RunFailed
from rayfl.methods import Dense
from rayfl.results.folder import RunFolder

WHERE = f"method {__name__}:Wrong, "


class Wrong(Dense):
    """Breaks the contract of one verb."""

    verb: str
    how: str

    def _or(self, verb: str, right: Any, **wrong: Any) -> Any:
        if self.verb != verb:
            return right
        if self.how == "none":
            return None
        if self.how == "raise":
            raise KeyError("on purpose")
        return wrong[self.how]()

    def init(self):
        return self._or("init", super().init(), list=lambda: {"params": [1]})

    def select(self, state, client):
        return self._or("select", super().select(state, client))

    def extract(self, state, selection):
        return self._or("extract", super().extract(state, selection))

    def local_update(self, payload, visit):
        right = self.trained(payload, visit)
        params = dict(right.sums["params"])
        name = next(iter(params))

        def given(**changes):
            return replace(right, sums={"params": params | changes})

        return self._or(
            "local_update",
            right,
            shape=lambda: given(**{name: torch.zeros(3)}),
            type=lambda: given(**{name: params[name].double()}),
            name=lambda: given(ghost=torch.zeros(3)),
            tensor=lambda: given(**{name: 3}),
            group=lambda: replace(right, sums={"params": [1]}),
            metrics=lambda: replace(right, metrics={}),
            data=lambda: payload["params"][name].data.add_(1) is None or right,
            numpy=lambda: payload["params"][name].numpy().fill(1) or right,
            threads=lambda: torch.set_num_threads(torch.get_num_threads() + 1) or right,
            mkldnn=lambda: setattr(mkldnn, "enabled", not mkldnn.enabled) or right,
            client=lambda: replace(right, client_states={99: {}}),
            flat=lambda: replace(right, client_states={visit.client.id: {"visits": 3}}),
            alias=lambda: replace(right, client_states={visit.client.id: {"own": params_of(self.cached(visit))}}),
            answer=lambda: replace(right, sums={"params": params_of(self.cached(visit))}),
            weight=lambda: replace(right, weight=-1.0),
            infinite=lambda: replace(right, weight=float("inf")),
            text=lambda: replace(right, metrics=right.metrics | {"mood": "good"}),
            own=lambda: replace(right, metrics=right.metrics | {"clients": 2}),
            sent=lambda: [t.zero_() for t in payload["params"].values()] and right,
        )

    def cached(self, visit):
        return cached_module(visit.net, visit.data.device)

    def step(self, state, round, fold):
        new = super().step(state, round, fold)
        params = new["params"]
        name = next(iter(params))
        return self._or(
            "step",
            new,
            shape=lambda: {"params": params | {name: torch.zeros(3)}},
            nan=lambda: {"params": params | {name: params[name] * float("nan")}},
        )

    def deploy(self, state, round, capacity, client_state=None):
        right = super().deploy(state, round, capacity, client_state)
        return self._or("deploy", right, params=lambda: replace(right, params={}))


@pytest.mark.parametrize(
    ("verb", "how", "expected"),
    [
        ("init", "none", "init: the state is None. Allowed: a dict of group -> name -> tensor"),
        ("init", "list", "init: the state: params is a list. Allowed: a dict of name -> tensor"),
        ("select", "none", "select, client 0: returned None. Allowed: a Selection"),
        ("extract", "none", "extract: the payload is None. Allowed: a dict of group -> name -> tensor"),
        ("local_update", "none", "local_update, client 0: returned None. Allowed: an Update"),
        ("local_update", "shape", "local_update, client 0: params/conv1.weight has shape [3]. Allowed: [10, 1, 3, 3]"),
        (
            "local_update",
            "type",
            "local_update, client 0: params/conv1.weight has type torch.float64. Allowed: torch.float32",
        ),
        (
            "local_update",
            "name",
            "local_update, client 0: params/ghost is not a tensor of the network. Allowed: conv1.b",
        ),
        ("local_update", "tensor", "local_update, client 0: sums: params/conv1.weight is a int. Allowed: a tensor"),
        ("local_update", "group", "local_update, client 0: sums: params is a list. Allowed: a dict of name -> tensor"),
        ("local_update", "metrics", "local_update, client 0: metrics lack 'train_samples'. Allowed: the metrics that"),
        ("local_update", "client", "local_update, client 0: client_states has client 99. Allowed: 0"),
        (
            "local_update",
            "flat",
            "local_update, client 0: the client's state: visits is a int. Allowed: a dict of name",
        ),
        ("local_update", "alias", "local_update, client 0: own/conv1.weight is a tensor of the cached network, which"),
        ("local_update", "answer", "local_update, client 0: params/conv1.weight is a tensor of the cached network"),
        ("local_update", "weight", "local_update, client 0: the weight is -1.0. Allowed: a finite number above 0"),
        ("local_update", "infinite", "local_update, client 0: the weight is inf. Allowed: a finite number"),
        ("local_update", "text", "local_update, client 0: the metric mood is a str. Allowed: a number"),
        ("local_update", "own", "local_update, client 0: the metric clients is rayfl's own. Allowed: another name"),
        (
            "local_update",
            "sent",
            "local_update, client 0: params/conv1.weight of the payload is changed. Allowed: a copy",
        ),
        ("local_update", "data", "local_update: params/conv1.weight of the payload is changed. Allowed: a copy. Hi"),
        ("local_update", "numpy", "local_update: params/conv1.weight of the payload is changed. Allowed: a copy. Hi"),
        ("local_update", "threads", "local_update, client 0: torch.get_num_threads() was 1 and is 2 now, which"),
        ("local_update", "mkldnn", "local_update, client 0: torch.backends.mkldnn.enabled was True and is False now"),
        ("step", "none", "step, round 1: the state is None. Allowed: a dict of group -> name -> tensor"),
        ("step", "shape", "step, round 1: params/conv1.weight has shape [3]. Allowed: [10, 1, 3, 3]"),
        ("deploy", "none", "deploy, capacity 0.3: returned None. Allowed: a Deployment"),
        ("deploy", "params", "deploy, capacity 0.3: params lack conv1.weight. Allowed: all parameters of the network"),
        *(
            (verb, "raise", f"{verb}{of}: KeyError: 'on purpose'")
            for verb, of in {
                "init": "",
                "select": ", client 0",
                "extract": "",
                "local_update": ", client 0",
                "step": ", round 1",
                "deploy": ", capacity 0.3",
            }.items()
        ),
    ],
)
def test_a_broken_verb_is_named(verb, how, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(mkldnn, "enabled", True)  # restored at the end
    clients = {"count": 1, "cohort": 1, "capacities": [0.3]}
    experiment = tiny(method=Wrong(verb=verb, how=how), clients=clients, partition="iid", model="digits_cnn", rounds=1)
    with pytest.raises(MethodFailed) as error:
        simulate(experiment, tmp_path).run_round()
    first, *more = str(error.value).splitlines()
    assert first.startswith(WHERE + expected), first
    assert bool(more) == (how == "raise")
    if more:
        assert (
            more[0] == "Traceback (most recent call last):"
            and __file__ in more[1]
            and more[-1] == "KeyError: 'on purpose'"
        )


def test_the_runs_folder_has_the_users_traceback(tmp_path):
    with pytest.raises(MethodFailed):
        rayfl.run(tiny(method=Wrong(verb="local_update", how="raise")), tmp_path)
    record = RunFolder.open(tmp_path)
    assert record.status == "failed" and "raise KeyError" in str(record.error)


@pytest.mark.parametrize("server", [{}, {"optimizer": "adam", "lr": 0.1}])
def test_a_state_that_is_not_finite_fails_the_run(server, tmp_path):
    experiment = tiny(method=Wrong(verb="step", how="nan"), server=server, rounds=1)
    name = next(iter(experiment.bound().init()["params"]))
    hint = "lower training.lr or server.lr" if server else "lower training.lr"
    with pytest.raises(RunFailed) as error:
        rayfl.run(experiment, tmp_path)
    assert str(error.value) == (
        f"round 1: the server's state is not finite after the step, in params/{name}. Hint: {hint}"
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "yogi"])
def test_a_server_rate_that_is_far_too_large_fails_the_run(optimizer, tmp_path):
    server = {"optimizer": optimizer, "lr": 1e300}
    with pytest.raises(
        RunFailed, match=r"^round 1: .* not finite after the step, in params/.*. Hint: lower training.lr or server.lr$"
    ):
        rayfl.run(tiny(method="fedavg", server=server, rounds=3, updates={"growth": 1e38}), tmp_path)
