"""Map-style Datasets of torch."""

import json
import pickle

import numpy as np
import pytest
import torch
from helpers import Photos, assert_same, message, read_data, tiny
from PIL import Image
from torch.utils.data import IterableDataset, Subset, TensorDataset

import rayfl
from rayfl import Datasets
from rayfl.config import RunFailed
from rayfl.data import Images, federate
from rayfl.data.federation import Federation
from rayfl.data.partition.users import Users
from rayfl.engine.inputs import changed, inputs_of
from rayfl.listeners import Listener

TENSORS = TensorDataset(torch.arange(40 * 27).view(40, 3, 3, 3) % 251 / 1.0, torch.arange(40) % 4)
FAKE = {"of": "torchvision.datasets:FakeData", "options": {"size": 40, "image_size": [3, 6, 5], "num_classes": 2}}


def batch(data, rows, seed=None):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    x, _ = data.prepare.batch({"x": torch.tensor(rows), "y": torch.zeros(len(rows))}, generator)
    return x


class Odd(torch.utils.data.Dataset):
    """Tensors with some samples replaced."""

    def __init__(self, **replaced):
        self.replaced = {int(name[1:]): item for name, item in replaced.items()}

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.replaced.get(index, (TENSORS[index][0], index % 4))


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])

    def __len__(self):
        return 40


# what it offers


def test_a_name_and_options_in_a_file():
    data = read_data(name="datasets", train=FAKE, test=FAKE | {"options": FAKE["options"] | {"random_offset": 99}})
    assert data.offers == {"input": (3, 6, 5), "classes": 2} and data.prepare.inner == Images(
        255, (0.5,) * 3, (0.25,) * 3
    )
    arrays = data.arrays()
    assert arrays.train["x"].tolist() == [*range(40)] and arrays.test["x"].tolist() == [*range(40, 80)]
    assert read_data(**json.loads(data.model_dump_json())) == data == pickle.loads(pickle.dumps(data))


def test_samples_are_those_of_the_datasets():
    """Bytes of PIL images are normalised, floats are not; test samples follow the training samples."""
    train, test = Photos(augmented=False), Photos(10, augmented=False, seed=1)
    pixels = np.stack([train.pixels[59], test.pixels[3]]).transpose(0, 3, 1, 2)
    expected = torch.from_numpy(pixels / np.float32(255) - np.float32(0.5)) / 0.25
    for generator in (None, 0):
        torch.testing.assert_close(batch(Datasets(train, test), [59, 63], generator), expected)
    floats = Datasets(TENSORS, Subset(TENSORS, [3, 5, 2, 0]))
    assert torch.equal(batch(floats, [7, 41]), torch.stack([TENSORS[7][0], TENSORS[5][0]]))


@pytest.mark.parametrize(("shape", "offered"), [((5,), {"variables": 5}), ((2, 7), {"series": (2, 7)})])
def test_samples_of_other_shapes(shape, offered):
    data = Datasets(TensorDataset(torch.ones(40, *shape), torch.arange(40) % 4), scaling="none")
    assert data.offers == offered | {"classes": 4} and batch(data, [3, 1]).shape == (2, *shape)
    assert message(lambda: data.model_copy(update={"scaling": "standard"}).prepare) == (
        "data.scaling: standard is not supported with keep: false. Allowed: none, or keep: true"
    )


def test_classes_come_from_an_attribute_that_is_right():
    class Labelled(Odd):
        reads = 0

        def __init__(self, targets):
            super().__init__()
            self.targets = targets

        def __getitem__(self, index):
            type(self).reads += 1
            return super().__getitem__(index)

    for targets, reads in ((np.arange(40) % 4, 16), (["a"] * 40, 56), ((np.arange(40) + 1) % 4, 56)):
        Labelled.reads = 0
        assert Datasets(dataset := Labelled(targets)).train.part("").labels.tolist() == [i % 4 for i in range(40)]
        assert Labelled.reads == reads
        part = Datasets(Subset(dataset, range(20, 40, 2))).train.part("")
        assert part.labels.tolist() == [0, 2] * 5


def test_users_are_an_attribute_or_a_method():
    data = Datasets(Photos(), Photos(10), user="writer")
    found = federate(data, data.arrays(), Users(), 5, 0.0, 0)
    assert (
        found.train.sizes.tolist() == [12] * 5 and found.test_source == "test" and found.test.sizes.tolist() == [2] * 5
    )
    arrays = Datasets(Subset(Photos(), range(0, 60, 3)), user="writer").arrays()
    assert [*arrays.users, *arrays.test_users].count("writer 3") == 4
    dataset = Odd()
    dataset.writers = torch.arange(40) % 5
    assert Datasets(dataset, dataset, user="writers").arrays().users.tolist() == [i % 5 for i in range(40)]
    assert message(Datasets(Odd(), user="writers").arrays) == (
        "data.user: train has no attribute 'writers'. Allowed: one of its attributes"
    )


