"""What several engines need."""
