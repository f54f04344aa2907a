"""Text data sets on generated files: chunks, users, errors, and the token cache."""

import importlib
import json
import lzma
import sys
from typing import ClassVar

import numpy as np
import pytest
from helpers import message
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from rayfl.config import ConfigError, parse
from rayfl.data import DATASETS_KIND, federate
from rayfl.data.goal import Classes, MaskedTokens, NextToken
from rayfl.data.partition.iid import IID
from rayfl.data.text import base, cache
from rayfl.data.text.base import chunked, padded
from rayfl.data.text.encoders import Tokens, characters, frequent_words, words_and_marks
from rayfl.data.text.shakespeare import Shakespeare, windows
from rayfl.data.tokens import PAD
from rayfl.testing.data import DataContract
from rayfl.testing.tiny import raised


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Return the folder of the files. The token cache is a separate folder per test."""
    monkeypatch.setenv("RAYFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    monkeypatch.setattr(cache, "_recent", {})
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return str(path)


def read(name, **fields):
    return DATASETS_KIND.read({"name": name, **fields}, "data")


def refused(name, **fields):
    return raised(lambda: read(name, **fields).arrays(), ConfigError)


def tokens(*texts):
    return Tokens.of((i for text in texts for i in text), [len(text) for text in texts])


class TestOwnText(DataContract):
    model: ClassVar = {"name": "heterofl_transformer", "layers": 1, "heads": 2, "head_width": 4, "mlp": 8}

    @pytest.fixture(autouse=True)
    def own(self, folder):
        rows = "".join(f"{'good' * (i % 2)} film {i},{i % 2}\n" for i in range(60))
        self.data = {"name": "text", "train": write(folder / "a.csv", "text,label\n" + rows), "max_length": 6}


# chunks


def test_pieces_of_a_text_overlap_so_that_every_token_is_predicted_once():
    x, text = chunked(tokens([1, 2, 3, 4, 5, 6], [7], [8, 9]), 2, 1)
    assert x.tolist() == [[1, 2, 3], [3, 4, 5], [5, 6, PAD], [8, 9, PAD]] and x.dtype == np.int32
    assert text.tolist() == [0, 0, 0, 2]


def test_pieces_without_overlap():
    x, text = chunked(tokens([1, 2, 3, 4, 5], [], [6]), 2, 0)
    assert x.tolist() == [[1, 2], [3, 4], [5, PAD], [6, PAD]] and text.tolist() == [0, 0, 0, 2]


def test_padded_texts():
    assert padded(tokens([1, 2], [3, 4, 5]), 4).tolist() == [[1, 2, PAD, PAD], [3, 4, 5, PAD]]


def test_windows_of_leaf():
    x, text = windows(tokens([1, 2, 3, 4, 5], [6, 7], [8, 9, 10]), 3, 2)
    assert x.tolist() == [[1, 2, 3], [3, 4, 5], [8, 9, 10]] and text.tolist() == [0, 0, 2]


# encoding


def test_frequent_words_are_numbered_as_tff_does():
    encoder = frequent_words(["b a b", "c a d b"], str.split, 2, ends=True)
    found, cut = encoder.encode(["b x a", ""], None, None)
    assert found.ids.tolist() == [4, 1, 3, 2, 5, 4, 5] and found.ptr.tolist() == [0, 5, 7] and cut == 0
    assert encoder.vocabulary.ids == 6 and encoder.vocabulary.special == (0, 3, 4, 5)


def test_a_text_and_its_second_part():
    encoder = frequent_words(["a b"], str.split, 2, ends=False)
    found, cut = encoder.encode(["a a a", "a"], ["b", "b b"], 4)
    # the longer one is shortened first
    assert found.ids.tolist() == [1, 1, 5, 2, 1, 5, 2, 2] and found.lengths.tolist() == [4, 4] and cut == 1
    found, cut = encoder.encode(["a a a", "a"], ["b b b b", "b b b b"], 5)
    assert found.ids.tolist() == [1, 1, 5, 2, 2, 1, 5, 2, 2, 2] and cut == 2


def test_characters_are_sorted_and_others_unknown():
    encoder = characters(["ba", "c"], None)
    assert encoder.encode(["abz"], None, None)[0].ids.tolist() == [1, 2, 0] and encoder.vocabulary.ids == 4
    # with a number the most frequent ones
    assert characters(["ab", "b"], 1).encode(["ab"], None, None)[0].ids.tolist() == [0, 1]


def test_words_and_marks():
    assert words_and_marks("Don't stop: Ä1, ok?") == ["don't", "stop", ":", "ä1", ",", "ok", "?"]


def a_tokenizer(folder, name="small"):
    """[CLS] and [SEP] around words; written as the library writes it."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    (folder / name).mkdir()
    made.save(str(folder / name / "tokenizer.json"))
    return str(folder / name)


