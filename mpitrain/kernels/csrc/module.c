/* The Python module `mpitrain.kernels._compiled`: arrays are checked, then handed to the table of the chosen level.
 *
 * Arrays come by the buffer protocol, so neither building nor running needs NumPy's headers.  Whatever does not fit
 * (dtype, layout, length) is refused with an exception before any kernel runs; `mpitrain.kernels.compiled` never hands
 * in such a thing.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>
#ifdef MT_X86
#include <cpuid.h>
#endif
#include "table.h"

#define DECLARE(level)                                                     \
    extern const mt_table mt_table_float_##level, mt_table_double_##level; \
    extern const mt_halves mt_halves_any_##level;
DECLARE(baseline)
#ifdef MT_X86
DECLARE(v3)
DECLARE(v4)
#endif

typedef struct {
    const mt_table *single, *twofold;
    const mt_halves *halves;
} Level;

static const Level LEVELS[] = {
    {&mt_table_float_baseline, &mt_table_double_baseline, &mt_halves_any_baseline},
#ifdef MT_X86
    {&mt_table_float_v3, &mt_table_double_v3, &mt_halves_any_v3},
    {&mt_table_float_v4, &mt_table_double_v4, &mt_halves_any_v4},
#endif
};
enum { NUM_LEVELS = sizeof LEVELS / sizeof *LEVELS };

static const Level *chosen = &LEVELS[0]; /* the process's choice: kernels.select */

#ifdef MT_X86
/* What the compiler may use at x86-64-v3 besides vectors, by CPUID: compilers know different names for these. */
static int has_v3_scalars(void) {
    unsigned a, b, c, d;
    const unsigned fma = 1u << 12, movbe = 1u << 22, f16c = 1u << 29, bmi = 1u << 3, bmi2 = 1u << 8, lzcnt = 1u << 5;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (fma | movbe | f16c)) != (fma | movbe | f16c)) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b & (bmi | bmi2)) != (bmi | bmi2)) return 0;
    return __get_cpuid(0x80000001u, &a, &b, &c, &d) && (c & lzcnt);
}
#endif

static int runs_here(int level) {
#ifdef MT_X86
    __builtin_cpu_init();
#define HAS(feature) __builtin_cpu_supports(feature) /* by the processor, and saved by the operating system */
    if (level == 1) return HAS("avx2") && HAS("fma") && has_v3_scalars();
    if (level == 2)
        return runs_here(1) && HAS("avx512f") && HAS("avx512bw") && HAS("avx512dq") && HAS("avx512vl") &&
               HAS("avx512cd");
#undef HAS
#endif
    return level == 0;
}

/* ------------------------------------------------------------------------------------------------------- arguments */

enum { MOST = 16 };

/* The buffers of one call; released together. */
typedef struct {
    PyObject *const *args;
    Py_ssize_t count;
    Py_buffer buffers[MOST];
    int held;
    int failed;
    const Level *level; /* as chosen when the call came: another thread may choose while the lock is released */
    Py_ssize_t itemsize; /* of the reals, fixed by the first; 0 before */
    char half;           /* format of halves where those take the place of reals: 'e', or 'H' for bfloat16; else 0 */
    float *spare;        /* where halves are computed with, */
    len height;          /* so many rows at a time */
} Call;

static void *fail(Call *call, PyObject *kind, const char *text, int at) {
    if (!call->failed) PyErr_Format(kind, "argument %d: %s", at, text);
    call->failed = 1;
    return NULL;
}

/* An array of one of the kinds; itemsize 0: a half, or a number of the precision of the call. */
static Py_buffer *take(Call *call, int at, int flags, const char *kinds, Py_ssize_t itemsize) {
    if (call->failed) return NULL;
    if (at >= call->count) return fail(call, PyExc_TypeError, "is missing", at);
    Py_buffer *buffer = &call->buffers[call->held];
    if (PyObject_GetBuffer(call->args[at], buffer, flags | PyBUF_FORMAT)) {
        call->failed = 1;
        return NULL;
    }
    call->held++;
    const char *format = buffer->format ? buffer->format : "B";
    if (format[0] == '=' || format[0] == '@') format++;
    if (!itemsize) itemsize = format[0] == 'H' ? 2 : call->itemsize;
    if (!format[0] || !strchr(kinds, format[0]) || format[1] || buffer->itemsize != itemsize)
        return fail(call, PyExc_TypeError, "has another dtype", at);
    if ((uintptr_t)buffer->buf % (size_t)itemsize) return fail(call, PyExc_ValueError, "is not aligned", at);
    return buffer;
}

/* A contiguous array of `count` elements; -1 for any number. */
static void *array(Call *call, int at, Py_ssize_t count, int writable, const char *kinds, Py_ssize_t itemsize) {
    Py_buffer *buffer = take(call, at, PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0), kinds, itemsize);
    if (!buffer) return NULL;
    if (count >= 0 && buffer->len != count * itemsize) return fail(call, PyExc_ValueError, "has another length", at);
    return buffer->buf;
}

static int absent(Call *call, int at) { return at < call->count && call->args[at] == Py_None; }

/* Of float or double, as all the others of this call; or halves, as all the others. */
static void *reals(Call *call, int at, Py_ssize_t count, int writable) {
    if (call->failed) return NULL;
    if (!call->itemsize) {
        Py_buffer look;
        if (at >= call->count) return fail(call, PyExc_TypeError, "is missing", at);
        if (PyObject_GetBuffer(call->args[at], &look, PyBUF_STRIDES | PyBUF_FORMAT)) {
            call->failed = 1;
            return NULL;
        }
        call->itemsize = look.itemsize;
        if (look.itemsize == 2 && look.format) call->half = look.format[0] == 'e' ? 'e' : 'H';
        PyBuffer_Release(&look);
    }
    const char *kinds = call->half == 'e' ? "e" : call->half ? "H" : call->itemsize == 4 ? "f" : "d";
    return array(call, at, count, writable, kinds, call->itemsize);
}

static void *maybe_reals(Call *call, int at, Py_ssize_t count) {
    return absent(call, at) ? NULL : reals(call, at, count, 0);
}

/* What is never half: vectors of weights, statistics of rows, sums. */
static void *wides(Call *call, int at, Py_ssize_t count, int writable) {
    if (!call->half) return reals(call, at, count, writable);
    return array(call, at, count, writable, "f", sizeof(float));
}

static void *maybe_wides(Call *call, int at, Py_ssize_t count) {
    return absent(call, at) ? NULL : wides(call, at, count, 0);
}

/* Floats in which `operands` arrays of halves are computed with, some rows at a time; reals need none. */
static void spare(Call *call, int at, int operands, Py_ssize_t width) {
    if (!call->failed && at >= call->count) fail(call, PyExc_TypeError, "is missing", at);
    if (!call->half || call->failed) return;
    call->spare = array(call, at, -1, 1, "f", sizeof(float));
    if (call->failed) return;
    const Py_buffer *b = &call->buffers[call->held - 1];
    call->height = width ? b->len / b->itemsize / operands / width : 1;
    if (call->height < 1) fail(call, PyExc_ValueError, "is too short", at);
}

