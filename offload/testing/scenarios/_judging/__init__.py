"""What was wrong with a run: the invariants, the bytes, the model, the causes, the expectations."""