# WikiText-2


def wikitext(folder):
    write(folder / "wikitext-2/train.txt", "a b a\n\nc a <unk>\nb a\n")
    write(folder / "wikitext-2/test.txt", "c b a d\nb b\n")


def test_wikitext_words_come_in_the_order_in_which_they_first_occur(folder):
    wikitext(folder)
    data = read("wikitext2", vocabulary=4, rows=2, test_rows=2, length=2)
    corpus = data.corpus()
    # <ukn> 0, <eos> 1, a 2, b 3, c 4, <unk> 5
    assert corpus.train.tokens.ids.tolist() == [2, 3, 2, 1, 1, 4, 2, 5, 1, 3, 2, 1]
    assert corpus.test.tokens.ids.tolist() == [4, 3, 2, 0, 1, 3, 3, 1]
    assert data.offers == {"task": "masked_lm", "ids": 7, "classes": 6, "length": 2}


def test_wikitext_rows_are_users_and_evaluations_walk_all_rows_at_once(folder):
    wikitext(folder)
    arrays = read("wikitext2", vocabulary=4, rows=2, test_rows=2, length=4).arrays()
    assert arrays.train["x"].tolist() == [[2, 3, 2, 1], [1, 4, PAD, PAD], [2, 5, 1, 3], [2, 1, PAD, PAD]]
    assert arrays.users is not None and arrays.users.tolist() == [0, 0, 1, 1] and arrays.test_users is None
    arrays = read("wikitext2", vocabulary=4, rows=3, test_rows=2, length=2).arrays()
    # rows 4 3 2 0 and 1 3 3 1
    assert arrays.test["x"].tolist() == [[4, 3], [1, 3], [2, 0], [3, 1]]
    assert arrays.train["hidden"].shape == arrays.train["x"].shape


def test_padding_of_wikitext_may_count_as_a_token(folder):
    wikitext(folder)
    given = {"tokenizer": a_tokenizer(folder), "rows": 1, "test_rows": 1, "length": 7}
    plain, counted = (
        read("wikitext2", **given, padding=padding).arrays().train["x"] for padding in ("ignored", "token")
    )
    assert (plain == PAD).sum() == 4 and np.array_equal(counted, np.where(plain == PAD, 0, plain))


def test_wikitext_next_tokens(folder):
    wikitext(folder)
    data = read("wikitext2", vocabulary=4, rows=1, test_rows=1, length=6, task="next_token")
    assert data.arrays().train["x"].tolist() == [[2, 3, 2, 1, 1, 4, 2], [2, 5, 1, 3, 2, 1, PAD]]
    assert data.goal == NextToken(6, special=(0, 1)) and data.prepare.order == "stored"


def test_fewer_words_are_the_most_frequent_ones_in_order_of_appearance(folder):
    wikitext(folder)
    ids = read("wikitext2", vocabulary=1, rows=1, test_rows=1).corpus().train.tokens.ids
    assert ids.tolist() == [2, 0, 2, 1, 1, 0, 2, 0, 1, 0, 2, 1]


def test_another_text_than_wikitext_is_refused(folder):
    wikitext(folder)
    assert refused("wikitext2") == (
        f"data: {folder}/wikitext-2/train.txt has 4 different words. Allowed: the 33277 of WikiText-2. Hint: reduce "
        "them by data.vocabulary"
    )
    assert refused("wikitext2", vocabulary=4, rows=13) == (
        "data.rows: 13 is not valid. Allowed: at most 12, one prediction per row"
    )


