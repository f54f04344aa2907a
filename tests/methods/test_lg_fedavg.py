"""LG-FedAvg: averaged and personal layers, the authors' two splits, and the initial FedAvg rounds."""

import pytest
import torch
from helpers import assert_same, bound, client_data, folded, one_round, run, simulate, tiny, visit

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.net import Net
from rayfl.core.tensors import nbytes
from rayfl.methods import METHODS, Client, Task
from rayfl.models import MODELS
from rayfl.training.settings import Training

LGFedAvg = METHODS["lg_fedavg"]

HIDDEN, HEAD = ["hidden0.weight", "hidden0.bias"], ["head.weight", "head.bias"]


def perceptron(*capacities, **fields):
    return bound(LGFedAvg(**({"shared": ["hidden0"]} | fields)), *(capacities or [1.0]), hidden=(2,), lr=0.5)


def updated(method, state, data, id=0, client_state=None):
    """Return the selection and the update of client `id` in round 0."""
    work = visit(method, state, 1.0, data, id=id, seed=id, client_state=client_state)
    return work.selection, method.local_update(method.extract(state, work.selection), work)


def stepped(method, state, *answers):
    return method.step(state, 0, folded(state, *answers))


def on(name, **fields):
    net = Net(MODELS[name]())
    return LGFedAvg(**fields).bind(Task(net.model, Training(), {1.0: net}, 1.0, clients=1))


@pytest.mark.parametrize(
    ("model", "shared", "travel", "all_"),
    [("liang_mlp", ["hidden2", "hidden3", "head"], 99_978, 633_226), ("liang_cnn", ["conv1", "conv2"], 2_872, 64_102)],
)
def test_the_authors_splits(model, shared, travel, all_):
    method = on(model, shared=shared)
    state = method.init()
    payload = method.extract(state, method.select(state, Client(0, 1.0, 0)))
    counts = {group: sum(t.numel() for t in params.values()) for group, params in payload.items()}
    assert counts == {"params": travel, "start": all_ - travel}


def test_shared_layers_are_averaged_and_the_others_kept(clients_answer):
    """Two clients return 3 and 1: the shared layers become 2, and their own layers stay 3 and 1."""
    method = perceptron()
    state, data = method.init(), client_data(0, 1)
    clients_answer(3, 1)
    updates = [updated(method, state, data, id) for id in (0, 1)]
    new = stepped(method, state, *updates)
    assert all((new["params"][name] == 2).all() for name in HIDDEN)
    assert all(torch.equal(new["params"][name], state["params"][name]) for name in HEAD)
    for id, (_, update) in enumerate(updates):
        [(owner, client_state)] = update.client_states.items()
        assert owner == id and list(client_state) == ["own"]
        kept = client_state["own"]
        assert list(kept) == HEAD and all((t == 3 - 2 * id).all() for t in kept.values())
        assert list(update.sums["params"]) == HIDDEN


def test_absent_clients_use_the_new_shared_layers_and_their_own(clients_answer):
    """Client 5 took part in round 0, and not in round 1."""
    method = perceptron()
    state, data = method.init(), client_data(0, 1)
    clients_answer(7, 3)
    first = updated(method, state, data, id=5)
    state, client_state = stepped(method, state, first), first[1].client_states[5]
    before = method.deploy(state, 1, 1.0, client_state).params
    state = one_round(method, state, (1.0, data), round=1)
    after = method.deploy(state, 2, 1.0, client_state).params
    assert all((before[name] == 7).all() and (after[name] == 3).all() for name in HIDDEN)
    assert all((before[name] == 7).all() and (after[name] == 7).all() for name in HEAD)
    everybodys = method.deploy(state, 2, 1.0)
    assert not everybodys.is_start
    assert_same({n: everybodys.params[n] for n in HEAD}, {n: method.init()["params"][n] for n in HEAD})


def test_all_layers_train_from_own_and_received_layers():
    """One manual step of a client of weight 3: its client state is not weighted."""
    method = perceptron(weight="samples")
    state, data = method.init(), client_data(0, 1, 2)
    client_state = {"own": {name: torch.full_like(state["params"][name], 0.25) for name in HEAD}}
    _, update = updated(method, state, data, client_state=client_state)
    module = method.task.server.build()
    module.load_state_dict(state["params"] | client_state["own"])
    [(x, y)] = data.in_order(3)
    torch.nn.functional.cross_entropy(module(x), y).backward()
    for name, parameter in module.named_parameters():
        expected = parameter.detach() - 0.5 * parameter.grad
        got = update.client_states[0]["own"][name] if name in HEAD else update.sums["params"][name] / 3
        torch.testing.assert_close(got, expected)
    assert update.weight == 3


