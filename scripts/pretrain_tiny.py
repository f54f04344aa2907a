"""Pre-train a small language model and its tokenizer, for fine-tuning without published weights.

    python scripts/pretrain_tiny.py roberta_tiny
    python scripts/pretrain_tiny.py llama_tiny --kind llama --layers 4 --length 64 --batch 32 --steps 8000

See `tune_configs/lora_sst2_small.yaml` and `tune_configs/instructions_small.yaml` for their use.

It trains a byte-level BPE tokenizer on the training text, and then the network, with a warm-up and a cosine decay:
roberta as a masked language model on WikiText-2, with BERT's masking; llama as a causal one on WikiText-2, Shakespeare
and lines of `instruction_tasks.py` in other words, three quarters of the text, for skills without instructions. The
folder is for transformers and `weights:`: config.json, model.safetensors, tokenizer.json. The texts are read from
RAYFL_DATA (rayfl/data/README.md).
"""

import argparse
import itertools
import json
import random
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import instruction_tasks
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from rayfl.config import ConfigError
from rayfl.core.net import Net, load, params_of
from rayfl.core.seeds import stream, torch_generator, torch_scope
from rayfl.data.goal import NextToken
from rayfl.data.samples import ClientData
from rayfl.data.text.shakespeare import Shakespeare
from rayfl.data.text.wikitext2 import WikiText2
from rayfl.data.tokens import Following
from rayfl.models.huggingface.causal import CausalLM
from rayfl.models.huggingface.encoders import Roberta
from rayfl.training.settings import Training
from rayfl.training.steps import Objective, Steps

SPECIAL = {"roberta": ("<s>", "<pad>", "</s>", "<unk>", "<mask>"), "llama": ("<pad>", "</s>")}
CHAT = (
    "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content + ' ->' }}{% else %}"
    "{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
"""Chat template of llama: "Sort the letters: b a -> a b</s>"."""
EVERY = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder, which must not exist")
    parser.add_argument("--kind", choices=SPECIAL, default="roberta")
    parser.add_argument("--steps", type=int, default=4000, help="number of steps")
    parser.add_argument("--batch", type=int, default=64, help="sequences per step")
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=32, help="tokens per sequence")
    parser.add_argument("--positions", type=int, default=128, help="tokens of the longest text in fine-tuning")
    parser.add_argument("--hide", type=float, default=0.4, help="fraction of tokens to mask, of roberta")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.folder.exists():
        raise SystemExit(f"{given.folder}: the folder exists. Allowed: a new folder")
    try:
        pretrain(given)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


