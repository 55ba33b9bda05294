"""Commands: `python -m scripts.NAME --help` explains one."""

import data  # noqa: F401 - first: it says what is not installed
from sagebwd.kernels.cuda.compile import use_private_caches

use_private_caches()  # before any of them compiles something
