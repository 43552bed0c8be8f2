// The elementwise parts of the model, each in one pass over memory forward and one backward; fp32.
//
// A thread takes whole rows or whole chunks, and the one sum over all rows is taken in their order
// afterwards, so the bits do not depend on the number of threads. The loops are plain: the compiler
// makes vectors of them.
//
// Legend: T tokens of a row of the batch, H heads, K head width, V vocabulary.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t CHUNK = 4096;   // of a flat array: 16 kB
constexpr int64_t SMALL = 16384;  // elements that one thread does sooner than it wakes another

template <typename Visit>
void each(int64_t count, int64_t size, int threads, Visit visit) {
#pragma omp parallel for schedule(static) num_threads(threads) if (count * size > SMALL)
  for (int64_t i = 0; i < count; i++) visit(i);
}

// visit(begin, end) over a flat array.
template <typename Visit>
void each_chunk(int64_t size, int threads, Visit visit) {
  each((size + CHUNK - 1) / CHUNK, CHUNK, threads,
       [=](int64_t i) { visit(i * CHUNK, std::min(size, (i + 1) * CHUNK)); });
}

float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

// e^x = s q + s and e^x - 1 = s q + (s - 1), with s a power of two: both without cancellation.
struct Exp {
  float s, q;
  float value() const { return s * q + s; }
  float minus_one() const { return s * q + (s - 1.f); }
};

// For x <= 88; below -87 it is e^-87, which is 0 next to anything it is added to. NaN stays NaN.
inline Exp exponential(float x) {
  x = x < -87.f ? -87.f : x;
  float shifted = x * 1.4426950408889634f + 12582912.f;  // 1.5 * 2^23: low bits are the power
  float n = shifted - 12582912.f;
  float r = x - n * .693359375f + n * 2.12194440e-4f;  // ln 2 in two parts, the first one exact
  float p = 1.f / 5040;
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + .5f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits = (bits + 127) << 23;
  float s;
  std::memcpy(&s, &bits, 4);
  return {s, p * r * r + r};
}

// cap tanh(x / cap), or x when there is no cap.
template <bool CAPPED>
inline float capped(float x, float cap) {
  if (!CAPPED) return x;
  float e = exponential(-2.f * std::fabs(x) / cap).minus_one();
  return std::copysign(cap * e / (2.f + e), x);
}

template <bool CAPPED>
float log_sum(const float* x, int64_t V, float cap) {
  float peak = x[0], sum = 0;
#pragma omp simd reduction(max : peak)
  for (int64_t i = 0; i < V; i++) peak = peak > x[i] ? peak : x[i];
  peak = capped<CAPPED>(peak, cap);  // tanh keeps the order
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < V; i++) sum += exponential(capped<CAPPED>(x[i], cap) - peak).value();
  return peak + std::log(sum);
}

// (softmax - one at the target) times the slope of the cap times `scale`.
template <bool CAPPED>
void logit_gradient(const float* x, int64_t V, float cap, int64_t target, float lse, float scale,
                    float* dx) {
#pragma omp simd
  for (int64_t i = 0; i < V; i++) {
    float z = capped<CAPPED>(x[i], cap), slope = CAPPED ? 1.f - (z / cap) * (z / cap) : 1.f;
    dx[i] = exponential(z - lse).value() * slope * scale;
  }
  float z = capped<CAPPED>(x[target], cap), slope = CAPPED ? 1.f - (z / cap) * (z / cap) : 1.f;
  dx[target] -= slope * scale;
}

}  // namespace

// y = R(r x), r = 1 / sqrt(mean x^2 + eps) per head (if asked for), R the rotation (if asked for)
// that turns the pairs (i, i + K/2) by their token's angles.
extern "C" int norm_rotate_forward(const float* x, const float* cos, const float* sin, float eps,
                                    float* y, float* r, int64_t tokens, int64_t T, int64_t H,
                                    int64_t K, int threads) {
  each(tokens, H * K, threads, [=](int64_t t) {
    for (int64_t h = 0; h < H; h++) {
      const float* from = x + (t * H + h) * K;
      float *to = y + (t * H + h) * K, scale = 1;
      if (r) r[t * H + h] = scale = 1.f / std::sqrt(dot(from, from, K) / K + eps);
      if (cos) {
        int64_t half = K / 2;
        const float *c = cos + t % T * half, *s = sin + t % T * half;
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
          float a = from[i] * scale, b = from[i + half] * scale;
          to[i] = a * c[i] + b * s[i];
          to[i + half] = b * c[i] - a * s[i];
        }
      } else {
#pragma omp simd
        for (int64_t i = 0; i < K; i++) to[i] = from[i] * scale;
      }
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
    for (int64_t h = 0; h < H; h++) {
      int64_t row = (t * H + h) * K;
      const float *from = g + row, *out = y + row;
      float *to = dx + row, scale = r ? r[t * H + h] : 1.f;
      float along = r ? dot(from, out, K) / K : 0.f;
      if (cos) {
        int64_t half = K / 2;
        const float *c = cos + t % T * half, *s = sin + t % T * half;
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
          float a = scale * (from[i] - along * out[i]);
          float b = scale * (from[i + half] - along * out[i + half]);
          to[i] = a * c[i] - b * s[i];
          to[i + half] = b * c[i] + a * s[i];
        }
      } else {
#pragma omp simd
        for (int64_t i = 0; i < K; i++) to[i] = scale * (from[i] - along * out[i]);
      }
    }
  });
  return 0;
}

extern "C" int relu_squared_forward(const float* x, float* y, int64_t size, int threads) {
  each_chunk(size, threads, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; i++) y[i] = x[i] < 0.f ? 0.f : x[i] * x[i];
  });
  return 0;
}

// 2 relu(x) g, with relu(x) = sqrt(y): y is kept by the matrix that follows, x need not be.
extern "C" int relu_squared_backward(const float* g, const float* y, float* dx, int64_t size,
                                      int threads) {
  each_chunk(size, threads, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; i++) dx[i] = 2.f * std::sqrt(y[i]) * g[i];
  });
  return 0;
}

// Mean of lse - z[target] over the rows, z = cap tanh(x / cap); cap 0: z = x.
extern "C" int cross_entropy_forward(const float* x, const int64_t* targets, float cap, float* loss,
                                      float* lse, int64_t rows, int64_t V, int threads) {
  for (int64_t i = 0; i < rows; i++)
    if (targets[i] < 0 || targets[i] >= V) return 1;
  each(rows, V, threads, [=](int64_t i) {
    lse[i] = cap ? log_sum<true>(x + i * V, V, cap) : log_sum<false>(x + i * V, V, cap);
  });
  double total = 0;
  for (int64_t i = 0; i < rows; i++) {
    float hit = x[i * V + targets[i]];
    total += lse[i] - (cap ? capped<true>(hit, cap) : hit);
  }
  *loss = total / rows;
  return 0;
}

extern "C" int cross_entropy_backward(const float* g, const float* x, const int64_t* targets,
                                       float cap, const float* lse, float* dx, int64_t rows,
                                       int64_t V, int threads) {
  float scale = *g / rows;
  each(rows, V, threads, [=](int64_t i) {
    auto gradient = cap ? logit_gradient<true> : logit_gradient<false>;
    gradient(x + i * V, V, cap, targets[i], lse[i], scale, dx + i * V);
  });
  return 0;
}
