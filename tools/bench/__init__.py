"""Benchmarks of tfdp against plain Keras, stock TensorFlow and PyTorch, as ratios."""
