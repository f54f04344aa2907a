"""Instructions: formats, templates, the tokens of answers, truncation, partition, and wrong inputs."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from chats import CHATML, jsonl, tasks, tokenizer

from rayfl.config import ConfigError, parse
from rayfl.data import Federation, Instructions, federate
from rayfl.data.base import DATASETS_KIND
from rayfl.data.partition import PARTITIONS_KIND
from rayfl.data.samples import ClientData

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]
PAIR = {"prompt": "Reverse: abc", "response": "cba"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYFL_CACHE", str(tmp_path / "cache"))


def data_of(tmp_path, folder, rows, **fields) -> Instructions:
    file = jsonl(tmp_path / "rows.jsonl", rows)
    return Instructions(**{"train": file, "test": file, "tokenizer": folder, "max_length": 300} | fields)


def texts(data: Instructions, i: int = 0) -> tuple[str, str]:
    """Return a training sample's text and the text of its answers."""
    train, tokens = data.arrays().train, data.chat.tokenizer
    x, answer = train["x"][i], train["answer"][i]
    return tokens.decode(x[x >= 0]), tokens.decode(x[answer == 1])


# templates


def test_every_turn_of_the_assistant_with_its_end_is_an_answer(tmp_path, folder):
    text, answers = texts(data_of(tmp_path, folder, [{"messages": CHAT}]))
    assert answers == "two<|im_end|>four<|im_end|>"
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>")
    # what follows the last answer teaches nothing
    assert text.endswith("four<|im_end|>")


def test_the_text_is_that_of_transformers(tmp_path, folder):
    data = data_of(tmp_path, folder, [{"messages": CHAT}])
    tokens = data.chat.tokenizer
    expected = tokens.apply_chat_template(CHAT, return_dict=False)
    x = data.arrays().train["x"][0]
    assert x[x >= 0].tolist() == expected[: (x >= 0).sum()] and len(expected) - (x >= 0).sum() == 1


@pytest.mark.parametrize("name", ["alpaca", "vicuna", "plain"])
def test_tokens_of_answers_are_those_that_transformers_masks(tmp_path, folder, name):
    data = data_of(tmp_path, folder, [{"messages": CHAT}], template=name)
    given = data.chat.tokenizer.apply_chat_template(
        CHAT, chat_template=data.chat.source, return_dict=True, return_assistant_tokens_mask=True
    )
    train = data.arrays().train
    length = len(given["input_ids"])
    assert train["x"][0, :length].tolist() == given["input_ids"] and (train["x"][0, length:] == -1).all()
    assert train["answer"][0, :length].tolist() == given["assistant_masks"]
    end = data.chat.tokenizer.eos_token
    # a space before the answer belongs to its first token
    assert texts(data)[1].replace(" ", "") == f"two{end}four{end}"


def test_alpaca_tells_instruction_and_input_apart(tmp_path, folder):
    rows = [
        {"instruction": "Sort", "input": "b a", "output": "a b"},
        {"instruction": "Hi", "input": "", "output": "Ho"},
    ]
    data = data_of(tmp_path, folder, rows, template="alpaca", order="stored")
    assert texts(data)[0] == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nSort\n\n### Input:\nb a\n\n"
        "### Response:\na b<|endoftext|>"
    )
    assert texts(data, 1)[0] == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nHi\n\n### Response:\nHo<|endoftext|>"
    )


@pytest.mark.parametrize("name", ["chat", "alpaca", "vicuna", "plain"])
def test_a_prompt_is_the_beginning_of_its_sample(tmp_path, folder, name):
    data = data_of(tmp_path, folder, [PAIR], template=name)
    train = data.arrays().train
    first = int(train["answer"][0].argmax())
    assert data.chat.prompt([{"role": "user", "content": PAIR["prompt"]}]) == train["x"][0, :first].tolist()


def test_a_template_without_end_gets_the_end_token(tmp_path, folder):
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    data = data_of(tmp_path, folder, [PAIR], template=str(own))
    assert texts(data) == ("[user] Reverse: abc [assistant] cba <|endoftext|>", " cba <|endoftext|>")
    assert data.goal.ends == (1,)


