"""Fine-tuned language models: generated answers, their scores, and files for transformers and peft."""

import pytest
import torch
from chats import causal, jsonl, tasks, tokenizer

import rayfl
from rayfl.config import ConfigError
from rayfl.core.net import Net
from rayfl.core.submodel import prefix
from rayfl.data import Instructions
from rayfl.data.generated import SHOWN, Generated
from rayfl.data.samples import ClientData
from rayfl.evaluation import judge
from rayfl.exporting.submodels import export_submodel
from rayfl.methods.base import Deployment
from rayfl.models import MODELS
from rayfl.results.report import report_on
from rayfl.testing.tiny import tiny

USER = [{"role": "user", "content": "copy the word\nrank"}]
# of peft's and transformers' calls
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("language")
    kinds = {kind: causal(root / kind, kind) for kind in ("llama", "gpt2")}
    return kinds | {"tokenizer": tokenizer(root / "tokenizer"), "rows": tasks(root / "rows.jsonl", 30)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYFL_CACHE", str(tmp_path / "cache"))


def data_of(places, **fields) -> Instructions:
    return Instructions(train=places["rows"], tokenizer=places["tokenizer"], max_length=96, **fields)


def deployment(places, data, kind="llama", width=0.5, **options) -> Deployment:
    """A network of half the rank, with adapters that are not 0."""
    base = {"name": "causal_lm", "weights": places[kind], "packing": True}
    model = MODELS["lora"](base=base, rank=4, alpha=8, targets="all-linear", **options)
    whole = Net(model.fitted("instructions", data.offers, "model"))
    net = Net(whole.model, width)
    generator = torch.Generator().manual_seed(1)
    params = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in whole.layout.shapes.items()}
    selection = prefix(whole, net)
    return Deployment(selection.key, net, selection.take(params))


@pytest.mark.parametrize(
    "kind, template, options",
    [("llama", "chat", {}), ("gpt2", "alpaca", {}), ("llama", "plain", {"modules_to_save": ["lm_head", "norm"]})],
)
def test_exported_files_answer_alike_in_transformers_and_peft(places, tmp_path, kind, template, options):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = data_of(places, template=template)
    deployed = deployment(places, data, kind, **options)
    assert ("lm_head.weight" in deployed.params) == bool(options)
    module = export_submodel(deployed, tmp_path / "to", {}, print, data.attached)
    prompt = data.chat.prompt(USER)
    expected = module.generate([prompt], 12, data.chat.ends)[0]  # pyright: ignore[reportCallIssue]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "to" / "transformers")
    base = AutoModelForCausalLM.from_pretrained(places[kind])
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "to" / "adapter")
    for model, folder in ((merged, "transformers"), (adapted, "adapter")):
        tokens = AutoTokenizer.from_pretrained(tmp_path / "to" / folder)
        given = tokens.apply_chat_template(USER, add_generation_prompt=True, return_tensors="pt")
        assert given["input_ids"].tolist() == [prompt]
        with torch.no_grad():
            logits, ours = model.double()(**given).logits, module.double()(given["input_ids"])
        assert float((logits - ours).abs().max()) < 1e-6
        ends = list(data.chat.ends)
        found = model.generate(**given, max_new_tokens=12, do_sample=False, eos_token_id=ends, pad_token_id=0)
        assert found[0, len(prompt) :].tolist()[: len(expected)] == expected and expected


def test_prompts_of_several_lengths_are_continued_as_alone(places):
    data = data_of(places)
    net = deployment(places, data)
    module = net.net.build()
    for name, t in net.params.items():
        module.get_parameter(name).data = t
    prompts = [data.chat.prompt([{"role": "user", "content": text}]) for text in ("a", "copy the word\nhello", "bcd")]
    alone = [module.generate([prompt], 6, data.chat.ends)[0] for prompt in prompts]  # pyright: ignore
    assert module.generate(prompts, 6, data.chat.ends) == alone  # pyright: ignore[reportCallIssue]
    # token by token, without a cache
    ids = list(prompts[1])
    for token in alone[1]:
        with torch.no_grad():
            assert int(module(torch.tensor([ids]))[0, -1].argmax()) == token
        ids.append(token)


