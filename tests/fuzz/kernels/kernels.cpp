// Every routine of the kernels on shapes, layouts and values drawn at random, for builds with the
// compiler's sanitizers. It runs the cases whose numbers it reads from its input and answers each with
// its name.
#include "attention.cpp"
#include "decode.cpp"
#include "fused.cpp"
#include "linear.cpp"
#include "loss.cpp"
#include "matmul.cpp"
#include "orthogonalize.cpp"

#include <thread>

#include "cases.h"

namespace cases {

constexpr int64_t SLOW = 400000;  // products that a slow formula may take

// A width that products cannot be made of.
int64_t bad_width() { return one_of<int64_t>({0, -16, 1, LANES - 1, LANES + 1, 16 * 3 + 2}); }

void linear() {
  int64_t rows = some_rows(), I = some_width(), O = some_width();
  if (once_in(10)) {
    (once_in(2) ? I : O) = bad_width();
    Array any = filled(1), to = unwritten(1);
    must_refuse(linear_forward(any, any, nullptr, 1, to, 1, I, O, 2), {&to});
    must_refuse(linear_backward(any, any, any, to, to, 1, I, O, 2), {&to});
    must_refuse(mlp_forward(any, any, any, 1e-6f, to, to, to, 1, I, O, 2), {&to});
    return must_refuse(mlp_backward(any, any, any, any, any, any, to, to, to, 1, I, O, 2), {&to});
  }
  Array x = filled(rows * I), W = filled(O * I), g = filled(rows * O), y = unwritten(rows * O),
        z = unwritten(rows * O), dx = unwritten(rows * I), dW = unwritten(O * I);
  on_any_threads([&](int n) { return linear_forward(x, W, nullptr, 1, y, rows, I, O, n); }, {&y});
  if (rows * I * O < SLOW) must_equal(y, products(x, W, rows, O, I));
  on_any_threads([&](int n) { return linear_forward(x, W, y, .5f, z, rows, I, O, n); }, {&z});
  on_any_threads([&](int n) { return linear_backward(g, x, W, dx, dW, rows, I, O, n); }, {&dx, &dW});
  if (rows * I * O >= SLOW) return;
  std::vector<double> over_x(rows * I), over_W(O * I);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = 0; o < O; o++)
      for (int64_t i = 0; i < I; i++) {
        over_x[r * I + i] += double(g[r * O + o]) * W[o * I + i];
        over_W[o * I + i] += double(g[r * O + o]) * x[r * I + i];
      }
  must_equal(dx, over_x);
  must_equal(dW, over_W);
}

void mlp() {
  int64_t rows = some_rows(), D = 16 * draw(1, 6), F = some_width();
  Array x = filled(rows * D), up = filled(F * D), down = filled(D * F), g = filled(rows * D),
        r = unwritten(rows), h = unwritten(rows * F), y = unwritten(rows * D), dx = unwritten(rows * D),
        dup = unwritten(F * D), ddown = unwritten(D * F);
  on_any_threads([&](int n) { return mlp_forward(x, up, down, 1e-6f, r, h, y, rows, D, F, n); }, {&r, &h, &y});
  on_any_threads([&](int n) { return mlp_backward(g, x, r, h, up, down, dx, dup, ddown, rows, D, F, n); },
                 {&dx, &dup, &ddown});
}

