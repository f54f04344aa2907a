"""FedGen: two rounds against plain torch in float64, LG-FedAvg without generated features, and traffic by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from independent import MIX, assert_close, batches, experiment, network, tensors, visited
from torch import nn

from rayfl.config import ConfigError
from rayfl.core.seeds import stream, torch_scope
from rayfl.core.tensors import Params
from rayfl.costs import training_flops
from rayfl.methods.distillation.fedgen import sameness
from rayfl.models.features import classifier_path, tapped
from rayfl.testing.methods import rows_of
from rayfl.testing.tiny import assert_same, run, simulate

SIZE, NOISE, HIDDEN, CLASSES = 6, 3, 5, 4
PROJECTED = MIX | {"features": SIZE}
SERVER = {"steps": 4, "batch_size": 7, "lr": 0.02, "weight_decay": 0.1}
SMALL = {"name": "fedgen", "server": SERVER, "noise_size": NOISE, "hidden": HIDDEN}


def asked(**options: Any) -> Any:
    return experiment(method=SMALL | options, model=PROJECTED)


def counted(simulation: Any, clients: Any) -> torch.Tensor:
    return sum(torch.bincount(rows_of(simulation, c.id).samples["y"], minlength=CLASSES) for c in clients)  # pyright: ignore


@pytest.mark.parametrize("noise", ["normal", "uniform"])
def test_rounds_are_plain_torch_s(float64: None, tmp_path: Path, noise: str) -> None:
    """The server's teacher is the mean of the clients' logits, from one classifier each."""
    simulation = simulate(asked(generated=0.7, diversity=0.5, noise=noise, weight="samples"), tmp_path)
    method, head = simulation.method, simulation.state["head"]
    own: dict[int, Params] = {}
    generator = counts = None
    for round in range(2):
        heads, weights, clients = [], [], visited(simulation, round)
        for client in clients:
            path, capacity = classifier_path(client.net), simulation.clients.capacity(client.id, 0, round)
            start = own.get(client.id) or method.initial(capacity)  # pyright: ignore
            module = network(client.net, start | {f"{path}.{name}": t for name, t in head.items()}).train()
            with torch_scope(stream(client.seed, "dropout")):
                for x, y in batches(client.data, client.seed, 2, 5):
                    module.zero_grad()
                    loss = F.cross_entropy(module(x), y)
                    if generator is not None:
                        e, labels = drawn(noise, counts, len(y))  # pyright: ignore
                        generated = module.get_submodule(path)(generator.eval()(torch.cat([e, labels], 1)).detach())
                        loss = loss - 0.7 * (labels * generated.log_softmax(1)).sum(1).mean()
                    loss.backward()
                    with torch.no_grad():
                        for parameter in module.parameters():
                            parameter -= 0.05 * parameter.grad  # pyright: ignore
            own[client.id] = tensors(module)
            heads.append({name: own[client.id][f"{path}.{name}"] for name in head})
            weights.append(len(client.data))
        shares = torch.tensor(weights) / sum(weights)
        head = {name: sum(s * h[name] for s, h in zip(shares, heads, strict=True)) for name in head}
        counts = counted(simulation, clients)
        generator = generator or initial()
        with torch_scope(stream(stream(0, "refine", round), "student")):
            learn(generator, heads, shares, counts, noise)
    run(simulation)
    assert_close(simulation.state["head"], head, exact=True)
    assert generator is not None
    found = {"hidden": generator[0], "norm": generator[1], "out": generator[3]}
    found = {f"{name}.{key}": t for name, layer in found.items() for key, t in layer.state_dict().items()}
    found.pop("norm.num_batches_tracked")
    assert_close(simulation.state["generator"], found, exact=True)
    assert_same(simulation.state["labels"], {"counts": counts.float()})
    assert set(simulation.state) == {"head", "generator", "labels"}
    for id, kept in own.items():
        assert_close(simulation.client_states.get(id)["own"], kept, exact=True)  # pyright: ignore


def initial() -> nn.Sequential:
    with torch_scope(stream(0, "init", "generator")):
        hidden = nn.Linear(NOISE + CLASSES, HIDDEN)
        return nn.Sequential(hidden, nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, SIZE))


def drawn(noise: str, counts: torch.Tensor, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise and one-hot labels."""
    e = torch.randn(samples, NOISE) if noise == "normal" else torch.rand(samples, NOISE)
    labels = torch.multinomial(counts.float(), samples, replacement=True)
    return e, torch.eye(CLASSES)[labels]


def learn(generator: nn.Sequential, heads: list[Params], shares: Any, counts: torch.Tensor, noise: str) -> None:
    """Adam by hand, with an L2 penalty in the gradient."""
    w = list(generator.train().parameters())
    means, squares = [torch.zeros_like(t) for t in w], [torch.zeros_like(t) for t in w]
    for step in range(1, 5):
        e, labels = drawn(noise, counts, 7)
        z = generator(torch.cat([e, labels], 1))
        logits = sum(s * (z @ h["weight"].T + h["bias"]) for s, h in zip(shares, heads, strict=True))
        pairs = [((e[i] - e[j]) ** 2).mean() * (z[i] - z[j]).abs().mean() for i in range(7) for j in range(7)]
        loss = -(labels * logits.log_softmax(1)).sum(1).mean() + 0.5 * torch.exp(-sum(pairs) / 49)  # pyright: ignore
        slopes = torch.autograd.grad(loss, w)
        with torch.no_grad():
            for t, slope, m, v in zip(w, slopes, means, squares, strict=True):
                g = slope + 0.1 * t
                m += 0.1 * (g - m)
                v += 0.001 * (g * g - v)
                t -= 0.02 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)


