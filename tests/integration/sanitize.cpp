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
        dW = unwritten(V * D), each = unwritten(rows);
  auto targets = std::make_unique<int64_t[]>(rows);
  for (int64_t i = 0; i < rows; i++) targets[i] = draw(0, V - 1);
  float cap = 15.f * draw(0, 1);
  head_loss(x, W, targets.get(), cap, loss, nullptr, nullptr, rows, D, V, threads);
  written("head_loss without gradients", loss);
  head_loss(x, W, targets.get(), cap, loss, dx, dW, rows, D, V, threads);
  written("head_loss", loss, dx, dW);
  token_losses(x, W, targets.get(), cap, each, rows, D, V, threads);
  written("token_losses", each);
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

// One step of each kind, and of those that have a choice one of each choice, for texts in some slots.
void token(int64_t, int threads) {
  int64_t columns = draw(1, 300), rows = draw(1, 700), T = draw(1, 60), S = draw(1, 19);
  int64_t K = 4 * draw(1, 20), G = draw(1, 3), group = draw(1, 3), H = G * group;
  Array x = filled(S * columns), y = filled(S * columns), gain = filled(columns),
        shift = filled(columns), sum = unwritten(S * columns), mixed = unwritten(S * columns),
        normed = unwritten(S * columns), scaled = unwritten(S * columns),
        squared = unwritten(S * columns), bent = unwritten(S * columns), capped = unwritten(S * columns),
        table = filled(T * columns), weights = filled(rows * columns), bias = filled(rows),
        matrix = unwritten(whole_vectors(rows) * columns),
        out = unwritten(S * rows), q = filled(S * H * K), k = filled(S * G * K),
        last = filled(S * G * K), cos = filled(T * K / 2), sin = filled(T * K / 2),
        keys = filled(S * G * T * K), values = filled(S * G * T * K), heads = unwritten(S * H * K);
  pack_rows(weights, rows, columns, matrix, threads);
  int64_t c = columns, r = rows, g = G * K, h = H * K, t = G * T * K;
  const decoding::Step steps[] = {
      {0, sum, nullptr, table, nullptr, c, 0, 0, 0, 0, columns, 0, 2, 0, 0},
      {0, sum, nullptr, table, nullptr, c, 0, 0, 0, 0, columns, 0, 2, 1, 0},
      {1, mixed, x, y, nullptr, c, c, c, 0, 0, columns, 0, 0, .5f, 2},
      {2, normed, x, nullptr, nullptr, c, c, 0, 0, 1, columns, 0, 0, 1e-6f, 0},
      {2, scaled, x, gain, shift, c, c, 0, 0, 1, columns, 0, 0, 1e-6f, 0},
      {3, q, nullptr, cos, sin, h, 0, 0, 0, H, K, 0, 0, 0, 0},
      {4, out, x, matrix, nullptr, r, c, 0, 0, rows, columns, 0, 0, 0, 1},
      {4, out, x, matrix, bias, r, c, 0, 0, rows, columns, 0, 0, 1, .5f},
      {5, squared, x, nullptr, nullptr, c, c, 0, 0, 0, columns, 0, 0, 0, 0},
      {6, bent, x, nullptr, nullptr, c, c, 0, 0, 0, columns, 0, 0, 0, 0},
      {7, capped, x, nullptr, nullptr, c, c, 0, 0, 0, columns, 0, 0, 15, 0},
      {8, k, nullptr, last, nullptr, g, 0, g, 0, G, K, 0, 0, 0, 0},
      {9, keys, k, nullptr, nullptr, t, g, 0, 0, G, K, T * K, 0, 0, 0},
      {10, heads, q, keys, values, h, h, t, t, H, K, T * K, group, .2f, 0},
  };
  std::vector<decoding::Token> tokens;
  for (int64_t slot = S - 1; slot >= 0; slot--) {
    int64_t position = draw(0, T - 1);
    tokens.push_back({slot, {position, position, position}, draw(0, position)});
  }
  decode(steps, std::size(steps), tokens.data(), S, threads);
  int64_t most = T / 2;
  auto first = std::make_unique<int64_t[]>(T), ids = std::make_unique<int64_t[]>(S * (most + 1)),
       drawn = std::make_unique<int64_t[]>(S * (most + 1));
  auto uniform = std::make_unique<double[]>(S * (most + 1));
  std::vector<decoding::Text> texts;
  for (int64_t slot = 0; most && slot < S; slot++) {
    int64_t givens = draw(1, most), count = draw(1, T - most - givens + 1), at = slot * (most + 1);
    for (int64_t i = 0; i <= most; i++) ids[at + i] = draw(0, T - 1);
    texts.push_back({slot, draw(0, T - 1), draw(0, T - givens - count + 1) % (most + 1), 0, .5, 1., 0,
                     &ids[at], givens, &uniform[at], &drawn[at], std::min(count, most)});
  }
  decoding::Model model{steps, std::size(steps), out, rows, T, -1, first.get()};
  if (most) write_tokens(&model, texts.data(), texts.size(), threads);
  written("decode", sum, mixed, normed, scaled, squared, bent, capped, out, heads);
}

// Tokens of some texts, with logits that are equal, infinite or no numbers among them.
void sampling(int64_t size, int threads) {
  int64_t texts = draw(1, 5);
  Array logits = filled(texts * size);
  for (int64_t i = 0; i < texts * size; i += draw(1, 9))
    logits[i] = draw(0, 20) ? 0.f : draw(0, 1) ? NAN : -INFINITY;
  std::vector<drawing::Draw> asked;
  for (int64_t t = 0; t < texts; t++)
    asked.push_back({logits + t * size, draw(0, 3) * .5, draw(0, 4) * .25, draw(0, 999) / 1000.,
                     draw(0, 2) ? draw(0, size + 2) : 0, -2});
  ::draw(asked.data(), texts, size, threads);
  for (const drawing::Draw& one : asked)
    if (one.token < -1 || one.token >= size) std::abort();
}

}  // namespace

int main(int, char** words) {
  int draws = std::atoi(words[1]);
  random_bits.seed(std::atoi(words[2]));
  const int64_t edges[] = {1, 2, 31, 32, 47, 48, 49, 95, 96, 97, 767, 768, 769};
  for (int i = 0; i < draws; i++)
    for (auto routine : {linear, mlp, qkv, head, elementwise, attention, muon, token, sampling}) {
      int64_t rows = i % 2 ? edges[draw(0, 12)] : draw(1, 500);
      routine(rows, draw(1, 3));
    }
}
