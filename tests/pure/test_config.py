"""Settings: from flags, files and Python, to a valid Config or one message that helps."""

import os
import re
import sys
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.assemble import sizes_of
from mpitrain.catalog import MODELS
from mpitrain.config import OPTIONS, Config, load, parse, parse_first, usage, wants_help, write
from mpitrain.config_rules import check_layout, check_memory
from mpitrain.errors import ConfigError
from mpitrain.options import Interval, _toml, show


def test_without_flags_the_default_run_is_the_mini_model_for_its_budget():
    c = parse([])
    assert (c.model, c.layers, c.width, c.heads, c.seq_len) == ("gpt-mini", 2, 128, 4, 64)
    assert (c.batch, c.lr, c.beta1, c.beta2, c.weight_decay, c.clip, c.warmup) == (16, 2.5e-3, 0.9, 0.99, 0.1, 1, 0.03)
    assert (c.steps, c.budget) == (None, 255.0)
    assert parse(["--steps", "7"]).budget is None


def test_a_named_model_gives_sizes_that_flags_override():
    assert parse(["--model", "gpt2"]).width == MODELS["gpt2"]["width"] == 768
    c = parse(["--layers=3", "--model=gpt2"])
    assert (c.layers, c.heads) == (3, 12)
    assert Config(model="gpt2", layers=3) == c


