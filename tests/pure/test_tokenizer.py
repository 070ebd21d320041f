"""Tokenizers: any text comes back, words that come one by one are told whole, and a bad file is refused by name."""

import json
import os
import random
import sys

import pytest

from mpitrain.data import tokenizer as tokenizers
from mpitrain.data import tokenizer_file
from mpitrain.data.tokenizer import END, Bytes, Tokenizer
from mpitrain.errors import ConfigError, DataError

library = pytest.importorskip("tokenizers", reason="needs the tokenizers library: the extra hf")

TEXT = "".join(f"def function_{n}(x):\n    return x + {n}  # grüße {n} 🎉\n" for n in range(60))
SHORT = ("", " ", "\n\n\n", "a", "naïve 世界 🎉🇩🇪", "\t x\r\n  y ", f"one{END}two", "\u0000\u200b\ufeff")
TEXTS = (*SHORT, "x" * 500, TEXT)
WORDS = 340  # of the tokenizer that is made of TEXT


@pytest.fixture(scope="module")
def words():
    return Tokenizer.trained([TEXT], WORDS)


def llama_like():
    """Words as a converted SentencePiece model has them: spaces are letters, and unknown letters are bytes."""
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    merges = [("▁", "a"), ("t", "h"), ("th", "e"), ("▁", "the")]
    every = letters + ["".join(pair) for pair in merges]
    special = [
        {"id": n, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
        for n, word in enumerate(letters[:3])
    ]
    return {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": True,
            "vocab": {word: n for n, word in enumerate(every)},
            "merges": [" ".join(pair) for pair in merges],
        },
    }


# --------------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back(words, text):
    for each in (words, Bytes()):
        tokens = each.encode(text)
        assert all(0 <= token < each.vocab_size for token in tokens)
        assert each.decode(tokens) == text


def test_a_trained_one_has_as_many_words_as_asked_for_bytes_first_and_one_special(words):
    assert words.vocab_size == WORDS
    assert words.special == {END: 0}
    assert words.encode(END) == [0]
    assert len({words.word(token) for token in range(WORDS)}) == WORDS
    assert len(words.encode(TEXT)) < len(TEXT.encode()) / 2.5


def test_the_same_text_makes_the_same_words(words):
    assert {Tokenizer.trained([TEXT], WORDS).text for _ in range(5)} == {words.text}


def test_a_text_without_pairs_makes_fewer_words():
    assert Tokenizer.trained(["ab"], 300).vocab_size == 257


def test_a_saved_file_is_read_back_and_a_folder_is_its_tokenizer_json(words, tmp_path):
    words.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        back = Tokenizer.read(path)
        assert (back.text, back.sha256, back.vocab_size) == (words.text, words.sha256, WORDS)
    assert tokenizers.of_run(tmp_path).sha256 == words.sha256
    assert tokenizers.of_run(tmp_path / "none") is None


def test_many_texts_at_once_are_each_by_itself(words):
    assert [tokens.tolist() for tokens in words.encode_all(TEXTS)] == [words.encode(text) for text in TEXTS]
    assert words.encode_all([]) == []


def test_what_is_for_other_models_is_left_out(words):
    """A template around a text, padding and cutting: a text is its words and nothing else."""
    held = json.loads(words.text)
    held["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    held["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": END,
    }
    held["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
    }
    other = Tokenizer(json.dumps(held))
    assert other.encode(TEXT[:200]) == words.encode(TEXT[:200])
    assert [tokens.tolist() for tokens in other.encode_all([TEXT, "x"])] == [words.encode(TEXT), words.encode("x")]


def test_words_of_a_converted_sentencepiece_model_are_those_of_the_library():
    held = llama_like()
    ours, theirs = Tokenizer(json.dumps(held)), library.Tokenizer.from_str(json.dumps({**held, "post_processor": None}))
    for text in ("the cat", "a 世 x", "the  the"):
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
    assert ours.vocab_size == len(held["model"]["vocab"])


def test_older_files_name_no_type_and_have_merges_as_texts(words):
    held = json.loads(words.text)
    del held["model"]["type"]
    held["model"]["merges"] = [" ".join(pair) for pair in held["model"]["merges"]]
    assert Tokenizer(json.dumps(held)).encode(TEXT) == words.encode(TEXT)


# ------------------------------------------------------------------------------------------------------- one by one


def told(words, tokens):
    stream = words.stream()
    return [stream.add(token) for token in tokens] + [stream.end()]


@pytest.mark.parametrize("text", [*TEXTS, "世界" * 40, "🎉" * 30 + "a"])
def test_words_one_by_one_make_the_same_text_and_no_half_letters(words, text):
    for each in (words, Bytes(), Tokenizer(json.dumps(llama_like()))):
        tokens = each.encode(text.replace("�", ""))
        parts = told(each, tokens)
        assert "".join(parts) == each.decode(tokens)
        assert not any("�" in part for part in parts)


def test_random_words_one_by_one_are_told_soon(words):
    """Also bytes that are no text: what is told is never taken back, and at most a few words wait."""
    draw = random.Random(3)
    for each in (words, Bytes()):
        for _ in range(20):
            tokens = [draw.randrange(each.vocab_size) for _ in range(120)]
            parts = told(each, tokens)
            whole = each.decode(tokens)
            assert len("".join(parts)) == pytest.approx(len(whole), rel=0.05)
            plain = [letter for letter in whole if letter != "�"]
            assert [letter for letter in "".join(parts) if letter != "�"] == plain
            assert len(parts[-1]) <= 24