static uint64_t *maybe_hashes(Call *call, int at, Py_ssize_t count) {
    return absent(call, at) ? NULL : array(call, at, count, 0, "QL", 8);
}

static int64_t *integers(Call *call, int at, Py_ssize_t count) { return array(call, at, count, 0, "ql", 8); }

static double number(Call *call, int at) {
    if (!call->failed && at >= call->count) fail(call, PyExc_TypeError, "is missing", at);
    if (call->failed) return 0.0;
    const double value = PyFloat_AsDouble(call->args[at]);
    if (value == -1.0 && PyErr_Occurred()) call->failed = 1;
    return value;
}

static long long whole(Call *call, int at) {
    if (!call->failed && at >= call->count) fail(call, PyExc_TypeError, "is missing", at);
    if (call->failed) return 0;
    const long long value = PyLong_AsLongLong(call->args[at]);
    if (value == -1 && PyErr_Occurred()) call->failed = 1;
    return value;
}

/* A number that is compared with random words of 32 bits. */
static uint64_t word(Call *call, int at) {
    const long long value = whole(call, at);
    if (!call->failed && (value < 0 || value > 0xFFFFFFFFLL)) fail(call, PyExc_ValueError, "is no word of 32 bits", at);
    return (uint64_t)value;
}

/* (rows, width) of the array that the call holds last, seen as a matrix of its last dim. */
static Py_ssize_t last_dim(Call *call) {
    const Py_buffer *b = &call->buffers[call->held - 1];
    return b->ndim ? b->shape[b->ndim - 1] : 1;
}

static Py_ssize_t elements(Call *call) {
    const Py_buffer *b = &call->buffers[call->held - 1];
    return b->len / b->itemsize;
}

static PyObject *finish(Call *call, PyObject *result) {
    for (int i = 0; i < call->held; i++) PyBuffer_Release(&call->buffers[i]);
    if (call->failed) {
        Py_XDECREF(result);
        return NULL;
    }
    if (result) return result;
    Py_RETURN_NONE;
}

static const mt_table *table(const Call *call) {
    return call->itemsize == 8 ? call->level->twofold : call->level->single;
}

/* A long kernel lets other threads run; for a short one the change of hands would cost more than it takes. */
#define WITHOUT_LOCK(count, ...)            \
    do {                                    \
        if ((count) > 8192) {               \
            Py_BEGIN_ALLOW_THREADS          \
            __VA_ARGS__;                    \
            Py_END_ALLOW_THREADS            \
        } else {                            \
            __VA_ARGS__;                    \
        }                                   \
    } while (0)

#define METHOD(name) static PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t count)
#define CALL                                      \
    (void)self;                                   \
    Call c = {.args = args, .count = count, .level = chosen}

/* --------------------------------------------------------------------------------------------------- blocks of rows */

enum { WRITES = 2 };

/* Some rows of a call's arrays.  Reals are one block and stay where they lie.  Halves come in blocks that stay in cache:
 * what is read is widened into the spare floats, what is written lies there until it is narrowed at the block's end. */
typedef struct {
    const Call *call;
    len all, width; /* rows of the arrays, and their length */
    len first, rows;
    float *free;
    int writes;
    struct {
        const float *from;
        uint16_t *to;
    } written[WRITES];
} Block;

static void begin(Block *b) {
    const len left = b->all - b->first;
    b->rows = b->call->half && b->call->height < left ? b->call->height : left;
    b->free = b->call->spare;
    b->writes = 0;
}

static float *take_rows(Block *b) {
    float *rows = b->free;
    b->free += b->call->height * b->width;
    return rows;
}

static void widen_rows(const Block *b, const uint16_t *from, float *to) {
    const mt_halves *halves = b->call->level->halves;
    (b->call->half == 'e' ? halves->half_to_float : halves->bfloat_to_float)(from, to, b->rows * b->width);
}

static void narrow_rows(const Block *b, const float *from, uint16_t *to) {
    const mt_halves *halves = b->call->level->halves;
    (b->call->half == 'e' ? halves->float_to_half : halves->float_to_bfloat)(from, to, b->rows * b->width);
}

/* The block's rows of an array that is read. */
static const void *rows_in(Block *b, const void *x) {
    if (!b->call->half || !x) return x;
    float *rows = take_rows(b);
    widen_rows(b, (const uint16_t *)x + b->first * b->width, rows);
    return rows;
}

/* The block's rows of an array that is written. */
static void *rows_out(Block *b, void *y) {
    if (!b->call->half) return y;
    float *rows = take_rows(b);
    b->written[b->writes].from = rows;
    b->written[b->writes++].to = (uint16_t *)y + b->first * b->width;
    return rows;
}

/* The block's numbers of an array that has one a row. */
static void *of_rows(const Block *b, const void *x) { return b->call->half ? (float *)x + b->first : (void *)x; }

/* Round what was written last, for who reads it in the same block. */
static void round_rows(Block *b) {
    if (!b->call->half) return;
    float *rows = (float *)b->written[b->writes - 1].from;
    uint16_t *to = b->written[--b->writes].to;
    narrow_rows(b, rows, to);
    widen_rows(b, to, rows);
}

static int end(Block *b) {
    while (b->writes) {
        b->writes--;
        narrow_rows(b, b->written[b->writes].from, b->written[b->writes].to);
    }
    b->first += b->rows;
    return b->first < b->all;
}

/* Do something for each block `b` of so many rows of so many elements, with its READ(x), WRITE(y), BESIDE(one a row). */
#define BY_BLOCKS(num_rows, length, ...)                             \
    do {                                                             \
        Block b = {.call = &c, .all = (num_rows), .width = (length)}; \
        WITHOUT_LOCK(b.all * b.width, do {                           \
            begin(&b);                                               \
            __VA_ARGS__;                                             \
        } while (end(&b)));                                          \
    } while (0)
#define READ(x) rows_in(&b, x)
#define WRITE(y) rows_out(&b, y)
#define BESIDE(x) of_rows(&b, x)

/* --------------------------------------------------------------------------------------------------------- kernels */

/* Arrays called `spare` are floats for halves, None for reals. */

METHOD(sum_rows) { /* x, sum, group, spare */
    CALL;
    const void *x = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c), rows = width ? n / width : 0;
    void *sum = wides(&c, 1, width, 1), *group = wides(&c, 2, width, 1);
    spare(&c, 3, 1, width);
    if (!c.failed) BY_BLOCKS(rows, width, table(&c)->sum_rows(READ(x), sum, group, b.first, b.rows, rows, width));
    return finish(&c, NULL);
}

