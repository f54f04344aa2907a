"""Notes on data that are valid and probably not what they should be."""

import numpy as np
import pandas as pd
import pytest
from helpers import message, tiny

import rayfl
from rayfl.data.notes import notes_on
from rayfl.engine.simulation import load_data


def notes(x, y, partition="iid", holdout=0.0, **options):
    """The notes on arrays."""
    data = rayfl.InMemory(x, y, **options)
    clients = {"count": 2, "cohort": 2, "capacities": [0.3]}
    experiment = tiny(data=data, model="mlp", partition=partition, clients=clients, evaluation={"holdout": holdout})
    return list(load_data(experiment).notes)


@pytest.fixture
def noise():
    return np.random.default_rng(0).normal(size=(100, 3)), np.arange(100) % 2


def test_ordinary_data_have_none(noise):
    x, y = noise
    assert notes(x, y) == [] == notes(x[:, :1] + 1.9 * y[:, None], y, holdout=0.1)


def test_equal_inputs(noise):
    assert notes(np.full((100, 3), 2.5), noise[1]) == [
        "data: the inputs of all training samples are equal, so that nothing can be learned from them"
    ]


@pytest.mark.parametrize("classes", [2, 3])
def test_an_input_that_alone_separates_the_classes(noise, classes):
    """Row numbers of a file that is sorted by class; one row in the wrong place is enough for no note."""
    x, y = noise[0].copy(), np.sort(np.arange(100) % classes)
    x[:, 1] = np.arange(100)
    expected = (
        "data: the input '1' alone separates the classes of the training samples. Hint: leave it out if it is a row "
        "number, or follows from the class"
    )
    assert notes(x, y) == [expected]
    x[[0, 99], 1] = x[[99, 0], 1]
    assert notes(x, y) == []


def test_a_category_that_follows_from_the_class(tmp_path):
    """But not one of which there are as many as samples."""
    noise = np.random.default_rng(0).normal(size=60)
    of = np.arange(60) % 3
    frame = pd.DataFrame({"a": noise, "code": np.array(["x", "y", "z"])[of], "name": [f"n{i}" for i in range(60)]})
    frame.assign(y=of == 1).to_csv(tmp_path / "a.csv", index=False)
    data = {"name": "table", "train": str(tmp_path / "a.csv"), "y": "y", "categories": ["code", "name"]}
    clients = {"count": 2, "cohort": 2, "capacities": [0.3]}
    found = load_data(tiny(data=data, model="mlp", partition="iid", clients=clients, evaluation={"holdout": 0})).notes
    assert [note.split(" alone")[0] for note in found] == ["data: the input 'code'"]


def test_numbers_as_classes(noise):
    x, y = noise[0], np.arange(100) // 4
    assert notes(x, y, x_test=x, y_test=y) == [
        "data: there are few samples per class. Hint: data.target: numbers, if y are numbers (there are 25 classes and "
        "100 samples)"
    ]
    assert message(notes, x, y, holdout=0.1, x_test=x, y_test=y) == (
        "evaluation.holdout: 0.1 holds out no sample. Allowed: 0, or a fraction that is at least one sample of the "
        "largest class. Hint: data.target: numbers, if y are numbers (there are 25 classes and 100 samples)"
    )


def test_class_names_in_upper_and_lower_case(tmp_path):
    noise = np.random.default_rng(0).normal(size=60)
    pd.DataFrame({"a": noise, "y": ["yes", "no", "No"] * 20}).to_csv(tmp_path / "a.csv", index=False)
    data = {"name": "table", "train": str(tmp_path / "a.csv"), "y": "y"}
    experiment = tiny(data=data, model="mlp", partition="iid", clients={"count": 2, "cohort": 2, "capacities": [0.3]})
    assert load_data(experiment).notes == ("data: the classes 'No' and 'no' differ in upper and lower case only",)


def test_samples_without_a_client(noise):
    users = np.array(["a", "b", "c", ""] * 25)
    options = {"partition": "users", "users": users, "x_test": noise[0], "y_test": noise[1]}
    assert notes(*noise, **options) == [
        "data: 50 of 100 training samples belong to no client and are not used (25 samples have no user)"
    ]


def test_notes_of_a_data_set_come_first(noise):
    experiment = tiny(data=rayfl.InMemory(*noise), model="mlp", partition="iid")
    arrays = load_data(experiment)
    noted = rayfl.Arrays(arrays.train, arrays.test, notes=("one",))
    again = load_data(experiment, load_data(experiment, noted))
    assert again.notes == ("one",) == notes_on(experiment.data, again, experiment.federate(again))
    result = rayfl.run(experiment, arrays=noted)
    assert result.notes[-1] == "one"
