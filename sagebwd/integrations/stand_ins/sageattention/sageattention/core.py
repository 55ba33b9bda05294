"""The module of SageAttention that has its functions."""

from sagebwd.integrations.sageattention import *
