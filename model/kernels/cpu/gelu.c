/* GELU on a CPU, and its derivative: see gelu.py. With h = inner + bias

       h s(z)    s = 1 / (1 + exp(-z)), z = 2 sqrt(2/pi) (h + 0.044715 h^3)

   Everything is computed in fp32. The loops have no calls and no branches, so that a compiler makes
   vectors of them; a variant for each generation of x86 processors is chosen when it is loaded. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EACH_PROCESSOR
#endif

#define SHARE 16384 /* Numbers that are worth a thread. */

static inline float from_bits(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline uint32_t to_bits(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static inline float widen(uint16_t bits) { return from_bits((uint32_t)bits << 16); }

/* To the nearest number of bf16, ties to even; NaN stays NaN. */
static inline uint16_t narrow(float number) {
    uint32_t bits = to_bits(number);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return number != number ? 0x7fc0u : (uint16_t)rounded;
}

static inline float same(float number) { return number; }

/* How many threads have enough to do. */
static inline long worth(long numbers, long threads) {
    long most = numbers / SHARE;
    return most < 1 ? 1 : most < threads ? most : threads;
}

#define SLOPE 1.5957691216057308f /* 2 sqrt(2/pi) */
#define CUBIC 0.044715f
#define FLAT 10.0f /* Beyond it the derivative is 0 or 1 in fp32. */
#define COLUMNS 512 /* The most of a row that are computed together, while the next are fetched. */
#define LINE 64     /* Numbers; columns are shared out by so many at least. */

/* exp(x) for |x| < 88: 2^n exp(r), |r| <= ln(2) / 2, by the series up to r^7. */
static inline float exponential(float x) {
    float n = (x * 1.4426950408889634f + 12582912.0f) - 12582912.0f; /* rounds to an integer */
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;           /* ln(2) in two parts */
    float sum = 1.0f / 5040.0f;
    sum = sum * r + 1.0f / 720.0f;
    sum = sum * r + 1.0f / 120.0f;
    sum = sum * r + 1.0f / 24.0f;
    sum = sum * r + 1.0f / 6.0f;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    return sum * from_bits((uint32_t)((int32_t)n + 127) << 23);
}

typedef struct {
    float value, slope;
} gelu_t;

static inline float clamped(float h) { return h > FLAT ? FLAT : (h < -FLAT ? -FLAT : h); }

static inline gelu_t gelu(float h) {
    float near = clamped(h);
    float square = near * near;
    float e = exponential(-SLOPE * near * (1.0f + CUBIC * square));
    float share = 1.0f / (1.0f + e);
    share = h < -FLAT ? 0.0f : share;
    gelu_t result;
    result.value = h * share;
    /* 1 - s = e s, without the places that a difference would lose. */
    result.slope = share + near * share * (e * share) * SLOPE * (1.0f + 3.0f * CUBIC * square);
    return result;
}

static inline void fetch(const void *numbers, long bytes) {
    for (long line = 0; line < bytes; line += 64) __builtin_prefetch((const char *)numbers + line);
}

/* How many columns go together, so that every thread has some. */
static long together(long columns, long threads) {
    long each = (columns / threads + LINE - 1) / LINE * LINE;
    return each < LINE ? LINE : each > COLUMNS ? COLUMNS : each;
}

/* For one type of numbers: rows of some columns, and then all columns by so many
   threads at most: the OpenMP that is loaded here need not be the one whose threads PyTorch counts. */
#define OF_TYPE(type, name, read, write)                                                          \
    EACH_PROCESSOR void forward_##name(                                                           \
        const type *restrict inner, const type *restrict bias, type *restrict active, long rows,  \
        long size, long columns) {                                                                \
        float shift[COLUMNS];                                                                     \
        for (long i = 0; i < size; i++) shift[i] = bias ? read(bias[i]) : 0.0f;                   \
        for (long row = 0; row < rows; row++, inner += columns, active += columns) {              \
            if (row + 1 < rows) fetch(inner + columns, size * sizeof(type));                      \
            for (long i = 0; i < size; i++)                                                       \
                active[i] = write(gelu(read(inner[i]) + shift[i]).value);                         \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    EACH_PROCESSOR void backward_##name(                                                          \
        const type *restrict inner, const type *restrict bias, type *restrict active,             \
        type *restrict change, type *restrict for_bias, long rows, long size, long columns) {     \
        float shift[COLUMNS], sum[COLUMNS];                                                       \
        for (long i = 0; i < size; i++) shift[i] = bias ? read(bias[i]) : 0.0f, sum[i] = 0.0f;    \
        for (long row = 0; row < rows; row++) {                                                   \
            if (row + 1 < rows) fetch(inner + columns, size * sizeof(type));                      \
            for (long i = 0; i < size; i++) {                                                     \
                gelu_t at = gelu(read(inner[i]) + shift[i]);                                      \
                float changed = at.slope * read(change[i]);                                       \
                active[i] = write(at.value);                                                      \
                change[i] = write(changed);                                                       \
                sum[i] += changed;                                                                \
            }                                                                                     \
            inner += columns, active += columns, change += columns;                               \
        }                                                                                         \
        if (for_bias)                                                                             \
            for (long i = 0; i < size; i++) for_bias[i] = write(sum[i]);                          \
    }                                                                                             \
                                                                                                  \
    void polyad_gelu_forward_##name(                                                              \
        const type *inner, const type *bias, type *active, long rows, long columns,               \
        long most) {                                                                              \
        long threads = worth(rows * columns, most), step = together(columns, threads);            \
        _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")        \
        for (long first = 0; first < columns; first += step)                                      \
            forward_##name(                                                                       \
                inner + first, bias ? bias + first : bias, active + first, rows,                  \
                columns - first < step ? columns - first : step, columns);                        \
    }                                                                                             \
                                                                                                  \
    void polyad_gelu_backward_##name(                                                             \
        const type *inner, const type *bias, type *active, type *change, type *for_bias,          \
        long rows, long columns, long most) {                                                     \
        long threads = worth(rows * columns, most), step = together(columns, threads);            \
        _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")        \
        for (long first = 0; first < columns; first += step)                                      \
            backward_##name(                                                                      \
                inner + first, bias ? bias + first : bias, active + first, change + first,        \
                for_bias ? for_bias + first : for_bias, rows,                                     \
                columns - first < step ? columns - first : step, columns);                        \
    }

OF_TYPE(uint16_t, bf16, widen, narrow)
OF_TYPE(float, fp32, same, same)

/* Of what the functions above take: the same number stands in gelu.py. */
const int polyad_gelu_version = 2;
