"""What a run did, as pure functions of its event log."""
