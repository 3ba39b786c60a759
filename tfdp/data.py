"""Input data: data sources with random access, and files sharded over workers."""

from tfdp.training.data.file_shards import shard_files
from tfdp.training.data.index_source import from_source

__all__ = ["from_source", "shard_files"]
