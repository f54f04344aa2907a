"""Weights of torchvision's networks: names, cuts, and what is said where they are not there."""

from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from disks import flip_a_bit
from helpers import TINY, assert_same, tiny
from safetensors.torch import save_file
from torch import nn
from torchvision import models as theirs

import rayfl
from rayfl.config import ConfigError
from rayfl.core import norms
from rayfl.core.net import Net, load, params_of
from rayfl.core.norms import fresh
from rayfl.core.seeds import stream, torch_generator, torch_scope
from rayfl.core.submodel import prefix
from rayfl.engine.inputs import inputs_of
from rayfl.methods import METHODS
from rayfl.methods.base import Task
from rayfl.models import MODELS
from rayfl.models.pretrained import Pretrained, translated
from rayfl.networks import deployments
from rayfl.training.settings import Training

NAMES = [name for name, cls in MODELS.items() if issubclass(cls, Pretrained)]
VIT = {"name": "vit_b_16", "layers": 1, "heads": 2, "head_width": 4, "patch": 4}


def drawn(module):
    """Weights and statistics with nothing at its start."""
    with torch_scope(0):
        for name, t in module.state_dict().items():
            if t.is_floating_point():
                nn.init.uniform_(t, 0.5, 1.5) if name.endswith("running_var") else nn.init.normal_(t, std=0.1)
    return module.eval()


def started(model):
    with torch_scope(0):
        return Net(model).initial()


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """torchvision's network, and the file that holds it."""
    file = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    module = drawn(theirs.resnet18())
    torch.save(module.state_dict(), file)
    return module, file


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    file = tmp_path_factory.mktemp("weights") / "vit.safetensors"
    state = drawn(theirs.VisionTransformer(8, 4, 1, 2, 8, 32)).state_dict()
    save_file(state, file)
    return state, file


# --- names ---


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_torchvisions_network_has_its_place(name):
    cls = MODELS[name]
    with torch.device("meta"):
        state = getattr(theirs, name)(num_classes=10).state_dict()
    ours = Net(cls()).blank()
    found = {n: t.shape for n, t in translated(state, cls.names).items()}
    wanted = {n: t.shape for n, t in (params_of(ours) | fresh(ours)).items()}
    assert found.keys() == wanted.keys()
    assert {n.split(".")[0] for n in found if found[n] != wanted[n]} <= set(cls.drawn)


@pytest.mark.parametrize("name", NAMES)
def test_the_address_is_torchvisions(name):
    assert MODELS[name].url == theirs.get_model_weights(name).IMAGENET1K_V1.url


def test_which_networks_can_be_had():
    assert NAMES == ["resnet18", "resnet34", "wide_resnet101_2", "vit_b_16"]


def test_names_of_torchvisions_older_transformers():
    cls, old = MODELS["vit_b_16"], "encoder.layers.encoder_layer_3.mlp.linear_{}.bias"
    assert list(translated({old.format(1): torch.ones(1), old.format(2): torch.ones(1)}, cls.names)) == [
        "encoder.3.mlp.up.bias",
        "encoder.3.mlp.down.bias",
    ]


# --- values ---


def test_the_trunk_gives_what_torchvisions_gives(resnet):
    """Behind the stem's convolution, which is new: norm, pooling and all stages, in evaluation."""
    source, file = resnet
    model = MODELS["resnet18"](weights=str(file), maxpool=True)
    net = Net(model)
    module = net.build()
    load(module, net.initial())
    norms.load(module, net.statistics())
    x = torch.randn(2, 64, 16, 16, generator=torch_generator(0, "test:x"))
    expected = source.maxpool(source.relu(source.bn1(x)))
    for stage in (source.layer1, source.layer2, source.layer3, source.layer4):
        expected = stage(expected)
    trunk = nn.Sequential(*[layer for name, layer in module.eval().named_children() if name not in ("conv", "head")])
    torch.testing.assert_close(trunk(x), source.avgpool(expected).flatten(1))


def test_stem_and_head_are_new(resnet):
    model = MODELS["resnet18"](weights=str(resnet[1]))
    start, new = (started(m) for m in (model, model.model_copy(update={"weights": ""})))
    same = {name for name, t in start.items() if torch.equal(t, new[name])}
    assert same == {"conv.weight", "head.weight", "head.bias"}


