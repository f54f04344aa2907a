"""Populations of several architectures, the projection before their classifiers, and what classifiers read."""

import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers import COMPLETE
from torch import nn

from rayfl.config import ConfigError, load_yaml
from rayfl.core import frozen
from rayfl.core.axes import CLASSES, Axis
from rayfl.core.net import Net, check_axes, params_of
from rayfl.core.seeds import torch_generator, torch_scope
from rayfl.core.submodel import prefix
from rayfl.experiment import read_experiment
from rayfl.models import MODELS, MODELS_KIND, ImageModel
from rayfl.models.features import classifier_path, feature_size, tapped
from rayfl.models.mix import Mix, Projected
from rayfl.testing import ModelContract
from rayfl.testing.tiny import assert_same, run, simulate, small, tiny

OF_IMAGES = [name for name, cls in COMPLETE.items() if issubclass(cls, ImageModel)]
SEQUENCES = {"hidden": 20, "heads": 2, "layers": 1, "ffn": 12, "positions": 70}
MIX = {
    "name": "mix",
    "networks": {"0.3": {"name": "resnet8", "channels": 4}, "0.2": "digits_cnn", "0.1": "mcmahan_cnn"},
}
IMAGES = {"shape": [1, 8, 8]}


def built(net):
    with torch_scope(0):
        return net.build()


def images(model, count=3):
    return torch.randn(count, *model.input, generator=torch_generator(0, "test:images"))


def mixed(**sections):
    return tiny(model=MIX, data=IMAGES, **sections)


# --- reading ---


