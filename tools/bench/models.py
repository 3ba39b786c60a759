"""The models that the figures of docs/reports/performance.md are about."""

from __future__ import annotations

from tfdp.launch.bench.models import Model

MODELS = {
    "mlp": Model("mlp", 1024),
    "transformer": Model("transformer", 512, num_blocks=6, num_heads=8),
}
# 200 MB of float32: the model whose parameters are sharded.
LARGE = Model("transformer", 768, num_blocks=7, num_heads=12)
# As many layers, and next to no parameters: what a process has beside its tensors.
EMPTY = Model("transformer", 24, num_blocks=7, num_heads=12)
