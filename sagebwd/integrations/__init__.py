"""Adapters that let other libraries use :func:`sagebwd.sage_attention`; each imports its library itself."""