void qkv() {
  int64_t rows = some_rows(), D = 16 * draw(1, 6), K = 16 * draw(1, 5), G = draw(1, 3), H = G * draw(1, 3);
  bool normed = draw(0, 1), rotated = draw(0, 1);
  int64_t T = rows % 3 || !rows ? std::max<int64_t>(rows, 1) : rows / 3;
  if (once_in(10)) {
    bool turned = once_in(3);
    if (turned) T = 0;
    else (once_in(2) ? D : K) = bad_width();
    if (D > 0 && K > 0 && !turned && H * K % LANES == 0 && G * K % LANES == 0 && D % LANES == 0) return;
    Array any = filled(1), to = unwritten(1);
    return must_refuse(qkv_forward(any, any, any, any, any, any, 1e-6f, to, to, to, to, to, to, 1, T, D, H, G, K, 2),
                       {&to});
  }
  Array x = filled(rows * D), Wq = filled(H * K * D), Wk = filled(G * K * D), Wv = filled(G * K * D),
        cos = filled(rotated * T * K / 2), sin = filled(rotated * T * K / 2), r = unwritten(rows),
        q = unwritten(rows * H * K), k = unwritten(rows * G * K), v = unwritten(rows * G * K),
        rq = unwritten(normed * rows * H), rk = unwritten(normed * rows * G), dx = unwritten(rows * D),
        dWq = unwritten(H * K * D), dWk = unwritten(G * K * D), dWv = unwritten(G * K * D);
  float *c = given(rotated, cos), *s = given(rotated, sin);
  float *iq = given(normed, rq), *ik = given(normed, rk);
  auto forward = [&](int n) {
    return qkv_forward(x, Wq, Wk, Wv, c, s, 1e-6f, r, q, k, v, iq, ik, rows, T, D, H, G, K, n);
  };
  on_any_threads(forward, {&r, &q, &k, &v, &rq, &rk});
  Array dq = filled(rows * H * K), dk = filled(rows * G * K), dv = filled(rows * G * K);
  auto backward = [&](int n) {
    return qkv_backward(dq, dk, dv, q, k, iq, ik, x, r, Wq, Wk, Wv, c, s, dx, dWq, dWk, dWv, rows, T, D, H, G, K, n);
  };
  on_any_threads(backward, {&dx, &dWq, &dWk, &dWv});
}

void head() {
  int64_t rows = std::max<int64_t>(1, some_rows()), D = 16 * draw(1, 6), V = once_in(20) ? draw(16000, 17000) : draw(1, 300);
  if (V > 1000) rows %= 50, D = 16;
  rows = std::max<int64_t>(1, rows);
  float cap = one_of({0.f, 15.f, 1e-3f, 1e30f});
  auto targets = std::make_unique<int64_t[]>(rows);
  for (int64_t i = 0; i < rows; i++) targets[i] = draw(0, V - 1);
  Array x = filled(rows * D), W = filled(V * D), loss = unwritten(1), dx = unwritten(rows * D),
        dW = unwritten(V * D), each = unwritten(rows);
  int64_t* ids = targets.get();
  if (once_in(6)) {
    targets[draw(0, rows - 1)] = one_of<int64_t>({V, -1, INT64_MAX, INT64_MIN, V + 1000});
    must_be(head_loss(x, W, ids, cap, loss, dx, dW, rows, D, V, 2), BAD_VALUE);
    must_refuse(token_losses(x, W, ids, cap, each, rows, D, V, 2), {&loss, &dx, &dW, &each});
    return must_be(head_loss(x, W, ids, cap, loss, dx, dW, rows, bad_width(), V, 2), BAD_SIZE);
  }
  on_any_threads([&](int n) { return head_loss(x, W, ids, cap, loss, nullptr, nullptr, rows, D, V, n); }, {&loss});
  on_any_threads([&](int n) { return head_loss(x, W, ids, cap, loss, dx, dW, rows, D, V, n); }, {&loss, &dx, &dW});
  on_any_threads([&](int n) { return token_losses(x, W, ids, cap, each, rows, D, V, n); }, {&each});
  if (rows * D * V >= SLOW || (cap && cap != 15.f)) return;
  std::vector<double> logits = products(x, W, rows, V, D), expected(rows);
  for (int64_t i = 0; i < rows; i++) {
    double *z = &logits[i * V], peak = -INFINITY, sum = 0;
    for (int64_t v = 0; v < V; v++) peak = std::max(peak, z[v] = cap ? cap * std::tanh(z[v] / cap) : z[v]);
    for (int64_t v = 0; v < V; v++) sum += std::exp(z[v] - peak);
    expected[i] = peak + std::log(sum) - z[targets[i]];
  }
  must_equal(each, expected);
}

