"""Checks across the sections of an experiment."""

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from rayfl.clients import Population
from rayfl.config import ConfigError
from rayfl.core.net import Net, check_axes
from rayfl.data.goal import Goal, MaskedTokens, NextToken
from rayfl.data.scores import SCORES_KIND
from rayfl.methods.base import Method
from rayfl.metrics import label
from rayfl.models.base import Model
from rayfl.system import System
from rayfl.training.privacy import ALLOWED, Privacy

if TYPE_CHECKING:
    from rayfl.experiment.base import Experiment


def check(experiment: "Experiment") -> None:
    """Raise a ConfigError for problems that can be found without data: wrong axes of the model, capacities without a
    network, options of the method that do not match the other sections."""
    training, evaluation = experiment.training, experiment.evaluation
    try:
        _check_model(experiment.model)
        method, goal = experiment.bound(), experiment.data.goal
        if goal.targets != "class" and method.needs_classes:
            raise ValueError(
                f"method: {method.name} needs one class per sample, because {method.needs_classes}. The targets of "
                f"data set {experiment.data.name} are {goal.targets}. Allowed: a data set of classes, or another "
                "method such as heterofl"
            )
        _check_cut(experiment, method)
        method.check(experiment.rounds, experiment.clients)
        _check_products(experiment, method)
        _check_exact(experiment, method)
        if experiment.system is not None:
            _check_system(experiment.system, method, experiment.clients)
        if experiment.privacy is not None:
            _check_privacy(experiment, experiment.privacy, method)
        if experiment.updates.secure_aggregation is not None:
            _check_secure(experiment, method)
        if 0 < training.cosine_rounds < experiment.rounds:
            raise ValueError(
                f"training.cosine_rounds: {training.cosine_rounds} is not valid. Allowed: 0, or at least the "
                f"{experiment.rounds} rounds of the run, because the learning rate is 0 after them"
            )
        if evaluation.local == "server" and method.judged_on == "clients":
            raise ValueError(
                f"evaluation.local: 'server' is not supported by method {method.name}, which does not train a whole "
                "server network. Allowed: 'deployed'"
            )
        labels = [score.label for score in experiment.scores]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(
                f"evaluation.scores: two scores have the name {twice[0]!r} in metrics. Allowed: names once, and other "
                f"than the data set's own {', '.join(score.label for score in goal.scores)}"
            )
        if len(fixed := {score.counted_by for score in experiment.scores if score.counted_by}) > 1:
            sizes = " and ".join(map(str, sorted(fixed)))
            raise ValueError(
                f"evaluation.scores: scores count batches of {sizes} samples. Allowed: batches of one size"
            )
        for score in experiment.scores:
            if score.part not in goal.parts:
                raise ValueError(
                    f"evaluation.scores: data set {experiment.data.name} has no {score.part!r} for {score.name}. "
                    f"Allowed: scores of {', '.join(map(repr, goal.parts))}"
                )
            if score.of_targets != goal.targets:
                same = [name for name, cls in SCORES_KIND.known().items() if cls.of_targets == goal.targets]
                raise ValueError(
                    f"evaluation.scores: {score.name} scores targets of kind {score.of_targets}, and those of data set "
                    f"{experiment.data.name} are {goal.targets}. Allowed: {', '.join(same)}"
                )
        for capacity, net in method.task.nets.items():
            _check_forward(net)
            # methods wrap models in networks of other outputs
            if _has_classes(net) or net.model == experiment.model:
                _check_output(net, capacity, goal)
        experiment.all_listeners()
        if experiment.run.client_scores == "all" and not experiment.evaluation.clients:
            raise ValueError(
                "run.client_scores: all needs scores of clients. Allowed: last, or evaluation.clients: true"
            )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def equal_capacities(nets: Mapping[float, Net]) -> list[list[float]]:
    """Return the groups of capacities, largest first, whose networks should differ, and have equal tensors."""
    groups: dict[Any, list[float]] = {}
    for capacity in sorted(nets, reverse=True):
        groups.setdefault(tuple(nets[capacity].layout.shapes.items()), []).append(capacity)
    return [group for group in groups.values() if len({nets[capacity] for capacity in group}) > 1]


