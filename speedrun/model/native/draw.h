// A token drawn from its logits (serve/sampling.py says how).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vec.h"

namespace drawing {
namespace {

// What one text asks for; `uniform` is its random number in [0, 1).
struct Draw {
  const float* logits;
  double temperature, top_p, uniform;
  int64_t top_k, token;  // the token is the answer: -1 if the logits are no numbers
};

struct Candidate {
  float score;
  int64_t token;
  // The likelier first, of equal ones the first.
  bool operator<(const Candidate& other) const {
    return score > other.score || (score == other.score && token < other.token);
  }
};

// The k likeliest in order. Most tokens are less likely than the least of those found so far, which is
// all that is asked of them.
void likeliest(const float* logits, int64_t size, int64_t k, std::vector<Candidate>& found) {
  for (int64_t i = 0; i < size; i++) {
    if (int64_t(found.size()) == k) {
      if (!(logits[i] > found.front().score)) continue;
      std::pop_heap(found.begin(), found.end());
      found.pop_back();
    }
    found.push_back({logits[i], i});
    std::push_heap(found.begin(), found.end());
  }
  std::sort_heap(found.begin(), found.end());
}

// The greatest logit; no number if one of them is none, or infinite. Not inlined into a loop over
// texts, whose few scalar operations the test of the object code would take for a hot loop's.
__attribute__((noinline)) float peak_of(const float* logits, int64_t size) {
  Wide peaks = logits[0], none;
  sweep(0, size, [&](auto at) {
    Wide x = at(logits, logits[0]);
    peaks = larger(peaks, x);
    none = none + (x - x);
  });
  return total(none) == 0 ? largest(peaks) : NAN;
}

// Of all tokens in the order of their ids, by odds in fp32: 32 at a time, then among the right 32.
__attribute__((noinline)) int64_t drawn_of_all(const Draw& d, int64_t size, float peak) {
  std::vector<float> odds(size);
  std::vector<double> sums;
  float cold = std::max<float>(1 / d.temperature, 1e-37f);  // not 0: a difference may be infinite
  double sum = 0;
  sweep(0, size, [&](auto at) {
    Wide x = at.counted(exponential((at(d.logits) - peak) * cold).value());
    at.put(odds.data(), x);
    sums.push_back(sum += total(x));
  });
  double place = d.uniform * sum;
  size_t some = std::upper_bound(sums.begin(), sums.end(), place) - sums.begin();
  int64_t i = std::min<int64_t>(some * WIDE, (size - 1) / WIDE * WIDE);
  place -= i ? sums[i / WIDE - 1] : 0;
  for (int64_t last = std::min(i + WIDE, size) - 1; i < last && (place -= odds[i]) >= 0;) i++;
  while (odds[i] == 0) i--;  // what rounding left over falls to the last that can be
  return i;
}

__attribute__((noinline)) int64_t drawn(const Draw& d, int64_t size) {
  float peak = peak_of(d.logits, size);
  if (std::isnan(peak)) return -1;
  if (d.temperature == 0) return std::find(d.logits, d.logits + size, peak) - d.logits;
  bool few = d.top_k > 0 && d.top_k < size;
  if (!few && d.top_p >= 1 && d.temperature > 1e-30) return drawn_of_all(d, size, peak);
  std::vector<Candidate> candidates;
  if (few) likeliest(d.logits, size, d.top_k, candidates);
  else
    for (int64_t i = 0; i < size; i++) candidates.push_back({d.logits[i], i});
  if (!few) std::sort(candidates.begin(), candidates.end());
  std::vector<double> sums(candidates.size());
  double sum = 0;
  for (size_t i = 0; i < candidates.size(); i++)
    sums[i] = sum += std::exp((double(candidates[i].score) - peak) / d.temperature);
  size_t count = sums.size();
  if (d.top_p < 1)
    count = std::min<size_t>(
        count, std::lower_bound(sums.begin(), sums.end(), d.top_p * sum) - sums.begin() + 1);
  auto place = std::upper_bound(sums.begin(), sums.begin() + count, d.uniform * sums[count - 1]);
  return candidates[std::min<size_t>(place - sums.begin(), count - 1)].token;
}

}  // namespace
}  // namespace drawing
