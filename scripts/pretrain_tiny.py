"""Pre-train a small RoBERTa and its tokenizer on WikiText-2, for fine-tuning without published weights.

    python scripts/pretrain_tiny.py roberta_tiny

See `tune_configs/lora_sst2_small.yaml` for its use.

It trains a byte-level BPE tokenizer like RoBERTa's on the training text, and then the network as a masked language
model, with BERT's masking, a warm-up and a cosine decay. The folder is for transformers and `weights:`: config.json,
model.safetensors, tokenizer.json. WikiText-2 is read from `data.root` or RAYFL_DATA (rayfl/data/README.md).
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from rayfl.config import ConfigError
from rayfl.core.net import Net, load, params_of
from rayfl.core.seeds import stream, torch_generator, torch_scope
from rayfl.data.samples import ClientData
from rayfl.data.text.wikitext2 import WikiText2
from rayfl.models.huggingface.encoders import Roberta
from rayfl.training.settings import Training
from rayfl.training.steps import Objective, Steps

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
EVERY = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder, which must not exist")
    parser.add_argument("--steps", type=int, default=4000, help="number of steps, of 64 sequences each")
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=32, help="tokens per sequence")
    parser.add_argument("--positions", type=int, default=128, help="tokens of the longest text in fine-tuning")
    parser.add_argument("--hide", type=float, default=0.4, help="fraction of tokens to mask")
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
    [train, *_] = WikiText2().sources()
    given.folder.mkdir(parents=True)
    tokenizer_of(train, given.vocabulary).save(str(given.folder / "tokenizer.json"))
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
    ).fitted(data.name, data.offers, "model")
    net = Net(model)
    training = Training(batch_size=64, steps=given.steps, lr=given.lr, optimizer="adamw", betas=(0.9, 0.98), clip=1)
    training = training.model_copy(update={"weight_decay": 0.01, "warmup": given.steps // 10, "cosine_rounds": 1})
    print(f"{net.parameters:,} parameters, {len(whole):,} sequences of {given.length} tokens", flush=True)
    with torch_scope(stream(given.seed, "init")):
        module = net.build()
        load(module, net.initial())
    steps = Steps(module.train(), Objective(data.goal, "none", None), training)
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
    print(f"test loss of masked tokens: {judged(module, held):.3f}", flush=True)
    save(net, module, given.folder)


def tokenizer_of(text: Path, vocabulary: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer with this many tokens, which encloses a text in <s> and </s>."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with text.open(encoding="utf-8") as lines:
        # SST-2 is in lower case
        made.train_from_iterator(itertools.chain.from_iterable((line, line.lower()) for line in lines), trainer)
    made.post_processor = processors.RobertaProcessing(("</s>", SPECIAL.index("</s>")), ("<s>", SPECIAL.index("<s>")))
    return made


@torch.no_grad()
def judged(module: torch.nn.Module, data: ClientData) -> float:
    """Return the mean cross-entropy of the masked tokens."""
    module.eval()
    total, count = 0.0, 0
    for x, y in itertools.islice(data.in_order(64), 40):
        logits, labels = data.goal.rows(module(x), y, "masked")
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        count += len(labels)
    return total / count


def save(net: Net, module: torch.nn.Module, folder: Path) -> None:
    net.model.exported(net, params_of(module)).save_pretrained(folder)  # pyright: ignore[reportAttributeAccessIssue]
    names = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "cls_token": "<s>", "sep_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


if __name__ == "__main__":
    main()
