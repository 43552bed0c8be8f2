// Matrix products in registers, on matrices that lie in cache: for attention's tiles, for linear layers
// and for whatever a thread does with a few rows while it has them.
//
// All sums of a tile of the result are kept in registers while one operand's elements are spread over
// the lanes and the other's rows are read as vectors. What becomes of the sums is the caller's: `put(at,
// sum)` gets each vector of them with its place. So a product ends in a ReLU, an addition or a plain
// store without another pass over memory.
//
// A result's element is summed in one order, whatever the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <new>

#include "parallel.h"
#include "vec.h"

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int PANEL = 4;  // vectors side by side: 24 accumulators of 32 registers
#else
constexpr int PANEL = 2;  // 12 of 16
#endif
constexpr int STRIP = 6;           // rows of a tile
constexpr int64_t DEPTH = 192;     // of a product at once: a panel this deep stays in the first cache
constexpr int64_t BLOCK = 96;      // rows that a thread takes at once
constexpr int64_t FEW = 16;        // rows rearranged at once: cache lines of one serve the next column
constexpr int64_t SUMMED = 768;    // rows summed into a weight's gradient at once

// Memory that nobody has written to, on a cache line's border.
class Buffer {
 public:
  explicit Buffer(int64_t size)
      : data((float*)::operator new(4 * size, std::align_val_t(64))) {}
  ~Buffer() { ::operator delete(data, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  float* const data;
};

// The usual fates of a sum: to be stored, or added to what is there.
inline auto set(float* C) {
  return [=](int64_t at, vec sum) { store(C + at, sum); };
}
inline auto add_to(float* C) {
  return [=](int64_t at, vec sum) { store(C + at, load(C + at) + sum); };
}

// sum_j A[r, j] B[j, :] for R rows and N vectors.
template <int R, int N, typename Put>
inline void corner(int64_t depth, const float* A, int64_t ai, int64_t aj, const float* B, int64_t bj,
                   int64_t at, int64_t ci, const Put& put) {
  vec sum[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sum[r][n] = vec{};
  for (int64_t j = 0; j < depth; j++, A += aj, B += bj) {
    vec b[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) b[n] = load(B + n * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      vec a = all(A[r * ai]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[r][n] += a * b[n];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) put(at + r * ci + n * LANES, sum[r][n]);
}

}  // namespace

// The sums of fewer rows or vectors than a whole tile has, into `tile` (matmul.cpp). Not part of
// `panel`, since every use of that would compile all sizes anew.
__attribute__((visibility("hidden"))) void partial_tile(int rows, int vectors, int64_t depth,
                                                        const float* A, int64_t ai, int64_t aj,
                                                        const float* B, int64_t bj, float* tile);

namespace {

// Up to PANEL vectors of the result, all rows.
template <typename Put>
void panel(int64_t rows, int vectors, int64_t depth, const float* A, int64_t ai, int64_t aj,
           const float* B, int64_t bj, int64_t at, int64_t ci, const Put& put) {
  for (; rows > 0; rows -= STRIP, A += STRIP * ai, at += STRIP * ci) {
    if (rows >= STRIP && vectors == PANEL) {
      corner<STRIP, PANEL>(depth, A, ai, aj, B, bj, at, ci, put);
      continue;
    }
    alignas(64) float tile[STRIP * PANEL * LANES];
    int here = std::min<int64_t>(rows, STRIP);
    partial_tile(here, vectors, depth, A, ai, aj, B, bj, tile);
    for (int r = 0; r < here; r++)
      for (int n = 0; n < vectors; n++)
        put(at + r * ci + n * LANES, load(tile + (r * PANEL + n) * LANES));
  }
}

// visit(first column, vectors) for all panels of a matrix this wide.
template <typename Visit>
void each_panel(int64_t width, const Visit& visit) {
  for (int64_t n = 0; n < width; n += PANEL * LANES)
    visit(n, std::min<int64_t>(PANEL, (width - n) / LANES));
}

// A B of matrices where they lie, B's rows bj apart; `width` counts whole vectors.
template <typename Put>
void multiply(int64_t rows, int64_t width, int64_t depth, const float* A, int64_t ai, int64_t aj,
              const float* B, int64_t bj, int64_t at, int64_t ci, const Put& put) {
  each_panel(width, [&](int64_t n, int vectors) {
    panel(rows, vectors, depth, A, ai, aj, B + n, bj, at + n, ci, put);
  });
}

inline int64_t parts_of(int64_t all, int64_t size) { return (all + size - 1) / size; }

// Products read and write whole vectors: a width that is none would go over the end of its row.
inline bool whole(std::initializer_list<int64_t> widths) {
  return std::all_of(widths.begin(), widths.end(),
                     [](int64_t width) { return width > 0 && width % LANES == 0; });
}

inline int64_t whole_vectors(int64_t width) { return parts_of(width, LANES) * LANES; }

// A right operand, rearranged panel by panel so that a product reads it from front to back. Columns
// beyond the last are zeros up to a whole vector.
struct Packed {
  float* data;
  int64_t width, depth;
};

inline int64_t panels_of(int64_t width) {
  return parts_of(width, PANEL * LANES);
}

// The element (k, n) of the operand is B[k bk + n bn].
inline void pack_panel(const float* B, int64_t bk, int64_t bn, Packed to, int64_t width, int64_t p) {
  int64_t n0 = p * PANEL * LANES, wide = std::min<int64_t>(PANEL * LANES, to.width - n0);
  int64_t there = std::min(wide, width - n0);
  float* panel = to.data + n0 * to.depth;
  if (bn == 1 && there == wide) {
    for (int64_t k = 0; k < to.depth; k++, panel += wide)
      for (int64_t n = 0; n < wide; n += LANES) store(panel + n, load(B + k * bk + n0 + n));
    return;
  }
  if (there < wide) std::fill_n(panel, wide * to.depth, 0.f);
  for (int64_t k0 = 0; k0 < to.depth; k0 += 16)  // a cache line of each column at a time
    for (int64_t n = 0; n < there; n++)
      for (int64_t k = k0; k < std::min(to.depth, k0 + 16); k++)
        panel[k * wide + n] = B[k * bk + (n0 + n) * bn];
}

inline Packed pack(const float* B, int64_t bk, int64_t bn, int64_t width, int64_t depth,
                   float* to, int threads) {
  Packed packed{to, whole_vectors(width), depth};
  share_out(panels_of(width), 1, threads, [=](int64_t p) { pack_panel(B, bk, bn, packed, width, p); });
  return packed;
}

// C = A B for the few rows of A that a thread has in cache; finish(at, sum) stores the result. Sums of
// more than DEPTH terms rest in C meanwhile. Without a finish they stay there.
template <typename Finish>
void product(int64_t rows, const float* A, int64_t ai, const Packed& B, float* C, int64_t ci,
             const Finish& finish) {
  int64_t most = parts_of(B.depth, parts_of(B.depth, DEPTH));
  for (int64_t k = 0; k < B.depth; k += most) {
    int64_t depth = std::min(most, B.depth - k);
    bool begins = k == 0, ends = k + depth == B.depth;
    auto run = [&](const auto& put) {
      each_panel(B.width, [&](int64_t n, int vectors) {
        int64_t wide = vectors * LANES;
        panel(rows, vectors, depth, A + k, ai, 1, B.data + n * B.depth + k * wide, wide, n, ci, put);
      });
    };
    if (begins && ends) run(finish);
    else if (begins) run(set(C));
    else if (ends) run([&](int64_t at, vec sum) { finish(at, load(C + at) + sum); });
    else run(add_to(C));
  }
}

inline void product(int64_t rows, const float* A, int64_t ai, const Packed& B, float* C, int64_t ci) {
  product(rows, A, ai, B, C, ci, set(C));
}

// The operands of `sum_products`, taken over by whoever has some rows of them in cache, from row k on, and
// arranged as the product reads them, from front to back: the right one in panels, the left one in strips
// as high as a tile, which are a cache line apart lest they compete for its places.
class Panels {
 public:
  Panels(int64_t width, int64_t most) : width(width), most(most), room(width * most) {}
  void put(int64_t k, const float* rows, int64_t count, const float* scales = nullptr) {
    for (int64_t begin = 0; begin < count; begin += FEW)
      each_panel(width, [=](int64_t n, int vectors) {
        float* to = at(n, k + begin, vectors);
        for (int64_t i = begin; i < std::min(count, begin + FEW); i++, to += vectors * LANES) {
          const float* from = rows + i * width + n;
          float scale = scales ? scales[i] : 1.f;
          auto copy = [=](int v) { store(to + v * LANES, load(from + v * LANES) * scale); };
          if (vectors == PANEL)
#pragma GCC unroll 4
            for (int v = 0; v < PANEL; v++) copy(v);
          else
            for (int v = 0; v < vectors; v++) copy(v);
        }
      });
  }
  float* at(int64_t n, int64_t k, int vectors) const { return room.data + n * most + k * vectors * LANES; }
  const int64_t width, most;

 private:
  Buffer room;
};

class Strips {
 public:
  Strips(int64_t width, int64_t most)
      : width(width), strips(parts_of(width, STRIP)), pitch(STRIP * most + 16), room(strips * pitch) {}
  void put(int64_t k, const float* rows, int64_t count, int64_t stride) {
    for (int64_t end = k + count; k < end; k += FEW, rows += FEW * stride)
      for (int64_t strip = 0; strip < strips; strip++) {
        const float* from = rows + strip * STRIP;
        float *to = at(strip, k), *last = at(strip, std::min(end, k + FEW));
        int64_t high = height(strip);
        if (high == STRIP)
          for (; to < last; to += STRIP, from += stride) std::memcpy(to, from, 4 * STRIP);
        else
          for (; to < last; to += STRIP, from += stride) std::memcpy(to, from, 4 * high);
      }
  }
  float* at(int64_t strip, int64_t k) const { return room.data + strip * pitch + k * STRIP; }
  int64_t height(int64_t strip) const { return std::min<int64_t>(STRIP, width - strip * STRIP); }
  const int64_t width, strips;

 private:
  const int64_t pitch;
  Buffer room;
};

struct Sum {  // C (M x N) = or += A^T B, A (rows x M), B (rows x N, N of whole vectors)
  const Strips& A;
  const Panels& B;
  float* C;
  int64_t blocks(int threads) const {  // of three strips or fewer, as many for each thread
    return parts_of(parts_of(A.strips, 3), threads) * threads;
  }
};

// The gradients of weights, sums over tokens, in pieces of SUMMED rows.
inline void sum_products(std::initializer_list<Sum> sums, int64_t rows, bool add, int threads) {
  int64_t all = 0;
  for (const Sum& one : sums) all += one.blocks(threads);
  share_out(all, 1, threads, [&](int64_t block) {
    const Sum* sum = sums.begin();
    while (block >= sum->blocks(threads)) block -= sum++->blocks(threads);
    const Strips& A = sum->A;
    const Panels& B = sum->B;
    float* C = sum->C;
    int64_t blocks = sum->blocks(threads), first = block * A.strips / blocks;
    int64_t last = (block + 1) * A.strips / blocks;
    each_panel(B.width, [&](int64_t n, int vectors) {
      int64_t begin = 0;
      do {  // also of no rows, whose sum is 0
        int64_t depth = std::min(SUMMED, rows - begin);
        auto run = [&](const auto& put) {
          for (int64_t strip = first; strip < last; strip++)
            panel(A.height(strip), vectors, depth, A.at(strip, begin), 1, STRIP, B.at(n, begin, vectors),
                  vectors * LANES, strip * STRIP * B.width + n, B.width, put);
        };
        add || begin ? run(add_to(C)) : run(set(C));
      } while ((begin += SUMMED) < rows);
    });
  });
}

// visit(first row, rows) for `most` rows at a time.
template <typename Visit>
void each_block(int64_t begin, int64_t end, int64_t most, int threads, const Visit& visit) {
  share_out(parts_of(end - begin, most), 1, threads, [&](int64_t i) {
    int64_t row = begin + i * most;
    visit(row, std::min(most, end - row));
  });
}

// Rows of a batch whose gradients are made and summed before the next: still in cache when they are
// summed, and at least two blocks for each thread. Being a multiple of SUMMED it changes no sum.
inline int64_t chunk_rows(int threads) {
  return parts_of(2 * BLOCK * threads, SUMMED) * SUMMED;
}

}  // namespace