def _check_cut(experiment: "Experiment", method: Method) -> None:
    """Raise a ValueError if clients of different capacities are meant to train networks of different sizes, and the
    model has nothing to cut."""
    nets = method.task.nets
    if equal_capacities(nets) != [sorted(nets, reverse=True)] or nets[max(nets)].layout.axes:
        return
    raise ValueError(
        f"model: {experiment.model.name} has nothing to cut, so the networks of capacities "
        f"{', '.join(map(label, nets))} are equal. Allowed with method {method.name}: a model whose layers have axes "
        f"to cut, or clients.capacities: [1]. Hint: {experiment.model.advice}"
    )


def _check_products(experiment: "Experiment", method: Method) -> None:
    """Raise a ValueError if clients send products of factors, and changes of tensors are asked for."""
    updates = experiment.updates
    asked = {"updates.transforms": updates.transforms, "updates.secure_aggregation": updates.secure_aggregation}
    for section, value in (asked | {"privacy": experiment.privacy}).items():
        if value and method.sends_products:
            raise ValueError(
                f"{section}: clients of method {method.name} send low-rank products. Allowed: no {section}, or a "
                "method whose clients send factors"
            )


def _check_exact(experiment: "Experiment", method: Method) -> None:
    """Raise a ValueError if transforms change what clients and server must agree on."""
    if experiment.updates.transforms and method.needs_exact_updates:
        raise ValueError(
            f"updates.transforms: method {method.name} is not supported, because {method.needs_exact_updates}. "
            "Allowed: no transforms, or another method such as fedavg"
        )


def _check_system(system: System, method: Method, clients: Population) -> None:
    """Raise a ValueError if the system, the method and the population do not fit together."""
    system.check(clients.count, clients.cohort)
    if clients.participation != "fixed":
        raise ValueError("clients.participation: poisson is not supported with system. Allowed: fixed")
    if system.mixes_versions and method.synchronous:
        raise ValueError(
            f"system.mode: method {method.name} needs updates of the current model, because {method.synchronous}. "
            "Allowed: sync without late_rounds"
        )
    if system.gives_capacities and clients.assignment != "fixed":
        raise ValueError(f"system.capacities: {system.capacities} only with clients.assignment: fixed")


def _check_privacy(experiment: "Experiment", privacy: Privacy, method: Method) -> None:
    """Raise a ConfigError if the reported epsilon would not hold for the server's parameters."""
    privacy.check(experiment.clients)
    data = experiment.data
    transforms = [transform.name for transform in experiment.updates.transforms]
    collected = experiment.evaluation.statistics != "batch" and any(net.norms for net in method.task.nets.values())
    problems = _unequal(method) | {
        "a system chooses clients by their time, not at random. Allowed: no system": experiment.system is not None,
        "updates.transforms: the residual of error_feedback carries what was clipped into later rounds. Allowed: "
        "transforms without memory": "error_feedback" in transforms,
        "updates.policy: stop tells that one client diverged. Allowed: refuse": experiment.updates.policy == "stop",
        "evaluation.statistics: statistics of batch norms are collected from the clients' data without clipping. "
        "Allowed: batch, or a model without batch norms (model.norm)": collected,
        "data: missing numbers are replaced, or numbers scaled, by values computed from the clients' data without "
        "noise. Allowed: data.scaling: none with data.missing: refuse": data.prepare.learns,
        "data: numbers as targets are scaled by values computed from the clients' data without noise. Allowed: targets "
        "that are classes or labels": data.goal.learns,
    }
    for problem, is_so in problems.items():
        if is_so:
            raise ConfigError(f"privacy: {problem}")


def _unequal(method: Method) -> dict[str, Any]:
    """Return problem -> whether the method has it, of a server that adds changes of parameters with weight 1."""
    return {
        f"method {method.name} is not supported, because {method.synchronous}. {ALLOWED}": method.synchronous,
        "method.weight: samples gives clients unequal parts of the sum. Allowed: uniform": method.weight != "uniform",
        f"method {method.name} weighs clients by its own `weight_of`, but all count alike. Allowed: a method without "
        "it": type(method).weight_of is not Method.weight_of,
    }


