"""A gradient synchronization engine for PyTorch."""