def test_a_narrow_network_starts_with_the_first_positions(resnet):
    model = MODELS["resnet18"](weights=str(resnet[1]))
    net = Net(model, 0.3, without=("stage2.1",), steps=True)
    whole, part = Net(model).initial(), net.initial()
    cut = prefix(Net(model), Net(model, 0.3)).take(whole)
    kept = [name for name in part if name.split(".")[0] not in ("conv", "head") and part[name].dim()]
    assert_same({name: part[name] for name in kept}, {name: cut[name] for name in kept})
    statistics, narrow = Net(model).statistics(), net.statistics()
    assert narrow.keys() == fresh(net.blank()).keys() < statistics.keys()
    for name, t in narrow.items():
        assert torch.equal(t, statistics[name][: len(t)])
    assert not torch.equal(narrow["norm.running_var"], torch.ones(20))


def test_a_narrow_transformer_keeps_the_first_features_of_every_head(vit):
    """2 heads of 4 features, of which half stay: rows 0, 1 and 4, 5 of each third of torchvision's stack."""
    state, file = vit
    model = MODELS["vit_b_16"](input=(3, 8, 8), weights=str(file), **{k: v for k, v in VIT.items() if k != "name"})
    part = Net(model, 0.5).initial()
    stack = state["encoder.layers.encoder_layer_0.self_attention.in_proj_weight"]
    for start, projection in zip((0, 8, 16), "qkv", strict=True):
        rows = stack[[start, start + 1, start + 4, start + 5], :4]
        assert torch.equal(part[f"encoder.0.attention.attend.{projection}.linear.weight"], rows)


def test_of_any_precision_it_is_float32(resnet, tmp_path):
    file = tmp_path / "half.pth"
    torch.save({name: t.half() if t.is_floating_point() else t for name, t in torch.load(resnet[1]).items()}, file)
    net = Net(MODELS["resnet18"](weights=str(file)), 0.1)
    tensors = net.initial() | net.statistics()
    assert {t.dtype for t in tensors.values()} == {torch.float32}


def test_fjords_widths_start_from_its_statistics(resnet):
    model = MODELS["resnet18"](weights=str(resnet[1]))
    nets = {1.0: Net(model, 0.2), 0.5: Net(model, 0.1)}
    method = METHODS["fjord"]().bind(Task(model, Training(), nets, 1.0, clients=1))
    state, expected = method.init(), nets[0.5].statistics()
    assert_same(state["width 0.1"], expected)
    assert (expected["norm.running_var"] != 1).any()


def test_runs_start_from_it(vit):
    """Also where the server's network is narrow."""
    state, file = vit
    model = VIT | {"weights": str(file)}
    given = dict(data={"shape": [3, 8, 8]}, model=model, clients={"capacities": [1, 0.5]})
    for method, positions in (("heterofl", 8), ({"name": "fedavg", "size": "smallest"}, 4)):
        spec = tiny(method=method, **given)
        params = spec.bound().init()["params"]
        assert torch.equal(params["tokens.positions"], state["encoder.pos_embedding"][..., :positions])
        assert params["head.weight"].shape == (4, positions)


def test_a_new_network_starts_as_ever():
    """Parameters that pre-trained ones replace are drawn nevertheless."""
    spec = tiny()
    with torch_scope(stream(0, "init")):
        expected = params_of(spec.task.server.build())
    assert_same(spec.bound().init()["params"], expected)
    spec.model.prepare()
    net = Net(spec.model, 0.1)
    assert_same(net.statistics(), fresh(net.blank()))


# --- where they are ---


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    return tmp_path / "checkpoints"


def test_they_are_downloaded_once_and_checked(hub, resnet, monkeypatch):
    asked = []

    def download(url, file, hash_prefix):
        asked.append((url, hash_prefix))
        Path(file).symlink_to(resnet[1])

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    model = MODELS["resnet18"](weights="imagenet")
    model.prepare()
    model.prepare()
    assert asked == [("https://download.pytorch.org/models/resnet18-f37072fd.pth", "f37072fd")]
    assert_same(started(model), started(MODELS["resnet18"](weights=str(resnet[1]))))


def message(model):
    with pytest.raises(ConfigError) as error:
        model.prepare()
    return str(error.value)


