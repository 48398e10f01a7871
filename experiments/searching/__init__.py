"""What `experiments.search` is made of: probes, how they are driven, and a module for each goal."""
