/* The fused multiply-adds that one core can do when nothing but registers is used: the roof of every matrix product.

   Enough independent chains to cover the latency of the units (8 for two units of latency 4; more do no harm while they
   fit the registers), the widest vectors that the machine has.  The sums stay finite: x = x * 0.999 + 1 tends to 1000. */

#include <time.h>

#if defined(__AVX512F__)
#define BYTES 64
#define CHAINS 24 /* of 32 registers */
#elif defined(__AVX__)
#define BYTES 32
#define CHAINS 12 /* of 16 */
#else
#define BYTES 16
#define CHAINS 12
#endif
#define LANES (BYTES / 4)
#define TURNS 100000 /* between two looks at the clock: about a millisecond */

typedef float vector __attribute__((vector_size(BYTES)));

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

int vector_bytes(void) { return BYTES; }

/* Flops a second over a stretch of about so many seconds; an add and a multiply each count.  `sink` keeps the work. */
double fma_flops(double seconds, float *sink) {
  vector x[CHAINS], factor = {0}, term = {0};
  factor += 0.999f;
  term += 1.0f;
  for (int i = 0; i < CHAINS; i++) x[i] = term * (float)i;
  long turns = 0;
  double start = now(), passed;
  do {
    for (int n = 0; n < TURNS; n++) {
#pragma GCC unroll 24
      for (int i = 0; i < CHAINS; i++) x[i] = x[i] * factor + term;
    }
    turns += TURNS;
    passed = now() - start;
  } while (passed < seconds);
  vector sum = {0};
  for (int i = 0; i < CHAINS; i++) sum += x[i];
  *sink = sum[0];
  return 2.0 * LANES * CHAINS * turns / passed;
}
