"""The compiled module by itself: whatever it is given, it computes or it raises; it never crashes.

`mpitrain.kernels.compiled` hands in nothing that does not fit, but a mistake there must not become a wild write.
"""

import subprocess
import sys

import numpy as np
import pytest

_compiled = pytest.importorskip("mpitrain.kernels._compiled", reason="mpitrain was built without a C compiler")

SHAPE = (1, 2, 5, 3)
KEYS = (1, 2, 4, 3)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def good():
    """Arguments of every function that are right; the shapes are those of rows of 6, or (b, h, s, d) for attention.

    A name may go on after the function's with what it is given: halves come with room for two rows of each operand.
    """
    x, v, r = zeros(4, 6), zeros(6), zeros(4, 1)
    hashes, targets = np.zeros(4, np.uint64), np.zeros(4, np.int64)
    (grad, q, y, dq), (k, values, dk, dv) = ([zeros(*shape) for _ in range(4)] for shape in (SHAPE, KEYS))
    queries, columns = zeros(1, 2, 5), np.arange(4)
    rows, mask = np.zeros((1, 2, 5), np.uint64), np.ones((1, 1, 5, 4), bool)
    scratch = np.zeros(max(_compiled.attention_scratch(5, 4, 3, 4, back) for back in (0, 1)), np.uint8)
    setting = [0, 0.5, mask, rows, columns, 7, 1.5, scratch, zeros(1, 2, 5 * 4), 0, None, np.zeros((1, 5), np.int64)]
    choices = np.array([[0, -1, 2], [3, 1, -1]])
    half, brain = zeros(4, 6, dtype=np.float16), zeros(4, 6, dtype=np.uint16)
    images, filters, seen = zeros(2, 5, 4, 6), zeros(8, 3, 2, 3), zeros(2, 3, 3, 8)  # in two groups
    sizes = [2, 5, 4, 3, 4, 2, 3, 2, *(2, 1), *(1, 0), *(1, 1)]
    pool = [2, 5, 4, 6, 1, 1, 3, 2, *(2, 1), *(1, 0), *(1, 1)]
    largest = zeros(2, 3, 3, 6)
    rooms = [np.zeros(_compiled.convolution_scratch(back, 4, *sizes), np.uint8) for back in (0, 1)]
    return {
        "convolution_scratch": [0, 4, *sizes],
        "conv2d": [images, filters, zeros(8), seen, 0, rooms[0], *sizes],
        "conv2d_filters": [images, seen, filters.copy(), 1, rooms[1], *sizes],
        "max_pool2d": [images, largest, np.zeros(largest.shape, np.uint8), *pool],
        "max_pool2d_backward": [largest, np.zeros(largest.shape, np.uint8), images, *pool],
        "sum_rows": [x, v, v.copy(), None],
        "sum_rows of halves": [half, v, v.copy(), zeros(12)],
        "gelu": [0, x, v, x.copy(), x.copy(), None],
        "gelu of halves": [0, half, v, half.copy(), half.copy(), zeros(36)],
        "gelu_backward": [x, x.copy(), x.copy(), v, v.copy(), None],
        "gelu_backward of bfloats": [brain, brain.copy(), brain.copy(), v, v.copy(), zeros(36)],
        "residual": [x, x.copy(), v, hashes, 7, 1.5, x.copy(), None],
        "residual of halves": [half, half.copy(), v, hashes, 7, 1.5, half.copy(), zeros(36)],
        "residual_norm": [
            *(x, x.copy(), v, hashes, 7, 1.5, v.copy(), v.copy(), 1e-5),
            *(x.copy(), x.copy(), r, r.copy(), None),
        ],
        "residual_norm of bfloats": [
            *(brain, brain.copy(), v, hashes, 7, 1.5, v.copy(), v.copy(), 1e-5),
            *(brain.copy(), brain.copy(), r, r.copy(), zeros(48)),
        ],
        "dropout": [x, hashes, 7, 1.5, x.copy(), None],
        "dropout of halves": [half, hashes, 7, 1.5, half.copy(), zeros(24)],
        "layer_norm": [x, v, v.copy(), 1e-5, x.copy(), r, r.copy(), None],
        "layer_norm of bfloats": [brain, v, v.copy(), 1e-5, brain.copy(), r, r.copy(), zeros(24)],
        "layer_norm_backward": [x, x.copy(), x.copy(), r, r.copy(), v, x.copy(), v.copy(), v.copy(), zeros(12), None],
        "layer_norm_backward of halves": [
            *(half, half.copy(), half.copy(), r, r.copy(), v, half.copy(), v.copy(), v.copy(), zeros(12), zeros(48)),
        ],
        "rms_norm": [x, v, 1e-5, x.copy(), r, None],
        "rms_norm of bfloats": [brain, v, 1e-5, brain.copy(), r, zeros(24)],
        "residual_rms_norm": [x, x.copy(), v, hashes, 7, 1.5, v.copy(), 1e-5, x.copy(), x.copy(), r, None],
        "residual_rms_norm of halves": [
            *(half, half.copy(), v, hashes, 7, 1.5, v.copy(), 1e-5, half.copy(), half.copy(), r, zeros(48)),
        ],
        "rms_norm_backward": [x, x.copy(), x.copy(), r, v, x.copy(), v.copy(), v.copy(), None],
        "rms_norm_backward of bfloats": [
            *(brain, brain.copy(), brain.copy(), r, v, brain.copy(), v.copy(), v.copy(), zeros(48)),
        ],
        "swiglu": [x, x.copy(), x.copy(), None],
        "swiglu of halves": [half, half.copy(), half.copy(), zeros(6)],
        "swiglu_backward": [x, x.copy(), x.copy(), x.copy(), x.copy(), None],
        "swiglu_backward of bfloats": [brain, *(brain.copy() for _ in range(4)), zeros(10)],
        "rotary": [x, 3, zeros(2, 1), zeros(2, 1), x.copy(), None],
        "rotary_pack": [zeros(4, 4), zeros(4, 4), 1, zeros(2, 1), zeros(2, 1), zeros(4, 8)],
        "rotary_unpack": [zeros(4, 8), 1, zeros(2, 1), zeros(2, 1), zeros(4, 4), zeros(4, 4)],
        "rotary of halves": [half, 3, zeros(2, 1), zeros(2, 1), half.copy(), zeros(24)],
        "softmax": [x, x.copy(), None],
        "softmax of halves": [half, half.copy(), zeros(24)],
        "softmax_backward": [x, x.copy(), x.copy(), None],
        "softmax_backward of bfloats": [brain, brain.copy(), brain.copy(), zeros(36)],
        "cross_entropy": [x, targets, -100, zeros(4), None],
        "cross_entropy of halves": [half, targets, -100, zeros(4), zeros(12)],
        "cross_entropy_backward": [1.0, x, targets, zeros(4), -100, x.copy(), None],
        "cross_entropy_backward of halves": [1.0, half, targets, zeros(4), -100, half.copy(), zeros(24)],
        "row_sum": [targets, x, zeros(3, 6), None],
        "row_sum of halves": [targets, half, zeros(3, 6), zeros(12)],
        "combine": [x, zeros(2, 3), choices, zeros(2, 6), None],
        "combine of halves": [half, zeros(2, 3), choices, half[:2].copy(), zeros(24)],
        "combine_backward": [zeros(2, 6), x, zeros(2, 3), choices, x.copy(), zeros(2, 3), None],
        "combine_backward of bfloats": [
            *(brain[:2].copy(), brain, zeros(2, 3), choices, brain.copy(), zeros(2, 3), zeros(24)),
        ],
        "jitter": [x, hashes, 0.1, x.copy(), None],
        "jitter of halves": [half, hashes, 0.1, half.copy(), zeros(24)],
        "adamw": [v, v.copy(), v.copy(), v.copy(), 0.9, 0.1, 0.99, 0.01, 1e-8, 0.1, 1.0],
        "sum_of_squares": [x, None],
        "sum_of_squares of bfloats": [brain, zeros(1)],
        "attention_scratch": [5, 4, 3, 4, 1],
        "attention": [queries, q, k, values, y, *setting],
        "attention_backward": [queries, grad, q, k, values, y, dq, dk, dv, *setting],
        "widen": [0, zeros(8, dtype=np.uint16), zeros(8)],
        "narrow": [0, zeros(8), zeros(8, dtype=np.uint16)],
    }


