/* The mixture p = S r of a graph of tokens on a processor that multiplies tiles of bf16 (Intel's
   AMX), and its gradients: see mixing_tiles.py, whose names these are. Nothing of T x T is ever held.

       l_ij = scale (q_i . k_j)      S_i = softmax(l_i)      p_i = sum_j S_ij r_j

   A block of 32 rows is one work item's; the lanes of a vector are its rows, so that a softmax goes
   down the keys without a sum across lanes. Keys come in stretches that stay in the cache, and the
   softmax is corrected as its maximum grows (Milakov and Gimelshein 2018). Products are of bf16 and
   summed in fp32; everything else is fp32. What a row gets depends on no other row block, so any
   number of threads gives the same numbers.

   In the backward pass a block of rows makes its own gradient alone: as queries it needs the keys
   that it sees (the row part), as keys the queries that see it (the column part). Where query and
   key are one, l is the same for both and is computed once. */

#include "../tiles.h"

#ifdef HAS_TILES

#include <math.h>
#include <omp.h>
#include <string.h>

#define ROWS 32     /* Of a block: two tiles. */
#define STRETCH 256 /* Keys that are looked at together. */
#define GROUP 4     /* The most blocks that look at a stretch one after the other. */
#define AT_ONCE 8   /* Columns of the scores that are summed in registers. */

typedef struct {
    const bf16 *own, *other;              /* [T, F]: the rows' features, and those they meet. */
    const float *over_own, *over_other;   /* [T]: one over their lengths; NULL: 1. */
    const float *value, *gradient;        /* [T, E] */
    const float *log_sum, *inner;         /* [T] */
    const float *entropy;                 /* [T]: one sees those with no more of it; NULL: all. */
    long tokens, width, experts, stride;  /* stride: numbers from one token's features to the next */
    float scale;
    int causal, row_part, column_part;
} graph_t;

/* Of one thread. */
typedef struct {
    bf16 *turned;    /* [GROUP][F / DEPTH][2][TILE][TILE] pairs: the blocks' features, transposed. */
    float *products; /* [STRETCH][ROWS], and a tile in front of it */
    float *weights;  /* [STRETCH][ROWS] */
    bf16 *changes;   /* [ROWS][STRETCH] */
    bf16 *paired;    /* [STRETCH / DEPTH][F / TILE][TILE][TILE] pairs: a stretch's features. */
    float *sums;     /* [GROUP][ROWS][F] */
    float *of_value; /* [GROUP][E][ROWS] */
    float *turned_value, *turned_gradient; /* [GROUP][E][ROWS] */
    float *most, *sum, *spread;            /* [GROUP][ROWS] */
} scratch_t;

static float *numbers(char **next, long count) {
    float *here = (float *)*next;
    *next += (count * 4 + 63) / 64 * 64;
    return here;
}

/* Lays scratch out from some address on; returns how many bytes it takes. */
static long lay_out(scratch_t *s, char *memory, long width, long experts, int backward) {
    char *next = memory;
    s->turned = (bf16 *)numbers(&next, GROUP * ROWS * width / 2);
    s->products = numbers(&next, (TILE + STRETCH) * ROWS) + TILE * ROWS;
    s->weights = numbers(&next, STRETCH * ROWS);
    s->changes = (bf16 *)numbers(&next, ROWS * STRETCH / 2);
    s->of_value = numbers(&next, GROUP * experts * ROWS);
    s->turned_value = numbers(&next, GROUP * experts * ROWS);
    s->turned_gradient = numbers(&next, GROUP * experts * ROWS);
    s->most = numbers(&next, GROUP * ROWS);
    s->sum = numbers(&next, GROUP * ROWS);
    s->spread = numbers(&next, GROUP * ROWS);
    s->paired = (bf16 *)numbers(&next, backward ? STRETCH * width / 2 : 0);
    s->sums = numbers(&next, backward ? GROUP * ROWS * width : 0);
    return next - memory;
}

/* exp(x) to about 2e-7; 0 from -100 down, also for -inf; what is no number stays none. */
static inline __m512 exponential(__m512 x) {
    __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-100.0f), _CMP_NLE_UQ);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.4426950408889634f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.0f / 720.0f);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 120.0f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 24.0f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 6.0f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.5f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(counts, y, n);
}

