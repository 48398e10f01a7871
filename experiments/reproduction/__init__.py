"""What `experiments.reproduce` is made of: the papers' figures by families, and their page."""
