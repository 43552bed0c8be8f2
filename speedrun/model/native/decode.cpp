// One token of each of some texts through the whole model in one call, for sampling; fp32.
//
// A token costs its products of matrices with a vector and little else, but torch calls 150 operators
// for it, which take ten times as long. Here the model is a list of steps, made once (decode.py) and
// run in order; a step is one operation on vectors. They know nothing of each other, so every switch
// of the model is a matter of the list.
//
// Each text has a slot: its own vectors and its own keys and values, at a fixed distance from those
// of the next slot. A product reads its matrix once for all texts. What becomes of a text never
// depends on the others: its numbers are added up in the same order whoever is there.
//
// Legend: H query heads, G key/value heads, T tokens the cache holds, K head width.
#include <algorithm>
#include <cmath>
#include <vector>

#include "draw.h"
#include "matmul.h"
#include "norm.h"
#include "parallel.h"
#include "vec.h"

namespace decoding {
namespace {

// A thread is woken for no fewer products than these. OpenMP's are awake: two take as long as one for
// 192 x 192 weights, and two thirds for 768 x 192. Ours sleep, and take 40 us to wake.
#ifdef _OPENMP
constexpr int64_t SHARE = 32768;
#else
constexpr int64_t SHARE = 524288;
#endif
constexpr int64_t TEXTS = 2 * STRIP;  // whose sums of a panel are kept at a time

// The token at hand of one text: its slot, its row in each kind of table, the first key it sees.
struct Token {
  int64_t slot, row[3], first;  // by its id, by the pair with the one before, by its position
  int64_t position() const { return row[2]; }
};

// What the fields mean is said at each kind; those of a kind that are not named are not read.
struct Step {
  int64_t kind;
  float *to, *x, *y, *z;                       // of slot 0
  int64_t next_to, next_x, next_y, next_z;     // floats on to those of the next slot; 0: all have one
  int64_t rows, columns, stride, group;
  float a, b;

  Step of(const Token& token) const {
    Step here = *this;
    here.to += token.slot * next_to, here.x += token.slot * next_x;
    here.y += token.slot * next_y, here.z += token.slot * next_z;
    return here;
  }
};

struct Tokens {
  const Token* tokens;
  int64_t count;
};

int helpful(int threads, int64_t products) {
  return std::clamp<int64_t>(products / SHARE, 1, threads);
}

// to[i] = sum_j matrix[i][j] x[j] for R rows, which share what they load of x. Not inlined: clang would
// lay the adding up of lanes out as a loop of its own, which the test of the object code calls scalar.
template <int R>
__attribute__((noinline)) void sums_of_rows(const float* matrix, int64_t columns, const float* x,
                                            float* to) {
  Wide sum[R];
  sweep(0, columns, [&](auto at) {
    Wide v = at(x);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) sum[r] = sum[r] + at(matrix + r * columns) * v;
  });
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) to[r] = total(sum[r]);
}

void multiply_rows(const float* matrix, int64_t rows, int64_t columns, const float* x, float* to) {
  constexpr int R = LANES == 16 ? 4 : 2;  // 8 sums in registers
  int64_t i = 0;
  for (; i + R <= rows; i += R) sums_of_rows<R>(matrix + i * columns, columns, x, to + i);
  for (; i < rows; i++) sums_of_rows<1>(matrix + i * columns, columns, x, to + i);
}

// to = a to + a row of the table y; `group` says by which number of the token.
void add_row(const Step& s, const Token& token) {
  const float* row = s.y + token.row[s.group] * s.columns;
  sweep(0, s.columns, [&](auto at) {
    Wide x = at(row);
    at.put(s.to, s.a ? x + s.a * at(s.to) : x);
  });
}

// to = a x + b y
void mix(const Step& s) {
  sweep(0, s.columns, [&](auto at) { at.put(s.to, s.a * at(s.x) + s.b * at(s.y)); });
}