def test_it_is_read_and_dumped(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": MIX | {"features": 5}}))
    mix = MODELS_KIND.read(load_yaml(tmp_path / "run.yaml")["model"], "model")
    assert isinstance(mix, Mix)
    assert mix == Mix(networks={float(c): model for c, model in MIX["networks"].items()}, features=5)
    assert [(c, model.name) for c, model in mix.networks] == [
        (0.3, "resnet8"),
        (0.2, "digits_cnn"),
        (0.1, "mcmahan_cnn"),
    ]
    plain = mix.model_dump(mode="json")
    assert list(plain["networks"]) == ["0.3", "0.2", "0.1"] and plain["networks"]["0.3"]["channels"] == 4
    assert MODELS_KIND.read(yaml.safe_load(yaml.safe_dump(plain)), "model") == mix
    again = pickle.loads(pickle.dumps(mix))
    assert again == mix and hash(again) == hash(mix) and hash(Net(again)) == hash(Net(mix))


@pytest.mark.parametrize("capacity", [1, 0.5, 1 / 3, 1e-7])
def test_a_capacity_is_dumped_as_the_number_that_it_is(capacity):
    mix = Mix(networks={capacity: "digits_cnn"})
    [text] = mix.model_dump(mode="json")["networks"]
    assert float(text) == capacity and text != "1.0"


def test_an_experiment_is_read_from_what_it_dumps():
    experiment = mixed()
    assert read_experiment(experiment.plain(), "test") == experiment


@pytest.mark.parametrize(
    ("networks", "said"),
    [
        (
            {},
            'model.networks: {} is not valid. Allowed: a mapping of capacities to models, such as {"1": resnet20, '
            '"0.5": resnet8}',
        ),
        ({"big": "resnet8"}, "networks: 'big' is not a capacity. Allowed: numbers more than 0, at most 1"),
        ({1.5: "resnet8"}, "networks: 1.5 is not a capacity. Allowed: numbers more than 0, at most 1"),
        ({1: "resnet8", "1": "resnet20"}, "networks: capacity 1 appears twice. Allowed: each capacity once"),
        ({1: MIX}, "networks.1: mix is not valid. Allowed: one model for a capacity"),
        (
            {1: "resnet8", 0.5: "roberta"},
            "networks.0.5: roberta takes sequences of tokens. Allowed: one of images, as that of capacity 1",
        ),
    ],
)
def test_networks_that_are_refused(networks, said):
    with pytest.raises(ConfigError) as error:
        MODELS_KIND.read({"name": "mix", "networks": networks}, "f: model")
    assert str(error.value).removeprefix("f: ").removeprefix("model: ") == said
    with pytest.raises(ConfigError):
        Mix(networks=networks)


@pytest.mark.parametrize(
    ("networks", "said"),
    [
        (
            {1: {"name": "resnet8", "classes": 7}, 0.5: {"name": "resnet20", "classes": 7}, 0.2: "resnet8"},
            "0.2.classes: 10 is not valid. Allowed: 7, as for capacity 1",
        ),
        (
            {1: {"name": "resnet8", "input": [1, 8, 8]}, 0.2: {"name": "digits_cnn", "input": [3, 8, 8]}},
            "0.2.input: (3, 8, 8) is not valid. Allowed: (1, 8, 8), as for capacity 1",
        ),
    ],
)
def test_networks_that_differ_where_the_data_says_nothing_are_refused(networks, said):
    with pytest.raises(ConfigError) as error:
        Mix(networks=networks).fitted("nothing", {}, "f: model")
    assert str(error.value) == f"f: model.networks.{said}"


def test_an_unknown_model_of_a_capacity_is_named():
    with pytest.raises(ConfigError, match=r"model: networks.0.5: name: no model is called 'resnet21'. Did you mean"):
        MODELS_KIND.read({"name": "mix", "networks": {0.5: "resnet21"}}, "f: model")


# --- in an experiment ---


def test_every_network_takes_what_the_data_has():
    experiment = mixed()
    assert {(model.input, model.classes) for _, model in experiment.model.networks} == {((1, 8, 8), 4)}
    assert {net.width for net in experiment.task.nets.values()} == {1.0}


def test_a_network_of_other_classes_than_the_data_is_named():
    networks = MIX["networks"] | {"0.3": {"name": "resnet8", "classes": 7}}
    with pytest.raises(
        ConfigError, match=r"model.networks.0.3.classes: 7 is not valid. Allowed: 4, as data set synthetic"
    ):
        tiny(model=MIX | {"networks": networks})


def test_a_network_of_other_samples_than_the_data_is_named():
    lora = {"name": "lora", "base": {"name": "roberta", **SEQUENCES}}
    with pytest.raises(ConfigError, match=r"model.networks.0.2.base: roberta takes sequences of tokens"):
        tiny(model=MIX | {"networks": MIX["networks"] | {"0.2": lora}})


def test_a_capacity_without_a_network_is_named():
    networks = {1: "resnet8", 0.5: "digits_cnn"}
    with pytest.raises(ConfigError, match=r"model.networks: no network for capacity 0.3. Allowed: 1, 0.5$"):
        tiny(model=MIX | {"networks": networks})


@pytest.mark.parametrize("method", ["heterofl", "fedrolex", "standalone", {"name": "fedavg", "size": "own"}, "nefl"])
def test_methods_that_cut_one_network_refuse_several(method):
    name = method if isinstance(method, str) else method["name"]
    with pytest.raises(
        ConfigError, match=rf"model: mix is not valid. Allowed: one model, because method {name} trains parts"
    ):
        mixed(method=method, clients={"metric": "params"})


def test_one_model_for_all_capacities_is_none_too_many():
    assert tiny(model={"name": "mix", "networks": dict.fromkeys((0.3, 0.2, 0.1), "digits_cnn")}, method="heterofl")


@pytest.mark.parametrize(("size", "name"), [("largest", "resnet8"), ("smallest", "mcmahan_cnn")])
def test_fedavg_trains_the_network_of_one_capacity(size, name, tmp_path):
    """As it trains it where it is the model of all."""
    method = {"name": "fedavg", "size": size}
    several = mixed(method=method)
    [net] = set(several.bound().task.nets.values())
    model = next(model for _, model in several.model.networks if model.name == name)
    assert net == Net(model)
    alone = tiny(model=model, data=IMAGES, method=method, clients={"capacities": [1]})
    lines, states = [], []
    for folder, experiment in (("several", several), ("alone", alone)):
        simulation = simulate(experiment, tmp_path / folder)
        lines.append(run(simulation))
        states.append(simulation.state["params"])
    assert_same(*states)
    assert states[0].keys() == net.layout.shapes.keys()
    assert [line["refused"] for line in lines[0]] == [0, 0]


def test_as_one_network_it_is_that_of_its_largest_capacity():
    mix = Mix(**MIX)
    largest = mix.networks[0][1]
    assert Net(mix).layout.shapes == Net(largest).layout.shapes and Net(mix).macs == Net(largest).macs
    assert mix.blocks == largest.blocks and mix.head_paths == ("head",)
    with torch_scope(1):
        one = Net(mix).initial()
    with torch_scope(1):
        assert_same(one, Net(largest).initial())
    assert Net(mix).statistics().keys() == Net(largest).statistics().keys() != set()


def test_every_network_is_prepared(tmp_path):
    gone = str(tmp_path / "gone.safetensors")
    mix = Mix(networks={1: "digits_cnn", 0.5: {"name": "resnet18", "weights": gone}})
    with pytest.raises(ConfigError, match="gone"):
        mix.prepare()
    mix.blank.prepare()


class Undeclared(ImageModel):
    """A layer without axes."""

    def build(self, net):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, self.classes))


