"""Commands: `python -m scripts.NAME --help` explains one."""

from sagebwd.kernels.cuda.compile import use_private_caches

use_private_caches()  # before any of them compiles something
