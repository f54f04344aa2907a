"""HeteroFL's and FedRolex's transformers: counts, the forward pass at every width, padding, depth, the vocabulary."""

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, drawn_like, message, simulate, tiny
from torch import nn

from rayfl.core.axes import Axis
from rayfl.core.net import Net, load, params_of
from rayfl.core.seeds import torch_generator, torch_scope
from rayfl.core.submodel import prefix, random_subset, rolling
from rayfl.core.tensors import Params
from rayfl.data.goal import MaskedTokens, NextToken
from rayfl.data.samples import ClientData
from rayfl.data.synthetic_text import SyntheticText
from rayfl.experiment import read_experiment
from rayfl.methods import METHODS
from rayfl.methods.base import Client, Task, Visit
from rayfl.models import MODELS
from rayfl.models.layers import Scaler
from rayfl.testing.methods import check_selection
from rayfl.training.settings import Training
from rayfl.training.steps import Objective

WIKITEXT = MODELS["heterofl_transformer"]()
WORDS = MODELS["fedrolex_transformer"]()
LEVELS = {"a": 1, "b": 1 / 2, "c": 1 / 4, "d": 1 / 8, "e": 1 / 16}
SIZES = {"layers": 2, "heads": 4, "head_width": 16, "mlp": 48, "dropout": 0, "length": 9, "positions": 12}
MASKED = MODELS["heterofl_transformer"](ids=31, classes=30, **SIZES)
NEXT = MODELS["fedrolex_transformer"](ids=30, classes=30, **SIZES)
SEQUENCES = MODELS["heterofl_transformer"](task="classes", ids=30, classes=5, **SIZES)


def built(model, width=1.0, **fields):
    with torch_scope(0):
        return Net(model, width, **fields).build()


def tokens(model, count=3):
    return torch.randint(model.ids, (count, model.length), generator=torch_generator(0, "test:tokens"))


def drawn(model) -> Params:
    """Parameters in float64, none of them at 0."""
    generator = torch_generator(0, "test:params")
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / 3
        for name, shape in Net(model).layout.shapes.items()
    }


# --- what is published ---


@pytest.mark.parametrize(
    ("level", "parameters", "flops", "macs"),
    [
        ("a", 19_263_999, 1_367_965_696, 683_655_168),
        ("b", 9_107_967, 614_776_832, 307_224_576),
        ("c", 4_435_455, 290_086_912, 144_961_536),
        ("d", 2_200_575, 140_718_080, 70_318_080),
        ("e", 1_108_479, 69_277_696, 34_618_368),
    ],
)
def test_heterofls_table_3(level, parameters, flops, macs):
    net = Net(WIKITEXT, LEVELS[level])
    assert (net.parameters, net.operations("heterofl_official"), net.macs) == (parameters, flops, macs)


@pytest.mark.parametrize(
    ("level", "parameters", "macs"),
    [
        ("a", 4_374_416, 61_317_120),
        ("b", 1_745_744, 21_729_280),
        ("c", 766_256, 8_632_320),
        ("d", 360_224, 3_758_080),
        ("e", 178_136, 1_739_520),
    ],
)
def test_fedrolexs_counts(level, parameters, macs):
    net = Net(WORDS, LEVELS[level])
    assert (net.parameters, net.macs) == (parameters, macs)


@pytest.mark.parametrize(
    ("mode", "millions"),
    [("ae", 10.2), ("abcde", 7.2), ("be", 5.1), ("bcde", 4.2), ("ce", 2.8), ("cde", 2.6), ("de", 1.7)],
)
def test_mean_parameters_of_heterofls_mixtures(mode, millions):
    """As its Table 3 prints them."""
    counts = [Net(WIKITEXT, LEVELS[level]).parameters for level in mode]
    assert round(sum(counts) / len(counts) / 1e6, 1) == millions


def test_with_the_special_tokens_of_tensorflow_federated():
    model = MODELS["fedrolex_transformer"](ids=10_004, classes=10_004)
    found = [Net(model, width).parameters for width in LEVELS.values()]
    assert found == [4_375_444, 1_746_260, 766_516, 360_356, 178_204]


