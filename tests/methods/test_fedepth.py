"""FeDepth: groups of blocks and means by hand, identities with FedAvg, and two rounds against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, images, one_round, run, simulate, tiny, updated, visit
from independent import batches, experiment, network, tensors, visited

from rayfl import costs
from rayfl.config import ConfigError
from rayfl.core.net import Net
from rayfl.core.seeds import stream, torch_scope
from rayfl.core.tensors import nbytes
from rayfl.methods import METHODS, Task
from rayfl.methods.depth.fedepth import groups_of
from rayfl.models import MODELS
from rayfl.training.settings import Training

FeDepth = METHODS["fedepth"]
SMALL = {"layers": 4, "heads": 2, "head_width": 4, "patch": 4}
VIT = {"name": "vit_b_16"} | SMALL


def vit(**fields):
    return MODELS["vit_b_16"](**SMALL | fields, input=(1, 8, 8), classes=4)


def bound(*capacities, model=None, training=None, **options):
    model = model or vit()
    nets = {c: Net(model) for c in sorted(capacities, reverse=True)}
    task = Task(model, Training(**training or {}), nets, max(capacities), clients=10, metric="params")
    return FeDepth(**options).bind(task)


def kept(net):
    return [int(path.split(".")[1]) for path in net.model.blocks[0] if path not in net.without]


def block_cost(net):
    """Return the parameters of a block, of the layers before the blocks and of those after them."""
    shapes = net.layout.shapes
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    first = next(i for i, name in enumerate(sizes) if name.startswith("encoder."))
    before = sum(list(sizes.values())[:first])
    blocks = sum(n for name, n in sizes.items() if name.startswith("encoder."))
    return blocks // 4, before, sum(sizes.values()) - before - blocks


def test_groups_by_hand():
    """A transformer of 4 equal blocks. With room for two blocks and the layers around them, the groups are the blocks 0
    and 1, then 2 and 3; with room for one block, each alone. All layers after a group's first block are trained."""
    whole = Net(vit())
    one, before, after = block_cost(whole)
    for room, expected in (
        (before + 2 * one + after, [[0, 1], [0, 1, 2, 3]]),
        (before + one + after, [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]),
        (before + 4 * one + after, [[0, 1, 2, 3]]),
    ):
        groups = groups_of(whole, room / whole.parameters, "params")
        assert [kept(group.net) for group in groups] == expected
    first, second = groups_of(whole, (before + 2 * one + after) / whole.parameters, "params")
    assert first.trained == tuple(first.net.layout.shapes)
    assert {name.split(".")[1] for name in second.trained if name.startswith("encoder.")} == {"2", "3"}
    assert second.trained[0].startswith("encoder.2.") and {"head.weight", "head.bias"} <= {*second.trained}
    assert "patches.weight" in first.trained and "patches.weight" not in second.trained


@pytest.mark.parametrize("metric", ["params", "flops"])
def test_groups_cost_at_most_the_capacity(metric):
    """Of a ResNet18, and no block that fits is left out."""
    whole = Net(MODELS["resnet18"](channels=8, input=(1, 8, 8), classes=4))
    full = costs.cost_of(metric)(whole)
    for capacity in (0.5, 0.2):
        groups = groups_of(whole, capacity, metric)
        assert len(groups) > 1 and all(group.cost(metric) <= capacity * full for group in groups)
        sizes = [len(group.net.without) for group in groups]
        assert sizes == sorted(sizes, reverse=True)
    assert [group.net for group in groups_of(whole, 1.0, metric)] == [whole]


def test_blocks_that_do_not_fit_are_left_out(clients_answer):
    """Partial training: the last stage of a ResNet is most of its parameters. The small client answers 1 and the large
    one 3, uniform weights: 3 in the last stage, and 2 elsewhere. Both devices run the whole network."""
    model = MODELS["resnet18"](channels=8, input=(1, 8, 8), classes=4)
    method = bound(1.0, 0.2, model=model, weight="uniform")
    assert set(method.task.nets[0.2].without) == {"stage4.0", "stage4.1"}
    state = method.init()
    clients_answer(*[1] * len(groups_of(method.task.server, 0.2, "params")), 3)
    new = one_round(method, state, (0.2, images(0)), (1.0, images(1)))["params"]
    for name, t in new.items():
        assert (t == (3 if name.startswith("stage4.") and ".residual." in name else 2)).all(), name
    for capacity in (1.0, 0.2):
        assert method.deploy(state, 1, capacity).net == method.task.server


def test_a_capacity_below_every_block_has_the_layers_outside():
    whole = Net(vit())
    one, before, after = block_cost(whole)
    [group] = groups_of(whole, (before + after + one / 2) / whole.parameters, "params")
    assert kept(group.net) == [] and group.trained == tuple(group.net.layout.shapes)


