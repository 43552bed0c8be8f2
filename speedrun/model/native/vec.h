// Vectors of floats as the compiler's own types, so that the hot loops are vector code by
// construction on AVX-512, AVX2, SSE and NEON, not when an optimizer happens to see it.
//
// A loop over an array is `sweep`, which goes by `Wide`, 32 floats whatever the width of a vector.
// So a sum has 32 accumulators and is equally exact everywhere, and a chain of operations, being
// several chains side by side, waits less for its own results.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// What a routine answers instead of 0 if it has done nothing: values it cannot use, such as an id that
// the vocabulary has not, or sizes it does not know how to compute with.
constexpr int BAD_VALUE = 1, BAD_SIZE = 2;

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

template <int N>
struct Vector {
  typedef float floats __attribute__((vector_size(4 * N)));
  typedef int32_t ints __attribute__((vector_size(4 * N)));
  typedef uint32_t bits __attribute__((vector_size(4 * N)));
};
typedef Vector<LANES>::floats vec;
typedef Vector<LANES>::ints ivec;
typedef Vector<LANES>::bits bvec;

inline vec load(const float* p) {
  vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline ivec load(const int32_t* p) {
  ivec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline void load(const float* p, vec& x) { x = load(p); }
inline void store(float* p, vec x) { std::memcpy(p, &x, sizeof x); }
inline float first(vec x) { return x[0]; }
inline vec all(float x) { return x - vec{}; }

// a > b ? a : b, so the second where either is NaN, and the square root. On x86 each is one
// instruction, which compilers do not make of the expression.
#if defined(__AVX512F__)
inline vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
inline vec square_root(vec x) { return (vec)_mm512_sqrt_ps((__m512)x); }
#elif defined(__AVX__)
inline vec larger(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
inline vec square_root(vec x) { return (vec)_mm256_sqrt_ps((__m256)x); }
#elif defined(__SSE__)
inline vec larger(vec a, vec b) { return (vec)_mm_max_ps((__m128)a, (__m128)b); }
inline vec square_root(vec x) { return (vec)_mm_sqrt_ps((__m128)x); }
#else
inline vec larger(vec a, vec b) { return a > b ? a : b; }
inline vec square_root(vec x) {
#if defined(__aarch64__)
  return (vec)vsqrtq_f32((float32x4_t)x);
#else
  for (int i = 0; i < LANES; i++) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}
#endif

inline vec magnitude(vec x) { return (vec)((bvec)x & 0x7fffffffu); }
inline vec with_sign(vec size, vec x) { return (vec)((bvec)size | ((bvec)x & 0x80000000u)); }

// All lanes into one, the upper half onto the lower until one is left.
template <int N, typename Op>
inline float fold(typename Vector<N>::floats x, Op op) {
  if constexpr (N == 2) {
    return op(x[0], x[1]);
  } else {
    typename Vector<N / 2>::floats low, high;
    std::memcpy(&low, &x, sizeof low);
    std::memcpy(&high, (const char*)&x + sizeof low, sizeof high);
    return fold<N / 2>(op(low, high), op);
  }
}
inline float total(vec x) {
  return fold<LANES>(x, [](auto a, auto b) { return a + b; });
}
inline float largest(vec x) {
  return fold<LANES>(x, [](auto a, auto b) { return a > b ? a : b; });
}

constexpr float ROUND = 12582912.f;  // 1.5 * 2^23: a number added to it is rounded, in the low bits

// 2^n, given n + ROUND; 0 for n = -127. The bits are unsigned because those of a NaN overflow.
inline vec whole_power(vec n_rounded) { return (vec)(((bvec)n_rounded + 127) << 23); }

// Two as one, down to vectors. Not an array, because some compilers put those through memory.
template <typename V>
struct Pair {
  V a, b;
  static constexpr int HALF = sizeof(V) / 4;
  Pair(float x = 0) : a(x - V{}), b(x - V{}) {}
  Pair(V a, V b) : a(a), b(b) {}
  friend void load(const float* p, Pair& x) { load(p, x.a), load(p + HALF, x.b); }
  friend void store(float* p, Pair x) { store(p, x.a), store(p + HALF, x.b); }
  friend Pair operator+(Pair x, Pair y) { return {x.a + y.a, x.b + y.b}; }
  friend Pair operator-(Pair x, Pair y) { return {x.a - y.a, x.b - y.b}; }
  friend Pair operator*(Pair x, Pair y) { return {x.a * y.a, x.b * y.b}; }
  friend Pair operator/(Pair x, Pair y) { return {x.a / y.a, x.b / y.b}; }
  friend Pair larger(Pair x, Pair y) { return {larger(x.a, y.a), larger(x.b, y.b)}; }
  friend Pair with_sign(Pair x, Pair y) { return {with_sign(x.a, y.a), with_sign(x.b, y.b)}; }
  friend Pair magnitude(Pair x) { return {magnitude(x.a), magnitude(x.b)}; }
  friend Pair square_root(Pair x) { return {square_root(x.a), square_root(x.b)}; }
  friend Pair whole_power(Pair x) { return {whole_power(x.a), whole_power(x.b)}; }
  friend float total(Pair x) { return total(x.a + x.b); }
  friend float largest(Pair x) { return largest(larger(x.a, x.b)); }
  friend float first(Pair x) { return first(x.a); }
};

#if defined(__AVX512F__)
typedef Pair<vec> Wide;
#elif defined(__AVX__)
typedef Pair<Pair<vec>> Wide;
#else
typedef Pair<Pair<Pair<vec>>> Wide;
#endif
constexpr int WIDE = sizeof(Wide) / 4;
static_assert(WIDE == 32);

// Where a sweep stands: at 32 floats of an array, or at the few that are left at its end.
struct Whole {
  int64_t i;
  Wide operator()(const float* p, float = 0) const {
    Wide x;
    load(p + i, x);
    return x;
  }
  void put(float* p, Wide x) const { store(p + i, x); }
  Wide counted(Wide x) const { return x; }
};
struct Rest {
  int64_t i, count;
  Wide operator()(const float* p, float beyond = 0) const {
    float room[WIDE];
    store(room, Wide(beyond));
    std::memcpy(room, p + i, 4 * count);
    return Whole{0}(room);
  }
  void put(float* p, Wide x) const {
    float room[WIDE];
    store(room, x);
    std::memcpy(p + i, room, 4 * count);
  }
  Wide counted(Wide x) const {  // zero beyond the end
    float room[WIDE];
    store(room, x);
    return Rest{0, count}(room);
  }
};

// body(at) for all of an array: at(p) loads, at.put(p, x) stores.
template <typename Body>
inline void sweep(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + WIDE <= end; i += WIDE) body(Whole{i});
  if (i < end) body(Rest{i, end - i});
}

inline float dot(const float* a, const float* b, int64_t n) {
  Wide sum;
  sweep(0, n, [&](auto at) { sum = sum + at(a) * at(b); });
  return total(sum);
}

// e^x = s q + s and e^x - 1 = s q + (s - 1), with s a power of two: both without cancellation.
template <typename V>
struct Exp {
  V s, q;
  V value() const { return s * q + s; }
  V minus_one() const { return s * q + (s - 1.f); }
};

// 2^n e^r for |r| <= ln(2) / 2, given n + ROUND. The polynomial is the minimax one of its degree,
// within 4e-9 of e^r.
template <typename V>
inline Exp<V> scaled(V n_rounded, V r) {
  V p = r * 0.0013814540579915f + 0.0083687454462051f;
  p = p * r + 0.0416683889925480f;
  p = p * r + 0.1666652113199234f;
  p = p * r + 0.4999999403953552f;
  return {whole_power(n_rounded), p * (r * r) + r};
}

// e^x for x <= 0, and 0 below -88, where the power of two has become 0. NaN stays NaN.
inline Exp<Wide> exponential(Wide x) {
  x = larger(Wide(-88.f), x);
  Wide rounded = x * LOG2E + ROUND, n = rounded - ROUND;
  return scaled(rounded, x - n * .693359375f + n * 2.12194440e-4f);  // ln 2, the first part exact
}

// 2^x for x <= 0, and 0 below -127. NaN stays NaN.
inline vec power_of_two(vec x) {
  x = larger(all(-127.f), x);
  vec rounded = x + ROUND;
  return scaled(rounded, (x - (rounded - ROUND)) * LN2).value();
}

}  // namespace
