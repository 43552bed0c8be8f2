// Muon's polynomial iteration for matrices that fit in a core's cache: a thread takes a whole matrix
// through all of its products (optim/orthogonalize.py has the formulas). X X^T and every polynomial of it
// are symmetric, so of those only the tiles up to the diagonal are computed, and mirrored.
//
// Legend: X is m x n with m <= n; A = X X^T.
#include <cmath>

#include "matmul.h"

namespace {

// finish(at, sum) for the tiles of L R that reach below or onto the diagonal; L (m x depth), R packed.
template <typename Finish>
void lower_product(int64_t m, const float* L, int64_t li, const Packed& R, const Finish& finish) {
  each_panel(R.width, [&](int64_t n, int vectors) {
    int64_t top = n / STRIP * STRIP;  // the first strip with a row as low as this panel's first column
    int64_t wide = vectors * LANES;
    panel(m - top, vectors, R.depth, L + top * li, li, 1, R.data + n * R.depth, wide, top * m + n, m,
          finish);
  });
}

void mirror(float* C, int64_t m) {
  for (int64_t i0 = 0; i0 < m; i0 += LANES)  // by blocks, for the cache's sake
    for (int64_t j = i0; j < m; j++)
      for (int64_t i = i0; i < std::min<int64_t>(i0 + LANES, j); i++) C[i * m + j] = C[j * m + i];
}

class Matrix {
 public:
  Matrix(int64_t m, int64_t n) : m(m), n(n), room(m * (2 * n + 5 * m)) {
    X = room.data, packed = X + m * n, A = packed + m * std::max(n, m);
    B = A + m * m, P = B + m * m, T = P + m * m;
  }

  // out = the polynomial of G / (margin |G| + eps).
  void run(const float* G, float* out, const float* triples, int64_t count, float margin, float eps,
           bool gram) {
    normalise(G, margin, eps);
    square(X, n, A);
    for (int64_t i = 0; i < count; i++, triples += 3) {
      polynomial(triples[0], triples[1], triples[2]);
      bool last = i + 1 == count;
      if (!gram) {  // X <- B X
        float* to = last ? out : X;
        Packed right = packed_rows(X, n);
        product(m, B, m, right, to, n);
        if (!last) square(X, n, A);
        continue;
      }
      if (!last) {  // A <- B A B
        symmetric(B, A, T);
        symmetric(T, B, A);
      }
      if (i == 0) {  // P <- B P
        std::swap(P, B);
      } else {
        symmetric(B, P, T);
        std::swap(P, T);
      }
    }
    if (gram) {
      Packed right = packed_rows(X, n);
      product(m, P, m, right, out, n);
    }
  }

 private:
  // By way of G / max|G|, so that no square overflows. A NaN or an infinity makes all of X NaN.
  void normalise(const float* G, float margin, float eps) {
    Wide peaks;
    sweep(0, m * n, [&](auto at) { peaks = larger(peaks, magnitude(at(G))); });
    float most = std::max(largest(peaks), 1.17549435e-38f);
    double squares = 0;
    for (int64_t i = 0; i < m; i++) {
      const float* row = G + i * n;
      float* to = X + i * n;
      sweep(0, n, [=](auto at) { at.put(to, at(row) / most); });
      squares += dot(to, to, n);
    }
    float norm = std::sqrt(squares), scale = 1.f / (norm * margin + eps / most);
    sweep(0, m * n, [=, x = X](auto at) { at.put(x, at(x) * scale); });
  }

  Packed packed_rows(const float* R, int64_t width) {
    Packed to{packed, whole_vectors(width), m};
    for (int64_t p = 0; p < panels_of(width); p++) pack_panel(R, width, 1, to, width, p);
    return to;
  }

  void square(const float* L, int64_t depth, float* C) {  // C = L L^T
    Packed right{packed, whole_vectors(m), depth};
    for (int64_t p = 0; p < panels_of(m); p++) pack_panel(L, 1, depth, right, m, p);
    lower_product(m, L, depth, right, set(C));
    mirror(C, m);
  }

  void symmetric(const float* L, const float* R, float* C) {  // C = L R, known to be symmetric
    lower_product(m, L, m, packed_rows(R, m), set(C));
    mirror(C, m);
  }

  void polynomial(float a, float b, float c) {  // B = a I + b A + c A^2
    lower_product(m, A, m, packed_rows(A, m), [=](int64_t at, vec sum) {
      store(B + at, b * load(A + at) + c * sum);
    });
    for (int64_t i = 0; i < m; i++) B[i * m + i] += a;
    mirror(B, m);
  }

  int64_t m, n;
  Buffer room;
  float *X, *packed, *A, *B, *P, *T;
};

}  // namespace

// N matrices one after the other in memory; out may be G. `gram` chooses the form of the iteration.
extern "C" int orthogonalize(const float* G, float* out, const float* triples, int64_t count, float margin,
                              float eps, int64_t gram, int64_t N, int64_t m, int64_t n, int threads) {
  if (count < 1 || !whole({m, n})) return BAD_SIZE;
  share_out(N, 1, threads, [=](int64_t i) {
    Matrix(m, n).run(G + i * m * n, out + i * m * n, triples, count, margin, eps, gram);
  });
  return 0;
}