# --------------------------------------------------------------------------------------------------------- refusals


def changed(held, path, value):
    """The same with something else in one place."""
    held = json.loads(json.dumps(held))
    *way, last = path
    place = held
    for key in way:
        place = place[key]
    place[last] = value
    return held


ADDED = {"id": WORDS, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
BAD = {
    "dropout": (("model", "dropout"), 0.1, "dropout 0.1"),
    "model": (("model", "type"), "Unigram", "model is Unigram"),
    "vocab": (("model", "vocab"), [["a", 1.0]], '"vocab"'),
    "number": (("model", "vocab", "zz"), 1 << 32, "word zz has the number 4294967296"),
    "negative": (("model", "vocab", "zz"), -1, "word zz has the number -1"),
    "text": (("model", "vocab", "zz"), "7", "word zz has the number 7"),
    "truth": (("model", "vocab", "zz"), True, "word zz has the number True"),
    "twice": (("model", "vocab", "zz"), 7, "same number, 7"),
    "long": (("model", "vocab", "z" * 5000), WORDS, "5,000 letters"),
    "merges": (("model", "merges"), {}, '"merges"'),
    "merge": (("model", "merges", 0), ["a"], "merge 0"),
    "foreign": (("model", "merges", 0), ["q", "é世"], "é世 is not among its words"),
    "unknown": (("model", "unk_token"), "<unk>", "unk_token <unk>"),
    "unknown unknown": (("model", "unk_token"), {}, "unk_token {}"),
    "prefix": (("model", "continuing_subword_prefix"), "##", "does not begin with ##"),
    "added": (("added_tokens",), [ADDED | {"id": 1 << 31}], "added token <x>"),
    "gap": (("added_tokens",), [ADDED | {"id": WORDS + 50, "special": True}], f"would be {WORDS}"),
    "empty": (("added_tokens",), [ADDED | {"content": ""}], "added token ''"),
    "normalizer": (("normalizer",), {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "Precompiled"),
    "replace": (("normalizer",), {"type": "Replace", "pattern": {"String": ""}, "content": "x"}, "Replace"),
    "pattern": (("normalizer",), {"type": "Replace", "pattern": {"Regex": "a*?"}, "content": "x"}, "Replace"),
    "grows": (("normalizer",), {"type": "Replace", "pattern": {"String": "a"}, "content": "x" * 99}, "Replace"),
    "nothing before": (("normalizer",), {"type": "Prepend", "prepend": ""}, "Prepend"),
    "length": (("pre_tokenizer",), {"type": "FixedLength", "length": 0}, "FixedLength"),
    "regex": (("pre_tokenizer",), {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}, "refuses it"),
    "decoder": (("decoder",), {"type": "Strip", "content": "a", "start": 10**8, "stop": 10**8}, "Strip"),
    "parts": (("normalizer",), {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 99}, "more than 64 parts"),
    "no part": (("normalizer",), "NFC", "normalizer NFC"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_taken_is_refused_by_name(words, name):
    path, value, said = BAD[name]
    with pytest.raises(DataError) as caught:
        Tokenizer(json.dumps(changed(json.loads(words.text), path, value)), "a/tokenizer.json")
    message = str(caught.value)
    assert said in message
    assert "a/tokenizer.json" in message
    assert len(message.splitlines()) <= 5


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"model": 3}', "[" * 100_000, '{"model": {"type": "BPE"}}'])
def test_what_is_no_tokenizer_is_refused(text):
    with pytest.raises(DataError, match="tokenizer x: "):
        Tokenizer(text, "x")


def test_files_that_are_none_are_refused(tmp_path, monkeypatch):
    (tmp_path / "latin").write_bytes(b"\xff")
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "tokenizer.json")
    monkeypatch.setattr(tokenizer_file, "LARGEST_FILE", 100)
    (tmp_path / "large").write_text("x" * 101)
    for name, said in (
        ("nothing", "No such file"),
        ("latin", "not UTF-8"),
        ("fifo", "not a regular file"),
        ("large", "101 bytes"),
    ):
        with pytest.raises(DataError, match=said):
            tokenizer_file.read(tmp_path / name)


def test_a_link_in_the_folder_of_a_run_is_not_followed(words, tmp_path):
    words.save(tmp_path / "elsewhere.json")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(DataError, match="is a link"):
        tokenizers.of_run(tmp_path / "run")


def test_what_the_library_did_not_foresee_is_a_message(words):
    class Panic(BaseException):
        pass

    def fails(*_, **__):
        raise Panic("index out\n of bounds\x07")

    broken = Tokenizer(words.text, "a.json")
    broken._words = type("Broken", (), {"encode": fails, "decode": fails})()
    with pytest.raises(DataError, match=r"a\.json: the tokenizers library refuses it: index out of bounds"):
        broken.encode("x")
    with pytest.raises(DataError, match="refuses it"):
        broken.decode([1])


def test_without_the_library_the_message_says_how_to_install_it(monkeypatch, words):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r'pip install "mpitrain\[hf\]"'):
        Tokenizer(words.text)
