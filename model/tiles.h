/* What the products in tiles of bf16 (Intel's AMX) share. Elsewhere HAS_TILES is not defined, and the
   libraries that are built on it are empty. */

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11

#define HAS_TILES

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "numbers.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,fma")

#define TILE 16  /* Rows of a tile; as many columns of fp32. */
#define DEPTH 32 /* Numbers of bf16 in a row of a tile. */

/* GCC does not know that tiles, and their configuration, are read from and written to memory. */
#define SETTLE_MEMORY(of) __asm__ volatile("" : : "r"(of) : "memory")

typedef uint16_t bf16;

/* Asks the system for tiles: 1 if this process may use them. */
static inline int ask_for_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t columns[16];
    uint8_t rows[16];
} __attribute__((packed)) tiles_t;

/* What tiles are to be, and what they were: another library may count on it. */
static inline void take_tiles(tiles_t *before) {
    tiles_t wanted = {.palette = 1};
    for (int i = 0; i < 8; i++) wanted.columns[i] = 64, wanted.rows[i] = TILE;
    SETTLE_MEMORY(before);
    _tile_storeconfig(before);
    SETTLE_MEMORY(&wanted);
    _tile_loadconfig(&wanted);
    SETTLE_MEMORY(before);
}

static inline void give_tiles(const tiles_t *before) {
    SETTLE_MEMORY(before);
    if (before->palette)
        _tile_loadconfig(before);
    else
        _tile_release();
}

/* Rows and columns of 16 x 16 numbers change places. */
static inline void transpose(__m512i x[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

#endif