def test_a_tokenizers_own_mask_is_taken(folder):
    wikitext(folder)
    given = read("wikitext2", tokenizer=a_tokenizer(folder), rows=1, test_rows=1, length=3)
    assert given.offers["ids"] == given.offers["classes"] == 8 and given.prepare.mask == 4
    assert given.goal == MaskedTokens(8, special=(0, 1, 2, 3, 4))
    # no special tokens inside a stream
    assert set(given.arrays().train["x"].ravel()) == {1, PAD}


# Shakespeare


def plays(folder, packed=True):
    roles = [
        {"user": "A|ONE", "speeches": ["To be, or", "not to be?", "be!"]},
        {"user": "A|TWO", "speeches": ["Alone"]},
        {"user": "B|ONE", "speeches": ["or to", "be"]},
    ]
    text = "".join(json.dumps(role) + "\n" for role in roles)
    path = folder / "shakespeare/by_speaker.jsonl"
    write(path, text)
    if packed:
        path.with_suffix(".jsonl.xz").write_bytes(lzma.compress(text.encode()))
        path.unlink()


@pytest.mark.parametrize("packed", [True, False])
def test_the_last_speeches_of_a_role_are_its_test_split(folder, packed):
    plays(folder, packed)
    arrays = read("shakespeare", vocabulary=4, length=4).arrays()
    # to 1, be 2, or 3, "," 4; unknown 5, begin 6, end 7
    assert arrays.train["x"].tolist() == [[6, 1, 2, 4, 3], [3, 7, 6, 5, 1], [1, 2, 5, 7, PAD], [6, 3, 1, 7, PAD]]
    assert arrays.users is not None and arrays.users.tolist() == [0, 0, 0, 2]
    assert arrays.test["x"].tolist() == [[6, 2, 5, 7, PAD], [6, 2, 7, PAD, PAD]]
    assert arrays.test_users is not None and arrays.test_users.tolist() == [0, 2]


def test_padding_may_count_as_a_token(folder):
    plays(folder)
    arrays = read("shakespeare", vocabulary=4, length=4, padding="token").arrays()
    assert arrays.test["x"].tolist() == [[6, 2, 5, 7, 0], [6, 2, 7, 0, 0]]


def test_roles_of_one_speech_have_no_test_split(folder):
    plays(folder)
    arrays = read("shakespeare", units="characters", length=80, min_speeches=1).arrays()
    assert set(arrays.users) == {0, 1, 2} and set(arrays.test_users) == {0, 2}
    # a newline is 1, and the end of a speech
    assert arrays.train["x"][1, 5:7].tolist() == [1, PAD]


def test_leaf_samples_are_windows_and_the_character_that_follows(folder):
    plays(folder)
    data = read("shakespeare", units="characters", length=3, stride=1)
    arrays = data.arrays()
    assert data.goal == Classes(81) and (data.offers["task"], data.offers["pad"]) == ("classes", 0)
    first = data.corpus().train.tokens.ids[: 3 + 4].tolist()
    assert arrays.train["x"][:4].tolist() == [first[i : i + 3] for i in range(4)]
    assert arrays.train["y"][:4].tolist() == first[3:]
    # of 21, 6, 4 and 3 characters
    assert np.bincount(arrays.users).tolist() == [18, 0, 3] and arrays.test_users.tolist() == [0]


def test_overlapping_samples_cannot_be_held_out(folder):
    """Their labels are inputs of other samples."""
    plays(folder)
    data = read("shakespeare", units="characters", length=3, stride=3)
    for fractions in ((0.1, 0.0), (0.0, 0.1)):
        name = "evaluation.local_holdout" if fractions[1] else "evaluation.holdout"
        assert message(federate, data, data.arrays(), IID(), 2, fractions[0], 0, fractions[1]) == (
            f"{name}: 0.1 is not valid. Allowed: 0, because samples at a distance (data.stride) of 3 tokens overlap, "
            "with 4 tokens each"
        )
    assert len(federate(data, data.arrays(), IID(), 2, 0.0, 0).train) == 2
    apart = read("shakespeare", units="characters", length=3, stride=4)
    assert len(federate(apart, apart.arrays(), IID(), 1, 0.4, 0).validation)


