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

// y = h W^T; with a stream x: y = x + factor h W^T, a branch's last layer and its addition to the stream.
extern "C" int linear_forward(const float* h, const float* W, const float* x, float factor, float* y,
                               int64_t rows, int64_t I, int64_t O, int threads) {
  if (!whole({I, O})) return BAD_SIZE;
  Buffer room(I * O);
  Packed right = pack(W, 1, I, O, I, room.data, threads);
  each_block(0, rows, BLOCK, threads, [&](int64_t row, int64_t count) {
    float* to = y + row * O;
    if (!x) return product(count, h + row * I, I, right, to, O);
    const float* from = x + row * O;
    product(count, h + row * I, I, right, to, O,
            [=](int64_t at, vec sum) { store(to + at, load(from + at) + factor * sum); });
  });
  return 0;
}

// dx = g W, dW = g^T x
extern "C" int linear_backward(const float* g, const float* x, const float* W, float* dx, float* dW,
                                int64_t rows, int64_t I, int64_t O, int threads) {
  if (!whole({I, O})) return BAD_SIZE;
  int64_t chunk = chunk_rows(threads), begin = 0;
  Buffer room(I * O);
  Strips slopes(O, chunk);
  Panels inputs(I, chunk);
  Packed right = pack(W, I, 1, I, O, room.data, threads);
  do {
    int64_t end = std::min(rows, begin + chunk);
    each_block(begin, end, BLOCK, threads, [&](int64_t row, int64_t count) {
      product(count, g + row * O, O, right, dx + row * I, I);
      slopes.put(row - begin, g + row * O, count, O);
      inputs.put(row - begin, x + row * I, count);
    });
    sum_products({{slopes, inputs, dW}}, end - begin, begin, threads);
  } while ((begin += chunk) < rows);
  return 0;
}

