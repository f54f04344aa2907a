"""Tables and series: files, categories, missing values, all kinds of targets; partition by a column or by quantiles."""

import json
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from crews import result
from helpers import message, read_data, simulate, tiny

from rayfl.data import ClientData, InMemory, federate
from rayfl.data.partition import PARTITIONS_KIND
from rayfl.data.variables import Variables
from rayfl.networks import export

PATIENTS = pd.DataFrame(
    {
        "age": [30, 40, None, 50, 60, 20, 35, 45, 55, 65] * 4,
        "sex": ["f", "m", "f", None, "m", "f", "m", "f", "m", "f"] * 4,
        "beats": np.arange(40.0),
        "hospital": ["north", "south", "north", "west"] * 10,
        "ill": ["no", "yes"] * 20,
        "days": np.arange(40) * 2.5,
    }
)
X = ["age", "sex", "beats"]
TABLE = {"name": "table", "x": X, "y": "ill", "categories": ["sex"], "missing": "median"}


@pytest.fixture
def table(tmp_path):
    """Return a data set of the file of patients with these options."""
    file = tmp_path / "patients.csv"
    PATIENTS.to_csv(file, index=False)
    return lambda **options: read_data(**{**TABLE, "train": str(file), **options})


def test_a_table_says_what_it_is(table):
    """Age and beats are numbers, and sex becomes two inputs."""
    data = table()
    assert data.offers == {"variables": 4, "classes": 2, "class_names": ("no", "yes")}
    arrays = data.arrays()
    assert (len(arrays.train["y"]), len(arrays.test["y"])) == (32, 8) and arrays.users is None
    assert read_data(**json.loads(data.model_dump_json())) == data == pickle.loads(pickle.dumps(data))
    every = np.concatenate([arrays.train["x"], arrays.test["x"]])
    every = every[every[:, 2].argsort()]
    assert every[:4, 1].tolist() == [0, 1, 0, -1] and np.isnan(every[2, 0])


@pytest.mark.parametrize("suffix", [".tsv", ".parquet"])
def test_files_of_all_kinds_are_equal(table, tmp_path, suffix):
    file = tmp_path / f"patients{suffix}"
    if suffix == ".tsv":
        PATIENTS.to_csv(file, sep="\t", index=False)
    else:
        PATIENTS.to_parquet(file)
    one, other = table().arrays(), table(train=str(file)).arrays()
    assert all(np.array_equal(one.train[name], other.train[name], equal_nan=True) for name in ("x", "y"))


def test_inputs_are_scikit_learns():
    """Standardised numbers, then one column per category."""
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    x = PATIENTS[X].assign(sex=PATIENTS["sex"].map({"f": 0, "m": 1})).to_numpy(np.float32)
    numbers = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    expected = ColumnTransformer(
        [("numbers", numbers, [0, 2]), ("sex", OneHotEncoder(categories=[[0, 1]], handle_unknown="ignore"), [1])]
    ).fit(x[:20])
    prepare = Variables(((1, 2),), "median").fitted({"x": x[:20]})
    found = prepare.whole({"x": torch.from_numpy(x)})["x"]
    torch.testing.assert_close(found, torch.tensor(expected.transform(x), dtype=torch.float32))


def test_series_are_standardised_by_variable():
    x = np.array([[[1, 3], [10, np.nan]], [[5, 7], [30, 30]]], np.float32)
    prepare = Variables(missing="mean").fitted({"x": x})
    assert prepare.fill == pytest.approx((4, 70 / 3)) and prepare.mean == pytest.approx((4, 70 / 3))
    found = prepare.whole({"x": torch.from_numpy(x)})["x"]
    assert found.shape == (2, 2, 2) and found[0, 1, 1] == pytest.approx(0, abs=1e-6)
    assert found.mean((0, 2)).tolist() == pytest.approx([0, 0], abs=1e-6)


