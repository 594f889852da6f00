"""What is trained: architectures as data, and how their answers are counted."""