METHOD(gelu) { /* exact, x, bias or None, y, slope, spare */
    CALL;
    const int exact = (int)whole(&c, 0);
    const void *x = reals(&c, 1, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c);
    const void *bias = maybe_wides(&c, 2, width);
    void *y = reals(&c, 3, n, 1), *slope = reals(&c, 4, n, 1);
    const Py_ssize_t length = bias ? width : 1; /* without a bias the rows of a block are one */
    spare(&c, 5, 3, length);
    if (!c.failed && n)
        BY_BLOCKS(n / length, length, {
            const len rows = bias ? b.rows : 1;
            table(&c)->gelu(exact, READ(x), bias, WRITE(y), WRITE(slope), rows, b.rows * length / rows);
        });
    return finish(&c, NULL);
}

METHOD(gelu_backward) { /* grad, slope, dx, db or None, group, spare */
    CALL;
    const void *grad = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c);
    Py_ssize_t width = last_dim(&c);
    const void *slope = reals(&c, 1, n, 0);
    void *dx = reals(&c, 2, n, 1), *db = absent(&c, 3) ? NULL : wides(&c, 3, width, 1);
    void *group = wides(&c, 4, db ? width : 0, 1);
    if (!db) width = 1;
    spare(&c, 5, 3, width);
    const Py_ssize_t rows = width ? n / width : 0;
    if (!c.failed)
        BY_BLOCKS(rows, width, table(&c)->gelu_backward(READ(grad), READ(slope), WRITE(dx), db, group, b.first, b.rows,
                                                        rows, width));
    return finish(&c, NULL);
}

METHOD(residual) { /* x, y, bias or None, hashes or None, threshold, keep_scale, out, spare */
    CALL;
    const void *x = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c);
    const void *y = reals(&c, 1, n, 0), *bias = maybe_wides(&c, 2, width);
    const uint64_t *hashes = maybe_hashes(&c, 3, width ? n / width : 0);
    const uint64_t threshold = word(&c, 4);
    const double keep_scale = number(&c, 5);
    void *out = reals(&c, 6, n, 1);
    spare(&c, 7, 3, width);
    if (!c.failed && n)
        BY_BLOCKS(n / width, width, table(&c)->residual(READ(x), READ(y), bias, hashes ? hashes + b.first : NULL,
                                                        threshold, keep_scale, WRITE(out), b.rows, width));
    return finish(&c, NULL);
}

METHOD(dropout) { /* x, hashes, threshold, keep_scale, out, spare */
    CALL;
    const void *x = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c);
    const uint64_t *hashes = array(&c, 1, width ? n / width : 0, 0, "QL", 8);
    const uint64_t threshold = word(&c, 2);
    const double keep_scale = number(&c, 3);
    void *out = reals(&c, 4, n, 1);
    spare(&c, 5, 2, width);
    if (!c.failed && n)
        BY_BLOCKS(n / width, width, table(&c)->dropout(READ(x), hashes + b.first, threshold, keep_scale, WRITE(out),
                                                       b.rows, width));
    return finish(&c, NULL);
}

METHOD(layer_norm) { /* x, weight, bias, eps, y, center, rstd, spare */
    CALL;
    const void *x = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c), rows = width ? n / width : 0;
    const void *weight = wides(&c, 1, width, 0), *bias = wides(&c, 2, width, 0);
    const double eps = number(&c, 3);
    void *y = reals(&c, 4, n, 1), *center = wides(&c, 5, rows, 1), *rstd = wides(&c, 6, rows, 1);
    spare(&c, 7, 2, width);
    if (!c.failed && n)
        BY_BLOCKS(rows, width, table(&c)->layer_norm(READ(x), weight, bias, eps, WRITE(y), BESIDE(center), BESIDE(rstd),
                                                     b.rows, width));
    return finish(&c, NULL);
}

/* x, y, branch_bias or None, hashes or None, threshold, keep_scale, weight, bias, eps, sum, out, center, rstd, spare */
METHOD(residual_norm) {
    CALL;
    const void *x = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c), rows = width ? n / width : 0;
    const void *y = reals(&c, 1, n, 0), *branch_bias = maybe_wides(&c, 2, width);
    const uint64_t *hashes = maybe_hashes(&c, 3, rows);
    const uint64_t threshold = word(&c, 4);
    const double keep_scale = number(&c, 5);
    const void *weight = wides(&c, 6, width, 0), *bias = wides(&c, 7, width, 0);
    const double eps = number(&c, 8);
    void *sum = reals(&c, 9, n, 1), *out = reals(&c, 10, n, 1);
    void *center = wides(&c, 11, rows, 1), *rstd = wides(&c, 12, rows, 1);
    spare(&c, 13, 4, width);
    if (!c.failed && n && !c.half)
        WITHOUT_LOCK(n, table(&c)->residual_norm(x, y, branch_bias, hashes, threshold, keep_scale, weight, bias, eps,
                                                 sum, out, center, rstd, rows, width));
    if (!c.failed && n && c.half) /* the norm is that of the sum as it is kept: backward has no other */
        BY_BLOCKS(rows, width, {
            void *total = WRITE(sum);
            table(&c)->residual(READ(x), READ(y), branch_bias, hashes ? hashes + b.first : NULL, threshold, keep_scale,
                                total, b.rows, width);
            round_rows(&b);
            table(&c)->layer_norm(total, weight, bias, eps, WRITE(out), BESIDE(center), BESIDE(rstd), b.rows, width);
        });
    return finish(&c, NULL);
}

METHOD(layer_norm_backward) { /* grad, extra or None, x, center, rstd, weight, dx, dw, db, groups, spare */
    CALL;
    const void *grad = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c), rows = width ? n / width : 0;
    const void *extra = maybe_reals(&c, 1, n), *x = reals(&c, 2, n, 0);
    const void *center = wides(&c, 3, rows, 0), *rstd = wides(&c, 4, rows, 0), *weight = wides(&c, 5, width, 0);
    void *dx = reals(&c, 6, n, 1), *dw = wides(&c, 7, width, 1), *db = wides(&c, 8, width, 1);
    void *groups = wides(&c, 9, 2 * width, 1);
    spare(&c, 10, 4, width);
    if (!c.failed)
        BY_BLOCKS(rows, width, table(&c)->layer_norm_backward(READ(grad), READ(extra), READ(x), BESIDE(center),
                                                              BESIDE(rstd), weight, WRITE(dx), dw, db, groups, b.first,
                                                              b.rows, rows, width));
    return finish(&c, NULL);
}

METHOD(rms_norm) { /* x, weight, eps, y, rstd, spare */
    CALL;
    const void *x = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c), rows = width ? n / width : 0;
    const void *weight = wides(&c, 1, width, 0);
    const double eps = number(&c, 2);
    void *y = reals(&c, 3, n, 1), *rstd = wides(&c, 4, rows, 1);
    spare(&c, 5, 2, width);
    if (!c.failed && n)
        BY_BLOCKS(rows, width, table(&c)->rms_norm(READ(x), weight, eps, WRITE(y), BESIDE(rstd), b.rows, width));
    return finish(&c, NULL);
}