// y = x + down h, h = relu(up n)^2, n = r x, r = 1 / sqrt(mean x^2 + eps)
extern "C" int mlp_forward(const float* x, const float* up, const float* down, float eps, float* r,
                            float* h, float* y, int64_t rows, int64_t D, int64_t F, int threads) {
  if (!whole({D, F})) return BAD_SIZE;
  Buffer room(2 * D * F);
  Packed widens = pack(up, 1, D, F, D, room.data, threads);
  Packed narrows = pack(down, 1, F, D, F, room.data + D * F, threads);
  each_block(0, rows, BLOCK, threads, [&](int64_t row, int64_t count) {
    Buffer normed(BLOCK * D);
    const float* from = x + row * D;
    norm_rows(from, eps, r + row, normed.data, count, D);
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
  if (!whole({D, F})) return BAD_SIZE;
  int64_t chunk = chunk_rows(threads), begin = 0;
  Buffer room(2 * D * F);
  Strips hidden_slopes(F, chunk), slopes(D, chunk);
  Panels normed(D, chunk), hidden(F, chunk);
  Packed widens = pack(down, F, 1, F, D, room.data, threads);
  Packed narrows = pack(up, D, 1, D, F, room.data + D * F, threads);
  do {
    int64_t end = std::min(rows, begin + chunk);
    each_block(begin, end, BLOCK, threads, [&](int64_t row, int64_t count) {
      Buffer own(BLOCK * F);
      float *dh = own.data, *to = dx + row * D;
      const float *squares = h + row * F, *over = g + row * D;
      hidden.put(row - begin, squares, count);  // first: this reads rows from front to back
      slopes.put(row - begin, over, count, D);
      product(count, over, D, widens, dh, F, [=](int64_t at, vec sum) {
        store(dh + at, 2.f * square_root(load(squares + at)) * sum);
      });
      product(count, dh, F, narrows, to, D);
      undo_norm_rows(to, x + row * D, r + row, count, D);
      sweep(0, count * D, [=](auto at) { at.put(to, at(to) + at(over)); });
      hidden_slopes.put(row - begin, dh, count, F);
      normed.put(row - begin, x + row * D, count, r + row);
    });
    sum_products({{slopes, hidden, ddown}, {hidden_slopes, normed, dup}}, end - begin, begin, threads);
  } while ((begin += chunk) < rows);
  return 0;
}

// q = R(norm(q' n)), k = R(norm(k' n)), v = v' n with n = norm(x): what attention starts from. `rq` and
// `rk` null: no norm of q and k; the angles null: no rotation.
extern "C" int qkv_forward(const float* x, const float* Wq, const float* Wk, const float* Wv,
                            const float* cos, const float* sin, float eps, float* r, float* q, float* k,
                            float* v, float* rq, float* rk, int64_t rows, int64_t T, int64_t D, int64_t H,
                            int64_t G, int64_t K, int threads) {
  if (!whole({D, H * K, G * K}) || !turnable(cos, rows, T, K)) return BAD_SIZE;
  Angles angles{cos, sin, T, K / 2};
  int64_t queries = H * K, keys = G * K;
  Buffer room(D * (queries + 2 * keys));
  Packed to_q = pack(Wq, 1, D, queries, D, room.data, threads);
  Packed to_k = pack(Wk, 1, D, keys, D, room.data + D * queries, threads);
  Packed to_v = pack(Wv, 1, D, keys, D, room.data + D * (queries + keys), threads);
  each_block(0, rows, BLOCK, threads, [&](int64_t row, int64_t count) {
    Buffer normed(BLOCK * D);
    norm_rows(x + row * D, eps, r + row, normed.data, count, D);
    auto project = [&](const Packed& weights, float* to) {
      product(count, normed.data, D, weights, to, weights.width);
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
  if (!whole({D, H * K, G * K}) || !turnable(cos, rows, T, K)) return BAD_SIZE;
  Angles angles{cos, sin, T, K / 2};
  int64_t queries = H * K, keys = G * K, chunk = chunk_rows(threads), begin = 0;
  Buffer room(D * (queries + 2 * keys));
  Strips slopes_q(queries, chunk), slopes_k(keys, chunk), slopes_v(keys, chunk);
  Panels normed(D, chunk);
  Packed from_q = pack(Wq, D, 1, D, queries, room.data, threads);
  Packed from_k = pack(Wk, D, 1, D, keys, room.data + D * queries, threads);
  Packed from_v = pack(Wv, D, 1, D, keys, room.data + D * (queries + keys), threads);
  do {
    int64_t end = std::min(rows, begin + chunk);
    each_block(begin, end, BLOCK, threads, [&](int64_t row, int64_t count) {
      auto unturn = [&](const float* g, const float* y, const float* inverse, float* to, int64_t heads) {
        for (int64_t i = 0; i < count; i++) {
          int64_t at = (row + i) * heads * K;
          undo_norm_rotate(g + at, y + at, inverse ? inverse + (row + i) * heads : nullptr, angles,
                           row + i, to + i * heads * K, heads, K);
        }
      };
      Buffer own(count * (queries + keys + D));
      float *gq = own.data, *gk = gq + count * queries, *partial = gk + count * keys;
      unturn(dq, q, rq, gq, H);
      unturn(dk, k, rk, gk, G);
      float* to = dx + row * D;
      const float* gv = dv + row * keys;
      product(count, gq, queries, from_q, to, D);
      product(count, gk, keys, from_k, partial, D, add_to(to));
      product(count, gv, keys, from_v, partial, D, add_to(to));
      undo_norm_rows(to, x + row * D, r + row, count, D);
      slopes_q.put(row - begin, gq, count, queries);
      slopes_k.put(row - begin, gk, count, keys);
      slopes_v.put(row - begin, gv, count, keys);
      normed.put(row - begin, x + row * D, count, r + row);
    });
    sum_products({{slopes_q, normed, dWq}, {slopes_k, normed, dWk}, {slopes_v, normed, dWv}}, end - begin,
                 begin, threads);
  } while ((begin += chunk) < rows);
  return 0;
}