// Each row of `to` = that of x over its root mean square; with a gain y, less its mean before, times
// the gain, and plus a bias z if there is one. a: eps.
void norm(const Step& s) {
  for (int64_t row = 0; row < s.rows; row++) {
    const float* from = s.x + row * s.columns;
    float *to = s.to + row * s.columns, mean = 0;
    if (s.y) {
      Wide sum;
      sweep(0, s.columns, [&](auto at) { sum = sum + at(from); });
      mean = total(sum) / s.columns;
    }
    Wide squares;
    sweep(0, s.columns, [&](auto at) {
      Wide off = at(from, mean) - mean;
      squares = squares + off * off;
    });
    float scale = 1.f / std::sqrt(total(squares) / s.columns + s.a);
    sweep(0, s.columns, [&](auto at) {
      Wide off = (at(from) - mean) * scale;
      if (s.y) off = off * at(s.y);
      at.put(to, s.z ? off + at(s.z) : off);
    });
  }
}

// Each row of `to`: the pairs (i, i + K/2) turned by the token's angles, cosines y and sines z.
void turn_pairs(const Step& s, const Token& token) {
  Angles angles{s.y, s.z, token.position() + 1, s.columns / 2};
  norm_rotate(s.to, angles, token.position(), 0.f, s.to, nullptr, s.rows, s.columns);
}

// to = a to + b (matrix y times x + bias z), the matrix rearranged by `pack_rows`: panel by panel for
// all texts, whose vectors are put side by side first.
void product(const Step& s, Tokens texts, int threads) {
  threads = helpful(threads, s.rows * s.columns * texts.count);
  const float* x = s.of(texts.tokens[0]).x;
  Buffer together(texts.count > 1 ? texts.count * s.columns : 1);
  if (texts.count > 1) {
    for (int64_t t = 0; t < texts.count; t++)
      std::copy_n(s.of(texts.tokens[t]).x, s.columns, together.data + t * s.columns);
    x = together.data;
  }
  share_out(panels_of(s.rows), 1, threads, [&](int64_t p) {
    constexpr int64_t WIDTH = PANEL * LANES;
    int64_t begin = p * WIDTH, count = std::min(WIDTH, s.rows - begin);
    Packed panel{s.y + begin * s.columns, whole_vectors(count), s.columns};
    alignas(64) float sums[TEXTS * WIDTH];
    for (int64_t t = 0; t < texts.count; t++) {
      if (t % TEXTS == 0)
        ::product(std::min(TEXTS, texts.count - t), x + t * s.columns, s.columns, panel, sums, WIDTH);
      float *to = s.of(texts.tokens[t]).to + begin, *sum = sums + t % TEXTS * WIDTH;
      sweep(0, count, [&](auto at) {
        Wide y = s.z ? at(sum) + at(s.z + begin) : at(sum);
        at.put(to, s.a ? s.a * at(to) + s.b * y : s.b * y);
      });
    }
  });
}

void relu_squared(const Step& s) {
  sweep(0, s.columns, [&](auto at) {
    Wide kept = larger(Wide(0.f), at(s.x));  // in this order a NaN stays one
    at.put(s.to, kept * kept);
  });
}

// x (1 + erf(x / sqrt 2)) / 2. The rest of erf to 1 is a polynomial in t times e^(-x^2 / 2), within
// 1.5e-7 (Abramowitz and Stegun, 7.1.26).
void gelu(const Step& s) {
  sweep(0, s.columns, [&](auto at) {
    Wide x = at(s.x), size = magnitude(x) * float(M_SQRT1_2), t = 1.f / (size * .3275911f + 1.f);
    Wide p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - .284496736f;
    p = (p * t + .254829592f) * t;
    Wide rest = p * exponential(size * size * -1.f).value();
    at.put(s.to, larger(Wide(0.f), x) - magnitude(x) * rest * .5f);
  });
}

// to = a tanh(x / a). With less = e^(-2 |x| / a) - 1 the tanh is -less / (less + 2): no cancellation.
void softcap(const Step& s) {
  sweep(0, s.columns, [&](auto at) {
    Wide x = at(s.x), less = exponential(magnitude(x) * (-2.f / s.a)).minus_one();
    at.put(s.to, with_sign(magnitude(s.a * less / (less + 2.f)), x));
  });
}