/* x, y, branch_bias or None, hashes or None, threshold, keep_scale, weight, eps, sum, out, rstd, spare */
METHOD(residual_rms_norm) {
    CALL;
    const void *x = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c), rows = width ? n / width : 0;
    const void *y = reals(&c, 1, n, 0), *branch_bias = maybe_wides(&c, 2, width);
    const uint64_t *hashes = maybe_hashes(&c, 3, rows);
    const uint64_t threshold = word(&c, 4);
    const double keep_scale = number(&c, 5);
    const void *weight = wides(&c, 6, width, 0);
    const double eps = number(&c, 7);
    void *sum = reals(&c, 8, n, 1), *out = reals(&c, 9, n, 1), *rstd = wides(&c, 10, rows, 1);
    spare(&c, 11, 4, width);
    if (!c.failed && n && !c.half)
        WITHOUT_LOCK(n, table(&c)->residual_rms_norm(x, y, branch_bias, hashes, threshold, keep_scale, weight, eps, sum,
                                                     out, rstd, rows, width));
    if (!c.failed && n && c.half) /* the norm is that of the sum as it is kept: backward has no other */
        BY_BLOCKS(rows, width, {
            void *total = WRITE(sum);
            table(&c)->residual(READ(x), READ(y), branch_bias, hashes ? hashes + b.first : NULL, threshold, keep_scale,
                                total, b.rows, width);
            round_rows(&b);
            table(&c)->rms_norm(total, weight, eps, WRITE(out), BESIDE(rstd), b.rows, width);
        });
    return finish(&c, NULL);
}

METHOD(rms_norm_backward) { /* grad, extra or None, x, rstd, weight, dx, dw, group, spare */
    CALL;
    const void *grad = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c), rows = width ? n / width : 0;
    const void *extra = maybe_reals(&c, 1, n), *x = reals(&c, 2, n, 0);
    const void *rstd = wides(&c, 3, rows, 0), *weight = wides(&c, 4, width, 0);
    void *dx = reals(&c, 5, n, 1), *dw = wides(&c, 6, width, 1), *group = wides(&c, 7, width, 1);
    spare(&c, 8, 4, width);
    if (!c.failed)
        BY_BLOCKS(rows, width, table(&c)->rms_norm_backward(READ(grad), READ(extra), READ(x), BESIDE(rstd), weight,
                                                            WRITE(dx), dw, group, b.first, b.rows, rows, width));
    return finish(&c, NULL);
}

METHOD(swiglu) { /* gate, up, y, spare */
    CALL;
    const void *gate = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c);
    const void *up = reals(&c, 1, n, 0);
    void *y = reals(&c, 2, n, 1);
    spare(&c, 3, 3, 1);
    if (!c.failed && n) BY_BLOCKS(n, 1, table(&c)->swiglu(READ(gate), READ(up), WRITE(y), b.rows));
    return finish(&c, NULL);
}

METHOD(swiglu_backward) { /* grad, gate, up, d_gate, d_up, spare */
    CALL;
    const void *grad = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c);
    const void *gate = reals(&c, 1, n, 0), *up = reals(&c, 2, n, 0);
    void *d_gate = reals(&c, 3, n, 1), *d_up = reals(&c, 4, n, 1);
    spare(&c, 5, 5, 1);
    if (!c.failed && n)
        BY_BLOCKS(n, 1, table(&c)->swiglu_backward(READ(grad), READ(gate), READ(up), WRITE(d_gate), WRITE(d_up), b.rows));
    return finish(&c, NULL);
}

METHOD(rotary) { /* x, heads of a group, cos (rows, half), sin, y, spare */
    CALL;
    const void *x = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c), rows = width ? n / width : 0;
    const long long members = whole(&c, 1);
    const void *cosines = wides(&c, 2, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t size = elements(&c), half = last_dim(&c), length = half ? size / half : 0;
    if (!length || rows % length) fail(&c, PyExc_ValueError, "has rows that do not fit", 2);
    if (members < 1 || (half && (members > width / half || width % (members * 2 * half))))
        fail(&c, PyExc_ValueError, "is no number of heads in a row", 1);
    const void *sines = wides(&c, 3, size, 0);
    void *y = reals(&c, 4, n, 1);
    spare(&c, 5, 2, width);
    if (!c.failed && n)
        BY_BLOCKS(rows, width, table(&c)->rotary(READ(x), cosines, sines, WRITE(y), width / (members * 2 * half),
                                                 members, half, b.first, b.rows, length));
    return finish(&c, NULL);
}

/* How heads lie in arrays of queries, and of keys and values. */
typedef struct {
    len groups, queries, half, rows, count; /* queries of a group; rows of the arrays, and of the tables */
} Heads;

/* From (elements, width) of both, the number of groups (argument `at`) and the tables (`at` + 1). */
static Heads heads_apart(Call *c, int at, len q_size, len q_width, len kv_size, len kv_width, const void **cosines) {
    Heads h = {.groups = (len)whole(c, at)};
    *cosines = reals(c, at + 1, -1, 0);
    if (c->failed) return h;
    h.half = last_dim(c);
    h.count = h.half ? elements(c) / h.half : 0;
    h.rows = kv_width ? kv_size / kv_width : 0;
    if (c->half) return fail(c, PyExc_TypeError, "has another dtype", 0), h;
    if (h.groups < 1 || !kv_width || kv_width % 4 || h.groups > kv_width / 4 || kv_width != 4 * h.half * h.groups)
        return fail(c, PyExc_ValueError, "is no number of heads in a row", at), h;
    if (q_width % (kv_width / 2) || q_width * h.rows != q_size || !q_width)
        return fail(c, PyExc_ValueError, "has rows that do not fit", 0), h;
    h.queries = q_width / (kv_width / 2);
    if (!h.count || h.rows % h.count) fail(c, PyExc_ValueError, "has rows that do not fit", at + 1);
    return h;
}

METHOD(rotary_pack) { /* q, kv, groups, cos (rows, half), sin, y */
    CALL;
    const void *q = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t q_size = elements(&c), q_width = last_dim(&c);
    const void *kv = reals(&c, 1, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t kv_size = elements(&c), kv_width = last_dim(&c);
    const void *cosines;
    const Heads h = heads_apart(&c, 2, q_size, q_width, kv_size, kv_width, &cosines);
    const void *sines = reals(&c, 4, h.count * h.half, 0);
    void *y = reals(&c, 5, q_size + kv_size, 1);
    if (!c.failed)
        WITHOUT_LOCK(q_size, table(&c)->rotary_pack(q, kv, cosines, sines, y, h.groups, h.queries, h.half, h.rows,
                                                    h.count));
    return finish(&c, NULL);
}

METHOD(rotary_unpack) { /* x, groups, cos (rows, half), sin, q, kv */
    CALL;
    const void *x = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t size = elements(&c);
    void *q = reals(&c, 4, -1, 1);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t q_size = elements(&c), q_width = last_dim(&c);
    void *kv = reals(&c, 5, -1, 1);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t kv_size = elements(&c), kv_width = last_dim(&c);
    if (q_size + kv_size != size) fail(&c, PyExc_ValueError, "has another length", 0);
    const void *cosines;
    const Heads h = heads_apart(&c, 1, q_size, q_width, kv_size, kv_width, &cosines);
    const void *sines = reals(&c, 3, h.count * h.half, 0);
    if (!c.failed)
        WITHOUT_LOCK(q_size, table(&c)->rotary_unpack(x, cosines, sines, q, kv, h.groups, h.queries, h.half, h.rows,
                                                      h.count));
    return finish(&c, NULL);
}

METHOD(softmax) { /* x, y, spare */
    CALL;
    const void *x = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c);
    void *y = reals(&c, 1, n, 1);
    spare(&c, 2, 2, width);
    if (!c.failed && n) BY_BLOCKS(n / width, width, table(&c)->softmax(READ(x), WRITE(y), b.rows, width));
    return finish(&c, NULL);
}

