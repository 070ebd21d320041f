"""Settings, and what a launcher says, from somebody who means harm: refused in a few clear lines, or plain text.

Files are read in a process of 512 MiB and 5 s of a core.
"""

import os
from dataclasses import asdict

import hostile_checkpoints as checkpoints
import pytest
from confined import outcomes

from mpitrain import keep
from mpitrain.comm import arrival
from mpitrain.comm.launcher import announced, check_size, is_first, one_host
from mpitrain.config import OPTIONS, Config, load, parse, write
from mpitrain.errors import ConfigError, LaunchError, UserError


def is_clear(text):
    """A message of a few lines that a terminal shows as they are."""
    lines = text.split("\n")
    return 0 < len(lines) <= 5 and all(line.isprintable() for line in lines) and len(text) < 1_500


FILES = {
    "nested lists": b"lr = " + b"[" * 30_000,
    "nested tables": b"lr = " + b"{a=" * 15_000,
    "a key of 30,000 parts": b"a." * 30_000 + b"a = 1",
    "a key of 30,000 parts with blanks": b"a .\t" * 15_000 + b"a = 1",
    "many keys of 999 parts": b"".join(b"a." * 999 + b"b%d = 1\n" % n for n in range(32)),
    "a key of 30,000 quoted parts": b"''." * 20_000 + b"a = 1",
    "a line that only str.splitlines would cut": ("'\u2028'." + "a." * 900).encode() * 30 + b"a = 1",
    "a table of 30,000 parts": b"[" + b"a." * 30_000 + b"a]",
    "20,000 tables": b"[[a]]\n" * 10_000,
    "many settings": b"".join(b"a%d=1\n" % n for n in range(7_000)),
    "a number of 60,000 digits": b"steps = " + b"9" * 60_000,
    "a fraction of 60,000 digits": b"lr = 10." + b"9" * 60_000,
    "a large exponent": b"lr = 1e999999999",
    "infinity": b"lr = inf",
    "minus infinity": b"clip = -inf",
    "not a number": b"lr = nan",
    "a date": b"steps = 2026-01-01",
    "a time": b"lr = 07:32:00",
    "a list": b"layers = [1, 2]",
    "a table": b"[layers]\nn = 1",
    "truth for a number": b"layers = true",
    "text for a number": b'layers = "2"',
    "a number for text": b"data = 1",
    "a number for truth": b"tied = 1",
    "a key twice": b"lr = 1\nlr = 2",
    "a key twice, spelled otherwise": b"seq_len = 1\nseq-len = 2",
    "a look-alike": "l\u0430yers = 2".encode(),
    "a quoted look-alike": '"l\u0430yers" = 2'.encode(),
    "an invisible sign": '"layers\u200b" = 2'.encode(),
    "a key from right to left": '"\u202esreyal" = 2'.encode(),
    "an escape sequence in a key": b'"\\u001b[2J\\u001b]0;x\\u0007" = 1',
    "an escape sequence in a value": b'dtype = "\\u001b[2J\\r"',
    "a raw escape sequence": b'data = "\x1b[2J"',
    "a zero byte": b'data = "a\\u0000b"',
    "a surrogate": b'data = "\\ud800"',
    "text of 5,000 letters": b'data = "' + b"a" * 5_000 + b'"',
    "no text": b'run = ""',
    "blanks": b'run = " "',
    "UTF-16": "lr = 1".encode("utf-16"),
    "no UTF-8": b'data = "\xff"',
    "a pickle": b"\x80\x04cposix\nsystem\n.",
    "YAML": b'!!python/object/apply:os.system ["touch owned"]',
    "an attribute": b"__class__ = 1",
    "a method": b"__post_init__ = 1",
    "a property": b"routing = 1",
    "another config": b'config = "other.toml"',
    "code for a model": b"model = \"__import__('os').system('touch owned')\"",
    "a path for a schedule": b'schedule = "../../schedule.py"',
    "a dtype of NumPy": b'dtype = "object"',
    "a module for an optimizer": b'optimizer = "os.system"',
    "a format for a router": b'router = "{0.__class__.__init__.__globals__}"',
    "a place for offload": b'offload_to = "ftp:x"',
    "code for what is offloaded": b'offload = "__import__"',
    "a size with code": b'memory_budget = "1GiB;touch owned"',
}


