"""Published traces become the CSV files that the `system:` section reads; code in pickles does not run."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rayfl.system import AVAILABILITY_KIND, DEVICES_KIND, Speed

SCRIPTS = Path.cwd() / "scripts"

READY = "2020-02-01 08:00:00\tscreen_lock\n2020-02-01 08:00:10\tWIFI\n2020-02-01 08:00:20\tbattery_charged_on\n"
"""Ready after 20 seconds."""


@pytest.fixture
def convert(script, monkeypatch, tmp_path, capsys):
    """Runs the script on an object, written as its format says. Returns exit code, rows, stdout and stderr."""
    convert_traces = script("convert_traces")

    def run(format, given, *options):
        file, out = tmp_path / "published", tmp_path / "out.csv"
        if not isinstance(given, bytes):
            given = json.dumps(given).encode() if format == "flash" else pickle.dumps(given)
        file.write_bytes(given)
        monkeypatch.setattr(sys, "argv", ["convert_traces.py", format, str(file), str(out), *options])
        code = 0
        try:
            convert_traces.main()
        except SystemExit as ended:
            code = ended.code
        assert {path.name for path in tmp_path.iterdir()} <= {"published", "out.csv"}
        printed = capsys.readouterr()
        return code, out.read_text().splitlines() if out.exists() else None, printed.out, printed.err

    yield run
    del sys.modules["convert_traces"]


def user(messages):
    return {"guid": "a", "model": "b", "messages": messages}


def behaviour(active, inactive, finish_time):
    return {"duration": 1, "active": active, "inactive": inactive, "finish_time": finish_time, "model": "b"}


def trace_of(tmp_path, period):
    return AVAILABILITY_KIND.read(
        {"name": "trace", "file": str(tmp_path / "out.csv"), "period_s": period}, "availability"
    )


def test_users_of_flash_are_ready_while_locked_charging_and_on_wifi(convert, tmp_path):
    first = READY + (
        "2020-02-01 08:00:30\tscreen_on\n"  # still locked
        "2020-02-01 08:00:40\t87.0%\n"
        "2020-02-01 08:00:50\t4G\n"  # 20 to 50
        "2020-02-01 08:01:00\twifi\n"
        "2020-02-01 08:01:00\tscreen_unlock\n"  # an empty interval
        "2020-02-01 08:01:10\tscreen_lock\n"
        "\n"
        "2020-02-01 08:01:20\tbattery_charged_off\n"  # 70 to 80
        "2020-02-01 08:01:30\tbattery_charged_on\n"  # 90 to the end: open
        "2020-02-01 08:01:40\tscreen_off\n"
    )
    # the period is 60 seconds
    second = READY + "2020-02-01 08:00:30\tUnknown\n2020-02-01 08:01:00\tscreen_off"
    code, rows, out, err = convert("flash", {"7": user(first), "3": user(second)}, "--period", "140")
    assert (code, out, err) == (0, f"{tmp_path / 'out.csv'}: clients written: 2\n", "")
    assert rows == ["client,start_s,end_s", "0,20,50", "0,70,80", "0,120,140", "1,20,30", "1,80,90"]
    rule = trace_of(tmp_path, 140)
    rule.check(2)
    assert [rule.until(0, at, 0) for at in (0, 20, 49, 50, 139, 140, 160)] == [0, 50, 50, 50, 140, 140, 190]


def test_touching_intervals_of_flash_are_merged(convert):
    messages = READY + (
        "2020-02-01 08:00:30\tscreen_unlock\n"
        "2020-02-01 08:00:30\tscreen_lock\n"  # 20 to 30 and 30 to 40
        "2020-02-01 08:00:40\tbattery_charged_off\n"
    )
    assert convert("flash", {"0": user(messages)}, "--period", "40")[1] == ["client,start_s,end_s", "0,20,40"]


def test_days_of_flash_have_24_hours_in_all_time_zones(convert, monkeypatch):
    import time

    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        # clocks change in this night
        messages = READY.replace("02-01", "03-28") + "2020-03-29 08:00:00\tscreen_unlock\n"
        assert convert("flash", {"0": user(messages)})[1][:2] == ["client,start_s,end_s", "0,20,86400"]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "bad",
    [
        "2020-02-01 08:01:00\tphone_on",
        "2020-02-01 08:01:00 screen_unlock",
        "2020-02-01 8 o'clock\tscreen_unlock",
        "2020-02-01 08:01:00\tscreen_unlock\tagain",
        "2020-02-01 08:01:00\tfull%",
        "2020-02-01 08:01:00\tscreen_on",  # never unlocked: no interval that ends
    ],
)
def test_unusable_users_of_flash_are_skipped_and_counted(convert, tmp_path, bad):
    good = user(READY + "2020-02-01 08:01:00\tscreen_unlock")
    code, rows, _, err = convert("flash", {"a": user(READY + bad), "b": user(""), "c": good}, "--period", "60")
    assert (code, rows) == (0, ["client,start_s,end_s", "0,20,60"])
    assert err == f"{tmp_path / 'published'}: clients skipped: 2 (no interval, or unreadable data)\n"


def test_clients_of_fedscale_are_active_with_their_own_periods(convert, tmp_path):
    given = {
        5: behaviour([10, 50], [20, 60], 60),  # 50 to 60 of a turn does not touch 10 to 20 of the next
        2: behaviour([0, 90], [10, 100], 100),  # 90 to 100 touches 0 to 10 of the next turn
        9: behaviour([30, 5, 20], [40, 25, 20], 1000),  # in any order; 20 to 20 is empty
        4: behaviour([0.5], [5000], 100),  # cut at its own period
        1: behaviour([0], [100], 100),  # always
        7: behaviour([70], [80], 100),
    }
    code, rows, _, err = convert("fedscale", given, "--period", "150", "--clients", "5")
    assert (code, err) == (0, "")
    assert rows == [
        "client,start_s,end_s",
        *("0,10,20", "0,50,60", "0,70,80", "0,110,120", "0,130,140"),
        *("1,0,10", "1,90,110"),
        *("2,5,25", "2,30,40"),
        *("3,0.5,100", "3,100.5,150"),
        "4,0,150",
    ]
    rule = trace_of(tmp_path, 150)
    rule.check(5)
    assert rule.until(1, 95, 0) == 110 and rule.until(4, 0, 0) == float("inf")
    with pytest.raises(ValueError, match="has 5 clients"):
        rule.check(6)


def test_unusable_clients_of_fedscale_are_skipped_and_counted(convert, tmp_path):
    given = {
        0: behaviour([], [], 100),
        1: behaviour([1, 2], [3], 100),
        2: behaviour([1], [2], 0),
        3: behaviour([700_000], [700_001], 800_000),  # after seven days
        4: behaviour([1], [2], 604_800),
    }
    code, rows, _, err = convert("fedscale", given)
    assert (code, rows) == (0, ["client,start_s,end_s", "0,1,2"])
    assert "clients skipped: 4 (" in err
    trace_of(tmp_path, 604_800).check(1)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_devices_of_fedscale(convert, tmp_path, protocol):
    given = {
        "a": {"computation": 100.0, "communication": 5000},
        "b": {"computation": 0, "communication": 5000},
        "c": {"computation": 30, "communication": 1234.5},
    }
    code, rows, _, err = convert("fedscale-devices", pickle.dumps(given, protocol))
    # 2 x 300e6 operations in 0.1 s and in 0.03 s
    assert (code, rows) == (
        0,
        ["name,gflops,down_mbps,up_mbps", "fedscale,6,5.12,5.12", "fedscale,20,1.264128,1.264128"],
    )
    assert "clients skipped: 1 (" in err
    table = DEVICES_KIND.read({"name": "table", "file": str(tmp_path / "out.csv")}, "devices")
    table.check(2)
    device = table.device(1, 0)
    assert (device.kind, device.gflops, device.down, device.up) == (
        "fedscale",
        Speed(20),
        Speed(1.264128),
        Speed(1.264128),
    )
    assert convert("fedscale-devices", given, "--macs", "1e9", "--clients", "1")[1][1:] == ["fedscale,20,5.12,5.12"]


class Code:
    """Its pickle creates a folder when it is loaded."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("format", ["fedscale", "fedscale-devices"])
