/* Copies that pass the processor's cache by, and rows to where a mask has them.

   What is copied here is larger than the cache and is read next by somebody else: a worker, a device, a matrix product
   over the whole window. An ordinary store first reads the line that it overwrites and leaves it in the cache, in place
   of what is in use. A non-temporal store does neither.

   Nothing here checks an address: callers have. Sizes and counts are in bytes and rows; a step is the distance in bytes
   between the beginnings of rows. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
#define STREAMS 1
#else
#define STREAMS 0
#endif
#if STREAMS && defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define ROUNDS 1
#define AVX2 __attribute__((target("avx2")))
#else
#define ROUNDS 0
#endif

/* Raised with each change of a function's arguments or meaning: see __init__.py. */
#define VERSION 1

/* Bytes from which on passing the cache by takes less time, that of who reads them next included (measured). */
#define LARGE (4 << 20)
/* Shorter runs end within a few lines of the cache, which are then written in parts. */
#define LONG_RUN 1024
/* Longer than a switch to another thread takes. */
#define WORTH_A_THREAD (64 << 10)
#define LINE 64

/* Fills `nbytes` at `to`, past the cache if so asked. */
typedef void (*Move)(char *to, const char *from, int64_t nbytes, int past);

#if STREAMS
/* Bytes from an address to the next beginning of a line. */
static int64_t
before_line(const char *to)
{
    return (int64_t)((0 - (uintptr_t)to) & (LINE - 1));
}
#endif

/* Non-temporal stores are ordered with nothing: whoever is told that all is written must find it. */
static void
finish_stores(void)
{
#if STREAMS
    _mm_sfence();
#endif
}

static void
copy_bytes(char *to, const char *from, int64_t nbytes, int past)
{
#if STREAMS
    if (past && nbytes >= LONG_RUN) {
        int64_t head = before_line(to);
        memcpy(to, from, (size_t)head);
        to += head, from += head, nbytes -= head;
        for (; nbytes >= LINE; to += LINE, from += LINE, nbytes -= LINE) {
            _mm_prefetch(from + 16 * LINE, _MM_HINT_NTA);
            __m128i a = _mm_loadu_si128((const __m128i *)from);
            __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
            __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
            __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
            _mm_stream_si128((__m128i *)to, a);
            _mm_stream_si128((__m128i *)(to + 16), b);
            _mm_stream_si128((__m128i *)(to + 32), c);
            _mm_stream_si128((__m128i *)(to + 48), d);
        }
    }
#else
    (void)past;
#endif
    memcpy(to, from, (size_t)nbytes);
}

#if ROUNDS
/* float32 to bfloat16: the nearest, of two the even one; what is not a number stays that. */
static void
round_one(char *to, const char *from)
{
    uint32_t bits;
    memcpy(&bits, from, 4);
    uint32_t up = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    uint16_t rounded = (uint16_t)(((bits & 0x7fffffff) > 0x7f800000 ? quiet : up) >> 16);
    memcpy(to, &rounded, 2);
}

AVX2 static __m256i
round_eight(const char *from)
{
    __m256 numbers = _mm256_loadu_ps((const float *)from);
    __m256i bits = _mm256_castps_si256(numbers);
    __m256i none = _mm256_castps_si256(_mm256_cmp_ps(numbers, numbers, _CMP_UNORD_Q));
    __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, none), 16);
}

AVX2 static __m256i
round_sixteen(const char *from)
{
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(round_eight(from), round_eight(from + 32)), 0xd8);
}

AVX2 static void
round_bytes(char *to, const char *from, int64_t nbytes, int past)
{
    if (past && nbytes >= LONG_RUN && !((uintptr_t)to & 1)) {
        for (; before_line(to); to += 2, from += 4, nbytes -= 2)
            round_one(to, from);
        for (; nbytes >= LINE; to += LINE, from += 2 * LINE, nbytes -= LINE) {
            _mm_prefetch(from + 32 * LINE, _MM_HINT_T0);
            _mm_prefetch(from + 33 * LINE, _MM_HINT_T0);
            _mm256_stream_si256((__m256i *)to, round_sixteen(from));
            _mm256_stream_si256((__m256i *)(to + 32), round_sixteen(from + 64));
        }
    }
    for (; nbytes >= 32; to += 32, from += 64, nbytes -= 32)
        _mm256_storeu_si256((__m256i *)to, round_sixteen(from));
    for (; nbytes > 0; to += 2, from += 4, nbytes -= 2)
        round_one(to, from);
}
#endif

/* Eight marks at a time; PyTorch's booleans are 0 and 1, others are told apart one by one. */
static uint64_t
eight(const uint8_t *marks)
{
    uint64_t word;
    memcpy(&word, marks, 8);
    return word;
}

static int64_t
count_marks(const uint8_t *marks, int64_t total)
{
    int64_t count = 0;
    for (int64_t i = 0; i < total; i++)
        count += marks[i] != 0;
    return count;
}

static int64_t
next_mark(const uint8_t *marks, int64_t i, int64_t total)
{
    while (i + 8 <= total && !eight(marks + i))
        i += 8;
    while (i < total && !marks[i])
        i++;
    return i;
}

