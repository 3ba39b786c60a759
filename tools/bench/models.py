"""The models that the figures of docs/performance.md are about."""

from __future__ import annotations

from tfdp.bench.models import Model

MODELS = {
    "mlp": Model("mlp", 1024),
    "transformer": Model("transformer", 512, num_blocks=6, num_heads=8),
}