def test_flags_win_over_the_file_and_of_two_flags_the_later_one(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('lr = 0.5\nbatch = 8\nseq-len = 9\ndata = "a b"\n')
    c = parse(["--batch", "2", "--config", str(path), "--batch", "4"])
    assert (c.lr, c.batch, c.seq_len, c.data) == (0.5, 4, 9, "a b")


def test_another_schedule_leaves_the_options_of_the_one_before_behind(tmp_path):
    """Else a run of an interleaved pipeline could go on in no other before it is told that --chunks 1 means none."""
    file = tmp_path / "run.toml"
    file.write_text('pp = 2\nschedule = "interleaved"\nchunks = 2\nmicrobatches = 2\n')
    assert parse(["--config", str(file)]).chunks == 2
    assert parse(["--config", str(file), "--schedule", "1f1b"]).chunks is None
    assert parse(["--config", str(file), "--schedule", "interleaved"]).chunks == 2


def test_a_model_or_a_budget_among_the_flags_replaces_what_the_file_says_of_it(tmp_path):
    path = tmp_path / "run.toml"
    write(Config(model="gpt-tiny", layers=7, steps=9), str(path))
    assert load(str(path)).layers == 7
    assert parse(["--config", str(path), "--model", "gpt2"]).layers == 12
    c = parse(["--config", str(path), "--budget", "50"])
    assert (c.layers, c.steps, c.budget) == (7, None, 50)
    assert parse(["--config", str(path), "--steps", "11"]).steps == 11


def test_a_scale_that_nothing_uses_is_refused_but_not_where_older_runs_wrote_it_down(tmp_path):
    older = tmp_path / "older.toml"
    older.write_text("loss_scale = 65536.0\nloss_scale_window = 1000\n")
    assert load(str(older)) == parse(["--config", str(older)]) == Config()
    saved = {"loss_scale": 65536.0, "loss_scale_window": 1000, "loss_scaling": "static"}
    assert parse([], saved) == Config(loss_scaling="static")
    with pytest.raises(ConfigError, match="--loss-scale 65536 is for --loss-scaling dynamic and static"):
        parse(["--config", str(older), "--loss-scale", "65536"])
    older.write_text("loss_scale = 1024.0")
    with pytest.raises(ConfigError, match="--loss-scale 1024 is for --loss-scaling dynamic and static"):
        load(str(older))


def test_another_loss_scaling_takes_the_scale_of_the_one_before_away():
    saved = {"dtype": "float16", "loss_scale": 1024.0, "loss_scale_window": 9}
    assert parse(["--loss-scaling", "dynamic"], saved).first_scale == 1024.0
    assert parse(["--loss-scaling", "blocks"], saved).loss_scale is None
    assert parse(["--loss-scaling", "static", "--loss-scale", "8"], saved).first_scale == 8.0


def test_dropless_and_a_capacity_replace_each_other_from_level_to_level(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("experts = 4\ncapacity_factor = 1.5\n")
    assert parse(["--config", str(path), "--dropless"]).routing.capacity_factor is None
    path.write_text("experts = 4\ndropless = true\n")
    assert parse(["--config", str(path), "--capacity-factor", "2"]).routing.capacity_factor == 2
    with pytest.raises(ConfigError, match="--dropless and --capacity-factor 2"):
        parse(["--config", str(path), "--capacity-factor", "2", "--dropless"])


@pytest.mark.parametrize("flags", [["--ep", "4"], ["--microbatches", "32"]])
def test_flags_of_a_run_that_goes_on_need_not_be_whole_by_themselves(flags):
    go_on = ["--run", "runs/a", "--resume", "latest", "--timeout", "7"]
    c = parse_first([*flags, *go_on])
    assert (c.run, c.resume, c.timeout) == ("runs/a", "latest", 7)
    for alone in (flags, [*flags, *go_on[:2]]):
        with pytest.raises(ConfigError):
            parse_first(alone)
    with pytest.raises(ConfigError, match="--ep x"):
        parse_first([*go_on, "--ep", "x"])


def test_the_budget_becomes_steps_once():
    c = Config(budget=60).fixed(3563)
    assert (c.steps, c.budget) == (3563, None)
    with pytest.raises(ConfigError, match="--warmup 500: must be from 0 to the number of steps, 300"):
        Config(warmup=500).fixed(300)


def test_a_switch_is_said_by_its_own_flags():
    assert parse(["--tied"]).tied
    assert not parse(["--tied", "--untied"]).tied
    assert parse(["--deterministic"]).deterministic
    assert not parse(["--deterministic", "--no-deterministic"]).deterministic


def test_numbers_are_read_strictly_and_negative_ones_are_values():
    assert parse(["--steps", "+5"]).steps == 5
    assert parse(["--lr", "1e-3", "--dropout", ".5", "--clip", "2."]) == Config(lr=1e-3, dropout=0.5, clip=2)
    assert isinstance(parse(["--clip", "2"]).clip, float)
    for word in ("1_0", "0x10", "١", " 1", "1 ", "1e2", "", "True", "1.0", "9" * 5000):
        with pytest.raises(ConfigError, match="must be a whole number"):
            parse(["--steps", word])
    for word in ("nan", "inf", "-inf", "1_0", "1e999", "-1e-3", "١", "1e", "."):
        with pytest.raises(ConfigError, match=re.escape(f"--lr {show(word)}: must be a number from 0 to 10")):
            parse(["--lr", word])


def test_a_config_cannot_be_changed_and_a_changed_copy_is_checked_again():
    c = Config()
    with pytest.raises(FrozenInstanceError):
        c.lr = 1
    with pytest.raises(ConfigError, match="--lr -1"):
        replace(c, lr=-1)


def test_numbers_from_numpy_are_numbers():
    np = pytest.importorskip("numpy")
    c = Config(steps=np.int64(5), lr=np.float32(0.5))
    assert (type(c.steps), c.steps, type(c.lr), c.lr) == (int, 5, float, 0.5)


# ---------------------------------------------------------------------------------------------------- the file of a run


def test_written_settings_are_read_back_as_an_equal_config(tmp_path):
    path = tmp_path / "a run" / "config.toml"
    for c in (
        Config(),
        Config(
            data='sp ace/ü "quote" \\ \n\x7f\x01 é', run="a#b='c'", lr=1e-05, clip=1e6, tied=True, steps=3, warmup=3
        ),
        Config(save_every=5, dp=3, eval_every=0, log_every=2, seed=2**63 - 1, weight_decay=0.1 + 0.2),
    ):
        write(c, str(path))
        assert load(str(path)) == c
    assert not list(path.parent.glob("*.tmp"))


def test_what_belongs_to_one_start_is_not_written():
    c = Config(stop_after=5, resume="latest", run="r")
    assert "stop_after" not in c.to_toml()
    assert "resume" not in c.to_toml()
    assert c == Config(run="r")


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=40))
def test_any_text_survives_the_file(text):
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    assert tomllib.loads(f"x = {_toml(text)}") == {"x": text}