// The second and the last quarter of each key are swapped with those kept of the token before, y;
// the first token keeps its own.
void offset_keys(const Step& s, const Token& token) {
  int64_t quarter = s.columns / 4;
  for (int64_t i = 0; i < s.rows * 4; i++) {
    float *own = s.to + i * quarter, *kept = s.y + i * quarter;
    if (i % 2 == 0) continue;
    if (token.position() == 0)
      std::copy_n(own, quarter, kept);
    else
      std::swap_ranges(own, own + quarter, kept);
  }
}

// The rows of x to the token's place in the cache `to`, (G, T, K); stride: T K.
void remember(const Step& s, const Token& token) {
  for (int64_t row = 0; row < s.rows; row++)
    std::copy_n(s.x + row * s.columns, s.columns,
                s.to + row * s.stride + token.position() * s.columns);
}

// to = softmax(a x y^T) z for each head, over the keys the token sees: queries x, (H, K), keys y and
// values z, (G, T, K); stride: T K; `group` query heads share a key head.
void attend_head(const Step& s, const Token& token, int64_t h) {
  int64_t count = token.position() + 1 - token.first, K = s.columns;
  int64_t place = h / s.group * s.stride + token.first * K;
  const float *values = s.z + place, *query = s.x + h * K;
  float* to = s.to + h * K;
  std::vector<float> odds(count);
  float* p = odds.data();
  multiply_rows(s.y + place, count, K, query, p);
  Wide peaks = p[0] * s.a, sum;
  sweep(0, count, [&](auto at) { peaks = larger(peaks, at(p, p[0]) * s.a); });
  float peak = largest(peaks);
  sweep(0, count, [&](auto at) {
    Wide x = exponential(at(p) * s.a - peak).value();
    sum = sum + at.counted(x);
    at.put(p, x);
  });
  float whole = total(sum);
  sweep(0, K, [&](auto at) {
    Wide mean;
    for (int64_t t = 0; t < count; t++) mean = mean + p[t] * at(values + t * K);
    at.put(to, mean / whole);
  });
}

void attend(const Step& s, Tokens texts, int threads) {
  int64_t pairs = 0;
  for (int64_t t = 0; t < texts.count; t++)
    pairs += texts.tokens[t].position() + 1 - texts.tokens[t].first;
  threads = helpful(threads, s.rows * pairs * s.columns * 2);
  share_out(texts.count * s.rows, 1, threads, [&](int64_t item) {
    const Token& token = texts.tokens[item / s.rows];
    attend_head(s.of(token), token, item % s.rows);
  });
}

void run(const Step& s, const Token& token) {
  switch (s.kind) {
    case 0: return add_row(s, token);
    case 1: return mix(s);
    case 2: return norm(s);
    case 3: return turn_pairs(s, token);
    case 5: return relu_squared(s);
    case 6: return gelu(s);
    case 7: return softcap(s);
    case 8: return offset_keys(s, token);
    case 9: return remember(s, token);
  }
}

void run(const Step& s, Tokens texts, int threads) {
  if (s.kind == 4) return product(s, texts, threads);
  if (s.kind == 10) return attend(s, texts, threads);
  for (int64_t t = 0; t < texts.count; t++) run(s.of(texts.tokens[t]), texts.tokens[t]);
}

void run_all(const Step* steps, int64_t count, Tokens texts, int threads) {
  for (int64_t i = 0; i < count; i++) run(steps[i], texts, threads);
}

// One text while several of its tokens are written: those it is fed first and the one before them,
// where it stands, how tokens are drawn, and from which random numbers.
struct Text {
  int64_t slot, before, position, start;  // start: of its document
  double temperature, top_p;
  int64_t top_k;
  const int64_t* given;
  int64_t givens;
  const double* uniform;
  int64_t* drawn;
  int64_t count;  // how many are to be drawn; afterwards how many were, below 0: the logits are no numbers

  bool goes_on(int64_t k) const { return k < givens - 1 + count; }
  int64_t fed(int64_t k) const { return k < givens ? given[k] : drawn[k - givens]; }
};

