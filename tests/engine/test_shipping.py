"""A package that only this process can import reaches the processes of a run."""

import pytest
from helpers import run, simulate, tiny
from test_packing import mine  # noqa: F401, a fixture

from rayfl.engine.on_ray.cluster import running
from rayfl.experiment import read_experiment


@pytest.mark.slow
@pytest.mark.ray
def test_a_package_reaches_the_server_and_the_clients(ray_cluster, mine, tmp_path):  # noqa: F811
    """With the bits of a serial run, and by its name in a file too."""
    spec = tiny(method="mine.methods:Mine", run={"executor": "ray", "actors": 1})
    with running(spec, spec.data.arrays(), tmp_path / "ray", None) as simulation:
        lines = []
        while step := simulation.step():
            lines += [{k: v for k, v in line.items() if k != "seconds"} for line in step]
    assert lines == run(simulate(spec, tmp_path / "serial"))
    assert read_experiment(spec.plain(), "again") == spec
