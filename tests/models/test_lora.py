"""Adapters over a frozen network, and sums of products."""

import json
from collections import OrderedDict
from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from rayfl.config import ConfigError
from rayfl.core import frozen
from rayfl.core.axes import Axis, linear
from rayfl.core.fold import Factors, Fold, PairwiseSum, Update
from rayfl.core.net import Net, load, params_of
from rayfl.core.seeds import torch_generator, torch_scope
from rayfl.core.submodel import prefix
from rayfl.core.tensors import leaves
from rayfl.exporting.submodels import export_submodel
from rayfl.methods.base import Deployment
from rayfl.models import MODELS, peft
from rayfl.models.base import ImageModel
from rayfl.reference.describe import describe
from rayfl.testing.tiny import assert_same, run, simulate, tiny

VIT = MODELS["vit_b_16"](**MODELS["vit_b_16"].smallest)
LORA = MODELS["lora"](base=VIT, rank=8, alpha=4)
PATH = "encoder.0.attention.attend.q.linear"


def drawn(net):
    """Adapters that are not 0."""
    with torch_scope(3):
        return {name: torch.randn_like(t) * 0.3 for name, t in params_of(net.build()).items()}


def answers(net, params, x):
    module = net.build().eval()
    load(module, params)
    with torch.no_grad():
        return module(x)


def images(count=3):
    return torch.randn(count, *VIT.input, generator=torch_generator(0, "test:images"))


def test_only_adapters_and_head_are_parameters():
    shapes = Net(LORA).layout.shapes
    assert shapes[f"{PATH}.lora.A"] == (8, 20) and shapes[f"{PATH}.lora.B"] == (20, 8)
    assert {name.rpartition(".")[2] for name in shapes} == {"A", "B", "weight", "bias"}
    assert {name for name in shapes if "lora" not in name} == {"head.weight", "head.bias"}
    assert Net(LORA.model_copy(update={"head": "frozen"})).parameters == Net(LORA).parameters - 4 * 20 - 4
    assert len([name for name in shapes if name.endswith("lora.A")]) == 2 * VIT.layers


@pytest.mark.parametrize("width, rank", [(1, 8), (0.5, 4), (0.3, 3), (0.125, 1), (0.1, 0)])
def test_a_capacity_is_a_rank(width, rank):
    shapes = Net(LORA, width).layout.shapes
    assert shapes[f"{PATH}.lora.A"] == (rank, 20) and shapes[f"{PATH}.lora.B"] == (20, rank)


@pytest.mark.parametrize("width, ranks", [(1, (8, 4, 2)), (0.5, (4, 2, 1)), (0.25, (2, 1, 0)), (0.1, (0, 0, 0))])
def test_targets_have_ranks_of_their_own(width, ranks):
    """Also by a regular expression, as peft has them; s is alpha / R of each."""
    model = MODELS["lora"](**LORA_BY_LAYER)
    net = Net(model, width)
    found = {path: net.layout.shapes[f"{path}.lora.A"][0] for path in model.target_paths}
    queries, values, first = ranks
    assert {r for path, r in found.items() if path.endswith("q.linear")} == {queries}
    assert {path: r for path, r in found.items() if path.endswith("v.linear")} == {
        PATH.replace("q.linear", "v.linear"): first,
        PATH.replace("encoder.0", "encoder.1").replace("q.linear", "v.linear"): values,
    }
    assert model.parts(net)["rank"] == queries
    assert [model.scale(PATH.replace("q.", "v."), 1), model.scale(PATH, 1)] == [2, 0.5]


LORA_BY_LAYER = {
    "base": VIT,
    "rank": 8,
    "alpha": 4,
    "rank_pattern": {"1.attention.attend.v.linear": 4, r"encoder\.0\..*v\.linear": 2},
}


