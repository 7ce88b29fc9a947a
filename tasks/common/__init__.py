"""What several tasks share: rows, callbacks, the trained model."""
