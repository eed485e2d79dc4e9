"""Context parallelism for PyTorch: train on sequences longer than one device holds."""