@pytest.mark.parametrize("width", [1, 0.25])
def test_ranks_by_layer_go_through_files_of_peft(width, tmp_path):
    model = MODELS["lora"](**LORA_BY_LAYER)
    net = Net(model, width)
    params = drawn(net)
    export_submodel(Deployment("own", net, params), tmp_path / "to", {}, pytest.fail)
    config = json.loads((tmp_path / "to" / "adapter" / "adapter_config.json").read_text())
    named = {path: config["rank_pattern"].get(path, config["r"]) for path in config["target_modules"]}
    assert named == {path: r for path in model.target_paths if (r := model.rank_of(net, path))}
    if width == 1:
        again = model.model_copy(update={"adapter": str(tmp_path / "to" / "adapter")})
        again.prepare()
        assert_same(Net(again).initial(), params)
        other = LORA.model_copy(update={"adapter": str(tmp_path / "to" / "adapter")})
        with pytest.raises(ConfigError, match=r"v.linear.lora.A is \(2, 20\) and should be \(8, 20\)"):
            other.prepare()


def test_a_new_adapter_changes_nothing():
    net, x = Net(LORA), images()
    with torch_scope(1):
        start = net.initial()
    base = Net(VIT).build().eval()
    load(base, {name: frozen.tensors_of(LORA)[name] for name in Net(VIT).layout.shapes})
    assert torch.equal(answers(net, start, x), base(x))
    bound = 1 / 20**0.5
    assert start[f"{PATH}.lora.A"].abs().max() <= bound and start[f"{PATH}.lora.A"].std() > bound / 3


def test_a_prefix_is_the_truncated_function():
    """A network of a smaller rank answers as the large one whose other components are 0."""
    whole, part, x = Net(LORA), Net(LORA, 0.5), images()
    params = drawn(whole)
    cut = {
        name: t[:, :4] if name.endswith("lora.B") else t[:4] if name.endswith("lora.A") else t
        for name, t in params.items()
    }
    zeroed = {name: F.pad(cut[name], (0, 4)) if name.endswith("lora.B") else params[name] for name in params}
    taken = prefix(whole, part).take(params)
    assert all(torch.equal(taken[name], t) for name, t in cut.items())
    torch.testing.assert_close(answers(part, taken, x), answers(whole, zeroed, x))


@pytest.mark.parametrize(
    "scaling, scales", [("constant", [0.5, 0.5]), ("alpha_over_r", [0.5, 2]), ("rslora", [4 / 8**0.5, 4 / 2**0.5])]
)
def test_scales_by_rank(scaling, scales):
    model = LORA.model_copy(update={"scaling": scaling})
    assert [model.scale(PATH, rank) for rank in (8, 2)] == pytest.approx(scales)


def test_merged_weights_answer_as_adapters():
    whole, x = Net(LORA), images()
    params = drawn(whole)
    merged = Net(LORA.model_copy(update={"merged": True}))
    start = {name: torch.zeros(shape) for name, shape in merged.layout.shapes.items()} | {
        name: t for name, t in params.items() if "lora" not in name
    }
    for name in start:
        if name.endswith("lora.W"):
            path = name.removesuffix("W")
            start[name] = LORA.scale(PATH, 8) * params[f"{path}B"] @ params[f"{path}A"]
    torch.testing.assert_close(answers(merged, start, x), answers(whole, params, x))


def test_the_base_is_neither_sent_nor_folded(tmp_path):
    experiment = tiny(
        model=LORA,
        method={"name": "heterofl", "label_rows": "all"},
        data={"shape": VIT.input},
        clients={"capacities": [1, 0.25, 0.1], "count": 3, "cohort": 3},
        partition="iid",
        rounds=1,
    )
    before = {name: t.clone() for name, t in frozen.tensors_of(LORA).items()}
    simulation = simulate(experiment, tmp_path)
    [line] = run(simulation)
    ranks = [8, 2, 0]
    sent = sum(2 * VIT.layers * rank * 40 + 4 * 20 + 4 for rank in ranks)
    assert line["bytes_down"] == line["bytes_up"] == 4 * sent
    assert {name for name, _ in leaves(simulation.state)} == {f"params/{name}" for name in Net(LORA).layout.shapes}
    assert all(torch.equal(t, before[name]) for name, t in frozen.tensors_of(LORA).items())


