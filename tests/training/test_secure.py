"""Secure aggregation: fixed point by hand, masked integers that cancel, bytes, groups, refusals."""

import pytest
import torch
from helpers import run, simulate, tiny

from rayfl.config import ConfigError
from rayfl.core.fold import Update
from rayfl.core.net import Net
from rayfl.core.submodel import Mask
from rayfl.core.tensors import norm
from rayfl.engine.jobs import Broadcast, Train
from rayfl.results.summary import Facts, summary
from rayfl.testing.tiny import model_of
from rayfl.training.secure import Protection, SecureAggregation
from rayfl.training.sending import transformed

NOTHING = Mask(Net(model_of("digits_cnn"), 1.0), "whole", {})
SECTION = {"bits": 16, "limit": 1}


def secured(**sections):
    return tiny(**{"updates": {"secure_aggregation": SECTION}, "method": "heterofl"} | sections)


def test_fixed_point_by_hand():
    """Four bits of limit 1: steps of 1/8 from -7/8 to 7/8."""
    change = {"w": torch.tensor([0.3, -0.3, 0.124, 0.875, 1.0, -2.0])}
    found, overflows = SecureAggregation(bits=4, limit=1.0).encoded(change)
    assert found["w"].tolist() == [0.25, -0.25, 0.0, 0.875, 0.875, -0.875] and overflows == 2


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_sum_is_that_of_the_masked_integers(clip):
    """Five clients add masks that cancel, modulo 2^19; the server decodes their sum. One element is clamped."""
    secure, clients = SecureAggregation(**SECTION), 5
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, generator=generator)
    changes = [0.1 * torch.randn(50, generator=generator) for _ in range(clients)]
    changes[2][7] = 3.0
    step, modulus = 1 / 2**15, 2**19
    masks = torch.randint(modulus, (clients, clients, 50), generator=generator)
    total, sent = torch.zeros(50, dtype=torch.int64), torch.zeros(50, dtype=torch.float64)
    overflows = 0.0
    for k, d in enumerate(changes):
        update = Update({"params": {"w": x + d}}, 1.0)
        protection = Protection(clip, secure, clients)
        size, _ = transformed([], {"params": {"w": x}}, update, 0, NOTHING, None, protection)
        assert size == -(-50 * 19 // 8) + 2 * 32 + 13 * 32
        overflows += update.metrics["overflows"]
        answer = update.sums["params"]["w"].double()
        sent += answer if clip else answer - x.double()
        given = x + d - x
        given = given if clip is None else given / max(1.0, float(given.norm()) / clip)
        q = (given.double() / step).trunc().clamp(1 - 2**15, 2**15 - 1).long()
        mask = sum(masks[k, j] for j in range(k + 1, clients)) - sum(masks[j, k] for j in range(k))
        total = (total + q + mask) % modulus
    decoded = torch.where(total >= modulus // 2, total - modulus, total) * step
    assert overflows == (1 if clip is None else 0)
    # without a clipping norm an update is x + d in float32
    torch.testing.assert_close(sent, decoded.double(), atol=0 if clip else 1e-6, rtol=0)


def test_rounding_does_not_raise_a_norm():
    d = {"w": torch.randn(10_000, generator=torch.Generator().manual_seed(1))}
    for bits in range(2, 25):
        found, _ = SecureAggregation(bits=bits, limit=4.0).encoded(d)
        assert norm([found]) <= norm([d])


def test_bytes_by_hand():
    secure = SecureAggregation(bits=16)
    # 10 elements of 16 + 3 bits; 2 keys and 13 shares of 32 bytes; 4 x 2 of each down, and 5 bits
    assert secure.bytes_up(10, 5) == 24 + 64 + 416
    assert secure.bytes_down(5) == 8 * 64 + 1
    assert (secure.bytes_up(10, 1), secure.bytes_down(1)) == (20 + 64 + 32, 1)


def test_a_round_by_hand(tmp_path):
    """Groups are the clients of one capacity; changes are multiples of the step; bytes are those of the formula, with
    the weights of HeteroFL's classifier rows as elements."""
    simulation = simulate(secured(), tmp_path)
    secure = SecureAggregation(**SECTION)
    cohort = [(selection, clients) for selection, clients in simulation.cohort().values()]
    up = down = 0
    for selection, clients in cohort:
        payload = simulation.method.extract(simulation.state, selection)
        elements = sum(t.numel() for t in payload["params"].values())
        up += len(clients) * secure.bytes_up(elements + 4 + 4, len(clients))
        down += len(clients) * (4 * elements + selection.nbytes + secure.bytes_down(len(clients)))
        broadcast = Broadcast(payload, selection, Protection(None, secure, len(clients)))
        for client in clients:
            update = simulation.executor.worker.train(broadcast, Train([client], {})).update
            assert {name: t.numel() for name, t in update.row_weights.items()} == {"head.weight": 4, "head.bias": 4}
            for name, t in update.sums["params"].items():
                x = payload["params"][name] * update.row_weights.get(name, 1.0)
                levels = (t - x).double() * 2**15
                assert (levels - levels.round()).abs().max() < 0.01
    line = simulation.run_round()
    assert line["smallest_group"] == min(len(clients) for _, clients in cohort)
    assert (line["bytes_up"], line["bytes_down"], line["overflows"]) == (up, down, 0)


def test_methods_that_count_their_own_traffic_pay_for_keys_too(tmp_path):
    """FedPer's clients receive the other layers once, and then the averaged ones."""
    method, secure = {"name": "fedper", "weight": "uniform"}, {"secure_aggregation": SECTION}
    lines = [run(simulate(secured(method=method, updates=u), tmp_path / str(len(u)))) for u in ({}, secure)]
    clients = [line["clients"] for line in lines[0]]
    keys = [n * SecureAggregation(**SECTION).bytes_down(int(n)) for n in clients]
    assert [one["bytes_down"] - other["bytes_down"] for other, one in zip(*lines, strict=True)] == keys


def test_a_finer_step_comes_closer_to_the_run_without(tmp_path):
    plain = simulate(secured(updates={}), tmp_path / "plain")
    run(plain)

    def distance(bits):
        section = {"secure_aggregation": {"bits": bits, "limit": 1}}
        simulation = simulate(secured(updates=section), tmp_path / str(bits))
        run(simulation)
        pairs = zip(simulation.state["params"].values(), plain.state["params"].values(), strict=True)
        return max(float((one - other).abs().max()) for one, other in pairs)

    assert distance(24) < 1e-3 < distance(8)


def test_clients_with_selections_of_their_own_are_alone(tmp_path):
    lines = run(simulate(secured(method="feddropout"), tmp_path))
    assert {line["smallest_group"] for line in lines} == {1}
    facts = Facts(
        judge="accuracy_mean", capacities=(1.0,), trained=(1.0,), scores={"accuracy": "max"}, clients=6, rounds=2
    )
    assert summary([lines[0], {**lines[1], "smallest_group": 3}], facts, {})["smallest_group"] == 1


def test_a_clamped_element_is_counted(tmp_path):
    section = {"secure_aggregation": {"bits": 16, "limit": 1e-4}}
    assert all(line["overflows"] > 0 for line in run(simulate(secured(updates=section), tmp_path)))


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"method": "scaffold"}, "method scaffold is not supported, because its control variates"),
        ({"method": {"name": "fedavg", "weight": "samples"}}, "method.weight: samples gives clients unequal parts"),
        (
            {"updates": {"transforms": [{"name": "topk", "share": 0.1}], "secure_aggregation": SECTION}},
            "topk would save nothing, because a masked integer has one size",
        ),
        (
            {"system": {"mode": {"name": "buffered", "concurrency": 3, "buffer": 2}}},
            "system.mode: groups have one version of the model",
        ),
    ],
)
def test_what_cannot_be_summed_in_secret_is_refused(sections, sentence):
    with pytest.raises(ConfigError) as error:
        secured(**sections)
    assert f"updates.secure_aggregation: {sentence}" in str(error.value) and "Allowed: " in str(error.value)
