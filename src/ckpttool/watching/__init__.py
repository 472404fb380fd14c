"""``watch``: follow a run, and act once on each checkpoint when it is finished."""