def test_a_base_may_have_batch_norms(tmp_path):
    """The norms are frozen, so their weights are not in the layout; their statistics are collected."""
    model = {"name": "lora", "base": {"name": "digits_cnn"}, "targets": ["hidden"], "rank": 8}
    [*_, line] = run(simulate(tiny(model=model, method="rbla", clients={"capacities": [1, 0.5]}), tmp_path))
    assert 0 <= line["accuracy_0.5"] <= 1
    net = Net(MODELS["lora"](**model | {"base": MODELS["digits_cnn"]()}), 0.5)
    assert set(net.full_layout.shapes) - set(net.layout.shapes) == set(net.statistics())


def test_two_bases_are_read_once_per_run(tmp_path, monkeypatch):
    reads, read = [], type(LORA).frozen
    monkeypatch.setattr(type(LORA), "frozen", lambda model: reads.append(model) or read(model))
    other = LORA.model_copy(update={"base": VIT.model_copy(update={"layers": VIT.layers + 1}), "base_seed": 77})
    mix = {"name": "mix", "networks": {"1": other, "0.5": LORA.model_copy(update={"base_seed": 78})}}
    run(simulate(tiny(model=mix, method="fedproto", clients={"capacities": [1, 0.5]}), tmp_path))
    assert sorted(model.base_seed for model in reads) == [77, 78]


@pytest.mark.parametrize(
    ("base", "task", "tied"),
    [("gpt2", "next_token", "lm_head.weight"), ("bert", "masked_lm", "cls.predictions.decoder.weight")],
)
def test_tied_weights_of_a_base_are_saved_once(base, task, tied, tmp_path):
    settings = MODELS[base].smallest | {"task": task} | ({"exits": ()} if base == "bert" else {})
    net = Net(MODELS["lora"](base=MODELS[base](**settings), rank=4))
    export_submodel(Deployment("own", net, net.initial()), tmp_path / "to", {}, pytest.fail)
    found = load_file(tmp_path / "to" / "model.safetensors")
    assert tied not in found and dict(net.build().named_buffers(remove_duplicate=False)).keys() - found.keys() >= {tied}


def test_networks_of_a_base_share_its_memory():
    narrow, wide = (dict(Net(LORA, width).build().named_buffers()) for width in (0.25, 1))
    assert narrow.keys() == wide.keys()
    assert all(narrow[name].data_ptr() == t.data_ptr() for name, t in wide.items() if t.numel())


def test_other_tensors_forget_networks_of_the_old():
    model = LORA.model_copy(update={"base_seed": 5})
    kept = frozen.tensors_of(model)
    other = {name: t + 1 if t.is_floating_point() else t for name, t in kept.items()}
    frozen.keep({model.frozen_key: other})
    assert torch.equal(Net(model).build().get_buffer("patches.weight"), other["patches.weight"])


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"targets": ["query"]}, "model.targets: no linear layer of vit_b_16 ends with 'query'. Allowed: "),
        (
            {"rank": 21},
            "model.rank: rank 21 is too large for the layer encoder.0.attention.attend.q.linear of 20 x 20. Allowed: "
            "at",
        ),
        (
            {"base": {"name": "resnet20"}, "targets": []},
            "model.targets: the default does not fit base resnet20, which has no queries and values that are known. "
            "Allowed: the ends of its layers' paths: head",
        ),
        (
            {"base": {"name": "resnet20"}, "targets": ["query"]},
            "model.targets: no linear layer of resnet20 ends with 'query'. Allowed: head, or more of a path, such as "
            "head",
        ),
        ({"base": {"name": "vit"}}, "base: name: no model is called 'vit'"),
        (
            {"rank_pattern": {"k.linear": 2}},
            "model.rank_pattern: no target ends with 'k.linear'. Allowed: ends of encoder.0.attention.attend.q.linear",
        ),
        (
            {"rank_pattern": {"q.linear": 2, "encoder.0.*": 4}},
            "model.rank_pattern: encoder.0.attention.attend.q.linear has the ranks 2, 4. Allowed: one rank",
        ),
        ({"rank_pattern": {"q.linear": 0}}, "q.linear: 0 is not valid. Allowed: whole numbers of at least 1"),
        ({"rank_pattern": {"q.linear(": 2}}, "'q.linear(' is not valid (missing ), unterminated subpattern"),
        ({"rank_pattern": {0: 2}}, "0 is not valid (first argument must be string"),
        ({"rank_pattern": [4]}, "a mapping from"),
        ({"rank_pattern": {"q.linear": 21}}, "model.rank: rank 21 is too large for the layer"),
    ],
)
def test_mistakes(changed, message):
    given = {"name": "lora", "base": VIT, "targets": ["q.linear"]} | changed
    with pytest.raises(ConfigError) as error:
        tiny(model=given, data={"shape": VIT.input})
    assert message in str(error.value)


