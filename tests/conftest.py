import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The number of threads changes the last bits of a result."""
    torch.set_num_threads(1)
