// One token's norm and rotation, forward and backward.
//
// Legend: T tokens of a row of the batch, H heads, K head width.
#pragma once

#include <cmath>

#include "vec.h"

namespace {

inline float inverse_rms(const float* x, int64_t size, float eps) {
  return 1.f / std::sqrt(dot(x, x, size) / size + eps);
}

inline void scaled_copy(const float* from, float scale, float* to, int64_t size) {
  sweep(0, size, [=](auto at) { at.put(to, at(from) * scale); });
}

// y = r x row by row, r = 1 / sqrt(mean x^2 + eps).
inline void norm_rows(const float* x, float eps, float* r, float* y, int64_t rows, int64_t size) {
  for (int64_t i = 0; i < rows; i++) {
    r[i] = inverse_rms(x + i * size, size, eps);
    scaled_copy(x + i * size, r[i], y + i * size, size);
  }
}

// Its gradient in place of g: r (g - y mean(y g)), y being r x.
inline void undo_norm_rows(float* g, const float* x, const float* r, int64_t rows, int64_t size) {
  for (int64_t i = 0; i < rows; i++, g += size, x += size) {
    float scale = r[i], along = scale * scale * dot(g, x, size) / size;
    sweep(0, size, [=](auto at) { at.put(g, scale * (at(g) - along * at(x))); });
  }
}

// The cosines and sines of every token's `half` pairs; null: no rotation.
struct Angles {
  const float *cos, *sin;
  int64_t T, half;
  Angles of(int64_t t) const {
    if (!cos) return *this;
    return {cos + t % T * half, sin + t % T * half, T, half};
  }
};

// Whether heads of this width can be turned, or are not asked to be.
inline bool turnable(const float* cos, int64_t tokens, int64_t T, int64_t K) {
  return !cos || (K % 2 == 0 && (T > 0 || tokens == 0));
}

// y = R(r x), r = 1 / sqrt(mean x^2 + eps) per head (if r is asked for), R the rotation (if there are
// angles) that turns the pairs (i, i + K/2) by their token's angles. y may be x.
inline void norm_rotate(const float* x, Angles angles, int64_t t, float eps, float* y, float* r,
                        int64_t H, int64_t K) {
  const float *c = angles.of(t).cos, *s = angles.of(t).sin;
  int64_t half = angles.half;
  for (int64_t h = 0; h < H; h++, x += K, y += K) {
    const float* from = x;
    float *to = y, scale = r ? r[h] = inverse_rms(x, K, eps) : 1.f;
    if (!c) {
      scaled_copy(from, scale, to, K);
      continue;
    }
    sweep(0, half, [=](auto at) {
      Wide a = at(from) * scale, b = at(from + half) * scale;
      at.put(to, a * at(c) + b * at(s));
      at.put(to + half, b * at(c) - a * at(s));
    });
  }
}

// dx = r R^-1(g - y mean(y g)): a rotation keeps products, so y serves in place of x, and y is kept by
// what follows anyway.
inline void undo_norm_rotate(const float* g, const float* y, const float* r, Angles angles, int64_t t,
                             float* dx, int64_t H, int64_t K) {
  const float *c = angles.of(t).cos, *s = angles.of(t).sin;
  int64_t half = angles.half;
  for (int64_t h = 0; h < H; h++, g += K, y += K, dx += K) {
    const float *from = g, *out = y;
    float *to = dx, scale = r ? r[h] : 1.f;
    float along = r ? dot(g, y, K) / K : 0.f;
    if (!c) {
      sweep(0, K, [=](auto at) { at.put(to, scale * (at(from) - along * at(out))); });
      continue;
    }
    sweep(0, half, [=](auto at) {
      Wide a = scale * (at(from) - along * at(out));
      Wide b = scale * (at(from + half) - along * at(out + half));
      at.put(to, a * at(c) - b * at(s));
      at.put(to + half, b * at(c) + a * at(s));
    });
  }
}

}  // namespace