OPTIONAL = {("gelu", 2), ("residual", 2), ("residual", 3), ("layer_norm_backward", 1)}
OPTIONAL |= {("residual_norm", 2), ("residual_norm", 3), ("conv2d", 2)}
OPTIONAL |= {("residual_rms_norm", 2), ("residual_rms_norm", 3), ("rms_norm_backward", 1)}
OPTIONAL |= {("attention", at) for at in (7, 8, 9, 13, 15, 16)}
OPTIONAL |= {("attention_backward", at) for at in (11, 12, 13, 17, 19, 20)}
WRITTEN = {
    "sum_rows": [1, 2],
    "gelu": [3, 4],
    "gelu_backward": [2, 3, 4],
    "residual": [6],
    "residual_norm": [9, 10, 11, 12],
    "dropout": [4],
    "layer_norm": [4, 5, 6],
    "layer_norm_backward": [6, 7, 8, 9],
    "rms_norm": [3, 4],
    "residual_rms_norm": [8, 9, 10],
    "rms_norm_backward": [5, 6, 7],
    "swiglu": [2],
    "swiglu_backward": [3, 4],
    "rotary": [4],
    "rotary_pack": [5],
    "rotary_unpack": [4, 5],
    "softmax": [1],
    "softmax_backward": [2],
    "cross_entropy": [3],
    "cross_entropy_backward": [5],
    "row_sum": [2],
    "combine": [3],
    "combine_backward": [4, 5],
    "jitter": [3],
    "adamw": [0, 2, 3],
    "conv2d": [3, 5],
    "conv2d_filters": [2, 4],
    "max_pool2d": [1, 2],
    "max_pool2d_backward": [2],
    "attention": [0, 4, 12, 13],
    "attention_backward": [6, 7, 8, 16],
    "widen": [2],
    "narrow": [2],
}
HALVES = {("attention", at) for at in (1, 2, 3, 4)} | {("attention_backward", at) for at in range(1, 9)}
DECIDES = {
    "sum_rows of halves": 0,
    "cross_entropy of halves": 0,
    "row_sum of halves": 1,
    "sum_of_squares of bfloats": 0,
}
"""The one array that may be of any precision, as the others are what they are for all."""
FUNCTIONS = pytest.mark.parametrize("name", good())
REFUSALS = (TypeError, ValueError, BufferError)


