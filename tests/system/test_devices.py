"""Devices and availability: published speeds, shares, traces, and files that are refused."""

import math
import os
from collections import Counter

import pytest

from rayfl.config import ConfigError
from rayfl.core.seeds import numpy_generator
from rayfl.system import AVAILABILITY_KIND, DEVICES_KIND, Device, Speed
from rayfl.system.availability import DAY


def devices(given):
    return DEVICES_KIND.read(given, "devices")


def availability(given):
    return AVAILABILITY_KIND.read(given, "availability")


def test_phones_have_the_speeds_that_flash_measured():
    phones = devices("phones")
    found = [phones.device(id, 0) for id in range(600)]
    assert {one.kind: round(one.gflops.mean, 2) for one in found} == {
        "nexus_6": 0.63,
        "redmi_note_8": 1.76,
        "galaxy_note_10": 5.77,
    }
    # 600 independent draws of thirds: 5 standard deviations are 58
    assert all(abs(count - 200) < 58 for count in Counter(one.kind for one in found).values())
    assert len({one.down.mean for one in found}) == 19
    assert phones.device(3, 0) == phones.device(3, 0) != phones.device(3, 1)


def test_classes_in_turn():
    phones = devices({"name": "phones", "assignment": "turns", "shares": [2, 0, 1]})
    slow, fast = "nexus_6", "galaxy_note_10"
    assert [phones.device(id, 0).kind for id in range(7)] == [slow, slow, fast, slow, slow, fast, slow]
    with pytest.raises(ConfigError, match="Allowed: whole shares with assignment: turns"):
        devices({"name": "phones", "assignment": "turns", "shares": [0.5, 0.5, 1]})


def test_speeds_stay_above_a_tenth():
    generator = numpy_generator(0, "visit")
    drawn = [Speed(10.0, 10.0).draw(generator) for _ in range(2000)]
    assert min(drawn) >= 1.0 and len(set(drawn)) == 2000
    assert Speed(math.inf).draw(generator) == math.inf


def test_boards_are_a_fraction_of_hpl():
    boards = devices({"name": "boards", "boards": {"pi_5": 1}, "efficiency": 0.5})
    assert boards.device(0, 0).gflops == Speed(30.249)


def test_a_table_has_a_device_per_client(tmp_path):
    file = tmp_path / "devices.csv"
    file.write_text("name,gflops,down_mbps,sigma,memory_mb\na,2,10,0.5,\nb,1,,,512\n")
    table = devices({"name": "table", "file": str(file)})
    first, second = table.device(0, 0), table.device(1, 0)
    assert (first.gflops, first.down, first.memory_mb) == (Speed(2, 1), Speed(10, 5), math.inf)
    assert (second.kind, second.down, second.memory_mb) == ("b", Speed(math.inf), 512)
    table.check(2)
    with pytest.raises(ValueError, match="has 2 devices. Allowed: at least one for each of the 3 clients"):
        table.check(3)


def test_files_that_change_are_read_again(tmp_path):
    table, trace = tmp_path / "devices.csv", tmp_path / "trace.csv"
    for turn, speed in enumerate((1, 100)):
        table.write_text(f"name,gflops\na,{speed}\n")
        trace.write_text(f"client,start_s,end_s\n0,0,{speed}\n")
        for file in (table, trace):
            os.utime(file, ns=(turn, turn))
        assert devices({"name": "table", "file": str(table)}).device(0, 0).gflops.mean == speed
        assert availability({"name": "trace", "file": str(trace)}).until(0, 0.0, 0) == speed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": the columns are missing"),
        ("name,speed\na,1\n", ": the columns name, speed. Allowed: name, gflops, optional down_mbps"),
        ("name,gflops\na,-1\n", ", line 2: gflops: '-1' is not valid. Allowed: at least 1e-06"),
        ("name,gflops\na,1\nb,fast\n", ", line 3: gflops: 'fast' is not valid. Allowed: a number"),
        ("name,gflops\na\n", ": line 2 does not have 2 cells"),
        ("name,gflops\na,1,2\n", ": line 2 does not have 2 cells"),
    ],
)
def test_bad_tables(tmp_path, text, message):
    file = tmp_path / "devices.csv"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        devices({"name": "table", "file": str(file)}).check(1)
    assert str(error.value).startswith(f"{file}{message}") and "pydantic" not in str(error.value)


