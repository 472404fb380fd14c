"""Names: those of training and those that a reference has, the rules that lead from one to the other, the report."""
