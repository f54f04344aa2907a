"""The bare loop: FedAvg on so many processes and nothing else.

The processes stay up, get the model through shared memory and answer one sum each.
"""

import time

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from .crew import Crew
from .turns import Turns
from .workloads import PROCESSES, WORKLOADS, Data, Workload, build, train

PACKAGES = ("torch",)


def main(name: str, turns: Turns) -> None:
    bare = Bare(WORKLOADS[name], PROCESSES)
    while turns.wait(bare.network):
        bare.round()
    bare.crew.close()


class Bare:
    def __init__(self, workload: Workload, processes: int):
        self.workload = workload
        self.generator = torch.manual_seed(0)
        self.flat = parameters_to_vector(build(workload).parameters()).detach().share_memory_()
        self.sums = torch.zeros(processes, len(self.flat)).share_memory_()
        self.crew = Crew(_work, [(workload, self.flat, total) for total in self.sums])

    def round(self) -> float:
        """Seconds."""
        started = time.perf_counter()
        cohort = torch.randperm(self.workload.clients, generator=self.generator)[: self.workload.cohort].tolist()
        self.crew.ask(lambda i: cohort[i :: len(self.sums)])
        self.flat.copy_(self.sums.sum(0).div_(self.workload.cohort))
        return time.perf_counter() - started

    def network(self) -> nn.Module:
        module = build(self.workload)
        vector_to_parameters(self.flat.clone(), module.parameters())
        return module


def _work(pipe, workload: Workload, flat: torch.Tensor, total: torch.Tensor) -> None:
    """Trains the clients that it is told, one after another in one network, and sums what comes out."""
    torch.set_num_threads(1)
    data, module = Data(workload), build(workload)
    pipe.send("ready")
    while True:
        clients = pipe.recv()
        total.zero_()
        for client in clients:
            vector_to_parameters(flat.clone(), module.parameters())
            train(module, *data.of(client), workload)
            total += parameters_to_vector(module.parameters()).detach()
        pipe.send("done")
