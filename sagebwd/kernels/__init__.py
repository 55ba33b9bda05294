"""The PyTorch operators (``ops``) and the kernel sets that run them, imported when first used.

A kernel set is a folder with a module ``attention`` that has ``forward`` and ``backward``, as
:mod:`sagebwd.kernels.ops` calls them, and rules in :mod:`sagebwd.dispatch`.
"""
