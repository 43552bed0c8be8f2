// Every routine on shapes drawn at random, for a build with the compiler's sanitizers. All arrays have
// exactly the size that is needed, and what a routine has to write is NaN before: whatever it reads
// or writes beside an array is reported, and whatever it leaves out is seen afterwards.
//
// The arguments are the number of draws and the seed.
#include "attention.cpp"
#include "decode.cpp"
#include "fused.cpp"
#include "linear.cpp"
#include "loss.cpp"
#include "matmul.cpp"
#include "orthogonalize.cpp"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

namespace {

std::mt19937 random_bits;

int64_t draw(int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random_bits);
}

// Not a std::vector, whose spare capacity nobody watches.
struct Array {
  int64_t size;
  std::unique_ptr<float[]> data;
  operator float*() { return data.get(); }
};

Array filled(int64_t size) {
  Array made{size, std::make_unique<float[]>(size)};
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < size; i++) made[i] = normal(random_bits);
  return made;
}

Array unwritten(int64_t size) {
  Array made{size, std::make_unique<float[]>(size)};
  std::fill_n(made.data.get(), size, NAN);
  return made;
}

float* given(bool is, Array& x) { return is ? x.data.get() : nullptr; }

template <typename... Arrays>
void written(const char* routine, Arrays&... arrays) {
  bool whole = true;
  auto look = [&](Array& x) {
    for (int64_t i = 0; i < x.size; i++) whole &= x[i] == x[i];
  };
  (look(arrays), ...);
  if (whole) return;
  std::fprintf(stderr, "%s left a NaN where a result belongs\n", routine);
  std::exit(1);
}

void linear(int64_t rows, int threads) {
  int64_t I = 16 * draw(1, 14), O = 16 * draw(1, 14);
  Array x = filled(rows * I), W = filled(O * I), g = filled(rows * O), y = unwritten(rows * O),
        z = unwritten(rows * O), dx = unwritten(rows * I), dW = unwritten(O * I);
  linear_forward(x, W, nullptr, 1, y, rows, I, O, threads);
  linear_forward(x, W, y, .5f, z, rows, I, O, threads);
  linear_backward(g, x, W, dx, dW, rows, I, O, threads);
  written("linear", y, z, dx, dW);
}

void mlp(int64_t rows, int threads) {
  int64_t D = 16 * draw(1, 6), F = 16 * draw(1, 14);
  Array x = filled(rows * D), up = filled(F * D), down = filled(D * F), g = filled(rows * D),
        r = unwritten(rows), h = unwritten(rows * F), y = unwritten(rows * D), dx = unwritten(rows * D),
        dup = unwritten(F * D), ddown = unwritten(D * F);
  mlp_forward(x, up, down, 1e-6f, r, h, y, rows, D, F, threads);
  mlp_backward(g, x, r, h, up, down, dx, dup, ddown, rows, D, F, threads);
  written("mlp", r, h, y, dx, dup, ddown);
}

void qkv(int64_t rows, int threads) {
  int64_t D = 16 * draw(1, 6), K = 16 * draw(1, 5), G = draw(1, 3), H = G * draw(1, 3);
  bool normed = draw(0, 1), rotated = draw(0, 1);
  int64_t T = rows % 3 ? rows : rows / 3;
  Array x = filled(rows * D), Wq = filled(H * K * D), Wk = filled(G * K * D), Wv = filled(G * K * D),
        cos = filled(rotated * T * K / 2), sin = filled(rotated * T * K / 2), r = unwritten(rows),
        q = unwritten(rows * H * K), k = unwritten(rows * G * K), v = unwritten(rows * G * K),
        rq = unwritten(normed * rows * H), rk = unwritten(normed * rows * G), dx = unwritten(rows * D),
        dWq = unwritten(H * K * D), dWk = unwritten(G * K * D), dWv = unwritten(G * K * D);
  float *c = given(rotated, cos), *s = given(rotated, sin);
  float *iq = given(normed, rq), *ik = given(normed, rk);
  qkv_forward(x, Wq, Wk, Wv, c, s, 1e-6f, r, q, k, v, iq, ik, rows, T, D, H, G, K, threads);
  Array dq = filled(rows * H * K), dk = filled(rows * G * K), dv = filled(rows * G * K);
  qkv_backward(dq, dk, dv, q, k, iq, ik, x, r, Wq, Wk, Wv, c, s, dx, dWq, dWk, dWv, rows, T, D, H, G, K,
               threads);
  written("qkv", r, q, k, v, rq, rk, dx, dWq, dWk, dWv);
}

