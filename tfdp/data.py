"""Input data: sources that are read by index, and files that workers divide."""

from tfdp.training.data.file_shards import shard_files
from tfdp.training.data.index_source import from_source

__all__ = ["from_source", "shard_files"]