def test_it_starts_as_heterofls():
    """Layers equal, biases at 0, a perceptron's weights normal, all else as torch draws it."""
    params = params_of(built(MODELS["heterofl_transformer"](ids=301, classes=300, layers=3)))
    for name, t in params.items():
        if name.startswith("layers."):
            assert torch.equal(t, params[f"layers.0.{name.split('.', 2)[2]}"])
        if name.endswith("bias"):
            assert not t.any()
        elif "norm" in name:
            assert (t == 1).all()
        elif ".mlp." in name:
            torch.testing.assert_close(t.std(), torch.tensor(0.02), rtol=0.05, atol=0)
        elif name.startswith("embedded"):
            torch.testing.assert_close(t.std(), torch.tensor(1.0), rtol=0.05, atol=0)
        else:
            torch.testing.assert_close(t.abs().max(), torch.tensor(t.shape[1] ** -0.5), rtol=0.02, atol=0)


def test_where_scalers_stand():
    """Behind embeddings, the four layers of an attention, the two of a perceptron and the hidden layer of the head."""
    scalers = [path for path, m in built(MASKED, 0.5, scale=0.5).named_modules() if isinstance(m, Scaler)]
    assert len(scalers) == 1 + 2 * (4 + 2) + 1
    assert not any(isinstance(m, Scaler | nn.Identity) for m in built(MASKED).modules())


# --- the forward pass ---


def reference(params: Params, held: Params, x: torch.Tensor, heads: int, scale: float, causal: bool) -> torch.Tensor:
    """The logits of HeteroFL's code, on tensors of the full shape that are 0 where nothing is `held` (1, else 0)."""

    def linear(path, x):
        return (x @ params[f"{path}.weight"].T + params[f"{path}.bias"]) / scale

    def norm(path, x):
        kept = held[f"{path}.weight"]
        mean = (x * kept).sum(-1, keepdim=True) / kept.sum()
        variance = ((x - mean) ** 2 * kept).sum(-1, keepdim=True) / kept.sum()
        return (x - mean) / (variance + 1e-5).sqrt() * params[f"{path}.weight"] + params[f"{path}.bias"]

    h = (params["embedded.tokens.weight"][x] + params["embedded.positions.weight"][: x.shape[1]]) / scale
    h = norm("embedded.sum.norm", h)
    for layer in sorted({name.split(".")[1] for name in params if name.startswith("layers.")}):
        block, mixed = f"layers.{layer}", []
        q, k, v = (linear(f"{block}.attention.{part}.linear", h).chunk(heads, -1) for part in "qkv")
        size = held[f"{block}.attention.q.linear.bias"].sum() / heads
        for head in range(heads):
            weights = q[head] @ k[head].mT / size.sqrt()
            if causal:
                weights = weights.masked_fill(torch.ones_like(weights).triu(1).bool(), -math.inf)
            mixed.append(weights.softmax(-1) @ v[head])
        h = norm(f"{block}.norm1", h + linear(f"{block}.attention.out.linear", torch.cat(mixed, -1)))
        inside = F.gelu(linear(f"{block}.mlp.hidden", h))
        h = norm(f"{block}.norm2", h + linear(f"{block}.mlp.linear", inside))
    answer = norm("head.layers.norm", F.gelu(linear("head.layers.hidden", h)))
    return answer @ params["head.layers.answer.weight"].T + params["head.layers.answer.bias"]


def selections(whole, net):
    yield prefix(whole, net)
    yield rolling(whole, net, 13)
    yield random_subset(whole, net, torch_generator(0, "test:subset"))


@pytest.mark.parametrize("width", [*LEVELS.values(), 0.3, 0.1])
@pytest.mark.parametrize("model", [MASKED, NEXT], ids=["both sides", "causal"])
def test_a_narrow_network_is_the_full_one_with_the_rest_at_zero(model, width):
    """At widths too where the heads keep more in all than the stream does, and for windows that wrap. Norms are over
    what is held."""
    params, x = drawn(model), tokens(model)
    whole, net = Net(model), Net(model, width, scale=width)
    for selection in selections(whole, net):
        module = net.build().double()
        load(module, selection.take(params))
        held = selection.cover(params)
        zeroed = {name: t * held[name] for name, t in params.items()}
        for scale in (width, 1):
            expected = reference(zeroed, held, x, model.heads, scale, causal=model is NEXT)
            torch.testing.assert_close(module(x), expected)
            module.eval()


def test_sizes_of_a_width_that_heads_do_not_divide():
    """Each of 8 heads of 32 keeps ceil(0.3 32) = 10 features, 80 in all, and the stream ceil(0.3 256) = 77."""
    axes = Net(WIKITEXT, 0.3).layout.axes
    assert (axes["hidden"].length, axes["layers.3.inner"]) == (77, Axis("layers.3.inner", 10, groups=8))
    assert (axes["layers.0.mlp"].size, axes["head.hidden"].size) == (154, 77)


