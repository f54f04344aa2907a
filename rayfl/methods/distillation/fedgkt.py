"""FedGKT: clients train small networks, the server trains a large trunk on their features, with mutual distillation.

Paper: He et al., "Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge", NeurIPS 2020,
https://arxiv.org/abs/2007.14513 (Algorithm 1; code: FedML-AI/FedML, fedml_api/distributed/fedgkt).

Symbols: $f_e$ client $k$'s personal extractor and $f_c$ its personal head; $f_s$ the server's trunk, behind an
extractor of the same features; $H = f_e(x)$; $z_c$ and $z_s$ logits; $KD(t, z) = T^2 KL(softmax(t/T) || softmax(z/T))$
with the target $t$, the mean over a batch; $a$ = `alpha`.

    $f_e, f_c$    $<-$ the client's epochs of SGD on $CE(f_c(f_e(x)), y) + a KD(z_s, f_c(f_e(x)))$, no $KD$ without a
                $z_s$
    $H, z_c$      of all its samples, in evaluation mode; sent with $y$
    $f_s$         $<-$ Adam on $KD(z_c, f_s(H)) + a CE(f_s(H), y)$, `server.epochs` epochs, in each all clients of the
                round in turn (`order: clients`), or all their samples mixed
    $z_s$         $= f_s(H)$ of all their samples, in evaluation mode; sent to client $k$

Cost per round: $z_s$ down; $H$, $z_c$ and $y$ of all its samples up, 4 bytes per number; the client's training and one
more pass; on the server the training of the trunk.

Clients are evaluated, and can be exported, as $f_s(f_e(x))$ with their own $f_e$. $z_s$ is matched to samples by their
rows in the client's data, not by batches.

`order: clients` is that of Algorithm 1 and of the code: each batch has samples of one client. With skewed labels these
batches are skewed too, which is bad for batch norms and lets $f_s$ fit the last clients. `order: mixed` is ours: each
batch is drawn from the samples of all clients of the round. Fashion-MNIST, Dirichlet 0.3, 10 of 50 clients per round,
mean over all clients: round 4: 16.2 % with `clients`, 18.8 with batches of one client in random order, 31.4 with
`mixed`; round 8: 27.4 with `clients`, 46.9 with `mixed`.

The largest capacity is the server's, and no client may have it:

    model: {name: mix, networks: {"1": resnet55_gkt, "0.5": resnet8_gkt}}
    clients: {capacities: [1, 0.5], weights: [0, 1], ...}

A network has an extractor if it is an nn.Sequential whose first part is named "extractor". Clients may have several
networks; all extractors, including the server's, must have the same architecture.

Departures:
1. In the paper all clients take part in every round. Here a cohort may be smaller: the server trains on the cohort's
   features, and a client learns from the z_s of its last visit.
2. H is counted but not sent: f_e does not change while the server works, so H is recomputed there from the client
   state, in place of storing 64 KiB per image. Traffic is that of FedGKT, H, z_c and y up and z_s down at 4 bytes per
   number, without the features of test images, which the code sends to measure accuracy. `updates.transforms` apply to
   z_c alone, and the bytes up are then those of z_c.
3. H, z_c and z_s are of images without augmentation; only a client's steps augment them. In the code all are augmented.
4. The code matches z_s by batch numbers although its loader shuffles, so they belong to other images. Its z_s are
   computed in the last epoch's steps, in training mode, before each step. Here they are computed in a separate pass.
5. The code distils on the server only with `whether_distill_on_the_server` (default 0). Without it, the server's loss
   is CE without a, there and here.
6. A client's optimizer is new in every visit (`training`); the code's keeps its state. The server's keeps it here too:
   Adam with AMSGrad. The code's reduction of the rate on a plateau of test accuracy is not implemented.
7. Batches of the server are drawn in every epoch, also with `order: clients`; the code repeats those of the client.
8. In the code's experiments all extractors start from one network trained on all data; here from one random network.
9. Accuracy is on every client's own test split; in the paper on the whole test set.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import nn

from rayfl import costs
from rayfl.clients import Population
from rayfl.config import Config, ConfigError
from rayfl.core import norms
from rayfl.core.fold import ClientState, Fold, State, Update
from rayfl.core.net import Net, cached_module, load, params_of
from rayfl.core.seeds import stream, torch_generator, torch_scope
from rayfl.core.submodel import Selection
from rayfl.core.tensors import Params, below, copied
from rayfl.data.samples import ClientData
from rayfl.methods.base import Deployment, Payload, ServerTask, ServerTaskContext, ServerTaskResult, Visit
from rayfl.methods.contract import Contract
from rayfl.methods.distillation.base import Unequal
from rayfl.methods.sizes import fixed_capacities
from rayfl.metrics import label
from rayfl.training.distillation import load_optimizer_state, optimizer_state, predicted
from rayfl.training.settings import Loss, divergence

EXTRACTOR = "extractor"

CLIENTS = "client logits"
"""z_c of the round's clients, by id, while the server works."""
SERVER = "server logits"
"""The latest z_s, by client id."""
MEMORY = "memory"
"""State of the trunk's optimizer."""
PLACE = "place"
"""Number of training tasks that the server has completed in this round."""


