"""Adapters of PEFT in a state dict: what belongs to which, how much it weighs, how it is fused or written alone."""