void head(int64_t rows, int threads) {
  int64_t D = 16 * draw(1, 6), V = draw(1, 300);
  Array x = filled(rows * D), W = filled(V * D), loss = unwritten(1), dx = unwritten(rows * D),
        dW = unwritten(V * D);
  auto targets = std::make_unique<int64_t[]>(rows);
  for (int64_t i = 0; i < rows; i++) targets[i] = draw(0, V - 1);
  float cap = 15.f * draw(0, 1);
  head_loss(x, W, targets.get(), cap, loss, nullptr, nullptr, rows, D, V, threads);
  written("head_loss without gradients", loss);
  head_loss(x, W, targets.get(), cap, loss, dx, dW, rows, D, V, threads);
  written("head_loss", loss, dx, dW);
  targets[rows - 1] = V;
  if (!head_loss(x, W, targets.get(), cap, loss, dx, dW, rows, D, V, threads)) std::abort();
}

void elementwise(int64_t rows, int threads) {
  int64_t H = draw(1, 3), K = 4 * draw(1, 40), size = rows * H * K, T = rows % 2 ? rows : rows / 2;
  bool normed = draw(0, 1), rotated = draw(0, 1);
  Array x = filled(size), g = filled(size), y = unwritten(size), dx = unwritten(size), dy = unwritten(size),
        r = unwritten(normed * rows * H), cos = filled(rotated * T * K / 2),
        sin = filled(rotated * T * K / 2);
  float *c = given(rotated, cos), *s = given(rotated, sin), *inverse = given(normed, r);
  norm_rotate_forward(x, c, s, 1e-6f, y, inverse, rows, T, H, K, threads);
  norm_rotate_backward(g, y, inverse, c, s, dx, rows, T, H, K, threads);
  written("norm_rotate", y, dx, r);
  y = unwritten(size), dx = unwritten(size);
  Array starts = filled(rows);
  for (int64_t t = 0; t < rows; t++) starts[t] = starts[t] > 1;
  offset_keys_forward(x, starts, y, rows, T, H, K, threads);
  offset_keys_backward(g, starts, dx, rows, T, H, K, threads);
  written("offset_keys", y, dx);
  y = unwritten(size), dx = unwritten(size);
  relu_squared_forward(x, y, size, threads);
  relu_squared_backward(g, y, dx, size, threads);
  written("relu_squared", y, dx);
  Array a = filled(1), b = filled(1), da = unwritten(1), db = unwritten(1), z = unwritten(size);
  dx = unwritten(size);
  blend_forward(x, y, a, b, z, size, threads);
  blend_backward(g, x, y, a, b, dx, dy, da, db, size, threads);
  written("blend", z, dx, dy, da, db);
}

void attention(int64_t T, int threads) {
  int64_t B = draw(1, 2), KV = draw(1, 2), H = KV * draw(1, 2), K = 16 * draw(1, 5);
  int64_t queries = B * H * T * K, keys = B * KV * T * K;
  Shape shape{B, H, KV, T, K};
  auto first = std::make_unique<int32_t[]>(B * T);
  for (int64_t i = 0; i < B * T; i++)
    first[i] = i % T == 0 ? 0 : draw(0, 40) ? first[i - 1] : i % T;
  Array q = filled(queries), k = filled(keys), v = filled(keys), dout = filled(queries),
        out = unwritten(queries), lse = unwritten(B * H * T), dq = unwritten(queries),
        dk = unwritten(keys), dv = unwritten(keys);
  auto wide = [&](Array& x, int64_t heads) { return Tensor{x, T * heads * K, K, heads * K}; };
  Tensor q_ = wide(q, H), k_ = wide(k, KV), v_ = wide(v, KV), out_ = wide(out, H), dout_ = wide(dout, H),
         dq_ = wide(dq, H), dk_ = wide(dk, KV), dv_ = wide(dv, KV);
  attention_forward(&shape, &q_, &k_, &v_, first.get(), .2f, &out_, lse, threads);
  attention_backward(&shape, &q_, &k_, &v_, first.get(), .2f, &out_, lse, &dout_, &dq_, &dk_, &dv_,
                     threads);
  written("attention", out, lse, dq, dk, dv);
}

