"""Bounded reading of YAML: errors have a place and are found quickly."""

import time

import pytest
import yaml

from rayfl.config import plain
from rayfl.config.plain import DEEPEST, LARGEST_TEXT, MOST_VALUES, public, read_yaml, shown, write_yaml


def message(text: str | bytes) -> str:
    with pytest.raises(ValueError) as error:
        read_yaml(text)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-2.5E+4", -25000.0),
        (".5e1", 5.0),
        ("1e3", 1000.0),
        ("3", 3),
        ("a1-e9", "a1-e9"),
        ("yes", True),
        ("~", None),
        ("'1e-3'", "1e-3"),
        ("!!str 5", "5"),
        ("2024-05-06", "2024-05-06"),
        ("2024-99-99", "2024-99-99"),
        ("=", "="),
    ],
)
def test_single_values(text, value):
    found = read_yaml(f"lr: {text}\nmany: [{text}, {text}]")
    assert found == {"lr": value, "many": [value, value]}
    assert type(found["lr"]) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        "7011964022e3",
        "1e-3",
        "-.5e2",
        "2024-05-06",
        "yes",
        "null",
        "1:30",
        "",
        "010",
        "08",
        "<<",
        1e-5,
        0.1,
        10**12,
        True,
        None,
    ],
)
def test_what_is_written_is_read_as_it_was(value):
    """A commit can look like a number."""
    written = write_yaml({"given": value, "a": [value]})
    assert read_yaml(written) == yaml.safe_load(written) == {"given": value, "a": [value]}


def test_sections_lists_and_aliases():
    assert read_yaml("") is None
    assert read_yaml("a: &x {b: [1, {c: d}]}\ne: *x\n") == {"a": {"b": [1, {"c": "d"}]}, "e": {"b": [1, {"c": "d"}]}}


def test_sections_are_merged():
    """Keys of the section itself count, then those of the first section."""
    text = "a: &a {lr: 1, clip: 2}\nb: &b {lr: 3, decay: 4}\n"
    assert read_yaml(text + "c: {<<: *b, clip: 5}")["c"] == {"lr": 3, "decay": 4, "clip": 5}
    assert read_yaml(text + "c: {clip: 5, <<: [*a, *b]}")["c"] == {"lr": 1, "clip": 5, "decay": 4}
    assert read_yaml(text + "c: {'<<': *b}")["c"] == {"<<": {"lr": 3, "decay": 4}}


@pytest.mark.parametrize("text", ["010", "0012", "-07", "08", "0_1"])
def test_leading_zeros_are_refused(text):
    """YAML 1.1 reads 010 as 8, YAML 1.2 as 10."""
    assert message(f"rounds: {text}") == (
        f'rounds (line 1): {text} is not valid. Allowed: whole numbers without leading zeros, or "{text}" in quotes '
        "for text"
    )
    assert read_yaml(f"a: '{text}'\nb: [0, 0.5, 0x1F, 1_000, 10:05]") == {"a": text, "b": [0, 0.5, 31, 1000, "10:05"]}


