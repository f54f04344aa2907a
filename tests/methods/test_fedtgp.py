"""FedTGP: the margin by hand, two rounds against plain torch in float64, and traffic by hand."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from independent import MIX, assert_close, batches, experiment, network, tensors, visited

from rayfl.core.seeds import stream, torch_generator
from rayfl.core.tensors import Params
from rayfl.methods.distillation.fedtgp import contrast, spread
from rayfl.models.features import classifier_path, tapped
from rayfl.testing.methods import rows_of
from rayfl.testing.tiny import assert_same, run, simulate

SIZE = 6
PROJECTED = MIX | {"features": SIZE}
SERVER = {"epochs": 3, "batch_size": 4, "lr": 0.2}


def asked(**options: Any) -> Any:
    return experiment(method={"name": "fedtgp", "server": SERVER, "attraction": 0.7} | options, model=PROJECTED)


def test_the_margin_is_the_largest_of_the_smallest_distances() -> None:
    """Means 0, 3 and 10 on a line: the smallest distances are 3, 3 and 7."""
    features = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [3.0, 0.0], [10.0, 0.0]])
    assert spread(features, torch.tensor([0, 0, 1, 2])) == 7
    assert spread(features, torch.tensor([1, 1, 1, 1])) == float("inf")


def test_the_contrast_has_a_margin_and_no_nan() -> None:
    """Distances 0 + 2 and 5 of class 0: log(1 + e^(2 - 5)). A distance of 0 has a gradient of 0."""
    c = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    prototypes = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    value = contrast(c, torch.tensor([0]), prototypes, 2.0)
    torch.testing.assert_close(value, torch.tensor(-3.0, dtype=torch.float64).exp().log1p(), rtol=0, atol=1e-5)
    value.backward()
    assert prototypes.grad[0].tolist() == [0, 0] and prototypes.grad.isfinite().all()  # pyright: ignore


def test_rounds_are_plain_torch_s(float64: None, tmp_path: Path) -> None:
    simulation = simulate(asked(margin=2.5), tmp_path)
    method = simulation.method
    generator: Params = {name: t.clone() for name, t in simulation.state["generator"].items()}
    own: dict[int, Params] = {}
    prototypes = None
    for round in range(2):
        pairs: dict[tuple[int, int], torch.Tensor] = {}
        for client in visited(simulation, round):
            path, capacity = classifier_path(client.net), simulation.clients.capacity(client.id, 0, round)
            module = network(client.net, own.get(client.id) or method.initial(capacity))  # pyright: ignore
            module.train()
            with tapped(module, path) as tap:
                for x, y in batches(client.data, client.seed, 2, 5):
                    module.zero_grad()
                    loss = F.cross_entropy(module(x), y)
                    if prototypes is not None:
                        loss = loss + 0.7 * F.mse_loss(tap.features, prototypes[y])
                    loss.backward()
                    with torch.no_grad():
                        for parameter in module.parameters():
                            parameter -= 0.05 * parameter.grad  # pyright: ignore
                own[client.id] = tensors(module)
                [(x, y)] = client.data.plain(1000)
                with torch.no_grad():
                    module.eval()(x)
                pairs |= {(client.id, j): tap.features[y == j].mean(0) for j in y.unique().tolist()}
        prototypes = learn(generator, pairs, stream(0, "refine", round))
    run(simulation)
    assert_close(simulation.state["generator"], generator, exact=True)
    assert prototypes is not None
    assert_close(simulation.state["prototypes"], {str(j): g for j, g in enumerate(prototypes)}, exact=True)
    assert set(simulation.state) == {"generator", "prototypes"}
    for id, kept in own.items():
        assert_close(simulation.client_states.get(id)["own"], kept, exact=True)  # pyright: ignore


def learn(w: Params, pairs: dict[tuple[int, int], torch.Tensor], seed: int) -> torch.Tensor:
    """Train the generator `w` in place and return the prototypes."""

    def made() -> torch.Tensor:
        hidden = torch.relu(w["embeddings.weight"] @ w["hidden.weight"].T + w["hidden.bias"])
        return hidden @ w["out.weight"].T + w["out.bias"]

    keys = sorted(pairs)
    c, y = torch.stack([pairs[key] for key in keys]), torch.tensor([j for _, j in keys])
    means = {j: c[y == j].mean(0) for j in set(y.tolist())}
    margin = min(max(min(float((means[i] - means[j]).norm()) for i in means if i != j) for j in means), 2.5)
    for t in w.values():
        t.requires_grad_()
    for epoch in range(3):
        for rows in torch.randperm(len(y), generator=torch_generator(seed, "student", epoch)).split(4):
            g, loss = made(), torch.zeros(())
            for row in rows.tolist():
                apart = [(c[row] - g[i]).norm() + (margin if i == y[row] else 0) for i in range(len(g))]
                loss = loss + torch.stack([apart[int(y[row])] - a for a in apart]).logsumexp(0) / len(rows)
            slopes = torch.autograd.grad(loss, list(w.values()))
            with torch.no_grad():
                for t, slope in zip(w.values(), slopes, strict=True):
                    t -= 0.2 * slope
    for t in w.values():
        t.requires_grad_(False)
    return made()


def test_without_attraction_it_is_local_training(tmp_path: Path) -> None:
    """FedProto's clients without attraction, bit for bit."""
    one = simulate(asked(attraction=0), tmp_path / "fedtgp")
    other = simulate(experiment(method={"name": "fedproto", "attraction": 0}, model=PROJECTED), tmp_path / "fedproto")
    run(one)
    run(other)
    for id in one.client_states.owners:
        assert_same(one.client_states.get(id)["own"], other.client_states.get(id)["own"])  # pyright: ignore


def test_traffic(tmp_path: Path) -> None:
    """Up D + 1 numbers per class of the client; down nothing, then C D."""
    simulation = simulate(asked(), tmp_path)
    for round in range(2):
        clients = visited(simulation, round)
        [line] = run(simulation, 1)
        held = [len(set(rows_of(simulation, c.id).samples["y"].tolist())) for c in clients]
        assert line["bytes_up"] == 4 * (SIZE + 1) * sum(held)
        assert line["bytes_down"] == 4 * 4 * SIZE * len(clients) * round
        steps = 3 * -(-sum(held) // 4)
        assert line["server_flops"] == 6 * 4 * SIZE * (2 * SIZE * steps + 3 * sum(held))


def test_the_nearest_prototype_judges(tmp_path: Path) -> None:
    lines = []
    for predict in ("classifier", "prototypes"):
        simulation = simulate(asked(predict=predict), tmp_path / predict)
        lines.append(run(simulation)[-1])
    assert lines[0]["train_loss"] == lines[1]["train_loss"]
    assert lines[0]["local_loss_mean"] != lines[1]["local_loss_mean"]