void elementwise() {
  int64_t tokens = some_rows(), H = draw(1, 3), K = 4 * draw(1, 40), size = tokens * H * K;
  int64_t T = tokens % 2 || !tokens ? std::max<int64_t>(tokens, 1) : tokens / 2;
  bool normed = draw(0, 1), rotated = draw(0, 1);
  if (once_in(10)) {
    Array any = filled(1), to = unwritten(1);
    must_refuse(norm_rotate_forward(any, any, any, 1e-6f, to, to, 1, 1, 1, 2 * K + 1, 2), {&to});
    must_refuse(norm_rotate_backward(any, any, any, any, any, to, 1, 0, 1, K, 2), {&to});
    must_refuse(offset_keys_forward(any, any, to, 1, 1, 1, K + draw(1, 3), 2), {&to});
    return must_refuse(offset_keys_backward(any, any, to, 3, 2, 1, K, 2), {&to});
  }
  Array x = filled(size), g = filled(size), y = unwritten(size), dx = unwritten(size), dy = unwritten(size),
        r = unwritten(normed * tokens * H), cos = filled(rotated * T * K / 2),
        sin = filled(rotated * T * K / 2), starts = filled(tokens), z = unwritten(size);
  float *c = given(rotated, cos), *s = given(rotated, sin), *inverse = given(normed, r);
  on_any_threads([&](int n) { return norm_rotate_forward(x, c, s, 1e-6f, y, inverse, tokens, T, H, K, n); }, {&y, &r});
  on_any_threads([&](int n) { return norm_rotate_backward(g, y, inverse, c, s, dx, tokens, T, H, K, n); }, {&dx});
  for (int64_t t = 0; t < tokens; t++) starts[t] = draw(0, 4) == 0;
  on_any_threads([&](int n) { return offset_keys_forward(x, starts, z, tokens, T, H, K, n); }, {&z});
  on_any_threads([&](int n) { return offset_keys_backward(g, starts, dx, tokens, T, H, K, n); }, {&dx});
  on_any_threads([&](int n) { return relu_squared_forward(x, y, size, n); }, {&y});
  std::vector<double> squares(size);
  for (int64_t i = 0; i < size; i++) squares[i] = x[i] > 0 ? double(x[i]) * x[i] : 0;
  must_equal(y, squares);
  on_any_threads([&](int n) { return relu_squared_backward(g, y, dx, size, n); }, {&dx});
  Array a = filled(1), b = filled(1), da = unwritten(1), db = unwritten(1);
  on_any_threads([&](int n) { return blend_forward(x, y, a, b, z, size, n); }, {&z});
  std::vector<double> sums(size);
  for (int64_t i = 0; i < size; i++) sums[i] = double(a[0]) * x[i] + double(b[0]) * y[i];
  must_equal(z, sums);
  on_any_threads([&](int n) { return blend_backward(g, x, y, a, b, dx, dy, da, db, size, n); }, {&dx, &dy, &da, &db});
}