@pytest.mark.parametrize("given", [{"task": "masked_lm"}, {"padding": "token"}, {"mask_rate": 0.5}])
def test_samples_of_one_class_have_no_other_task(given):
    said = message(parse, Shakespeare, {"stride": 1, **given}, "data")
    assert f"data: {next(iter(given))}: " in said and "is not supported with stride" in said


# labelled texts

NEWS = '"3","Oil, up","It rises ""fast"""\n"1","War","talks"\n"2","Goal","a goal"\n"4","Chip","new"\n'


def test_ag_news_is_title_and_description(folder):
    write(folder / "ag_news_csv/train.csv", NEWS)
    write(folder / "ag_news_csv/test.csv", NEWS)
    data = read("ag_news", max_length=6, vocabulary=100)
    arrays = data.arrays()
    assert arrays.notes[1:] == ("data.max_length: 2 of 8 texts of ag_news are longer than 6 tokens and were truncated",)
    assert arrays.train["y"].tolist() == [2, 0, 1, 3] and arrays.train["x"].shape == (4, 6)
    # " and goal come twice; then oil , up it rises fast war talks in order of appearance
    assert arrays.train["x"].tolist()[:2] == [[3, 4, 5, 6, 7, 1], [9, 10, PAD, PAD, PAD, PAD]]
    assert data.offers == {"task": "classes", "ids": 104, "classes": 4, "length": 6, "pad": 0}


def test_the_first_rows_of_ag_news(folder):
    write(folder / "ag_news_csv/train_subset.csv", NEWS)
    write(folder / "ag_news_csv/test.csv", NEWS)
    assert read("ag_news", file="train_subset.csv", rows=2).arrays().train["y"].tolist() == [2, 0]
    assert refused("ag_news", file="train_subset.csv", rows=5) == (
        f"data.rows: 5 is not valid. Allowed: at most 4, the texts in {folder}/ag_news_csv/train_subset.csv"
    )
    message = refused("ag_news")
    assert message.startswith(f"data: ag_news is not in {folder} (but train_subset.csv is; select it by data.file)")


def test_a_row_of_ag_news_that_is_broken(folder):
    write(folder / "ag_news_csv/train.csv", NEWS + '"5","x","y"\n')
    write(folder / "ag_news_csv/test.csv", NEWS)
    assert "train.csv is ['5', 'x', 'y']. Allowed: a class from 1 to 4, a title" in refused("ag_news")


def test_a_part_of_a_published_text_is_noticed(folder):
    write(folder / "ag_news_csv/train.csv", NEWS)
    write(folder / "ag_news_csv/test.csv", NEWS)
    # also when its tokens are in the cache
    for _ in range(2):
        assert read("ag_news").arrays().notes == (
            "data: the files of ag_news have 4 + 4 texts. The published ones have 120000 + 7600",
        )


def test_damaged_files_of_texts_are_named(folder):
    plays(folder)
    path = folder / "shakespeare/by_speaker.jsonl.xz"
    path.write_bytes(path.read_bytes()[:-20])
    assert refused("shakespeare") == (
        f"data: {path} cannot be read (EOFError: Compressed file ended before the end-of-stream marker was reached). "
        "Allowed: the published file"
    )
    path.unlink()
    write(folder / "shakespeare/by_speaker.jsonl", '{"user": "A"}\n')
    assert "cannot be read (KeyError: 'speeches')" in refused("shakespeare")
    wikitext(folder)
    (folder / "wikitext-2/test.txt").write_bytes(b"a \xff")
    assert "test.txt cannot be read (UnicodeDecodeError: " in refused("wikitext2", vocabulary=4)


