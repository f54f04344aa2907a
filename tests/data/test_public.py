"""Public data: a share of the training set, another data set, or noise."""

import pickle
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
import yaml
from helpers import simulate, tiny
from typer.testing import CliRunner

from rayfl import cli
from rayfl.config import ConfigError
from rayfl.core.seeds import numpy_generator
from rayfl.data import DATASETS_KIND, federate
from rayfl.data.arrays import Arrays
from rayfl.data.base import Public
from rayfl.data.memory import InMemory
from rayfl.data.partition import hold_out, partition
from rayfl.data.partition.base import Labels
from rayfl.data.partition.dirichlet import Dirichlet
from rayfl.data.partition.iid import IID
from rayfl.data.partition.users import Users
from rayfl.data.synthetic import Synthetic
from rayfl.reference.schema import schema

SMALL = {"name": "synthetic", "samples": 600, "test_samples": 100}
PLAIN = Synthetic(samples=600, test_samples=100)
ARRAYS = PLAIN.arrays()
OTHER = {"name": "synthetic", "samples": 50, "test_samples": 10, "classes": 7}


def with_public(own=SMALL, **public):
    own = {"name": own} if isinstance(own, str) else own
    return DATASETS_KIND.read({**own, "public": public}, "data")


def refused(message, own=SMALL, **public):
    with pytest.raises(ConfigError) as error:
        with_public(own, **public).arrays()
    assert str(error.value) == message


def same(one, other):
    return np.array_equal(one.idx, other.idx) and np.array_equal(one.ptr, other.ptr)


# the section


@pytest.mark.parametrize("given", [{}, {"labeled": True}, {"share": 0.1, "noise": 3}, {"share": 0.1, "data": "digits"}])
def test_it_has_one_source(given):
    with pytest.raises(ConfigError, match="set. Allowed: exactly one of share, data and noise"):
        with_public(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"noise": 3, "labeled": True}, "public.labeled: noise has no labels. Allowed: false"),
        (
            {"data": {**OTHER, "public": {"share": 0.1}}},
            "public.data.public: a public data set has a public section. Allowed: none",
        ),
        ({"data": "digitz"}, "public.data: name: no data set is called 'digitz'. Did you mean 'digits'?"),
        ({"data": {**OTHER, "samples": 0}}, "public.data: samples: 0 is not valid. Allowed: at least 1"),
        ({"share": 1}, "public.share: 1 is not valid. Allowed: less than 1"),
        ({"share": 0.1, "count": 0}, "public.count: 0 is not valid. Allowed: at least 1"),
    ],
)
def test_sections_that_are_wrong(given, message):
    with pytest.raises(ConfigError, match=re.escape(f"data: {message}")):
        with_public(**given)


@pytest.mark.parametrize("name", ["digits", "mnist", "synthetic", "synthetic_text", "wikitext2"])
def test_without_it_a_dump_has_no_key(name):
    """Older checkpoints keep the same configuration."""
    data = DATASETS_KIND.read(name, "data")
    for mode in ("python", "json"):
        assert "public" not in data.model_dump(mode=mode)
    assert "public" not in tiny().result_config()["data"]


def test_a_dump_reads_as_the_same():
    for data in (with_public(data=OTHER, count=3), with_public(share=0.25), with_public("digits", noise=7)):
        dumped = data.model_dump(mode="json")
        assert DATASETS_KIND.read(dumped, "data") == data == pickle.loads(pickle.dumps(data))
        assert data.described().model_dump(mode="json") == dumped
        assert data.in_result() == data.described().in_result() == dumped


def test_a_result_does_not_depend_on_where_files_lie():
    own, other = {"name": "mnist", "root": "here"}, {"name": "fashion_mnist", "root": "there"}
    data = with_public(own, data=other)
    assert data.public.data.root == "there" and data.model_dump()["public"]["data"]["root"] == "there"
    for found in (data.in_result(), data.described().in_result()):
        assert "root" not in found and found["public"]["data"]["name"] == "fashion_mnist"
        assert "root" not in found["public"]["data"]


# a share of the training set