def test_constants_are_fitted_on_clients_training_rows_only(table):
    """Changing all validation, local validation, test and public rows changes nothing."""
    data = table(y="days", target="numbers", quantiles=2, public={"share": 0.2})
    arrays = data.arrays()
    given = federate(data, arrays, PARTITIONS_KIND.read("iid", ""), 3, 0.2, 0, 0.2)
    rows = given.train.idx
    assert 0 < len(rows) < len(arrays.train["y"]) - len(given.validation) - len(given.public)
    own = {name: array[np.sort(rows)] for name, array in arrays.train.items()}
    assert given.prepare == data.prepare.fitted(own) and given.goal == data.goal.fitted(own)
    ages = own["x"][:, 0]
    assert given.prepare.fill[0] == np.nanmedian(ages)
    assert given.goal.mean[0] == pytest.approx(own["y"].mean())


def test_a_test_table_has_the_categories_and_classes_of_the_training_table(table, tmp_path):
    file = tmp_path / "test.csv"
    PATIENTS[:3].assign(sex=["m", "x", None]).to_csv(file, index=False)
    data = table(test=str(file), user="hospital")
    arrays = data.arrays()
    assert len(arrays.train["y"]) == 40 and arrays.test["x"][:, 1].tolist() == [1, -1, -1]
    assert arrays.test_users is not None and arrays.test_users.tolist() == ["north", "south", "north"]
    PATIENTS[:3].assign(ill="maybe").to_csv(file, index=False)
    assert message(table(test=str(file)).arrays) == (
        "data.y: the test table has the class 'maybe'. Allowed: the classes of the training table: no, yes"
    )


KINDS = pd.DataFrame({"age": np.arange(6.0), "kind": ["1", "2", "A"] * 2, "user": [3, 4, 20] * 2, "y": [0, 1, 0] * 2})
TESTED = KINDS[:4].assign(kind=[1, 2, 1, 2], user=[3, 4, None, 20])


def written(frame, path):
    """The path of a file with these rows."""
    frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
    return str(path)


