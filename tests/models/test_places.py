"""Errors of a model inside another name the key that the user wrote."""

import pytest

from rayfl.config import ConfigError
from rayfl.models import MODELS


@pytest.mark.parametrize(
    ("model", "place"),
    [
        (lambda nested: MODELS["lora"](base=nested), "model.base.weights"),
        (lambda nested: MODELS["mix"](networks={1: nested, 0.5: "resnet8"}), "model.networks.1.weights"),
    ],
)
def test_a_nested_model_is_named_by_its_place(model, place):
    nested = {"name": "vit_b_16", "weights": "/nowhere/weights.pth"}
    with pytest.raises(ConfigError, match=f"^{place}: '/nowhere/weights.pth' is not valid"):
        model(nested).prepare()