@pytest.mark.parametrize("header", ["label\tsentence", "sentence\tlabel", "label\tcontent"])
def test_sst2_in_either_order_of_columns(folder, header):
    rows = [("1", 'a "good film'), ("0", "bad"), ("1", "good")]
    cells = [row if header.startswith("label") else row[::-1] for row in rows]
    text = "\r\n".join([header, *("\t".join(row) for row in cells), ""])
    write(folder / "SST-2/train.tsv", text)
    write(folder / "SST-2/dev.tsv", text)
    arrays = read("sst2", vocabulary=9, max_length=3).arrays()
    # a, "good, film, bad, good
    assert arrays.train["x"].tolist() == [[1, 2, 3], [4, PAD, PAD], [5, PAD, PAD]]
    assert arrays.train["y"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("wikitext2", ["wikitext-2/train.txt", "wikitext-2/test.txt"]),
        ("shakespeare", ["shakespeare/by_speaker.jsonl.xz"]),
        ("ag_news", ["ag_news_csv/train.csv", "ag_news_csv/test.csv"]),
        ("sst2", ["SST-2/train.tsv", "SST-2/dev.tsv"]),
    ],
)
def test_missing_files_are_named(folder, name, files):
    # and what a model is to be like is known without them
    assert read(name).offers["length"] in (20, 64, 128)
    wanted = "\n".join(f"  {folder / file}" for file in files)
    assert refused(name) == (
        f"data: {name} is not in {folder}. Allowed: a folder with the files\n{wanted}\n"
        "Hint: set another folder by data.root or the environment variable RAYFL_DATA"
    )


# the user's own texts

CSV = "text,label,who\ngood film,pos,ann\nbad film,neg,bob\ngood,pos,ann\nbad bad,neg,ann\nfilm,pos,bob\n"


def test_own_texts_of_a_csv(folder):
    train, test = write(folder / "a.csv", CSV), write(folder / "b.csv", "label,text\nneg,bad\n")
    data = read("text", train=train, test=test, tokenizer=a_tokenizer(folder), max_length=5)
    arrays = data.arrays()
    assert arrays.train["x"].tolist() == [
        [2, 5, 7, 3, PAD],
        [2, 6, 7, 3, PAD],
        [2, 5, 3, PAD, PAD],
        [2, 6, 6, 3, PAD],
        [2, 7, 3, PAD, PAD],
    ]
    assert arrays.train["y"].tolist() == [1, 0, 1, 0, 1] and arrays.test["y"].tolist() == [0]
    assert data.offers["class_names"] == ("neg", "pos") and data.offers["ids"] == 8 and data.offers["classes"] == 2


def test_a_tokenizer_truncates_within_its_marks_and_warns(folder):
    train = write(folder / "a.csv", CSV)
    data = read("text", train=train, test=train, tokenizer=a_tokenizer(folder), max_length=3)
    arrays = data.arrays()
    assert arrays.train["x"].tolist() == [[2, 5, 3], [2, 6, 3], [2, 5, 3], [2, 6, 3], [2, 7, 3]]
    assert arrays.notes == ("data.max_length: 6 of 10 texts of text are longer than 3 tokens and were truncated",)


def test_a_length_without_a_place_for_tokens_is_refused(folder):
    train = write(folder / "a.csv", "a,b,label\n" + "good,bad,1\nbad,good,0\n" * 5)
    pairs = {"text": "a", "text_pair": "b", "max_length": 3}
    data = read("text", train=train, test=train, tokenizer=a_tokenizer(folder), **pairs)
    assert message(data.arrays) == (
        "data.max_length: 3 is not valid. Allowed: at least 4, because the tokenizer adds 3 special tokens"
    )