def test_axes_of_every_network_are_checked():
    with pytest.raises(ConfigError, match=r"the parameter '1.weight' \[4, 64\] of a Linear has no axes"):
        tiny(model=MIX | {"networks": MIX["networks"] | {"0.1": Undeclared()}}, data=IMAGES)


# --- the projection ---


def parts(model):
    """The same with a projection to 5 numbers, its network, and the path of the classifier."""
    projected = Projected(of=model, features=5)
    return projected, Net(projected), classifier_path(Net(model))


@pytest.mark.parametrize("name", OF_IMAGES)
def test_every_network_of_images_takes_a_projection(name):
    model = small(MODELS[name])
    projected, net, path = parts(model)
    size = feature_size(Net(model))
    shapes, dims = net.layout.shapes, net.layout.dims
    assert shapes[f"{path}.project.weight"] == (5, size) and shapes[f"{path}.classifier.weight"] == (model.classes, 5)
    assert dims[f"{path}.project.weight"][0] == Axis.fixed("features", 5)
    assert dims[f"{path}.classifier.weight"] == (Axis.fixed(CLASSES, model.classes), Axis.fixed("features", 5))
    rest = {n: s for n, s in Net(model).layout.shapes.items() if n not in Net(model).layout.classifier}
    assert {n: s for n, s in shapes.items() if not n.startswith(f"{path}.")} == rest
    assert classifier_path(net) == f"{path}.classifier" and feature_size(net) == 5
    check_axes(net)
    check_axes(net, 1 / 16 if size % 16 == 0 else 0.3)
    assert built(net)(images(model)).shape == (3, model.classes)
    assert net.macs == Net(model).macs + 5 * size + model.classes * (5 - size)


def test_what_the_projection_computes():
    """logits = W (P f + p) + b, f what the classifier of the same network without it is given."""
    model = small(MODELS["digits_cnn"])
    _, net, path = parts(model)
    module, x = built(net), images(model)
    with tapped(module, f"{path}.project") as tap:
        logits = module(x)
    project, classifier = module.head.project, module.head.classifier
    expected = (tap.features @ project.weight.T + project.bias) @ classifier.weight.T + classifier.bias
    torch.testing.assert_close(logits, expected)


def test_a_projection_starts_as_torchs_linear_layers_and_the_rest_as_its_model():
    model = MODELS["resnet8"](classes=3000)
    params = Net(Projected(of=model, features=400)).initial()
    assert params["head.project.weight"].abs().max() <= 64**-0.5
    assert params["head.project.weight"].std().item() == pytest.approx((3 * 64) ** -0.5, rel=0.05)
    assert params["head.classifier.weight"].std().item() == pytest.approx((3 * 400) ** -0.5, rel=0.05)
    assert params["conv.weight"].std().item() == pytest.approx((2 / 27) ** 0.5, rel=0.2)  # kaiming


def test_a_narrow_projected_network_is_a_part_of_the_wide_one():
    _, net, _ = parts(small(MODELS["resnet8"]))
    cut = prefix(net, replace(net, width=0.5)).take(params_of(built(net)))
    assert {n: tuple(t.shape) for n, t in cut.items()} == dict(replace(net, width=0.5).layout.shapes)