/* Rows' features as the second factor of a product: pairs of numbers down, rows across. */
static void turn_rows(const graph_t *g, const int32_t *rows, long there, bf16 *turned) {
    for (long depth = 0; depth < g->width; depth += DEPTH)
        for (long half = 0; half < 2; half++, turned += TILE * DEPTH) {
            __m512i x[16];
            for (long i = 0; i < TILE; i++) {
                long row = half * TILE + i;
                x[i] = row < there ? _mm512_loadu_si512(g->own + rows[row] * g->stride + depth)
                                   : _mm512_setzero_si512();
            }
            transpose(x);
            for (long i = 0; i < TILE; i++) _mm512_store_si512(turned + i * DEPTH, x[i]);
        }
}

static void turn_block(const graph_t *g, long first, bf16 *turned) {
    int32_t rows[ROWS];
    for (long i = 0; i < ROWS; i++) rows[i] = (int32_t)(first + i);
    turn_rows(g, rows, least(ROWS, g->tokens - first), turned);
}

/* Scores, or a gradient of theirs, of a block: experts down, rows across. */
static void turn_scores(const graph_t *g, const float *scores, long first, float *turned) {
    long there = least(ROWS, g->tokens - first);
    for (long e = 0; e < g->experts; e++)
        for (long i = 0; i < ROWS; i++)
            turned[e * ROWS + i] = i < there ? scores[(first + i) * g->experts + e] : 0.0f;
}

