"""Whole models: `lw.parallelize`, `lw.restore`, `lw.shard_batch`, and what turns a batch into a right gradient.

Here is what a user adds for modules of their own: a role for a class (`register`), and in an adapter the way between
the model's (1, tokens, …) and the operators' (tokens, …) (`unbatch`, `rebatch`). transformers is imported only for
models that come from it.
"""

from longweave.models.roles import register, unregister
from longweave.models.running import rebatch, unbatch

__all__ = ["rebatch", "register", "unbatch", "unregister"]
