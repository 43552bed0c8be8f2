// Work on several threads: OpenMP's where the compiler has it, because with g++ those are torch's own
// and wide awake; otherwise a pool of ours. Who does what never changes a result: an item is computed
// by one thread, and every thread rounds and flushes as the caller does.
#pragma once

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdint>
#ifdef _OPENMP
#include <omp.h>
#else
#include <condition_variable>
#include <mutex>
#include <pthread.h>
#include <system_error>
#include <thread>
#endif

#ifndef _OPENMP
namespace own __attribute__((visibility("hidden"))) {

// Threads that sleep until there is work. Never destroyed: they may sleep on while a process ends.
class Pool {
 public:
  typedef void (*Job)(const void* state, int worker, int workers);

  void run(int threads, Job job, const void* state) {
    std::unique_lock<std::mutex> turn(running, std::try_to_lock);
    if (!turn || threads <= 1) return job(state, 0, 1);  // somebody else's turn: not worth waiting
    std::unique_lock<std::mutex> lock(mutex);
    while (started < threads - 1 && start()) {
    }
    workers = started < threads - 1 ? started + 1 : threads;
    this->job = job, this->state = state;
    busy = workers - 1, round++;
    int here = workers;
    lock.unlock();
    wake.notify_all();
    job(state, 0, here);
    lock.lock();
    done.wait(lock, [this] { return busy == 0; });
  }

 private:
  bool start() {
    try {
      std::thread([this, worker = started + 1, seen = round] { help(worker, seen); }).detach();
    } catch (const std::system_error&) {
      return false;  // the system gives no more threads: those that are there do the work
    }
    started++;
    return true;
  }

  void help(int worker, uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return round != seen; });
      seen = round;
      if (worker >= workers) continue;
      Job job = this->job;
      const void* state = this->state;
      int workers = this->workers;
      lock.unlock();
      job(state, worker, workers);
      lock.lock();
      if (--busy == 0) done.notify_one();
    }
  }

  std::mutex running, mutex;
  std::condition_variable wake, done;
  int started = 0, workers = 1, busy = 0;
  uint64_t round = 0;
  Job job = nullptr;
  const void* state = nullptr;
};

// A forked process has none of its parent's threads and starts its own.
inline Pool* pool = (pthread_atfork(nullptr, nullptr, [] { pool = new Pool; }), new Pool);

}  // namespace own
#endif

namespace {

// job(worker, workers) once on each of at most `threads` threads, the caller's among them.
template <typename Job>
void on_threads(int threads, const Job& job) {
  if (threads <= 1) return job(0, 1);
  std::fenv_t floats;
  std::fegetenv(&floats);
  auto alike = [&](int worker, int workers) {
    std::fenv_t before;
    std::fegetenv(&before);
    std::fesetenv(&floats);
    job(worker, workers);
    std::fesetenv(&before);
  };
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
  alike(omp_get_thread_num(), omp_get_num_threads());
#else
  typedef decltype(alike) Alike;
  own::pool->run(threads, [](const void* f, int i, int n) { (*(const Alike*)f)(i, n); }, &alike);
#endif
}

// visit(i) for i < count, a run of items by the next thread that is free: one that is held up, by
// work that costs more or by another process on its core, leaves more to the others.
template <typename Visit>
void share_out(int64_t count, int64_t run, int threads, const Visit& visit) {
  std::atomic<int64_t> next{0};
  on_threads(threads, [&](int, int) {
    for (int64_t begin; (begin = next.fetch_add(run)) < count;)
      for (int64_t i = begin; i < std::min(begin + run, count); i++) visit(i);
  });
}

}  // namespace