def _check_secure(experiment: "Experiment", method: Method) -> None:
    """Raise a ConfigError if the server needs more than sums of changes, or a change has no fixed size."""
    coded = [t.name for t in experiment.updates.transforms if t.stage in ("error_feedback", "selection", "code")]
    system = experiment.system
    problems = _unequal(method) | {
        f"{', '.join(coded)} would save nothing, because a masked integer has one size. Allowed: transforms without "
        "compression, such as clip": coded,
        "system.mode: groups have one version of the model. Allowed: sync without late_rounds": system is not None
        and system.mixes_versions,
    }
    for problem, is_so in problems.items():
        if is_so:
            raise ConfigError(f"updates.secure_aggregation: {problem}")


def _has_classes(net: Net) -> bool:
    """Return whether a network is one of images or tokens."""
    return isinstance(net.model, Model) and net.model.takes in ("input", "ids")


def _check_forward(net: Net) -> None:
    """Run a network without data. Raise a ValueError if it fails, or has no operations."""
    if not (net.layout and net.macs):
        raise ValueError(
            f"model: {net.model.name} has no layer whose operations are counted. Allowed: layers of torch, or modules "
            "with `multiply_adds(output)` (PLUGINS.md)"
        )
    allowed = torch.get_default_dtype()
    if other := sorted(str(dtype) for dtype in _types(net, allowed) if dtype != allowed):
        raise ValueError(
            f"model: {net.model.name} has trained parameters of type {', '.join(other)}. Allowed: {allowed}. Hint: "
            "another type is for the frozen base of model lora"
        )


@lru_cache(maxsize=512)
def _types(net: Net, default: torch.dtype) -> frozenset[torch.dtype]:
    """Return the types of a network's parameters, built where torch's default type is `default`."""
    return frozenset(p.dtype for p in net.blank().parameters())


def _check_output(net: Net, capacity: float, goal: Goal) -> None:
    """Raise a ValueError if a network does not return one number per class, for every sample or token."""
    output, classes, of_tokens = net.output, goal.classes, isinstance(goal, NextToken)
    # weights of language models have rows for tokens that their tokenizers lack, and count them in the softmax
    spare = of_tokens and not isinstance(goal, MaskedTokens) and output.dim() and output.shape[-1] > classes
    if output.dim() and output.shape[-1] != classes and not spare:
        raise ValueError(
            f"model: {net.model.name} returns {output.shape[-1]} numbers at capacity {capacity:g}. Allowed: {classes}, "
            "one per class (`self.labels`)"
        )
    if _has_classes(net) and not of_tokens and not net.layout.classifier:
        raise ValueError(
            f"model: no parameter of {net.model.name} has the axis of the classes. Allowed: `self.labels` as the axis "
            "of the last layer"
        )
    if output.dtype != torch.get_default_dtype() or output.dim() != 2 + of_tokens:
        raise ValueError(
            f"model: {net.model.name} returns {output.dtype} of shape {list(output.shape)} for one sample. Allowed: "
            f"{torch.get_default_dtype()} of shape {'[1, tokens, ' if of_tokens else '[1, '}{classes}]"
        )


@lru_cache(maxsize=256)
def _check_model(model: Model) -> None:
    """Check the axes of all members of the model, with all exits and step sizes."""
    for member in model.members:
        _check_norms(member)
        check_axes(Net(member, exits=member.exit_count if member.exit_count > 1 else 0, steps=True))


def _check_norms(model: Model) -> None:
    """Raise a ValueError if a norm keeps running statistics, which would be those of the last client of a process."""
    for path, module in Net(model).blank().named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise ValueError(
                f"model: {model.name}: {path} ({type(module).__name__}) keeps running statistics. Allowed: "
                "rayfl.norm('static_bn', channels), or track_running_stats=False"
            )