METHOD(softmax_backward) { /* grad, y, dx, spare */
    CALL;
    const void *grad = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c);
    const void *y = reals(&c, 1, n, 0);
    void *dx = reals(&c, 2, n, 1);
    spare(&c, 3, 3, width);
    if (!c.failed && n)
        BY_BLOCKS(n / width, width, table(&c)->softmax_backward(READ(grad), READ(y), WRITE(dx), b.rows, width));
    return finish(&c, NULL);
}

/* Targets that count must be columns, or negative: a wrong one would read outside the row. */
static void check_targets(Call *c, const int64_t *targets, Py_ssize_t rows, Py_ssize_t width, int64_t ignore, int at) {
    for (Py_ssize_t i = 0; !c->failed && i < rows; i++)
        if (targets[i] != ignore && targets[i] >= width)
            fail(c, PyExc_ValueError, "holds a number that is no column", at);
}

METHOD(cross_entropy) { /* logits, targets, ignore, lse, spare -> total */
    CALL;
    double total = 0.0;
    const void *logits = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c), rows = width ? n / width : 0;
    const int64_t *targets = integers(&c, 1, rows);
    const int64_t ignore = whole(&c, 2);
    void *lse = wides(&c, 3, rows, 1);
    check_targets(&c, targets, rows, width, ignore, 1);
    spare(&c, 4, 1, width);
    if (!c.failed)
        BY_BLOCKS(rows, width, total += table(&c)->cross_entropy(READ(logits), targets + b.first, ignore, BESIDE(lse),
                                                                 b.rows, width));
    return finish(&c, c.failed ? NULL : PyFloat_FromDouble(total));
}

METHOD(cross_entropy_backward) { /* grad, logits, targets, lse, ignore, out, spare */
    CALL;
    const double grad = number(&c, 0);
    const void *logits = reals(&c, 1, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c), rows = width ? n / width : 0;
    const int64_t *targets = integers(&c, 2, rows);
    const void *lse = wides(&c, 3, rows, 0);
    const int64_t ignore = whole(&c, 4);
    void *out = reals(&c, 5, n, 1);
    check_targets(&c, targets, rows, width, ignore, 2);
    spare(&c, 6, 2, width);
    if (!c.failed)
        BY_BLOCKS(rows, width, table(&c)->cross_entropy_backward(grad, READ(logits), targets + b.first, BESIDE(lse),
                                                                 ignore, WRITE(out), b.rows, width));
    return finish(&c, NULL);
}

METHOD(row_sum) { /* ids, rows (n, m), out (t, m), spare: out[ids[i]] += rows[i], where ids[i] is not negative */
    CALL;
    const int64_t *ids = integers(&c, 0, -1);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t num = elements(&c);
    const void *rows = reals(&c, 1, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c);
    void *out = wides(&c, 2, -1, 1);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t width = last_dim(&c), length = width ? elements(&c) / width : 0;
    if (n != num * width) fail(&c, PyExc_ValueError, "has another length", 1);
    for (Py_ssize_t i = 0; !c.failed && width && i < num; i++)
        if (ids[i] >= length) fail(&c, PyExc_ValueError, "holds a number that is no row", 0);
    spare(&c, 3, 1, width);
    if (!c.failed) BY_BLOCKS(num, width, table(&c)->row_sum(ids + b.first, READ(rows), out, b.rows, width));
    return finish(&c, NULL);
}

/* How the rows that a kernel picks by number are read and written; of halves with two rows of `spare`. */
static mt_rows rows_of(Call *c, int at, Py_ssize_t width) {
    mt_rows kind = {0};
    spare(c, at, 2, width);
    if (!c->half || c->failed) return kind;
    const mt_halves *halves = c->level->halves;
    kind.widen = c->half == 'e' ? halves->half_to_float : halves->bfloat_to_float;
    kind.narrow = c->half == 'e' ? halves->float_to_half : halves->float_to_bfloat;
    kind.spare = c->spare;
    return kind;
}

/* How many places are taken.  One that is no row would be read outside the array. */
static Py_ssize_t count_places(Call *c, const int64_t *places, Py_ssize_t count, Py_ssize_t rows, int at) {
    Py_ssize_t taken = 0;
    for (Py_ssize_t i = 0; !c->failed && i < count; i++) {
        if (places[i] >= rows) fail(c, PyExc_ValueError, "holds a number that is no row", at);
        taken += places[i] >= 0;
    }
    return taken;
}

METHOD(combine) { /* out (n, h), gates (t, k), places (t, k), y (t, h), spare */
    CALL;
    const void *out = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t width = last_dim(&c), n = width ? elements(&c) / width : 0;
    const int64_t *places = integers(&c, 2, -1);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t count_all = elements(&c), choices = last_dim(&c), rows = choices ? count_all / choices : 0;
    const void *gates = wides(&c, 1, count_all, 0);
    count_places(&c, places, count_all, n, 2);
    void *y = reals(&c, 3, rows * width, 1);
    const mt_rows kind = rows_of(&c, 4, width);
    if (!c.failed)
        WITHOUT_LOCK(count_all * width, table(&c)->combine(kind, out, gates, places, y, rows, choices, width));
    return finish(&c, NULL);
}