def test_only_clients_without_own_layers_receive_all_layers():
    method = perceptron()
    state, data = method.init(), client_data(0, 1)
    _, first = updated(method, state, data)
    _, second = updated(method, state, data, client_state=first.client_states[0])
    size = {names[0]: nbytes({n: state["params"][n] for n in names}) for names in (HIDDEN, HEAD)}
    assert first.metrics["bytes_down"] == sum(size.values())
    assert second.metrics["bytes_down"] == size["hidden0.weight"] == nbytes(second.sums)


def test_label_rows_do_not_affect_an_own_head():
    method = perceptron(label_rows="present")
    state = method.init()
    selection, update = updated(method, state, client_data(0, 1))
    assert not update.row_weights and (update.client_states[0]["own"]["head.weight"] != 0).all()
    new = stepped(method, state, (selection, update))
    assert torch.equal(new["params"]["head.weight"], state["params"]["head.weight"])


def test_warmup_is_fedavg(tmp_path):
    """Equal bit for bit, without client states; the next round starts from the trained network."""
    fedavg = simulate(tiny(rounds=3), tmp_path / "fedavg")
    method = {"name": "lg_fedavg", "shared": ["conv1", "norm1"], "warmup": 2, "weight": "samples"}
    lg = simulate(tiny(rounds=3, method=method), tmp_path / "lg")
    assert run(fedavg, 2) == run(lg, 2)
    assert_same(lg.state, fedavg.state)
    assert not lg.client_states.files
    warm = lg.state["params"]
    [line] = run(lg)
    assert set(lg.client_states.files) == set(lg.clients.sample(0, 2))
    changed = {name.partition(".")[0] for name, t in lg.state["params"].items() if not torch.equal(t, warm[name])}
    assert changed == {"conv1", "norm1"}
    assert line["bytes_down"] == 4 * nbytes(warm)
    assert line["bytes_up"] == 4 * nbytes({n: t for n, t in warm.items() if n.startswith(("conv1.", "norm1."))})


def test_selections_of_warmup_and_after_it_differ():
    """Also if both have positions on the same axes."""
    method = perceptron(warmup=1)
    keys = [method.select({}, Client(0, 1.0, round)).key for round in (0, 1, 2)]
    assert keys[0] != keys[1] == keys[2]


def test_submodels_share_a_holder_mean(clients_answer):
    method = perceptron(1.0, 0.5, size="own")
    state, data = method.init(), client_data(0, 1)
    clients_answer(3, 1)
    new = one_round(method, state, (1.0, data), (0.5, data))["params"]
    assert new["hidden0.bias"].tolist() == [2, 3]
    assert torch.equal(new["head.weight"], state["params"]["head.weight"])


def test_layers_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError) as error:
        perceptron(shared=["head", "hiden0"]).check(9, Population())
    assert str(error.value) == ("method.shared: unknown layer 'hiden0'. Did you mean 'hidden0'? Allowed: head, hidden0")
    with pytest.raises(ConfigError, match="unknown layer 'hidden'. Did you mean 'hidden0'"):
        perceptron(shared=["hidden"]).check(9, Population())
    perceptron(shared=["hidden0", "head"]).check(9, Population())
    with pytest.raises(ConfigError):
        LGFedAvg(shared=[])


def test_a_run_is_longer_than_its_warmup():
    perceptron(warmup=8).check(9, Population())
    with pytest.raises(ConfigError) as error:
        perceptron(warmup=9).check(9, Population())
    assert str(error.value) == "method.warmup: 9 is not valid. Allowed: fewer than the run's 9 rounds"


def test_a_path_stands_for_the_layers_below_it():
    held = on("resnet18", shared=["stage1", "head"]).select({}, Client(0, 1.0, 0)).part_layout.dims
    assert {name.partition(".")[0] for name in held} == {"stage1", "head"} and len(held) == 4 * 3 + 2


def test_the_classifier_is_shared_by_default():
    held = on("resnet18").select({}, Client(0, 1.0, 0)).part_layout.dims
    assert list(held) == ["head.weight", "head.bias"]