@pytest.mark.parametrize("train", [".csv", ".parquet"])
@pytest.mark.parametrize("test", [".csv", ".parquet"])
def test_categories_and_users_do_not_depend_on_the_other_values_of_a_file(tmp_path, train, test):
    """Text in the training file, integers in the test file; integers, and floats because one is missing."""
    files = {"train": written(KINDS, tmp_path / f"a{train}"), "test": written(TESTED, tmp_path / f"b{test}")}
    data = read_data(name="table", **files, x=["age", "kind"], categories=["kind"], y="y", user="user")
    arrays = data.arrays()
    assert data.categorical == ((1, 3),) and arrays.train["x"][:, 1].tolist() == [0, 1, 2] * 2
    assert arrays.test["x"][:, 1].tolist() == [0, 1, 0, 1]
    assert arrays.users.tolist() == ["3", "4", "20"] * 2 and arrays.test_users.tolist() == ["3", "4", "", "20"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_categories_that_are_numbers_are_in_the_order_of_numbers(tmp_path, suffix):
    """Floats because one is missing, in the training file; a category of the test file is unknown."""
    train = KINDS.assign(kind=[10, 2, None, -1, 2, 10])
    files = {"train": written(train, tmp_path / f"a{suffix}")}
    files["test"] = written(KINDS[:3].assign(kind=["10", "B", "-1"]), tmp_path / f"b{suffix}")
    data = read_data(name="table", **files, x=["age", "kind"], categories=["kind"], y="y")
    arrays = data.arrays()
    assert arrays.train["x"][:, 1].tolist() == [2, 1, -1, 0, 1, 2] and arrays.test["x"][:, 1].tolist() == [2, -1, 0]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("name", ["kind", "y"])
def test_users_may_be_a_category_or_a_class(tmp_path, suffix, name):
    file = written(KINDS, tmp_path / f"a{suffix}")
    data = read_data(name="table", train=file, test=file, x=["kind"], categories=["kind"], y="y", user=name)
    assert data.arrays().users.tolist() == KINDS[name].astype(str).tolist()


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_users_with_long_numbers_are_told_apart_if_one_is_missing(tmp_path, suffix):
    """As floats they would be one."""
    users = pd.array([2**53, 2**53 + 1, None] * 2, "Int64")
    file = written(KINDS.assign(user=users), tmp_path / f"a{suffix}")
    arrays = read_data(name="table", train=file, test=file, x=["age"], y="y", user="user").arrays()
    assert arrays.users.tolist() == ["9007199254740992", "9007199254740993", ""] * 2


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_names_that_pandas_takes_for_missing_values(tmp_path, suffix):
    """Among users, categories and classes only empty cells are missing, among numbers all of these."""
    names = ["NA", "None", "null", "nan", "", "US"] * 2
    frame = pd.DataFrame({"age": ["NA", *"12345"] * 2, "kind": names, "user": names, "y": ["NA", "None"] * 6})
    if suffix == ".parquet":
        frame = frame.assign(age=pd.to_numeric(frame["age"], errors="coerce"))
    file = written(frame, tmp_path / f"a{suffix}")
    options = {"x": ["age", "kind"], "categories": ["kind"], "user": "user", "missing": "mean"}
    data = read_data(name="table", train=file, test=file, y="y", **options)
    arrays = data.arrays()
    assert data.class_names == ("NA", "None") and data.input_columns["kind"] == ("NA", "None", "US", "nan", "null")
    assert arrays.users.tolist() == names and arrays.train["x"][:6, 1].tolist() == [0, 1, 4, 3, -1, 2]
    assert np.isnan(arrays.train["x"][:, 0]).tolist() == [True, *[False] * 5] * 2


def test_names_that_look_equal_are_equal(tmp_path):
    """Spaces at the ends, and an accent that is a character of its own."""
    names = ["caf\u00e9", "cafe\u0301 ", "tea", " tea"] * 5
    file = written(pd.DataFrame({"age": 1.5, "kind": names, "user": names, "y": names}), tmp_path / "a.csv")
    data = read_data(name="table", train=file, x=["age", "kind"], categories=["kind"], y="y", user="user")
    assert data.class_names == data.input_columns["kind"] == ("caf\u00e9", "tea")
    assert set(data.arrays().users) == {"caf\u00e9", "tea"}
    text = read_data(name="text", train=file, text="age", label="y", user="user")
    assert text.class_names == ("caf\u00e9", "tea") and len(np.unique(text.arrays().users)) == 2


def test_classes_are_in_the_order_of_numbers_and_equal_in_all_files(tmp_path):
    train = written(pd.DataFrame({"age": 1.5, "y": [10, 9, 1] * 5}), tmp_path / "a.csv")
    test = written(pd.DataFrame({"age": 1.5, "y": [9.0, 10.0]}), tmp_path / "b.parquet")
    data = read_data(name="table", train=train, test=test, y="y")
    assert data.class_names == ("1", "9", "10") and data.arrays().test["y"].tolist() == [1, 2]


def test_columns_without_a_name_are_no_inputs(table, tmp_path):
    """`DataFrame.to_csv` writes row numbers, which give away the class of sorted rows."""
    file = tmp_path / "patients.csv"
    PATIENTS.to_csv(file)
    pd.read_csv(file).to_csv(file)
    options = {"train": str(file), "categories": ["sex", "hospital"]}
    data = table(**options, x=None)
    assert data.inputs == ["age", "sex", "beats", "hospital", "days"]
    assert data.arrays().notes == (
        "data: columns without a name are no inputs (Unnamed: 0.1, Unnamed: 0). Hint: data.x, if they are not the row "
        "numbers that pandas writes",
    )
    data = table(**options, x=["Unnamed: 0", "sex", "hospital"])
    assert data.inputs[0] == "Unnamed: 0" and not data.arrays().notes


def test_separators_and_decimal_marks(table, tmp_path):
    """As spreadsheets in half of Europe write them."""
    file = tmp_path / "european.csv"
    PATIENTS.to_csv(file, index=False, sep=";", decimal=",")
    own = table(train=str(file), separator=";", decimal=",").arrays()
    assert np.array_equal(own.train["x"], table().arrays().train["x"], equal_nan=True)
    hint = 'Hint: data.separator: ";" (and data.decimal: ",", if numbers are written so)'
    assert message(table(train=str(file)).arrays).endswith(f". Allowed: a .csv file. {hint}")
    assert 'Hint: data.decimal: ",", or name it' in message(table(train=str(file), separator=";").arrays)
    assert message(lambda: table(decimal=",")) == (
        'exp.yaml: data: decimal: "," is not valid with commas between columns. Allowed: with data.separator'
    )
    assert "Allowed: a character other than data.decimal" in message(lambda: table(separator="."))


def test_a_test_table_without_users_is_refused(table, tmp_path):
    file = written(PATIENTS.drop(columns="hospital"), tmp_path / "test.csv")
    assert message(table(test=file, user="hospital").arrays) == (
        "data: the test table has no column 'hospital'. Allowed: those of the training table"
    )


def test_a_client_is_a_hospital(table):
    data = table(user="hospital", x=None, categories=["sex"])
    assert data.inputs == ["age", "sex", "beats", "days"]
    arrays = data.arrays()
    given = federate(data, arrays, PARTITIONS_KIND.read("users", ""), 3, 0.0, 0)
    # the rows that were held out, and no further ones
    assert (given.train.sizes.sum(), given.test_source, given.test.sizes.sum()) == (32, "test", 8)
    for client, hospital in enumerate(("north", "south", "west")):
        assert set(arrays.users[given.train[client]]) == set(arrays.test_users[given.test[client]]) == {hospital}


def test_rows_without_a_user_are_no_clients(table, tmp_path):
    """Among users, they would be the largest one."""
    file = tmp_path / "some.csv"
    PATIENTS.assign(hospital=["north", "south", None, None] * 10).to_csv(file, index=False)
    data = table(train=str(file), user="hospital")
    arrays, rule = data.arrays(), PARTITIONS_KIND.read("users", "")
    given = federate(data, arrays, rule, 2, 0.0, 0)
    assert set(arrays.users[given.train.idx]) == set(arrays.test_users[given.test.idx]) == {"north", "south"}
    assert "at most 2, the number of users" in message(lambda: federate(data, arrays, rule, 3, 0.0, 0))


def test_clients_of_numbers_are_tested_on_the_numbers_that_they_train_on(table, tmp_path):
    """Quantiles are those of the training rows, also of test rows with other ones."""
    rows = PATIENTS.assign(days=np.arange(40) % 5)
    files = {"train": tmp_path / "a.csv", "test": tmp_path / "b.csv"}
    rows.to_csv(files["train"], index=False)
    rows[rows.days > 1].to_csv(files["test"], index=False)
    data = table(
        y="days", target="numbers", quantiles=5, x=["age"], categories=[], **{k: str(f) for k, f in files.items()}
    )
    arrays = data.arrays()
    given = federate(data, arrays, PARTITIONS_KIND.read({"name": "shards", "labels": 1}, ""), 5, 0.0, 0)
    own = [set(arrays.train["y"][given.train[client], 0]) for client in range(5)]
    tested = [set(arrays.test["y"][given.test[client], 0]) for client in range(5)]
    assert sorted(map(sorted, own)) == [[0], [1], [2], [3], [4]]
    assert tested == [found if min(found) > 1 else set() for found in own]


def test_numbers_that_float32_cannot_tell_apart_are_refused(table, tmp_path):
    """Times in seconds since 1970 within an hour."""
    file = tmp_path / "times.csv"
    PATIENTS.assign(beats=1_700_000_000 + np.arange(40) * 90).to_csv(file, index=False)
    assert message(table(train=str(file)).arrays) == (
        "data: column 'beats' of the training table has a standard deviation of 1.04e+03, and its numbers are so large "
        "that float32 has steps of 128. Allowed: steps of a hundredth of the deviation. Hint: subtract a constant from "
        "the column"
    )


def test_a_table_without_inputs_is_refused(table):
    assert message(lambda: table(x=None, y=list(PATIENTS), target="numbers", categories=[]).arrays()) == (
        "data.x: the table has no column besides y and user. Allowed: at least one input"
    )


def test_clients_differ_in_the_size_of_their_numbers(table):
    """Shards of quantiles: a client with one shard has numbers of one quantile only."""
    data = table(y="days", target="numbers", quantiles=4)
    arrays = data.arrays()
    rule = PARTITIONS_KIND.read({"name": "shards", "labels": 1}, "")
    given = federate(data, arrays, rule, 4, 0.0, 0)
    labels = data.goal.labels(arrays.train)
    assert sorted(int(labels[given.train[client]].max()) for client in range(4)) == [0, 1, 2, 3]
    assert all(len(set(labels[given.train[client]])) == 1 for client in range(4))


def test_several_columns_are_labels_or_numbers(table, tmp_path):
    file = tmp_path / "many.csv"
    PATIENTS.assign(a=[0, 1] * 20, b=[1, 1, 0, 0] * 10).to_csv(file, index=False)
    labels = table(train=str(file), y=["a", "b"], target="labels")
    assert labels.goal.classes == 2 and labels.arrays().train["y"].dtype == np.uint8
    numbers = table(train=str(file), y=["beats", "days"], x=["age"], categories=[], target="numbers")
    assert numbers.arrays().train["y"].shape == (30, 2)
    assert message(lambda: table(train=str(file), y=["a", "b"]).goal) == (
        "data.y: several columns are not valid with target: class. Allowed: one column"
    )
    halves = table(train=str(file), y=["age"], x=["beats"], categories=[], target="labels", missing="refuse")
    assert "column 'age' of the training table has 4 missing values" in message(halves.arrays)


def test_a_file_of_series(tmp_path):
    """Two variables of three steps a row."""
    file = tmp_path / "series.csv"
    pd.DataFrame(np.arange(60.0).reshape(10, 6)).assign(y=[0, 1] * 5).to_csv(file, index=False)
    data = read_data(name="table", train=str(file), y="y", channels=2)
    assert data.offers == {"series": (2, 3), "classes": 2, "class_names": ("0", "1")}
    x = data.arrays().train["x"]
    assert x.shape[1:] == (2, 3) and np.array_equal(x[0], x[0, 0, 0] + np.arange(6).reshape(2, 3))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"missing": "refuse"},
            "data: column 'age' of the training table has 4 missing values. Allowed: none. Hint: data.missing: median "
            "or mean replaces them",
        ),
        (
            {"categories": []},
            "data: column 'sex' of the training table is no column of numbers (Unable to parse string 'f' at position "
            "0). Allowed: numbers. Hint: name it in data.categories, or leave it out of data.x",
        ),
        (
            {"y": "il"},
            "data: no column is called 'il'. Did you mean 'ill'? Allowed: age, beats, days, hospital, ill, sex",
        ),
        (
            {"y": "ill", "target": "numbers"},
            "data: column 'ill' of the training table is no column of numbers (Unable to parse string 'no' at position "
            "0). Allowed: numbers. Hint: `target: class` for a column of classes",
        ),
        ({"y": "age"}, "data.x: 'age' is a target. Allowed: columns that are no targets"),
        ({"categories": ["hospital"]}, "data.categories: 'hospital' is no input. Allowed: columns of data.x"),
        (
            {"y": "sex", "x": ["age"], "categories": []},
            "data: column 'sex' of the training table has 4 missing values. Allowed: none",
        ),
        (
            {"channels": 2, "categories": []},
            "data.channels: 2 is not valid for 3 columns with 0 of categories. Allowed: a divisor of the number of "
            "columns, all numbers",
        ),
        ({"x": []}, "exp.yaml: data.x: [] is not valid. Allowed: a length of at least 1, or null"),
        ({"y": []}, "exp.yaml: data.y: [] is not valid. Allowed: text, or a length of at least 1"),
        ({"train": "nowhere.csv"}, "data.train: the file 'nowhere.csv' does not exist. Allowed: an existing file"),
    ],
)
def test_tables_that_do_not_fit(table, options, expected):
    assert message(lambda: table(**options).arrays()) == expected