def test_a_capacity_below_the_layers_outside_blocks_is_refused():
    with pytest.raises(ConfigError, match="clients.capacities: 0.01 by params is less than the cost of the layers of"):
        bound(1.0, 0.01)


def test_capacities_are_costs():
    with pytest.raises(ConfigError, match="clients.metric: width is not valid. Allowed: params or flops"):
        experiment({"name": "fedepth"}, model=VIT)


def test_costs():
    """A client of two groups receives and sends all blocks, of 4 bytes a number. FLOPs per sample: two forward passes,
    of 2 and of 4 blocks, and two backward passes: of the first network without the gradient of the image, which is
    counted, and of the last two blocks and the head."""
    method = bound(1.0, 0.6, training={"steps": 2, "batch_size": 2, "lr": 0.1})
    state, groups = method.init(), groups_of(method.task.server, 0.6, "params")
    assert [kept(group.net) for group in groups] == [[0, 1], [0, 1, 2, 3]]
    size = 4 * sum(t.numel() for t in state["params"].values())
    assert nbytes(method.extract(state, visit(method, state, 0.6, images(0, 1)).selection)) == size
    update = updated(method, state, 0.6, images(0, 1))
    assert nbytes(update.sums) == size
    half, whole = groups[0].net.macs, groups[1].net.macs
    assert update.metrics["train_flops"] == 4 * (6 * half + 2 * whole + 4 * groups[1].cost("flops"))


def rounds(tmp_path, method, **sections):
    sections = {"model": VIT, "clients": {"capacities": [1.0, 0.6], "metric": "params"}} | sections
    simulation = simulate(tiny(method=method, rounds=2, **sections), tmp_path / str(len([*tmp_path.iterdir()])))
    run(simulation)
    return simulation


def test_together_it_is_fedavg(tmp_path):
    """Equal bit for bit, if every client has room for every block."""
    fedavg = rounds(tmp_path, {"name": "fedavg", "weight": "samples"}).state
    assert_same(rounds(tmp_path, {"name": "fedepth", "sequential": False}).state, fedavg)


def plain(net, params, trained, data, seed):
    """Return the parameters after SGD on some of them."""
    module = network(net, {name: params[name] for name in net.layout.shapes} | net.statistics()).train()
    for x, y in batches(data, seed, 2, 5):
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for name, p in module.named_parameters():
                if name in trained:
                    p -= 0.05 * p.grad
    return {name: t for name, t in tensors(module).items() if name in net.layout.shapes}


@pytest.mark.parametrize("model", [VIT, {"name": "resnet18", "channels": 4}], ids=lambda model: model["name"])
def test_two_rounds_are_plain_torch_s(model, tmp_path, float64):
    sections = {"clients": {"capacities": [1.0, 0.5], "metric": "params"}, "rounds": 3}
    sections |= {"evaluation": {"every": 9, "statistics": "batch"}}
    simulation = simulate(experiment({"name": "fedepth"}, model=model, **sections), tmp_path)
    params, server = simulation.state["params"], simulation.method.task.server
    seen = set()
    for round in range(2):
        totals = {name: torch.zeros_like(t) for name, t in params.items()}
        weights = dict.fromkeys(params, 0)
        for client in visited(simulation, round):
            capacity = simulation.clients.capacity(client.id, simulation.seed, round)
            own, groups = dict(params), groups_of(server, capacity, "params")
            seen.add(len(groups))
            for group in groups:
                own |= plain(group.net, own, group.trained, client.data, client.seed)
            for name in client.net.layout.shapes:
                totals[name] += len(client.data) * own[name]
                weights[name] += len(client.data)
        params = {name: t / weights[name] if weights[name] else params[name] for name, t in totals.items()}
        simulation.train()
        simulation.round += 1
    assert len(seen) > 1
    found = simulation.state["params"]
    assert found.keys() == params.keys() and found["head.weight"].dtype == torch.float64
    for name, t in params.items():
        torch.testing.assert_close(found[name], t, rtol=1e-9, atol=1e-11)


