/* What a muMoE on a CPU computes for each token by itself: see tokens.py. Everything is computed in fp32. */

#include <math.h>

#include "../kernels/cpu/numbers.h"

#define COLUMNS 256 /* Of a token's matrices that are looked at together. */
#define ORDER 16    /* The most rows of both, and columns of the first. */

/* Entmax-1.5 of rows: with x = (scores - their maximum) / 2 the roots s = max(x - tau, 0), tau such that
   their squares sum to 1, and the squares. Newton's method from tau = -1, as gating.py has it. */
EACH_PROCESSOR void entmax_rows(
    const float *restrict scores, float *restrict roots, float *restrict squares, long rows,
    long size, long most, float small) {
    for (long row = 0; row < rows; row++, scores += size, roots += size, squares += size) {
        float highest = -INFINITY, tau = -1.0f;
        int bad = 0;
#pragma omp simd reduction(max : highest)
        for (long i = 0; i < size; i++) highest = scores[i] > highest ? scores[i] : highest;
#pragma omp simd reduction(| : bad)
        for (long i = 0; i < size; i++) {
            roots[i] = 0.5f * (scores[i] - highest);
            bad |= !(roots[i] <= 0.0f); /* what is no number */
        }
        for (long step = 0; step < most; step++) {
            float sum = 0.0f, square = 0.0f;
#pragma omp simd reduction(+ : sum, square)
            for (long i = 0; i < size; i++) {
                float root = roots[i] > tau ? roots[i] - tau : 0.0f;
                sum += root;
                square += root * root;
            }
            float norm = sqrtf(square), change = (norm - 1.0f) * norm / sum;
            tau += change;
            if (!(change > small)) break;
        }
        if (bad) tau = NAN;
        for (long i = 0; i < size; i++) {
            float root = roots[i] - tau;
            root = root < 0.0f ? 0.0f : root;
            roots[i] = root;
            squares[i] = root * root;
        }
    }
}

/* The gradient of the scores: s g - s (sum s g / sum s). */
EACH_PROCESSOR void entmax_gradient_rows(
    const float *restrict roots, const float *restrict gradient, float *restrict result, long rows,
    long size) {
    for (long row = 0; row < rows; row++, roots += size, gradient += size, result += size) {
        float sum = 0.0f, scaled = 0.0f;
#pragma omp simd reduction(+ : sum, scaled)
        for (long i = 0; i < size; i++) sum += roots[i], scaled += roots[i] * gradient[i];
        float mean = scaled / sum;
        for (long i = 0; i < size; i++) result[i] = roots[i] * (gradient[i] - mean);
    }
}

/* Which rows, or tokens, are a thread's. */
#define BY_THREADS(count, numbers)                                                                \
    long threads = worth(numbers, most_threads), each = (count + threads - 1) / threads;          \
    _Pragma("omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)")         \
    for (long first = 0; first < count; first += each)

void polyad_entmax_forward(
    const float *scores, float *roots, float *squares, long rows, long size, long most, float small,
    long most_threads) {
    BY_THREADS(rows, rows * size)
    entmax_rows(
        scores + first * size, roots + first * size, squares + first * size,
        least(each, rows - first), size, most, small);
}

void polyad_entmax_backward(
    const float *roots, const float *gradient, float *result, long rows, long size,
    long most_threads) {
    BY_THREADS(rows, rows * size)
    entmax_gradient_rows(
        roots + first * size, gradient + first * size, result + first * size,
        least(each, rows - first), size);
}

