// The head and the loss in one: logits, softcap, softmax, loss and all gradients, some rows at a time, so
// that the logits of a batch are never in memory together; fp32, any CPU.
//
// Legend: D width of the stream, V vocabulary, z a logit after the softcap.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "matmul.h"

namespace {

constexpr int64_t EXACT = 2048;  // terms summed in fp32: 64 an accumulator
constexpr int64_t ROWS = 48;     // of logits that a thread makes at once
constexpr int64_t LARGE = 16384;

// z = cap tanh(x / cap) and its slope 1 - tanh^2. With E = e^(-2 |x| / cap) the tanh is
// (1 - E) / (1 + E), and with w = 1 - tanh = 2 E / (1 + E) the slope is w (2 - w): neither cancels, and
// near the slope of 1 an error of w does not count.
//
// 2 / cap is kept in two parts, since its rounding would shift all logits one way. The first is
// rounded towards zero: the second is then positive, and infinity stays what it is.
struct Softcap {
  float cap, rate = std::nextafter(float(2. / cap), 0.f), rest = 2. / cap - rate;
  struct Value {
    Wide z, slope;
  };
  Value operator()(Wide x) const {
    Wide size = magnitude(x);
    Exp<Wide> E = exponential(size * -rate - size * rest);
    Wide less = E.minus_one(), inverse = 1.f / (less + 2.f), w = 2.f * E.value() * inverse;
    return {with_sign(magnitude(cap * less * inverse), x), 2.f * w - w * w};
  }
};

struct Uncapped {
  struct Value {
    Wide z;
    float slope;
  };
  Value operator()(Wide x) const { return {x, 1.f}; }
};

// The loss of a row, logsumexp(z) - z[target]. If `gradient` is asked for, its gradient times `scale` takes
// the place of the row: (e^(z - peak) / sum - one at the target) times the slope of the cap.
template <bool gradient, typename Cap>
double row_loss(float* x, int64_t V, Cap capped, int64_t target, float scale) {
  Wide peaks = x[0];
  sweep(0, V, [&](auto at) { peaks = larger(peaks, at(x, x[0])); });
  float peak = first(capped(largest(peaks)).z);  // tanh keeps the order
  auto [z, slope] = capped(x[target]);
  double sum = 0;
  for (int64_t begin = 0; begin < V; begin += EXACT) {
    Wide part;
    sweep(begin, std::min(V, begin + EXACT), [&](auto at) {
      auto [z, slope] = capped(at(x));
      Wide e = exponential(z - peak).value();
      part = part + at.counted(e);
      if (gradient) at.put(x, e * slope);
    });
    sum += total(part);
  }
  if (gradient) {
    float share = scale / float(sum);
    sweep(0, V, [=](auto at) { at.put(x, at(x) * share); });
    x[target] = first((exponential(z - peak).value() / float(sum) - 1.f) * slope * scale);
  }
  return double(peak) - first(z) + std::log(sum);
}

template <typename Visit>
void with_cap(float cap, Visit visit) {
  cap ? visit(Softcap{cap}) : visit(Uncapped{});
}

bool all_known(const int64_t* targets, int64_t rows, int64_t V) {
  return std::all_of(targets, targets + rows, [=](int64_t target) { return 0 <= target && target < V; });
}

}  // namespace

// Mean loss of the rows of x under the logits x W^T, and if dx is not null its gradients; all targets are
// ids of the vocabulary.
extern "C" int head_loss(const float* x, const float* W, const int64_t* targets, float cap, float* loss,
                          float* dx, float* dW, int64_t rows, int64_t D, int64_t V, int threads) {
  if (!whole({D}) || V < 1 || !dx != !dW) return BAD_SIZE;
  if (!all_known(targets, rows, V)) return BAD_VALUE;
  // Of a large vocabulary fewer rows, whatever the number of threads: they may fill no more memory.
  int64_t pitch = whole_vectors(V), chunk = std::min(V > LARGE ? SUMMED / 2 : chunk_rows(threads), rows);
  Buffer weights((dx ? 2 : 1) * pitch * D);
  Strips slopes(V, dx ? chunk : 0);
  Panels inputs(D, dx ? chunk : 0);
  Packed widens = pack(W, 1, D, V, D, weights.data, threads), narrows{};
  if (dx) narrows = pack(W, D, 1, D, V, weights.data + pitch * D, threads);
  std::vector<double> losses(rows);
  with_cap(cap, [&](auto capped) {
    int64_t begin = 0;
    do {
      int64_t end = std::min(rows, begin + chunk);
      each_block(begin, end, ROWS, threads, [&](int64_t row, int64_t count) {
        Buffer logits(count * pitch);
        float* z = logits.data;
        product(count, x + row * D, D, widens, z, pitch);
        for (int64_t i = 0; i < count; i++) {
          auto one = dx ? row_loss<true, decltype(capped)> : row_loss<false, decltype(capped)>;
          losses[row + i] = one(z + i * pitch, V, capped, targets[row + i], 1.f / rows);
        }
        if (!dx) return;
        product(count, z, pitch, narrows, dx + row * D, D);
        slopes.put(row - begin, z, count, pitch);
        inputs.put(row - begin, x + row * D, count);
      });
      if (dx) sum_products({{slopes, inputs, dW}}, end - begin, begin, threads);
    } while ((begin += chunk) < rows);
  });
  *loss = std::accumulate(losses.begin(), losses.end(), 0.) / rows;
  return 0;
}

// The loss of every row of x, for those who judge texts one by one; no gradients.
extern "C" int token_losses(const float* x, const float* W, const int64_t* targets, float cap, float* losses,
                            int64_t rows, int64_t D, int64_t V, int threads) {
  if (!whole({D}) || V < 1) return BAD_SIZE;
  if (!all_known(targets, rows, V)) return BAD_VALUE;
  int64_t pitch = whole_vectors(V);
  Buffer weights(pitch * D);
  Packed widens = pack(W, 1, D, V, D, weights.data, threads);
  with_cap(cap, [&](auto capped) {
    each_block(0, rows, ROWS, threads, [&](int64_t row, int64_t count) {
      Buffer logits(count * pitch);
      product(count, x + row * D, D, widens, logits.data, pitch);
      for (int64_t i = 0; i < count; i++)
        losses[row + i] = row_loss<false>(logits.data + i * pitch, V, capped, targets[row + i], 1.f);
    });
  });
  return 0;
}