def test_blocks_of_different_sizes():
    """Blocks start equal if they have equal sizes."""
    module = built(MASKED, 0.5, sizes=(("layers.0.mlp", 48),))
    assert [len(module.layers[i].mlp.hidden.weight) for i in "01"] == [48, 24]


def test_the_next_token_is_not_seen():
    """Another token changes no logit before it, to the bit, and all from it on."""
    module, x = built(NEXT).eval(), tokens(NEXT)
    before = module(x)
    for t in range(NEXT.length):
        other = x.clone()
        other[:, t] = (x[:, t] + 1) % NEXT.classes
        after = module(other)
        assert torch.equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any(-1).all()


@pytest.mark.parametrize("model", [MASKED, NEXT, SEQUENCES], ids=lambda model: model.task)
def test_padding_changes_no_logit_of_what_is_there(model):
    module = built(model).eval()
    x = tokens(model)[:, :5]
    x[1, 3:] = x[2, 1:] = -1
    padded = F.pad(x, (0, 3), value=-1)
    for batch in (x, padded):
        logits = module(batch)
        assert logits.isfinite().all()
        for row, sequence in enumerate(x):
            there = sequence[sequence >= 0]
            found = logits[row, : len(there)] if model.task != "classes" else logits[row]
            torch.testing.assert_close(found, module(there[None])[0])


def test_a_class_is_of_the_mean_over_tokens():
    module, x = built(SEQUENCES).eval(), tokens(SEQUENCES)
    read = []
    module.head.layers.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    module.layers["1"].register_forward_hook(lambda _, given, out: read.append(out))
    assert module(x).shape == (3, 5)
    torch.testing.assert_close(read[1], read[0].mean(1))
    assert Net(SEQUENCES).layout.classifier == ("head.layers.answer.weight", "head.layers.answer.bias")