@pytest.mark.parametrize("rule", [IID(), Dirichlet()])
def test_without_it_rows_are_as_they_were(rule):
    found = federate(PLAIN, ARRAYS, rule, 8, 0.1, 3, 0.2)
    assert len(found.public) == 0 and found.public.dtype == np.int64 and found.public_source == "train"
    kept, _ = hold_out(ARRAYS.train["y"], 0.1, numpy_generator(3, "hold_out"))
    train, test = partition(rule, Labels(ARRAYS.train["y"][kept], ARRAYS.test["y"], None, 10), 8, 3)
    for c in range(8):
        assert np.array_equal(np.sort([*found.train[c], *found.local_validation[c]]), kept[train[c]])
    assert same(found.test, test)
    # other sources take nothing either
    for public in ({"noise": 3}, {"data": OTHER}):
        data = with_public(**public)
        other = federate(data, data.arrays(), rule, 8, 0.1, 3, 0.2)
        assert same(found.train, other.train) and same(found.test, other.test)
        assert np.array_equal(found.validation, other.validation)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_public_rows_belong_to_no_client(seed):
    data = with_public(share=0.2)
    found = federate(data, data.arrays(), Dirichlet(), 8, 0.1, seed, 0.2)
    assert found.public_source == "train" and (np.diff(found.public) > 0).all()
    parts = [found.train.idx, found.local_validation.idx, found.validation, found.public]
    assert sorted(np.concatenate(parts)) == list(range(600))
    # of 60 samples of a class, whatever is held out before
    assert np.bincount(ARRAYS.train["y"][found.public]).tolist() == [12] * 10
    assert np.bincount(ARRAYS.train["y"][found.validation]).tolist() == [6] * 10
    # validation rows and clients' test rows are those of a run without it
    plain = federate(PLAIN, ARRAYS, Dirichlet(), 8, 0.1, seed, 0.2)
    assert np.array_equal(found.validation, plain.validation) and found.test_source == "test"


