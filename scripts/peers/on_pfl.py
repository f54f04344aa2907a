"""pfl: a script for each of two processes, which train their shares of the cohort and all-reduce the sums.

pfl draws no new order of a client's samples in every round. Its first round evaluates what it trains; the network here
has no metric that costs anything.
"""
# pyright: reportMissingImports=false

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .turns import Turns
from .workloads import LR, PROCESSES, WORKLOADS, Data, Workload, build

PACKAGES = ("pfl", "torch")


def main(name: str, turns: Turns) -> None:
    """The first process: it starts the others, and hands them the turns that it gets."""
    ports = [_free_port() for _ in range(PROCESSES)]
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join(f"localhost:{port}" for port in ports)
    os.environ["PFL_PYTORCH_DEVICE"] = "cpu"
    others = [
        subprocess.Popen(
            [sys.executable, "-m", "peers.on_pfl", name],
            env=os.environ | {"PFL_WORKER_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
        )
        for rank in range(1, PROCESSES)
    ]
    os.environ["PFL_WORKER_RANK"] = "0"
    run(WORKLOADS[name], lambda module: _told(turns.wait(lambda: module)))
    for process in others:
        process.wait()


def run(workload: Workload, go: Callable[[nn.Module], bool]) -> None:
    """Rounds for as long as `go` says so."""
    # pfl joins the other processes when it is imported
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = build(workload)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self(x), y)

        def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict:
            return {"samples": Weighted(len(y), 1)}

    class Wait(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            return not go(module), Metrics()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, module = Data(workload), Net()
    users = FederatedDataset(
        lambda client: Dataset(data.of(client), user_id=client),
        get_user_sampler("minimize_reuse", list(range(workload.clients))),
    )
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    if go(module):
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=10**6,
                evaluation_frequency=10**6,
                train_cohort_size=workload.cohort,
                val_cohort_size=0,
            ),
            SimulatedBackend(users, users),
            model,
            NNTrainHyperParams(
                local_num_epochs=workload.epochs, local_learning_rate=LR, local_batch_size=workload.batch
            ),
            callbacks=[Wait()],
        )


def _told(go: bool = False) -> bool:
    """Broadcast the message of the first process."""
    flag = torch.tensor([int(go)])
    torch.distributed.broadcast(flag, 0)
    return bool(flag)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    run(WORKLOADS[sys.argv[1]], lambda module: _told())