MISTAKES = {
    "no section to merge": (
        "training:\n  <<: [{lr: 1}, 5]\n",
        "training.<< (line 2): [{'lr': 1}, 5] is not valid. Allowed: a section or a list of sections",
    ),
    "sections merged twice": (
        "a: {<<: {b: 1}, <<: {c: 1}}",
        "a.<< (line 1): the key is already on line 1. Allowed: once",
    ),
    "a key twice": (
        "model: a\ntraining:\n  lr: 1\n  lr: 2\n",
        "training.lr (line 4): the key is already on line 3. Allowed: once",
    ),
    "a number as key": ("rows:\n  5: {}\n", 'rows (line 2): the key 5 is not text. Allowed: text, e.g. "5" in quotes'),
    "nothing as key": ("rows: {~: {}}", 'rows (line 1): the key ~ is not text. Allowed: text, e.g. "~" in quotes'),
    "a truth value as key": ("on: 1", 'line 1: the key on is not text. Allowed: text, e.g. "on" in quotes'),
    "a list as key": ("a:\n  [1, 2]: 3", "a (line 2): a key is a list or a section. Allowed: text"),
    "a key in a list": (
        "a: [{b: 1}, {1: 2}]",
        'a.1 (line 1): the key 1 is not text. Allowed: text, e.g. "1" in quotes',
    ),
    "a large number": (
        "randint: [0, 9223372036854775808]",
        "randint.1 (line 1): 9223372036854775808 is not valid. Allowed: finite numbers, whole ones below 2**63",
    ),
    "infinity": ("a: -.inf", "a (line 1): -.inf is not valid. Allowed: finite numbers, whole ones below 2**63"),
    "too large a float": (
        "a: 1e999",
        "a (line 1): 1e999 is not valid. Allowed: finite numbers, whole ones below 2**63",
    ),
    "no number": ("a: !!int x", "a (line 1): x is not valid. Allowed: finite numbers, whole ones below 2**63"),
    "a tag": (
        "a: [!!python/name:os.system x]",
        "a.0 (line 1): the tag tag:yaml.org,2002:python/name:os.system is not supported. Allowed: values without a tag",
    ),
    "a tagged section": (
        "a: !!set {b}",
        "a (line 1): the tag tag:yaml.org,2002:set is not supported. Allowed: values without a tag",
    ),
    "an open list": ("a: [1\n", "not valid YAML: line 2, column 1: did not find expected ',' or ']'"),
    "two documents": ("a: 1\n---\nb: 1\n", "not valid YAML: line 2, column 1: but found another document"),
    "an unknown alias": ("a: *b", "not valid YAML: line 1, column 4: found undefined alias"),
    "no UTF-8": (
        b"a: \xff\n",
        'not valid YAML: unacceptable character #x00ff: invalid leading UTF-8 octet in "<byte string>", position 3',
    ),
    "an alias of itself": ("a: &x [*x]", "line 1: sections or lists are nested more than 50 deep. Allowed: at most 50"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    text, expected = MISTAKES[mistake]
    assert message(text) == expected


def test_more_digits_than_python_reads():
    expected = f"a (line 1): '{'9' * 199}... is not valid. Allowed: finite numbers, whole ones below 2**63"
    assert message(f"a: {'9' * 5000}") == expected


def test_depth():
    assert read_yaml("[" * DEEPEST + "]" * DEEPEST)
    assert message("a: 1\nb: " + "[" * DEEPEST + "]" * DEEPEST) == (
        f"line 2: sections or lists are nested more than {DEEPEST} deep. Allowed: at most {DEEPEST}"
    )


BOMB = "\n".join(["a0: &a0 [1, 1]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))])

LONG = {
    "brackets": (
        "[" * (LARGEST_TEXT - 1),
        "line 1: sections or lists are nested more than 50 deep. Allowed: at most 50",
    ),
    "numbers": (
        "a: [" + "1," * 500_000 + "]",
        "the text has more than 200000 keys and values. Allowed: at most 200000",
    ),
    "a comment": ("#" * 10**8, f"the text has more than {LARGEST_TEXT} bytes. Allowed: at most {LARGEST_TEXT}"),
    "aliases": (BOMB, "the text has more than 200000 keys and values. Allowed: at most 200000"),
}


@pytest.mark.parametrize("case", LONG)
def test_long_texts(case):
    text, expected = LONG[case]
    start = time.process_time()
    assert message(text) == expected
    assert time.process_time() - start < 10


def test_many_keys_take_linear_time():
    """Comparing every key with all others would take minutes."""
    count = MOST_VALUES // 5
    start = time.process_time()
    assert len(read_yaml("\n".join(f"k{i}: 1" for i in range(count)))) == count
    assert time.process_time() - start < 10


def test_the_reader_without_libyaml(monkeypatch):
    """PyYAML's loader in Python reads the same values."""
    text = "a: &x {b: [1, 1e-3, 'c', ~, yes, 2024-05-06]}\nd: *x\n"
    expected = {"b": [1, 1e-3, "c", None, True, "2024-05-06"]}
    assert read_yaml(text) == {"a": expected, "d": expected}

    class Pure(yaml.SafeLoader):
        yaml_implicit_resolvers = plain._Loader.yaml_implicit_resolvers

    monkeypatch.setattr(plain, "_Loader", Pure)
    assert read_yaml(text) == {"a": expected, "d": expected}
    assert message("a: [1\n") == "not valid YAML: line 2, column 1: expected ',' or ']', but got '<stream end>'"


@pytest.mark.parametrize(
    ("text", "shown_as"),
    [
        ("http://bob:p@ss@host:5000/a", "http://host:5000/a"),
        ("at http://bob@host, not a@b", "at http://host, not a@b"),
        ("http://host/a@b?x=1", "http://host/a@b?x=1"),
        ("http://host?password=a%20b&x=1&api_TOKEN=c", "http://host?password=...&x=1&api_TOKEN=..."),
        ("--tracking-uri='http://h/?token=abc' --set a=1", "--tracking-uri='http://h/?token=...' --set a=1"),
    ],
)
def test_passwords_in_urls_are_not_shown(text, shown_as):
    assert public(text) == shown_as


def test_long_values_are_shown_by_their_start():
    assert shown([1, "a"]) == "[1, 'a']"
    assert shown("a" * 198) == repr("a" * 198)
    assert shown("a" * 199) == "'" + "a" * 199 + "..."