def test_files_of_settings_that_are_not_plain_are_refused_in_a_few_clear_lines(tmp_path):
    assert len(FILES) >= 20
    calls = []
    for number, content in enumerate(FILES.values()):
        path = tmp_path / f"{number}.toml"
        path.write_bytes(content)
        calls.append(["settings", str(path)])
    for name, outcome in zip(FILES, outcomes("hostile_calls", calls, tmp_path), strict=True):
        assert (outcome.end, outcome.kind) == ("refused", "ConfigError"), (name, outcome)
        assert is_clear(outcome.text), (name, outcome)
    assert "owned" not in os.listdir(tmp_path)


def test_what_is_no_file_of_settings_is_not_waited_for_or_read_to_its_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    with open(tmp_path / "hole", "wb") as file:
        file.truncate(1 << 40)
    paths = [
        tmp_path,
        tmp_path / "pipe",
        tmp_path / "link",
        tmp_path / "hole",
        "/dev/zero",
        "/dev/stdin",
        "",
        "\0",
        "nothing",
    ]
    for path, outcome in zip(
        paths, outcomes("hostile_calls", [["settings", str(path)] for path in paths], tmp_path), strict=True
    ):
        assert outcome.kind == "ConfigError", (path, outcome)
        assert is_clear(outcome.text), (path, outcome)


TEXTS = [
    *(
        "{0.__class__}",
        "{config.__init__.__globals__}",
        "%s%n%x",
        "%(x)s",
        "$(touch owned)",
        "`touch owned`",
        "; touch owned",
    ),
    *(
        "__import__('os').system('touch owned')",
        "${IFS}",
        "~root",
        "../../../etc",
        "-rf",
        "--resume",
        "\u202eabc",
        "'''",
    ),
    *("!!python/object", "<script>", "\\", "\\N{BULLET}", "C:\\x", "a\nb", "\x7f", '"""'),
]