void muon(int64_t, int threads) {
  int64_t N = draw(1, 3), m = 16 * draw(1, 8), n = m + 16 * draw(0, 8);
  Array G = filled(N * m * n), out = unwritten(N * m * n), triples = filled(15);
  for (int64_t i = 0; i < triples.size; i++) triples[i] *= .1f;
  orthogonalize(G, out, triples, draw(1, 5), 1.1f, 1e-7f, draw(0, 1), N, m, n, threads);
  written("orthogonalize", out);
}

// One step of each kind, and of those that have a choice one of each choice.
void token(int64_t, int threads) {
  int64_t columns = draw(1, 300), rows = draw(1, 700), T = draw(1, 60), position = draw(0, T - 1);
  int64_t K = 4 * draw(1, 20), G = draw(1, 3), group = draw(1, 3), H = G * group;
  Array x = filled(columns), y = filled(columns), gain = filled(columns), sum = unwritten(columns),
        mixed = unwritten(columns), normed = unwritten(columns), scaled = unwritten(columns),
        squared = unwritten(columns), bent = unwritten(columns), capped = unwritten(columns),
        table = filled(T * columns), matrix = filled(rows * columns), bias = filled(rows),
        out = unwritten(rows), q = filled(H * K), k = filled(G * K), last = filled(G * K),
        cos = filled(T * K / 2), sin = filled(T * K / 2), keys = filled(G * T * K),
        values = filled(G * T * K), heads = unwritten(H * K);
  const decoding::Step steps[] = {
      {0, sum, nullptr, table, nullptr, 0, columns, 0, 2, 0, 0},
      {0, sum, nullptr, table, nullptr, 0, columns, 0, 2, 1, 0},
      {1, mixed, x, y, nullptr, 0, columns, 0, 0, .5f, 2},
      {2, normed, x, nullptr, nullptr, 1, columns, 0, 0, 1e-6f, 0},
      {2, scaled, x, gain, y, 1, columns, 0, 0, 1e-6f, 0},
      {3, q, nullptr, cos, sin, H, K, 0, 0, 0, 0},
      {4, out, x, matrix, nullptr, rows, columns, 0, 0, 0, 1},
      {4, out, x, matrix, bias, rows, columns, 0, 0, 1, .5f},
      {5, squared, x, nullptr, nullptr, 0, columns, 0, 0, 0, 0},
      {6, bent, x, nullptr, nullptr, 0, columns, 0, 0, 0, 0},
      {7, capped, x, nullptr, nullptr, 0, columns, 0, 0, 15, 0},
      {8, k, nullptr, last, nullptr, G, K, 0, 0, 0, 0},
      {9, keys, k, nullptr, nullptr, G, K, T * K, 0, 0, 0},
      {10, heads, q, keys, values, H, K, T * K, group, .2f, 0},
  };
  decode(steps, std::size(steps), position, position, position, draw(0, position), threads);
  written("decode", sum, mixed, normed, scaled, squared, bent, capped, out, heads);
}

}  // namespace

int main(int, char** words) {
  int draws = std::atoi(words[1]);
  random_bits.seed(std::atoi(words[2]));
  const int64_t edges[] = {1, 2, 31, 32, 47, 48, 49, 95, 96, 97, 767, 768, 769};
  for (int i = 0; i < draws; i++)
    for (auto routine : {linear, mlp, qkv, head, elementwise, attention, muon, token}) {
      int64_t rows = i % 2 ? edges[draw(0, 12)] : draw(1, 500);
      routine(rows, draw(1, 3));
    }
}
