"""A method whose answers are checked where they enter the engine, so that a fault names its method, verb and client."""

import math
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import nn
from torch.backends import cudnn, mkldnn

from rayfl.config import ConfigError, PluginFailed, Problem, RunFailed, ask, nearest, require, shown
from rayfl.config.failures import named
from rayfl.core.fold import ClientState, Fold, State, Update
from rayfl.core.joined import buffers_of, parameters_of
from rayfl.core.net import Net, cached_module, net_of
from rayfl.core.seeds import PROCESS
from rayfl.core.submodel import Selection, Slice
from rayfl.core.tensors import SEPARATOR, leaves, norm
from rayfl.methods.base import (
    Client,
    Deployment,
    Method,
    Payload,
    ServerTask,
    ServerTaskContext,
    ServerTaskResult,
    Visit,
)
from rayfl.metrics import EVALUATED, NOTE, ROUND, Line

RESERVED = {metric.name for metric in ROUND if not metric.of_methods} | {"round", "refusals", EVALUATED, NOTE}
"""Names of metrics that methods cannot use."""


class Diverged(RunFailed):
    """The model is not finite any more, and would not be if the run was repeated."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines: list[Line] = []
        """Metrics of the rounds that the step had finished before."""


class MethodFailed(PluginFailed):
    """A method's code raised an error, or returned what its contract does not allow."""


@dataclass(frozen=True)
class Checked:
    """The verbs of a bound method (`rayfl.methods.base.Method`). Each raises a MethodFailed, or the method's own
    ConfigError."""

    method: Method

    def init(self) -> State:
        return self._ask("init", "", partial(_tensors, what="the state"))

    def select(self, state: State, client: Client) -> Selection:
        def run() -> Selection:
            selection = self.method.select(state, client)
            require(selection, Selection)
            return selection

        return self._run("select", run, client=client)

    def extract(self, state: State, selection: Selection) -> Payload:
        return self._ask("extract", "", partial(_tensors, what="the payload"), state, selection)

    def local_update(self, payload: Payload, visit: Visit) -> Update:
        def run() -> Update:
            before = [(path, t, t._version) for path, t in leaves(payload) if not t.is_inference()]
            module = cached_module(visit.net, visit.data.device)
            buffers = [(name, t, t._version) for name, t in buffers_of(module) if not t.is_inference()]
            process = settings()
            update = self.method.local_update(payload, visit)
            require_settings(process)
            if changed := [path for path, t, version in before if t._version != version]:
                raise Problem(f"{changed[0]} of the payload is changed. Allowed: a copy. Hint: rayfl.core.copied")
            if changed := [name for name, t, version in buffers if t._version != version]:
                raise ConfigError(
                    f"model: {visit.net.model.name}: the buffer {changed[0]} changes in training, and its value would "
                    "go from client to client. Allowed: parameters, and buffers that stay as they are"
                )
            _update(update, payload, visit, self.method.sends_products)
            _own_tensors(update, module)
            return update

        client = visit.client
        about = f" (round {client.round + 1}, capacity {client.capacity:g}, {len(visit.data)} samples)"
        return self._run("local_update", run, about, client)

    def require_unchanged(self, payload: Payload, before: Mapping[str, int]) -> None:
        """Raise a MethodFailed if clients changed a payload that had these `prints` before their visits. Writes by
        `.data` or numpy have no version."""

        def run() -> None:
            if changed := [path for path, value in prints(payload).items() if value != before[path]]:
                raise Problem(f"{changed[0]} of the payload is changed. Allowed: a copy. Hint: rayfl.core.copied")

        self._run("local_update", run)

    def check_returned(self, payload: Payload, update: Update, visit: Visit) -> None:
        """Raise a MethodFailed if a client does not return parameters that it was sent, except those of `withheld`."""

        def run() -> None:
            returned = update.sums.get("params", {}).keys()
            if missing := sorted(payload["params"].keys() - returned - self.method.withheld(visit.net)):
                raise Problem(
                    f"params/{missing[0]} is not returned, but the denominators of `privacy` count it. Hint: `withheld`"
                )

        self._run("local_update", run, client=visit.client)

    def step(self, state: State, round: int, fold: Fold) -> State:
        return self._ask("step", f", round {round + 1}", lambda new: _next(new, state), state, round, fold)

    def plan(self, state: State, round: int) -> Sequence[ServerTask]:
        return self._ask("plan", f", round {round + 1}", _server_tasks, state, round)

    def refine(self, server_task: ServerTask, context: ServerTaskContext) -> ServerTaskResult:
        return self._ask("refine", f", {server_task.name}", _result, server_task, context)

    def absorb(self, state: State, round: int, results: Mapping[str, ServerTaskResult]) -> State:
        return self._ask("absorb", f", round {round + 1}", lambda new: _next(new, state), state, round, results)

    def deploy(self, state: State, round: int, capacity: float, client_state: ClientState | None = None) -> Deployment:
        return self._ask("deploy", f", capacity {capacity:g}", _deployment, state, round, capacity, client_state)

    def fold(self, fold: Fold, selection: Selection, update: Update) -> None:
        """Add the sum of the updates of a selection's clients to a fold."""
        self._run("local_update", lambda: fold.add(selection, update))

    def _ask(self, verb: str, of: str, check: Callable[[Any], None], *arguments: Any) -> Any:
        def run() -> Any:
            # jobs of other threads change settings of the process
            with PROCESS:
                process = settings()
                answer = methodcaller(verb, *arguments)(self.method)
                require_settings(process)
            check(answer)
            return answer

        return self._run(f"{verb}{of}", run)

    def _run(self, what: str, run: Callable[[], Any], about: str = "", client: Client | None = None) -> Any:
        def where(error: BaseException) -> str:
            place = f"method {self.method.name}, {what}" + (f", client {client.id}" if client else "")
            net = _failed_in(error)
            return f"model {net.model.name}, forward at width {net.width:g}, in {place}" if net else place

        return ask(where, run, about, MethodFailed)


