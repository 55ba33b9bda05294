"""Commands: `python -m scripts.NAME --help` explains one."""

from common.errors import hide_tracebacks

hide_tracebacks()

from sagebwd.kernels.cuda.compile import use_private_caches  # noqa: E402 - torch may be missing

use_private_caches()  # before any of them compiles something
