// What Python launches a kernel with must be what the kernel is written for; otherwise it does not compile.
#pragma once

#ifdef LAUNCH_THREADS
#define CHECK_LAUNCH(threads, shared_bytes) static_assert(LAUNCH_THREADS == (threads) && LAUNCH_BYTES == (shared_bytes))
#else
#define CHECK_LAUNCH(threads, shared_bytes) static_assert(true)
#endif
