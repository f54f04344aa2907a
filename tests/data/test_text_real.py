"""The real corpora and tokenizers: published counts, to the last token."""

import os
from pathlib import Path

import numpy as np
import pytest

from rayfl.data import DATASETS_KIND
from rayfl.data.text import cache
from rayfl.data.text.encoders import FromFiles, find_tokenizer
from rayfl.data.text.shakespeare import words_of
from rayfl.data.tokens import PAD

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif("RAYFL_DATA" not in os.environ, reason="RAYFL_DATA names no folder with the real data sets"),
]


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYFL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(cache, "_recent", {})
        yield


def read(name, **fields):
    return DATASETS_KIND.read({"name": name, **fields}, "data")


def test_wikitext2_as_heterofl_counts_it():
    data = read("wikitext2")
    corpus, arrays = data.corpus(), data.arrays()
    assert [len(part.tokens.ids) for part in (corpus.train, corpus.test)] == [2_088_628, 245_569]
    assert data.offers == {"task": "masked_lm", "ids": 33_280, "classes": 33_279, "length": 64}
    # each word occurs in the training text, but for <ukn>; no word of the test text is unknown
    assert np.array_equal(np.unique(corpus.train.tokens.ids), np.arange(1, 33_279))
    assert corpus.test.tokens.ids.min() == 1
    assert arrays.train["x"].shape == (100 * 327, 64) and arrays.test["x"].shape == (384 * 10, 64)
    steps = np.bincount(arrays.users)
    assert steps.tolist() == [327] * 100
    rows = arrays.train["x"].reshape(100, -1)
    assert ((rows != PAD).sum(1) == 20_886).all() and (arrays.test["x"] != PAD).sum() == 10 * 24_556
    # a walk through the first row is the text
    assert np.array_equal(rows[0][rows[0] != PAD], corpus.train.tokens.ids[:20_886])
    first_row = arrays.test["x"][::10].ravel()
    assert np.array_equal(first_row[first_row != PAD], corpus.test.tokens.ids[:24_556])
    sizes = [len(np.unique(row[row != PAD])) for row in rows]
    assert (min(sizes), round(np.mean(sizes)), max(sizes)) == (2826, 3774, 4160)
    assert arrays.train["hidden"].mean() == pytest.approx(0.15, abs=0.001)


def test_shakespeare():
    data = read("shakespeare", min_speeches=1)
    train, test, _ = data.read()
    of_roles = [[words_of(text) for text in part.texts] for part in (train, test)]
    counts = np.zeros(1313, np.int64)
    for part, texts in zip((train, test), of_roles, strict=True):
        np.add.at(counts, part.users, [len(words) for words in texts])
    assert counts.sum() == 978_460 and (counts > 0).all()
    assert len({word for texts in of_roles for words in texts for word in words}) == 25_801
    # FedRolex's batches of 24 sequences of 21 tokens; and a single sequence
    assert [(counts >= least).sum() for least in (504, 21)] == [420, 1125]
    characters = {c for part in (train, test) for text in part.texts for c in text}
    assert len(characters) == 80
    # roles with one speech are not tested
    assert len(np.unique(test.users)) == 1107
    assert len(np.unique(read("shakespeare").arrays().users)) == 1107


def test_shakespeare_as_a_stand_in_for_stack_overflow():
    data = read("shakespeare", padding="token")
    arrays = data.arrays()
    assert data.offers == {"task": "next_token", "ids": 10_004, "classes": 10_004, "length": 20}
    for split in (arrays.train, arrays.test):
        assert split["x"].shape[1] == 21 and split["x"].min() == 0 and split["x"].max() == 10_003
    assert (arrays.train["x"] == 10_001).mean() < 0.03


def test_ag_news():
    data = read("ag_news", file="train_subset.csv")
    arrays = data.arrays()
    assert any("texts of ag_news are longer than 128 tokens" in note for note in arrays.notes)
    assert len(arrays.train["y"]) == 17_179 and np.bincount(arrays.test["y"]).tolist() == [1900] * 4
    assert np.bincount(arrays.train["y"][:13_638]).tolist() == [3432, 3432, 3393, 3381]


def test_sst2():
    arrays = read("sst2").arrays()
    assert np.bincount(arrays.train["y"]).tolist() == [29_780, 37_569] and len(arrays.test["y"]) == 872


SENTENCES = ["Hello, world!", "The café's naïve  menu:\n10% off @-@ ok?", "<mask> me", "日本 x", "don't"]


def ours(name, texts, pairs=None, special=True):
    files = find_tokenizer(f"tokenizers/{name}", Path(os.environ["RAYFL_DATA"]))
    encoder = FromFiles(files, special)
    tokens, _ = encoder.encode(texts, pairs, None)
    return encoder, [tokens.ids[a:b].tolist() for a, b in zip(tokens.ptr[:-1], tokens.ptr[1:], strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roberta", "gpt2", "bert-base-uncased"])
def test_tokens_are_those_of_transformers(name):
    from transformers import AutoTokenizer, BertTokenizer, GPT2Tokenizer

    folder = Path(os.environ["RAYFL_DATA"]) / "tokenizers" / name
    if name == "roberta":
        theirs = AutoTokenizer.from_pretrained(str(folder))
    elif name == "gpt2":
        theirs = GPT2Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    else:
        theirs = BertTokenizer(vocab=str(folder / "vocab.txt"))
    encoder, found = ours(name, SENTENCES)
    assert found == theirs(SENTENCES)["input_ids"]
    assert ours(name, SENTENCES, SENTENCES[::-1])[1] == theirs(SENTENCES, SENTENCES[::-1])["input_ids"]
    assert encoder.vocabulary.ids == len(theirs) == {"roberta": 50_265, "gpt2": 50_257}.get(name, 30_522)
    assert encoder.vocabulary.mask == theirs.mask_token_id and set(theirs.all_special_ids) <= set(
        encoder.vocabulary.special
    )


@pytest.mark.slow
def test_robertas_older_files_are_the_same_tokenizer(tmp_path):
    folder = Path(os.environ["RAYFL_DATA"]) / "tokenizers/roberta"
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).symlink_to(folder / file)
    encoder = FromFiles(find_tokenizer(str(tmp_path), None), special=True)
    tokens, _ = encoder.encode(SENTENCES[:2], SENTENCES[1::-1], None)
    assert [tokens.ids[: tokens.ptr[1]].tolist(), tokens.ids[tokens.ptr[1] :].tolist()] == ours(
        "roberta", SENTENCES[:2], SENTENCES[1::-1]
    )[1]
    assert encoder.vocabulary.mask == 50_264