/* A stretch's features as the second factor: pairs of tokens down, numbers across. */
static void pair_features(const graph_t *g, long from, long to, bf16 *paired) {
    long tiles = g->width / TILE;
    for (long start = from; start < to; start += DEPTH)
        for (long pair = 0; pair < TILE; pair++) {
            long a = start + 2 * pair, b = a + 1;
            const bf16 *of_a = g->other + a * g->width, *of_b = of_a + g->width;
            bf16 *here = paired + (start - from) * g->width + pair * DEPTH;
            for (long tile = 0; tile < tiles; tile++, here += TILE * DEPTH) {
                __m512i low = _mm512_setzero_si512(), high = low;
                if (a < to) {
                    if ((tile & 1) == 0) {
                        _mm_prefetch((const char *)(of_a + 4 * g->width + tile * TILE), _MM_HINT_T0);
                        _mm_prefetch((const char *)(of_b + 4 * g->width + tile * TILE), _MM_HINT_T0);
                    }
                    low = _mm512_cvtepu16_epi32(
                        _mm256_loadu_si256((const __m256i *)(of_a + tile * TILE)));
                }
                if (b < to)
                    high = _mm512_cvtepu16_epi32(
                        _mm256_loadu_si256((const __m256i *)(of_b + tile * TILE)));
                _mm512_store_si512(here, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
        }
}

/* products[j][i] = own_i . other_j of a block and the tokens from .. to, at least a tile of them. */
static void multiply(const graph_t *g, const bf16 *turned, long from, long to, float *products) {
    long stride = g->stride * sizeof(bf16);
    SETTLE_MEMORY(turned);
    for (long token = from; token < to; token += 2 * TILE) {
        /* The last tiles begin earlier instead of ending later: the same numbers come again. */
        long one = least(token, to - TILE), two = least(token + TILE, to - TILE);
        const bf16 *a = g->other + one * g->stride, *b = g->other + two * g->stride;
        const bf16 *next = g->other + (token + 2 * TILE) * g->stride;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const bf16 *block = turned;
        for (long depth = 0; depth < g->width; depth += DEPTH, block += 2 * TILE * DEPTH) {
            _tile_loadd(4, a + depth, stride);
            _tile_loadd(6, block, 64);
            _tile_loadd(7, block + TILE * DEPTH, 64);
            _tile_loadd(5, b + depth, stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            if (token + 4 * TILE <= to)
                for (long i = 0; i < 2 * TILE; i++)
                    _mm_prefetch((const char *)(next + i * g->stride + depth), _MM_HINT_T0);
        }
        float *at = products + (one - from) * ROWS, *at_two = products + (two - from) * ROWS;
        _tile_stored(0, at, ROWS * 4);
        _tile_stored(1, at + TILE, ROWS * 4);
        _tile_stored(2, at_two, ROWS * 4);
        _tile_stored(3, at_two + TILE, ROWS * 4);
    }
    SETTLE_MEMORY(products);
}

/* sums[e][i] += sum over j of weights[j][i] scores[j][e] */
static void add_weighted(
    const float *weights, const float *scores, long tokens, long experts, float *sums) {
    for (long first = 0; first < experts; first += AT_ONCE) {
        long count = least(AT_ONCE, experts - first);
        __m512 a[AT_ONCE], b[AT_ONCE];
        for (long e = 0; e < AT_ONCE; e++) {
            long at = least(first + e, experts - 1) * ROWS;
            a[e] = _mm512_load_ps(sums + at);
            b[e] = _mm512_load_ps(sums + at + TILE);
        }
        for (long j = 0; j < tokens; j++) {
            __m512 weight_a = _mm512_load_ps(weights + j * ROWS);
            __m512 weight_b = _mm512_load_ps(weights + j * ROWS + TILE);
            const float *of = scores + j * experts + first;
            for (long e = 0; e < AT_ONCE; e++) {
                __m512 score = _mm512_set1_ps(of[e < count ? e : count - 1]);
                a[e] = _mm512_fmadd_ps(weight_a, score, a[e]);
                b[e] = _mm512_fmadd_ps(weight_b, score, b[e]);
            }
        }
        for (long e = 0; e < count; e++) {
            _mm512_store_ps(sums + (first + e) * ROWS, a[e]);
            _mm512_store_ps(sums + (first + e) * ROWS + TILE, b[e]);
        }
    }
}

/* What a half of a block's lanes is compared and multiplied with. */
typedef struct {
    __m512i row;
    __m512 over, entropy;
    __mmask16 there;
} lanes_t;

static inline __m512 load_lanes(const float *from, __mmask16 there, float otherwise) {
    return from ? _mm512_mask_loadu_ps(_mm512_set1_ps(otherwise), there, from)
                : _mm512_set1_ps(otherwise);
}

static inline lanes_t lanes_of(const graph_t *g, long first) {
    lanes_t lanes;
    long there = g->tokens - first;
    lanes.there = there >= TILE ? 0xffff : there <= 0 ? 0 : (__mmask16)((1u << there) - 1);
    lanes.row = _mm512_add_epi32(
        _mm512_set1_epi32((int)first),
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    lanes.over = load_lanes(g->over_own ? g->over_own + first : 0, lanes.there, 1.0f);
    lanes.over = _mm512_mul_ps(lanes.over, _mm512_set1_ps(g->scale));
    lanes.entropy = load_lanes(g->entropy ? g->entropy + first : 0, lanes.there, 0.0f);
    return lanes;
}

/* Which lanes see token j. */
static inline __mmask16 see(const graph_t *g, const lanes_t *lanes, long j) {
    __mmask16 seen = 0xffff;
    if (g->causal) seen = _mm512_cmpge_epi32_mask(lanes->row, _mm512_set1_epi32((int)j));
    if (g->entropy)
        seen &= _mm512_cmp_ps_mask(_mm512_set1_ps(g->entropy[j]), lanes->entropy, _CMP_LE_OQ);
    return seen;
}

/* Which lanes token j sees. */
static inline __mmask16 seen_by(const graph_t *g, const lanes_t *lanes, long j) {
    __mmask16 seen = lanes->there;
    if (g->causal) seen &= _mm512_cmple_epi32_mask(lanes->row, _mm512_set1_epi32((int)j));
    if (g->entropy)
        seen &= _mm512_cmp_ps_mask(lanes->entropy, _mm512_set1_ps(g->entropy[j]), _CMP_LE_OQ);
    return seen;
}

/* One stretch of keys more: the maximum, the sum, sum w (l - most) and sum w r of half a block. */
static void grow(
    const graph_t *g, const lanes_t *lanes, long from, long to, float *products, float *most_at,
    float *sum_at, float *spread_at, float *of_value) {
    __m512 old = _mm512_load_ps(most_at), most = old;
    for (long j = from; j < to; j++) {
        float *at = products + (j - from) * ROWS;
        __m512 over = lanes->over;
        if (g->over_other) over = _mm512_mul_ps(over, _mm512_set1_ps(g->over_other[j]));
        __m512 l = _mm512_mul_ps(_mm512_load_ps(at), over);
        l = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), see(g, lanes, j), l);
        most = _mm512_max_ps(most, l);
        _mm512_store_ps(at, l);
    }
    /* Rows that have seen nothing yet. */
    __mmask16 any = _mm512_cmp_ps_mask(most, _mm512_set1_ps(-INFINITY), _CMP_GT_OQ);
    __m512 by = _mm512_maskz_mov_ps(any, most);
    __mmask16 before = _mm512_cmp_ps_mask(old, _mm512_set1_ps(-INFINITY), _CMP_GT_OQ);
    __m512 down = _mm512_maskz_sub_ps(before, old, by);
    __m512 share = _mm512_maskz_mov_ps(before, exponential(down));
    __m512 sum = _mm512_mul_ps(_mm512_load_ps(sum_at), share);
    __m512 spread = _mm512_fmadd_ps(_mm512_load_ps(spread_at), share, _mm512_mul_ps(sum, down));
    for (long e = 0; e < g->experts; e++)
        _mm512_store_ps(
            of_value + e * ROWS, _mm512_mul_ps(_mm512_load_ps(of_value + e * ROWS), share));
    for (long j = from; j < to; j++) {
        float *at = products + (j - from) * ROWS;
        __m512 below = _mm512_sub_ps(_mm512_load_ps(at), by);
        __m512 weight = exponential(below);
        sum = _mm512_add_ps(sum, weight);
        __mmask16 counts = _mm512_cmp_ps_mask(weight, _mm512_setzero_ps(), _CMP_GT_OQ);
        spread = _mm512_mask3_fmadd_ps(weight, below, spread, counts);
        _mm512_store_ps(at, weight);
    }
    _mm512_store_ps(most_at, most);
    _mm512_store_ps(sum_at, sum);
    _mm512_store_ps(spread_at, spread);
}

/* The blocks first .. last of one sequence. */
static void forward_group(
    const graph_t *g, scratch_t *s, long first, long last, float *mixed, float *log_sum,
    float *neighbours) {
    long features = ROWS * g->width, scores = g->experts * ROWS;
    for (long b = first; b < last; b++) {
        turn_block(g, b * ROWS, s->turned + (b - first) * features);
        for (long i = 0; i < ROWS; i++) {
            s->most[(b - first) * ROWS + i] = -INFINITY;
            s->sum[(b - first) * ROWS + i] = s->spread[(b - first) * ROWS + i] = 0.0f;
        }
    }
    memset(s->of_value, 0, (last - first) * scores * 4);
    long end = g->causal ? least(g->tokens, last * ROWS) : g->tokens;
    for (long from = 0; from < end; from += STRETCH)
        for (long b = first; b < last; b++) {
            long to = least(from + STRETCH, g->causal ? least(end, (b + 1) * ROWS) : end);
            if (from >= to) continue;
            float *of_value = s->of_value + (b - first) * scores;
            multiply(g, s->turned + (b - first) * features, from, to, s->products);
            for (long half = 0; half < ROWS; half += TILE) {
                lanes_t lanes = lanes_of(g, b * ROWS + half);
                long at = (b - first) * ROWS + half;
                grow(g, &lanes, from, to, s->products + half, s->most + at, s->sum + at,
                     s->spread + at, of_value + half);
            }
            add_weighted(
                s->products, g->value + from * g->experts, to - from, g->experts, of_value);
        }
    for (long row = first * ROWS; row < least(last * ROWS, g->tokens); row++) {
        long at = row - first * ROWS;
        float over = 1.0f / s->sum[at], log_of = logf(s->sum[at]);
        const float *of_value = s->of_value + at / ROWS * scores + at % ROWS;
        for (long e = 0; e < g->experts; e++)
            mixed[row * g->experts + e] = of_value[e * ROWS] * over;
        log_sum[row] = s->most[at] + log_of;
        neighbours[row] = expf(log_of - s->spread[at] * over);
    }
}

/* changes of half a block for one stretch: the gradients of l, from either part, over products;
   weights: how much each later token takes of these rows. */
static void change(
    const graph_t *g, const lanes_t *lanes, long first, long from, long to, float *products,
    float *weights, const float *turned_value, const float *turned_gradient) {
    __m512 log_sum = load_lanes(g->log_sum + first, lanes->there, 0.0f);
    __m512 inner = load_lanes(g->inner + first, lanes->there, 0.0f);
    for (long j = from; j < to; j++) {
        float *at = products + (j - from) * ROWS;
        __m512 over = lanes->over, total = _mm512_setzero_ps();
        if (g->over_other) over = _mm512_mul_ps(over, _mm512_set1_ps(g->over_other[j]));
        __m512 l = _mm512_mul_ps(_mm512_load_ps(at), over);
        __mmask16 rows = g->row_part ? see(g, lanes, j) & lanes->there : 0;
        if (rows) {
            const float *value = g->value + j * g->experts;
            __m512 a = inner, b = _mm512_setzero_ps();
            long e = 0;
            for (; e + 1 < g->experts; e += 2) {
                a = _mm512_fnmadd_ps(
                    _mm512_load_ps(turned_gradient + e * ROWS), _mm512_set1_ps(value[e]), a);
                b = _mm512_fmadd_ps(
                    _mm512_load_ps(turned_gradient + e * ROWS + ROWS), _mm512_set1_ps(value[e + 1]),
                    b);
            }
            if (e < g->experts)
                b = _mm512_fmadd_ps(
                    _mm512_load_ps(turned_gradient + e * ROWS), _mm512_set1_ps(value[e]), b);
            __m512 weight = exponential(_mm512_sub_ps(l, log_sum));
            total = _mm512_maskz_mul_ps(rows, weight, _mm512_sub_ps(b, a));
        }
        if (g->column_part) {
            __mmask16 columns = seen_by(g, lanes, j);
            __m512 weight = _mm512_setzero_ps();
            if (columns) {
                const float *gradient = g->gradient + j * g->experts;
                __m512 a = _mm512_set1_ps(g->inner[j]), b = _mm512_setzero_ps();
                long e = 0;
                for (; e + 1 < g->experts; e += 2) {
                    a = _mm512_fnmadd_ps(
                        _mm512_load_ps(turned_value + e * ROWS), _mm512_set1_ps(gradient[e]), a);
                    b = _mm512_fmadd_ps(
                        _mm512_load_ps(turned_value + e * ROWS + ROWS),
                        _mm512_set1_ps(gradient[e + 1]), b);
                }
                if (e < g->experts)
                    b = _mm512_fmadd_ps(
                        _mm512_load_ps(turned_value + e * ROWS), _mm512_set1_ps(gradient[e]), b);
                weight = exponential(_mm512_sub_ps(l, _mm512_set1_ps(g->log_sum[j])));
                weight = _mm512_maskz_mov_ps(columns, weight);
                total = _mm512_fmadd_ps(weight, _mm512_sub_ps(b, a), total);
            }
            _mm512_store_ps(weights + (j - from) * ROWS, weight);
        }
        _mm512_store_ps(at, _mm512_mul_ps(total, over));
    }
}

/* changes[i][j] = products[j][i] in bf16, and 0 up to a whole tile. */
static void turn_changes(const float *products, long tokens, bf16 *changes) {
    for (long j = 0; j < (tokens + DEPTH - 1) / DEPTH * DEPTH; j += TILE)
        for (long half = 0; half < ROWS; half += TILE) {
            __m512i x[16];
            for (long i = 0; i < TILE; i++)
                x[i] = j + i < tokens ? _mm512_load_si512(products + (j + i) * ROWS + half)
                                      : _mm512_setzero_si512();
            transpose(x);
            for (long i = 0; i < TILE; i++)
                _mm256_store_si256(
                    (__m256i *)(changes + (half + i) * STRETCH + j),
                    (__m256i)_mm512_cvtneps_pbh(_mm512_castsi512_ps(x[i])));
        }
}

/* sums[i] (+)= sum over j of changes[i][j] other_j */
static void multiply_back(
    const graph_t *g, const bf16 *changes, const bf16 *paired, long tokens, int fresh, float *sums) {
    long stride = g->width * 4;
    SETTLE_MEMORY(changes);
    for (long column = 0; column < g->width; column += 2 * TILE) {
        float *at = sums + column, *below = at + TILE * g->width;
        if (fresh) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, at, stride);
            _tile_loadd(1, at + TILE, stride);
            _tile_loadd(2, below, stride);
            _tile_loadd(3, below + TILE, stride);
        }
        for (long depth = 0; depth < tokens; depth += DEPTH) {
            const bf16 *tile = paired + depth * g->width + column / TILE * (TILE * DEPTH);
            _tile_loadd(4, changes + depth, STRETCH * 2);
            _tile_loadd(5, changes + TILE * STRETCH + depth, STRETCH * 2);
            _tile_loadd(6, tile, 64);
            _tile_loadd(7, tile + TILE * DEPTH, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, at, stride);
        _tile_stored(1, at + TILE, stride);
        _tile_stored(2, below, stride);
        _tile_stored(3, below + TILE, stride);
    }
    SETTLE_MEMORY(sums);
}

static inline __m512 widened(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

/* The gradient of a row in bf16; where lengths are divided by, without what would change its own. */
static void finish(const graph_t *g, long row, const float *sums, bf16 *result) {
    const bf16 *own = g->own + row * g->width;
    __m512 less = _mm512_setzero_ps();
    if (g->over_own) {
        __m512 along = _mm512_setzero_ps();
        for (long f = 0; f < g->width; f += TILE)
            along = _mm512_fmadd_ps(_mm512_load_ps(sums + f), widened(own + f), along);
        less = _mm512_set1_ps(_mm512_reduce_add_ps(along) * g->over_own[row] * g->over_own[row]);
    }
    for (long f = 0; f < g->width; f += TILE) {
        __m512 x = _mm512_fnmadd_ps(less, widened(own + f), _mm512_load_ps(sums + f));
        _mm256_storeu_si256(
            (__m256i *)(result + row * g->width + f), (__m256i)_mm512_cvtneps_pbh(x));
    }
}

static void backward_group(
    const graph_t *g, scratch_t *s, long first, long last, bf16 *result, float *for_value) {
    long features = ROWS * g->width, scores = g->experts * ROWS;
    for (long b = first; b < last; b++) {
        turn_block(g, b * ROWS, s->turned + (b - first) * features);
        turn_scores(g, g->value, b * ROWS, s->turned_value + (b - first) * scores);
        turn_scores(g, g->gradient, b * ROWS, s->turned_gradient + (b - first) * scores);
    }
    memset(s->of_value, 0, (last - first) * scores * 4);
    /* A causal row meets what it sees, and what sees it. */
    long begin = g->causal && !g->row_part ? first * ROWS / STRETCH * STRETCH : 0;
    long end = g->causal && !g->column_part ? least(g->tokens, last * ROWS) : g->tokens;
    for (long from = begin; from < end; from += STRETCH) {
        long to = least(from + STRETCH, end);
        pair_features(g, from, to, s->paired);
        for (long b = first; b < last; b++) {
            long row = b * ROWS, at = (b - first) * ROWS * g->width;
            multiply(g, s->turned + (b - first) * features, from, to, s->products);
            for (long half = 0; half < ROWS; half += TILE) {
                lanes_t lanes = lanes_of(g, row + half);
                change(g, &lanes, row + half, from, to, s->products + half, s->weights + half,
                       s->turned_value + (b - first) * scores + half,
                       s->turned_gradient + (b - first) * scores + half);
            }
            if (g->column_part)
                add_weighted(
                    s->weights, g->gradient + from * g->experts, to - from, g->experts,
                    s->of_value + (b - first) * scores);
            turn_changes(s->products, to - from, s->changes);
            multiply_back(g, s->changes, s->paired, to - from, from == begin, s->sums + at);
        }
    }
    for (long row = first * ROWS; row < least(last * ROWS, g->tokens); row++) {
        long at = row - first * ROWS;
        finish(g, row, s->sums + at * g->width, result);
        for (long e = 0; e < g->experts && g->column_part; e++)
            for_value[row * g->experts + e] =
                s->of_value[at / ROWS * scores + e * ROWS + at % ROWS];
    }
}

/* One over the length of a token's features, as PyTorch's `normalize` has it. */
static float over_length(const bf16 *features, long width) {
    __m512 sum = _mm512_setzero_ps();
    for (long f = 0; f < width; f += TILE) {
        _mm_prefetch((const char *)(features + 4 * width + f), _MM_HINT_T0);
        sum = _mm512_fmadd_ps(widened(features + f), widened(features + f), sum);
    }
    float length = sqrtf(_mm512_reduce_add_ps(sum));
    return 1.0f / (length > 1e-12f ? length : 1e-12f);
}

/* The mean entropy of the softmax at some rows of one head: the rows are lanes, a block at a time. */
static float mean_entropy(const graph_t *g, scratch_t *s, const long *rows, long count) {
    double total = 0.0;
    for (long first = 0; first < count; first += ROWS) {
        long there = least(ROWS, count - first);
        int32_t row[ROWS];
        for (long i = 0; i < ROWS; i++) {
            row[i] = (int32_t)rows[first + least(i, there - 1)];
            s->most[i] = -INFINITY;
            s->sum[i] = s->spread[i] = 0.0f;
        }
        turn_rows(g, row, ROWS, s->turned);
        long end = g->causal ? row[there - 1] + 1 : g->tokens;
        end = least(g->tokens, (end + TILE - 1) / TILE * TILE);
        for (long from = 0; from < end; from += STRETCH) {
            long to = least(from + STRETCH, end);
            multiply(g, s->turned, from, to, s->products);
            for (long half = 0; half < ROWS; half += TILE) {
                lanes_t lanes = lanes_of(g, 0);
                lanes.row = _mm512_loadu_si512(row + half);
                grow(g, &lanes, from, to, s->products + half, s->most + half, s->sum + half,
                     s->spread + half, 0);
            }
        }
        for (long i = 0; i < there; i++) total += logf(s->sum[i]) - s->spread[i] / s->sum[i];
    }
    return (float)(total / count);
}

/* How many blocks a work item has: few enough that every thread gets some. */
static long blocks_together(long blocks, long threads) {
    long each = blocks / (2 * threads);
    return each < 1 ? 1 : least(each, GROUP);
}

/* 1 if this process may use tiles, for which it asks the system. */
int polyad_mixing_prepare(void) { return ask_for_tiles(); }

/* Bytes that each thread needs as scratch. */
long polyad_mixing_scratch(long width, long experts, int backward) {
    scratch_t s;
    return lay_out(&s, 0, width, experts, backward);
}

/* What a thread begins with. */
static void enter(
    scratch_t *s, tiles_t *before, char *scratch, long width, long experts, int backward) {
    long bytes = polyad_mixing_scratch(width, experts, backward);
    lay_out(s, scratch + omp_get_thread_num() * bytes, width, experts, backward);
    take_tiles(before);
}

/* One over the lengths of all features, by all threads; nowhere to put them: they are not asked. */
static void divide_lengths(
    const bf16 *own, const bf16 *other, float *over_own, float *over_other, long rows, long width) {
    if (!over_own) return;
#pragma omp for schedule(static)
    for (long row = 0; row < rows; row++) {
        over_own[row] = over_length(own + row * width, width);
        if (other != own) over_other[row] = over_length(other + row * width, width);
    }
}

/* One sequence of a batch. */
static graph_t sequence_of(const graph_t *batch, long b) {
    graph_t g = *batch;
    long row = b * g.tokens;
    g.own += row * g.width, g.other += row * g.width;
    if (g.over_own) g.over_own += row, g.over_other += row;
    g.value += row * g.experts;
    if (g.gradient) g.gradient += row * g.experts, g.log_sum += row, g.inner += row;
    if (g.entropy) g.entropy += row;
    return g;
}

/* See mixing_tiles.py. Scratch begins at a multiple of 64 bytes. */
void polyad_mixing_forward(
    const bf16 *query, const bf16 *key, float *over_query, float *over_key, const float *value,
    const float *entropy, float *mixed, float *log_sum, float *neighbours, long batch, long tokens,
    long width, long experts, float scale, int causal, char *scratch, long threads) {
    long blocks = (tokens + ROWS - 1) / ROWS, each = blocks_together(batch * blocks, threads);
    long groups = (blocks + each - 1) / each;
    graph_t all = {.own = query, .other = key, .over_own = over_query, .over_other = over_key,
                   .value = value, .entropy = entropy, .tokens = tokens, .width = width,
                   .stride = width, .experts = experts, .scale = scale, .causal = causal};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        scratch_t s;
        tiles_t before;
        enter(&s, &before, scratch, width, experts, 0);
        divide_lengths(query, key, over_query, over_key, batch * tokens, width);
#pragma omp for schedule(dynamic, 1)
        for (long item = 0; item < batch * groups; item++) {
            long b = item % batch, first = (groups - 1 - item / batch) * each;
            graph_t g = sequence_of(&all, b);
            forward_group(&g, &s, first, least(first + each, blocks), mixed + b * tokens * experts,
                          log_sum + b * tokens, neighbours + b * tokens);
        }
        give_tiles(&before);
    }
}

void polyad_mixing_backward(
    const bf16 *own, const bf16 *other, float *over_own, float *over_other, const float *value,
    const float *gradient, const float *log_sum, const float *inner, const float *entropy,
    bf16 *result, float *for_value, long batch, long tokens, long width, long experts, float scale,
    int causal, int row_part, int column_part, char *scratch, long threads) {
    long blocks = (tokens + ROWS - 1) / ROWS, each = blocks_together(batch * blocks, threads);
    long groups = (blocks + each - 1) / each;
    graph_t all = {.own = own, .other = other, .over_own = over_own, .over_other = over_other,
                   .value = value, .gradient = gradient, .log_sum = log_sum, .inner = inner,
                   .entropy = entropy, .tokens = tokens, .width = width, .stride = width,
                   .experts = experts, .scale = scale, .causal = causal, .row_part = row_part,
                   .column_part = column_part};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        scratch_t s;
        tiles_t before;
        enter(&s, &before, scratch, width, experts, 1);
        divide_lengths(own, other, over_own, over_other, batch * tokens, width);
#pragma omp for schedule(dynamic, 1)
        for (long item = 0; item < batch * groups; item++) {
            long b = item % batch, first = item / batch * each;
            if (row_part && !column_part) first = (groups - 1) * each - first;
            graph_t g = sequence_of(&all, b);
            backward_group(&g, &s, first, least(first + each, blocks), result + b * tokens * width,
                           for_value + b * tokens * experts);
        }
        give_tiles(&before);
    }
}

