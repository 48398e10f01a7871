"""Pools in processes of their own: the messages between them, and an executor that sends them."""