@given(st.floats(allow_nan=False))
def test_any_number_survives_the_file(value):
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    read = tomllib.loads(f"x = {_toml(value)}")["x"]
    assert (type(read), read) == (float, value)


def test_settings_replace_a_regular_file_only(tmp_path):
    pipe = tmp_path / "config.toml"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="not a regular file"):
        write(Config(), str(pipe))
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == [pipe.name]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--run .*file/run: cannot be written: Not a directory"):
        write(Config(), str(tmp_path / "file" / "run" / "config.toml"))


# ------------------------------------------------------------------------------------------------------------ the table


def test_every_option_is_a_field_and_stands_in_the_help():
    text = usage("train.py")
    for option in OPTIONS.values():
        assert f"  {option.flag}" in text
        assert option.default is not None or option.unset
        assert option.off.startswith("--") == (option.kind is bool)
    assert max(map(len, text.splitlines())) <= 100
    assert wants_help(["--lr", "1", "-h"])
    assert not wants_help(["--lr", "1"])


def test_the_flags_that_other_tools_build_on_exist():
    flags = {option.flag for option in OPTIONS.values()} | {"--config"}
    assert flags >= set(
        "--model --layers --width --heads --seq-len --batch --microbatches --steps --budget --lr --warmup "
        "--weight-decay --clip --dropout --seed --dtype --data --run --eval-every --log-every --dp --deterministic "
        "--config --reducer --save-every --stop-after --resume --timeout --start-timeout --optimizer --momentum "
        "--beta1 --beta2 --tied --gelu --sample-length --bucket-mib".split()
    )


def test_intervals_say_their_ends():
    assert str(Interval(0, 1, below=True)) == "from 0 to below 1"
    assert str(Interval(0, 5, above=True)) == "above 0 to 5"
    assert [x in Interval(0, 1, below=True) for x in (0, 0.999, 1, float("nan"))] == [True, True, False, False]
    assert [x in Interval(0, 1, above=True) for x in (0, 1)] == [False, True]


