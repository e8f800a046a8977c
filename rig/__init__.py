"""The rig: one Cloud TPU VM that builds this project on boot and serves it. Knows nothing of models or tensors."""