void attention() {
  int64_t B = draw(0, 2), KV = draw(1, 2), H = KV * draw(1, 3), T = draw(0, once_in(6) ? 400 : 90);
  int64_t K = 16 * (once_in(6) ? draw(10, 16) : draw(1, 5));
  // Rows of tokens or of heads in memory, both with a gap behind each row of the batch.
  bool by_token = draw(0, 1);
  int64_t gap = draw(0, 5);
  auto size = [&](int64_t heads) { return B * (T * heads * K + gap); };
  auto view = [&](const Array& x, int64_t heads) {
    return by_token ? Tensor{x, T * heads * K + gap, K, heads * K} : Tensor{x, T * heads * K + gap, T * K, K};
  };
  auto first = std::make_unique<int32_t[]>(B * T);
  int64_t window = draw(1, std::max<int64_t>(1, T)), document = draw(1, 60);
  for (int64_t i = 0; i < B * T; i++) {
    int32_t t = i % T, least = std::max<int32_t>(0, t + 1 - window);
    first[i] = t == 0 ? 0 : once_in(document) ? t : std::max(first[i - 1], least);
  }
  Array q = filled(size(H)), k = filled(size(KV)), v = filled(size(KV)), dout = filled(size(H)),
        out = unwritten(size(H)), lse = unwritten(B * H * T), dq = unwritten(size(H)),
        dk = unwritten(size(KV)), dv = unwritten(size(KV));
  Tensor q_ = view(q, H), k_ = view(k, KV), v_ = view(v, KV), out_ = view(out, H), dout_ = view(dout, H),
         dq_ = view(dq, H), dk_ = view(dk, KV), dv_ = view(dv, KV);
  Shape shape{B, H, KV, T, K};
  auto forward = [&](int n) { return attention_forward(&shape, &q_, &k_, &v_, first.get(), .2f, &out_, lse, n); };
  auto backward = [&](int n) {
    return attention_backward(&shape, &q_, &k_, &v_, first.get(), .2f, &out_, lse, &dout_, &dq_, &dk_, &dv_, n);
  };
  if (once_in(8)) {
    int which = draw(0, 4);
    if (which == 0) shape.K = one_of<int64_t>({0, -16, 272, 1 << 20, LANES + 1});
    else if (which == 1) shape.KV = one_of<int64_t>({0, -1, H + 1});
    else if (B * T == 0) return;
    else if (which == 2) first[draw(0, B * T - 1)] = -1;
    else if (which == 3) first[draw(1, B) * T - 1] = T;
    else if (T > 2) first[0] = 0, first[1] = 1, first[2] = 0;
    else return;
    must_refuse(forward(2), {&out, &lse});
    return must_refuse(backward(2), {&dq, &dk, &dv});
  }
  if (gap) {  // which no routine may write to, so it stays NaN
    must_be(forward(draw(1, 4)), 0);
    must_write({&lse});
    return must_be(backward(draw(1, 4)), 0);
  }
  on_any_threads(forward, {&out, &lse});
  on_any_threads(backward, {&dq, &dk, &dv});
  if (B * H * T * T * K >= SLOW) return;
  std::vector<double> expected(out.size);
  for (int64_t i = 0; i < B * H * T; i++) {
    int64_t b = i / (H * T), h = i / T % H, t = i % T, kv = h / (H / KV);
    std::vector<double> odds;
    double sum = 0;
    for (int64_t j = first[b * T + t]; j <= t; j++) {
      double score = 0;
      for (int64_t d = 0; d < K; d++) score += double(q_.at(b, h, t)[d]) * k_.at(b, kv, j)[d];
      odds.push_back(std::exp(.2f * score)), sum += odds.back();
    }
    for (int64_t d = 0; d < K; d++)
      for (size_t j = 0; j < odds.size(); j++)
        expected[out_.at(b, h, t) + d - (float*)out] += odds[j] / sum * v_.at(b, kv, first[b * T + t] + j)[d];
  }
  must_equal(out, expected);
}

void muon() {
  int64_t N = draw(0, 3), m = 16 * draw(1, 8), n = m + 16 * draw(0, 8), count = draw(1, 5);
  Array G = filled(N * m * n), out = unwritten(N * m * n), triples = filled(3 * count);
  for (int64_t i = 0; i < triples.size; i++) triples[i] *= .1f;
  if (once_in(10)) {
    int which = draw(0, 2);
    (which == 0 ? m : which == 1 ? n : count) = which == 2 ? draw(-1, 0) : bad_width();
    Array any = filled(1), to = unwritten(1);
    return must_refuse(orthogonalize(any, to, any, count, 1.1f, 1e-7f, 0, 1, m, n, 2), {&to});
  }
  bool gram = draw(0, 1);
  on_any_threads([&](int n_) { return orthogonalize(G, out, triples, count, 1.1f, 1e-7f, gram, N, m, n, n_); }, {&out});
}