def test_own_texts_in_pairs_of_json_lines(folder):
    rows = [{"a": "good film", "b": "bad", "n": 1}, {"a": "bad", "b": "good", "n": 0}]
    train = write(folder / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    data = read(
        "text", train=train, test=train, text="a", text_pair="b", label="n", tokenizer=a_tokenizer(folder), max_length=8
    )
    arrays = data.arrays()
    assert arrays.train["x"].tolist() == [[2, 5, 7, 3, 6, 3, PAD, PAD], [2, 6, 3, 5, 3, PAD, PAD, PAD]]
    assert arrays.train["y"].tolist() == [1, 0]


def test_the_last_texts_of_a_user_are_held_out(folder):
    train = write(folder / "a.csv", CSV)
    arrays = read("text", train=train, user="who", test_fraction=0.4, units="characters").arrays()
    assert arrays.users.tolist() == [0, 1, 0] and arrays.test_users.tolist() == [0, 1]
    assert arrays.train["y"].tolist() == [1, 0, 1] and arrays.test["y"].tolist() == [0, 1]


def test_a_part_of_every_class_is_held_out(folder):
    train = write(folder / "a.tsv", "text\tlabel\n" + "".join(f"text {i}\t{i % 2 + 1}\n" for i in range(20)))
    arrays = read("text", train=train).arrays()
    assert np.bincount(arrays.train["y"]).tolist() == [8, 8] and np.bincount(arrays.test["y"]).tolist() == [2, 2]


def test_own_texts_for_language_models(folder):
    train = write(folder / "a.csv", CSV)
    fields = {"train": train, "test": train, "user": "who", "max_length": 3, "vocabulary": 3}
    data = read("text", task="next_token", **fields)
    arrays = data.arrays()
    # film 1, bad 2, good 3; unknown 4, begin 5, end 6
    assert arrays.train["x"].tolist()[:3] == [[5, 3, 1, 6], [5, 2, 1, 6], [5, 3, 6, PAD]]
    assert arrays.users.tolist() == [0, 1, 0, 0, 1] and data.offers["classes"] == 7
    masked = read("text", task="masked_lm", mask_rule="bert", loss_on="masked", **fields)
    assert masked.offers["ids"] == 8 and masked.prepare.rule == "bert" and masked.goal.loss_on == "masked"


def test_leafs_files(folder):
    def leaf(users):
        return json.dumps(
            {"users": [*users], "num_samples": [len(of["y"]) for of in users.values()], "user_data": users}
        )

    train = write(
        folder / "train.json", leaf({"u": {"x": ["ab", "ba"], "y": ["a", "b"]}, "v": {"x": ["bb"], "y": ["b"]}})
    )
    test = write(folder / "test.json", leaf({"v": {"x": ["ab"], "y": ["a"]}}))
    arrays = read("text", train=train, test=test, user="user", units="characters", max_length=3).arrays()
    assert arrays.train["x"].tolist() == [[1, 2, PAD], [2, 1, PAD], [2, 2, PAD]] and arrays.train["y"].tolist() == [
        0,
        1,
        1,
    ]
    assert arrays.users.tolist() == [0, 0, 1] and arrays.test_users.tolist() == [1]
    spaces = write(folder / "spaces.json", leaf({"u": {"x": ["ab", "ba"], "y": ["a", " "]}}))
    arrays = read("text", train=spaces, test=spaces, units="characters", max_length=3).arrays()
    assert sorted(arrays.train["y"].tolist()) == [0, 1]
    lists = write(folder / "lists.json", leaf({"u": {"x": [["7", "good"], ["8", "bad"]], "y": [1, 0]}}))
    arrays = read("text", train=lists, test=lists, text="1").arrays()
    assert arrays.train["x"][:, 0].tolist() == [1, 2] and arrays.train["y"].tolist() == [1, 0]


MISTAKES = {
    "no such file": (
        {"train": "nowhere.csv"},
        "data.train: the file 'nowhere.csv' does not exist. Allowed: an existing file",
    ),
    "a file of another kind": (
        {"train": ("a.txt", "good")},
        "data.train: '{}/a.txt' is not valid. Allowed: a file that ends in .csv, .tsv, .jsonl, .json",
    ),
    "no such column": (
        {"train": ("a.csv", CSV), "label": "class"},
        "data.label: {}/a.csv has no column 'class'. Allowed: one of its columns 'text', 'label', 'who'",
    ),
    "an empty text": (
        {"train": ("a.csv", CSV + '" ",pos,ann\n')},
        "data.text: {}/a.csv has empty cells (first: row 6; 1 in all). Allowed: rows without empty cells",
    ),
    "an empty class": (
        {"train": ("a.csv", "text,label\ngood,1\nbad,\n")},
        "data.label: {}/a.csv has empty cells (first: row 2; 1 in all). Allowed: rows without empty cells",
    ),
    "no class": (
        {"train": ("a.jsonl", '{"text": "good", "label": null}\n')},
        "data.label: {}/a.jsonl has empty cells (first: row 1; 1 in all). Allowed: rows without empty cells",
    ),
    "null as a text": (
        {"train": ("a.jsonl", '{"text": null, "label": 1}\n')},
        "data.text: {}/a.jsonl has empty cells (first: row 1; 1 in all). Allowed: rows without empty cells",
    ),
    "no text at all": (
        {"train": ("a.csv", "text,label\n")},
        "data.text: {}/a.csv has no rows. Allowed: rows without empty cells",
    ),
    "a class without a text": (
        {"train": ("a.csv", "text,label\ngood,0\nbad,2\n")},
        "data.label: the classes are [0, 2], but there is no text of class 1. Allowed: words, or integers starting at "
        "0 or 1 without gaps",
    ),
    "a class of the test set alone": (
        {"train": ("a.csv", CSV), "test": ("b.csv", "text,label\ngood,so\n")},
        "data.test: the class 'so' is not in the training set. Allowed: neg, pos",
    ),
    "semicolons between columns": (
        {"train": ("a.csv", "text;label\ngood;so\n")},
        "data.text: {}/a.csv has no column 'text'. Allowed: one of its columns 'text;label'. Hint: separate columns by "
        "commas in a .csv file, by tabs in a .tsv file",
    ),
    "too little to hold out": (
        {"train": ("a.csv", "text,label\ngood,so\n")},
        "data.test_fraction: 0.2 of 1 texts gives 1 for training and 0 for testing. Allowed: at least one for each, or "
        "a file data.test",
    ),
    "no tokenizer": (
        {"train": ("a.csv", CSV), "tokenizer": "nowhere"},
        "data.tokenizer: the folder 'nowhere' does not exist. Allowed: an existing folder",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_own_texts(folder, name):
    given, message = MISTAKES[name]
    files = {k: write(folder / v[0], v[1]) if isinstance(v, tuple) else v for k, v in given.items()}
    assert refused("text", **files) == message.format(folder)


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", '{"text": \n'), ("a.json", '{"users": ["u"]}'), ("a.csv", "")])
def test_files_that_cannot_be_read(folder, name, text):
    message = refused("text", train=write(folder / name, text))
    assert message.startswith(f"data.train: '{folder / name}' cannot be read (") and "Allowed: UTF-8" in message


def test_tokenizers_that_cannot_be_read(folder):
    train = write(folder / "a.csv", CSV)
    (folder / "empty").mkdir()
    assert refused("text", train=train, tokenizer=str(folder / "empty")) == (
        f"data.tokenizer: the folder '{folder}/empty' has no tokenizer. Allowed: a folder with tokenizer.json, with "
        "vocab.json and merges.txt, or with vocab.txt"
    )
    path = write(folder / "broken/tokenizer.json", "{}")
    message = refused("text", train=train, tokenizer=str(folder / "broken"))
    assert message.startswith(f"data.tokenizer: {path!r} cannot be read (Exception: ")


def test_a_tokenizer_below_the_data_folder(folder):
    write(folder / "SST-2/train.tsv", "label\tsentence\n1\tgood\n")
    write(folder / "SST-2/dev.tsv", "label\tsentence\n1\tbad\n")
    a_tokenizer(folder)
    assert read("sst2", tokenizer="small", max_length=3).arrays().test["x"].tolist() == [[2, 6, 3]]
    assert refused("sst2", tokenizer="large") == (
        f"data.tokenizer: the folder 'large' does not exist. Allowed: an existing folder, or a folder below {folder}"
    )


def test_padding_counts_only_where_there_is_a_token_for_it(folder):
    write(folder / "gpt/vocab.json", '{"a": 0, "b": 1}')
    write(folder / "gpt/merges.txt", "#version: 0.2\n")
    assert raised(lambda: read("shakespeare", tokenizer="gpt", padding="token").offers, ConfigError) == (
        "data.padding: the tokenizer has no padding token. Allowed: ignored"
    )


# token cache


def counted(monkeypatch):
    """Count how often texts are tokenised."""
    calls, made = [], base.TextData._tokenised
    monkeypatch.setattr(base.TextData, "_tokenised", lambda self: calls.append(1) or made(self))
    return calls


def entries(folder):
    return sorted((folder / "cache").glob("*"))


def test_texts_are_tokenised_once(folder, monkeypatch):
    calls, train = counted(monkeypatch), write(folder / "a.csv", CSV)
    first = read("text", train=train).arrays()
    # another process, a copy of the file, and settings that change no token
    monkeypatch.setattr(cache, "_recent", {})
    again = read("text", train=write(folder / "other/a.csv", CSV), order="stored").arrays()
    assert len(calls) == 1 and len(entries(folder)) == 1
    assert np.array_equal(first.train["x"], again.train["x"])


@pytest.mark.parametrize("change", ["text", "setting", "tokenizer", "version"])
def test_other_content_is_tokenised_again(folder, monkeypatch, change):
    calls, train, tokenizer = counted(monkeypatch), write(folder / "a.csv", CSV), a_tokenizer(folder)
    read("text", train=train, tokenizer=tokenizer).arrays()
    fields = {}
    if change == "text":
        write(folder / "a.csv", CSV + "good,neg,ann\n")
    elif change == "setting":
        fields = {"max_length": 10}
    elif change == "tokenizer":
        path = folder / "small/tokenizer.json"
        write(path, path.read_text().replace('"good"', '"well"'))
    else:
        monkeypatch.setattr(base, "VERSION", -1)
    read("text", train=train, tokenizer=tokenizer, **fields).arrays()
    assert len(calls) == 2


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b[:200] + b"?" + b[201:], lambda b: b""])
def test_a_damaged_entry_is_replaced(folder, monkeypatch, damage):
    calls, train = counted(monkeypatch), write(folder / "a.csv", CSV)
    first = read("text", train=train).arrays()
    [path] = entries(folder)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    monkeypatch.setattr(cache, "_recent", {})
    again = read("text", train=train).arrays()
    assert len(calls) == 2 and np.array_equal(first.train["x"], again.train["x"])
    assert entries(folder) == [path] and path.read_bytes() == good


def test_a_folder_without_write_access_is_ignored(folder, monkeypatch):
    write(folder / "file", "")
    monkeypatch.setenv("RAYFL_CACHE", str(folder / "file"))
    assert len(read("text", train=write(folder / "a.csv", CSV), test_fraction=0.4).arrays().train["y"]) == 3


def test_the_folder_of_the_cache(monkeypatch):
    monkeypatch.delenv("RAYFL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(cache.cache_folder()) == "/somewhere/rayfl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ann")
    assert str(cache.cache_folder()) == "/home/ann/.cache/rayfl"


def test_cached_arrays_are_read_only(folder):
    corpus = read("text", train=write(folder / "a.csv", CSV)).corpus()
    with pytest.raises(ValueError, match="read-only"):
        corpus.train.tokens.ids[0] = 1


OWN = """
import numpy as np
from rayfl.data.text.base import LabelledText, Texts
from rayfl.data.text.encoders import frequent_words

class Mine(LabelledText):
    def sources(self):
        return []

    def read(self):
        texts = Texts(["a b", "b a"], y=np.array({y}))
        return texts, texts, {{}}

    def encoder(self, train):
        return frequent_words(train.texts, str.split, 2, ends=False)

    @property
    def token_task(self):
        return self.labelled_task(self.encoder(self.read()[0]).vocabulary, 2)
"""


def test_tokens_of_changed_code_are_not_found_in_the_cache(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    for y in ([0, 1], [1, 0]):
        write(folder / "own_texts_here.py", OWN.format(y=y))
        monkeypatch.delitem(sys.modules, "own_texts_here", raising=False)
        importlib.invalidate_caches()
        data = importlib.import_module("own_texts_here").Mine(max_length=3)
        assert data.arrays().train["y"].tolist() == y
        monkeypatch.setattr(cache, "_recent", {})