def test_code_in_a_pickle_does_not_run(convert, tmp_path, format):
    text = pickle.dumps({0: Code(tmp_path / "made")})
    code, rows, out, err = convert(format, text)
    assert (code, rows, out) == (2, None, "")
    assert not (tmp_path / "made").exists()
    assert "the file cannot be read: the pickle refers to posix.mkdir, which could run code. Allowed: FedScale's" in err
    # pickle.load would have run it
    pickle.loads(text)
    assert (tmp_path / "made").exists()


DEVICE = {"computation": 1, "communication": 1}


@pytest.mark.parametrize(
    ("format", "given", "problem"),
    [
        ("flash", b"{", "the file cannot be read: Expecting property name"),
        ("flash", b"\xff\xfe\x00", "the file cannot be read: 'utf-"),
        ("flash", b"[" * 100_000, "the file cannot be read: "),
        ("flash", [1], "the file is not a dictionary of clients"),
        ("flash", {}, "no client can be used, and 0 have"),
        ("flash", {"a": user("")}, "no client can be used, and 1 have"),
        ("flash", {"a": {"guid": "a"}}, "the data of client 'a' are missing or have a wrong type"),
        ("flash", {"a": user([1])}, "the data of client 'a' are"),
        ("flash", {"a": None}, "the data of client 'a' are"),
        ("fedscale", b"", "the file cannot be read: "),
        ("fedscale", b"not a pickle", "the file cannot be read: "),
        ("fedscale", pickle.dumps({1: DEVICE})[:-5], "the file cannot be read: "),
        ("fedscale", [1], "the file is not a dictionary of clients"),
        ("fedscale", {1: DEVICE}, "the data of client 1 are"),
        ("fedscale", {1: behaviour([0], ["1"], 9)}, "the data of client 1 are"),
        ("fedscale", {1: behaviour([0], [float("nan")], 9)}, "the data of client 1 are"),
        ("fedscale", {1: behaviour([0], [10**400], 9)}, "the data of client 1 are"),
        ("fedscale", {1: behaviour([0], [True], 9)}, "the data of client 1 are"),
        ("fedscale", {1: behaviour(0, 1, 9)}, "the data of client 1 are"),
        ("fedscale", {1: behaviour([], [], 9)}, "no client can be used, and 1 have"),
        ("fedscale-devices", {1: behaviour([0], [1], 9)}, "the data of client 1 are"),
        ("fedscale-devices", {1: {"computation": "1", "communication": 1}}, "the data of client 1 are"),
        ("fedscale-devices", {1: {"computation": -1, "communication": 1}}, "no client can be used, and 1 have"),
    ],
)
def test_bad_input_is_one_sentence_and_no_file(convert, tmp_path, format, given, problem):
    code, rows, out, err = convert(format, given)
    assert (code, rows, out) == (2, None, "")
    assert err.startswith(f"{tmp_path / 'published'}: {problem}")
    assert err.count("\n") == 1 and err.count(". Allowed: F") == 1


def test_bad_input_leaves_the_output_of_before(convert, tmp_path):
    (tmp_path / "out.csv").write_text("before\n")
    assert convert("flash", b"{")[:2] == (2, ["before"])


@pytest.mark.parametrize("option", [("--period", "0"), ("--period", "nan"), ("--clients", "0"), ("--macs", "-1")])
def test_bad_options(convert, option):
    code, rows, _, err = convert("fedscale-devices", {1: DEVICE}, *option)
    assert (code, rows) == (2, None)
    assert err.endswith(". Allowed: a number above 0\n")


def test_the_command(tmp_path):
    """Missing input, and output in a missing folder."""
    for out, text in (
        ("nowhere/out.csv", "published: the file cannot be read"),
        ("nowhere/out.csv", "cannot be written"),
    ):
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / "convert_traces.py"), "fedscale-devices", "published", out],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert text in done.stderr and ": No such file or directory. Allowed: " in done.stderr
        (tmp_path / "published").write_bytes(pickle.dumps({1: DEVICE}))
    assert [path.name for path in tmp_path.iterdir()] == ["published"]