def test_a_program_of_it_takes_any_number_of_sequences():
    for model in (MASKED, NEXT, SEQUENCES):
        module = built(model, 0.5).eval()
        program = torch.export.export(module, (tokens(model, 2),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
        torch.testing.assert_close(program.module()(tokens(model, 5)), module(tokens(model, 5)))


def test_text_longer_than_the_positions_is_refused():
    given = {"model": {"name": "heterofl_transformer", "positions": 20}, "partition": "iid"}
    said = message(tiny, data={"name": "synthetic_text", "task": "masked_lm", "length": 21}, **given)
    assert said == (
        "test: model heterofl_transformer: sequences have up to 21 tokens. Allowed: 20, its positions; "
        "set its `positions`, or shorter sequences in the data section"
    )


# --- depth ---


@pytest.mark.parametrize(
    ("exits", "said"),
    [
        (("layers.7",), "exits: blocks of the network; 'layers.7' is none"),
        (("layers.1", "layers.0"), "exits: every block once, in the order of the network"),
    ],
)
def test_exits_stand_behind_blocks_in_order(exits, said):
    with pytest.raises(ValueError, match=said):
        MODELS["heterofl_transformer"](exits=exits)


def test_an_exit_reads_what_its_block_gives():
    model = MODELS["heterofl_transformer"](**MASKED.model_dump() | {"layers": 3, "exits": ("layers.0", "layers.1")})
    x, plain = tokens(model), Net(model)
    for exits in (1, 2, 3):
        net = Net(model, exits=exits)
        module = net.build().eval()
        answers = module(x)
        assert len(answers) == exits
        last = "head" if exits == 3 else f"exit{exits}"
        assert {name.split(".")[0] for name in net.layout.dims} == {"embedded", "layers"} | {
            *(f"exit{i}" for i in range(1, min(exits, 2) + 1)),
            last,
        }
        # the network without the blocks behind it, which answers there
        short = Net(model.model_copy(update={"layers": exits, "exits": ()})).build().eval()
        params = params_of(module)
        load(short, {name: params[name.replace("head.", f"{last}.", 1)] for name in params_of(short)})
        torch.testing.assert_close(answers[-1], short(x), rtol=0, atol=0)
    assert not any(name.startswith("exit") for name in plain.layout.dims)


def test_a_block_that_is_left_out_leaves_nothing():
    whole, part = (set(Net(MASKED, without=without).layout.dims) for without in ((), ("layers.0",)))
    assert whole - part == {name for name in whole if name.startswith("layers.0.")} and part < whole
    shallow, other = (built(MASKED, without=(path,)).eval() for path in ("layers.0", "layers.1"))
    load(shallow, dict(zip(params_of(shallow), params_of(other).values(), strict=True)))
    assert torch.equal(shallow(tokens(MASKED)), other(tokens(MASKED)))
    assert built(MASKED, without=("layers.0", "layers.1"))(tokens(MASKED)).shape == (3, 9, 30)


def test_step_sizes_multiply_residual_branches():
    module, plain = built(MASKED, steps=True), built(MASKED)
    params = params_of(module)
    steps = sorted(name for name, t in params.items() if not t.dim())
    assert steps == [f"layers.{i}.{part}.step.scale" for i in (0, 1) for part in ("attention.out", "mlp")]
    load(plain, params)
    assert torch.equal(module(tokens(MASKED)), plain(tokens(MASKED)))
    load(module, params | dict.fromkeys(steps, torch.tensor(0.5)))
    halved = {n: t / 2 if ".out.linear" in n or ".mlp.linear" in n else t for n, t in params.items() if t.dim()}
    load(plain, halved)
    torch.testing.assert_close(module(tokens(MASKED)), plain(tokens(MASKED)))


# --- the vocabulary ---


def some_text(rows=2) -> ClientData:
    """A client's masked language model."""
    data = SyntheticText(task="masked_lm", tokens=30, length=9, samples=rows, test_samples=1)
    samples = {name: torch.from_numpy(array) for name, array in data.arrays().train.items()}
    return ClientData(samples, data.prepare, data.goal)


def test_a_clients_classes_are_its_tokens():
    data = some_text()
    expected = sorted({int(token) for token in data.samples["x"].flatten() if token >= 0})
    assert data.present.nonzero().flatten().tolist() == expected and len(expected) < 18
    rows = ("embedded.tokens.weight", "head.layers.answer.weight", "head.layers.answer.bias")
    assert Net(MASKED).layout.classifier == rows


def test_a_masked_loss_has_a_constant_for_every_absent_token():
    """-log(e^z_y / (sum of e^z over present ones + the number of absent ones)) (HeteroFL section 4)."""
    data = some_text()
    [(x, y)] = data.in_order(2)
    logits = torch.randn(*x.shape, 30, generator=torch_generator(0, "test:logits"))
    present = data.present
    rows, labels = data.goal.rows(logits, y)
    total = rows[:, present].exp().sum(1) + (~present).sum()
    expected = (total.log() - rows.gather(1, labels[:, None])[:, 0]).mean()
    torch.testing.assert_close(Objective(data.goal, "zero", present)(logits, y), expected)


def trained(method):
    """The method's update of a client at half the width, and its state."""
    task = Task(MASKED, Training(steps=3, batch_size=1, lr=0.1), {1.0: Net(MASKED), 0.5: Net(MASKED, 0.5)}, 1.0, 4)
    bound, data = method.bind(task), some_text()
    state = bound.init()
    client = Client(0, 0.5, 0)
    selection = bound.select(state, client)
    return state, bound.local_update(bound.extract(state, selection), Visit(client, selection, data, None, 7)), data


def test_rows_of_tokens_that_a_client_does_not_have_are_not_its():
    for mask_row, mask_held in (("everybody", True), ("nobody", False)):
        state, update, data = trained(METHODS["heterofl"](mask_row=mask_row))
        present = data.present
        for name in Net(MASKED).layout.classifier:
            held = torch.cat([present, torch.tensor([mask_held])])[: len(state["params"][name])]
            assert torch.equal(update.row_weights[name].flatten() > 0, held)
            found = (
                update.sums["params"][name].flatten(1) if "bias" not in name else update.sums["params"][name][:, None]
            )
            assert not found[~held].any() and found[: len(present)][present].any(1).all()


def test_unseen_rows_keep_their_bits(tmp_path):
    """Nobody of a round has some tokens: their rows, and the mask's where it is nobody's, stay as they are."""
    data = {"name": "synthetic_text", "task": "masked_lm", "tokens": 200, "samples": 6, "test_samples": 4}
    model = {"name": "heterofl_transformer", "layers": 1, "heads": 2, "head_width": 10, "mlp": 8, "length": 12}
    for mask_row in ("everybody", "nobody"):
        method = {"name": "heterofl", "mask_row": mask_row}
        experiment = tiny(data=data, model=model, method=method, partition="iid", evaluation={"holdout": 0})
        simulation = simulate(experiment, tmp_path / mask_row)
        before = {name: t.clone() for name, t in simulation.state["params"].items()}
        cohort = [client.id for _, clients in simulation.cohort().values() for client in clients]
        rows = [simulation.data.train[id] for id in cohort]
        arrays = experiment.data.arrays().train["x"]
        seen = {int(token) for own in rows for token in arrays[own].flatten() if token >= 0}
        unseen = [token for token in range(200) if token not in seen]
        simulation.train()
        assert len(unseen) > 100
        for name in experiment.bound().task.server.layout.classifier:
            after = simulation.state["params"][name]
            assert torch.equal(after[unseen], before[name][unseen])
            assert not torch.equal(after[sorted(seen)], before[name][sorted(seen)])
        tokens = simulation.state["params"]["embedded.tokens.weight"]
        assert torch.equal(tokens[-1], before["embedded.tokens.weight"][-1]) == (mask_row == "nobody")


def test_nobodys_mask_row_with_all_rows_is_refused():
    said = message(tiny, method={"name": "heterofl", "label_rows": "all", "mask_row": "nobody"})
    assert "mask_row: nobody only with label_rows: present" in said


# --- losses of methods, padding left out ---


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("depthfl", {"alpha": 0}),
        ("scalefl", {"gamma": 0.5}),
        ("scalefl", {"gamma": 0.5, "reduction": "mean"}),
        ("fjord", {"distill": True}),
    ],
)
@pytest.mark.parametrize("goal", [NextToken(30), MaskedTokens(30)], ids=["next_token", "masked_lm"])
def test_distillation_is_over_tokens_and_not_over_padding(name, options, goal):
    """As if every token were a sample of a classifier; whatever stands at padding."""
    generator = torch_generator(0, "test:logits")
    y = torch.randint(30, (2, 6), generator=generator)
    y[0, 4:] = y[1, 2:] = -100
    exits = [torch.randn(2, 6, 30, generator=generator, requires_grad=True) for _ in range(2)]
    model = MODELS["heterofl_transformer"](**MASKED.model_dump() | {"exits": ("layers.0",)})
    task = Task(model, Training(), {1.0: Net(model)}, 1.0, 4)
    method = METHODS[name](**options, mask="none").bind(task)
    data = ClientData(some_text().samples, some_text().prepare, goal)
    visit = Visit(Client(0, 1.0, 100), method.prefix(1.0), data, None, 7)
    value = method.loss(visit)(tuple(exits), y)
    flat = tuple(z[y >= 0].detach() for z in exits)
    of_classes = ClientData(data.samples, data.prepare, NextToken(30))
    assert value.isfinite() and value > 0
    expected = method.loss(Visit(visit.client, visit.selection, of_classes, None, 7))(flat, y[y >= 0])
    torch.testing.assert_close(value, expected)
    for gradient in torch.autograd.grad(value, exits, allow_unused=True):
        assert gradient is None or not gradient[y < 0].any()