@pytest.mark.parametrize("given", [(0,), (-1,), (math.nan,), (1, -1), (1, math.nan), (1, math.inf)])
def test_speeds_that_are_none(given):
    with pytest.raises(ValueError, match="Allowed: a mean above 0, and a deviation of at least 0"):
        Speed(*given)
    with pytest.raises(ValueError, match="the device a has speeds that are numbers. Allowed: Speed"):
        Device("a", Speed(1), 2.0, Speed(math.inf))  # pyright: ignore


def test_bernoulli():
    rule = availability({"name": "bernoulli", "p": 0.3, "slot_s": 10})
    ends = [rule.until(id, 25.0, 0) for id in range(2000)]
    # 5 standard deviations of the share are 0.051
    assert abs(sum(end > 25 for end in ends) / 2000 - 0.3) < 0.051
    assert all(end == 25.0 or end % 10 == 0 for end in ends)
    id = next(id for id, end in enumerate(ends) if end > 30)
    assert rule.until(id, 29.0, 0) == ends[id] == rule.until(id, 30.0, 0)


def test_onoff_has_the_share_of_its_means():
    rule = availability({"name": "onoff", "day_amplitude": 0})
    times = [DAY * 3.3 + 10 * id for id in range(2000)]
    on = [rule.until(id, time, 0) > time for id, time in enumerate(times)]
    # 2 hours on, 6 off; 5 standard deviations are 0.048
    assert abs(sum(on) / 2000 - 0.25) < 0.048
    id = on.index(True)
    end = rule.until(id, times[id], 0)
    assert rule.until(id, (times[id] + end) / 2, 0) == end


def test_onoff_has_less_by_day_and_starts_days_at_its_share():
    rule = availability({"name": "onoff", "day_amplitude": 0.9})

    def share(hour):
        return sum(rule.until(id, DAY * 3 + hour * 3600, 0) > DAY * 3 + hour * 3600 for id in range(2000)) / 2000

    # 5 standard deviations are at most 0.056
    assert abs(share(0.01) - 0.25) < 0.048
    assert share(9) + 0.1 < share(21)


def test_a_trace_repeats(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("client,start_s,end_s\n0,0,10\n0,30,40\n1,20,50\n")
    rule = availability({"name": "trace", "file": str(file), "period_s": 100})
    assert [rule.until(0, t, 0) for t in (0, 9, 10, 35, 135, 199)] == [10, 10, 10, 40, 140, 199]
    assert [rule.until(1, t, 0) for t in (0, 20, 220)] == [0, 50, 250]
    with pytest.raises(ValueError, match="has 2 clients. Allowed: at least 3"):
        rule.check(3)


def test_a_trace_may_have_quoted_cells_and_touching_intervals(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text('"start_s","end_s","client"\n"0","40","0"\n"40","100","0"\n')
    rule = availability({"name": "trace", "file": str(file), "period_s": 100})
    assert rule.until(0, 7, 0) == math.inf


def test_an_interval_may_span_the_end_of_the_period(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("client,start_s,end_s\n0,0,5\n0,90,100\n1,0,100\n")
    rule = availability({"name": "trace", "file": str(file), "period_s": 100})
    assert (rule.until(0, 95, 0), rule.until(1, 50, 0)) == (105, math.inf)


def test_an_interval_may_end_between_two_seconds(tmp_path):
    """604800 + 0.1 is rounded to less than the end of the second period's interval."""
    file = tmp_path / "trace.csv"
    file.write_text("client,start_s,end_s\n0,0,0.1\n0,0.1,0.3\n0,7,604800\n1,0,0.1\n")
    rule = availability({"name": "trace", "file": str(file), "period_s": 604800})
    for turn in range(1, 2000):
        start = turn * 604800.0
        end = start + 0.1
        assert rule.until(1, start, 0) == end == rule.until(1, end, 0)
        assert rule.until(0, end, 0) == rule.until(0, start - 9, 0) == start + 0.3 == rule.until(0, start + 0.3, 0)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0,0,10\n2,0,10\n", "client 1 is missing"),
        ("0,0,10\n0,5,20\n", "line 3: 5 to 20 of client 0 is not valid"),
        ("0,0,200\n", "line 2: 0 to 200 of client 0 is not valid"),
        ("0,5,x\n", "line 2: 0, 5, x are not numbers"),
        ("0,5\n", "line 2 does not have 3 cells"),
        ("", "client 0 is missing"),
    ],
)
def test_bad_traces(tmp_path, lines, message):
    file = tmp_path / "trace.csv"
    file.write_text(f"client,start_s,end_s\n{lines}")
    with pytest.raises(ConfigError) as error:
        availability({"name": "trace", "file": str(file), "period_s": 100}).check(1)
    assert str(error.value).startswith(f"{file}: {message}")