# sums of products


def product(seed, rank=2, out=5, cin=4):
    draw = torch_generator(seed, "test:product")
    return Factors(*(torch.randn(s, generator=draw, dtype=torch.float64) for s in ((out, rank), (rank, cin))))


def test_products_add_by_length_and_become_dense():
    parts = [product(seed, rank=1) for seed in range(6)]
    total = parts[0] + parts[1]
    assert total.right is not None and total.left.shape == (5, 2)
    for part in parts[2:]:
        total = total + part
    assert total.right is None and total.left.shape == (5, 4)
    torch.testing.assert_close(total.dense(), sum(part.left @ part.right for part in parts))


def test_products_fold_and_travel():
    pairs = PairwiseSum(Update.plus)
    for seed in range(3):
        pairs.add(Update({}, 1.0, products={"q": product(seed)}))
    fold = Fold({})
    fold.add(prefix(Net(LORA), Net(LORA)), pairs.total)
    torch.testing.assert_close(fold.products["q"].dense(), sum(product(seed).dense() for seed in range(3)))
    assert fold.weight == 3


def test_a_mean_over_all_pads_with_zeros():
    """Ranks 2, 2, 4, 8 and no training: rows from 2 on are halved, rows from 4 on quartered; holders change nothing."""
    whole = Net(LORA)
    state = {"params": drawn(whole)}
    for over in ("holders", "all"):
        fold = Fold(state)
        for width in (0.25, 0.25, 0.5, 1):
            selection = prefix(whole, Net(LORA, width))
            fold.add(selection, Update({"params": selection.take(state["params"])}, 1.0))
        mean, old = fold.mean("params", over)[f"{PATH}.lora.A"], state["params"][f"{PATH}.lora.A"]
        factors = torch.ones(8) if over == "holders" else torch.tensor([1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25])
        torch.testing.assert_close(mean, old * factors[:, None])


def test_a_net_of_another_model_is_another_net():
    merged = replace(Net(LORA), model=LORA.model_copy(update={"merged": True}))
    assert merged != Net(LORA) and merged.model.frozen_key == LORA.frozen_key


# files of the library peft


def test_adapters_are_written_by_the_names_of_peft(tmp_path):
    """ "base_model.model." before the path, lora_A and lora_B behind it, and what was merged is not among them."""
    params = drawn(Net(LORA.model_copy(update={"merged": True})))
    peft.write(tmp_path / "adapter", params, peft.config_of({PATH: 8}, {PATH: 4.0}, ["head"], 0.1, "classes", "base"))
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert found[f"base_model.model.{PATH}.lora_A.weight"].shape == (8, 20)
    assert found[f"base_model.model.{PATH}.lora_B.weight"].shape == (20, 8)
    assert "base_model.model.head.weight" in found and len(found) == 4 * VIT.layers + 2
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["r"], config["lora_alpha"]) == ("LORA", "SEQ_CLS", 8, 4)
    assert config["target_modules"] == [PATH] and not config["rank_pattern"] and not config["alpha_pattern"]


