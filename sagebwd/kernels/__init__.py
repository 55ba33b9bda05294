"""The PyTorch operators (``ops``) and the kernel sets that run them, imported when first used.

A kernel set is a folder with a module ``attention`` that has ``forward``, ``backward`` and ``token_mean``, as
:mod:`sagebwd.kernels.ops` calls them. Its rules are in :mod:`sagebwd.kernel_rules`.
"""