def test_what_is_kept_is_an_array():
    given = {"crop": 1, "flip": True}
    train, test = Photos(augmented=False), Photos(10, augmented=False, seed=1)
    arrays = Datasets(train, test, keep=True, **given).arrays()
    same = rayfl.InMemory(
        *(f for one in (train, test) for f in (one.pixels.transpose(0, 3, 1, 2), np.arange(len(one)) % 4))
    )
    assert all(np.array_equal(arrays.train[name], same.arrays().train[name]) for name in "xy")
    assert Datasets(train, test, keep=True, **given).prepare == same.model_copy(update=given).prepare
    assert message(Datasets(Photos(), test, keep=True).arrays) == (
        "data.keep: samples differ between reads, because a transform is random. Allowed: false"
    )
    assert arrays.notes == ()
    [note] = Datasets(train, test).arrays().notes
    assert note == "data: samples do not change between reads. Hint: keep: true reads each once (1.3e-05 GB)"


def test_a_fifth_is_held_out():
    arrays = Datasets(TENSORS).arrays()
    assert sorted([*arrays.train["x"], *arrays.test["x"]]) == [*range(40)]
    assert np.bincount(arrays.test["y"]).tolist() == [2] * 4


# random draws


def test_draws_follow_from_the_generator_and_nothing_else():
    data, before = Datasets(Photos(), Photos(10)), torch.get_rng_state()
    first, again, other = (batch(data, [5, 5, 7], seed) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other) and not torch.equal(first[0], first[1])
    still = batch(data, [5, 7, 5])
    assert torch.equal(still[0], still[2]) and torch.equal(still[1], batch(data, [7])[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluations_read_the_plain_dataset():
    plain = Photos(augmented=False)
    data = Datasets(Photos(), Photos(10), plain=plain)
    assert torch.equal(batch(data, [5, 59]), batch(Datasets(plain, plain), [5, 59]))
    assert not torch.equal(batch(data, [5], 0), batch(data, [5])) and data.notes == ()
    assert "one fixed draw each" in Datasets(Photos(), Photos(10)).notes[0]
    assert message(lambda: Datasets(Photos(), plain=Photos(59)).facts) == (
        "data.plain: the classes differ from those of train. Allowed: the same samples"
    )
    assert message(Datasets, Photos(), plain=plain, keep=True) == (
        "Datasets: keep: true is not supported with plain. Allowed: false, or train without augmentation"
    )


def test_generators_of_its_own_are_refused():
    class Own(Odd):
        generator = torch.Generator()

        def __getitem__(self, index):
            return torch.rand(3, 3, 3, generator=self.generator), index % 4

    assert message(lambda: Datasets(Own()).facts) == (
        "data.train: sample 0 differs between two reads with equal seeds. Allowed: random draws by the global "
        "generators of torch, numpy and Python"
    )


class After(Listener):
    def on_round(self, line):
        return line["round"] == 1


def test_a_resumed_run_has_the_same_bits(tmp_path):
    """Datasets in Python; the folder describes them."""
    experiment = {
        "data": Datasets(Photos(), Photos(10)), "model": "liang_mlp", "method": "heterofl", "rounds": 3,
        "clients": {"count": 3, "cohort": 2, "capacities": [1, 0.5]}, "training": {"batch_size": 5, "steps": 3},
        "run": {"executor": "serial"}, "partition": "iid", "evaluation": {"every": 1},
    }  # fmt: skip
    whole = rayfl.run(experiment, tmp_path / "whole")
    rayfl.run(experiment, tmp_path / "parts", listeners=[After()])
    parts = rayfl.run(experiment | {"data": Datasets(Photos(), Photos(10))}, tmp_path / "parts", resume=True)
    without = [one.metrics.drop(columns="seconds") for one in (whole, parts)]
    assert without[0].equals(without[1])
    assert_same(*(dict(one.submodel(0.5, raw=True).state_dict()) for one in (whole, parts)))
    said = message(
        rayfl.run, experiment | {"data": Datasets(Photos(seed=2), Photos(10))}, tmp_path / "parts", resume=True
    )
    assert "data.known.digest: " in said
    module = rayfl.export(tmp_path / "whole", 0.5, tmp_path / "out", data=experiment["data"])
    assert module(torch.zeros(1, 3, 8, 8)).shape == (1, 4)
    assert message(rayfl.export, tmp_path / "whole", 0.5, tmp_path / "other", data=Datasets(Photos(seed=2))) == (
        f"data: the Datasets differ from those of the run. Allowed: digest {experiment['data'].facts.digest[:12]}"
    )


def test_the_digest_is_that_of_samples_and_transforms():
    found = [
        inputs_of([], Datasets(train, Photos(10)).arrays()) for train in (Photos(), Photos(), Photos(augmented=False))
    ]
    assert changed(*found[:2]) == [] and changed(*found[1:]) == ["data: some samples"]


# what is refused


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (3, "data.train: int is not a map-style Dataset. Allowed: an object with __len__() and __getitem__(index) -> "
            "(x, y), such as a torch.utils.data.Dataset"),
        (Stream(), "data.train: Stream is not a map-style Dataset. Allowed: an object with __len__() "
            "and __getitem__(index) -> (x, y), such as a torch.utils.data.Dataset"),
        (Subset(TENSORS, []), "data.train: the Dataset is empty. Allowed: one or more samples"),
        (Odd(_7={"x": 1}), "data.train: sample 7 is dict. Allowed: (x, y)"),
        (Odd(_7=(1, 2, 3)), "data.train: sample 7 is tuple of length 3. Allowed: (x, y)"),
        (Odd(_7=(TENSORS[0][0], -1)), "data.train: y of sample 7 is -1. Allowed: a class, a whole number from 0"),
        (Odd(_7=(TENSORS[0][0], "cat")), "data.train: y of sample 7 is 'cat'. Allowed: a class, a whole number from 0"),
        (Odd(_7=(TENSORS[0][0], 1.0)), "data.train: y of sample 7 is 1.0. Allowed: a class, a whole number from 0"),
        (Odd(_39=(TENSORS[0][0], 5)), "data: y has 5 different labels from 0 to 5. Allowed: 0 to C - 1, each at least "
            "once. Hint: renumber the labels, or set `classes` if some classes have no sample"),
        (Odd(_0=(None, 0)), "data.train: x of sample 0 is NoneType. Allowed: a PIL image, an array or a tensor"),
        (Odd(_39=(torch.zeros(3, 4, 3), 3)), "data.train: x of sample 39 has shape [3, 4, 3] and type float32. "
            "Allowed: [3, 3, 3] and float32, as the first training sample. Hint: transforms that resize or convert"),
        (Odd(_39=(torch.full((3, 3, 3), np.nan), 3)), "data.train: x of sample 39 has float32 values that are not "
            "finite numbers. Allowed: finite numbers"),
        (Odd(_0=(Image.new("RGBA", (3, 3)), 0)), "data.train: x of sample 0 is a PIL image of mode RGBA. Allowed: L, "
            'RGB. Hint: image.convert("RGB")'),
        (TensorDataset(torch.ones(4, 8, 8, 3), torch.arange(4)), "data.train: one sample has shape [1, 8, 8, 3], which "
            "looks like channels last. Allowed: images [N, C, H, W]. Hint: x.transpose(0, 3, 1, 2) moves the channels"),
    ],
)  # fmt: skip
def test_wrong_datasets(dataset, expected):
    assert message(lambda: Datasets(dataset).facts) == expected