def test_the_first_token_is_there_once_if_the_tokenizer_adds_it(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    folder = tokenizer(tmp_path / "tok", bos_token="<|im_start|>")
    data = data_of(tmp_path, folder, [PAIR], template="plain")
    assert not texts(data)[0].startswith("<|im_start|>")
    made = Tokenizer.from_file(f"{folder}/tokenizer.json")
    made.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 2)])
    made.save(f"{folder}/tokenizer.json")
    assert texts(data)[0].startswith("<|im_start|>Reverse")


def test_a_system_message_of_the_configuration(tmp_path, folder):
    text = texts(data_of(tmp_path, folder, [PAIR], system="Answer."))[0]
    assert text.startswith("<|im_start|>system\nAnswer.<|im_end|>")


# files


def test_formats_of_files_hold_the_same_samples(tmp_path, folder):
    import pandas as pd

    rows = [{"instruction": f"q{i}", "input": "x" * (i % 2), "output": f"a{i}", "task": "ab"[i % 2]} for i in range(8)]
    frame = pd.DataFrame(rows)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    expected = data_of(tmp_path, folder, rows, label="task").arrays()
    for name in ("rows.csv", "rows.parquet", "rows.json"):
        file = str(tmp_path / name)
        found = Instructions(train=file, test=file, tokenizer=folder, label="task", max_length=300).arrays()
        assert all(np.array_equal(found.train[of], t) for of, t in expected.train.items())


def test_a_data_set_of_hugging_face(tmp_path, folder):
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_list([{"messages": CHAT}] * 3)
    datasets.DatasetDict({"train": part, "test": part.select([0])}).save_to_disk(tmp_path / "hub")
    data = Instructions(train=str(tmp_path / "hub"), tokenizer=folder, max_length=300)
    assert texts(data) == texts(data_of(tmp_path, folder, [{"messages": CHAT}]))
    assert (len(data.arrays().train["x"]), data.arrays().test_samples) == (3, 1)


def test_columns_can_be_named(tmp_path, folder):
    rows = [{"question": "Reverse: abc", "text": "cba"}]
    data = data_of(tmp_path, folder, rows, prompt="question", response="text")
    assert texts(data) == texts(data_of(tmp_path, folder, [PAIR]))


def test_a_held_out_part_is_stratified(tmp_path, folder):
    data = Instructions(train=tasks(tmp_path / "a.jsonl", 30), tokenizer=folder, label="task", test_fraction=0.2)
    arrays = data.arrays()
    assert np.bincount(arrays.train["y"]).tolist() == [8, 8, 8] and np.bincount(arrays.test["y"]).tolist() == [2, 2, 2]


# length


def test_truncation_drops_a_side_and_counts(tmp_path, folder):
    rows = [PAIR, {"prompt": "a" * 80, "response": "b"}, {"prompt": "c", "response": "d" * 80}]
    right = data_of(tmp_path, folder, rows, max_length=50, order="stored")
    x = right.arrays().train["x"]
    assert len(x) == 2 and texts(right, 1)[0].startswith("<|im_start|>user\nc")
    assert right.notes == (
        "data.max_length: 2 of 6 samples of instructions are longer than 50 tokens and were truncated at the end",
        "data.max_length: 2 of 6 samples of instructions have no answer in 50 tokens and were dropped",
    )
    left = data_of(tmp_path, folder, rows, max_length=50, truncate="left")
    assert len(left.arrays().train["x"]) == 3 and texts(left, 1)[0].endswith("assistant\nb<|im_end|>")
    assert len(left.notes) == 1 and left.notes[0].startswith("data.max_length: 4 of 6")


# loss