METHOD(combine_backward) { /* grad (t, h), out (n, h), gates (t, k), places (t, k), d_out, d_gates, spare */
    CALL;
    const void *grad = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t size = elements(&c), width = last_dim(&c), rows = width ? size / width : 0;
    const void *out = reals(&c, 1, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n_size = elements(&c), n = width ? n_size / width : 0;
    if (n * width != n_size) fail(&c, PyExc_ValueError, "has another length", 1);
    const int64_t *places = integers(&c, 3, -1);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t count_all = elements(&c), choices = last_dim(&c);
    if (rows * choices != count_all) fail(&c, PyExc_ValueError, "has another length", 3);
    const void *gates = wides(&c, 2, count_all, 0);
    const Py_ssize_t taken = count_places(&c, places, count_all, n, 3);
    void *d_out = reals(&c, 4, n_size, 1), *d_gates = wides(&c, 5, count_all, 1);
    const mt_rows kind = rows_of(&c, 6, width);
    if (!c.failed)
        WITHOUT_LOCK(count_all * width, {
            if (taken < n) memset(d_out, 0, (size_t)(n_size * c.itemsize)); /* rows that nobody has */
            table(&c)->combine_backward(kind, grad, out, gates, places, d_out, d_gates, rows, choices, width);
        });
    return finish(&c, NULL);
}

METHOD(jitter) { /* x, hashes, amount, out, spare */
    CALL;
    const void *x = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c), width = last_dim(&c);
    const uint64_t *hashes = array(&c, 1, width ? n / width : 0, 0, "QL", 8);
    const double amount = number(&c, 2);
    void *out = reals(&c, 3, n, 1);
    spare(&c, 4, 2, width);
    if (!c.failed && n)
        BY_BLOCKS(n / width, width, table(&c)->jitter(READ(x), hashes + b.first, amount, WRITE(out), b.rows, width));
    return finish(&c, NULL);
}

METHOD(adamw) { /* p, g, m, v, beta1, 1 - beta1, beta2, 1 - beta2, eps, rate, keep */
    CALL;
    double numbers[7];
    void *p = reals(&c, 0, -1, 1);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c);
    const void *g = reals(&c, 1, n, 0);
    void *m = reals(&c, 2, n, 1), *v = reals(&c, 3, n, 1);
    for (int i = 0; i < 7; i++) numbers[i] = number(&c, 4 + i);
    if (!c.failed) WITHOUT_LOCK(n, table(&c)->adamw(p, g, m, v, n, numbers));
    return finish(&c, NULL);
}

METHOD(sum_of_squares) { /* x, spare -> float */
    CALL;
    double total = 0.0;
    const void *x = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c);
    spare(&c, 1, 1, 1);
    if (!c.failed) BY_BLOCKS(n, 1, total += table(&c)->sum_of_squares(READ(x), b.rows));
    return finish(&c, c.failed ? NULL : PyFloat_FromDouble(total));
}

/* ------------------------------------------------------------------------------------------------------- attention */

/* A (b, h, s, d) array whose last dim lies together.  What `shape` has as 0 is told by this array. */
static mt_heads heads(Call *call, int at, Py_ssize_t shape[4], int writable) {
    mt_heads x = {0};
    if (call->failed) return x;
    Py_buffer *b = take(call, at, PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0), call->itemsize == 4 ? "fH" : "d", 0);
    if (!b) return x;
    if (b->ndim != 4 || !b->len) return fail(call, PyExc_ValueError, "is not (b, h, s, d)", at), x;
    for (int i = 0; i < 4; i++)
        if (!shape[i]) shape[i] = b->shape[i];
    const Py_ssize_t size = b->itemsize;
    if (memcmp(shape, b->shape, 4 * sizeof *shape)) return fail(call, PyExc_ValueError, "has another shape", at), x;
    if (shape[3] > 1 && b->strides[3] != size) return fail(call, PyExc_ValueError, "has gaps in its last dim", at), x;
    for (int i = 0; i < 3; i++)
        if (b->strides[i] % size) return fail(call, PyExc_ValueError, "has odd strides", at), x;
    x.data = b->buf;
    x.half = size == 2;
    x.b = b->strides[0] / size, x.h = b->strides[1] / size, x.s = b->strides[2] / size;
    return x;
}

/* How many scores are kept of a head. */
static Py_ssize_t num_kept(const mt_attention *a) {
    const Py_ssize_t stripes = a->s / MT_STRIPE, rest = a->s % MT_STRIPE;
    if (!a->causal) return a->s * a->t;
    const Py_ssize_t from = mt_since(a, stripes * MT_STRIPE);
    return mt_kept_before(a, stripes) + (rest ? rest * (a->s - from) : 0);
}

/* causal, scale, mask or None, hashes or None, keys or None, threshold, keep_scale, scratch, scores or None, whether
 * halves are bfloat16, the first key of query 0 or None, that of each query or None: from argument `at` on */
static mt_attention setting(Call *c, int at, const Py_ssize_t shape[4], Py_ssize_t keys, int backward) {
    mt_attention a = {.b = shape[0], .h = shape[1], .s = shape[2], .t = keys, .d = shape[3]};
    a.causal = (int)whole(c, at);
    if (a.causal && a.s != a.t) fail(c, PyExc_ValueError, "wants as many keys as queries", at);
    a.since = -a.s;
    if (!absent(c, at + 10)) {
        const long long first = whole(c, at + 10);
        a.since = first < -a.s ? -a.s : first > a.t ? a.t : (len)first;
        if (a.causal && a.since > 0) fail(c, PyExc_ValueError, "hides a query's own key", at + 10);
    }
    a.scale = number(c, at + 1);
    if (!absent(c, at + 11)) a.firsts = integers(c, at + 11, a.b * a.s);
    if (!absent(c, at + 2)) {
        const Py_buffer *b = take(c, at + 2, PyBUF_STRIDES, "?", 1);
        if (b && b->ndim != 4) fail(c, PyExc_ValueError, "is not (b, h, s, t)", at + 2);
        const Py_ssize_t full[4] = {a.b, a.h, a.s, a.t};
        for (int i = 0; !c->failed && i < 4; i++) {
            if (b->shape[i] != full[i] && b->shape[i] != 1) fail(c, PyExc_ValueError, "has another shape", at + 2);
            a.mask_strides[i] = b->shape[i] == 1 ? 0 : b->strides[i];
        }
        if (!c->failed) a.mask = b->buf;
    }
    a.rows = maybe_hashes(c, at + 3, a.b * a.h * a.s);
    a.keys = absent(c, at + 4) ? NULL : integers(c, at + 4, a.t);
    a.threshold = word(c, at + 5);
    a.keep_scale = number(c, at + 6);
    a.scratch = array(c, at + 7, -1, 1, "B", 1);
    if (!c->failed && c->buffers[c->held - 1].len < table(c)->attention_scratch(a.s, a.t, a.d, backward))
        fail(c, PyExc_ValueError, "is too short", at + 7);
    if (!absent(c, at + 8)) {
        const int flags = PyBUF_STRIDES | (backward ? 0 : PyBUF_WRITABLE);
        const Py_buffer *b = take(c, at + 8, flags, c->itemsize == 4 ? "f" : "d", c->itemsize);
        if (b && (b->ndim != 3 || b->shape[0] != a.b || b->shape[1] != a.h || b->shape[2] != num_kept(&a)))
            fail(c, PyExc_ValueError, "has another shape", at + 8);
        if (!c->failed && b->shape[2] > 1 && b->strides[2] != c->itemsize)
            fail(c, PyExc_ValueError, "has gaps in its last dim", at + 8);
        if (!c->failed && (b->strides[0] % c->itemsize || b->strides[1] % c->itemsize))
            fail(c, PyExc_ValueError, "has odd strides", at + 8);
        if (!a.causal && a.since > -a.s) fail(c, PyExc_ValueError, "wants causal attention where keys are left out", at + 8);
        if (!c->failed) {
            a.scores = b->buf;
            a.scores_b = b->strides[0] / c->itemsize, a.scores_h = b->strides[1] / c->itemsize;
        }
    }
    const int brain = (int)whole(c, at + 9);
    a.widen = brain ? c->level->halves->bfloat_to_float : c->level->halves->half_to_float;
    a.narrow = brain ? c->level->halves->float_to_bfloat : c->level->halves->float_to_half;
    return a;
}