def _failed_in(error: BaseException) -> Net | None:
    """Return the network in whose forward pass an error was raised, if any."""
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((net for module in frames if isinstance(module, nn.Module) and (net := net_of(module))), None)


def prints(payload: Payload) -> dict[str, int]:
    """Return the checksum of every tensor of a payload."""
    flat = {path: t.detach().cpu().contiguous().reshape(-1) for path, t in leaves(payload)}
    return {path: zlib.crc32(t.view(torch.uint8).numpy().data) for path, t in flat.items()}


def settings() -> dict[str, Any]:
    """Return the settings of this process that change bits of results."""
    return {
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.backends.mkldnn.enabled": mkldnn.enabled,
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.backends.cudnn.allow_tf32": cudnn.allow_tf32,
        "torch.backends.cudnn.benchmark": cudnn.benchmark,
        "torch.backends.cudnn.enabled": cudnn.enabled,
    }


def require_settings(before: Mapping[str, Any]) -> None:
    """Raise a Problem if the settings of this process are not those of before."""
    for name, value in settings().items():
        if value != before[name]:
            raise Problem(
                f"{name} was {before[name]} and is {value} now, which changes results. Allowed: the old value"
            )


def check_finite(state: State, before: State, round: int, hint: str) -> None:
    """Raise Diverged if a tensor of `state` that is not in `before` has an element that is not finite."""
    old = {id(t) for group in before.values() for t in group.values()}
    fresh = {path: t for path, t in leaves(state) if id(t) not in old and t.is_floating_point()}
    if math.isfinite(norm([fresh])):
        return
    for path, t in fresh.items():
        if not torch.isfinite(t).all():
            raise Diverged(
                f"round {round + 1}: the server's state is not finite after the step, in {path}. Hint: {hint}"
            )


def _tensors(groups: Any, what: str) -> None:
    """Check a mapping of group -> name -> tensor."""
    if not isinstance(groups, Mapping):
        raise Problem(f"{what} is {named(groups)}. Allowed: a dict of group -> name -> tensor")
    for group, params in groups.items():
        if not isinstance(params, Mapping):
            raise Problem(f"{what}: {group} is {named(params)}. Allowed: a dict of name -> tensor")
        for name, t in params.items():
            if not isinstance(t, torch.Tensor):
                raise Problem(f"{what}: {group}/{name} is {named(t)}. Allowed: a tensor")
        if wrong := [name for name in (group, *params) if SEPARATOR in name]:
            raise Problem(f"{what}: the name {wrong[0]!r} has a {SEPARATOR!r}, which separates names in checkpoints")


