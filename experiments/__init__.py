"""Programs that researchers run; imported by nothing in pdjax."""
