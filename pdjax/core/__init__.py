"""The vocabulary: requests, sequences, plans, time, events, models and their costs. Pure Python."""
