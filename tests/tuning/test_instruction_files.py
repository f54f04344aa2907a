"""The files of papers on instruction tuning, with a user's weights and data."""

import json

import pytest
from chats import causal, tasks, tokenizer

from rayfl.tuning.load import load_sweep


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options, more",
    [
        ("openfedllm_alpaca", {"template": "alpaca"}, {}),
        ("flora_instructions", {"template": "alpaca", "loss": "all"}, {}),
        (
            "flexlora_instructions",
            {"template": "alpaca", "user": "task"},
            {"partition": {"name": "users"}, "clients.count": 100},
        ),
    ],
)
def test_a_users_weights_and_data_fit(tmp_path, monkeypatch, name, options, more):
    monkeypatch.setenv("RAYFL_CACHE", str(tmp_path / "cache"))
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 1, "num_key_value_heads": 1}
    base = {"name": "causal_lm", "weights": causal(tmp_path / "llama", **sizes), "dtype": "bf16", "checkpointing": True}
    data = {"name": "instructions", "train": tasks(tmp_path / "a.jsonl"), "tokenizer": tokenizer(tmp_path / "tokens")}
    given = {"data": data | options, "model.base": base, **more}
    settings = [f"{place}={json.dumps(value)}" for place, value in given.items()]
    plan = load_sweep(f"tune_configs/{name}.yaml", settings)
    for row in plan.rows:
        experiment = plan.example(row)
        assert (experiment.data.name, experiment.model.base.name) == ("instructions", "causal_lm")  # pyright: ignore
        assert experiment.bound().task.server.parameters > 0
