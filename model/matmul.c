/* Products C = A B (+ a row) of matrices in bf16 on a processor that multiplies tiles of them (Intel's
   AMX), summed in fp32 and rounded once: see matmul.py, whose names these are.

   C is cut into blocks of 32 x 32, two by two tiles, whose sums stay in registers. A thread has a
   rectangle of blocks. For up to WIDE blocks side by side it brings B into the order of tiles once;
   for each row of blocks A, too, which then stays in the innermost cache while one block after the
   other is computed and the next rows of A are fetched. Long sums are made in several goes, between
   which they wait as fp32. No number depends on how many threads there are. */

#include "tiles.h"

#ifdef HAS_TILES

#include <omp.h>

#define SIDE 32     /* Rows and columns of a block. */
#define WIDE 12     /* The most blocks of a row for which B is at hand. */
#define WHOLE 576   /* Numbers that are summed in one go at most; of longer sums, */
#define GO 384      /* about so many. */
#define TALL 16     /* Rows of blocks whose sums wait. */
#define BLOCK (SIDE * SIDE)
#define STEP (SIDE * DEPTH) /* Numbers of A or B that a block takes at a time: two tiles. */

#define BYTES_OF_B (2L * WIDE * SIDE * WHOLE)
#define BYTES_OF_A (2L * SIDE * WHOLE)
#define BYTES (BYTES_OF_B + BYTES_OF_A + 4L * TALL * WIDE * BLOCK)

/* Strides are numbers from one row, column, or summand (depth) to the next. In A and B one is 1. */
typedef struct {
    const bf16 *a, *b, *row; /* The row: of C's columns, or NULL. */
    bf16 *c;
    long rows, depth, columns, a_row, a_depth, b_depth, b_column, c_row;
} product_t;

/* Of one thread. */
typedef struct {
    bf16 *b;     /* [WIDE][WHOLE / DEPTH][2][TILE][TILE] pairs, one a column */
    bf16 *a;     /* [WHOLE / DEPTH][2][TILE][DEPTH] */
    float *sums; /* [TALL][WIDE][2][2][TILE][TILE] */
} scratch_t;

/* What is summed in one go. */
typedef struct {
    long from, to, steps;
    int begins, ends;
} go_t;

static inline long cut(long whole, long each) { return (whole + each - 1) / each; }

static inline __mmask32 the_first(long count) {
    return count >= 32 ? 0xffffffff : count <= 0 ? 0 : ((__mmask32)1 << count) - 1;
}

/* Numbers of two rows next to each other: the first 16 of both, and the last. */
static inline void pair(__m512i one, __m512i two, __m512i *first, __m512i *last) {
    *first = _mm512_or_si512(
        _mm512_cvtepu16_epi32(_mm512_castsi512_si256(one)),
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(two)), 16));
    *last = _mm512_or_si512(
        _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(one, 1)),
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(two, 1)), 16));
}

/* Some blocks' columns of B, whose columns lie side by side. */
static void pair_b(const product_t *g, const go_t *go, long column, long blocks, bf16 *to) {
    for (long step = 0; step < go->steps; step++)
        for (long i = 0; i < TILE; i++) {
            long depth = go->from + step * DEPTH + 2 * i;
            const bf16 *one = g->b + depth * g->b_depth + column, *two = one + g->b_depth;
            for (long block = 0; block < blocks; block++, one += SIDE, two += SIDE) {
                __mmask32 there = the_first(g->columns - column - block * SIDE);
                bf16 *at = to + (block * go->steps + step) * STEP + i * DEPTH;
                __m512i first, last;
                _mm_prefetch((const char *)(one + 8 * g->b_depth), _MM_HINT_T0);
                _mm_prefetch((const char *)(two + 8 * g->b_depth), _MM_HINT_T0);
                pair(_mm512_maskz_loadu_epi16(depth < go->to ? there : 0, one),
                     _mm512_maskz_loadu_epi16(depth + 1 < go->to ? there : 0, two), &first, &last);
                _mm512_store_si512(at, first);
                _mm512_store_si512(at + TILE * DEPTH, last);
            }
        }
}

/* The same of B with its summands side by side. */
static void turn_b(const product_t *g, const go_t *go, long column, long blocks, bf16 *to) {
    for (long half = 0; half < 2 * blocks; half++) {
        const bf16 *from = g->b + (column + half * TILE) * g->b_column + go->from;
        long there = g->columns - column - half * TILE;
        for (long step = 0; step < go->steps; step++, from += DEPTH) {
            bf16 *at = to + (half / 2 * go->steps + step) * STEP + half % 2 * TILE * DEPTH;
            __mmask32 deep = the_first(go->to - go->from - step * DEPTH);
            __m512i x[TILE];
            for (long i = 0; i < TILE; i++) {
                const bf16 *here = from + i * g->b_column;
                _mm_prefetch((const char *)(here + 4 * DEPTH), _MM_HINT_T0);
                x[i] = _mm512_maskz_loadu_epi16(i < there ? deep : 0, here);
            }
            transpose(x);
            for (long i = 0; i < TILE; i++) _mm512_store_si512(at + i * DEPTH, x[i]);
        }
    }
}