static int64_t
next_gap(const uint8_t *marks, int64_t i, int64_t total)
{
    while (i + 8 <= total && eight(marks + i) == 0x0101010101010101u)
        i += 8;
    while (i < total && marks[i])
        i++;
    return i;
}

/* Marked rows and where they come from; a step is the distance in bytes between the beginnings of rows. */
typedef struct {
    char *to;
    int64_t to_step;
    const uint8_t *marks;
    int64_t total;
    const char *from;
    int64_t from_step, rows, nbytes, past;
} Scatter;

/* The rows at `from`, in order, over the marked ones of `total` rows at `to`; no more than `rows` of them, whatever
   becomes of the marks meanwhile. Rows have `nbytes` at `to` and `from_nbytes` at `from`. */
static void
scatter_rows(const Scatter *job, Move move, int64_t from_nbytes)
{
    const char *from = job->from;
    int dense = job->to_step == job->nbytes && job->from_step == from_nbytes, past = job->past != 0;
    int64_t rows = job->rows;
    for (int64_t place = 0; rows && (place = next_mark(job->marks, place, job->total)) < job->total;) {
        int64_t run = dense ? next_gap(job->marks, place, job->total) - place : 1;
        if (run > rows)
            run = rows;
        move(job->to + place * job->to_step, from, run * job->nbytes, past);
        from += run * job->from_step;
        place += run;
        rows -= run;
    }
    if (past)
        finish_stores();
}

/* `count` integers of the caller's. */
static int
integers(PyObject *const *arguments, Py_ssize_t found, int count, int64_t *values)
{
    if (found != count) {
        PyErr_Format(PyExc_TypeError, "expected %d integers, found %zd", count, found);
        return 0;
    }
    for (int i = 0; i < count; i++) {
        values[i] = PyLong_AsLongLong(arguments[i]);
        if (values[i] == -1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

/* An integer as an address: pointers are narrower than it on some machines. */
static char *
address(int64_t value)
{
    return (char *)(intptr_t)value;
}

static PyObject *
rows_copy(PyObject *module, PyObject *const *arguments, Py_ssize_t found)
{
    (void)module;
    int64_t value[3];
    if (!integers(arguments, found, 3, value))
        return NULL;
    if (value[2] <= 0)
        Py_RETURN_NONE;
    PyThreadState *thread = value[2] >= WORTH_A_THREAD ? PyEval_SaveThread() : NULL;
    copy_bytes(address(value[0]), address(value[1]), value[2], value[2] >= LARGE);
    finish_stores();
    if (thread)
        PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

static PyObject *
scatter_with(PyObject *const *arguments, Py_ssize_t found, Move move, int widening)
{
    int64_t value[9];
    if (!integers(arguments, found, 9, value))
        return NULL;
    Scatter job = {address(value[0]), value[1], (const uint8_t *)address(value[2]), value[3], address(value[4]),
                   value[5], value[6], value[7], value[8]};
    if (count_marks(job.marks, job.total) != job.rows)
        Py_RETURN_FALSE;
    PyThreadState *thread = job.rows * job.nbytes >= WORTH_A_THREAD ? PyEval_SaveThread() : NULL;
    scatter_rows(&job, move, job.nbytes * widening);
    if (thread)
        PyEval_RestoreThread(thread);
    Py_RETURN_TRUE;
}

static PyObject *
rows_scatter(PyObject *module, PyObject *const *arguments, Py_ssize_t found)
{
    (void)module;
    return scatter_with(arguments, found, copy_bytes, 1);
}

#if ROUNDS
static PyObject *
rows_scatter_rounded(PyObject *module, PyObject *const *arguments, Py_ssize_t found)
{
    (void)module;
    return scatter_with(arguments, found, round_bytes, 2);
}
#endif

static PyMethodDef methods[] = {
    {"copy", (PyCFunction)(void (*)(void))rows_copy, METH_FASTCALL, "copy(to, start, nbytes)"},
    {"scatter", (PyCFunction)(void (*)(void))rows_scatter, METH_FASTCALL,
     "scatter(to, to_step, marks, total, start, start_step, rows, nbytes, past)"},
#if ROUNDS
    {"scatter_rounded", (PyCFunction)(void (*)(void))rows_scatter_rounded, METH_FASTCALL,
     "scatter_rounded(to, to_step, marks, total, start, start_step, rows, nbytes, past)"},
#endif
    {NULL, NULL, 0, NULL},
};

static int
set_up(PyObject *module)
{
    int rounds = 0;
#if ROUNDS
    rounds = __builtin_cpu_supports("avx2") != 0;
#endif
    if (PyModule_AddIntConstant(module, "VERSION", VERSION) < 0)
        return -1;
    return PyModule_AddIntConstant(module, "ROUNDS", rounds);
}

/* There is no state: any number of interpreters and threads, with a lock or without. */
static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, set_up},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_rows", "See mmcache.native.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__rows(void)
{
    return PyModuleDef_Init(&definition);
}