def function(name):
    return getattr(_compiled, name.split()[0])


def written(name):
    """Numbers of the arguments that are written, the room for halves among them."""
    room = [len(good()[name]) - 1] if " of " in name else []
    return [*WRITTEN.get(name.split()[0], ()), *room]


def arrays_of(name):
    return [i for i, value in enumerate(good()[name]) if isinstance(value, np.ndarray)]


def refuses(name, at, value):
    arguments = good()[name]
    arguments[at] = value
    with pytest.raises(REFUSALS):
        function(name)(*arguments)


def test_this_file_knows_every_function():
    functions = {name for name in dir(_compiled) if not name.startswith("_")}
    assert functions == {*(name.split()[0] for name in good()), "levels", "use"}


@FUNCTIONS
def test_right_arguments_are_taken(name, compiled_level):
    function(name)(*good()[name])
    for other, at in OPTIONAL:
        if other == name.split()[0]:
            arguments = good()[name]
            arguments[at] = None
            function(name)(*arguments)


@FUNCTIONS
def test_missing_arguments_are_refused(name):
    arguments = good()[name]
    for count in range(len(arguments)):
        with pytest.raises(TypeError, match=f"argument {count}: is missing|argument"):
            function(name)(*arguments[:count])


@FUNCTIONS
def test_none_and_strangers_are_refused_where_an_array_belongs(name):
    for at in arrays_of(name):
        for value in (3, "text", object(), [1.0], b"bytes"):
            refuses(name, at, value)
        if (name.split()[0], at) not in {*OPTIONAL, ("gelu_backward", 3)}:
            refuses(name, at, None)


