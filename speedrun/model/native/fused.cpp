// The elementwise parts of the model, each in one pass over memory forward and one backward; fp32.
//
// A thread takes whole rows or whole chunks, and the one sum over all rows is taken in their order
// afterwards, so the bits do not depend on the number of threads.
//
// Legend: T tokens of a row of the batch, H heads, K head width, V vocabulary.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "parallel.h"
#include "vec.h"

namespace {

constexpr int64_t CHUNK = 4096;   // of a flat array: 16 kB
constexpr int64_t SMALL = 16384;  // elements that one thread does sooner than it wakes another
constexpr int64_t EXACT = 2048;   // terms summed in fp32: 64 an accumulator

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

float dot(const float* a, const float* b, int64_t n) {
  Wide sum;
  sweep(0, n, [&](auto at) { sum = sum + at(a) * at(b); });
  return total(sum);
}

// z = cap tanh(x / cap) and its slope 1 - tanh^2. With E = e^(-2 |x| / cap) the tanh is
// (1 - E) / (1 + E), and with w = 1 - tanh = 2 E / (1 + E) the slope is w (2 - w): neither cancels, and
// near the slope of 1 an error of w does not count.
//
// 2 / cap is kept in two parts, since its rounding would shift all logits one way. The first is
// rounded towards zero: the second is then positive, and infinity stays what it is.
struct Softcap {
  float cap, rate = std::nextafter(float(2. / cap), 0.f), rest = 2. / cap - rate;
  struct Value {
    Wide z, slope;
  };
  Value operator()(Wide x) const {
    Wide size = magnitude(x);
    Exp<Wide> E = exponential(size * -rate - size * rest);
    Wide less = E.minus_one(), inverse = 1.f / (less + 2.f), w = 2.f * E.value() * inverse;
    return {with_sign(magnitude(cap * less * inverse), x), 2.f * w - w * w};
  }
};

struct Uncapped {
  struct Value {
    Wide z;
    float slope;
  };
  Value operator()(Wide x) const { return {x, 1.f}; }
};

// The softmax of a row is e^(z - peak) / sum. Both are kept: their logsumexp, rounded to fp32, would
// cost large logits digits.
struct Softmax {
  float peak, sum;
};

template <typename Cap>
Softmax softmax(const float* x, int64_t V, Cap capped) {
  Wide peaks = x[0];
  sweep(0, V, [&](auto at) { peaks = larger(peaks, at(x, x[0])); });
  float peak = first(capped(largest(peaks)).z);  // tanh keeps the order
  double sum = 0;
  for (int64_t begin = 0; begin < V; begin += EXACT) {
    Wide part;
    sweep(begin, std::min(V, begin + EXACT), [&](auto at) {
      part = part + at.counted(exponential(capped(at(x)).z - peak).value());
    });
    sum += total(part);
  }
  return {peak, float(sum)};
}

// (softmax - one at the target) times the slope of the cap times `scale`.
template <typename Cap>
void logit_gradient(const float* x, int64_t V, Cap capped, int64_t target, Softmax row, float scale,
                    float* dx) {
  float part = scale / row.sum;
  sweep(0, V, [&](auto at) {
    auto [z, slope] = capped(at(x));
    at.put(dx, exponential(z - row.peak).value() * slope * part);
  });
  auto [z, slope] = capped(x[target]);
  dx[target] = first((exponential(z - row.peak).value() / row.sum - 1.f) * slope * scale);
}

template <typename Visit>
void with_cap(float cap, Visit visit) {
  cap ? visit(Softcap{cap}) : visit(Uncapped{});
}

}  // namespace

// y = R(r x), r = 1 / sqrt(mean x^2 + eps) per head (if asked for), R the rotation (if asked for)
// that turns the pairs (i, i + K/2) by their token's angles.
extern "C" int norm_rotate_forward(const float* x, const float* cos, const float* sin, float eps,
                                    float* y, float* r, int64_t tokens, int64_t T, int64_t H,
                                    int64_t K, int threads) {
  each(tokens, H * K, threads, [=](int64_t t) {
    int64_t half = K / 2;
    const float *c = cos ? cos + t % T * half : nullptr, *s = cos ? sin + t % T * half : nullptr;
    for (int64_t h = 0; h < H; h++) {
      const float* from = x + (t * H + h) * K;
      float *to = y + (t * H + h) * K, scale = 1;
      if (r) r[t * H + h] = scale = 1.f / std::sqrt(dot(from, from, K) / K + eps);
      if (cos)
        sweep(0, half, [=](auto at) {
          Wide a = at(from) * scale, b = at(from + half) * scale;
          at.put(to, a * at(c) + b * at(s));
          at.put(to + half, b * at(c) - a * at(s));
        });
      else
        sweep(0, K, [=](auto at) { at.put(to, at(from) * scale); });
    }
  });
  return 0;
}

// dx = r R^-1(g - y mean(y g)): a rotation keeps products, so y serves in place of x, and y is kept
// by what follows anyway.
extern "C" int norm_rotate_backward(const float* g, const float* y, const float* r,
                                     const float* cos, const float* sin, float* dx, int64_t tokens,
                                     int64_t T, int64_t H, int64_t K, int threads) {
  each(tokens, H * K, threads, [=](int64_t t) {
    int64_t half = K / 2;
    const float *c = cos ? cos + t % T * half : nullptr, *s = cos ? sin + t % T * half : nullptr;
    for (int64_t h = 0; h < H; h++) {
      int64_t row = (t * H + h) * K;
      const float *from = g + row, *out = y + row;
      float *to = dx + row, scale = r ? r[t * H + h] : 1.f;
      float along = r ? dot(from, out, K) / K : 0.f;
      if (cos)
        sweep(0, half, [=](auto at) {
          Wide a = scale * (at(from) - along * at(out));
          Wide b = scale * (at(from + half) - along * at(out + half));
          at.put(to, a * at(c) - b * at(s));
          at.put(to + half, b * at(c) + a * at(s));
        });
      else
        sweep(0, K, [=](auto at) { at.put(to, scale * (at(from) - along * at(out))); });
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

// Mean of logsumexp(z) - z[target] over the rows, z = cap tanh(x / cap); cap 0: z = x.
extern "C" int cross_entropy_forward(const float* x, const int64_t* targets, float cap, float* loss,
                                      float* softmaxes, int64_t rows, int64_t V, int threads) {
  for (int64_t i = 0; i < rows; i++)
    if (targets[i] < 0 || targets[i] >= V) return 1;
  with_cap(cap, [=](auto capped) {
    std::vector<double> losses(rows);
    each(rows, V, threads, [&, capped](int64_t i) {
      auto [peak, sum] = softmax(x + i * V, V, capped);
      softmaxes[2 * i] = peak, softmaxes[2 * i + 1] = sum;
      losses[i] = double(peak) - first(capped(x[i * V + targets[i]]).z) + std::log(double(sum));
    });
    *loss = std::accumulate(losses.begin(), losses.end(), 0.) / rows;
  });
  return 0;
}

extern "C" int cross_entropy_backward(const float* g, const float* x, const int64_t* targets,
                                       float cap, const float* softmaxes, float* dx, int64_t rows,
                                       int64_t V, int threads) {
  float scale = *g / rows;
  with_cap(cap, [=](auto capped) {
    each(rows, V, threads, [=](int64_t i) {
      Softmax row{softmaxes[2 * i], softmaxes[2 * i + 1]};
      logit_gradient(x + i * V, V, capped, targets[i], row, scale, dx + i * V);
    });
  });
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
