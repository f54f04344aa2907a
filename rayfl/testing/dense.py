"""Further contract tests of methods whose clients train narrow dense networks."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import SkipTest

import torch

from rayfl.core.axes import segments
from rayfl.core.norms import fresh
from rayfl.core.submodel import Slice
from rayfl.core.tensors import Params
from rayfl.engine.simulation import Simulation
from rayfl.experiment import Experiment
from rayfl.methods.base import Client, Visit
from rayfl.methods.dense import Dense
from rayfl.testing.methods import CAPACITIES, MethodContract, rows_of
from rayfl.testing.models import normless
from rayfl.testing.tiny import model_of, simulate, spread


class DenseContract(MethodContract):
    """Tests of a method that extends `Dense`. A subclass sets `method`."""

    def narrow(self, model: Any, options: Any = (), **sections: Any) -> Experiment:
        """Return an experiment where each client has one narrow network."""
        own_size = {"size": "own"} if "size" in type(self.given()).model_fields else {}
        return self.experiment(model, own_size | dict(self.contract.plain) | dict(options), **sections)

    def test_a_narrow_network_has_the_positions_of_its_axes(self, model: Any) -> None:
        method = self.narrow(model).bound()
        state = method.init()
        for capacity in CAPACITIES:
            selection = method.select(state, Client(0, capacity, 5))
            assert isinstance(selection, Slice)
            for name, t in selection.cover(state["params"]).items():
                assert torch.equal(t.bool(), held_by_hand(selection, name, t.shape)), name

    def test_a_round_counts_the_costs_of_narrow_networks(self, model: Any, tmp_path: Path) -> None:
        simulation = simulate(self.narrow(model), tmp_path)
        expected = Counter(bytes_down=0, bytes_up=0, train_flops=0)
        for selection, client in holders(simulation):
            expected += self.costs(simulation, selection, client)
        line = simulation.train()
        found = {name: line[name] for name in expected}
        assert found == dict(expected), (
            f"a round counts {found}, and its clients' networks cost {dict(expected)}. A method's `contract` declares "
            "how many numbers a client receives and sends (`traffic`)"
        )

    def costs(self, simulation: Simulation, selection: Slice, client: Client) -> Counter:
        """Return a client's costs per round, computed from its network."""
        method, net = simulation.method, selection.net
        assert isinstance(method, Dense)
        module = net.blank()
        shapes, statistics = {n: p.shape for n, p in module.named_parameters()}, fresh(module)
        payload = method.extract(simulation.state, selection)
        sent = {n: t.shape for group in payload.values() for n, t in group.items()}
        extra = sum(math.prod(sent.pop(n)) for n in list(sent) if n in statistics)
        foreign = {name: tuple(shape) for name, shape in sent.items() if shapes.get(name) != shape}
        assert not foreign, (
            f"the payload has tensors that are not of the client's network: {foreign}. Use `MethodContract`, which "
            "does not count them"
        )
        given = payload["params"] | payload.get(method.own(net), {})
        held = selection.part_layout.dims.keys() - statistics.keys()
        assert {n: t.shape for n, t in given.items() if n in shapes} == {n: shapes[n] for n in held}
        assert net.parameters == sum(shape.numel() for shape in shapes.values() if shape)
        size = sum(shape.numel() for shape in shapes.values())
        of_layers = {n for names in net.layers.values() for n in names}
        vectors = [n for n, shape in shapes.items() if len(shape) == 1 and n not in of_layers]
        counted = vectors if self.contract.counted == "norms" else net.layout.classifier
        down, up = self.contract.traffic(size, sum(shapes[n].numel() for n in counted))
        samples = min(10, len(simulation.data.train[client.id]))
        frozen = {name for name, _ in module.named_buffers()}
        idle = sum(macs for path, macs in net.layer_macs.items() if f"{path}.weight" in frozen)
        flops = samples * (6 * net.macs - 2 * idle)
        return Counter(bytes_down=4 * (down + extra), bytes_up=4 * (up + extra), train_flops=flops)

    def test_sliced_training_is_masked_full_width_training(self, model: Any, tmp_path: Path) -> None:
        """A narrow network trains like the server's network with zeros outside of the selection, where all gradients
        vanish. Scaler and norm are excluded, because they depend on the width."""
        network = normless(model_of(model))
        if network.exit_count > 1:
            raise SkipTest("an early exit adds to the loss of the wider network")
        experiment = self.narrow(network, {"scaler": False}, training={"lr": 0.01})
        simulation = simulate(experiment, tmp_path)
        method, params = simulation.method, simulation.state["params"]
        clients = [Client(0, capacity, 3) for capacity in (0.2, 0.3)]
        narrow, wide = (method.select(simulation.state, client) for client in clients)
        assert isinstance(narrow, Slice) and isinstance(wide, Slice)
        # the client state contains the parts of its network outside of its selection
        cut = replace(narrow, names=None)
        own = {name: t for name, t in cut.take(params).items() if name not in narrow.part_layout.dims}
        missing = wide.part_layout.dims.keys() - narrow.part_layout.dims.keys() - own.keys()

        def embedded(tensors: Params) -> Params:
            whole = spread(cut, tensors, params)
            return whole | {name: torch.zeros_like(params[name]) for name in missing - whole.keys()}

        payload = method.extract(simulation.state, narrow)
        assert isinstance(method, Dense)
        if method.own(narrow.net) in payload:
            raise SkipTest("every network has its own norms")
        groups = {name: group for name, group in payload.items() if group.keys() <= params.keys()}
        masked = {
            name: embedded(group) if name == "params" else spread(cut, group, params) for name, group in groups.items()
        }
        data, answers = rows_of(simulation, 0), []
        for sent, selection, kept in ((payload, narrow, own), (masked, wide, spread(cut, own, params))):
            visit = Visit(clients[0], selection, data, {"own": kept} if own else None, 9)
            update = method.local_update(sent, visit)
            answers.append(update.sums.get("params", {}) | cast(Params, update.client_states.get(0, {}).get("own", {})))
        sliced, full = answers
        there = {name: t.clone() for name, t in cut.take(full).items()}
        cut.put(there, full, alpha=-1.0)
        for name, expected in sliced.items():
            torch.testing.assert_close(there[name], expected, rtol=1e-4, atol=1e-6)
            assert not full[name].any(), f"{name}: trained outside of the selection"


def held_by_hand(selection: Slice, name: str, shape: torch.Size) -> torch.Tensor:
    """Return the selected part of a tensor, from the definition of its axes."""
    if name not in selection.part_layout.dims:
        return torch.zeros(shape, dtype=torch.bool)
    held = torch.ones(shape, dtype=torch.bool)
    for d, dim in enumerate(selection.whole_layout.dims[name]):
        along = torch.ones(shape[d], dtype=torch.bool)
        for start, axis in segments(dim):
            if not axis.is_fixed:
                part = torch.zeros(axis.groups, axis.size, axis.copies, dtype=torch.bool)
                part[:, list(selection.positions[axis.name].positions)] = True
                along[start : start + axis.length] = part.flatten()
        held &= along.view([-1 if i == d else 1 for i in range(len(shape))])
    return held


def holders(simulation: Simulation) -> Iterator[tuple[Slice, Client]]:
    """Yield the next round's clients, each with its selection."""
    for selection, clients in simulation.cohort().values():
        assert isinstance(selection, Slice)
        for client in clients:
            yield selection, client
