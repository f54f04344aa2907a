"""Partitions: exact sizes, no sample twice, and test splits that follow the training splits."""

from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest

from rayfl.config import ConfigError, parse
from rayfl.core.seeds import numpy_generator
from rayfl.data.partition import (
    NOBODY,
    PARTITIONS,
    PARTITIONS_KIND,
    Labels,
    Partition,
    Shards,
    hold_out,
    label_counts,
    partition,
)
from rayfl.data.partition.base import apportion, rank
from rayfl.data.partition.dirichlet import Dirichlet, _draw_in_turn
from rayfl.data.partition.iid import IID
from rayfl.data.partition.quantity import Quantity
from rayfl.data.partition.shards import LabelShards, _take_shards
from rayfl.data.partition.users import Users

Y = np.random.Generator(np.random.PCG64(0)).permutation(np.repeat(np.arange(10), 600))
Y_TEST = np.random.Generator(np.random.PCG64(1)).permutation(np.repeat(np.arange(10), 100))
USERS = np.random.Generator(np.random.PCG64(2)).integers(0, 60, len(Y)) * 7

SPECS = [
    IID(),
    Quantity(),
    Dirichlet(),
    Dirichlet(alpha=0.1, balance="cap"),
    Dirichlet(balance="equal"),
    Dirichlet(balance="equal", groups=3, group_alpha=2),
    LabelShards(),
    LabelShards(duplicates="keep"),
    LabelShards(duplicates="resample"),
    Users(),
]
LABELS = Labels(Y, Y_TEST, USERS, 10)
each_spec = pytest.mark.parametrize("spec", SPECS, ids=repr)


def split(spec, clients=50, seed=0, y=Y, y_test=Y_TEST, users=USERS):
    return partition(spec, Labels(y, y_test, users, 10), clients, seed)


def refused(spec, **kwargs) -> str:
    with pytest.raises(ConfigError) as error:
        split(spec, **kwargs)
    return str(error.value)


# all partitions


@each_spec
def test_no_sample_has_two_owners_and_no_client_is_empty(spec):
    train, test = split(spec)
    assert len(train) == len(test) == 50
    assert train.sizes.min() > 0
    pool = {"train": Y, "test": Y_TEST}[spec.tested_on(LABELS)]
    for shards, y in ((train, Y), (test, pool)):
        assert len(np.unique(shards.idx)) == len(shards.idx) == shards.sizes.sum()
        assert shards.idx.min() >= 0 and shards.idx.max() < len(y)
    if spec.tested_on(LABELS) == "train":
        assert not set(train.idx) & set(test.idx)


@each_spec
def test_the_seed_alone_decides(spec):
    (train, test), (again, test_again) = split(spec), split(spec)
    assert np.array_equal(train.idx, again.idx) and np.array_equal(train.ptr, again.ptr)
    assert np.array_equal(test.idx, test_again.idx)
    other, _ = split(spec, seed=1)
    same = np.array_equal(train.idx, other.idx) and np.array_equal(train.ptr, other.ptr)
    assert same == isinstance(spec, Users)


@each_spec
def test_more_clients_than_samples_is_refused(spec):
    assert refused(spec, clients=10, y=Y[:7], users=USERS[:7]) == (
        "clients.count: 10 is not valid. Allowed: at most 7, for 7 training samples "
        "left by evaluation.holdout and data.public, at least 1 per client"
    )


@each_spec
def test_a_test_set_that_is_too_small_leaves_test_splits_empty(spec):
    train, test = split(spec, y_test=Y_TEST[:3])
    assert train.sizes.min() > 0
    if spec.tested_on(LABELS) == "test":
        assert test.sizes.sum() <= 3


def test_the_registry_knows_every_name():
    for name, cls in PARTITIONS.items():
        assert parse(cls, {}, "exp.yaml: partition").name == name


# shards as arrays


