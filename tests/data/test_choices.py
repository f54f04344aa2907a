"""Multiple choice: log-likelihoods of options against transformers, their lengths, a run, and wrong files."""

import json

import pytest
import torch
from chats import causal, jsonl, tasks, tokenizer

import rayfl
from rayfl.config import ConfigError
from rayfl.data import Instructions
from rayfl.data.choices import Choices
from rayfl.engine.inputs import changed, inputs_of
from rayfl.models import MODELS
from rayfl.testing.tiny import tiny

ROWS = [
    {"question": "copy the word\nabc", "choices": ["abc", "cba", "a"], "answer": 0},
    {
        "question": "reverse the word\nabc",
        "choices": {"text": ["abc", "cba", "b"], "label": ["A", "B", "C"]},
        "answer": "B",
    },
    {"question": "x", "choices": ["federated rank", "b"], "answer": "1"},
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("choices")
    return {
        "model": causal(root / "llama"),
        "tokenizer": tokenizer(root / "tokenizer"),
        "rows": tasks(root / "rows.jsonl", 24),
        "questions": jsonl(root / "mmlu-pro.jsonl", ROWS),
    }


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYFL_CACHE", str(tmp_path / "cache"))


def data_of(places, **fields) -> Instructions:
    return Instructions(train=places["rows"], tokenizer=places["tokenizer"], max_length=96, **fields)


@pytest.mark.parametrize("normalise", ["none", "characters", "tokens"])
@pytest.mark.parametrize("template", ["chat", "alpaca"])
def test_log_likelihoods_are_those_of_transformers(places, normalise, template):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    goal = data_of(places, template=template).goal
    theirs = AutoModelForCausalLM.from_pretrained(places["model"]).eval()
    tokens = AutoTokenizer.from_pretrained(places["tokenizer"])
    source, right = goal.chat.source, []
    for row in ROWS:
        texts = row["choices"]["text"] if isinstance(row["choices"], dict) else row["choices"]
        user = {"role": "user", "content": row["question"]}
        prompt = tokens.apply_chat_template([user], chat_template=source, add_generation_prompt=True, return_dict=False)
        values = []
        for text in texts:
            said = tokens(text, add_special_tokens=False).input_ids
            with torch.no_grad():
                logits = theirs(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
            value = float(logits.log_softmax(-1).gather(1, torch.tensor(said)[:, None]).sum())
            values.append(value / {"none": 1, "characters": len(text), "tokens": len(said)}[normalise])
        right.append(values)
    model = MODELS["causal_lm"](weights=places["model"])
    module = rayfl.core.net.Net(model.fitted("a", data_of(places).offers, "model")).build().eval()
    for name, t in theirs.named_parameters():
        module.get_parameter(name).data = t.data
    score = Choices(file=places["questions"], normalise=normalise)
    found = score._likelihoods(module, score._encoded(goal.chat, score.samples), torch.device("cpu"))
    assert found == pytest.approx([value for values in right for value in values], abs=1e-5)
    expected = sum(v.index(max(v)) == of for v, of in zip(right, (0, 1, 1), strict=True))
    for size in (2, 100):
        parts = score.samples[:1], score.samples[1:]
        counts = [score.own_counts(module, some, size, goal, torch.device("cpu")) for some in parts]
        assert sum(counts).tolist() == [expected, 3]


def test_every_capacity_of_a_run_answers(places, tmp_path):
    given = [{"name": "choices", "file": places["questions"]}]
    given += [{"name": "choices", "file": places["questions"], "normalise": "tokens"}]
    experiment = tiny(
        data=data_of(places, label="task"),
        model={"name": "lora", "base": {"name": "causal_lm", "weights": places["model"]}, "rank": 4},
        method={"name": "flexlora"},
        partition={"name": "dirichlet", "alpha": 1.0, "min_samples": 1},
        clients={"count": 3, "cohort": 2, "capacities": [1, 0.5]},
        evaluation={"every": 2, "holdout": 0.2, "scores": given},
    )
    assert "choices_mmlu_pro_mean" in experiment.metrics()
    assert "validation_choices_mmlu_pro_mean" not in experiment.metrics()
    line = rayfl.run(experiment, tmp_path / "run").lines[-1]
    found = {name for name in line if "choices" in name}
    ends = ["1", "0.5", "mean", "server", "worst"]
    assert found == {f"choices_mmlu_pro{of}_{end}" for of in ("", "_tokens") for end in ends}
    assert line["choices_mmlu_pro_1"] * 3 == pytest.approx(round(line["choices_mmlu_pro_1"] * 3))
    assert {"validation_perplexity_mean", "local_perplexity_mean", "perplexity_1"} <= line.keys()


WRONG = {
    "column": ({"question": "a", "options": ["b", "c"], "answer": 0}, "has no column 'choices'"),
    "one": ({"question": "a", "choices": ["b"], "answer": 0}, "Allowed: a text, and at least two texts"),
    "empty": ({"question": "a", "choices": ["b", " "], "answer": 0}, "Allowed: a text, and at least two texts"),
    "answer": ({"question": "a", "choices": ["b", "c"], "answer": 2}, "has the answer 2. Allowed: 0, 1"),
    "label": (
        {"question": "a", "choices": {"text": ["b", "c"], "label": ["A", "B", "C"]}, "answer": "C"},
        "has the answer 'C'. Allowed: 0, 1, A, B",
    ),
    "length": ({"question": "a", "choices": ["b", "c " * 2100], "answer": 0}, "Allowed: 1 to max_length - 1 = 2,047"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_questions_are_refused(places, tmp_path, case):
    row, message = WRONG[case]
    (tmp_path / "a.json").write_text(json.dumps([ROWS[0], row]))
    with pytest.raises(ConfigError) as error:
        Choices(file=str(tmp_path / "a.json")).check(data_of(places).goal)
    assert message in str(error.value) and "row 2 of a.json" in str(error.value)


def test_the_file_is_an_input_of_the_run_and_belongs_to_the_server(places, tmp_path):
    file = tmp_path / "a.jsonl"
    jsonl(file, ROWS)
    experiment = tiny(
        data=data_of(places),
        model={"name": "causal_lm", "weights": places["model"]},
        method={"name": "fedavg"},
        partition={"name": "iid"},
        clients={"count": 3, "cohort": 2},
        evaluation={"scores": [{"name": "choices", "file": str(file)}]},
    )
    score, arrays = Choices(file=str(file)), experiment.data.arrays()
    before, asked = inputs_of([experiment], arrays), score.samples
    jsonl(file, ROWS[:2])
    assert changed(before, inputs_of([experiment], arrays)) == [f"file {file}"] and len(score.samples) == 2
    file.unlink()
    # neither workers nor reports read it
    module = rayfl.core.net.Net(experiment.model).build()
    counts = score.own_counts(module, asked, 10, experiment.data.goal, torch.device("cpu"))
    assert counts[1] == 3 and "choices_a_mean" in experiment.metrics()


def test_a_template_in_a_file_is_found_from_any_folder(places, tmp_path, monkeypatch):
    """As by a worker of another node."""
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    monkeypatch.chdir(tmp_path)
    goal = data_of(places, template="own.jinja").goal
    monkeypatch.chdir("/")
    Choices(file=places["questions"]).check(goal)


def test_where_there_are_no_questions(places, tmp_path):
    goal = data_of(places).goal
    with pytest.raises(ConfigError, match="Allowed: an existing file that ends in .jsonl"):
        Choices(file="/nowhere.jsonl").check(goal)
    with pytest.raises(ConfigError, match="has an option of 3 tokens. Allowed: 1 to max_length - 1 = 2"):
        Choices(file=places["questions"], max_length=3).check(goal)
    with pytest.raises(ConfigError, match="choices needs a template"):
        Choices(file=places["questions"]).check(object())