// One step of each kind, and of those that have a choice one of each choice, for texts in some slots.
void token() {
  int64_t columns = draw(1, 300), rows = once_in(5) ? draw(500, 2500) : draw(1, 200), T = draw(1, 60), S = draw(1, 19);
  int64_t K = 4 * draw(1, 20), G = draw(1, 3), group = draw(1, 3), H = G * group;
  int64_t c = columns, r = rows, g = G * K, h = H * K, t = G * T * K;
  Array x = filled(S * c), y = filled(S * c), gain = filled(c), shift = filled(c), sum = unwritten(S * c),
        mixed = unwritten(S * c), normed = unwritten(S * c), scaled = unwritten(S * c), squared = unwritten(S * c),
        bent = unwritten(S * c), capped = unwritten(S * c), table = filled(T * c), weights = filled(r * c),
        bias = filled(r), matrix = unwritten(whole_vectors(r) * c), out = unwritten(S * r),
        plain = unwritten(S * r), q = filled(S * h), k = filled(S * g), last = filled(S * g),
        cos = filled(T * K / 2), sin = filled(T * K / 2), keys = filled(S * t), values = filled(S * t),
        heads = unwritten(S * h);
  must_be(pack_rows(weights, r, c, matrix, draw(1, 3)), 0);
  must_write({&matrix});
  const decoding::Step steps[] = {
      {0, sum, nullptr, table, nullptr, c, 0, 0, 0, 0, c, 0, 2, 0, 0},
      {0, sum, nullptr, table, nullptr, c, 0, 0, 0, 0, c, 0, 2, 1, 0},
      {1, mixed, x, y, nullptr, c, c, c, 0, 0, c, 0, 0, .5f, 2},
      {2, normed, x, nullptr, nullptr, c, c, 0, 0, 1, c, 0, 0, 1e-6f, 0},
      {2, scaled, x, gain, shift, c, c, 0, 0, 1, c, 0, 0, 1e-6f, 0},
      {3, q, nullptr, cos, sin, h, 0, 0, 0, H, K, 0, 0, 0, 0},
      {4, plain, x, matrix, nullptr, r, c, 0, 0, r, c, 0, 0, 0, 1},
      {4, out, x, matrix, bias, r, c, 0, 0, r, c, 0, 0, 0, .5f},
      {4, out, x, matrix, bias, r, c, 0, 0, r, c, 0, 0, 1, .5f},
      {5, squared, x, nullptr, nullptr, c, c, 0, 0, 0, c, 0, 0, 0, 0},
      {6, bent, x, nullptr, nullptr, c, c, 0, 0, 0, c, 0, 0, 0, 0},
      {7, capped, x, nullptr, nullptr, c, c, 0, 0, 0, c, 0, 0, 15, 0},
      {8, k, nullptr, last, nullptr, g, 0, g, 0, G, K, 0, 0, 0, 0},
      {9, keys, k, nullptr, nullptr, t, g, 0, 0, G, K, T * K, 0, 0, 0},
      {10, heads, q, keys, values, h, h, t, t, H, K, T * K, group, .2f, 0},
  };
  std::vector<decoding::Token> tokens;
  for (int64_t slot = S - 1; slot >= 0; slot--) {
    int64_t position = draw(0, T - 1);
    tokens.push_back({slot, {position, position, position}, draw(0, position)});
  }
  if (once_in(10)) {
    decoding::Token& bad = tokens[draw(0, S - 1)];
    int which = draw(0, 2);
    which == 0 ? bad.first = bad.position() + draw(1, 9) : which == 1 ? bad.first = -1 : bad.slot = -1;
    return must_refuse(decode(steps, std::size(steps), tokens.data(), S, 2), {&sum, &plain, &heads});
  }
  must_be(decode(steps, std::size(steps), tokens.data(), S, draw(1, 4)), 0);
  must_write({&sum, &mixed, &normed, &scaled, &squared, &bent, &capped, &plain, &out, &heads});
  if (S * r * c < SLOW) must_equal(plain, products(x, weights, S, r, c));
  // Some tokens of each text, fed and drawn.
  int64_t most = T / 2;
  if (!most) return;
  auto first = std::make_unique<int64_t[]>(T), ids = std::make_unique<int64_t[]>(S * (most + 1)),
       drawn = std::make_unique<int64_t[]>(S * (most + 1));
  auto uniform = std::make_unique<double[]>(S * (most + 1));
  // Logits may be ids of tables of T rows alone, so only T of them are drawn from.
  int64_t V = std::min(r, T), window = draw(1, T);
  for (int64_t i = 0; i < T; i++) first[i] = std::max<int64_t>(0, i + 1 - window);
  std::vector<decoding::Text> texts;
  for (int64_t slot = 0; slot < S; slot++) {
    int64_t givens = draw(1, most), count = draw(1, std::min(most, T - givens)), at = slot * (most + 1);
    for (int64_t i = 0; i <= most; i++) ids[at + i] = draw(0, T - 1), uniform[at + i] = draw(0, 999) / 1000.;
    int64_t position = draw(0, T - givens - count);
    texts.push_back({slot, draw(0, T - 1), position, draw(0, position), one_of({0., .5, 1e-320, 1e300}),
                     one_of({1., .5, 0.}), draw(0, 5), &ids[at], givens, &uniform[at], &drawn[at], count});
  }
  std::vector<float> logits(S * V);
  decoding::Step last_step = {1, logits.data(), plain, plain, nullptr, V, r, r, 0, 0, V, 0, 0, 1, 0};
  std::vector<decoding::Step> all(steps, std::end(steps));
  all.push_back(last_step);
  decoding::Model model{all.data(), int64_t(all.size()), logits.data(), V, T, draw(-1, V), first.get()};
  if (once_in(10)) {
    decoding::Text& bad = texts[draw(0, S - 1)];
    int which = draw(0, 2);
    which == 0 ? bad.start = bad.position + 1 : which == 1 ? bad.givens = 0 : bad.count = 0;
    return must_be(write_tokens(&model, texts.data(), S, 2), BAD_VALUE);
  }
  must_be(write_tokens(&model, texts.data(), S, draw(1, 4)), 0);
  for (const decoding::Text& text : texts)
    for (int64_t i = 0; i < text.count; i++)
      if (text.drawn[i] < 0 || text.drawn[i] >= V) fail("a token that the vocabulary has not");
}

