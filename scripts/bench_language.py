"""Time of a step of a language model with adapters, compared with transformers and peft, and memory of its base.

    python scripts/bench_language.py                    # 6 million parameters
    python scripts/bench_language.py --size large       # 98 million
    python scripts/bench_language.py --memory           # the base in several client actors

Both train adapters of rank 16 at all linear layers of the same Llama with AdamW, on batches of 8 x 64 tokens of which
half are answers. rayfl runs a whole visit of a client, `method.local_update`: loading weights, batches, steps, update.
The bare loop is peft's model with the loss of transformers on batches made beforehand, and continues with its weights.
Times are CPU seconds. All take turns, and ratios are medians over turns. One thread.

--memory starts a run with two client actors on a base in float32 and sums the proportional set sizes of its processes.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse  # noqa: E402
import json  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from bench_step import show  # noqa: E402
from peers.timing import cpu_seconds_of, in_turns, over  # noqa: E402

import rayfl  # noqa: E402
from rayfl.core.net import Net  # noqa: E402
from rayfl.core.tensors import pack, unpack  # noqa: E402
from rayfl.data.goal import IGNORE_INDEX  # noqa: E402
from rayfl.data.instructions import Answers, Instructed  # noqa: E402
from rayfl.data.samples import ClientData  # noqa: E402
from rayfl.engine.memory import keep_freed_memory  # noqa: E402
from rayfl.methods.base import Client, Task, Visit  # noqa: E402
from rayfl.methods.lowrank.fedit import FedIT  # noqa: E402
from rayfl.models.lora import Lora  # noqa: E402
from rayfl.training.settings import Training  # noqa: E402

SIZES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 4000},
    "large": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 16000},
}
BATCH, LENGTH, RANK = 8, 64, 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def config_of(size: str) -> dict[str, Any]:
    return {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, **SIZES[size]}


def samples(config: dict[str, Any], steps: int) -> dict[str, torch.Tensor]:
    """Return stored samples: tokens, and which are answers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(config["vocab_size"], (steps * BATCH, LENGTH + 1), generator=generator)
    answer = torch.zeros_like(x)
    answer[:, LENGTH // 2 :] = 1
    return {"x": x.int(), "answer": answer.to(torch.uint8)}


def model_of(config: dict[str, Any]) -> Lora:
    base = {"name": "causal_lm", "weights": "", "config": config}
    model = Lora(base=base, rank=RANK, alpha=2 * RANK, targets=TARGETS)  # pyright: ignore
    return model.fitted("the bench", {"ids": config["vocab_size"], "length": LENGTH}, "model")


def ours(config: dict[str, Any], steps: int) -> Callable[[], float]:
    training = Training(batch_size=BATCH, steps=steps, lr=1e-3, optimizer="adamw")
    model = model_of(config)
    net = Net(model)
    task = Task(model, training, {1.0: net}, 1.0, clients=1)
    method = FedIT().bind(task)
    data = ClientData(samples(config, steps), Answers("stored"), Instructed(config["vocab_size"]))
    state, client = method.init(), Client(0, 1.0, 0, lambda: data.present)
    selection = method.select(state, client)
    payload = unpack(pack(method.extract(state, selection)))
    visit = Visit(client, selection, data, None, 7)
    return lambda: cpu_seconds_of(lambda: method.local_update(payload, visit))


def bare(config: dict[str, Any], steps: int) -> Callable[[], float]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    options = {name: value for name, value in config.items() if name != "model_type"}
    base = AutoModelForCausalLM.from_config(LlamaConfig(**options, use_cache=False))
    module = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS)).train()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-3, weight_decay=0)
    stored = samples(config, steps)
    labels = torch.where(stored["answer"] == 1, stored["x"].long(), IGNORE_INDEX)
    # both see one token less than is stored
    ids, labels = stored["x"][:, :-1].long(), labels[:, 1:].contiguous()

    def train() -> None:
        for x, y in zip(ids.split(BATCH), labels.split(BATCH), strict=True):
            loss = module(input_ids=x, labels=y, shift_labels=y).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return lambda: cpu_seconds_of(train)


def memory(config: dict[str, Any]) -> dict[str, float]:
    """Return GB: of the base, of all processes of a run with one and with two client actors, and what the second
    adds."""
    found = {"base": 4 * (Net(model_of(config)).model.parts(Net(model_of(config)))["frozen"]) / 1e9}
    for actors in (1, 2):
        experiment = rayfl.Experiment(
            rounds=100,
            data={"name": "synthetic_text", "task": "next_token", "samples": 64, "length": 16},  # pyright: ignore
            model={"name": "lora", "base": {"name": "causal_lm", "weights": "", "config": config}, "targets": TARGETS},  # pyright: ignore
            method="fedit",  # pyright: ignore
            clients={"count": 4, "cohort": 4, "capacities": [1]},  # pyright: ignore
            partition="iid",  # pyright: ignore
            training={"batch_size": 2, "steps": 1},  # pyright: ignore
            evaluation={"every": 100, "clients": False, "holdout": 0},  # pyright: ignore
            run={"actors": actors, "memory": 0.5},  # pyright: ignore
        )
        with rayfl.start(experiment) as session:
            for _, _ in zip(range(2), session, strict=False):
                found[f"{actors} actors"] = sum(map(pss, family(os.getpid()))) / 1e9
    return found | {"second actor": found["2 actors"] - found["1 actors"]}


def family(root: int) -> list[int]:
    """Return this process and those that it started."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = [root]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def pss(process: int) -> int:
    """Return the proportional set size of a process in bytes."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=10, help="steps per turn (default: 10)")
    parser.add_argument("--turns", type=int, default=7, help="measured turns (default: 7)")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    config = config_of(options.size)
    if options.memory:
        print(json.dumps({name: round(gb, 3) for name, gb in memory(config).items()}, indent=2))
        return
    sides = {"transformers and peft": bare(config, options.steps), "rayfl": ours(config, options.steps)}
    table = over(in_turns(sides, options.turns), "transformers and peft", options.steps)
    if options.json:
        print(json.dumps(table, indent=2))
    else:
        show(f"{Net(model_of(config)).model.parts(Net(model_of(config)))['frozen']:,} parameters", table)


if __name__ == "__main__":
    main()