def test_a_wrong_sample_that_was_not_read_before_ends_the_run(tmp_path):
    class Late(Odd):
        targets = [i % 4 for i in range(40)]

    data = Datasets(
        Late(**{f"_{i}": (torch.zeros(2), 0) for i in range(40) if i not in Datasets(Odd()).train.part("").probes})
    )
    sections = {"model": "liang_mlp", "partition": "iid", "method": "heterofl"}
    experiment = tiny(data=data, clients={"count": 3, "cohort": 3}, **sections)
    assert "x of sample" in message(rayfl.run, experiment, tmp_path) and "has shape [2]" in message(
        rayfl.run, experiment
    )


def test_errors_of_a_dataset_name_the_sample():
    class Failing(Odd):
        def __getitem__(self, index):
            raise OSError("disk")

    with pytest.raises(RunFailed, match="data.train: sample 0: OSError: disk"):
        _ = Datasets(Failing()).facts


def test_wrong_names_and_options():
    def said(**given):
        return message(lambda: read_data(name="datasets", **given).facts)

    assert said(train="nowhere:train") == (
        "data.train.of: 'nowhere:train' cannot be imported (ModuleNotFoundError: No module named 'nowhere'). Allowed: "
        "package.module:name of a package that is installed or in PYTHONPATH"
    )
    assert said(train=FAKE | {"options": {"sizes": 1}}).startswith(
        "data.train.options: {'sizes': 1} is not valid (got an unexpected keyword argument 'sizes'). Allowed: "
    )
    assert message(read_data, name="datasets") == "exp.yaml: data.train: a value is required"
    assert said(train="<Photos>") == (
        "data.train: the file describes an object of a Python program, <Photos>. Allowed: the same object in Python"
    )
    assert (
        message(rayfl.InMemory, TENSORS) == "data: x is a Dataset. Allowed: arrays. Hint: rayfl.Datasets(train, test)"
    )


def test_public_samples_are_a_share():
    assert message(Datasets, TENSORS, public={"noise": 5}) == (
        "Datasets: public: data and noise are not supported with keep: false. Allowed: share, or keep: true"
    )
    data = Datasets(TENSORS, public={"share": 0.25})
    found = federate(data, data.arrays(), tiny(partition="iid").partition, 2, 0.0, 0)
    assert isinstance(found, Federation) and len(found.public) == 8
