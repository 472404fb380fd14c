"""What trainers call: one module a trainer, importable where the trainer is not installed."""
