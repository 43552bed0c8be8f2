// Linear layers, and the MLP from one residual addition to the next; fp32, any CPU.
//
// A thread takes a block of rows through everything that is done to them: what lies between two matrix
// products stays in its cache. Weights' gradients, sums over all rows, follow chunk by chunk while the
// chunk is in cache.
//
// Legend: I inputs, O outputs, D width of the stream, F hidden width of the MLP; T tokens of a row of the
// batch, H query heads, G key/value heads, K head width.
#include "matmul.h"
#include "norm.h"

// y = x W^T
extern "C" int linear_forward(const float* x, const float* W, float* y, int64_t rows, int64_t I,
                               int64_t O, int threads) {
  Buffer room(I * O);
  Packed right = pack(W, 1, I, O, I, room.data, threads);
  each_block(0, rows, BLOCK, threads, [&](int64_t row, int64_t count) {
    float* to = y + row * O;
    product(count, x + row * I, I, right, to, O, [=](int64_t at, vec sum) { store(to + at, sum); });
  });
  return 0;
}

// dx = g W, dW = g^T x
extern "C" int linear_backward(const float* g, const float* x, const float* W, float* dx, float* dW,
                                int64_t rows, int64_t I, int64_t O, int threads) {
  Buffer room(I * O), summed(summing_room(O, I));
  Packed right = pack(W, I, 1, I, O, room.data, threads);
  int64_t chunk = chunk_rows(threads);
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    int64_t end = std::min(rows, begin + chunk);
    each_block(begin, end, BLOCK, threads, [&](int64_t row, int64_t count) {
      float* to = dx + row * I;
      product(count, g + row * O, O, right, to, I, [=](int64_t at, vec sum) { store(to + at, sum); });
    });
    sum_products(g + begin * O, O, O, x + begin * I, I, I, end - begin, dW, begin, summed.data,
                 threads);
  }
  return 0;
}

// y = x + down h, h = relu(up n)^2, n = r x, r = 1 / sqrt(mean x^2 + eps)
extern "C" int mlp_forward(const float* x, const float* up, const float* down, float eps, float* r,
                            float* h, float* y, int64_t rows, int64_t D, int64_t F, int threads) {
  Buffer room(2 * D * F);
  Packed widens = pack(up, 1, D, F, D, room.data, threads);
  Packed narrows = pack(down, 1, F, D, F, room.data + D * F, threads);
  each_block(0, rows, BLOCK, threads, [&](int64_t row, int64_t count) {
    Buffer normed(BLOCK * D);
    const float* from = x + row * D;
    for (int64_t i = 0; i < count; i++) {
      r[row + i] = inverse_rms(from + i * D, D, eps);
      scaled_copy(from + i * D, r[row + i], normed.data + i * D, D);
    }
    float *hidden = h + row * F, *to = y + row * D;
    product(count, normed.data, D, widens, hidden, F, [=](int64_t at, vec sum) {
      vec kept = larger(vec{}, sum);  // in this order a NaN stays one
      store(hidden + at, kept * kept);
    });
    product(count, hidden, F, narrows, to, D,
            [=](int64_t at, vec sum) { store(to + at, load(from + at) + sum); });
  });
  return 0;
}

// Gradients of the above. relu(up n) is the root of h, so nothing else is kept; n is made anew.
extern "C" int mlp_backward(const float* g, const float* x, const float* r, const float* h,
                             const float* up, const float* down, float* dx, float* dup, float* ddown,
                             int64_t rows, int64_t D, int64_t F, int threads) {
  int64_t chunk = chunk_rows(threads);
  Buffer room(2 * D * F), summed(std::max(summing_room(D, F), summing_room(F, D)));
  Buffer slopes(chunk * F), normed(chunk * D);
  Packed widens = pack(down, F, 1, F, D, room.data, threads);
  Packed narrows = pack(up, D, 1, D, F, room.data + D * F, threads);
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    int64_t end = std::min(rows, begin + chunk);
    each_block(begin, end, BLOCK, threads, [&](int64_t row, int64_t count) {
      float *dh = slopes.data + (row - begin) * F, *n = normed.data + (row - begin) * D;
      const float* hidden = h + row * F;
      product(count, g + row * D, D, widens, dh, F, [=](int64_t at, vec sum) {
        store(dh + at, 2.f * square_root(load(hidden + at)) * sum);
      });
      float* to = dx + row * D;
      product(count, dh, F, narrows, to, D, [=](int64_t at, vec sum) { store(to + at, sum); });
      for (int64_t i = 0; i < count; i++) {
        const float *from = x + (row + i) * D, *over = g + (row + i) * D;
        float *dn = to + i * D, *normal = n + i * D, scale = r[row + i];
        scaled_copy(from, scale, normal, D);
        float along = dot(dn, normal, D) / D;
        sweep(0, D, [=](auto at) {
          at.put(dn, at(over) + scale * (at(dn) - along * at(normal)));
        });
      }
    });
    int64_t count = end - begin;
    sum_products(slopes.data, F, F, normed.data, D, D, count, dup, begin, summed.data, threads);
    sum_products(g + begin * D, D, D, h + begin * F, F, F, count, ddown, begin, summed.data, threads);
  }
  return 0;
}

