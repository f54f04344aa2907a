"""Random draws depend on their addresses only."""

import itertools
import random

import numpy as np
import pytest
import torch

from rayfl.core.seeds import PURPOSES, global_scope, numpy_generator, stream, torch_generator, torch_scope


def test_streams_are_the_same_on_every_machine_and_in_every_version():
    """A change of these values would change all published results."""
    assert stream(0, "cohort", 0) == 4711825377064367908
    assert stream(7, "local", 3, 12) == 4698870704795100347


def test_every_part_of_an_address_counts():
    seeds = [stream(*address) for address in itertools.product((0, 1), ("cohort", "local"), (0, 1), (0, 1))]
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_numbers_are_separated():
    assert stream(1, "cohort", 12, 3) != stream(1, "cohort", 1, 23)
    assert stream(0, "cohort", 1) != stream(1, "cohort", 0)


def test_purposes_are_a_closed_list():
    seeds = [stream(0, purpose) for purpose in PURPOSES]
    assert len(set(seeds)) == len(PURPOSES) == len(set(PURPOSES))
    assert stream(0, "hold_out") != stream(0, "digits") != stream(0, "local_validation")
    for draw in (stream, numpy_generator, torch_generator):
        with pytest.raises(ValueError) as error:
            draw(0, "cohrot", 1)
        assert (
            str(error.value)
            == f"purpose: 'cohrot' is not valid. Allowed: package:purpose, or one of {', '.join(PURPOSES)}"
        )


def test_a_package_names_its_own_purposes():
    assert stream(0, "zoo:noise") != stream(0, "zoo:order") != stream(0, "masks")


def test_generators_of_one_address_agree():
    for make in (numpy_generator, torch_generator):
        assert type(make(0, "cohort")) is type(make(0, "local"))
    assert numpy_generator(3, "cohort", 1).random() == numpy_generator(3, "cohort", 1).random()
    draws = [torch.rand(3, generator=torch_generator(3, "cohort", 1)) for _ in range(2)]
    assert torch.equal(*draws)


def test_a_scope_seeds_and_puts_back():
    before = torch.get_rng_state()
    draws = []
    for _ in range(2):
        with torch_scope(5):
            draws.append(torch.rand(3))
    assert torch.equal(*draws)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_scope_puts_back_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(KeyError), torch_scope(5):
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


def test_a_global_scope_seeds_all_generators_and_puts_them_back():
    def draws():
        return torch.rand(()).item(), np.random.rand(), random.random()

    def start():
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)

    start()
    expected = draws()
    start()
    with global_scope() as seed:
        seeded = []
        for address in (2**62 + 5, 3, 2**62 + 5):
            seed(address)
            seeded.append(draws())
    assert seeded[0] == seeded[2] != seeded[1] and draws() == expected
