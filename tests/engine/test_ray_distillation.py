"""Methods of different networks on Ray: the bits of a serial run, whoever does the work and whatever happens to it."""

import pytest
import ray
from crews import everyone_has_loaded, on_ray, public_memory, resized, result
from faults import FaultyFedDF, FaultyFedGKT
from helpers import simulate

from rayfl.testing import NetworksContract

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def experiment(method, steps=5, faulty=None, options=None, **fault):
    """With few steps of a student, on several networks, six clients of ten; `fault`: of a `faulty` twin of the
    method."""
    contract = NetworksContract()
    contract.method = method
    options = {"distillation": {"steps": steps, "batch_size": 4}} if method == "feddf" else options or {}
    tiny = contract.experiment(contract.fitting[-1], options, clients={"count": 10, "cohort": 6})
    if faulty is None:
        return tiny
    given = tiny.method.model_dump(exclude={"task", "name"})
    return tiny.with_(method=faulty(**given, **fault))


def test_ray_equals_serial(actors, group, tmp_path):
    """For several actors and one: the lines, the state and what clients keep. Every method in random order is part of
    the contract."""
    names = ("feddf", "fedgkt", "fedet", "fedproto")
    serial = {name: result(simulate(experiment(name), tmp_path / name)) for name in names}
    for count in (3, 1):
        pool = resized(actors, group, count)
        for name in names:
            assert result(on_ray(pool, experiment(name), tmp_path / f"{name}-{count}")) == serial[name], (name, count)


def test_mixed_batches_of_several_clients(pool, tmp_path):
    """A server task that reads several clients."""
    spec = experiment("fedgkt", options={"order": "mixed"})
    serial = result(simulate(spec, tmp_path / "serial"))
    assert result(on_ray(pool, spec, tmp_path / "ray")) == serial


FAULTY = {"feddf": FaultyFedDF, "fedgkt": FaultyFedGKT}
MORE_THAN_A_TASK = 300
"""Steps of a student, who then learns in two lessons."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Method -> what it comes to without faults, in this process."""
    folder = tmp_path_factory.mktemp("serial")
    return {name: result(simulate(experiment(name, MORE_THAN_A_TASK), folder / name)) for name in FAULTY}


@pytest.mark.parametrize(
    ("method", "work", "fault"),
    [("feddf", "lesson", "die"), ("fedgkt", "lesson", "raise"), ("fedgkt", "client", "die")],
)
def test_a_fault_changes_no_bit(pool, tmp_path, undisturbed, method, work, fault):
    """Behind the steps of a lesson, or of a client: an actor that lives on has left them in its networks."""
    marker, clean = tmp_path / "marker", undisturbed[method]
    spec = experiment(method, MORE_THAN_A_TASK)
    client = None if work == "lesson" else min(spec.clients.sample(spec.seed, 1))
    spec = experiment(method, MORE_THAN_A_TASK, FAULTY[method], client=client, fault=fault, marker=str(marker))
    simulation = on_ray(pool, spec, tmp_path / "run")
    assert result(simulation) == clean
    assert (len(marker.read_text().split()), pool.deaths) == (1, fault == "die")
    everyone_has_loaded(pool)


def test_a_node_holds_public_samples_once(pool, tmp_path):
    """All actors read one copy; labels that nobody may see are each actor's own."""
    contract = NetworksContract()
    contract.method = "feddf"
    contract.public = {"noise": 200}
    spec = contract.experiment(contract.fitting[-1])
    on_ray(pool, spec, tmp_path)
    found = [ray.get(slot.actor.__ray_call__.remote(lambda actor: public_memory(actor.host))) for slot in pool.slots]
    assert found == [[True, False]] * 2