def test_shards_by_hand():
    shards = Shards.of(np.array([1, NOBODY, 0, 1, 3, NOBODY]), 4)
    assert shards.ptr.tolist() == [0, 1, 3, 3, 4]
    assert [shards[c].tolist() for c in range(4)] == [[2], [0, 3], [], [4]]
    assert shards.sizes.tolist() == [1, 2, 0, 1]
    assert (shards.ptr.dtype, shards.idx.dtype) == (np.int64, np.int32)
    assert np.shares_memory(shards[1], shards.idx)
    assert label_counts(shards, np.array([2, 0, 1, 2, 0, 0]), 3).tolist() == [
        [0, 1, 0],
        [0, 0, 2],
        [0, 0, 0],
        [1, 0, 0],
    ]
    rows = np.array([10, 11, 12, 13, 14, 15])
    assert shards.within(rows)[1].tolist() == [10, 13]


def test_shards_keep_what_a_mask_says():
    shards = Shards(np.array([0, 2, 2, 5]), np.array([4, 7, 0, 2, 9], np.int32))
    assert shards.holders.tolist() == [0, 0, 2, 2, 2]
    kept = shards.keep(np.array([False, True, True, False, True]))
    assert [kept[c].tolist() for c in range(3)] == [[7], [], [0, 9]]
    assert (kept.ptr.dtype, kept.idx.dtype) == (np.int64, np.int32)
    nothing = shards.keep(np.zeros(5, bool))
    assert nothing.ptr.tolist() == [0, 0, 0, 0] and nothing.idx.tolist() == []


def test_a_hundred_thousand_clients_take_two_flat_arrays():
    y = np.arange(5_000_000) % 10
    train, test = partition(IID(), Labels(y, Y_TEST, None, 10), 100_000, 0)
    assert set(train.sizes) == {50}
    assert train.idx.nbytes + train.ptr.nbytes == 5_000_000 * 4 + 100_001 * 8
    assert test.sizes.sum() == 0


def test_apportion_by_hand():
    assert apportion(np.array([1.0, 1.0, 2.0]), 8).tolist() == [2, 2, 4]
    assert apportion(np.array([1.0, 1.0, 1.0]), 4).tolist() == [1, 1, 2]
    assert set(apportion(np.full(50, 0.1), 5900)) == {118}
    # thirds do not sum to 1, the parts do sum to the total
    assert apportion(np.full((2, 3), 1 / 3), np.array([7, 0])).sum(1).tolist() == [7, 0]


def test_rank_by_hand():
    assert rank(np.array([2, 0, 2, 2, 0])).tolist() == [0, 0, 1, 2, 1]


# iid and quantity