def test_ranks_that_differ_by_layer_are_written_by_layer(tmp_path):
    """As in AdaptiveFL's networks: the first layer is whole; alpha is s r."""
    net = Net(LORA, 0.25, sizes=((f"{PATH}.rank", 8),))
    export_submodel(Deployment("own", net, drawn(net)), tmp_path / "to", {}, pytest.fail)
    config = json.loads((tmp_path / "to" / "adapter" / "adapter_config.json").read_text())
    found = load_file(tmp_path / "to" / "adapter" / "adapter_model.safetensors")
    by_layer = {name: config["rank_pattern"].get(name, config["r"]) for name in config["target_modules"]}
    alphas = {name: config["alpha_pattern"].get(name, config["lora_alpha"]) for name in by_layer}
    assert by_layer.pop(PATH) == 8 and set(by_layer.values()) == {2}
    assert all(len(found[f"base_model.model.{name}.lora_A.weight"]) == r for name, r in by_layer.items())
    assert alphas == {name: LORA.scale(name, r) * r for name, r in (by_layer | {PATH: 8}).items()}


@pytest.mark.parametrize("saved", [(), ("head",)])
def test_a_head_goes_with_its_adapters(tmp_path, saved):
    """A frozen one was drawn here: peft would draw another one for the base. One in `modules_to_save` is trained."""
    model = LORA.model_copy(update={"head": "frozen", "modules_to_save": saved})
    params = drawn(Net(model))
    assert any(name.startswith("head.") for name in params) == bool(saved)
    export_submodel(Deployment("own", Net(model), params), tmp_path / "to", {}, pytest.fail)
    found = load_file(tmp_path / "to" / "adapter" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "to" / "adapter" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["head"]
    head = params if saved else frozen.tensors_of(model)
    assert torch.equal(found["base_model.model.head.weight"], head["head.weight"])
    again = model.model_copy(update={"adapter": str(tmp_path / "to" / "adapter")})
    again.prepare()
    assert_same(Net(again).initial(), params)


@pytest.mark.parametrize("width", [1, 0.25])
def test_training_starts_from_an_adapters_folder(tmp_path, width):
    params = drawn(Net(LORA))
    write_adapter(tmp_path / "adapter", params)
    model = LORA.model_copy(update={"adapter": str(tmp_path / "adapter")})
    model.prepare()
    expected = prefix(Net(LORA), Net(LORA, width)).take(params)
    assert_same(Net(model, width).initial(), expected)


def write_adapter(folder, params, alpha=4.0, **config):
    ranks = dict.fromkeys(LORA.target_paths, 8)
    peft.write(folder, params, peft.config_of(ranks, dict.fromkeys(ranks, alpha), [], 0.0, "classes", "") | config)


def test_an_adapter_of_another_rank_is_refused(tmp_path):
    write_adapter(tmp_path / "adapter", drawn(Net(LORA, 0.5)))
    with pytest.raises(ConfigError) as error:
        LORA.model_copy(update={"adapter": str(tmp_path / "adapter")}).prepare()
    assert f"({PATH}.lora.A is (4, 20) and should be (8, 20)). Allowed: adapters of rank 8 at q.linear" in str(
        error.value
    )
    with pytest.raises(ConfigError, match="adapter_model.safetensors in .* cannot be read"):
        LORA.model_copy(update={"adapter": str(tmp_path)}).prepare()


def test_it_is_described_by_rank_and_by_what_is_frozen():
    records = describe(
        tiny(model=LORA, data={"shape": VIT.input}, clients={"capacities": [1, 0.25, 0.1]}, method="heterofl")
    )
    frozen_parameters = Net(VIT).parameters - 84
    assert [record["rank"] for record in records] == [8, 2, 0]
    assert {record["frozen"] for record in records} == {frozen_parameters}
    assert [record["parameters"] for record in records] == [84 + 2 * VIT.layers * 40 * rank for rank in (8, 2, 0)]
    assert [record["bytes_up"] for record in records] == [4 * record["parameters"] for record in records]
    assert records[0]["space_mb"] == 4 * (records[0]["parameters"] + frozen_parameters) / 2**20


def test_what_is_merged_answers_as_the_adapters(tmp_path):
    net, x = Net(LORA, 0.5), images()
    params = drawn(net)
    torch.testing.assert_close(answers(Net(VIT), LORA.merged_into_base(net, params), x), answers(net, params, x))
    given = export_submodel(Deployment("it", net, params), tmp_path / "small", {}, print)
    torch.testing.assert_close(given(x), answers(net, params, x))
    assert load_file(tmp_path / "small" / "adapter" / "adapter_model.safetensors").keys() == peft.written(params).keys()
    config = json.loads((tmp_path / "small" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["modules_to_save"]) == (4, 2, ["head"])


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        ({"lora_alpha": 16}, 16),
        ({"use_rslora": True}, 4 * 8**0.5),
        ({"alpha_pattern": {"0.attention.attend.q.linear": 6.0}}, 6),
        ({"alpha_pattern": {PATH: 4.0}}, None),
        ({"lora_alpha": 2, "alpha_pattern": {".*linear": 4.0}}, None),
    ],
)
def test_an_adapter_of_another_factor_is_refused(tmp_path, config, allowed):
    """It would be another function. PATH is one of the targets."""
    write_adapter(tmp_path / "adapter", drawn(Net(LORA)), **config)
    model = LORA.model_copy(update={"adapter": str(tmp_path / "adapter")})
    if allowed is None:
        model.prepare()
        return
    with pytest.raises(ConfigError, match=rf"model.alpha: 4 is not valid .* Allowed: {allowed:g}$"):
        model.prepare()


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "olora", "eva", "loftq"])
def test_an_adapter_of_a_changed_base_is_refused(tmp_path, start):
    """PiSSA and OLoRA take their first adapters out of the base's weights."""
    write_adapter(tmp_path / "adapter", drawn(Net(LORA)), init_lora_weights=start)
    with pytest.raises(ConfigError, match=f"has init_lora_weights: '{start}', which changes the base's weights too"):
        LORA.model_copy(update={"adapter": str(tmp_path / "adapter")}).prepare()
    write_adapter(tmp_path / "plain", drawn(Net(LORA)), init_lora_weights="gaussian")
    LORA.model_copy(update={"adapter": str(tmp_path / "plain")}).prepare()


