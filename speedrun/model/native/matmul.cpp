// Tiles at the edges of a matrix.
#include "matmul.h"

namespace {

template <int R, int N, typename... Rest>
void sized(int rows, int vectors, const Rest&... rest) {
  if (rows == R && vectors == N) return corner<R, N>(rest...);
  if constexpr (R > 1)
    if (rows < R) return sized<R - 1, N>(rows, vectors, rest...);
  if constexpr (N > 1)
    if (vectors < N) return sized<R, N - 1>(rows, vectors, rest...);
}

}  // namespace

void partial_tile(int rows, int vectors, int64_t depth, const float* A, int64_t ai, int64_t aj,
                  const float* B, int64_t bj, float* tile) {
  sized<STRIP, PANEL>(rows, vectors, depth, A, ai, aj, B, bj, int64_t(0), int64_t(PANEL * LANES),
                      [=](int64_t at, vec sum) { store(tile + at, sum); });
}