def test_a_class_that_is_text_far_below_numbers(tmp_path):
    """Pandas reads large files in parts, each with its own type."""
    file = written(pd.DataFrame({"x": 1.0, "y": [*([0, 1] * 150_000), "ill", "ill"]}), tmp_path / "large.csv")
    assert read_data(name="table", train=file, y="y").goal.classes == 3


def test_a_wrong_target_is_refused_before_its_classes_are_counted(table, tmp_path):
    assert message(lambda: table(y="il").goal).startswith("data: no column is called 'il'. Did you mean 'ill'?")
    PATIENTS.to_csv(tmp_path / "semicolons.csv", index=False, sep=";")
    assert message(lambda: table(train=str(tmp_path / "semicolons.csv")).goal) == (
        "data: no column is called 'ill'. Allowed: age;sex;beats;hospital;ill;days. Hint: data.separator: \";\" "
        '(and data.decimal: ",", if numbers are written so)'
    )


def test_rows_with_more_cells_than_the_header_are_refused(table, tmp_path):
    """Pandas takes the first cell as the index, so that every column has the values of the next one."""
    file = tmp_path / "commas.csv"
    file.write_text("ill,age,beats\n" + "no,30,4,\nyes,40,5,\n" * 10)
    assert message(table(train=str(file), x=["age"], categories=[]).arrays) == (
        f"data.train: {file} cannot be read (rows have more cells than the header, which has 3). Allowed: a .csv file"
    )