class Parrot(torch.nn.Module):
    """A network that answers with the tokens of `said`, and notes its prompts."""

    def __init__(self, said, rows):
        super().__init__()
        self.said, self.rows, self.prompts = said, rows, []

    def forward(self, x):
        return torch.zeros(*x.shape, self.rows)

    def generate(self, prompts, most, ends):
        self.prompts += prompts
        return [self.said[:most] for _ in prompts]


def long(prompt, generated, reference):
    return len(generated) / 10


@pytest.mark.parametrize("score, expected", [("exact_match", 0.5), ("rouge_l", None), (f"{__name__}:long", 0.3)])
def test_scores_of_answers(places, tmp_path, score, expected):
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "response": "a b"}, {"prompt": "yy", "response": "a c b d"}])
    data = Instructions(train=file, test=file, tokenizer=places["tokenizer"], max_length=64, order="stored")
    given = Generated(score=score)
    given.check(data.goal)
    test = {name: torch.from_numpy(t) for name, t in data.arrays().test.items()}
    module = Parrot(data.chat.tokenizer(" a b").input_ids, data.goal.classes)
    [judged] = judge(module, [ClientData(test, data.prepare, data.goal)], [*data.goal.scores, given], 2)
    if expected is None:
        scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
        expected = sum(scorer.score(of, "a b")["rougeL"].fmeasure for of in ("a b", "a c b d")) / 2
        assert expected == pytest.approx((1 + 2 * 1 * 0.5 / 1.5) / 2)
    assert given.value(judged.sums[given.label]) == pytest.approx(expected)
    assert given.label in ("exact_match", "rouge_l", "long") and "perplexity" in judged.sums
    assert module.prompts == [data.chat.prompt([{"role": "user", "content": text}]) for text in ("x", "yy")]


@pytest.mark.parametrize(
    "fields, score, message",
    [
        ({}, "bleu", "score 'bleu' is not valid. Allowed: exact_match, rouge_l, or package.module:name"),
        ({}, "nowhere:f", "score 'nowhere:f' cannot be imported"),
        ({"loss": "all"}, "exact_match", "generated needs answers. Allowed: with data set instructions"),
    ],
)
def test_scores_that_cannot_be_computed(places, fields, score, message):
    with pytest.raises(ConfigError, match=message):
        Generated(score=score).check(data_of(places, **fields).goal)


def test_a_run_generates(places, tmp_path):
    experiment = tiny(
        data=data_of(places, label="task"),
        model={"name": "lora", "base": {"name": "causal_lm", "weights": places["llama"]}, "rank": 4},
        method={"name": "flexlora"},
        partition={"name": "dirichlet", "alpha": 1.0, "min_samples": 1},
        clients={"count": 3, "cohort": 2, "capacities": [1, 0.5]},
        training={"optimizer": "adamw", "lr": 0.01, "accumulate": 2},
        evaluation={"every": 2, "scores": [{"name": "generated", "max_new_tokens": 3}]},
    )
    result = rayfl.run(experiment, tmp_path / "run")
    assert {"perplexity_0.5", "exact_match_1", "local_exact_match_0.5"} <= result.lines[-1].keys()
    said = result.lines[-1]["answers"]["exact_match"]
    assert said.keys() == {"1", "0.5"} and said["1"][0].keys() == {"prompt", "answer", "reference"}
    shown = result.experiment.data.arrays().test["x"]
    chat = result.experiment.data.chat
    assert said["1"][0]["reference"] in chat.text(shown[0][shown[0] >= 0]) and len(said["1"]) <= SHOWN
    assert "answers" not in result.metrics.columns
    report_on(tmp_path / "run", None, print, html=True)
    assert said["1"][0]["reference"] in (tmp_path / "run" / "answers.md").read_text()
    assert 'id="answers"' in (tmp_path / "run" / "report.html").read_text()
    answers = rayfl.generate(tmp_path / "run", ["copy the word\nrank", "x"], 0.5, max_new_tokens=5)
    assert len(answers) == 2 and all(isinstance(text, str) for text in answers)
    with pytest.raises(ConfigError, match="capacity: 0.25 is not valid. Allowed: 1, 0.5"):
        rayfl.generate(tmp_path / "run", ["x"], 0.25)