METHOD(attention_scratch) { /* s, t, d, itemsize, backward -> bytes */
    CALL;
    const len s = whole(&c, 0), t = whole(&c, 1), d = whole(&c, 2);
    c.itemsize = whole(&c, 3);
    const int backward = (int)whole(&c, 4);
    if (s < 0 || s > 1 << 30) fail(&c, PyExc_ValueError, "is out of range", 0); /* bytes must fit 63 bits */
    if (t < 0 || t > 1 << 30) fail(&c, PyExc_ValueError, "is out of range", 1);
    if (d < 0 || d > 1 << 24) fail(&c, PyExc_ValueError, "is out of range", 2);
    if (c.failed) return finish(&c, NULL);
    len most = 0; /* of all levels: another one may be chosen before the scratch is used */
    for (int i = 0; i < NUM_LEVELS; i++) {
        c.level = &LEVELS[i];
        const len bytes = table(&c)->attention_scratch(s, t, d, backward);
        most = bytes > most ? bytes : most;
    }
    return finish(&c, PyLong_FromSsize_t(most));
}

METHOD(attention) { /* lse, q, k, v, out, then the setting */
    CALL;
    Py_ssize_t shape[4] = {0};
    void *lse = reals(&c, 0, -1, 1);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t num = elements(&c);
    const mt_heads q = heads(&c, 1, shape, 0);
    Py_ssize_t keys[4] = {shape[0], shape[1], 0, shape[3]};
    const mt_heads k = heads(&c, 2, keys, 0), v = heads(&c, 3, keys, 0), out = heads(&c, 4, shape, 1);
    if (!c.failed && num != shape[0] * shape[1] * shape[2]) fail(&c, PyExc_ValueError, "has another length", 0);
    if (c.failed) return finish(&c, NULL);
    const mt_attention a = setting(&c, 5, shape, keys[2], 0);
    if (!c.failed) WITHOUT_LOCK(num * shape[3], table(&c)->attention(&a, q, k, v, out, lse));
    return finish(&c, NULL);
}

METHOD(attention_backward) { /* lse, grad, q, k, v, y, dq, dk, dv, then the setting */
    CALL;
    Py_ssize_t shape[4] = {0};
    const void *lse = reals(&c, 0, -1, 0);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t num = elements(&c);
    const mt_heads grad = heads(&c, 1, shape, 0), q = heads(&c, 2, shape, 0);
    Py_ssize_t keys[4] = {shape[0], shape[1], 0, shape[3]};
    const mt_heads k = heads(&c, 3, keys, 0), v = heads(&c, 4, keys, 0), y = heads(&c, 5, shape, 0);
    const mt_heads dq = heads(&c, 6, shape, 1), dk = heads(&c, 7, keys, 1), dv = heads(&c, 8, keys, 1);
    if (!c.failed && num != shape[0] * shape[1] * shape[2]) fail(&c, PyExc_ValueError, "has another length", 0);
    if (c.failed) return finish(&c, NULL);
    const mt_attention a = setting(&c, 9, shape, keys[2], 1);
    if (!c.failed) WITHOUT_LOCK(num * shape[3], table(&c)->attention_backward(&a, grad, q, k, v, y, lse, dq, dk, dv));
    return finish(&c, NULL);
}

/* ---------------------------------------------------------------------------------------------------------- images */

/* From argument `at` on, as whole numbers: images b, h, w, channels and filters of a group, groups, window kh, kw,
 * stride, padding, dilation (two each). */
static mt_convolution geometry(Call *c, int at) {
    mt_convolution a = {0};
    len *const fields[] = {&a.b, &a.h, &a.w, &a.c, &a.out, &a.groups, &a.kh, &a.kw};
    len *const pairs[] = {a.stride, a.padding, a.dilation};
    for (int i = 0; i < 14; i++) {
        const long long value = whole(c, at + i);
        const int from = i == 0 || (i > 9 && i < 12) ? 0 : 1; /* there may be no images, and no padding */
        if (!c->failed && (value < from || value > 1 << 24)) fail(c, PyExc_ValueError, "is out of range", at + i);
        if (i < 8)
            *fields[i] = (len)value;
        else
            pairs[(i - 8) / 2][i % 2] = (len)value;
    }
    if (c->failed) return a;
    const len down = a.h + 2 * a.padding[0] - (a.kh - 1) * a.dilation[0] - 1;
    const len right = a.w + 2 * a.padding[1] - (a.kw - 1) * a.dilation[1] - 1;
    if (down < 0 || right < 0) return fail(c, PyExc_ValueError, "is larger than the image", at + 6), a;
    a.oh = down / a.stride[0] + 1, a.ow = right / a.stride[1] + 1;
    const double most = 4611686018427387904.0 / 64; /* bytes of the largest array must fit 63 bits */
    const double pixels = (double)(a.h + 2 * a.padding[0]) * (double)(a.w + 2 * a.padding[1]) * (double)a.groups;
    if (pixels * (double)(a.c > a.out ? a.c : a.out) * (double)(a.b + 1) > most ||
        (double)a.kh * (double)a.kw * (double)a.c * (double)(a.out + 64) * (double)a.groups > most)
        fail(c, PyExc_ValueError, "is out of range", at);
    return a;
}

static void *scratch_of(Call *c, int at, const mt_convolution *a, int backward) {
    void *scratch = array(c, at, -1, 1, "B", 1);
    if (!c->failed && elements(c) < table(c)->convolution_scratch(a, backward) * c->itemsize)
        fail(c, PyExc_ValueError, "is too short", at);
    return scratch;
}

METHOD(convolution_scratch) { /* backward, itemsize, geometry -> bytes */
    CALL;
    const int backward = (int)whole(&c, 0);
    c.itemsize = whole(&c, 1);
    const mt_convolution a = geometry(&c, 2);
    if (c.failed) return finish(&c, NULL);
    len most = 0; /* of all levels: another one may be chosen before the scratch is used */
    for (int i = 0; i < NUM_LEVELS; i++) {
        c.level = &LEVELS[i];
        const len bytes = table(&c)->convolution_scratch(&a, backward) * (c.itemsize == 8 ? 8 : 4);
        most = bytes > most ? bytes : most;
    }
    return finish(&c, PyLong_FromSsize_t(most));
}