def test_times_are_no_numbers(tmp_path):
    frame = pd.DataFrame({"seen": pd.to_datetime(["2026-01-01", None] * 10), "ill": [0, 1] * 10})
    data = read_data(name="table", train=written(frame, tmp_path / "times.parquet"), y="ill")
    assert message(data.arrays).startswith("data: column 'seen' of the training table is no column of numbers (it has")


def test_other_files_are_not_read(table, tmp_path):
    (tmp_path / "patients.xls").touch()
    assert "Allowed: files that end in .csv, .tsv, .parquet" in message(
        table(train=str(tmp_path / "patients.xls")).arrays
    )
    (tmp_path / "broken.parquet").write_text("no")
    assert "cannot be read" in message(table(train=str(tmp_path / "broken.parquet")).arrays)


def test_a_resumed_run_on_a_table_is_the_straight_run(table, tmp_path):
    data = table(user="hospital")
    given = {"data": data, "model": "mlp", "partition": "users", "clients": {"count": 3, "cohort": 2}}
    experiment = tiny(**given, method="heterofl", rounds=4)
    straight = simulate(experiment, tmp_path / "straight")
    lines, *states = result(straight)
    first = simulate(experiment, tmp_path / "first")
    for _ in range(2):
        first.run_round()
    first.save(tmp_path / "checkpoints")
    again = simulate(experiment, tmp_path / "again")
    again.restore(tmp_path / "checkpoints")
    found, *resumed = result(again)
    assert found == lines[2:] and resumed == states


