"""The cases, one module per group of behaviours of Keras."""