# ---------------------------------------------------------------------------------------------------- messages, in full


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--bacth", "4"], "--bacth: no such option.  Did you mean --batch?  --help lists all."),
        (["--device", "gpu"], "--device gpu: must be one of cpu, cuda.  Did you mean cuda?"),
        (["--seq_len", "4"], "--seq_len: no such option.  Did you mean --seq-len?  --help lists all."),
        (["-batch", "4"], "-batch: no such option.  Did you mean --batch?  --help lists all."),
        (["--bat", "4"], "--bat: no such option.  Did you mean --batch?  --help lists all."),
        (["--qqqqq"], "--qqqqq: no such option.  --help lists all."),
        (["run"], "run: a word that belongs to no option; options are written --name value.  --help lists all."),
        ([""], "'': a word that belongs to no option; options are written --name value.  --help lists all."),
        (["--layers"], "--layers: its value is missing; it must be a whole number from 1 to 1000."),
        (["--layers", "--lr", "1"], "--layers: its value is missing; it must be a whole number from 1 to 1000."),
        (["--layers", "two"], "--layers two: must be a whole number from 1 to 1000."),
        (["--layers="], "--layers '': must be a whole number from 1 to 1000."),
        (["--dropout", "1"], "--dropout 1: must be a number from 0 to below 1."),
        (
            ["--dtype", "float23"],
            "--dtype float23: must be one of float32, float64, float16, bfloat16.  Did you mean float32?",
        ),
        (["--tied=yes"], "--tied=yes: takes no value; write --tied or --untied."),
        (["--data", " "], "--data ' ': must be UTF-8 text of 1 to 4096 characters."),
        (
            ["--width", "130"],
            "--width 130 is not divisible by --heads 4: all heads must have the same size.  Try --width 128.",
        ),
        (
            ["--model", "llama-mini", "--heads", "3"],
            "--width 128 is not divisible by --heads 3: all heads must have the same size.  Try --width 126"
            " --kv-heads 1.",
        ),
        (
            ["--heads", "4", "--kv-heads", "3"],
            "--heads 4 is not divisible by --kv-heads 3: every head of keys and values serves as many heads of"
            " queries.  Try --kv-heads 2.",
        ),
        (
            ["--model", "llama-mini", "--width", "132"],
            "--width 132 in --heads 4: rotary positions turn pairs of elements, so each head needs an even number of"
            " them.  Try --width 128.",
        ),
        (
            ["--microbatches", "3"],
            "--batch 16 is not divisible by --microbatches 3: all micro-batches must have the same size.  "
            "Try --batch 15 or --microbatches 2.",
        ),
        (
            ["--steps", "5", "--budget", "9"],
            "--steps 5 and --budget 9: give one of the two; the budget only finds the number of steps.",
        ),
        (
            ["--warmup", "1.5"],
            "--warmup 1.5: must be a share from 0 to below 1, or a whole number of steps from 1.",
        ),
        (["--resume", "latest"], "--resume latest: needs --run DIR, the folder whose newest checkpoint is meant."),
    ],
)
def test_what_is_wrong_is_said_in_full(argv, message):
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"layers = 0", "FILE: layers = 0: must be a whole number from 1 to 1000."),
        (b"layers = true", "FILE: layers = true: must be a whole number from 1 to 1000."),
        (b"layers = 2.0", "FILE: layers = 2.0: must be a whole number from 1 to 1000."),
        (b'layers = "2"', 'FILE: layers = "2": must be a whole number from 1 to 1000.'),
        (b"lr = nan", "FILE: lr = nan: must be a number from 0 to 10."),
        (b"tied = 1", "FILE: tied = 1: must be true or false."),
        (b"data = 1", "FILE: data = 1: must be UTF-8 text of 1 to 4096 characters."),
        (b'data = "a\\u0000"', 'FILE: data = "a\\u0000": must be UTF-8 text of 1 to 4096 characters.'),
        (b"layer = 2", "FILE: layer: no such setting.  Did you mean layers?  --help lists all."),
        (b'config = "x"', "FILE: config: no such setting.  --help lists all."),
        (b"[lr]\npeak = 1", "FILE: lr is a table; it must be a number from 0 to 10, at the top level."),
        (b"seq_len = 1\nseq-len = 2", "FILE: seq-len stands twice, with '-' and with '_'; keep one."),
        (b'data = "\xff"', "--config FILE: byte 8 is not UTF-8, as a TOML file must be."),
        (b"#" * (2**16 + 1), "--config FILE: has 65537 bytes; at most 65536 are allowed."),
        (b"a." * 1001 + b"a = 1", "--config FILE: has a line with more than 1000 dots, which is no setting."),
        (b"lr = " + b"[" * 9999, "--config FILE: is nested too deeply; settings are lines like layers = 2."),
    ],
)
def test_what_is_wrong_in_a_file_names_file_and_key(tmp_path, content, message):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    for read in (lambda: parse(["--config", str(path)]), lambda: load(str(path))):
        with pytest.raises(ConfigError) as caught:
            read()
        assert str(caught.value) == message.replace("FILE", str(path))


def test_a_file_that_is_not_toml_says_where(tmp_path):
    path = tmp_path / "run.toml"
    where = re.escape(f"--config {path}: is not TOML: ")
    for content in (b"lr = 1\nbatch", b"lr = 1\nlr = 2", b"steps = " + b"9" * 5000):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=where + ".*(line 2|document|digits)"):
            load(str(path))


def test_a_file_of_settings_must_be_a_regular_file(tmp_path):
    for path, words in [
        (tmp_path, "not a regular file"),
        ("/dev/zero", "not a regular file"),
        ("/no/x", "No such file"),
    ]:
        with pytest.raises(ConfigError, match=words):
            parse(["--config", str(path)])