def test_no_network(hub, monkeypatch):
    def download(url, file, hash_prefix):
        raise URLError("no route\nto host")

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    assert message(MODELS["vit_b_16"](weights="imagenet")) == (
        f"model.weights: the imagenet weights of vit_b_16 are not in {hub} and cannot be downloaded "
        "(<urlopen error no route to host>). Allowed: imagenet once that folder holds\n"
        "  https://download.pytorch.org/models/vit_b_16-c867db91.pth\n"
        "or the path of this file"
    )


@pytest.mark.parametrize("place", ["/nowhere/mine.pth", "imagnet"])
def test_neither_a_file_nor_imagenet(place):
    assert message(MODELS["resnet18"](weights=place)) == (
        f"model.weights: '{place}' is not valid. Allowed: an existing file .pth, .pt, .safetensors of a network's "
        "state, or the folder of a run with a checkpoint or of an export. Hint: a file such as "
        "https://download.pytorch.org/models/resnet18-f37072fd.pth, or imagenet"
    )


@pytest.mark.parametrize("kind", [".pth", ".safetensors"])
def test_a_damaged_file(kind, tmp_path):
    file = tmp_path / f"weights{kind}"
    for content in (b"", b"no weights at all"):
        file.write_bytes(content)
        said = message(MODELS["resnet18"](weights=str(file)))
        assert said.startswith(f"model.weights: {file} cannot be read (")
        assert said.endswith(
            "). Allowed: the state of a network as torch or safetensors saves it; delete the file if it is damaged"
        )


def test_a_file_of_something_else(tmp_path):
    file = tmp_path / "weights.pt"
    torch.save({"epoch": 3, "model": {}}, file)
    assert message(MODELS["resnet18"](weights=str(file))) == (
        f"model.weights: {file} has no named tensors. Allowed: the state of a network"
    )


def test_another_network(resnet, vit):
    """A file that does not fit is refused before anything runs."""
    url = "https://download.pytorch.org/models/resnet18-f37072fd.pth"
    file = resnet[1]
    wrong = f"tensors of {file} do not match resnet18 as it is configured"
    assert message(MODELS["resnet18"](weights=str(file), norm="group")) == (
        f"model.weights: 40 {wrong} (norm.running_mean is [64] and should be missing; norm.running_var is [64] and "
        "should be missing; stage1.0.residual.norm1.running_mean is [64] and should be missing). Allowed: a file such "
        f"as {url}, or imagenet"
    )
    assert message(MODELS["resnet18"](weights=str(file), channels=32)).startswith(
        f"model.weights: 99 {wrong} (norm.bias is [64] and should be [32]; norm.running_mean"
    )
    assert "(class_token is [1, 1, 8] and should be missing;" in message(MODELS["resnet18"](weights=str(vit[1])))


def test_any_model_starts_from_a_file_or_a_run(tmp_path):
    """Parameters are those of the server's network, cut to the width; statistics start new if there are none."""
    folder, clients = tmp_path / "run", {"count": 6, "cohort": 4, "capacities": [1, 0.3]}
    rayfl.run({**TINY, "rounds": 1, "method": "heterofl", "clients": clients}, folder, listeners=[])
    model = tiny().model
    places = [folder, tmp_path / "state.pt", tmp_path / "state.safetensors"]
    params = {capacity: deployed.params for capacity, deployed in deployments(folder).items()}
    torch.save(params[1] | fresh(Net(model).blank()), places[1])
    save_file(params[1], places[2])
    for place in places:
        again = model.model_copy(update={"weights": str(place)})
        assert_same(Net(again, 0.3).initial(), params[0.3])
        assert_same(Net(again).statistics(), fresh(Net(model).blank()))
    [state] = folder.glob("checkpoints/*/state.safetensors")
    flip_a_bit(state)
    assert message(model.model_copy(update={"weights": str(folder)})).startswith(
        f"model.weights: {state} cannot be read (the SHA-256 differs from the manifest's). Allowed: "
    )


def test_weights_are_an_input_of_the_run(tmp_path):
    file = tmp_path / "state.pt"
    torch.save({"x": torch.ones(3)}, file)
    experiment = tiny(model={"name": "digits_cnn", "weights": str(file)})
    assert f"file {file}" in inputs_of([experiment], experiment.data.arrays())
    said = message(experiment.model)
    assert said.startswith(f"model.weights: 11 tensors of {file} do not match digits_cnn as it is configured (")
    assert said.endswith("Allowed: the state of this network")
