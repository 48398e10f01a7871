"""The loop: pools, the hand-off between them, and `serve`, the only event loop of the project."""