@pytest.mark.parametrize("loss", ["responses", "all"])
def test_the_loss_counts_tokens_of_answers_alike(tmp_path, folder, loss):
    rows = [PAIR, {"prompt": "Count", "response": "1 2 3 4 5 6 7"}]
    data = data_of(tmp_path, folder, rows, loss=loss)
    train = {name: torch.from_numpy(t) for name, t in data.arrays().train.items()}
    [(x, y)] = ClientData(train, data.prepare, data.goal).plain(2)
    logits = torch.randn(*x.shape, data.goal.classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log, total, count = F.log_softmax(logits, -1), 0.0, 0
    for i in range(2):
        for t in range(1, int((train["x"][i] >= 0).sum())):
            if loss == "all" or train["answer"][i, t]:
                total, count = total - float(log[i, t - 1, train["x"][i, t]]), count + 1
    assert count == (y >= 0).sum() and x.shape[1] == int((train["x"] >= 0).sum(1).max()) - 1
    assert abs(float(data.goal.loss(logits, y)) - total / count) < 1e-12


# partition


def federation(data: Instructions, **spec) -> Federation:
    return federate(data, data.arrays(), PARTITIONS_KIND.read(spec, "partition"), 3, 0.0, 0)


def test_clients_by_class_and_by_user(tmp_path, folder):
    data = Instructions(train=tasks(tmp_path / "a.jsonl", 60), tokenizer=folder, label="task", user="task")
    y = data.arrays().train["y"]
    by_user = federation(data, name="users").train
    assert [len(np.unique(y[by_user[c]])) for c in range(3)] == [1, 1, 1]
    skewed = federation(data, name="dirichlet", alpha=0.1, min_samples=1).train
    assert sum(skewed.sizes) == len(y) and min(np.bincount(y[skewed[0]], minlength=3)) < 9


def test_without_a_class_every_sample_has_the_same(tmp_path, folder):
    data = Instructions(train=tasks(tmp_path / "a.jsonl"), tokenizer=folder)
    assert data.goal.kinds == 1 and sum(federation(data, name="iid").train.sizes) == 21


# wrong inputs

WRONG = {
    "no answer": (
        [{"prompt": "a", "response": " "}],
        {},
        "row 1 of rows.jsonl has ' ' in column 'response'. Allowed: text that is not empty",
    ),
    "lacks": (
        [{"prompt": "a"}],
        {},
        "has the columns 'prompt'. Allowed: 'messages'; or 'instruction' and 'output'; or",
    ),
    "two": ([{**PAIR, "messages": CHAT}], {}, "Hint: data.format selects one"),
    "roles": ([{"messages": [CHAT[1], CHAT[1]]}], {}, "has the roles user, user. Allowed: user and assistant in turns"),
    "question": ([{"messages": CHAT[:2]}], {}, "has the roles system, user"),
    "message": ([{"messages": ["hello"]}], {}, "Allowed: a list of messages with role and content"),
    "file": ([PAIR], {"train": "/nowhere.jsonl"}, "data.train: the file '/nowhere.jsonl' does not exist"),
    "template": ([PAIR], {"template": "llama9"}, "data.template: 'llama9' is not valid. Allowed: chat"),
    "tokenizer": ([PAIR], {"tokenizer": "/nowhere"}, "data.tokenizer: the folder '/nowhere' does not exist"),
    "length": ([PAIR], {"max_length": 5}, "no sample of rows.jsonl has an answer in 5 tokens"),
    "label": ([PAIR], {"label": "task"}, "data.label: row 1 of rows.jsonl has no value in 'task'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused_in_a_sentence(tmp_path, folder, case):
    rows, fields, message = WRONG[case]
    with pytest.raises(ConfigError) as error:
        data_of(tmp_path, folder, rows, **fields).arrays()
    assert message in str(error.value)


def test_templates_that_raise_or_change_earlier_turns_are_refused(tmp_path, folder):
    own = tmp_path / "own.jinja"
    data = data_of(tmp_path, folder, [{"messages": CHAT}], template=str(own))
    own.write_text("{{ raise_exception('no system messages') }}")
    with pytest.raises(ConfigError, match="fails on row 1 of rows.jsonl \\(TemplateError: no system messages\\)"):
        data.arrays()
    own.write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ConfigError, match="SecurityError"):
        data.arrays()
    own.write_text("{% for m in messages %}{{ m.content if loop.last else m.content[:1] }}|{% endfor %}")
    with pytest.raises(ConfigError, match="the template changes message 3 when another one follows"):
        data.arrays()


@pytest.mark.parametrize(
    "fields, message",
    [({"eos_token": None}, "names no end token"), ({"chat_template": None}, "has no chat template. Allowed: alpaca")],
)
def test_tokenizers_without_end_or_template_are_refused(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        data_of(tmp_path, tokenizer(tmp_path / "tok", **fields), [PAIR]).arrays()


def test_it_is_found_by_its_name(folder):
    read = DATASETS_KIND.read({"name": "instructions", "train": "a.jsonl", "tokenizer": folder}, "data")
    assert isinstance(read, Instructions) and parse(Instructions, read.model_dump(mode="json"), "data") == read
    assert CHATML in read.chat.source
