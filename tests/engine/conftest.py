"""Client actors that the tests of a file share."""

import pytest
from crews import crew_of, resized
from ray.util.placement_group import placement_group, remove_placement_group

from rayfl.engine.on_ray.pool import RayPool

ACTORS = 3


@pytest.fixture(scope="module")
def group(ray_cluster):
    group = placement_group([{"CPU": 1}] * ACTORS)
    assert group.wait(60)
    yield group
    remove_placement_group(group)


@pytest.fixture(scope="module")
def actors(group):
    """The actors of all tests: starting one takes seconds, taking up another run does not."""
    pool = RayPool([], crew_of(group, []), [])
    yield pool
    pool.close()


@pytest.fixture
def pool(actors, group):
    return resized(actors, group, 2)