def test_it_follows_from_the_runs_seed():
    data = with_public(share=0.2)
    arrays = data.arrays()
    first, again, other = (federate(data, arrays, IID(), 8, 0.1, seed).public for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_public_rows_are_not_in_users_test_splits():
    users = np.arange(600) // 60
    data = with_public(share=0.2)
    found = federate(data, Arrays(ARRAYS.train, ARRAYS.test, users), Users(test_fraction=0.5), 10, 0.1, 0)
    assert found.test_source == "train"
    assert sorted([*found.train.idx, *found.test.idx, *found.validation, *found.public]) == list(range(600))
    for c in range(10):
        assert set(users[found.train[c]]) == {c}


def test_the_rest_of_a_share_belongs_to_no_client():
    """`count` changes what is public, and nothing about clients."""
    whole, some = with_public(share=0.2), with_public(share=0.2, count=30)
    arrays = whole.arrays()
    all_rows, found = (federate(data, arrays, IID(), 8, 0.1, 0) for data in (whole, some))
    assert len(found.public) == 30 and set(found.public) < set(all_rows.public) and (np.diff(found.public) > 0).all()
    assert same(found.train, all_rows.train)


@pytest.mark.parametrize(
    ("share", "held", "of"), [(0.001, 0, 540), (0.95, 540, 540)], ids=["takes nothing", "leaves nothing"]
)
def test_shares_that_leave_no_rows(share, held, of):
    data = with_public(share=share)
    with pytest.raises(ConfigError) as error:
        federate(data, data.arrays(), IID(), 8, 0.1, 0)
    assert str(error.value) == (
        f"data.public.share: {share:g} selects {held} of {of} training samples. Allowed: a fraction that selects at "
        "least one sample and leaves at least one for clients"
    )


def test_a_share_of_tokens():
    data = with_public({"name": "synthetic_text", "task": "masked_lm"}, share=0.1)
    arrays = data.arrays()
    assert arrays.public is None
    assert len(federate(data, arrays, IID(), 8, 0.1, 0).public) == 200


def test_arrays_without_public_samples_are_refused():
    with pytest.raises(ConfigError, match="data.public: the arrays have no public samples"):
        federate(with_public(noise=3), ARRAYS, IID(), 8, 0.1, 0)


# another data set


def test_samples_of_another_data_set():
    """Samples are stored unchanged, without labels."""
    data, theirs = with_public(data=OTHER), DATASETS_KIND.read(OTHER, "data").arrays()
    arrays = data.arrays()
    assert arrays.public is not None and arrays.public.keys() == arrays.train.keys()
    assert np.array_equal(arrays.public["x"], theirs.train["x"]) and arrays.public["x"].dtype == np.uint8
    assert arrays.public["y"].tolist() == [0] * 50 and arrays.public["y"].dtype == arrays.train["y"].dtype
    found = federate(data, arrays, IID(), 8, 0.1, 0)
    assert found.public_source == "public" and found.public.tolist() == list(range(50))
    assert np.array_equal(arrays.train["x"], ARRAYS.train["x"]) and np.array_equal(arrays.test["y"], ARRAYS.test["y"])


def test_some_of_them():
    """The samples are the same in every run, in stored order."""
    theirs = DATASETS_KIND.read(OTHER, "data").arrays().train["x"]
    few, more = (with_public(data=OTHER, count=count).arrays().public["x"] for count in (10, 80))
    assert np.array_equal(more, theirs) and len(few) == 10
    rows = [int(np.flatnonzero((theirs == one).all((1, 2, 3)))[0]) for one in few]
    assert rows == sorted(set(rows)) != list(range(10))
    assert np.array_equal(few, with_public(data=OTHER, count=10).arrays().public["x"])


def test_labels_may_be_used():
    other = {**OTHER, "classes": 10}
    labels = with_public(data=other, labeled=True, count=20).arrays().public["y"]
    assert len(labels) == 20 and len(set(labels.tolist())) > 1
    refused(
        "data.public.labeled: synthetic has 7 classes. Allowed: false, or a data set with 10 classes as in synthetic",
        data=OTHER,
        labeled=True,
    )


def test_labels_of_a_share_are_hidden_by_the_section():
    samples = {"x": torch.ones(3, 2), "y": torch.tensor([1, 2, 3])}
    assert Public(share=0.1, labeled=True).shown(samples) is samples
    shown = Public(share=0.1).shown(samples)
    assert shown["y"].tolist() == [0, 0, 0] and shown["y"].dtype == torch.int64 and shown["x"] is samples["x"]
    assert samples["y"].tolist() == [1, 2, 3]
    assert Public(share=0.1).shown({"x": samples["x"]}).keys() == {"x"}


def test_samples_that_do_not_fit():
    refused(
        "data.public: samples of synthetic have shape [3, 4, 4]. Allowed: [1, 8, 8] as in synthetic",
        data={**OTHER, "shape": [3, 4, 4]},
    )
    refused(
        "data.public: digits has pixels in units of 16. Allowed: pixels in units of 255 as in synthetic", data="digits"
    )
    floats = InMemory(np.linspace(0, 1, 640, dtype=np.float32).reshape(10, 1, 8, 8), np.arange(10) % 2, scale=255)
    refused("data.public: x of arrays has the type float32. Allowed: uint8 as in synthetic", data=floats)
    masked = {"name": "synthetic_text", "task": "masked_lm"}
    with pytest.raises(
        ConfigError, match="synthetic_text has the arrays x and y. Allowed: x and hidden as in synthetic_text"
    ):
        with_public(masked, data="synthetic_text").arrays()


def test_the_data_set_itself_is_refused():
    """Its samples belong to clients."""
    refused(
        "data.public.data: synthetic has the training samples of synthetic, which clients have. Allowed: another data "
        "set. Hint: use share for a part of the training set",
        data=SMALL,
    )


def written(folder: Path, name: str, rows: str, **options) -> dict:
    """Write a table of these rows. Return its section."""
    (folder / f"{name}.csv").write_text(rows)
    file = str(folder / f"{name}.csv")
    return {
        "name": "table",
        "train": file,
        "test": file,
        "y": "ill",
        "x": ["age", "sex"],
        "categories": ["sex"],
    } | options


ROWS = "age,sex,ill\n30,f,no\n40,m,yes\n"


def test_tables_have_the_same_columns_and_categories(tmp_path):
    """A stored category is the number of its value."""
    own = written(tmp_path, "own", ROWS)
    found = with_public(own, data=written(tmp_path, "other", "age,sex,ill\n50,m,yes\n60,f,no\n70,f,no\n")).arrays()
    assert found.public["x"].tolist() == [[50, 1], [60, 0], [70, 0]]
    refused(
        "data.public: table has the categories d, f in column 'sex'. Allowed: the categories f, m as in table",
        own,
        data=written(tmp_path, "other", ROWS.replace("f", "d").replace("m", "f")),
    )
    refused(
        "data.public: table has the input columns mass, sex. Allowed: age, sex as in table",
        own,
        data=written(tmp_path, "other", ROWS.replace("age", "mass"), x=["mass", "sex"]),
    )
    numbers = ROWS.replace("f", "0").replace("m", "1")
    refused(
        "data.public: table has no categories in column 'sex'. Allowed: the categories f, m as in table",
        own,
        data=written(tmp_path, "other", numbers, categories=[]),
    )
    arrays = InMemory(np.array([[30, 0], [50, 1]], np.float32), np.arange(2), np.ones((2, 2), np.float32), np.arange(2))
    refused(
        "data.public: arrays has no categories in column 'sex'. Allowed: the categories f, m as in table",
        own,
        data=arrays,
    )
    plain = written(tmp_path, "plain", numbers, categories=[])
    assert len(with_public(plain, data=arrays).arrays().public["x"]) == 2


def test_classes_have_the_same_names_if_labels_are_used(tmp_path):
    own, other = written(tmp_path, "own", ROWS), written(tmp_path, "other", "age,sex,ill\n50,f,yes\n60,m,zz\n")
    assert with_public(own, data=other).arrays().public["y"].tolist() == [0, 0]
    refused(
        "data.public.labeled: table has the classes yes, zz. Allowed: false, or a data set with the classes no, yes as "
        "in table",
        own,
        data=other,
        labeled=True,
    )
    same = written(tmp_path, "other", "age,sex,ill\n50,f,yes\n60,m,no\n")
    assert with_public(own, data=same, labeled=True).arrays().public["y"].tolist() == [1, 0]


def test_tokens_of_another_vocabulary():
    with pytest.raises(
        ConfigError, match="synthetic_text has other tokens than synthetic_text. Allowed: data with the same"
    ):
        with_public("synthetic_text", data="synthetic_text").arrays()


def write_text(folder: Path, name: str, words: str) -> dict:
    """Write a data set of four texts. Return its section."""
    path = folder / f"{name}.csv"
    path.write_text("text,label\n" + "".join(f"{word},{i % 2}\n" for i, word in enumerate(words.split())))
    return {"name": "text", "train": str(path), "test": str(path), "text": "text", "label": "label", "max_length": 4}


def test_texts_by_the_same_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYFL_CACHE", str(tmp_path / "cache"))
    for name, last in (("one", "d"), ("two", "e")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abc", last]) + "\n")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    own, other = write_text(tmp_path, "own", "a b a b"), write_text(tmp_path, "other", "c d c d")
    found = with_public({**own, "tokenizer": one}, data={**other, "tokenizer": one}).arrays()
    assert (
        found.public["x"].tolist() == DATASETS_KIND.read({**other, "tokenizer": one}, "").arrays().train["x"].tolist()
    )
    assert found.public["y"].tolist() == [0] * 4
    with pytest.raises(ConfigError, match="text has other tokens than text. Allowed: data with the same tokenizer"):
        with_public({**own, "tokenizer": one}, data={**other, "tokenizer": two}).arrays()


def test_tokens_on_disk_do_not_depend_on_it(tmp_path, monkeypatch):
    """Texts are not tokenised again."""
    monkeypatch.setenv("RAYFL_CACHE", str(tmp_path / "cache"))
    own = write_text(tmp_path, "own", "a b a b")
    DATASETS_KIND.read(own, "data").arrays()
    before = sorted((tmp_path / "cache").rglob("*"))
    with_public(own, share=0.5).arrays()
    assert sorted((tmp_path / "cache").rglob("*")) == before


# noise


def test_noise_is_uniform_over_stored_bytes():
    arrays = with_public("digits", noise=2000).arrays()
    x = arrays.public["x"]
    assert x.shape == (2000, 1, 8, 8) and x.dtype == np.uint8 and not arrays.public["y"].any()
    share = np.bincount(x.ravel(), minlength=17) / x.size
    assert len(share) == 17 and share == pytest.approx([1 / 17] * 17, abs=0.004)
    assert np.array_equal(x, with_public("digits", noise=2000).arrays().public["x"])
    assert np.array_equal(x[:5], with_public("digits", noise=2000, count=5).arrays().public["x"])


def test_noise_of_floats_is_standard_normal():
    own = InMemory(
        np.linspace(0, 1, 640, dtype=np.float32).reshape(10, 1, 8, 8), np.arange(10) % 2, public={"noise": 999}
    )
    x = own.arrays().public["x"]
    assert x.dtype == np.float32 and x.shape == (999, 1, 8, 8)
    assert (x.mean(), x.std()) == (pytest.approx(0, abs=0.02), pytest.approx(1, abs=0.02))


def test_tokens_have_no_noise():
    refused(
        "data.public.noise: the samples of synthetic_text are not images. Allowed: share or data",
        "synthetic_text",
        noise=3,
    )


# serialisation and runs


def test_arrays_in_memory_are_found_again():
    x, y = np.arange(640, dtype=np.uint8).reshape(10, 1, 8, 8), np.arange(10) % 2
    own = InMemory(x, y, public={"data": InMemory(x[::-1].copy(), y)})
    kept = DATASETS_KIND.read(own.model_dump(mode="json"), "data")
    assert isinstance(kept, InMemory) and kept == own
    with pytest.raises(ConfigError, match="without the samples"):
        kept.arrays()
    assert np.array_equal(kept.holding(own).arrays().public["x"], own.arrays().public["x"])


def test_a_description_has_the_section_and_no_samples():
    x = np.zeros((2000, 1, 8, 8), np.uint8)
    data = with_public(data=InMemory(x, np.arange(2000) % 2))
    described = pickle.loads(pickle.dumps(data.described()))
    assert len(pickle.dumps(described)) < 20_000 < x.nbytes
    assert described.public is not None and described.public.data is not None
    assert described.public.data.name == "arrays" and not described.public.labeled
    assert described.model_dump(mode="json") == data.model_dump(mode="json")
    assert len(pickle.loads(pickle.dumps(data.arrays())).public["x"]) == 1600


def test_a_run_with_it_gives_the_numbers_of_one_without():
    """A method that does not use it, and another source than a share."""
    from rayfl.driver import run

    lines = []
    for public in ({}, {"public": {"noise": 8}}):
        result = run(tiny(data=public, rounds=1))
        lines.append([{k: v for k, v in line.items() if k != "seconds"} for line in result.lines])
    assert lines[0] == lines[1]


def test_check_and_schema_know_it(tmp_path):
    given = {"data": {**SMALL, "public": {"data": OTHER, "count": 5}}, "model": "digits_cnn"}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(given))
    answer = CliRunner().invoke(cli.app, ["check", str(path)])
    assert answer.exit_code == 0 and "valid run of fedavg" in answer.output
    answer = CliRunner().invoke(cli.app, ["explain", "data.public.share"])
    assert answer.exit_code == 0 and "more than 0, less than 1" in answer.output
    validator = jsonschema.Draft202012Validator(schema("run"))
    assert validator.is_valid(given) and validator.is_valid({**given, "data": {**SMALL, "public": {"data": "digits"}}})
    for wrong in ({"share": 2}, {"data": "digitz"}, {"noise": 0}, {"data": {"name": "mnist", "shape": 3}}, {"cout": 3}):
        assert not validator.is_valid({**given, "data": {**SMALL, "public": wrong}}), wrong
    [*sections] = re.findall(r"^```yaml\n(data: .*public:.*)\n```", Path("rayfl/data/README.md").read_text(), re.M)
    assert len(sections) == 2
    for section in sections:
        read = DATASETS_KIND.read(yaml.safe_load(section)["data"], "data")
        assert read.public is not None and validator.is_valid({**given, **yaml.safe_load(section)})


@pytest.mark.parametrize("labeled", [False, True])
def test_labels_of_public_samples_are_hidden(labeled, tmp_path):
    data = {"public": {"share": 0.3, "labeled": labeled}}
    worker = simulate(tiny(method="feddf", partition="iid", data=data), tmp_path).executor.worker
    assert bool(worker.public.samples["y"].any()) == labeled
