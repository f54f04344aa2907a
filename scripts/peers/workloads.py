"""Workload of all systems: the same data, networks and local updates. Needs torch and numpy, not rayfl."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CLASSES, LR, PROCESSES = 10, 0.05, 2
MEAN, STD = 0.5, 0.23


@dataclass(frozen=True)
class Workload:
    """One round again and again: plain SGD on a convolutional network, all clients of one size, all threads one."""

    about: str
    clients: int = 100
    cohort: int = 10
    samples: int = 600
    """Samples of every client."""
    batch: int = 20
    epochs: int = 1
    model: str = "mcmahan_cnn"
    """By the name that it has in rayfl."""
    shape: tuple[int, int, int] = (1, 28, 28)
    widths: tuple[float, ...] = (1.0,)
    """Shares of the channels, the largest first; blocks of clients of equal length have one each."""

    @property
    def is_equal(self) -> bool:
        """Whether all clients have one network."""
        return len(self.widths) == 1


TINY = Workload(
    "1,000 of 1,000 clients x 1 step of batch 20, 53,002 parameters",
    1000,
    cohort=1000,
    samples=20,
    model="digits_cnn",
    shape=(1, 8, 8),
)
COMPUTE = Workload("10 of 100 clients x 30 steps of batch 20, 1,663,370 parameters")
WORKLOADS = {
    "compute": COMPUTE,
    "overhead": Workload(
        "50 of 1,000 clients x 5 steps of batch 10, 1,663,370 parameters", 1000, cohort=50, samples=50, batch=10
    ),
    "noop": replace(COMPUTE, about="10 of 100 clients that do nothing, 1,663,370 parameters", epochs=0),
    "tiny": TINY,
    "narrow": replace(
        TINY,
        about="500 of 1,000 clients x 5 steps of batch 20, 334 parameters (width 1/16)",
        cohort=500,
        samples=100,
        widths=(1 / 16,),
    ),
    "quarter": replace(
        TINY,
        about="500 of 1,000 clients x 5 steps of batch 20, 3,706 parameters (width 1/4)",
        cohort=500,
        samples=100,
        widths=(1 / 4,),
    ),
    "heterofl": replace(
        COMPUTE,
        about="HeteroFL a-e: 10 of 10 clients x 30 steps of batch 20, five of width 1, five of width 1/16",
        clients=10,
        widths=(1.0, 1 / 16),
    ),
}


def images(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [N, C, H, W] and labels [N], the labels in turn: a pattern a class under noise."""
    generator = np.random.default_rng(0)
    count = workload.clients * workload.samples
    patterns = generator.integers(64, size=(CLASSES, *workload.shape), dtype=np.uint8)
    x = generator.integers(192, size=(count, *workload.shape), dtype=np.uint8)
    y = np.arange(count) % CLASSES
    for label in range(CLASSES):
        x[label::CLASSES] += patterns[label]
    return x, y


class Data:
    """The images of one process."""

    def __init__(self, workload: Workload):
        self.samples = workload.samples
        self.x, self.y = (torch.from_numpy(array) for array in images(workload))

    def of(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rows(slice(client * self.samples, (client + 1) * self.samples))

    def _rows(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.x[rows].float() / 255 - MEAN) / STD, self.y[rows]

    def loss(self, module: nn.Module) -> float:
        """On the first images, to see that a system trains. A network that knows nothing has 2.30."""
        x, y = self._rows(slice(1000))
        module.eval()
        with torch.no_grad():
            return float(F.cross_entropy(module(x), y))


def build(workload: Workload, width: float | None = None) -> nn.Sequential:
    """The network with this share of its channels, by default the largest, in PyTorch's default layout."""
    width = width or workload.widths[0]
    kernel, hidden = {"mcmahan_cnn": (5, 512), "digits_cnn": (3, 128)}[workload.model]
    channels, height, _ = workload.shape
    first, second, hidden = (int(width * full) for full in (32, 64, hidden))
    return nn.Sequential(
        nn.Conv2d(channels, first, kernel, padding=kernel // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, kernel, padding=kernel // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * (height // 4) ** 2, hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )


def train(module: nn.Module, x: torch.Tensor, y: torch.Tensor, workload: Workload) -> None:
    """A client's round, as one writes it in PyTorch."""
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), LR)
    for _ in range(workload.epochs):
        for batch in torch.randperm(len(y)).split(workload.batch):
            optimizer.zero_grad()
            F.cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()


Network = Callable[[], nn.Module]
"""The global network as it is now."""
