import os

import pytest
import torch
from processes import Command

# a token of this user's own clusters is no matter of the tests
os.environ["RAY_AUTH_MODE"] = "disabled"


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The number of threads changes the last bits of a result."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_cluster():
    """One local Ray for all tests that run in this process: starting it takes seconds."""
    import ray

    import rayfl.executors  # noqa: F401, its environment comes before ray

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
