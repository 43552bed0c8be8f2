// Causal attention in which query t sees the keys first[t] .. t and no others; fp32, any CPU.
//
// `first` never decreases along a row, so a tile of 64 queries sees one run of keys, walked in
// tiles of 64; on the diagonal the tiles are one vector long and the lanes that see none of their
// keys are left out. Scores are kept transposed, keys down and queries across the vector lanes:
// the maximum and the sum of a query's scores are then lane by lane, and K and V are read where
// they lie. Only the queries (and output gradients) of a tile are turned round. Every product, two
// forward and five backward, is the one routine `multiply` (matmul.h).
//
// Legend: B rows, T tokens, H query heads, K head width, m query in tile, n key in tile.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "matmul.h"

namespace {

constexpr int TILE = 64;
constexpr int MAX_WIDTH = 256;
constexpr float NEVER = -std::numeric_limits<float>::max();

// C = A B, or C += A B.
void multiply(int rows, int width, int depth, const float* A, int64_t ai, int64_t aj,
              const float* B, int64_t bj, float* C, int64_t ci, bool add) {
  auto run = [=](const auto& put) { multiply(rows, width, depth, A, ai, aj, B, bj, 0, ci, put); };
  add ? run(add_to(C)) : run(set(C));
}

struct Tensor {  // (B, H, T, K) with a unit stride in K
  float* data;
  int64_t row, head, token;
  float* at(int64_t b, int64_t h, int64_t t) const { return data + b * row + h * head + t * token; }
};

struct Shape {
  int64_t B, H, KV, T, K;  // KV: key/value heads, a divisor of H
};

struct Tile {
  int b, begin, end;
};

// 64 queries a tile; cut short at a document's start if the tile would otherwise drag more than
// 64 keys of the document before through lanes that do not see them.
std::vector<Tile> query_tiles(const Shape& s, const int32_t* first) {
  std::vector<Tile> tiles;
  for (int b = 0; b < s.B; b++, first += s.T)
    for (int t = 0; t < s.T;) {
      int end = std::min<int>(t + TILE, s.T);
      for (int c = t + 1; c < end; c++)
        if (first[c] == c && c - first[t] > TILE) end = c;
      tiles.push_back({b, t, end});
      t = end;
    }
  return tiles;
}

// What else there is does not fit into a tile's memory, or into its counters.
bool computable(const Shape& s) {
  return s.K > 0 && s.K <= MAX_WIDTH && s.K % LANES == 0 && s.KV > 0 && s.H % s.KV == 0 &&
         std::min(s.B, s.T) >= 0 && std::max(s.B, s.T) < std::numeric_limits<int32_t>::max() - TILE;
}

// Any other first keys would be read outside the tensors.
bool sound(const Shape& s, const int32_t* first) {
  for (int b = 0; b < s.B; b++, first += s.T)
    for (int t = 0, least = 0; t < s.T; least = first[t++])
      if (first[t] < least || first[t] > t) return false;
  return true;
}

struct alignas(64) Scratch {
  float turned_q[MAX_WIDTH * TILE], turned_o[MAX_WIDTH * TILE];  // [k][m]
  float scores[TILE * TILE], slopes[TILE * TILE];                // [n][m]
  float peak[TILE], total[TILE];                                 // [m]
  int32_t query[TILE], first[TILE];                              // [m]
};

// to[k][m] = factor * from[m][k]; lanes past the last query are zero.
void turn(const float* from, int64_t stride, int count, int K, float factor, float* to) {
  std::fill_n(to, K * TILE, 0.f);
  for (int m = 0; m < count; m++)
    for (int k = 0; k < K; k++) to[k * TILE + m] = from[m * stride + k];
  for (int i = 0; i < K * TILE; i += LANES) store(to + i, factor * load(to + i));
}

// Calls visit(n, keys, lo, hi, masked) for the key tiles of a query tile: keys n .. n + keys are
// seen by no lane outside lo .. hi, and by every one inside unless `masked`.
template <typename Visit>
void each_key_tile(const Tile& q, Scratch& s, const int32_t* first, Visit visit) {
  int count = q.end - q.begin;
  for (int m = 0; m < TILE; m++) {
    s.query[m] = q.begin + std::min(m, count - 1);
    s.first[m] = first[s.query[m]];
  }
  for (int n = s.first[0], keys; n < q.end; n += keys) {
    bool diagonal = n >= q.begin;
    keys = diagonal ? std::min(LANES, q.end - n) : std::min(TILE, q.begin - n);
    int lo = diagonal ? n - q.begin : 0;
    int seeing = std::lower_bound(s.first, s.first + count, n + keys) - s.first;
    int hi = (seeing + LANES - 1) / LANES * LANES;
    visit(n, keys, lo, hi, diagonal || s.first[hi - 1] > n);
  }
}

inline ivec hidden(const Scratch& s, int key, int m) {
  return (load(s.query + m) < key) | (load(s.first + m) > key);
}

void forward_tile(const Shape& d, const Tile& tile, int h, const Tensor& q, const Tensor& k,
                  const Tensor& v, const int32_t* first, float scale, const Tensor& out,
                  float* lse) {
  Scratch s;
  int b = tile.b, kv = h / (d.H / d.KV), K = d.K, count = tile.end - tile.begin;
  turn(q.at(b, h, tile.begin), q.token, count, K, scale * LOG2E, s.turned_q);
  std::fill_n(s.turned_o, K * TILE, 0.f);
  std::fill_n(s.peak, TILE, NEVER);
  std::fill_n(s.total, TILE, 0.f);
  each_key_tile(tile, s, first, [&](int n0, int keys, int lo, int hi, bool masked) {
    multiply(keys, hi - lo, K, k.at(b, kv, n0), k.token, 1, s.turned_q + lo, TILE, s.scores + lo,
             TILE, false);
    for (int m = lo; m < hi; m += LANES) {
      float* score = s.scores + m;
      vec old = load(s.peak + m), peak = old, total = vec{};
      for (int n = 0; n < keys; n++) {
        vec x = load(score + n * TILE);
        if (masked) store(score + n * TILE, x = hidden(s, n0 + n, m) ? all(NEVER) : x);
        peak = larger(peak, x);
      }
      for (int n = 0; n < keys; n++) {
        vec p = power_of_two(load(score + n * TILE) - peak);
        if (masked) p = hidden(s, n0 + n, m) ? vec{} : p;  // as many as all, if the seen ones are -inf
        store(score + n * TILE, p);
        total += p;
      }
      vec shrink = power_of_two(old - peak);
      store(s.peak + m, peak);
      store(s.total + m, load(s.total + m) * shrink + total);
      for (int i = m; i < K * TILE; i += TILE) store(s.turned_o + i, load(s.turned_o + i) * shrink);
    }
    multiply(K, hi - lo, keys, v.at(b, kv, n0), 1, v.token, s.scores + lo, TILE, s.turned_o + lo,
             TILE, true);
  });
  for (int m = 0; m < TILE; m += LANES) {
    vec whole = load(s.total + m);
    for (int i = m; i < K * TILE; i += TILE) store(s.turned_o + i, load(s.turned_o + i) / whole);
  }
  for (int m = 0; m < count; m++) {
    float* o = out.at(b, h, tile.begin + m);
    for (int i = 0; i < K; i++) o[i] = s.turned_o[i * TILE + m];
  }
  lse += (b * d.H + h) * d.T + tile.begin;
  for (int m = 0; m < count; m++) lse[m] = s.peak[m] * M_LN2 + std::log(double(s.total[m]));
}

void backward_tile(const Shape& d, const Tile& tile, int h, const Tensor& q, const Tensor& k,
                   const Tensor& v, const int32_t* first, float scale, const Tensor& out,
                   const float* lse, const Tensor& dout, const Tensor& dq, const Tensor& dk,
                   const Tensor& dv) {
  Scratch s;
  int b = tile.b, kv = h / (d.H / d.KV), K = d.K, count = tile.end - tile.begin;
  turn(q.at(b, h, tile.begin), q.token, count, K, scale * LOG2E, s.turned_q);
  turn(dout.at(b, h, tile.begin), dout.token, count, K, 1.f, s.turned_o);
  std::fill_n(s.peak, TILE, 0.f);
  std::fill_n(s.total, TILE, 0.f);
  for (int m = 0; m < count; m++) {
    int t = tile.begin + m;
    s.peak[m] = lse[(b * d.H + h) * d.T + t] * LOG2E;
    const float *o = out.at(b, h, t), *g = dout.at(b, h, t);
    vec dot = vec{};
    for (int i = 0; i < K; i += LANES) dot += load(o + i) * load(g + i);
    s.total[m] = total(dot);
    std::fill_n(dq.at(b, h, t), K, 0.f);
  }
  each_key_tile(tile, s, first, [&](int n0, int keys, int lo, int hi, bool masked) {
    const float *key = k.at(b, kv, n0), *value = v.at(b, kv, n0);
    int t = tile.begin + lo, queries = std::min(hi, count) - lo;
    float *score = s.scores + lo, *slope = s.slopes + lo;
    multiply(keys, hi - lo, K, key, k.token, 1, s.turned_q + lo, TILE, score, TILE, false);
    multiply(keys, hi - lo, K, value, v.token, 1, s.turned_o + lo, TILE, slope, TILE, false);
    for (int n = 0; n < keys; n++)
      for (int m = lo; m < hi; m += LANES) {
        int i = n * TILE + m;
        vec p = power_of_two(load(s.scores + i) - load(s.peak + m));
        if (masked) p = hidden(s, n0 + n, m) ? vec{} : p;
        store(s.scores + i, p);
        store(s.slopes + i, p * (load(s.slopes + i) - load(s.total + m)) * scale);
      }
    multiply(keys, K, queries, score, TILE, 1, dout.at(b, h, t), dout.token, dv.at(b, kv, n0),
             dv.token, true);
    multiply(keys, K, queries, slope, TILE, 1, q.at(b, h, t), q.token, dk.at(b, kv, n0), dk.token,
             true);
    multiply(queries, K, keys, slope, 1, TILE, key, k.token, dq.at(b, h, t), dq.token, true);
  });
}

}  // namespace