class Nested(ImageModel):
    """All of its layers are in one module."""

    name: Literal["nested"] = "nested"
    input: tuple[int, int, int] = (1, 8, 8)

    def build(self, net):
        hidden = net.axis("hidden", 8)
        layers = [nn.Flatten(), linear(Axis.fixed("x", 64), hidden), nn.ReLU(), linear(hidden, self.labels)]
        return nn.Sequential(OrderedDict(net=nn.Sequential(*layers)))


def test_of_a_nested_base_the_last_layer_alone_is_the_head():
    net = Net(MODELS["lora"](base=Nested(), targets=("1",), rank=2))
    assert set(net.layout.shapes) == {"net.1.lora.A", "net.1.lora.B", "net.3.weight", "net.3.bias"}
    assert net.model.parts(net) == {"rank": 2, "frozen": 64 * 8 + 8} and net.model.base.head_paths == ("net.3",)


@pytest.mark.parametrize("content", [None, "no json", "[1]", "{}", '{"r": 0, "lora_alpha": 4}'])
def test_a_damaged_configuration_of_an_adapter_is_refused(tmp_path, content):
    write_adapter(tmp_path / "adapter", drawn(Net(LORA)))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(ConfigError, match=r"model.adapter: adapter_config.json in .* cannot be read"):
        LORA.model_copy(update={"adapter": str(tmp_path / "adapter")}).prepare()
