"""Whole models: `lw.parallelize`, `lw.restore`, `lw.shard_batch`, and what turns a batch into a right gradient.

transformers is imported only for models that come from it.
"""

from longweave.models.known import register, unregister

__all__ = ["register", "unregister"]