@pytest.mark.parametrize("value", TEXTS)
def test_text_stays_text(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    found = Config(data=value, run=value)
    assert (found.data, found.run) == (value, value)
    write(found, str(tmp_path / "config.toml"))
    assert load(str(tmp_path / "config.toml")) == found
    if not value.startswith("--"):
        assert parse(["--run", value]).run == value
    assert os.listdir(tmp_path) == ["config.toml"]


VALUES = [
    *(None, True, False, 0, -1, 1, 1 << 62, 10**30, -(10**400), 0.5, 1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "x",
        "\x1b[2J",
        "x" * 5_000,
        "\0",
        "\ud800",
        "1",
        "nan",
        "__import__('os')",
        "latest",
        "/",
        [],
        [[]],
        {},
        {"a": 1},
    ),
]
"""What JSON can hold in the place of a setting."""


@pytest.mark.parametrize("name", OPTIONS)
def test_a_saved_setting_of_any_kind_is_taken_or_refused(name):
    refused = []
    for value in VALUES:
        try:
            found = parse([], {name: value})
        except ConfigError as error:
            refused.append(str(error))
        else:
            assert type(getattr(found, name)) in (OPTIONS[name].kind, type(None)), (name, value)
    assert all(map(is_clear, refused)), refused


@pytest.mark.parametrize("beside", ["a file of settings", "none"])
def test_a_checkpoint_with_settings_of_any_kind_is_taken_or_refused(tmp_path, beside):
    folder = checkpoints.make(tmp_path)
    if beside != "none":  # which wins, and is compared with what was saved
        write(Config(steps=3), str(tmp_path / "config.toml"))
    saved = asdict(Config(steps=3))
    whole = checkpoints.read(folder)
    taken, refused = 0, []
    for name in (*keep.MUST_STAY, "steps", "loss_scaling", "config"):
        for value in VALUES:
            if isinstance(value, float) and value not in (0.5, 1e308):
                continue
            whole["scalars"]["config"] = value if name == "config" else {**saved, name: value}
            checkpoints.write(folder, dict(whole))
            try:
                keep.settings_of([], folder)
                taken += 1
            except UserError as error:
                refused.append(str(error))
    assert taken > 10
    assert len(refused) > 100
    assert all(map(is_clear, refused)), refused


def test_numbers_that_a_checkpoint_brings_besides_are_checked(tmp_path):
    text = tmp_path / "text"
    text.write_text("".join(f"{n} bottles of milk on the wall.\n" for n in range(200)))
    run = tmp_path / "run"
    flags = "--model gpt-tiny --layers 1 --batch 2 --sample-length 0 --eval-every 0 --dtype float16".split()
    (first,) = outcomes(
        "hostile_calls",
        [["train", *flags, "--steps", "9", "--stop-after", "1", "--data", str(text), "--run", str(run)]],
    )
    assert first.end == "returned", first
    folder = run / "checkpoints" / "step-00000001"
    good = checkpoints.read(folder)
    scaler = good["scalars"]["scaler"]
    changes = [{"updates": -1}, {"updates": 10**30}, {"updates": "1"}, {"tokens": True}, {"data": None}, {"scaler": {}}]
    changes += [
        {"data": {"sha256": "\x1b[2J"}},
        {"scaler": {**scaler, "scale": 1e308}},
        {"scaler": {**scaler, "clean": -1}},
    ]
    for change in changes:
        checkpoints.write(folder, {**good, "scalars": {**good["scalars"], **change}})
        (outcome,) = outcomes(
            "hostile_calls", [["train", "--run", str(run), "--resume", "latest", "--stop-after", "2"]]
        )
        assert outcome.end == "refused", (change, outcome)
        assert is_clear(outcome.text), (change, outcome)


# -------------------------------------------------------------------------------------------------------- the launcher

LAUNCHED = [
    *(
        "",
        " ",
        "-1",
        "0x8",
        "1e3",
        "8.0",
        "8;touch owned",
        "$(touch owned)",
        "`id`",
        "eight",
        "\u00b2",
        "\u0668",
        "\uff18",
        "9" * 5_000,
    ),
    *("8\n9", "8 9", "1_0", "+8", "nan", "inf", "{0}", "%d", "None", "\x1b[2J"),
]


@pytest.mark.parametrize("value", LAUNCHED)
def test_what_a_launcher_says_is_a_number_or_nothing(value):
    names = [
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMI_SIZE",
        "MV2_COMM_WORLD_SIZE",
        "PMIX_RANK",
        "PMI_RANK",
    ]
    names += ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"]
    environ = {**dict.fromkeys(names, value), "SLURM_STEP_ID": value}
    assert announced(environ) is None
    assert is_first(environ)
    assert not one_host(environ)
    check_size(environ, 1)


@pytest.mark.parametrize("value", [value for value in LAUNCHED if value])
def test_a_number_of_ranks_that_is_none_is_refused(value):
    with pytest.raises(LaunchError) as caught:
        check_size({"MPITRAIN_NP": value}, 1)
    assert is_clear(str(caught.value))


def test_a_note_of_another_user_does_not_silence_a_job(tmp_path, monkeypatch):
    """The name under which ranks agree who speaks can be guessed."""
    note = tmp_path / "mpitrain-start"
    assert arrival._is_ours(str(note))  # gone already: whoever made it has spoken
    note.touch()
    assert arrival._is_ours(str(note))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not arrival._is_ours(str(note))
