"""A loop in JAX without a library: the clients of a process are one computation, `vmap` over clients of `scan` over
steps, compiled once.

The processes stay up, get the model by a pipe and answer one sum each. All clients have equally many samples.
"""
# pyright: reportMissingImports=false

import os
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from .crew import Crew
from .turns import Turns
from .workloads import LR, PROCESSES, WORKLOADS, Data, Workload, build

PACKAGES = ("jax", "torch")


def main(name: str, turns: Turns) -> None:
    loop = Loop(WORKLOADS[name], PROCESSES)
    while turns.wait(loop.network):
        loop.round()
    loop.crew.close()


class Loop:
    def __init__(self, workload: Workload, processes: int):
        self.workload, self.generator = workload, torch.manual_seed(0)
        self.flat = parameters_to_vector(build(workload).parameters()).detach().numpy().copy()
        self.crew = Crew(_work, [(workload, i) for i in range(processes)])

    def round(self) -> None:
        cohort = torch.randperm(self.workload.clients, generator=self.generator)[: self.workload.cohort].tolist()
        sums = self.crew.ask(lambda i: (self.flat, cohort[i :: len(self.crew.pipes)]))
        self.flat = np.sum(sums, 0) / self.workload.cohort

    def network(self) -> nn.Module:
        module = build(self.workload)
        vector_to_parameters(torch.from_numpy(self.flat.copy()), module.parameters())
        return module


def _work(pipe: Any, workload: Workload, number: int) -> None:
    """Train the clients that it is told together, and send the sum of their parameters."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    import jax
    import jax.numpy as jnp

    torch.set_num_threads(1)
    data, shapes = Data(workload), [tuple(p.shape) for p in build(workload).parameters()]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]

    def conv(x: Any, w: Any, b: Any) -> Any:
        same = w.shape[2] // 2
        y = jax.lax.conv_general_dilated(x, w, (1, 1), [(same, same)] * 2) + b[None, :, None, None]
        return jax.lax.reduce_window(jax.nn.relu(y), -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")

    def loss(flat: Any, x: Any, y: Any) -> Any:
        parts = jnp.split(flat, ends)
        w1, b1, w2, b2, w3, b3, w4, b4 = (part.reshape(s) for part, s in zip(parts, shapes, strict=True))
        h = conv(conv(x, w1, b1), w2, b2).reshape(len(x), -1)
        logits = jax.nn.relu(h @ w3.T + b3) @ w4.T + b4
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()

    def client(flat: Any, x: Any, y: Any) -> Any:
        def step(flat: Any, batch: Any) -> Any:
            return flat - LR * jax.grad(loss)(flat, *batch), None

        return jax.lax.scan(step, flat, (x, y))[0]

    clients = jax.jit(lambda flat, x, y: jax.vmap(client, (None, 0, 0))(flat, x, y).sum(0))

    def batches(client: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = data.of(client)
        order = torch.randperm(len(y))
        cut = (len(y) // workload.batch, workload.batch)
        return x[order].reshape(*cut, *x.shape[1:]).numpy(), y[order].reshape(cut).numpy()

    pipe.send("ready")
    while True:
        flat, chosen = pipe.recv()
        x, y = (np.stack(part) for part in zip(*map(batches, chosen), strict=True))
        pipe.send(np.asarray(clients(flat, x, y)))