def test_an_exported_network_says_how_inputs_are_prepared(table, tmp_path):
    import rayfl

    data = table(y="days", target="numbers")
    run = {"executor": "serial"}
    clients = {"count": 3, "cohort": 2, "capacities": [1, 0.25]}
    given = {"rounds": 1, "data": data, "model": "mlp", "method": "heterofl", "clients": clients, "run": run}
    rayfl.run(given | {"evaluation": {"holdout": 0}}, tmp_path / "run")
    export(tmp_path / "run", 0.25, tmp_path / "small", notify=lambda note: None)
    samples = json.loads((tmp_path / "small" / "config.json").read_text())["samples"]
    assert samples["categories"] == [[1, 2]] and len(samples["fill"]) == 2 and samples["target_std"][0] > 1


def test_a_clients_batches_are_prepared():
    x = np.array([[1.0], [3], [5], [7]], np.float32)
    data = InMemory(np.tile(x, (5, 1)), np.arange(20) % 2)
    arrays = data.arrays()
    own = ClientData(
        {n: torch.from_numpy(a) for n, a in arrays.train.items()}, data.prepare.fitted(arrays.train), data.goal
    )
    [(found, _)] = own.in_order(100)
    assert found.mean().item() == pytest.approx(0, abs=1e-6) and found.std(correction=0).item() == pytest.approx(1)
