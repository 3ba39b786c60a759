"""keras_hooks."""