/* result[i][j] = features_i . directions_j, of [tokens, width] and [count, width]. */
void polyad_mixing_project(
    const bf16 *features, const bf16 *directions, float *result, long tokens, long width,
    long count, char *scratch, long threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        graph_t g = {.own = directions, .other = features, .width = width, .stride = width};
        scratch_t s;
        tiles_t before;
        enter(&s, &before, scratch, width, 0, 0);
        for (long first = 0; first < count; first += ROWS) {
            long there = least(ROWS, count - first);
            g.tokens = count;
            turn_block(&g, first, s.turned);
            g.tokens = tokens;
#pragma omp for schedule(static) nowait
            for (long from = 0; from < tokens; from += STRETCH) {
                long to = least(from + STRETCH, tokens);
                multiply(&g, s.turned, from, to, s.products);
                for (long token = from; token < to; token++)
                    memcpy(result + token * count + first, s.products + (token - from) * ROWS,
                           there * 4);
            }
        }
        give_tiles(&before);
    }
}

/* Of each sequence and head the mean entropy of softmax(scale q . k) at some rows, in ascending
   order; strides are numbers from one sequence, head and token to the next. */
void polyad_mixing_entropies(
    const bf16 *query, const bf16 *key, const long *rows, float *entropies, long batch, long heads,
    long tokens, long width, long of_batch, long of_head, long of_token, long count, float scale,
    int causal, char *scratch, long threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        graph_t g = {.tokens = tokens, .width = width, .stride = of_token, .scale = scale,
                     .causal = causal};
        scratch_t s;
        tiles_t before;
        enter(&s, &before, scratch, width, 0, 0);
#pragma omp for schedule(dynamic, 1)
        for (long item = 0; item < batch * heads; item++) {
            long start = item / heads * of_batch + item % heads * of_head;
            g.own = query + start, g.other = key + start;
            entropies[item] = mean_entropy(&g, &s, rows, count);
        }
        give_tiles(&before);
    }
}

/* Of what the functions above take: the same number stands in mixing_tiles.py. */
const int polyad_mixing_version = 1;

#endif
