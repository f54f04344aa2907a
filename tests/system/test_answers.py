"""Answers of a user's own devices, availability and samplers are named with setting, class and verb; queries end."""

import math
import time
from typing import Any

import numpy as np
import pytest
from disks import becomes_a_pipe, becomes_endless

from rayfl.config import ConfigError, PluginFailed, parse
from rayfl.system import AVAILABILITY_KIND, Availability, Device, Devices, Sampler, System, Visited, checked
from rayfl.system.samplers import Candidates


class Odd(Sampler, Devices, Availability):
    """Answers whatever it is given, or raises it."""

    answer: object = None
    name: str = "own:Odd"

    def _answer(self, *_: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    choose = learned = device = until = check = _answer  # pyright: ignore


def one(id: int) -> int:
    return 1


FREE = Candidates(9, np.random.default_rng(0), lambda id: id != 8, one, one, one, lambda: np.ones(1))
VERBS = {
    "choose": lambda odd: checked.chosen(odd, 2, FREE, 4, {}),
    "learned": lambda odd: checked.learned(odd, {}, 4, [Visited(1, 1, 1.0, 1.0)]),
    "device": lambda odd: checked.device(odd, 3, 0),
    "until": lambda odd: checked.until(odd, 3, 0.0, 0),
    "is_available": lambda odd: checked.is_available(odd, 3, 0.0, 0),
}


@pytest.mark.parametrize(
    ("verb", "answer", "said"),
    [
        ("choose", None, "sampler: own:Odd, choose, round 5: returned None. Allowed: the clients and the memory"),
        ("choose", [0, 1], "returned a list. Allowed: the clients and the memory"),
        ("choose", ([0],), "returned 1 values. Allowed: the clients and the memory"),
        ("choose", ({0, 1}, {}), "returned a set. Allowed: a list of clients"),
        ("choose", ([math.nan], {}), r"chose \[nan\]. Allowed: clients from 0 to 8"),
        ("choose", ([-1], {}), r"chose \[-1\]. Allowed: clients from 0 to 8"),
        ("choose", ([8], {}), r"chose \[8\]. Allowed: at most 2 different clients of those that are free"),
        ("choose", ([1, 1], {}), r"chose \[1, 1\]. Allowed: at most 2 different clients"),
        ("choose", ([1], None), "returned None. Allowed: a dict as the memory"),
        ("choose", ([1], {"seen": {3: 1}}), "the memory has the key seen.3, which a checkpoint turns into text"),
        ("choose", ([1], {"seen": [(1, 2)]}), r"the memory has \(1, 2\), a tuple, at seen.0. Allowed: text, numbers"),
        ("choose", ([1], {"t": np.int64(3)}), r"the memory has np.int64\(3\), a int64, at t. Allowed: text, numbers"),
        ("choose", ZeroDivisionError("x"), "sampler: own:Odd, choose, round 5: ZeroDivisionError: x\nTraceback"),
        ("learned", {1: 2}, "sampler: own:Odd, learned, round 5: the memory has the key 1, which a checkpoint"),
        ("device", None, "devices: own:Odd, device, client 3: returned None. Allowed: a Device"),
        ("device", KeyError("x"), "devices: own:Odd, device, client 3: KeyError: 'x'\nTraceback"),
        ("until", None, "availability: own:Odd, until, client 3: returned None. Allowed: a number of seconds"),
        ("until", math.nan, "availability: own:Odd, until, client 3: returned NaN. Allowed: a number of seconds"),
        ("until", {1.0}, "returned a set. Allowed: a number of seconds"),
        ("until", True, "returned a bool. Allowed: a number of seconds"),
        ("is_available", None, "availability: own:Odd, until, client 3: returned None. Allowed: a number of seconds"),
        ("is_available", OSError("x"), "availability: own:Odd, until, client 3: OSError: x\nTraceback"),
    ],
)
def test_a_wrong_answer_names_setting_class_and_verb(verb, answer, said):
    with pytest.raises(PluginFailed, match=said) as error:
        VERBS[verb](Odd(answer=answer))
    assert str(error.value).startswith("system.") and ("Traceback" in str(error.value)) == isinstance(answer, Exception)


def test_right_answers_pass():
    memory = {"seen": {"3": [1, 2.5, None, True, "x"]}}
    assert VERBS["choose"](Odd(answer=(np.array([3, 1]), memory))) == ([3, 1], memory)
    assert VERBS["until"](Odd(answer=np.float32(2))) == 2.0 and VERBS["is_available"](Odd(answer=math.inf))


def test_a_check_that_fails_otherwise_names_its_class():
    with pytest.raises(ConfigError, match="^system.devices: too few$"):
        checked.fits(Odd(answer=ValueError("too few")), 3, "devices")
    with pytest.raises(PluginFailed, match="^system.devices: own:Odd, check: KeyError: 'x'\n"):
        checked.fits(Odd(answer=KeyError("x")), 3, "devices")


def test_the_kind_of_a_device_is_text():
    with pytest.raises(ValueError, match="the device has the kind None. Allowed: text"):
        Device(None, *[None] * 3)  # pyright: ignore


@pytest.mark.parametrize("becomes", [becomes_a_pipe, becomes_endless])
@pytest.mark.parametrize("section", [{"devices": {"name": "table"}}, {"availability": {"name": "trace"}}])
def test_pipes_and_devices_are_not_read(tmp_path, section, becomes):
    (file := tmp_path / "table.csv").touch()
    becomes(file)
    [(key, given)] = section.items()
    system = System(**{key: given | {"file": str(file)}})
    with pytest.raises(ConfigError, match="table.csv: cannot be read: it is neither a file nor a link to one"):
        system.check(3, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "bernoulli", "p": 0.9999999999}, "availability.p: 0.9999999999 is not valid. Allowed: at most 0.999"),
        ({"name": "onoff", "on_s": 1e-9, "off_s": 1e-9}, "Allowed: on_s . off_s of at least 600"),
        ({"name": "onoff", "on_s": 1e9}, "Allowed: an on_s with which at most 0.999 of the clients stay for a whole"),
    ],
)
def test_times_that_would_take_too_long_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        AVAILABILITY_KIND.read(given, "system: availability")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"round_s": 1e308}, "round_s: 1e.308 is not valid. Allowed: at most 1e.09"),
        ({"step_ms": 1e308}, "step_ms: 1e.308 is not valid. Allowed: at most 1e.09"),
        ({"server_down_mbps": 1e-308}, "server_down_mbps: 1e-308 is not valid. Allowed: at least 1e-06"),
        ({"mode": {"deadline_s": 1e308}}, "Allowed: at most 1e.09"),
        ({"availability": {"name": "bernoulli", "slot_s": 1e-308}}, "slot_s: 1e-308 is not valid. Allowed: at least"),
    ],
)
def test_times_without_a_meaning_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        parse(System, given, "system")


@pytest.mark.parametrize(
    "given",
    [
        {"name": "bernoulli", "p": 0.999, "slot_s": 1.0},
        {"name": "onoff", "on_s": 300.0, "off_s": 300.0},
        {"name": "onoff", "on_s": 7.2e7, "off_s": 1.0},
    ],
)
def test_queries_are_short(given):
    rule, started = AVAILABILITY_KIND.read(given, "availability"), time.process_time()
    for client in range(50):
        now = 40_000.0 + client
        assert rule.is_available(client, now, 0) == (rule.until(client, now, 0) > now)
    assert time.process_time() - started < 5
