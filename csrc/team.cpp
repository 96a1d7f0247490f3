#include "team.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <dlfcn.h>
#endif

namespace fastdp {
namespace {

using Parallel = void (*)(void (*)(void *), void *, unsigned, unsigned);

// The entry to a parallel region of the OpenMP runtime beside torch; null where there is none (LLVM's exports it too).
Parallel torch_parallel() {
#if defined(__linux__)
    void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    return torch == nullptr ? nullptr : reinterpret_cast<Parallel>(dlsym(torch, "GOMP_parallel"));
#else
    return nullptr;
#endif
}

struct Team {
    int64_t n;
    const std::function<void(int64_t)> &body;
    std::atomic<int64_t> next{0};
    std::mutex lock;
    std::exception_ptr error;

    void work() {
        try {
            for (int64_t item; (item = next.fetch_add(1)) < n;) body(item);
        } catch (...) {
            next = n;
            std::lock_guard<std::mutex> hold(lock);
            error = std::current_exception();
        }
    }
};

}  // namespace

void team_for(int64_t n, int threads, const std::function<void(int64_t)> &body) {
    Team team{n, body, {}, {}, {}};
    threads = static_cast<int>(std::min<int64_t>(n, std::max(1, threads)));
    if (threads <= 1) {
        team.work();
    } else if (static const Parallel parallel = torch_parallel(); parallel != nullptr) {
        parallel([](void *shared) { static_cast<Team *>(shared)->work(); }, &team, static_cast<unsigned>(threads), 0);
    } else {
        std::vector<std::thread> workers;
        for (int i = 1; i < threads; ++i) workers.emplace_back([&] { team.work(); });
        team.work();
        for (auto &worker : workers) worker.join();
    }
    if (team.error) std::rethrow_exception(team.error);
}

}  // namespace fastdp