def test_iid_sizes_are_equal_and_the_remainder_is_left_out():
    train, test = split(IID(), clients=70)
    assert set(train.sizes) == {6000 // 70} and set(test.sizes) == {1000 // 70}


def test_quantity_uses_every_sample_and_the_test_split_follows():
    train, test = split(Quantity(sigma=1.5, min_samples=7))
    assert train.sizes.min() >= 7 and train.sizes.max() > 3 * train.sizes.mean()
    assert train.sizes.sum() == 6000 and test.sizes.sum() == 1000
    assert np.abs(test.sizes - train.sizes / 6).max() <= 1


@pytest.mark.parametrize("exponent", [615, -615])
def test_sizes_are_finite_for_the_largest_sigma(exponent):
    """NumPy's standard normal draws are within 12.3, so the shares of sigma = 50 are within exp(+-615)."""
    generator = SimpleNamespace(lognormal=lambda mean, sigma, size: np.full(size, np.exp(float(exponent))))
    generator.permutation = np.arange
    labels = Labels(np.zeros(3_000_000, np.int64), np.zeros(7, np.int64), None, 1)
    for clients in (1, 1_000_000):
        train, test = Quantity(sigma=50).owners(labels, clients, generator)
        sizes = np.bincount(train)
        assert sizes.min() >= 2 and sizes.sum() == 3_000_000 and len(sizes) == clients and len(test) == 7
    for seed in range(20):
        assert split(Quantity(sigma=50), seed=seed)[0].sizes.sum() == 6000


@pytest.mark.parametrize("sigma", [50.1, 1e6, float("inf"), float("nan"), -1])
def test_a_sigma_without_finite_sizes_is_refused(sigma):
    with pytest.raises(
        ConfigError, match=r"partition: sigma: .* is not valid. Allowed: (at (most|least)|a finite number)"
    ):
        parse(Quantity, {"sigma": sigma}, "partition")


def test_quantity_without_spread_is_equal():
    train, _ = split(Quantity(sigma=0))
    assert set(train.sizes) == {120}


# dirichlet


def proportions(shards, y):
    counts = label_counts(shards, y, 10)
    return counts / counts.sum(1, keepdims=True)


@pytest.mark.parametrize("balance", ["none", "cap", "equal"])
def test_a_large_alpha_is_nearly_uniform_and_a_small_one_skewed(balance):
    even, _ = split(Dirichlet(alpha=1e6, balance=balance), clients=10)
    skewed, _ = split(Dirichlet(alpha=0.05, balance=balance, min_samples=1), clients=10)
    # balanced draws labels one by one: sqrt(.1 * .9 / 600) = .012 of noise
    assert np.abs(proportions(even, Y) - 0.1).max() < (0.05 if balance == "equal" else 0.01)
    assert proportions(skewed, Y).max(1).mean() > 0.4


@pytest.mark.parametrize("balance", ["none", "cap"])
def test_each_class_is_shared_out_alike_in_training_and_test(balance):
    train, test = split(Dirichlet(balance=balance), clients=20)
    counts, test_counts = label_counts(train, Y, 10), label_counts(test, Y_TEST, 10)
    assert counts.sum() == 6000 and test_counts.sum() == 1000
    # 600 and 100 of each class, cut at the same shares and rounded
    assert np.abs(counts / 6 - test_counts).max() < 1.2


def test_equal_sizes_are_equal_and_test_labels_follow():
    train, test = split(Dirichlet(alpha=0.3, balance="equal"), clients=70)
    assert set(train.sizes) == {6000 // 70} and set(test.sizes) == {1000 // 70}
    _, other = split(Dirichlet(alpha=0.3, balance="equal"), clients=70, seed=1)
    ours, theirs = (
        np.corrcoef(proportions(train, Y).ravel(), proportions(shards, Y_TEST).ravel())[0, 1]
        for shards in (test, other)
    )
    assert ours > 0.7 and abs(theirs) < 0.2


def test_equal_draws_in_turn_among_the_clients_with_room():
    """Two clients with room for two, who both want class 0, of which there are two samples: the first two
    turns get them. Turns are fair coins while both have room, so client 0 gets 0, 1, 2 of them with 1/4,
    1/2, 1/4 (an order shuffled beforehand would give 1/6, 4/6, 1/6)."""
    y, prior, draws = np.array([0, 0, 1, 1]), np.array([[1.0, 1e-300], [1.0, 1e-300]]), 4000
    got = np.zeros(3)
    for seed in range(draws):
        owner = _draw_in_turn(y, prior, 2, np.random.Generator(np.random.PCG64(seed)))
        assert np.bincount(owner).tolist() == [2, 2]
        got[(owner[:2] == 0).sum()] += 1
    assert got / draws == pytest.approx([0.25, 0.5, 0.25], abs=0.03)


def test_equal_clients_may_have_fewer_samples():
    """FedRoRA: 20 clients of 1000 samples."""
    train, test = split(Dirichlet(alpha=0.5, balance="equal", samples=100), clients=20)
    assert set(train.sizes) == {100} and set(test.sizes) == {17}
    skewed = proportions(train, Y)
    assert skewed.max(1).mean() > 0.3
    # the labels of the test split are drawn in the same proportions
    assert np.corrcoef(skewed.ravel(), proportions(test, Y_TEST).ravel())[0, 1] > 0.7
    assert refused(Dirichlet(balance="equal", samples=301), clients=20) == (
        "clients.count: 20 is not valid. Allowed: at most 19, for 6000 training samples "
        "left by evaluation.holdout and data.public, at least 301 per client (partition.samples)"
    )
    with pytest.raises(
        ConfigError, match="partition: samples: not supported with balance: none. Allowed: balance: equal"
    ):
        parse(Dirichlet, {"samples": 5}, "partition")


def test_groups_have_labels_of_their_own():
    train, test = split(Dirichlet(alpha=100, balance="equal", groups=3, group_alpha=0.5, samples=40), clients=30)
    held, tested = proportions(train, Y), proportions(test, Y_TEST)
    groups = np.array([held[k::3].mean(0) for k in range(3)])
    # a client of 40 samples is near its group (half the distance between counts: 0.5 means nothing in common)
    assert max(np.abs(held[k] - groups[k % 3]).sum() / 2 for k in range(30)) < 0.35
    assert min(np.abs(groups[i] - groups[j]).sum() / 2 for i, j in ((0, 1), (0, 2), (1, 2))) > 0.3
    assert np.corrcoef(groups.ravel(), np.array([tested[k::3].mean(0) for k in range(3)]).ravel())[0, 1] > 0.8
    with pytest.raises(ConfigError, match="partition: groups: not supported with balance: cap"):
        parse(Dirichlet, {"groups": 2, "balance": "cap"}, "partition")


def fiarses_sizes(shares, y, clients):
    """Label counts [clients, classes] as FIARSE's Dirichlet.partition_approach cuts them, sample by sample."""
    held = [[] for _ in range(clients)]
    for k, share in enumerate(shares):
        rows = np.flatnonzero(y == k)
        share = np.array([p * (len(rows_of) < len(y) / clients) for p, rows_of in zip(share, held, strict=True)])
        cuts = (np.cumsum(share / share.sum()) * len(rows)).astype(int)[:-1]
        held = [rows_of + part.tolist() for rows_of, part in zip(held, np.split(rows, cuts), strict=True)]
    return np.array([np.bincount(y[rows_of], minlength=len(shares)) for rows_of in held])


def test_cap_is_fiarses_rule_with_its_redraws():
    """The split is redrawn until the smallest client has as many samples as there are classes."""
    y, clients, generator = np.arange(1200) % 4, 90, numpy_generator(5, "partition", "dirichlet")
    drawn = [fiarses_sizes(generator.dirichlet(np.ones(clients), 4), y, clients) for _ in range(100)]
    smallest = [sizes.sum(1).min() for sizes in drawn]
    expected = drawn[next(i for i, least in enumerate(smallest) if least >= 4)]
    assert smallest[0] < 4, "the first draw already fits"
    spec = Dirichlet(alpha=1.0, balance="cap", min_samples=4)
    train, _ = partition(spec, Labels(y, y[:100], None, 4), clients, seed=5)
    # to a sample where a bound falls on a whole number
    assert np.abs(label_counts(train, y, 4) - expected).max() <= 1 and train.sizes.sum() == 1200


def test_cap_stops_a_client_that_holds_its_mean_size():
    train, _ = split(Dirichlet(alpha=0.1, balance="cap"), clients=20)
    before_last = label_counts(train, Y, 10).cumsum(1)[:, :-1]
    added = label_counts(train, Y, 10)[:, 1:]
    assert (added[before_last >= 300] == 0).all()
    assert train.sizes.sum() == 6000


def test_dirichlet_is_redrawn_until_no_client_is_too_small():
    assert split(Dirichlet(alpha=0.3, min_samples=30))[0].sizes.min() >= 30


def test_dirichlet_fails_after_the_maximum_of_draws():
    message = refused(Dirichlet(alpha=0.01, min_samples=100))
    assert message.startswith(
        "partition.min_samples: 100 was not reached in 1000 draws of alpha = 0.01 over 50 clients and 6000 training "
        "samples. The largest minimum found is 0"
    )
    assert message.endswith("Hint: lower clients.count, raise alpha, or set balance to cap or equal")


def test_min_samples_that_cannot_be_met_is_refused_at_once():
    for spec in (Dirichlet(min_samples=121), Quantity(min_samples=121)):
        assert refused(spec) == (
            "clients.count: 50 is not valid. Allowed: at most 49, for 6000 training samples "
            "left by evaluation.holdout and data.public, at least 121 per client (partition.min_samples)"
        )


def test_a_tiny_alpha_still_splits_equally():
    train, _ = split(Dirichlet(alpha=1e-4, balance="equal"))
    assert set(train.sizes) == {120}


def test_one_client_gets_everything():
    for balance in ("none", "cap", "equal"):
        train, test = split(Dirichlet(balance=balance), clients=1)
        assert len(train[0]) == 6000 and len(test[0]) == 1000


# label shards


def labels_of(shards, y):
    return [set(y[shards[c]]) for c in range(len(shards))]


@pytest.mark.parametrize("duplicates", ["merge", "keep", "resample"])
def test_shards_give_the_same_few_labels_in_training_and_test(duplicates):
    train, test = split(LabelShards(labels=2, duplicates=duplicates), clients=100)
    assert labels_of(train, Y) == labels_of(test, Y_TEST)
    distinct = {len(labels) for labels in labels_of(train, Y)}
    assert distinct == ({2} if duplicates == "resample" else {1, 2})
    # 2 * 100 / 10 = 20 shards of 30 a class
    sizes = {"merge": {30, 60}, "keep": {60}, "resample": {60}}[duplicates]
    assert set(train.sizes) == sizes
    if duplicates != "merge":
        assert train.sizes.sum() == 6000 and test.sizes.sum() == 1000


def test_merged_shards_lose_nine_and_a_half_of_a_hundred():
    """The second of two labels equals the first with 19/199."""
    single = [(split(LabelShards(), clients=100, seed=seed)[0].sizes == 30).sum() for seed in range(200)]
    assert np.mean(single) == pytest.approx(100 * 19 / 199, abs=0.6)


def test_resampled_labels_exist_up_to_all_classes():
    train, _ = split(LabelShards(labels=10, duplicates="resample"), clients=7)
    assert labels_of(train, Y) == [set(range(10))] * 7


def test_a_class_is_cut_in_stored_order_and_the_remainder_goes_to_the_first_shards():
    """Seven samples of class 0 into three shards: (0 1 6), (2 3), (4 5)."""
    y = np.zeros(7, np.int64)
    holder, label = np.arange(3), np.zeros(3, np.int64)
    owner = _take_shards(y, holder, label, (1, 3), np.random.Generator(np.random.PCG64(0)))
    groups = {tuple(np.flatnonzero(owner == c)) for c in range(3)}
    assert groups == {(0, 1, 6), (2, 3), (4, 5)}


def test_shards_that_do_not_come_out_even_are_refused():
    assert refused(LabelShards(labels=3), clients=7) == (
        "partition.labels: 3 labels for 7 clients do not divide the 10 classes of the training samples equally. "
        "Allowed: labels * clients a multiple of 10"
    )
    assert refused(LabelShards(labels=11)) == "partition.labels: 11 is not valid. Allowed: at most 10 classes"


@pytest.mark.parametrize("duplicates", ["merge", "resample"])
def test_a_class_without_training_samples_has_no_shards(duplicates):
    y = Y[Y != 4]
    train, test = split(LabelShards(labels=3, duplicates=duplicates), y=y, clients=6)
    assert labels_of(train, y) == labels_of(test, Y_TEST) and set().union(*labels_of(train, y)) == {*range(10)} - {4}
    assert refused(LabelShards(labels=10), y=y) == "partition.labels: 10 is not valid. Allowed: at most 9 classes"


def test_a_client_with_no_data_is_named():
    y = np.repeat(np.arange(10), [90, 1, 9, 9, 9, 9, 9, 9, 9, 9])
    message = refused(LabelShards(labels=1), y=y, clients=20)
    assert message.startswith("partition: shards leaves 1 of 20 clients without training data (first: client ")
    assert message.endswith("Hint: lower clients.count, or use more data than 163 samples")


# natural users


def test_users_by_hand():
    users = np.array([7, 5, 7, 5, 7, 3, 5, 7, 9, 9])
    y = np.zeros(10, np.int64)
    train, test = split(Users(test_fraction=0.34), clients=2, y=y, users=users)
    # 7 has four samples and 5 has three: clients in order of id, the last third of each held out
    assert [train[c].tolist() for c in range(2)] == [[1, 3], [0, 2, 4]]
    assert [test[c].tolist() for c in range(2)] == [[6], [7]]


def test_no_client_holds_two_users():
    train, test = split(Users(test_fraction=0.2), clients=60)
    for c in range(60):
        assert set(USERS[train[c]]) == set(USERS[test[c]]) == {7 * c}
        assert len(test[c]) == (len(train[c]) + len(test[c])) // 5
    assert train.sizes.sum() + test.sizes.sum() == 6000


def test_too_few_users_is_refused():
    assert refused(Users(), clients=61) == (
        "clients.count: 61 is not valid. Allowed: at most 60, the number of users with at least 2 samples, not "
        "all of them held out. Hint: lower clients.count, partition.min_samples or evaluation.holdout"
    )
    assert "at most 1, the number of users with at least 5" in refused(
        Users(min_samples=5), clients=2, y=Y[:9], users=np.array([1] * 5 + [2] * 4)
    )


def test_users_need_a_data_set_that_knows_them():
    assert refused(Users(), users=None) == (
        "partition.name: users needs user ids, and the data set has none. Allowed: a data set with user ids, such as "
        "mnist with the file QMNIST/raw/qmnist-train-labels-idx2-int.gz in its folder, or your own with `users`. "
        "Hint: choose another partition"
    )


def test_users_are_tested_on_their_last_samples_if_the_test_set_is_by_others():
    users, test_users = np.array([7, 7, 9, 9]), np.array([3, 3, 4])
    labels = Labels(np.zeros(4, np.int64), np.zeros(3, np.int64), users, 1, test_users)
    rule = Users(test_fraction=0.5)
    assert rule.tested_on(labels) == "train"
    train, test = partition(rule, labels, 2, 0)
    assert [train[c].tolist() for c in range(2)] == [[0], [2]] and [test[c].tolist() for c in range(2)] == [[1], [3]]


class Rounded(Users):
    """Owners as floating-point numbers."""

    def owners(self, labels, clients, generator):
        return np.zeros(6000), np.zeros(1000)


def test_owners_are_integers():
    assert refused(Rounded()) == "partition: an answer of users has float64 values. Allowed: integers"


def test_users_are_tested_on_their_own_part_of_the_test_set():
    users, test_users = np.array([7, 7, 9, 9, 9, 4]), np.array([9, 8, 7, 9, 4])
    labels = Labels(np.zeros(6, np.int64), np.zeros(5, np.int64), users, 1, test_users)
    train, test = partition(Users(), labels, 2, seed=0)
    # nobody is 8, and 4 has too few samples to be a client
    assert [train[c].tolist() for c in range(2)] == [[0, 1], [2, 3, 4]]
    assert [test[c].tolist() for c in range(2)] == [[2], [0, 3]]
    assert Users().tested_on(labels) == "test"


@pytest.mark.parametrize("unknown", [-1, ""])
def test_samples_of_unknown_users_are_not_used(unknown):
    names = [unknown, 7, 9] if unknown == -1 else ["", "eve", "bob"]
    users = np.array([names[i] for i in (0, 0, 0, 1, 1, 2, 2)])
    y = np.zeros(7, np.int64)
    train, _ = split(Users(test_fraction=0), clients=2, y=y, users=users)
    assert sorted(train.idx) == [3, 4, 5, 6]
    assert "at most 2, the number of users" in refused(Users(), clients=3, y=y, users=users)


class Overlapping(Users):
    """Clients are tested on a sample that they train on. Owners are small integers."""

    def owners(self, labels, clients, generator):
        train = np.zeros(len(labels.train), np.int8)
        return train, np.where(np.arange(len(train)) < 1, train, np.int8(NOBODY))


def test_samples_for_training_and_for_testing_are_different():
    assert refused(Overlapping(), clients=1) == (
        "partition: users assigns 1 samples for training and for testing. Allowed: each sample for one of them"
    )


class Small(Partition):
    """Owners are small integers."""

    name: Literal["small"] = "small"

    def owners(self, labels, clients, generator):
        return tuple((np.arange(len(y)) % clients).astype(np.uint8) for y in (labels.train, labels.test))


def test_owners_of_any_integer_type():
    assert split(Small(), clients=200)[0].sizes.tolist() == [30] * 200


class First(Partition):
    """Two samples per client, in stored order."""

    name: Literal["first"] = "first"

    def owners(self, labels, clients, generator):
        owner = np.arange(len(labels.train)) // 2
        return np.where(owner < clients, owner, NOBODY), np.full(len(labels.test), NOBODY)


def test_a_class_that_no_client_has_is_refused():
    y = np.array([0, 0, 0, 0, 1, 2])
    assert refused(First(), clients=2, y=y) == (
        "partition: first assigns no training samples of 2 of the 10 classes (first: class 1). Allowed: all classes. "
        "Hint: use more clients than 2, another seed or another partition"
    )
    assert split(First(), clients=3, y=y)[0].sizes.tolist() == [2, 2, 2]
    # some of the users may not have a class
    users = np.array([1, 1, 2, 2, 3, 3])
    assert split(Users(), clients=2, y=y, users=users)[0].sizes.tolist() == [2, 2]


def test_samples_that_the_server_holds_out_count_for_who_is_a_client():
    """User 7 has most samples, of which one is left."""
    everyone = np.repeat([7, 8, 9, 5], [5, 4, 3, 1])
    kept = np.array([0, *range(5, 12)])
    labels = Labels(np.zeros(8, np.int64), np.zeros(2, np.int64), everyone[kept], 1, None, everyone)
    train, _ = partition(Users(test_fraction=0), labels, 2, 0)
    assert [kept[train[c]].tolist() for c in range(2)] == [[0], [5, 6, 7, 8]]


def test_cap_with_a_class_without_samples():
    """No client has room when its turn comes."""
    train, _ = split(Dirichlet(balance="cap", alpha=1.0), clients=1, y=np.zeros(20, np.int64))
    assert train.sizes.tolist() == [20]


def test_users_may_have_names():
    users = np.array(["eve", "bob", "eve", "bob", "eve"])
    train, test = split(Users(test_fraction=0.34), clients=2, y=np.zeros(5, np.int64), users=users)
    assert [train[c].tolist() for c in range(2)] == [[1, 3], [0, 2]]
    assert [test[c].tolist() for c in range(2)] == [[], [4]]


# rules of other packages


class Blocks(Partition):
    """Equal parts in stored order; `shift` is added to every owner, which makes it wrong."""

    shift: int = 0
    cut: int = 0

    def owners(self, labels, clients, generator):
        train, test = (np.arange(len(y)) * clients // len(y) + self.shift for y in (labels.train, labels.test))
        return train[self.cut :], test


def test_a_rule_of_another_package_is_found():
    spec = PARTITIONS_KIND.read({"name": "test_partition:Blocks"}, "exp.yaml: partition")
    assert spec == Blocks() and spec.name == "test_partition:Blocks"
    train, test = split(spec, clients=3)
    assert [train[c][[0, -1]].tolist() for c in range(3)] == [[0, 1999], [2000, 3999], [4000, 5999]]
    assert test.sizes.tolist() == [334, 333, 333]


@pytest.mark.parametrize(
    ("options", "found"), [({"shift": 2}, "[6000] from 2 to 4"), ({"cut": 5}, "[5995] from 0 to 2")]
)
def test_owners_that_do_not_exist_are_refused(options, found):
    assert refused(Blocks(**options), clients=3) == (
        f"partition: test_partition:Blocks returned owners of the training samples of shape {found}. Allowed: [6000] "
        "from -1 (no client) to 2"
    )


# the server's validation split


def test_hold_out_is_stratified_and_loses_nothing():
    y = np.repeat(np.arange(3), [10, 20, 4])

    def held_out(fraction, seed=0):
        return hold_out(y, fraction, numpy_generator(seed, "hold_out"))

    stays, held = held_out(0.1)
    assert np.bincount(y[held], minlength=3).tolist() == [1, 2, 0]
    assert sorted([*stays, *held]) == list(range(34))
    assert (np.diff(stays) > 0).all()
    assert held_out(0.1)[1].tolist() == held.tolist()
    assert any(held_out(0.1, s)[1].tolist() != held.tolist() for s in range(1, 4))
    assert len(held_out(0.0)[1]) == 0