/* A block's rows of A, whose summands lie side by side. */
static void copy_a(const product_t *g, const go_t *go, long row, bf16 *to) {
    for (long i = 0; i < SIDE; i++, to += DEPTH) {
        const bf16 *from = g->a + (row + i) * g->a_row;
        bf16 *at = to;
        for (long depth = go->from; depth < go->to; depth += DEPTH, at += STEP)
            _mm512_store_si512(
                at, _mm512_maskz_loadu_epi16(the_first(go->to - depth), from + depth));
    }
}

/* The same of A with its rows side by side. */
static void turn_a(const product_t *g, const go_t *go, long row, bf16 *to) {
    for (long depth = go->from; depth < go->to; depth += DEPTH, to += STEP) {
        __m512i x[TILE], y[TILE];
        for (long i = 0; i < TILE; i++) {
            const bf16 *one = g->a + (depth + 2 * i) * g->a_depth + row, *two = one + g->a_depth;
            _mm_prefetch((const char *)(one + SIDE), _MM_HINT_T1);
            _mm_prefetch((const char *)(two + SIDE), _MM_HINT_T1);
            pair(_mm512_maskz_loadu_epi16(depth + 2 * i < go->to ? ~0u : 0, one),
                 _mm512_maskz_loadu_epi16(depth + 2 * i + 1 < go->to ? ~0u : 0, two), x + i, y + i);
        }
        transpose(x);
        transpose(y);
        for (long i = 0; i < TILE; i++) {
            _mm512_store_si512(to + i * DEPTH, x[i]);
            _mm512_store_si512(to + (TILE + i) * DEPTH, y[i]);
        }
    }
}

/* What comes soon, a share of it with each block of a row: rows of A, and where C goes. */
typedef struct {
    const bf16 *a, *c;
    long a_row, c_row, first, last;
} soon_t;

static inline void multiply(
    const bf16 *a, const bf16 *b, float *sums, const go_t *go, const soon_t *soon) {
    SETTLE_MEMORY(a);
    SETTLE_MEMORY(b);
    if (go->begins) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + TILE * TILE, 64);
        _tile_loadd(2, sums + 2 * TILE * TILE, 64);
        _tile_loadd(3, sums + 3 * TILE * TILE, 64);
    }
    for (long step = 0; step < go->steps; step++, a += STEP, b += STEP) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + TILE * DEPTH, 64);
        _tile_loadd(5, a + TILE * DEPTH, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        if (soon->c)
            for (long i = step * SIDE / go->steps; i < (step + 1) * SIDE / go->steps; i++)
                __builtin_prefetch(soon->c + i * soon->c_row, 1);
        if (soon->a)
            for (long i = soon->first; i < soon->last; i++)
                _mm_prefetch((const char *)(soon->a + i * soon->a_row + step * DEPTH), _MM_HINT_T1);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE * TILE, 64);
    _tile_stored(2, sums + 2 * TILE * TILE, 64);
    _tile_stored(3, sums + 3 * TILE * TILE, 64);
    SETTLE_MEMORY(sums);
}

/* A block's sums, with the row, as C's numbers: its rows from the skipped ones on. */
static void round_sums(const product_t *g, const float *sums, long row, long skip, long column) {
    __mmask32 there = the_first(g->columns - column);
    __m512i first = _mm512_setzero_si512(), last = first;
    if (g->row)
        pair(first, _mm512_maskz_loadu_epi16(there, g->row + column), &first, &last); /* as fp32 */
    for (long i = skip; i < SIDE; i++) {
        const float *at = sums + (i / TILE * 2 * TILE + i % TILE) * TILE;
        __m512 low = _mm512_add_ps(_mm512_load_ps(at), _mm512_castsi512_ps(first));
        __m512 high = _mm512_add_ps(_mm512_load_ps(at + TILE * TILE), _mm512_castsi512_ps(last));
        __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        _mm512_mask_storeu_epi16(g->c + (row + i) * g->c_row + column, there, rounded);
    }
}

/* The last rows of blocks may begin earlier, so that they end with A; what was there is left. */
static inline long row_of(const product_t *g, long y) { return least(y * SIDE, g->rows - SIDE); }

