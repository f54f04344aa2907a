"""Answers of devices, availability and samplers, checked where they enter the schedule."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rayfl.config import ConfigError, Problem, ask, require, require_number, shown
from rayfl.config.failures import named
from rayfl.system.availability import SECONDS, Availability
from rayfl.system.devices import Device, Devices
from rayfl.system.samplers import Candidates, Memory, Sampler, Visited

PLAIN = (str, int, float, bool, type(None))


def fits(part: Devices | Availability, clients: int, place: str) -> None:
    """Raise a ConfigError if devices or availability do not describe this many clients."""

    def check() -> None:
        try:
            part.check(clients)
        except ValueError as error:
            raise ConfigError(f"system.{place}: {error}") from None

    ask(f"system.{place}: {part.name}, check", check)


def device(devices: Devices, client: int, seed: int) -> Device:
    where = f"system.devices: {devices.name}, device, client {client}"
    return ask(where, lambda: require(devices.device(client, seed), Device))


def until(rule: Availability, client: int, seconds: float, seed: int) -> float:
    where = f"system.availability: {rule.name}, until, client {client}"
    return ask(where, lambda: require_number(rule.until(client, seconds, seed), SECONDS))


def is_available(rule: Availability, client: int, seconds: float, seed: int) -> bool:
    where = f"system.availability: {rule.name}, until, client {client}"
    return ask(where, lambda: require(rule.is_available(client, seconds, seed), bool))


def chosen(sampler: Sampler, wanted: int, free: Candidates, round: int, memory: Memory) -> tuple[list[int], Memory]:
    """Return the chosen clients, different and free ones, and the sampler's memory."""

    def choose() -> tuple[list[int], Memory]:
        answer = require(sampler.choose(wanted, free, round, memory), tuple, "the clients and the memory")
        if len(answer) != 2:
            raise Problem(f"returned {len(answer)} values. Allowed: the clients and the memory")
        given, new = answer
        if not isinstance(given, Sequence | np.ndarray):
            raise Problem(f"returned {named(given)}. Allowed: a list of clients")
        if not all(isinstance(id, int | np.integer) and 0 <= id < free.count for id in given):
            raise Problem(f"chose {shown(given)}. Allowed: clients from 0 to {free.count - 1}")
        ids = [int(id) for id in given]
        if len(ids) > wanted or len(set(ids)) < len(ids) or not all(map(free.is_free, ids)):
            raise Problem(f"chose {shown(ids)}. Allowed: at most {wanted} different clients of those that are free")
        return ids, new if new is memory else _memory(new)

    return ask(f"system.sampler: {sampler.name}, choose, round {round + 1}", choose)


def learned(sampler: Sampler, memory: Memory, round: int, visits: Sequence[Visited]) -> Memory:
    where = f"system.sampler: {sampler.name}, learned, round {round + 1}"
    return ask(where, lambda: _memory(sampler.learned(memory, round, visits)))


def _memory(memory: Any) -> Memory:
    """Return a memory that is the same after a checkpoint, which contains it as JSON."""
    _check_plain(require(memory, dict, "a dict as the memory"), "")
    return memory


def _check_plain(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, inside in value.items():
            if not isinstance(key, str):
                raise Problem(
                    f"the memory has the key {path}{shown(key)}, which a checkpoint turns into text. Allowed: text"
                )
            _check_plain(inside, f"{path}{key}.")
    elif isinstance(value, list):
        for i, inside in enumerate(value):
            _check_plain(inside, f"{path}{i}.")
    elif not isinstance(value, PLAIN):
        raise Problem(
            f"the memory has {shown(value)}, a {type(value).__name__}, at {path.rstrip('.')}. Allowed: text, numbers, "
            "lists and dicts, which a checkpoint keeps"
        )
