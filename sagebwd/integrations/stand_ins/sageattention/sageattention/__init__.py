"""In the place of SageAttention."""

from sagebwd.integrations.sageattention import *