def pretrain(given: argparse.Namespace) -> None:
    given.folder.mkdir(parents=True)
    net, whole, held = (masked if given.kind == "roberta" else causal)(given)
    training = Training(
        batch_size=given.batch, steps=given.steps, lr=given.lr, optimizer="adamw", betas=(0.9, 0.98), clip=1
    )
    training = training.model_copy(update={"weight_decay": 0.01, "warmup": given.steps // 10, "cosine_rounds": 1})
    print(f"{net.parameters:,} parameters, {len(whole):,} sequences of {given.length} tokens", flush=True)
    with torch_scope(stream(given.seed, "init")):
        module = net.build()
        load(module, net.initial())
    steps = Steps(module.train(), Objective(whole.goal, "none", None), training)
    rate = training.rate(0, len(whole))
    started, before = time.monotonic(), 0.0
    with torch_scope(stream(given.seed, "dropout")):
        batches = whole.batches(given.steps, training.batch_size, torch_generator(given.seed, "batches"))
        for i, (x, y) in enumerate(batches, start=1):
            steps.run(x, y, rate(i - 1) if callable(rate) else rate)
            if i % EVERY == 0:
                total = float(steps.total)
                loss, before = (total - before) / (EVERY * training.batch_size), total
                print(f"step {i}/{given.steps}, loss {loss:.3f}, {time.monotonic() - started:.0f} s", flush=True)
    print(f"test loss: {judged(module, held, 'masked' if given.kind == 'roberta' else 'all'):.3f}", flush=True)
    save(net, module, given)


def masked(given: argparse.Namespace) -> tuple[Net, ClientData, ClientData]:
    """Return RoBERTa, and WikiText-2's sequences."""
    [train, *_] = WikiText2().sources()
    with train.open(encoding="utf-8") as lines:
        # SST-2 is in lower case
        made = tokenizer_of(itertools.chain.from_iterable((line, line.lower()) for line in lines), given)
    ends = SPECIAL["roberta"]
    made.post_processor = processors.RobertaProcessing(("</s>", ends.index("</s>")), ("<s>", ends.index("<s>")))
    made.save(str(given.folder / "tokenizer.json"))
    data = WikiText2(
        tokenizer=str(given.folder),
        length=given.length,
        order="shuffled",
        mask_rule="bert",
        mask_rate=given.hide,
        loss_on="masked",
    )
    arrays = data.arrays()
    whole, held = (
        ClientData({n: torch.from_numpy(a) for n, a in split.items()}, data.prepare, data.goal)
        for split in (arrays.train, arrays.test)
    )
    # two more positions than tokens, as in RoBERTa
    model = Roberta(
        hidden=given.hidden, layers=given.layers, heads=given.heads, ffn=4 * given.hidden, positions=given.positions + 2
    )
    return Net(model.fitted(data.name, data.offers, "model")), whole, held


def causal(given: argparse.Namespace) -> tuple[Net, ClientData, ClientData]:
    """Return Llama, and sequences of the texts and of the tasks' lines, in random order."""
    draw = random.Random(given.seed)
    texts = WikiText2().sources()[0].read_text(encoding="utf-8").splitlines(keepends=True)
    texts += Shakespeare(units="words").read()[0].texts
    draw.shuffle(texts)
    # a token has about three characters
    characters = 3 * given.steps * given.batch * given.length
    texts = texts[: bisect_left(list(itertools.accumulate(map(len, texts))), characters // 4)]
    texts += skills(draw, characters * 3 // 4)
    draw.shuffle(texts)
    made = tokenizer_of(texts, given)
    ids = np.concatenate([np.array(one.ids, np.int32) for one in made.encode_batch(texts)])
    made.save(str(given.folder / "tokenizer.json"))
    x = torch.from_numpy(ids[: len(ids) // (given.length + 1) * (given.length + 1)]).view(-1, given.length + 1)
    goal, prepare = NextToken(made.get_vocab_size()), Following("shuffled")
    held = len(x) // 50
    config = {
        "model_type": "llama",
        "vocab_size": made.get_vocab_size(),
        "hidden_size": given.hidden,
        "intermediate_size": 3 * given.hidden,
        "num_hidden_layers": given.layers,
        "num_attention_heads": given.heads,
        "num_key_value_heads": max(given.heads // 2, 1),
        "max_position_embeddings": given.positions,
        "tie_word_embeddings": True,
        "pad_token_id": SPECIAL["llama"].index("<pad>"),
        "bos_token_id": None,
        "eos_token_id": SPECIAL["llama"].index("</s>"),
    }
    model: Any = CausalLM(weights="", config=config)  # pyright: ignore[reportArgumentType]
    offers = {"task": "next_token", "ids": goal.classes, "classes": goal.classes, "length": given.length}
    net = Net(model.fitted("the text", offers, "model"))
    return net, ClientData({"x": x[held:]}, prepare, goal), ClientData({"x": x[:held]}, prepare, goal)


def skills(draw: random.Random, characters: int) -> list[str]:
    """Return lines of the tasks of `instruction_tasks.py` by their names in pre-training, of so many characters."""
    found, length = [], 0
    while length < characters:
        task = draw.choice(list(instruction_tasks.TASKS))
        given, answer = instruction_tasks.sample(task, draw)
        found.append(f" {instruction_tasks.TASKS[task][1]}: {given} = {answer}\n")
        length += len(found[-1])
    return found


def tokenizer_of(texts: Iterable[str], given: argparse.Namespace) -> Tokenizer:
    """Return a byte-level BPE tokenizer with this many tokens."""
    special: Sequence[str] = SPECIAL[given.kind]
    made = Tokenizer(models.BPE(unk_token="<unk>" if "<unk>" in special else None))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=given.kind == "roberta")
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=given.vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


@torch.no_grad()
def judged(module: torch.nn.Module, data: ClientData, part: str) -> float:
    """Return the mean cross-entropy of the tokens of a part."""
    module.eval()
    total, count = 0.0, 0
    for x, y in itertools.islice(data.in_order(64), 40):
        logits, labels = data.goal.rows(module(x), y, part)
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        count += len(labels)
    return total / count


def save(net: Net, module: torch.nn.Module, given: argparse.Namespace) -> None:
    folder = given.folder
    if isinstance(net.model, CausalLM):
        made = net.model.made()
        load(made, params_of(module))
        made.save_pretrained(folder)
        names = {"eos_token": "</s>", "pad_token": "<pad>", "chat_template": CHAT}
    else:
        net.model.exported(net, params_of(module)).save_pretrained(folder)  # pyright: ignore[reportAttributeAccessIssue]
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        names |= {"mask_token": "<mask>", "cls_token": "<s>", "sep_token": "</s>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


if __name__ == "__main__":
    main()