@pytest.mark.parametrize("name", ["roberta", "bert", "distilbert"])
def test_encoders_take_a_projection(name):
    """Transformers' own module also refers to the children."""
    model = MODELS[name](ids=30, classes=4, length=6, **SEQUENCES)
    _, net, path = parts(model)
    check_axes(net)
    module = built(net).eval()
    x = torch.arange(12).view(2, 6)
    with tapped(module, classifier_path(net)) as tap:
        logits = module(x)
    torch.testing.assert_close(logits, module.get_submodule(f"{path}.classifier")(tap.features))
    logits.sum().backward()
    assert all(module.get_submodule(f"{path}.{layer}").weight.grad is not None for layer in ("project", "classifier"))


def test_adapters_take_a_projection():
    base = MODELS["vit_b_16"](**MODELS["vit_b_16"].smallest)
    lora = MODELS["lora"](base=base, rank=2)
    projected, net, path = parts(lora)
    check_axes(net)
    assert projected.frozen_key == lora.frozen_key and frozen.tensors_of(projected).keys() == lora.frozen().keys()
    assert set(net.layout.shapes) - set(Net(lora).layout.shapes) == {
        f"{path}.{layer}.{kind}" for layer in ("project", "classifier") for kind in ("weight", "bias")
    }
    assert built(net)(images(base)).shape == (3, base.classes)


def test_classifiers_of_a_mix_have_one_shape():
    experiment = tiny(model=MIX | {"features": 6}, data=IMAGES)
    nets = experiment.task.nets.values()
    assert {feature_size(net) for net in nets} == {6}
    assert {net.layout.shapes[f"{classifier_path(net)}.weight"] for net in nets} == {(4, 6)}
    assert len({net.model for net in nets}) == 3


class TestProjected(ModelContract):
    model = Projected(of=MODELS["digits_cnn"](), features=5)


# --- what a classifier reads ---


def test_features_are_those_of_a_forward_by_hand():
    model = small(MODELS["mcmahan_cnn"])
    module, x = built(Net(model)), images(model)
    with tapped(module, classifier_path(Net(model))) as tap:
        logits = module(x)
    by_hand = x
    for name, layer in module.named_children():
        by_hand = by_hand if name == "head" else layer(by_hand)
    assert torch.equal(tap.features, by_hand) and by_hand.shape == (3, feature_size(Net(model)))
    assert torch.equal(logits, F.linear(by_hand, module.head.weight, module.head.bias))
    wanted = torch.autograd.grad(by_hand.square().sum(), module.conv1.weight)
    assert torch.equal(*torch.autograd.grad(tap.features.square().sum(), module.conv1.weight), *wanted)


def test_a_tap_is_gone_behind_its_block():
    net = Net(small(MODELS["digits_cnn"]))
    module = built(net)
    with tapped(module, "head") as tap:
        with pytest.raises(ValueError, match="features: the module has not been called within `tapped`"):
            _ = tap.features
        module(images(net.model))
    first = tap.features
    module(images(net.model))
    assert tap.features is first and not module.head._forward_pre_hooks


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (Net(small(MODELS["depthfl_resnet18"]), exits=3), "answers at 3 exits"),
        (Net(MODELS["gpt2"](ids=30, classes=4, length=6, **SEQUENCES)), "answers for every token"),
        (
            Net(MODELS["roberta"](task="masked_lm", ids=30, classes=30, length=6, **SEQUENCES)),
            "has . layers with one row per class|has a Embedding with one row per class",
        ),
    ],
)
def test_networks_without_one_classifier_have_no_features(net, why):
    with pytest.raises(ValueError, match=f"model: {net.model.name} ({why})"):
        feature_size(net)


def test_a_projection_has_no_early_exits():
    model = small(MODELS["depthfl_resnet18"])
    projected, net, _ = parts(model)
    assert projected.exit_count == 1
    with pytest.raises(ValueError, match="answers at 2 exits"):
        replace(net, exits=2).build()