# --- only its own tokens ---


@pytest.mark.parametrize("name", ["heterofl", "fedrolex", "feddropout"])
@pytest.mark.parametrize("mask", ["zero", "neg_inf"])
@pytest.mark.parametrize("task", ["masked_lm", "next_token"])
def test_clients_who_hold_their_own_tokens_alone_come_to_the_same(name, mask, task, tmp_path):
    """And they are sent less, and compute less."""
    data = {"name": "synthetic_text", "task": task, "tokens": 120, "samples": 24, "test_samples": 4}
    model = {"name": "heterofl_transformer", "layers": 1, "heads": 2, "head_width": 10, "mlp": 8, "length": 12}
    training = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "clip": 1.0, "batch_size": 2, "steps": 3}
    states, lines = [], []
    for vocab in ("full", "own"):
        experiment = tiny(
            data=data,
            model=model,
            method={"name": name, "vocab": vocab, "mask": mask},
            training=training,
            partition="iid",
            evaluation={"holdout": 0},
        )
        simulation = simulate(experiment, tmp_path / vocab)
        before = simulation.state["params"]
        lines.append([simulation.train(), simulation.evaluate()])
        states.append(simulation.state["params"])
    full, own = states
    for parameter, t in full.items():
        torch.testing.assert_close(own[parameter], t, rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(t, before[parameter]) for parameter, t in own.items())
    assert all(lines[1][0][cost] < lines[0][0][cost] for cost in ("bytes_down", "bytes_up", "train_flops"))
    assert math.isclose(lines[1][0]["train_loss"], lines[0][0]["train_loss"], rel_tol=1e-5)