extern "C" int attention_forward(const Shape* shape, const Tensor* q, const Tensor* k,
                                  const Tensor* v, const int32_t* first, float scale,
                                  const Tensor* out, float* lse, int threads) {
  if (!computable(*shape)) return BAD_SIZE;
  if (!sound(*shape, first)) return BAD_VALUE;
  auto tiles = query_tiles(*shape, first);
  int64_t items = tiles.size() * shape->H;
  share_out(items, 1, threads, [&](int64_t i) {
    const Tile& tile = tiles[i / shape->H];
    forward_tile(*shape, tile, i % shape->H, *q, *k, *v, first + tile.b * shape->T, scale, *out,
                 lse);
  });
  return 0;
}

// A key's gradient is a sum over query tiles, so one thread takes all tiles from one document's
// start to another's, where nothing before is seen any more: no races, and the same bits for any
// number of threads.
extern "C" int attention_backward(const Shape* shape, const Tensor* q, const Tensor* k,
                                   const Tensor* v, const int32_t* first, float scale,
                                   const Tensor* out, const float* lse, const Tensor* dout,
                                   const Tensor* dq, const Tensor* dk, const Tensor* dv,
                                   int threads) {
  if (!computable(*shape)) return BAD_SIZE;
  if (!sound(*shape, first)) return BAD_VALUE;
  auto tiles = query_tiles(*shape, first);
  std::vector<int> starts;
  for (size_t i = 0; i < tiles.size(); i++)
    if (first[tiles[i].b * shape->T + tiles[i].begin] == tiles[i].begin) starts.push_back(i);
  starts.push_back(tiles.size());
  int64_t KV = shape->KV, group = shape->H / KV, items = (starts.size() - 1) * KV;
  share_out(items, 1, threads, [&](int64_t i) {
    int64_t kv = i % KV, begin = starts[i / KV], end = starts[i / KV + 1];
    for (int64_t j = begin; j < end; j++)
      for (int t = tiles[j].begin; t < tiles[j].end; t++) {
        std::fill_n(dk->at(tiles[j].b, kv, t), shape->K, 0.f);
        std::fill_n(dv->at(tiles[j].b, kv, t), shape->K, 0.f);
      }
    for (int64_t h = kv * group; h < (kv + 1) * group; h++)
      for (int64_t j = begin; j < end; j++)
        backward_tile(*shape, tiles[j], h, *q, *k, *v, first + tiles[j].b * shape->T, scale, *out,
                      lse, *dout, *dq, *dk, *dv);
  });
  return 0;
}
