/* Numbers of bf16 and fp32 for loops of which a compiler makes vectors; a variant of such a function for
   each generation of x86 processors is chosen when it is loaded. */

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
