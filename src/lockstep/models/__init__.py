"""What is trained: architectures as data, and metrics of their predictions."""