// q = R(norm(q' n)), k = R(norm(k' n)), v = v' n with n = norm(x): what attention starts from. `rq` and
// `rk` null: no norm of q and k; the angles null: no rotation.
extern "C" int qkv_forward(const float* x, const float* Wq, const float* Wk, const float* Wv,
                            const float* cos, const float* sin, float eps, float* r, float* q, float* k,
                            float* v, float* rq, float* rk, int64_t rows, int64_t T, int64_t D, int64_t H,
                            int64_t G, int64_t K, int threads) {
  Angles angles{cos, sin, T, K / 2};
  int64_t queries = H * K, keys = G * K;
  Buffer room(D * (queries + 2 * keys));
  Packed to_q = pack(Wq, 1, D, queries, D, room.data, threads);
  Packed to_k = pack(Wk, 1, D, keys, D, room.data + D * queries, threads);
  Packed to_v = pack(Wv, 1, D, keys, D, room.data + D * (queries + keys), threads);
  each_block(0, rows, BLOCK, threads, [&](int64_t row, int64_t count) {
    Buffer normed(BLOCK * D);
    for (int64_t i = 0; i < count; i++) {
      r[row + i] = inverse_rms(x + (row + i) * D, D, eps);
      scaled_copy(x + (row + i) * D, r[row + i], normed.data + i * D, D);
    }
    auto project = [&](const Packed& weights, float* to) {
      product(count, normed.data, D, weights, to, weights.width,
              [=](int64_t at, vec sum) { store(to + at, sum); });
    };
    auto turn = [&](float* to, float* inverse, int64_t heads) {
      for (int64_t i = 0; i < count; i++)
        norm_rotate(to + i * heads * K, angles, row + i, eps, to + i * heads * K,
                    inverse ? inverse + (row + i) * heads : nullptr, heads, K);
    };
    project(to_q, q + row * queries);
    project(to_k, k + row * keys);
    project(to_v, v + row * keys);
    turn(q + row * queries, rq, H);
    turn(k + row * keys, rk, G);
  });
  return 0;
}

extern "C" int qkv_backward(const float* dq, const float* dk, const float* dv, const float* q,
                             const float* k, const float* rq, const float* rk, const float* x,
                             const float* r, const float* Wq, const float* Wk, const float* Wv,
                             const float* cos, const float* sin, float* dx, float* dWq, float* dWk,
                             float* dWv, int64_t rows, int64_t T, int64_t D, int64_t H, int64_t G,
                             int64_t K, int threads) {
  Angles angles{cos, sin, T, K / 2};
  int64_t queries = H * K, keys = G * K, chunk = chunk_rows(threads);
  Buffer room(D * (queries + 2 * keys)), summed(summing_room(std::max(queries, keys), D));
  Buffer slopes(chunk * (queries + keys)), normed(chunk * D);
  Packed from_q = pack(Wq, D, 1, D, queries, room.data, threads);
  Packed from_k = pack(Wk, D, 1, D, keys, room.data + D * queries, threads);
  Packed from_v = pack(Wv, D, 1, D, keys, room.data + D * (queries + keys), threads);
  float *slopes_q = slopes.data, *slopes_k = slopes.data + chunk * queries;
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    int64_t end = std::min(rows, begin + chunk);
    each_block(begin, end, BLOCK, threads, [&](int64_t row, int64_t count) {
      auto unturn = [&](const float* g, const float* y, const float* inverse, float* to, int64_t heads) {
        for (int64_t i = 0; i < count; i++) {
          int64_t at = (row + i) * heads * K;
          undo_norm_rotate(g + at, y + at, inverse ? inverse + (row + i) * heads : nullptr, angles,
                           row + i, to + i * heads * K, heads, K);
        }
      };
      float *gq = slopes_q + (row - begin) * queries, *gk = slopes_k + (row - begin) * keys;
      unturn(dq, q, rq, gq, H);
      unturn(dk, k, rk, gk, G);
      float* to = dx + row * D;
      Buffer unfinished(count * D);
      float* partial = unfinished.data;
      auto set = [=](int64_t at, vec sum) { store(to + at, sum); };
      auto add = [=](int64_t at, vec sum) { store(to + at, load(to + at) + sum); };
      product(count, gq, queries, from_q, to, D, set);
      product(count, gk, keys, from_k, partial, D, add);
      product(count, dv + row * keys, keys, from_v, partial, D, add);
      for (int64_t i = 0; i < count; i++) {
        float *normal = normed.data + (row + i - begin) * D, *one = to + i * D;
        scaled_copy(x + (row + i) * D, r[row + i], normal, D);
        undo_norm(one, normal, r[row + i], one, D);
      }
    });
    int64_t count = end - begin;
    sum_products(slopes_q, queries, queries, normed.data, D, D, count, dWq, begin, summed.data, threads);
    sum_products(slopes_k, keys, keys, normed.data, D, D, count, dWk, begin, summed.data, threads);
    sum_products(dv + begin * keys, keys, keys, normed.data, D, D, count, dWv, begin, summed.data,
                 threads);
  }
  return 0;
}

// y = x + factor h W^T: a branch's last layer and its addition to the stream.
extern "C" int add_linear_forward(const float* x, const float* h, const float* W, float factor, float* y,
                                   int64_t rows, int64_t I, int64_t O, int threads) {
  Buffer room(I * O);
  Packed right = pack(W, 1, I, O, I, room.data, threads);
  each_block(0, rows, BLOCK, threads, [&](int64_t row, int64_t count) {
    float* to = y + row * O;
    const float* from = x + row * O;
    product(count, h + row * I, I, right, to, O,
            [=](int64_t at, vec sum) { store(to + at, load(from + at) + factor * sum); });
  });
  return 0;
}
