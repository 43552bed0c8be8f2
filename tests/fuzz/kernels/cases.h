// What cases are made of: numbers drawn at random, arrays that end where they end, comparisons.
//
// A case follows from its number alone. Its arrays have exactly the size that is needed, and lie as
// aligned as a float must be and no more; what a routine has to write is NaN before. So whatever it
// reads or writes beside an array is reported by the sanitizers, and what it leaves out is seen.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <random>
#include <vector>

namespace cases {

inline std::mt19937_64 random_bits;
inline bool odd_values;  // NaN, infinities, the least and the greatest floats among the inputs
inline const char* about = "";

inline int64_t draw(int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random_bits);
}

inline bool once_in(int64_t times) { return draw(1, times) == 1; }

template <typename T>
T one_of(std::initializer_list<T> all) {
  return all.begin()[draw(0, all.size() - 1)];
}

inline void fail(const char* what) {
  std::fprintf(stderr, "%s: %s\n", about, what);
  std::abort();
}

// Mostly few; otherwise at the edges of tiles, blocks and chunks, or several chunks.
inline int64_t some_rows() {
  if (draw(0, 2)) return draw(0, 40);
  return once_in(6) ? draw(700, 1700) : one_of<int64_t>({0, 1, 5, 6, 7, 47, 48, 49, 95, 96, 97, 192, 767, 769});
}

// Whole vectors, now and then deeper than a product takes at once.
inline int64_t some_width() { return 16 * (once_in(8) ? draw(12, 40) : draw(1, 8)); }

// Not a std::vector, whose spare capacity nobody watches.
class Array {
 public:
  explicit Array(int64_t size) : size(size), front(draw(0, 3)), room(new float[front + size]) {}
  operator float*() const { return room.get() + front; }
  bool has_nan() const {
    for (int64_t i = 0; i < size; i++)
      if (std::isnan((*this)[i])) return true;
    return false;
  }
  float& operator[](int64_t i) const { return room[front + i]; }
  int64_t size;

 private:
  int64_t front;
  std::unique_ptr<float[]> room;
};

inline Array filled(int64_t size) {
  Array made(size);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < size; i++) {
    made[i] = normal(random_bits);
    if (odd_values && once_in(12))
      made[i] = one_of({NAN, INFINITY, -INFINITY, FLT_MAX, -FLT_MAX, FLT_MIN / 8, -FLT_TRUE_MIN, 0.f, -0.f});
  }
  return made;
}

inline Array unwritten(int64_t size) {
  Array made(size);
  for (int64_t i = 0; i < size; i++) made[i] = NAN;
  return made;
}

inline float* given(bool is, const Array& x) { return is ? (float*)x : nullptr; }

typedef std::initializer_list<const Array*> Arrays;

inline void must_write(Arrays arrays) {
  if (odd_values) return;
  for (const Array* x : arrays)
    if (x->has_nan()) fail("a NaN is left where a result belongs");
}

inline void must_be(int answer, int expected) {
  if (answer != expected) fail("another answer than expected");
}

inline void must_refuse(int answer, Arrays outputs) {
  if (answer == 0) fail("what cannot be computed was not refused");
  for (const Array* x : outputs)
    for (int64_t i = 0; i < x->size; i++)
      if (!std::isnan((*x)[i])) fail("refused, but something was written");
}

// run(threads) with one thread and with several must leave the same bits, and succeed.
inline void on_any_threads(const std::function<int(int)>& run, Arrays outputs) {
  must_be(run(1), 0);
  must_write(outputs);
  std::vector<std::vector<float>> alone;
  for (const Array* x : outputs) {
    alone.emplace_back((float*)*x, (float*)*x + x->size);
    for (int64_t i = 0; i < x->size; i++) (*x)[i] = NAN;
  }
  must_be(run(draw(2, 4)), 0);
  size_t at = 0;
  for (const Array* x : outputs) {
    const std::vector<float>& before = alone[at++];
    for (int64_t i = 0; i < x->size; i++)
      if (before[i] != (*x)[i] && !(std::isnan(before[i]) && std::isnan((*x)[i])))
        fail("the number of threads changes a result");
  }
}

// Within rounding of what a slow formula says; the size of all of it counts, since sums cancel.
inline void must_equal(const Array& found, const std::vector<double>& expected) {
  if (odd_values) return;
  double size = 1e-30;
  for (double x : expected) size = std::max(size, std::fabs(x));
  for (int64_t i = 0; i < found.size; i++)
    if (!(std::fabs(found[i] - expected[i]) <= 2e-4 * size)) {
      std::fprintf(stderr, "%s: element %ld is %g, not %g\n", about, long(i), found[i], expected[i]);
      std::abort();
    }
}

// Left M x D times right N x D, transposed.
inline std::vector<double> products(const float* left, const float* right, int64_t M, int64_t N, int64_t D) {
  std::vector<double> all(M * N);
  for (int64_t i = 0; i < M; i++)
    for (int64_t j = 0; j < N; j++)
      for (int64_t k = 0; k < D; k++) all[i * N + j] += double(left[i * D + k]) * right[j * D + k];
  return all;
}

}  // namespace cases