/* One go of the blocks (y .. to_y, x .. to_x) of C, at most WIDE side by side. */
static void add_go(
    const product_t *g, const scratch_t *s, const go_t *go, long y, long to_y, long x, long to_x) {
    int waits = !(go->begins && go->ends), turned = g->a_depth != 1;
    (g->b_column == 1 ? pair_b : turn_b)(g, go, x * SIDE, to_x - x, s->b);
    for (long here = y; here < to_y; here++) {
        long row = row_of(g, here);
        (turned ? turn_a : copy_a)(g, go, row, s->a);
        soon_t soon = {.a_row = g->a_row, .c_row = g->c_row};
        if (!turned && here + 1 < to_y) soon.a = g->a + row_of(g, here + 1) * g->a_row + go->from;
        for (long i = 0; i < to_x - x; i++) {
            float *sums = s->sums + (waits ? ((here - y) * WIDE + i) * BLOCK : 0);
            soon.first = i * SIDE / (to_x - x), soon.last = (i + 1) * SIDE / (to_x - x);
            soon.c = go->ends ? g->c + row * g->c_row + (x + i) * SIDE : 0;
            multiply(s->a, s->b + i * go->steps * STEP, sums, go, &soon);
            if (go->ends) round_sums(g, sums, row, here * SIDE - row, (x + i) * SIDE);
        }
    }
}

/* The blocks (y .. to_y, x .. to_x) of C. */
static void rectangle(
    const product_t *g, const scratch_t *s, long y, long to_y, long x, long to_x) {
    long steps = cut(g->depth, DEPTH), groups = cut(to_x - x, WIDE);
    long goes = g->depth <= WHOLE ? 1 : cut(steps, GO / DEPTH), tall = goes > 1 ? TALL : to_y - y;
    for (long group = 0; group < groups; group++) {
        long left = x + (to_x - x) * group / groups, right = x + (to_x - x) * (group + 1) / groups;
        for (long top = y; top < to_y; top += tall)
            for (long i = 0; i < goes; i++) {
                long first = steps * i / goes, last = steps * (i + 1) / goes;
                go_t go = {.from = first * DEPTH, .to = least(last * DEPTH, g->depth),
                           .steps = last - first, .begins = i == 0, .ends = i == goes - 1};
                add_go(g, s, &go, top, least(top + tall, to_y), left, right);
            }
    }
}

/* How many threads share the rows; the others share the columns. What is counted is what one thread
   does: blocks, and what it brings into order, which takes about as long as three blocks. */
static long threads_down(long down, long across, int turned, long threads) {
    long best = 1, least_work = -1;
    for (long share = 1; share <= threads; share++) {
        long y = cut(down, share), x = cut(across, threads / share);
        long work = y * x + 3 * x + (turned ? 3 * y * cut(x, WIDE) : 0);
        if (least_work < 0 || work < least_work) best = share, least_work = work;
    }
    return best;
}

/* 1 if this process may use tiles, for which it asks the system. */
int polyad_matmul_prepare(void) { return ask_for_tiles(); }

/* Bytes that each thread needs as scratch. */
long polyad_matmul_scratch(void) { return BYTES; }

/* See matmul.py. At least SIDE rows; scratch begins at a multiple of 64 bytes. */
void polyad_matmul(
    const bf16 *a, const bf16 *b, const bf16 *row, bf16 *c, long rows, long depth, long columns,
    long a_row, long a_depth, long b_depth, long b_column, long c_row, char *scratch,
    long threads) {
    product_t g = {.a = a, .b = b, .row = row, .c = c, .rows = rows, .depth = depth,
                   .columns = columns, .a_row = a_row, .a_depth = a_depth, .b_depth = b_depth,
                   .b_column = b_column, .c_row = c_row};
    long down = cut(rows, SIDE), across = cut(columns, SIDE);
    long shares = threads_down(down, across, a_depth != 1, threads), wide = threads / shares;
    threads = shares * wide;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        char *here = scratch + omp_get_thread_num() * BYTES;
        scratch_t s = {.b = (bf16 *)here, .a = (bf16 *)(here + BYTES_OF_B),
                       .sums = (float *)(here + BYTES_OF_B + BYTES_OF_A)};
        tiles_t before;
        take_tiles(&before);
#pragma omp for schedule(static, 1)
        for (long part = 0; part < threads; part++) {
            long i = part / wide, j = part % wide;
            rectangle(&g, &s, down * i / shares, down * (i + 1) / shares, across * j / wide,
                      across * (j + 1) / wide);
        }
        give_tiles(&before);
    }
}

/* Of what the function above takes: the same number stands in matmul.py. */
const int polyad_matmul_version = 1;

#endif
