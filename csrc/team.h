// Work shared out on the threads torch already keeps.
#pragma once
#include <cstdint>
#include <functional>

namespace fastdp {

// Calls body(item) for each item of [0, n) on at most `threads` threads, each taking the next item as it becomes free.
// The threads are those of the OpenMP runtime torch runs on, when it can be found in the process: after a parallel region
// that runtime's workers spin for milliseconds, and a second set of threads would share its cores with them.
// Elsewhere they are started for the call. An exception in an item is rethrown.
void team_for(int64_t n, int threads, const std::function<void(int64_t)> &body);

}  // namespace fastdp