def test_a_client_of_two_tokens():
    """Its network has two tokens and the mask; unknown label sets mean all tokens."""
    narrow = Net(MASKED, 0.5)
    method = METHODS["heterofl"](vocab="own", scaler=False).bind(
        Task(MASKED, Training(), {1.0: Net(MASKED), 0.5: narrow}, 1.0, 4)
    )
    state, present = method.init(), torch.zeros(30, dtype=torch.bool)
    present[[4, 7]] = True
    selection = method.select(state, Client(0, 0.5, 0, lambda: present))
    taken, whole = (s.take(state["params"]) for s in (selection, prefix(Net(MASKED), narrow)))
    assert torch.equal(taken["embedded.tokens.weight"], whole["embedded.tokens.weight"][[4, 7, 30]])
    assert torch.equal(taken["head.layers.answer.bias"], whole["head.layers.answer.bias"][[4, 7]])
    assert selection.net.build()(torch.tensor([[0, 1, 2]])).shape == (1, 3, 2)
    assert method.select(state, Client(0, 0.5, 0)) is method.prefix(0.5)


def test_a_client_travels_without_its_label_set():
    client = Client(3, 0.5, 7, lambda: torch.ones(2, dtype=torch.bool))
    assert client.present is not None and client.present.all()
    sent = pickle.loads(pickle.dumps(client))
    assert sent == client and sent.present is None


TEXT = {"data": {"name": "synthetic_text", "task": "masked_lm"}, "partition": "iid"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"method": {"mask": "none"}}, "vocab: own only with mask: zero or neg_inf and label_rows: present"),
        ({"method": {"label_rows": "all"}}, "vocab: own only with mask: zero or neg_inf and label_rows: present"),
        (
            {"model": "digits_cnn"},
            "method.vocab: 'own' is not valid. Allowed: 'full', because model digits_cnn is not one of rayfl's own "
            "transformers, predicts no tokens here, or its mask is a token of its vocabulary",
        ),
        (
            {"model": {"name": "bert", "hidden": 16, "heads": 2, "layers": 1, "positions": 16}, **TEXT},
            "method.vocab: 'own' is not valid. Allowed: 'full', because model bert is not one of rayfl's own",
        ),
    ],
)
def test_where_no_client_can_do_with_its_own_tokens(sections, said):
    given = {} if "model" in sections else TEXT | {"model": "heterofl_transformer"}
    assert said in message(
        tiny, **given | sections | {"method": {"name": "heterofl", "vocab": "own"} | sections.get("method", {})}
    )


# --- FedRolex's heads ---


def test_heads_that_roll_end_to_end():
    """The authors' code: `torch.arange(E).roll(t).view(heads, -1)[:, :kept]` (their direction is -1)."""
    task = Task(NEXT, Training(), {1.0: Net(NEXT), 0.3: Net(NEXT, 0.3)}, 1.0, 4)
    method = METHODS["fedrolex"](heads="flattened", direction=-1).bind(task)
    params = {name: torch.arange(t.numel()).view_as(t) for name, t in method.init()["params"].items()}
    for t in (0, 1, 7, 16, 63, 70):
        selection = method.select({}, Client(0, 0.3, t))
        expected = torch.arange(64).roll(t).view(4, 16)[:, :5].flatten()
        hidden = torch.arange(64).roll(t)[:20]
        taken = selection.take(params)
        assert torch.equal(taken["layers.1.attention.q.linear.bias"], expected)
        assert torch.equal(taken["layers.0.attention.k.linear.weight"], expected[:, None] * 64 + hidden)
        assert torch.equal(taken["layers.0.attention.out.linear.weight"], hidden[:, None] * 64 + expected)
        check_selection(selection, drawn_like(method.init()["params"], "x"))
    within = METHODS["fedrolex"](direction=-1).bind(task)
    assert within.select({}, Client(0, 0.3, 0)).take(params).keys() == selection.take(params).keys()
    for capacity, t in ((0.3, 0), (1.0, 5)):
        one, two = (m.select({}, Client(0, capacity, t)).take(params) for m in (method, within))
        assert_same(one, two)


# --- what does not fit ---


@pytest.mark.parametrize(
    ("model", "takes", "data", "has"),
    [
        ("heterofl_transformer", "sequences of tokens", "synthetic", "images"),
        ("digits_cnn", "images", "synthetic_text", "sequences of tokens"),
    ],
)
def test_a_network_of_other_samples_is_refused(model, takes, data, has):
    said = message(read_experiment, {"model": model, "data": data}, "test")
    assert said == f"test: model: {model} takes {takes}. Allowed: one of {has}, which data set {data} has"
