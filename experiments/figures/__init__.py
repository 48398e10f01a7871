"""One module per figure or table. Nothing imports them but the programs of `experiments`."""