def _result(result: Any) -> None:
    require(result, ServerTaskResult)
    _tensors(result.groups, "groups")
    _metrics(result.metrics)


def _metrics(metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
        if not isinstance(value, int | float):
            raise Problem(f"the metric {name} is {named(value)}. Allowed: a number")
        if name in RESERVED:
            raise Problem(f"the metric {name} is rayfl's own. Allowed: another name")


def _server_tasks(tasks: Any) -> None:
    require(tasks, Sequence)
    for task in tasks:
        require(task, ServerTask)


def _next(state: Any, before: State) -> None:
    """Check the state after a step: tensors that it had before keep their shapes and types."""
    _tensors(state, "the state")
    for group in state.keys() & before.keys():
        for name in state[group].keys() & before[group].keys():
            _same(f"{group}/{name}", state[group][name], before[group][name])


def _same(path: str, t: torch.Tensor, expected: torch.Tensor) -> None:
    if t.shape != expected.shape:
        raise Problem(f"{path} has shape {list(t.shape)}. Allowed: {list(expected.shape)}")
    if t.dtype != expected.dtype:
        raise Problem(f"{path} has type {t.dtype}. Allowed: {expected.dtype}")


def _update(update: Any, payload: Payload, visit: Visit, sends_products: bool) -> None:
    """Check a client's update: tensors that it was sent come back in their shapes, and no other is a parameter."""
    require(update, Update, "an Update")
    if update.products and not sends_products:
        raise Problem("products are sent. Hint: `sends_products`")
    known = visit.net.full_layout.shapes
    for part in ("sums", "whole", "derived"):
        _tensors(groups := getattr(update, part), part)
        for group in groups.keys() & payload.keys():
            for name, t in groups[group].items():
                if name in payload[group]:
                    _same(f"{group}/{name}", t, payload[group][name])
                elif group == "params" and name not in known:
                    raise Problem(f"{group}/{name} is not a tensor of the network. {nearest(name, payload[group])}")
    if isinstance(visit.selection, Slice):
        cut = visit.selection.whole_layout.dims
        for group, params in update.sums.items():
            if foreign := [name for name in params if name not in cut]:
                raise Problem(
                    f"sums: {group}/{foreign[0]} is not a tensor of the network, so the selection does not cut it. "
                    "Allowed: tensors of the network. Hint: `whole`, for all others"
                )
    if not (isinstance(update.weight, int | float) and 0 < update.weight < math.inf):
        raise Problem(f"the weight is {shown(update.weight)}. Allowed: a finite number above 0")
    _metrics(update.metrics)
    if "train_samples" not in update.metrics:
        raise Problem("metrics lack 'train_samples'. Allowed: the metrics that `fit` returns, perhaps with others")
    for id, client_state in update.client_states.items():
        if id != visit.client.id:
            raise Problem(f"client_states has client {id}. Allowed: {visit.client.id}")
        _tensors(client_state, "the client's state")


def _own_tensors(update: Update, module: nn.Module) -> None:
    """Check that no tensor is a parameter of the cached network, which the next client overwrites."""
    shared = {t.untyped_storage().data_ptr() for t in parameters_of(module).values()} - {0}
    for tensors in (update.sums, update.whole, *update.client_states.values()):
        for path, t in leaves(tensors):
            if t.untyped_storage().data_ptr() in shared:
                raise Problem(
                    f"{path} is a tensor of the cached network, which the next client overwrites. Allowed: a copy. "
                    "Hint: rayfl.core.copied"
                )


def _deployment(deployment: Any) -> None:
    require(deployment, Deployment)
    for name, shape in deployment.net.layout.shapes.items():
        if name not in deployment.params:
            raise Problem(f"params lack {name}. Allowed: all parameters of the network")
        if tuple(deployment.params[name].shape) != tuple(shape):
            raise Problem(f"params: {name} has shape {list(deployment.params[name].shape)}. Allowed: {list(shape)}")