def test_values_are_shown_on_one_short_line():
    assert show("a\nb") == "'a\\nb'"
    assert show("\udcff") == "'\\udcff'"
    assert show("ü/x") == "ü/x"
    assert len(show("x" * 5000)) < 110
    assert show("/long" * 30 + "/run.toml").endswith("/long/run.toml")
    assert "/run.toml (5009 characters)" in show("/long" * 1000 + "/run.toml")


# ------------------------------------------------------------------------------------------------ what takes the ranks


def test_a_batch_must_divide_over_the_ranks_and_their_micro_batches():
    check_layout(Config(batch=24, microbatches=4), 3)
    with pytest.raises(
        ConfigError, match=r"--batch 16 is not divisible by 12 \(--dp 3 x --microbatches 4\).*--batch 12"
    ):
        check_layout(Config(batch=16, microbatches=4), 3)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 4},
        {"tp": 4, "kv_heads": 2},
        {"tp": 2, "kv_heads": 2},
        {"cp": 4},
        {"cp": 4, "cp_attention": "ulysses"},
        {"cp": 2, "cp_attention": "ulysses", "kv_heads": 2},
        {"cp": 64, "cp_attention": "rsa"},
        {"cp": 2, "tp": 4, "sequence_parallel": True},
    ],
)
def test_a_layout_that_divides_everything_is_accepted(sizes):
    check_layout(Config(**sizes), 1)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tp": 3}, r"--heads 4 is not divisible by --tp 3"),
        ({"heads": 8, "kv_heads": 4, "tp": 8}, None),
        ({"heads": 12, "width": 96, "kv_heads": 6, "tp": 4}, r"--kv-heads 6 and --tp 4: one of the two"),
        ({"cp": 3, "cp_attention": "ulysses"}, r"4 heads of queries and 4 of keys a rank of --tp.*--cp 3.*ring"),
        ({"cp": 2, "tp": 2, "kv_heads": 2, "cp_attention": "ulysses"}, r"2 heads of queries and 1 of keys"),
        ({"cp": 64}, r"--seq-len 64 is not divisible by 128: --cp 64 \(ring.*Try --seq-len 128"),
        ({"cp": 3}, r"--seq-len 64 is not divisible by 6.*Try --seq-len 66"),
        ({"cp": 3, "cp_attention": "rsa"}, r"--seq-len 64 is not divisible by 3: --cp 3\.  Try --seq-len 63"),
        (
            {"tp": 4, "seq_len": 62, "sequence_parallel": True},
            r"--seq-len 62 is not divisible by 4: .*Try --seq-len 64",
        ),
        ({"tp": 4, "seq_len": 62}, None),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes, text):
    if text is None:
        check_layout(Config(**sizes), 1)
        return
    with pytest.raises(ConfigError, match=text):
        check_layout(Config(**sizes), 1)


def test_heads_of_queries_are_a_multiple_of_those_of_keys():
    with pytest.raises(ConfigError, match="--heads 4 is not divisible by --kv-heads 3"):
        Config(kv_heads=3)


def test_a_model_that_cannot_fit_is_refused_and_one_that_may_is_not():
    c = Config(layers=1000, width=65536, heads=64)
    with pytest.raises(ConfigError, match="GiB") as caught:
        check_memory(c, 12 * c.layers * c.width**2, 8, 0, 64 * 2**30, 8)
    assert len(str(caught.value).splitlines()) <= 5
    check_memory(Config(), 470_528, 8, 0, 2 * 2**30, 8)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--hidden 7", "--hidden 7 .*Try --hidden 8"),
        ("--width 96 --heads 3 --kv-heads 3 --tp 3", "--hidden 256 .*Try --hidden 255"),
    ],
)
def test_hidden_units_that_ranks_do_not_divide_are_told_by_their_flag(flags, words):
    config = parse(["--model", "llama-tiny", "--tp", "2", *flags.split()])
    with pytest.raises(ConfigError, match=words):
        sizes_of(config, 300)
