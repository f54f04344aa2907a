"""The bare loop in Ray's actors, the floor of a system on Ray: a server and as many client actors, which import torch.

The server sends the model and a list of clients, and gets one sum from each actor.
"""

from typing import Any

import ray
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from .turns import Turns
from .workloads import PROCESSES, WORKLOADS, Data, build, train

PACKAGES = ("ray", "torch")


def main(name: str, turns: Turns) -> None:
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    clients = [Client.remote(name) for _ in range(PROCESSES)]  # pyright: ignore
    server: Any = Server.remote(name, clients)  # pyright: ignore

    def network() -> nn.Module:
        module = build(WORKLOADS[name])
        vector_to_parameters(torch.from_numpy(ray.get(server.model.remote()).copy()), module.parameters())
        return module

    while turns.wait(network):
        ray.get(server.round.remote())
    ray.shutdown()


@ray.remote(num_cpus=0)
class Server:
    def __init__(self, name: str, clients):
        self.actors = clients
        self.workload = WORKLOADS[name]
        self.generator = torch.manual_seed(0)
        self.flat = parameters_to_vector(build(self.workload).parameters()).detach()

    def round(self) -> None:
        cohort = torch.randperm(self.workload.clients, generator=self.generator)[: self.workload.cohort].tolist()
        model = ray.put(self.flat.numpy())
        sums = [actor.train.remote(model, cohort[i::PROCESSES]) for i, actor in enumerate(self.actors)]
        self.flat = torch.from_numpy(sum(ray.get(sums)) / self.workload.cohort)

    def model(self):
        return self.flat.numpy()


@ray.remote(num_cpus=1)
class Client:
    def __init__(self, name: str):
        torch.set_num_threads(1)
        self.workload = WORKLOADS[name]
        self.data, self.module = Data(self.workload), build(self.workload)

    def train(self, model, clients: list[int]):
        flat, total = torch.from_numpy(model.copy()), torch.zeros(len(model))
        for client in clients:
            vector_to_parameters(flat.clone(), self.module.parameters())
            train(self.module, *self.data.of(client), self.workload)
            total += parameters_to_vector(self.module.parameters()).detach()
        return total.numpy()