METHOD(conv2d) { /* x, w, bias or None, y, whether w is turned, scratch, geometry */
    CALL;
    const mt_convolution a = geometry(&c, 6);
    if (c.failed) return finish(&c, NULL);
    const len channels = a.groups * a.c, filters = a.groups * a.out;
    const void *x = reals(&c, 0, a.b * a.h * a.w * channels, 0);
    const void *w = reals(&c, 1, filters * a.kh * a.kw * a.c, 0), *bias = maybe_reals(&c, 2, filters);
    void *y = reals(&c, 3, a.b * a.oh * a.ow * filters, 1);
    const int turned = (int)whole(&c, 4);
    void *scratch = scratch_of(&c, 5, &a, 0);
    if (c.half) fail(&c, PyExc_TypeError, "is half", 0);
    if (!c.failed) WITHOUT_LOCK(a.b * a.oh * a.ow * filters, table(&c)->conv2d(&a, x, w, bias, y, turned, scratch));
    return finish(&c, NULL);
}

METHOD(conv2d_filters) { /* x, grad, out, add, scratch, geometry */
    CALL;
    const mt_convolution a = geometry(&c, 5);
    if (c.failed) return finish(&c, NULL);
    const len channels = a.groups * a.c, filters = a.groups * a.out;
    const void *x = reals(&c, 0, a.b * a.h * a.w * channels, 0);
    const void *grad = reals(&c, 1, a.b * a.oh * a.ow * filters, 0);
    void *out = reals(&c, 2, filters * a.kh * a.kw * a.c, 1);
    const int add = (int)whole(&c, 3);
    void *scratch = scratch_of(&c, 4, &a, 1);
    if (c.half) fail(&c, PyExc_TypeError, "is half", 0);
    if (!c.failed) WITHOUT_LOCK(a.b * a.oh * a.ow * filters, table(&c)->conv2d_filters(&a, x, grad, out, add, scratch));
    return finish(&c, NULL);
}

static mt_convolution pool(Call *c, int at) {
    const mt_convolution a = geometry(c, at);
    if (!c->failed && (a.groups != 1 || a.kh * a.kw > 256 || 2 * a.padding[0] > a.kh || 2 * a.padding[1] > a.kw ||
                       a.dilation[0] != 1 || a.dilation[1] != 1))
        fail(c, PyExc_ValueError, "is no window of a pool", at);
    return a;
}

METHOD(max_pool2d) { /* x, y, where, geometry */
    CALL;
    const mt_convolution a = pool(&c, 3);
    if (c.failed) return finish(&c, NULL);
    const len size = a.b * a.oh * a.ow * a.c;
    const void *x = reals(&c, 0, a.b * a.h * a.w * a.c, 0);
    void *y = reals(&c, 1, size, 1), *where = array(&c, 2, size, 1, "B", 1);
    if (c.half) fail(&c, PyExc_TypeError, "is half", 0);
    if (!c.failed) WITHOUT_LOCK(size, table(&c)->max_pool2d(&a, x, y, where));
    return finish(&c, NULL);
}

METHOD(max_pool2d_backward) { /* grad, where, dx, geometry */
    CALL;
    const mt_convolution a = pool(&c, 3);
    if (c.failed) return finish(&c, NULL);
    const len size = a.b * a.oh * a.ow * a.c;
    const void *grad = reals(&c, 0, size, 0), *where = array(&c, 1, size, 0, "B", 1);
    void *dx = reals(&c, 2, a.b * a.h * a.w * a.c, 1);
    if (c.half) fail(&c, PyExc_TypeError, "is half", 0);
    if (!c.failed) WITHOUT_LOCK(size, table(&c)->max_pool2d_backward(&a, grad, where, dx));
    return finish(&c, NULL);
}

/* ---------------------------------------------------------------------------------------------------------- halves */

METHOD(widen) { /* brain, x (16 bits), y (float) */
    CALL;
    const int brain = (int)whole(&c, 0);
    const uint16_t *x = array(&c, 1, -1, 0, "H", 2);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c);
    float *y = array(&c, 2, n, 1, "f", 4);
    const mt_halves *halves = c.level->halves;
    if (!c.failed) WITHOUT_LOCK(n, (brain ? halves->bfloat_to_float : halves->half_to_float)(x, y, n));
    return finish(&c, NULL);
}

METHOD(narrow) { /* brain, x (float), y (16 bits) */
    CALL;
    const int brain = (int)whole(&c, 0);
    const float *x = array(&c, 1, -1, 0, "f", 4);
    if (c.failed) return finish(&c, NULL);
    const Py_ssize_t n = elements(&c);
    uint16_t *y = array(&c, 2, n, 1, "H", 2);
    const mt_halves *halves = c.level->halves;
    if (!c.failed) WITHOUT_LOCK(n, (brain ? halves->float_to_bfloat : halves->float_to_half)(x, y, n));
    return finish(&c, NULL);
}

/* ---------------------------------------------------------------------------------------------------------- levels */

METHOD(levels) { /* -> names, lowest first, of the levels that this CPU runs */
    (void)self, (void)args, (void)count;
    PyObject *names = PyList_New(0);
    for (int i = 0; names && i < NUM_LEVELS; i++) {
        if (!runs_here(i)) break;
        PyObject *name = PyUnicode_FromString(LEVELS[i].single->level);
        if (!name || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

METHOD(use) { /* name */
    CALL;
    const char *name = count == 1 ? PyUnicode_AsUTF8(args[0]) : NULL;
    for (int i = 0; name && i < NUM_LEVELS; i++)
        if (!strcmp(name, LEVELS[i].single->level) && runs_here(i)) {
            chosen = &LEVELS[i];
            return finish(&c, NULL);
        }
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no such level on this CPU");
    return NULL;
}

#define ENTRY(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef METHODS[] = {
    ENTRY(sum_rows), ENTRY(gelu), ENTRY(gelu_backward), ENTRY(residual), ENTRY(dropout), ENTRY(layer_norm),
    ENTRY(residual_norm), ENTRY(layer_norm_backward), ENTRY(rms_norm), ENTRY(residual_rms_norm),
    ENTRY(rms_norm_backward), ENTRY(swiglu), ENTRY(swiglu_backward), ENTRY(rotary), ENTRY(rotary_pack),
    ENTRY(rotary_unpack), ENTRY(softmax), ENTRY(softmax_backward), ENTRY(cross_entropy),
    ENTRY(cross_entropy_backward), ENTRY(row_sum), ENTRY(combine),
    ENTRY(combine_backward), ENTRY(jitter), ENTRY(adamw), ENTRY(sum_of_squares), ENTRY(convolution_scratch), ENTRY(conv2d),
    ENTRY(conv2d_filters), ENTRY(max_pool2d), ENTRY(max_pool2d_backward), ENTRY(attention_scratch),
    ENTRY(attention), ENTRY(attention_backward), ENTRY(widen), ENTRY(narrow), ENTRY(levels), ENTRY(use),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_compiled", "Compiled kernels; see mpitrain.kernels.", -1,
                                    METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__compiled(void) { return PyModule_Create(&MODULE); }