def test_two_rounds_with_peers_are_plain_torch_s(tmp_path, float64):
    """Clients with the whole network train another one beside it, which they keep."""
    sections = {"model": VIT, "clients": {"capacities": [1.0], "count": 4, "cohort": 3, "metric": "params"}}
    sections |= {"evaluation": {"every": 9}, "rounds": 3}
    simulation = simulate(experiment({"name": "fedepth", "distill": 0.7}, **sections), tmp_path)
    params, server, peers = simulation.state["params"], simulation.method.task.server, {}
    for round in range(2):
        totals, weight = {name: torch.zeros_like(t) for name, t in params.items()}, 0
        for client in visited(simulation, round):
            with torch_scope(stream(simulation.seed, "init", client.id)):
                peers.setdefault(client.id, server.build())
            module, peer = network(server, params), peers[client.id]
            for x, labels in batches(client.data, client.seed, 2, 5):
                logits = [one(x) for one in (module, peer)]
                for one, mine, other in ((module, *logits), (peer, *logits[::-1])):
                    p, q = other.detach().softmax(1), mine.log_softmax(1)
                    kl = (p * (p.log() - q)).sum(1).mean()
                    one.zero_grad()
                    (F.cross_entropy(mine, labels) + 0.7 * kl).backward()
                with torch.no_grad():
                    for p in [*module.parameters(), *peer.parameters()]:
                        p -= 0.05 * p.grad
            for name, t in tensors(module).items():
                totals[name] += len(client.data) * t
            weight += len(client.data)
        params = {name: t / weight for name, t in totals.items()}
        simulation.train()
        simulation.round += 1
    for name, t in params.items():
        torch.testing.assert_close(simulation.state["params"][name], t, rtol=1e-9, atol=1e-11)
    for client, peer in peers.items():
        found = simulation.client_states.get(client)["peer"]
        for name, t in peer.named_parameters():
            torch.testing.assert_close(found[name], t.detach(), rtol=1e-9, atol=1e-11)


def test_a_peer_of_weight_0_changes_nothing():
    """Equal bit for bit: two networks side by side, without distillation."""
    training = {"steps": 2, "batch_size": 2, "lr": 0.1}
    alone, beside = (bound(1.0, distill=weight, training=training) for weight in (0.0, 1e-300))
    state = alone.init()
    one, two = (updated(method, state, 1.0, images(0, 1, 2)) for method in (alone, beside))
    assert_same(one.sums, two.sums)
    assert one.client_states == {} and {*two.client_states[0]} == {"peer"}
    assert two.metrics["train_flops"] == 2 * costs.training_flops(alone.task.server, 3)


def test_a_client_that_leaves_blocks_out_has_no_peer(tmp_path):
    """Also with a single group, and if its capacity changes."""
    sections = {"data": {"shape": [1, 8, 8]}, "model": {"name": "resnet18", "channels": 8}, "rounds": 4}
    clients = {"count": 6, "cohort": 6, "capacities": [1.0, 0.3], "metric": "params"}
    few = tiny(method={"name": "fedepth", "distill": 1.0}, clients=clients | {"weights": [0, 1]}, **sections)
    [group] = groups_of(few.bound().task.server, 0.3, "params")
    assert group.net.without
    simulation = simulate(few, tmp_path / "few")
    run(simulation)
    assert all(not simulation.client_states.get(id) for id in range(6))
    mixed = tiny(method={"name": "fedepth", "distill": 1.0}, clients=clients | {"assignment": "dynamic"}, **sections)
    lines = run(simulation := simulate(mixed, tmp_path / "mixed"))
    assert len(lines) == 4 and any(simulation.client_states.get(id) for id in range(6))


GPT2 = {"name": "gpt2", "hidden": 16, "heads": 2, "layers": 2, "positions": 16}
WORDS = {"name": "synthetic_text", "task": "next_token"}


def test_distillation_of_language_models_is_by_token(tmp_path):
    """Without padding: the sum of the divergences of all tokens over their number."""
    clients = {"count": 2, "cohort": 2, "capacities": [1.0], "metric": "params"}
    sections = {"model": GPT2, "data": WORDS, "partition": "iid", "clients": clients}
    simulation = simulate(tiny(method={"name": "fedepth", "distill": 0.7}, **sections), tmp_path)
    one = next(iter(visited(simulation, 0)))
    _, labels = next(batches(one.data, one.seed, 1, 4))
    counted = labels >= 0
    assert counted.any() and labels.dim() == 2
    y, z = (torch.randn(*labels.shape, one.data.goal.classes, generator=torch.manual_seed(i)) for i in (1, 2))
    p, q = y[counted].log_softmax(1), z[counted].log_softmax(1)
    kl = (q.exp() * (q - p)).sum(1).mean() + (p.exp() * (p - q)).sum(1).mean()
    labelled = sum(F.cross_entropy(logits[counted], labels[counted]) for logits in (y, z))
    found = simulation.method.mutual(one)((y, z), labels)
    torch.testing.assert_close(found, labelled + 0.7 * kl, rtol=1e-5, atol=1e-6)


def test_a_tied_output_layer_is_in_every_group():
    """It costs multiply-adds, and it comes after the blocks, though its weight is that of the embedding."""
    clients = {"count": 2, "cohort": 2, "capacities": [1.0, 0.72], "metric": "flops"}
    experiment = tiny(method="fedepth", model=GPT2, data=WORDS, partition="iid", clients=clients)
    whole = experiment.bound().task.server
    [everything] = groups_of(whole, 1.0, "flops")
    assert everything.cost("flops") == whole.macs
    groups = groups_of(whole, 0.72, "flops")
    assert len(groups) == 2
    for group in groups:
        assert "transformer.wte.weight" in group.trained and group.cost("flops") <= 0.72 * whole.macs
    assert groups[1].trained[1].startswith("transformer.h.1.")
