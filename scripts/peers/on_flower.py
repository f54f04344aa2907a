"""Flower's simulation engine: an app as its quickstart for PyTorch writes it, on two actors.

Flower has no HeteroFL of its own; its baseline cuts a client's part on the server, and the client builds and trains the
narrow network. So does the strategy here.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Iterable
from functools import lru_cache

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from .turns import Turns
from .workloads import PROCESSES, WORKLOADS, Data, Workload, build, train

PACKAGES = ("flwr", "ray", "torch")


class Closed(Exception):
    """The bench asks for no further round."""


def main(name: str, turns: Turns) -> None:
    workload = WORKLOADS[name]
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        def after_round(server_round: int, arrays: ArrayRecord) -> None:
            if not turns.wait(lambda: loaded(workload, arrays)):
                raise Closed

        strategy = Whole if workload.is_equal else HeteroFL
        try:
            strategy(
                fraction_train=workload.cohort / workload.clients,
                fraction_evaluate=0.0,
                min_available_nodes=workload.clients,
            ).start(
                grid=grid,
                initial_arrays=ArrayRecord(build(workload).state_dict()),
                num_rounds=10**6,
                train_config=ConfigRecord({"workload": name}),
                evaluate_fn=after_round,
            )
        except Closed:
            pass

    cpus = {"init_args": {"num_cpus": PROCESSES}, "client_resources": {"num_cpus": 1, "num_gpus": 0}}
    run_simulation(server, client, num_supernodes=workload.clients, backend_config=cpus)


class Whole(FedAvg):
    """FedAvg that ends where Flower's own goes on: when a client failed."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return super().aggregate_train(server_round, answered(replies))


def answered(replies: Iterable[Message]) -> list[Message]:
    replies = list(replies)
    if not replies or any(reply.has_error() for reply in replies):
        raise RuntimeError(f"clients failed: {[reply.error.reason for reply in replies if reply.has_error()]}")
    return replies


def loaded(workload: Workload, arrays: ArrayRecord, width: float = 1.0) -> nn.Module:
    module = build(workload, width)
    module.load_state_dict(arrays.to_torch_state_dict())
    return module


# in the actors

client = ClientApp()


@lru_cache(maxsize=1)
def data_of(name: str) -> Data:
    torch.set_num_threads(1)
    return Data(WORKLOADS[name])


@client.train()
def local_update(message: Message, context: Context) -> Message:
    config = message.content["config"]
    workload = WORKLOADS[config["workload"]]
    x, y = data_of(config["workload"]).of(context.node_config["partition-id"])
    module = loaded(workload, message.content["arrays"], config.get("width", 1.0))
    train(module, x, y, workload)
    answer = {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(answer), reply_to=message)


# HeteroFL


class HeteroFL(FedAvg):
    """Every node gets, trains and answers the first channels of every layer."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.whole = arrays.to_torch_state_dict()
        workload = WORKLOADS[config["workload"]]
        widths = workload.widths
        nodes = sorted(grid.get_node_ids())
        messages = []
        for i, node in enumerate(nodes):
            width = widths[i * len(widths) // len(nodes)]
            part = {name: self.whole[name][_first(t)] for name, t in build(workload, width).state_dict().items()}
            content = {"arrays": ArrayRecord(part), "config": ConfigRecord({**config, "width": width})}
            messages.append(Message(RecordDict(content), dst_node_id=node, message_type=MessageType.TRAIN))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        sums = {name: torch.zeros_like(t) for name, t in self.whole.items()}
        counts = {name: torch.zeros_like(t) for name, t in self.whole.items()}
        for reply in answered(replies):
            for name, t in reply.content["arrays"].to_torch_state_dict().items():
                sums[name][_first(t)] += t
                counts[name][_first(t)] += 1
        mean = {name: torch.where(n > 0, sums[name] / n, self.whole[name]) for name, n in counts.items()}
        return ArrayRecord(mean), None


def _first(part: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(length) for length in part.shape)
