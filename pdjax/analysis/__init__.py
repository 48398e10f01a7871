"""What runs mean: capacity, targets and verdicts, from measured numbers. Pure Python."""