class ServerTraining(Config):
    """Training of the trunk by Adam with AMSGrad. The optimizer's state is kept for the whole run."""

    epochs: int = Field(default=20, ge=1)
    """E_s, epochs on the features of a round's clients."""
    batch_size: int = Field(default=256, ge=1)
    """Samples per step. The last batch, of each client with `order: clients`, may be smaller."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate."""
    weight_decay: float = Field(default=1e-4, ge=0)
    """L2 penalty on all parameters."""


class FedGKT(Unequal):
    needs_classes: ClassVar = "distillation compares class probabilities"
    judged_on: ClassVar = "clients"
    contract: ClassVar = Contract(
        wants="extractors",
        clients={"weights": [0, 1, 1]},
        short={"server": {"epochs": 2, "batch_size": 8}},
        fedavg=None,
    )

    name: Literal["fedgkt"] = "fedgkt"
    weight: Literal["uniform"] = "uniform"
    """Not used: nothing is averaged."""
    temperature: float = Field(default=3.0, gt=0)
    """T, the temperature of clients and server."""
    alpha: float = Field(default=1.0, ge=0)
    """a, the weight of KD on clients and of CE on the server."""
    distill_on_server: bool = True
    """Train the server on z_c and labels. false: on labels alone."""
    order: Literal["clients", "mixed"] = "clients"
    """Batches of an epoch of the server. clients: those of one client after another. mixed: samples of all clients of
    the round in random order."""
    server: ServerTraining = ServerTraining()
    """Training of the trunk."""

    def check(self, rounds: int, clients: Population) -> None:
        nets, server, used = self.task.nets, self.task.server_capacity, clients.own_capacities
        for capacity in used:
            if nets[capacity] == nets[server]:
                raise ConfigError(
                    f"clients: clients of capacity {label(capacity)} have the server's network. Allowed with method "
                    f"{self.name}: a largest capacity without clients, such as capacities: [1, 0.5], weights: [0, 1]"
                )
        ours, ours_text = self._extractor(server)
        for capacity in used:
            theirs, theirs_text = self._extractor(capacity)
            where = f"model: the extractor of {nets[capacity].model.name}, capacity {label(capacity)},"
            if theirs != ours:
                raise ConfigError(
                    f"{where} has features {list(theirs)}. Allowed: {list(ours)}, as in the server's "
                    f"{nets[server].model.name}"
                )
            if theirs_text != ours_text:
                raise ConfigError(
                    f"{where} is {theirs_text}. Allowed: that of the server's {nets[server].model.name}, {ours_text}"
                )
        fixed_capacities(self.name, {c: nets[c] for c in used}, clients, "one network for all clients")

    def _extractor(self, capacity: float) -> tuple[tuple[int, ...], str]:
        """Return the shape of one sample's features and the extractor's architecture as text. Raise a ConfigError if
        there is no extractor."""
        net = self.task.nets[capacity]
        if (found := _extractor_of(net)) is None:
            raise ConfigError(
                f"model: {net.model.name}, capacity {label(capacity)}, has no extractor. Allowed with method "
                f"{self.name}: networks with one, such as resnet55_gkt for the server and resnet8_gkt for clients"
            )
        return found

    @property
    def composed(self) -> str:
        """Group of the server's network: f_s behind an extractor that is not trained."""
        return self.group(self.task.server_capacity)

    def initial(self, capacity: float) -> Params:
        """Return the capacity's initial network with the server's initial extractor, which all networks start from."""
        return super().initial(capacity) | extractor(super().initial(self.task.server_capacity))

    def init(self) -> State:
        return {self.composed: self.initial(self.task.server_capacity)}

    # the losses

    def distilled(self, teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
        """Return KD(teacher -> student) of logits [B, C]."""
        return self.temperature**2 * divergence(teacher, student, self.temperature)

    def client_loss(self, own: Loss) -> Loss:
        """Return the client's loss: mean over logits [B, C] and targets [B, 1 + C] (`packed`). `own`: without KD."""

        def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            y, teacher = unpacked(targets)
            return own(logits, y) + self.alpha * self.distilled(teacher, logits)

        return loss

    def server_loss(self, own: Loss) -> Loss:
        """Return the server's loss, otherwise as `client_loss`."""

        def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            y, teacher = unpacked(targets)
            if not self.distill_on_server:
                return own(logits, y)
            return self.distilled(teacher, logits) + self.alpha * own(logits, y)

        return loss

    # clients

    def extract(self, state: State, selection: Selection) -> Payload:
        """Return z_s of all clients, from which a client takes its own by id."""
        return {SERVER: state[SERVER]} if SERVER in state else {}

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        id, net, data = visit.client.id, visit.net, visit.data
        given = self.own(visit.client_state, visit.client.capacity)
        teacher = payload.get(SERVER, {}).get(str(id))
        work, loss = visit, self.loss(visit)
        if teacher is not None:
            work = replace(visit, data=data.labeled(packed(data.samples["y"], teacher)))
            loss = self.client_loss(loss)
        trained, metrics = self.trained(given, work, loss=loss)
        logits, flops = self.asked(trained, net, data)
        shape, _ = self._extractor(visit.client.capacity)
        numbers = torch.Size(shape).numel() + logits.shape[1] + 1
        metrics["train_flops"] = flops + costs.training_flops(net, int(metrics["train_samples"]))
        metrics["bytes_down"] = 0 if teacher is None else costs.BYTES * teacher.numel()
        metrics["bytes_up"] = costs.BYTES * numbers * len(data)
        client_states: dict[int, ClientState] = {id: {"own": copied(trained)}}
        return Update({}, 1.0, whole={CLIENTS: {str(id): logits}}, metrics=metrics, client_states=client_states)

    # the server

    def step(self, state: State, round: int, fold: Fold) -> State:
        if not (logits := fold.sum(CLIENTS)):
            return state
        return {**state, CLIENTS: logits, PLACE: {"behind": torch.tensor(0)}}

    def plan(self, state: State, round: int) -> Sequence[ServerTask]:
        """Plan one client's part of an epoch at a time, or one epoch of all clients, and after the last epoch z_s of
        all clients at once."""
        if CLIENTS not in state:
            return ()
        net, payload = self.task.server, {self.composed: state[self.composed]}
        sizes = {int(id): len(state[CLIENTS][id]) for id in sorted(state[CLIENTS], key=int)}
        turns = [(f"client {id}", (id,)) for id in sizes] if self.order == "clients" else [("mixed", tuple(sizes))]
        epoch, turn = divmod(int(state[PLACE]["behind"]), len(turns))
        if epoch == self.server.epochs:
            # a third of the cost of training on them
            return [ServerTask(f"logits of client {id}", net, -(-n // 3), payload, (id,)) for id, n in sizes.items()]
        of, ids = turns[turn]
        payload |= {CLIENTS: {str(id): state[CLIENTS][str(id)] for id in ids}, MEMORY: state.get(MEMORY, {})}
        return [ServerTask(f"epoch {epoch + 1}, {of}", net, sum(sizes[id] for id in ids), payload, ids)]

    def refine(self, server_task: ServerTask, context: ServerTaskContext) -> ServerTaskResult:
        net, given, seed = server_task.net, server_task.payload[self.composed], context.seed
        extractors = {id: extractor(cast(Params, state["own"])) for id, state in context.client_states.items()}
        [first, *_] = context.data.values()
        module = cast(nn.Sequential, cached_module(net, first.device))
        if CLIENTS not in server_task.payload:
            [id] = server_task.clients
            flops = 2.0 * trunk_macs(net) * len(first)
            logits = predicted(module, given | extractors[id], first)
            return ServerTaskResult({SERVER: {str(id): logits}}, {"server_flops": flops})
        samples = {
            id: data.labeled(packed(data.samples["y"], server_task.payload[CLIENTS][str(id)]))
            for id, data in context.data.items()
        }
        loss, total = self.server_loss(first.goal.loss), sum(map(len, samples.values()))
        load(module, given)
        names = net.layout.shapes.keys() | extractor(given).keys()
        statistics = {name: t.to(first.device, copy=True) for name, t in given.items() if name not in names}
        trunk = module[1:].train()
        how, steps = self.server, 0
        optimizer = torch.optim.Adam(trunk.parameters(), how.lr, weight_decay=how.weight_decay, amsgrad=True)
        load_optimizer_state(optimizer, trunk, server_task.payload[MEMORY])
        order = torch.randperm(total, generator=torch_generator(seed, "student", server_task.name))
        with norms.tracked(trunk, statistics), torch_scope(stream(seed, "dropout", server_task.name), first.device):
            for rows in order.split(how.batch_size):
                features, y = featured(module[0], extractors, samples, rows)
                optimizer.zero_grad()
                loss(trunk(features), y).backward()
                optimizer.step()
                steps += 1
        found = {name: t.to("cpu", copy=True) for name, t in (params_of(trunk) | statistics).items()}
        metrics = {"server_flops": 6.0 * trunk_macs(net) * total, "server_steps": steps}
        return ServerTaskResult({self.composed: found, MEMORY: optimizer_state(optimizer, trunk)}, metrics)

    def absorb(self, state: State, round: int, refined: Mapping[str, ServerTaskResult]) -> State:
        new = dict(state)
        for found in refined.values():
            for group, tensors in found.groups.items():
                new[group] = new.get(group, {}) | tensors
        if any(SERVER in found.groups for found in refined.values()):
            del new[CLIENTS], new[PLACE]
        else:
            new[PLACE] = {"behind": state[PLACE]["behind"] + 1}
        return new

    # deployment

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        """Return the server's network with the client's extractor, or with the initial one of this capacity."""
        given = state[self.composed] | extractor(self.own(client_state, capacity))
        return Deployment.of(self.group(capacity), self.task.server, given, is_start=client_state is None)


def packed(y: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return targets [n, 1 + C]: labels [n] and logits [n, C] of the same samples."""
    logits = logits.to(y.device)
    return torch.cat([y.unsqueeze(1).to(logits.dtype), logits], 1)


def unpacked(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels [n] and logits [n, C] of targets."""
    return targets[:, 0].long(), targets[:, 1:]


def extractor(params: Params) -> Params:
    """Return the extractor's parameters and statistics."""
    return {name: t for name, t in params.items() if name.startswith(f"{EXTRACTOR}.")}


@torch.no_grad()
def featured(
    extract: nn.Module, extractors: Mapping[int, Params], samples: Mapping[int, ClientData], rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return H [B, ...] and the targets [B, ...] of these rows [B] of all clients' samples, which are counted client by
    client. `extract`: the module of the clients' extractors."""
    batch, start = [], 0
    for id, data in samples.items():
        own = rows[(rows >= start) & (rows < start + len(data))] - start
        start += len(data)
        if len(own):
            given = below(EXTRACTOR, extractors[id])
            load(extract, given)
            norms.load(extract, given)
            [(x, y)] = data.picked(own).plain(len(own))
            batch.append((extract.eval()(x), y))
    features, targets = zip(*batch, strict=True)
    return torch.cat(features), torch.cat(targets)


def trunk_macs(net: Net) -> int:
    """Return the multiply-adds of one sample after the extractor."""
    return sum(macs for path, macs in net.layer_macs.items() if not path.startswith(f"{EXTRACTOR}."))


@functools.lru_cache(maxsize=64)
def _extractor_of(net: Net) -> tuple[tuple[int, ...], str] | None:
    """Return the shape of one sample's features and the extractor's architecture as text, or None."""
    module = net.blank()
    if not isinstance(module, nn.Sequential) or next(iter(module.named_children()), ("",))[0] != EXTRACTOR:
        return None
    with torch.no_grad():
        features = module[0].eval()(net.model.example(1, "meta"))
    return tuple(features.shape[1:]), " ".join(str(module[0]).split())
