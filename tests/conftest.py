import functools
import os
from pathlib import Path

import pytest
from processes import Command

import rayfl.engine  # noqa: F401, its environment comes before ray

pytest.register_assert_rewrite("rayfl.testing")

# a token of this user's own clusters is no matter of the tests
os.environ["RAY_AUTH_MODE"] = "disabled"


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The number of threads changes the last bits of a result."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    """Draws without an address do not depend on the tests before."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def float64():
    """Make float64 the default type of new tensors; networks of the other type are forgotten."""
    import torch

    from rayfl.core import net

    def default(dtype):
        torch.set_default_dtype(dtype)
        for cached in (net.cached_module, net._blank, net._operations):
            cached.cache_clear()

    default(torch.float64)
    yield
    default(torch.float32)


def pytest_xdist_auto_num_workers(config):
    """`pytest` alone takes a process a core, at most four; parts of the suite, named on the command line, take none."""
    return min(os.cpu_count() or 1, 4) if config.args_source == config.ArgsSource.TESTPATHS else 0


def pytest_collection_modifyitems(items):
    """Tests that need Ray come first: one process has them all, and the others take the rest meanwhile. Of them those
    with nodes of their own are first: the process stays in the Ray that the others share."""
    items.sort(key=lambda item: ("ray" not in item.keywords, "raylets" not in item.fixturenames))


def pytest_xdist_make_scheduler(config, log):
    """One process runs all tests that share a Ray; one runs all of a file that starts commands or shares fixtures."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            source = _source(config.rootpath / file)
            if "ray_cluster" in source:
                return "ray"
            return file if "mark.ray" in source or 'scope="module"' in source else nodeid

    return Scheduler(config, log)


@functools.cache
def _source(file: Path) -> str:
    return file.read_text()


@pytest.fixture(scope="session")
def ray_cluster():
    """One local Ray for all tests that run in this process: starting it takes seconds."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        # its processes find what tests are made of
        patch.setenv("PYTHONPATH", os.path.dirname(__file__), prepend=os.pathsep)
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield ray
        ray.shutdown()


@pytest.fixture
def start():
    """Starts commands; those that are left when a test has failed end with it."""
    started = []

    def command(*arguments, **options):
        started.append(Command(*arguments, **options))
        return started[-1]

    yield command
    for command in started:
        if command.process.poll() is None:
            command.kill()
            command.finish()