/* Of each token c = a b, of [P, Q] and [Q, R]; and the gradients of a and b for one of c. */
#define OF_TYPE(type, name, read, write)                                                          \
    EACH_PROCESSOR void product_##name(                                                           \
        const type *restrict a, const type *restrict b, type *restrict c, long tokens, long p,    \
        long q, long r) {                                                                         \
        float wide[ORDER][COLUMNS], sum[COLUMNS];                                                 \
        for (long token = 0; token < tokens; token++, a += p * q, b += q * r, c += p * r)         \
            for (long first = 0; first < r; first += COLUMNS) {                                   \
                long size = least(COLUMNS, r - first);                                            \
                for (long j = 0; j < q; j++)                                                      \
                    for (long k = 0; k < size; k++) wide[j][k] = read(b[j * r + first + k]);      \
                for (long i = 0; i < p; i++) {                                                    \
                    for (long k = 0; k < size; k++) sum[k] = 0.0f;                                \
                    for (long j = 0; j < q; j++) {                                                \
                        float factor = read(a[i * q + j]);                                        \
                        for (long k = 0; k < size; k++) sum[k] += factor * wide[j][k];            \
                    }                                                                             \
                    for (long k = 0; k < size; k++) c[i * r + first + k] = write(sum[k]);         \
                }                                                                                 \
            }                                                                                     \
    }                                                                                             \
                                                                                                  \
    EACH_PROCESSOR void product_gradients_##name(                                                 \
        const type *restrict a, const type *restrict b, const type *restrict gradient,            \
        type *restrict for_a, type *restrict for_b, long tokens, long p, long q, long r) {        \
        float wide[ORDER][COLUMNS], of_c[ORDER][COLUMNS], sum[COLUMNS], of_a[ORDER][ORDER];       \
        for (long token = 0; token < tokens; token++) {                                           \
            for (long i = 0; i < p; i++)                                                          \
                for (long j = 0; j < q; j++) of_a[i][j] = 0.0f;                                   \
            for (long first = 0; first < r; first += COLUMNS) {                                   \
                long size = least(COLUMNS, r - first);                                            \
                for (long j = 0; j < q; j++)                                                      \
                    for (long k = 0; k < size; k++) wide[j][k] = read(b[j * r + first + k]);      \
                for (long i = 0; i < p; i++)                                                      \
                    for (long k = 0; k < size; k++)                                               \
                        of_c[i][k] = read(gradient[i * r + first + k]);                           \
                for (long j = 0; j < q; j++) {                                                    \
                    for (long k = 0; k < size; k++) sum[k] = 0.0f;                                \
                    for (long i = 0; i < p; i++) {                                                \
                        float factor = read(a[i * q + j]), dot = 0.0f;                            \
                        _Pragma("omp simd reduction(+ : dot)")                                    \
                        for (long k = 0; k < size; k++) {                                         \
                            dot += of_c[i][k] * wide[j][k];                                       \
                            sum[k] += factor * of_c[i][k];                                        \
                        }                                                                         \
                        of_a[i][j] += dot;                                                        \
                    }                                                                             \
                    for (long k = 0; k < size; k++) for_b[j * r + first + k] = write(sum[k]);     \
                }                                                                                 \
            }                                                                                     \
            for (long i = 0; i < p; i++)                                                          \
                for (long j = 0; j < q; j++) for_a[i * q + j] = write(of_a[i][j]);                \
            a += p * q, for_a += p * q, b += q * r, for_b += q * r, gradient += p * r;            \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    void polyad_product_forward_##name(                                                           \
        const type *a, const type *b, type *c, long tokens, long p, long q, long r,               \
        long most_threads) {                                                                      \
        BY_THREADS(tokens, tokens * q * r)                                                        \
        product_##name(a + first * p * q, b + first * q * r, c + first * p * r,                   \
                       least(each, tokens - first), p, q, r);                                     \
    }                                                                                             \
                                                                                                  \
    void polyad_product_backward_##name(                                                          \
        const type *a, const type *b, const type *gradient, type *for_a, type *for_b,             \
        long tokens, long p, long q, long r, long most_threads) {                                 \
        BY_THREADS(tokens, tokens * q * r)                                                        \
        product_gradients_##name(a + first * p * q, b + first * q * r, gradient + first * p * r,  \
                                 for_a + first * p * q, for_b + first * q * r,                    \
                                 least(each, tokens - first), p, q, r);                           \
    }

OF_TYPE(uint16_t, bf16, widen, narrow)
OF_TYPE(float, fp32, same, same)

/* The most that a token's small matrices may have. */
const int polyad_product_order = ORDER;

/* Of what the functions above take: the same number stands in tokens.py. */
const int polyad_tokens_version = 1;