// What all texts have in common.
struct Model {
  const Step* steps;
  int64_t count;
  const float* logits;  // (S, V)
  int64_t V, pairs, eot;
  const int64_t* first;  // the first key that a token sees, by its position
};

Token token_of(const Model& model, const Text& text, int64_t id) {
  int64_t pair = model.pairs - 1;
  if (model.pairs && text.position) pair = (36313 * id ^ 27191 * text.before) % (model.pairs - 1);
  return {text.slot, {id, pair, text.position}, std::max(model.first[text.position], text.start)};
}

void write_some(const Model& model, Text* texts, int64_t count, int threads) {
  std::vector<Token> tokens;
  for (int64_t k = 0;; k++) {
    tokens.clear();
    for (Text* text = texts; text < texts + count; text++)
      if (text->goes_on(k)) tokens.push_back(token_of(model, *text, text->fed(k)));
    if (tokens.empty()) return;
    run_all(model.steps, model.count, {tokens.data(), int64_t(tokens.size())}, threads);
    for (Text* text = texts; text < texts + count; text++) {
      if (!text->goes_on(k)) continue;
      text->before = text->fed(k), text->position++;
      int64_t next = k + 1 - text->givens;  // of those that are drawn
      if (next < 0) continue;
      const float* logits = model.logits + text->slot * model.V;
      drawing::Draw asked{logits, text->temperature, text->top_p, text->uniform[next], text->top_k, 0};
      int64_t token = text->drawn[next] = drawing::drawn(asked, model.V);
      if (token == model.eot) text->count = next + 1;
      if (token < 0) text->count = -text->givens;  // it goes on no more
    }
  }
}

// A thread takes some texts through all that is to be done, so that threads wait for each other once
// and not at every product: where other programs run too, they would wait long. One text they share.
template <typename Visit>
void share_texts(int64_t texts, int threads, const Visit& visit) {
  int64_t parts = std::min<int64_t>(threads, texts);
  if (parts == 1) return visit(0, texts, threads);
  share_out(parts, 1, threads,
            [&](int64_t p) { visit(p * texts / parts, (p + 1) * texts / parts, 1); });
}

// What would be read outside of a text's memory; Python knows how large tables and caches are.
bool sound(const Token& token) {
  return token.slot >= 0 && 0 <= token.first && token.first <= token.position();
}
bool sound(const Text& text) {
  return text.slot >= 0 && text.start <= text.position && text.givens > 0 && text.count > 0;
}

}  // namespace
}  // namespace decoding

// A matrix as the products of `decode` read it; `to` has room for its rows rounded up to whole vectors.
extern "C" int pack_rows(const float* matrix, int64_t rows, int64_t columns, float* to, int threads) {
  pack(matrix, 1, columns, rows, columns, to, threads);
  return 0;
}

extern "C" int decode(const decoding::Step* steps, int64_t count, const decoding::Token* tokens,
                       int64_t texts, int threads) {
  auto good = [](const decoding::Token& token) { return decoding::sound(token); };
  if (!std::all_of(tokens, tokens + texts, good)) return BAD_VALUE;
  decoding::share_texts(texts, threads, [=](int64_t first, int64_t last, int threads) {
    decoding::run_all(steps, count, {tokens + first, last - first}, threads);
  });
  return 0;
}

// Several tokens of each text, each drawn from the logits after the one before it.
extern "C" int write_tokens(const decoding::Model* model, decoding::Text* texts, int64_t count, int threads) {
  auto good = [](const decoding::Text& text) { return decoding::sound(text); };
  if (!std::all_of(texts, texts + count, good)) return BAD_VALUE;
  decoding::share_texts(count, threads, [=](int64_t first, int64_t last, int threads) {
    decoding::write_some(*model, texts + first, last - first, threads);
  });
  return 0;
}

// The next token of each of some texts, whose logits somebody wanted to see.
extern "C" int draw(drawing::Draw* draws, int64_t count, int64_t size, int) {
  if (size < 1) return BAD_SIZE;
  for (int64_t i = 0; i < count; i++) draws[i].token = drawing::drawn(draws[i], size);
  return 0;
}
