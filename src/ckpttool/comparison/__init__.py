"""``diff``: two checkpoints of any kinds, name by name and value by value."""