def test_sameness_by_hand() -> None:
    """Two samples: distances 4 of the noise and 3 of the features, in two of four pairs."""
    e, z = torch.tensor([[0.0, 0.0], [2.0, 2.0]]), torch.tensor([[1.0], [4.0]])
    torch.testing.assert_close(sameness(e, z), torch.tensor(-6.0).exp())
    assert sameness(e, z.new_ones(2, 1)) == 1


def test_without_generated_features_it_is_lg_fedavg(tmp_path: Path) -> None:
    """For equal networks, bit for bit."""
    model = {"name": "digits_cnn", "norm": "none"}
    sections = {"model": model, "clients": {"capacities": [1.0]}, "evaluation": {"every": 1}}
    one = simulate(experiment(method={"name": "fedgen", "generated": 0}, **sections), tmp_path / "fedgen")
    other = simulate(experiment(method={"name": "lg_fedavg"}, **sections), tmp_path / "lg_fedavg")
    names = ("local_accuracy_mean", "local_loss_mean", "train_loss", "train_flops", "bytes_up")
    assert [[line[n] for n in names] for line in run(one)] == [[line[n] for n in names] for line in run(other)]
    path = classifier_path(one.method.task.server)
    assert_same(one.state, {"head": {n: other.state["params"][f"{path}.{n}"] for n in ("weight", "bias")}})
    for id in one.client_states.owners:
        mine, theirs = (s.client_states.get(id)["own"] for s in (one, other))  # pyright: ignore
        assert_same({n: t for n, t in mine.items() if not n.startswith(path)}, theirs)


def test_a_trained_generator_makes_features_of_its_classes(tmp_path: Path) -> None:
    """The trained generator's features get the labels they are made for; those of an untrained one do not."""
    shares = []
    for steps in (0, 300):
        server = {"steps": steps, "lr": 0.01, "weight_decay": 0}
        simulation = simulate(asked(server=server, hidden=32), tmp_path / str(steps))
        run(simulation, 1)
        state, method = simulation.state, simulation.method
        generator = method.generator(state["head"], state["generator"], torch.device("cpu")).eval()  # pyright: ignore
        y = state["labels"]["counts"].nonzero().flatten().repeat(50)
        with torch_scope(0), torch.no_grad():
            z = generator(torch.randn(len(y), NOISE), y)
        shares.append(float((F.linear(z, **state["head"]).argmax(1) == y).float().mean()))
    assert shares[0] < 0.6 and shares[1] > 0.95


def test_a_device_has_its_own_extractor_and_the_global_head(tmp_path: Path) -> None:
    simulation = simulate(asked(), tmp_path)
    run(simulation)
    for id in simulation.client_states.owners:
        capacity, kept = simulation.clients.capacity(id, 0, 0), simulation.client_states.get(id)
        deployed = simulation.method.deploy(simulation.state, 2, capacity, kept)
        path = classifier_path(deployed.net)
        assert_same({n: deployed.params[f"{path}.{n}"] for n in ("weight", "bias")}, simulation.state["head"])
        module = deployed.net.build()
        with tapped(module, path) as tap:
            module(torch.zeros(2, *simulation.experiment.data.shape))  # pyright: ignore
        assert tap.features.shape == (2, SIZE)


def test_traffic(tmp_path: Path) -> None:
    """Up the classifier and C counts. Down the classifier, then also the generator, its statistics and C counts."""
    simulation = simulate(asked(), tmp_path)
    head = CLASSES * (SIZE + 1)
    generator = HIDDEN * (NOISE + CLASSES + 1) + 4 * HIDDEN + SIZE * (HIDDEN + 1)
    macs = HIDDEN * (NOISE + CLASSES + SIZE)
    for round in range(2):
        clients = visited(simulation, round)
        [line] = run(simulation, 1)
        assert line["bytes_up"] == 4 * (head + CLASSES) * len(clients)
        assert line["bytes_down"] == 4 * (head + (generator + CLASSES) * round) * len(clients)
        assert line["server_flops"] == 4 * 7 * 6 * (macs + CLASSES * SIZE)
        samples = [min(10, len(c.data)) for c in clients]
        added = line["train_flops"] - sum(training_flops(c.net, n) for c, n in zip(clients, samples, strict=True))
        assert added == round * sum(samples) * (2 * macs + 6 * CLASSES * SIZE)


def test_requirements() -> None:
    with pytest.raises(ConfigError, match=r"16 of capacity 0.3, 128 of capacity 0.2.*Hint: set model.features"):
        experiment(method={"name": "fedgen"})
    with pytest.raises(ConfigError, match=r"steps: -1 is not valid"):
        asked(server={"steps": -1})
