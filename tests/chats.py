"""Tokenizers, tiny causal language models and files of instructions, made for tests."""

import json
from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["Reverse the word: abc", "Count: 1 2 3 user assistant", "Below is an instruction", "### Response:\n"]


def tokenizer(to: Path, **fields: Any) -> str:
    """Write a byte-level tokenizer with a ChatML template into a folder. `fields`: of transformers' tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    named = {"eos_token": "<|endoftext|>", "pad_token": "<pad>", "chat_template": CHATML} | fields
    named = {name: value for name, value in named.items() if value is not None}
    PreTrainedTokenizerFast(tokenizer_object=made, **named).save_pretrained(to)
    return str(to)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def tasks(path: Path, count: int = 24) -> str:
    """Write `count` rows with instruction, input and output, of three tasks in turn."""
    words = ["abc", "hello", "federated", "rank"]
    rows = []
    for i in range(count):
        word = words[i % 4] + str(i)
        task = ("copy", "reverse", "upper")[i % 3]
        answer = {"copy": word, "reverse": word[::-1], "upper": word.upper()}[task]
        rows.append({"instruction": f"{task} the word", "input": word, "output": answer, "task": task})
    return jsonl(path, rows)


CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "gemma": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
}
"""Sizes of tiny networks by `model_type`."""


def causal(to: Path, kind: str = "llama", rows: int = 304, **more: int) -> str:
    """Write a tiny random causal language model into a folder, with more rows than the tokenizer has tokens. `more`:
    fields of its configuration."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {"num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1} | CAUSAL[kind] | more
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](vocab_size=rows, **sizes)).save_pretrained(to)
    return str(to)
