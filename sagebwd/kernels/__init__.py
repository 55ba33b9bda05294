"""The PyTorch operators (``ops``) and the kernel sets that run them, imported when first used.

A kernel set is a folder with a module ``attention``, as :mod:`sagebwd.interface` describes it. Its rules are
in :mod:`sagebwd.kernel_rules`.
"""