@FUNCTIONS
def test_strangers_are_refused_where_a_number_belongs(name):
    for at, value in enumerate(good()[name]):
        if isinstance(value, int | float):
            for wrong in (None, "text", np.zeros(3)):
                refuses(name, at, wrong)


@FUNCTIONS
def test_another_dtype_is_refused(name):
    for at in arrays_of(name):
        array = good()[name][at]
        if at == DECIDES.get(name):
            continue
        for dtype in (np.float16, np.float64, np.int32, np.complex64, np.uint8, ">f4", "S4", bool, np.uint16, np.int64):
            wrong = np.zeros(array.shape, dtype)
            same_kind = wrong.dtype.kind in "iu" and array.dtype.kind in "iu" and wrong.itemsize == array.itemsize
            taken = same_kind or (wrong.dtype == np.uint16 and (name, at) in HALVES)
            if wrong.dtype != array.dtype and not taken and len(arrays_of(name)) > 1:
                refuses(name, at, wrong)
    refuses("sum_of_squares", 0, zeros(3, dtype=np.int32))
    refuses("sum_of_squares", 0, zeros(3, dtype=np.longdouble))
    refuses("adamw", 0, np.zeros(6, [("a", "f4")]))


@FUNCTIONS
def test_another_length_is_refused(name):
    """One element more or less in any array but the one that says how many there are."""
    first = {"attention": 1, "attention_backward": 1, "row_sum": 2, "cross_entropy_backward": 1, "gelu": 1}
    first |= {"widen": 1, "narrow": 1}
    for at in arrays_of(name):
        array = good()[name][at]
        if at == first.get(name.split()[0], 0):
            continue
        if " of " in name and at == len(good()[name]) - 1:  # room for one row of each operand is enough
            rows = 1 if name.startswith("sum_of_squares") else 2
            refuses(name, at, np.zeros(array.size // rows - 1, array.dtype))
            function(name)(*good()[name][:at], np.zeros(array.size // rows, array.dtype))
            continue
        for change in (-1, 1) if array.dtype != np.uint8 else ():  # scratch may be longer
            flat = np.zeros(array.size + change, array.dtype)
            refuses(name, at, flat)
            refuses(name, at, flat.reshape(-1, 1) if array.ndim != 4 else flat.reshape(1, 1, 1, -1))
        refuses(name, at, np.zeros(0, array.dtype))


@FUNCTIONS
def test_gaps_and_misplaced_elements_are_refused(name):
    for at in arrays_of(name):
        array = good()[name][at]
        gapped = np.repeat(array, 2, axis=-1)[..., ::2]
        boolean = array.dtype == bool
        if array.shape[-1] > 1 and not boolean:
            refuses(name, at, gapped)
        if array.itemsize > 1:
            refuses(name, at, np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape))


@FUNCTIONS
def test_what_may_not_be_written_is_refused(name):
    for at in written(name):
        array = good()[name][at]
        array.flags.writeable = False
        refuses(name, at, array)


@pytest.mark.parametrize(
    "name", ["convolution_scratch", "conv2d", "conv2d_filters", "max_pool2d", "max_pool2d_backward"]
)
def test_windows_that_cannot_be_are_refused(name):
    """No size below 1, no window beyond the image, and nothing so large that bytes would not fit 63 bits."""
    first = len(good()[name]) - 14
    images, _, _, channels, filters, groups, kh, _, stride, _, padding, _, dilation, _ = range(first, first + 14)
    wrong = [(at, value) for at in range(first, first + 14) for value in (-1, 1 << 25, 1 << 62)]
    wrong += [(at, 0) for at in (channels, filters, groups, kh, stride, dilation)]
    wrong += [(kh, 8), (dilation, 4), (images, 1 << 24), (padding, 1 << 24)]
    if "pool" in name:
        wrong += [(padding, 2), (groups, 2), (kh, 257), (dilation, 2)]
    for at, value in wrong:
        arguments = good()[name]
        arguments[at] = value
        if name == "convolution_scratch" and at in (images, padding) and value == 1 << 24:
            continue  # few enough bytes, but no array has so many images
        with pytest.raises(REFUSALS):
            function(name)(*arguments)


def test_the_bias_of_gelu_is_left_out_with_its_scratch():
    grad, slope, dx, _, group, spare = good()["gelu_backward"]
    _compiled.gelu_backward(grad, slope, dx, None, group[:0], spare)
    refuses("gelu_backward", 3, None)


def test_numbers_that_are_no_row_or_column_are_refused():
    for wrong in (6, 7, 2**40, np.iinfo(np.int64).max):
        targets = np.array([0, 5, -100, wrong])
        refuses("cross_entropy", 1, targets)
        refuses("cross_entropy_backward", 2, targets)
    for wrong in (3, 2**40, np.iinfo(np.int64).max):
        refuses("row_sum", 0, np.array([0, 2, 1, wrong]))
    for wrong in (4, 2**40, np.iinfo(np.int64).max):
        refuses("combine", 2, np.array([[0, -1, 2], [3, wrong, -1]]))
        refuses("combine_backward", 3, np.array([[0, -1, 2], [3, wrong, -1]]))


THRESHOLDS = ("dropout", 2), ("residual", 4), ("residual_norm", 4), ("attention", 10), ("attention_backward", 14)


def test_thresholds_that_are_no_word_are_refused():
    for wrong in (-1, 2**32, 2**63, 1.5):
        for name, at in THRESHOLDS:
            arguments = good()[name]
            arguments[at] = wrong
            with pytest.raises((TypeError, ValueError, OverflowError)):
                function(name)(*arguments)


def test_attention_in_double_precision_takes_no_halves():
    for name in ("attention", "attention_backward"):
        twofold = [x.astype(np.float64) if getattr(x, "dtype", None) == np.float32 else x for x in good()[name]]
        twofold[-5] = np.zeros(_compiled.attention_scratch(5, 4, 3, 8, 1), np.uint8)
        function(name)(*twofold)
        for _, at in (place for place in HALVES if place[0] == name):
            with pytest.raises(TypeError, match=f"argument {at}: has another dtype"):
                function(name)(*twofold[:at], twofold[at].astype(np.uint16), *twofold[at + 1 :])


def test_attention_refuses_other_shapes():
    for name, by_query, by_key in (("attention", (1, 4), (2, 3)), ("attention_backward", (1, 2, 5, 6), (3, 4, 7, 8))):
        for shape, places in ((SHAPE, by_query), (KEYS, by_key)):
            for at in places:
                for i in range(4):  # another length of one dim, or none at all
                    for length in (0, shape[i] - 1, shape[i] + 1):
                        refuses(name, at, zeros(*shape[:i], length, *shape[i + 1 :]))
                refuses(name, at, zeros(*shape[1:]))
        mask, keys, scratch, scores = (7, 9, 12, 13) if name == "attention" else (11, 13, 16, 17)
        for shape in ((1, 1, 5, 5), (2, 1, 5, 4), (1, 3, 1, 1), (5, 4), (1, 1, 6, 4), (1, 1, 4, 5), (1, 1, 5, 0)):
            refuses(name, mask, np.ones(shape, bool))
        for wrong in ((1, 2, 19), (1, 2, 21), (2, 2, 20), (1, 1, 20), (1, 2, 4, 5), (2, 20), (1, 2, 0)):
            refuses(name, scores, zeros(*wrong))
        refuses(name, keys, np.arange(5))
        refuses(name, scratch, np.zeros(_compiled.attention_scratch(5, 4, 3, 4, name != "attention") - 1, np.uint8))
        with pytest.raises(ValueError, match="wants as many keys as queries"):
            function(name)(*good()[name][: mask - 2], 1, *good()[name][mask - 1 :])
    for at in range(3):
        for wrong in (-1, 2**31, 2**62):
            with pytest.raises(ValueError, match="out of range"):
                _compiled.attention_scratch(*[wrong if i == at else 3 for i in range(3)], 4, 1)


def test_levels_by_a_wrong_name_are_refused():
    for wrong in ((), ("numpy",), ("x86-64-v9",), (3,), (None,), ("baseline", "baseline")):
        with pytest.raises((TypeError, ValueError)):
            _compiled.use(*wrong)


FUZZ = """
import sys, time
import numpy as np
sys.path.insert(0, {folder!r})
from test_kernel_binding import _compiled, good

rng = np.random.default_rng({seed})
pick = lambda things: things[rng.integers(len(things))]
DTYPES = ["f4", "f8", "f2", "i4", "i8", "u8", "u2", "u1", "?", "c8", ">f4", "S3", "O"]

def strange(value):
    if rng.random() < 0.15:
        return pick([None, 0, -1, 7, 2**31, 2**63, -2**63, 1e300, float("nan"), "x", b"", [], {{}}, np.float32(3)])
    shape = tuple(int(n) for n in rng.integers(0, 7, rng.integers(0, 5)))
    if isinstance(value, np.ndarray) and rng.random() < 0.7:
        shape = tuple(max(0, n + int(rng.integers(-1, 2)) * int(rng.random() < 0.3)) for n in value.shape)
    dtype = value.dtype if isinstance(value, np.ndarray) and rng.random() < 0.6 else np.dtype(pick(DTYPES))
    array = np.zeros(shape, dtype)
    if dtype.kind in "iu" and rng.random() < 0.5:
        array[...] = rng.integers(-3 if dtype.kind == "i" else 0, 9, shape)
    for _ in range(rng.integers(0, 3)):
        if array.ndim:
            which = rng.integers(5)
            if which == 0: array = array[::-1]
            if which == 1: array = array.T
            if which == 2: array = array[..., ::2]
            if which == 3: array = np.broadcast_to(array, (2, *array.shape))
            if which == 4: array = array.reshape(-1)
    return array

levels, end, refused, taken = _compiled.levels(), time.monotonic() + {seconds}, 0, 0
while time.monotonic() < end:
    _compiled.use(pick(levels))
    name, arguments = pick(list(good().items()))
    if rng.random() < 0.3:  # all of double precision
        arguments = [a.astype(np.float64) if getattr(a, "dtype", None) == np.float32 else a for a in arguments]
    for _ in range(rng.integers(0, 3)):
        at = rng.integers(len(arguments))
        arguments[at] = strange(arguments[at])
    if rng.random() < 0.1:
        del arguments[rng.integers(len(arguments))]
    try:
        with np.errstate(all="ignore"):
            getattr(_compiled, name.split()[0])(*arguments)
        taken += 1
    except (TypeError, ValueError, BufferError, OverflowError):
        refused += 1
print(refused, taken)
"""


def fuzz(seconds, seed):
    code = FUZZ.format(folder=str(__file__).rpartition("/")[0], seconds=seconds, seed=seed)
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
    assert run.returncode == 0, run.stderr[-3000:]
    return [int(count) for count in run.stdout.split()]


def test_random_arguments_are_computed_or_refused():
    refused, taken = fuzz(1.5, seed=1)
    assert refused > 100
    assert taken > 100


@pytest.mark.slow
def test_many_random_arguments_are_computed_or_refused():
    refused, taken = fuzz(60, seed=2)
    assert refused + taken > 10_000
