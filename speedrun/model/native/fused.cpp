// The elementwise parts of the model, each in one pass over memory forward and one backward; fp32.
//
// A thread takes whole rows or whole chunks, so the bits do not depend on the number of threads.
//
// Legend: T tokens of a row of the batch, H heads, K head width.
#include <algorithm>
#include <cmath>
#include <vector>

#include "norm.h"
#include "parallel.h"

namespace {

constexpr int64_t CHUNK = 4096;   // of a flat array: 16 kB
constexpr int64_t SMALL = 16384;  // elements that one thread does sooner than it wakes another

// Items of `size` elements each, in eight runs a thread.
template <typename Visit>
void each(int64_t count, int64_t size, int threads, const Visit& visit) {
  if (count * size <= SMALL) threads = 1;
  share_out(count, count / (8 * threads) + 1, threads, visit);
}

// body(at) over a flat array.
template <typename Body>
void each_chunk(int64_t size, int threads, const Body& body) {
  each((size + CHUNK - 1) / CHUNK, CHUNK, threads,
       [=](int64_t i) { sweep(i * CHUNK, std::min(size, (i + 1) * CHUNK), body); });
}

// Whether keys of this width have quarters to offset, in rows of whole batches.
bool quartered(int64_t tokens, int64_t T, int64_t K) {
  return K % 4 == 0 && (tokens == 0 || (T > 0 && tokens % T == 0));
}

}  // namespace

// Rows of the batch, each normed and rotated (norm.h); `r` and the angles may be null.
extern "C" int norm_rotate_forward(const float* x, const float* cos, const float* sin, float eps,
                                    float* y, float* r, int64_t tokens, int64_t T, int64_t H,
                                    int64_t K, int threads) {
  if (!turnable(cos, tokens, T, K)) return BAD_SIZE;
  Angles angles{cos, sin, T, K / 2};
  each(tokens, H * K, threads, [=](int64_t t) {
    norm_rotate(x + t * H * K, angles, t, eps, y + t * H * K, r ? r + t * H : nullptr, H, K);
  });
  return 0;
}

extern "C" int norm_rotate_backward(const float* g, const float* y, const float* r,
                                     const float* cos, const float* sin, float* dx, int64_t tokens,
                                     int64_t T, int64_t H, int64_t K, int threads) {
  if (!turnable(cos, tokens, T, K)) return BAD_SIZE;
  Angles angles{cos, sin, T, K / 2};
  each(tokens, H * K, threads, [=](int64_t t) {
    int64_t at = t * H * K;
    undo_norm_rotate(g + at, y + at, r ? r + t * H : nullptr, angles, t, dx + at, H, K);
  });
  return 0;
}

// Each key's unrotated quarters, the second and the last, from the token before; a document's first token
// keeps its own.
extern "C" int offset_keys_forward(const float* k, const float* starts, float* y, int64_t tokens,
                                    int64_t T, int64_t H, int64_t K, int threads) {
  if (!quartered(tokens, T, K)) return BAD_SIZE;
  each(tokens, H * K, threads, [=](int64_t t) {
    int64_t size = H * K, quarter = K / 4, back = starts[t] || t % T == 0 ? 0 : size;
    for (int64_t i = t * size; i < (t + 1) * size; i += 2 * quarter) {
      std::memcpy(y + i, k + i, 4 * quarter);
      std::memcpy(y + i + quarter, k + i + quarter - back, 4 * quarter);
    }
  });
  return 0;
}

extern "C" int offset_keys_backward(const float* g, const float* starts, float* dk, int64_t tokens,
                                     int64_t T, int64_t H, int64_t K, int threads) {
  if (!quartered(tokens, T, K)) return BAD_SIZE;
  each(tokens, H * K, threads, [=](int64_t t) {
    int64_t size = H * K, quarter = K / 4, next = t + 1;
    bool own = starts[t] || t % T == 0, lent = next % T && !starts[next];
    for (int64_t i = t * size; i < next * size; i += 2 * quarter) {
      std::memcpy(dk + i, g + i, 4 * quarter);
      const float* from = g + i + quarter;
      sweep(0, quarter, [=, to = dk + i + quarter](auto at) {
        Wide sum;
        if (own) sum = sum + at(from);
        if (lent) sum = sum + at(from + size);
        at.put(to, sum);
      });
    }
  });
  return 0;
}

extern "C" int relu_squared_forward(const float* x, float* y, int64_t size, int threads) {
  each_chunk(size, threads, [=](auto at) {
    Wide kept = larger(Wide(0.f), at(x));  // in this order a NaN stays one
    at.put(y, kept * kept);
  });
  return 0;
}

// 2 relu(x) g, with relu(x) = sqrt(y): y is kept by the matrix that follows, x need not be.
extern "C" int relu_squared_backward(const float* g, const float* y, float* dx, int64_t size,
                                      int threads) {
  each_chunk(size, threads,
             [=](auto at) { at.put(dx, 2.f * square_root(at(y)) * at(g)); });
  return 0;
}

// z = a x + b y
extern "C" int blend_forward(const float* x, const float* y, const float* a, const float* b, float* z,
                              int64_t size, int threads) {
  float first = *a, second = *b;
  each_chunk(size, threads, [=](auto at) { at.put(z, first * at(x) + second * at(y)); });
  return 0;
}

// dx = a g and dy = b g, da = g . x and db = g . y. Each chunk sums for itself and the sums are added in
// their order.
extern "C" int blend_backward(const float* g, const float* x, const float* y, const float* a,
                               const float* b, float* dx, float* dy, float* da, float* db,
                               int64_t size, int threads) {
  int64_t chunks = (size + CHUNK - 1) / CHUNK;
  std::vector<double> sums(2 * chunks);
  float first = *a, second = *b;
  each(chunks, CHUNK, threads, [=, &sums](int64_t i) {
    Wide along_x, along_y;
    sweep(i * CHUNK, std::min(size, (i + 1) * CHUNK), [&](auto at) {
      Wide slope = at(g);
      along_x = along_x + slope * at(x), along_y = along_y + slope * at(y);
      if (dx) at.put(dx, first * slope);
      if (dy) at.put(dy, second * slope);
    });
    sums[2 * i] = total(along_x), sums[2 * i + 1] = total(along_y);
  });
  double total_x = 0, total_y = 0;
  for (int64_t i = 0; i < chunks; i++) total_x += sums[2 * i], total_y += sums[2 * i + 1];
  *da = total_x, *db = total_y;
  return 0;
}

// How the kernels were built, for `doctor` and the tests.
extern "C" int lanes() { return LANES; }
extern "C" int openmp() {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}