// Tokens of some texts, with logits that are equal, far apart, infinite or no numbers among them.
void sampling() {
  int64_t texts = draw(0, 5), size = once_in(4) ? draw(1, 4) : draw(1, 700);
  Array logits = filled(texts * size);
  for (int64_t i = 0; i < texts * size; i += draw(1, 9))
    logits[i] = draw(0, 20) ? one_of({0.f, 3e38f, -3e38f, 1e-40f}) : draw(0, 1) ? NAN : -INFINITY;
  std::vector<drawing::Draw> asked;
  for (int64_t t = 0; t < texts; t++)
    asked.push_back({logits + t * size, one_of({0., .5, 1., 1e-320, 1e-31, 1e-29, 1e30, 1e300}),
                     one_of({0., 1e-320, .25, .999, 1.}), one_of({0., .5, draw(0, 999) / 1000., 1 - DBL_EPSILON / 2}),
                     draw(0, 2) ? draw(0, size + 2) : 0, -2});
  if (once_in(10)) return must_be(::draw(asked.data(), texts, draw(-1, 0), 1), BAD_SIZE);
  must_be(::draw(asked.data(), texts, size, 2), 0);
  for (const drawing::Draw& one : asked) {
    bool numbers = std::all_of(one.logits, one.logits + size, [](float x) { return std::isfinite(x); });
    if (numbers ? one.token < 0 || one.token >= size : one.token != -1) fail("not a token that could be drawn");
    if (numbers && (one.temperature < 1e-300 || one.top_p < 1e-300) &&
        one.logits[one.token] != *std::max_element(one.logits, one.logits + size))
      fail("another token than the likeliest");
  }
}

struct Routine {
  const char* name;
  void (*run)();
};
constexpr Routine ROUTINES[] = {{"linear", linear}, {"mlp", mlp}, {"qkv", qkv}, {"head", head},
                                {"elementwise", elementwise}, {"attention", attention}, {"muon", muon},
                                {"token", token}, {"sampling", sampling}};

const char* run(uint64_t number) {
  random_bits.seed(number);
  odd_values = once_in(4);
  const Routine& routine = ROUTINES[number % std::size(ROUTINES)];
  about = routine.name;
  routine.run();
  return routine.name;
}

// Who calls from several threads at a time, as a server does, shares the pool.
void together() {
  Array x = filled(200 * 64), W = filled(64 * 64), one = unwritten(200 * 64), two = unwritten(200 * 64);
  auto call = [&](const Array& y) {
    return [&] {
      for (int i = 0; i < 20; i++) linear_forward(x, W, nullptr, 1, y, 200, 64, 64, 3);
    };
  };
  std::thread first(call(one)), second(call(two));
  first.join(), second.join();
  must_equal(one, std::vector<double>((float*)two, two + two.size));
}

}  // namespace cases

int main() {
  cases::together();
  unsigned long long number;
  while (std::scanf("%llu", &number) == 1) {
    std::printf("%s\n", cases::run(number));
    std::fflush(stdout);
  }
}
